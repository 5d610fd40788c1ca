"""Finds the brokers that have a topic: from the command line, or by asking discovery services."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...framework.errors import Failure, lookupd_unreachable
from ...framework.output import print_diagnostic

if TYPE_CHECKING:
    from .options import ToParquetOptions

LOOKUPD_TIMEOUT_S = 5.0


def find_brokers(options: ToParquetOptions) -> Sequence[str]:
    """The brokers' addresses. Raises Failure: no discovery service names any."""
    if not options.lookupd_addresses:
        return options.broker_addresses
    return _ask_lookupds(options.lookupd_addresses, options.topic, over_tcp=options.consume)


def _ask_lookupds(addresses: Sequence[str], topic: str, *, over_tcp: bool) -> list[str]:
    """The HTTP or TCP addresses of all brokers that have a topic.

    Raises:
        Failure: There is none, or no service answers.
    """
    import trio

    from trio_nsq.lookup.query import LookupFailed, lookup_topic
    from trio_nsq.protocol.address import format_address

    from ...framework.signals import run_until_signal

    found: dict[str, None] = {}
    failures: list[LookupFailed] = []

    async def ask(address: str) -> None:
        try:
            for broker in await lookup_topic(address, topic, timeout_s=LOOKUPD_TIMEOUT_S):
                port = broker.tcp_port if over_tcp else broker.http_port
                found[format_address(broker.broadcast_address, port)] = None
        except LookupFailed as failure:
            failures.append(failure)

    async def ask_all() -> None:
        async with trio.open_nursery() as nursery:
            for address in addresses:
                nursery.start_soon(ask, address)

    run_until_signal(ask_all)
    if len(failures) == len(addresses):
        raise lookupd_unreachable(failures[0].address, failures[0].reason)
    for failure in failures:
        print_diagnostic(f"Warning: {failure}; brokers that only it knows are left out.")
    if not found:
        raise Failure(f"No broker that the discovery services name has topic {topic}.")
    return sorted(found)
