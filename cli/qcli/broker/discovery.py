"""Asks discovery services which brokers have a topic."""

from collections.abc import Iterable

import trio

from trio_nsq.api.lookupd import ProducerAddress
from trio_nsq.lookup.hosts import host_filter
from trio_nsq.lookup.query import LookupFailed, lookup_topic

from ..framework.output import print_diagnostic
from .connection_options import ConnectOptions

TIMEOUT_S = 5.0


async def ask_lookupds(
    addresses: Iterable[str], topic: str, connecting: ConnectOptions, allowed_hosts: Iterable[str] = ()
) -> tuple[list[ProducerAddress], list[LookupFailed]]:
    """Return the brokers that have a topic, from these services, and the errors of services that do not answer.

    Brokers on hosts that are not allowed are left out, with a warning.
    """
    found: list[ProducerAddress] = []
    failures: list[LookupFailed] = []
    is_allowed = host_filter(allowed_hosts)
    tls, token = connecting.lookupd_context(), connecting.auth_secret

    async def ask(address: str) -> None:
        try:
            found.extend(await lookup_topic(address, topic, timeout_s=TIMEOUT_S, tls=tls, token=token))
        except LookupFailed as failure:
            failures.append(failure)

    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(ask, address)
    foreign = sorted({each.broadcast_address for each in found if not is_allowed(each.broadcast_address)})
    for host in foreign:
        print_diagnostic(f"Warning: {host!r} is not among the hosts of --lookupd-allowed-host; left out.")
    return [each for each in found if is_allowed(each.broadcast_address)], failures
