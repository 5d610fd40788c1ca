"""Asks discovery services which brokers have a topic."""

from collections.abc import Iterable

import trio

from trio_nsq.lookup.query import LookupFailed, ProducerAddress, lookup_topic

TIMEOUT_S = 5.0


async def ask_lookupds(
    addresses: Iterable[str], topic: str
) -> tuple[list[ProducerAddress], list[LookupFailed]]:
    """Return the brokers that have a topic, from these services, and the errors of services that do not answer."""
    found: list[ProducerAddress] = []
    failures: list[LookupFailed] = []

    async def ask(address: str) -> None:
        try:
            found.extend(await lookup_topic(address, topic, timeout_s=TIMEOUT_S))
        except LookupFailed as failure:
            failures.append(failure)

    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(ask, address)
    return found, failures
