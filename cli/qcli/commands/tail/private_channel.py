"""`tail` without a channel at a broker without private channels, such as nsqd: when it may consume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

from trio_nsq.protocol.names import is_ephemeral

from ...broker.address_options import HTTP_OPTION
from ...broker.admin_client import AdminClient
from ...broker.connection_options import ConnectOptions
from ...framework.errors import Failure
from ...framework.exit_codes import ExitCode
from ...framework.output import print_diagnostic
from .options import TAKE_BACKLOG

if TYPE_CHECKING:
    from trio_nsq.lookup.query import ProducerAddress

LOOKUP_TIMEOUT_S = 5.0


class SharedChannel:
    """Decides whether an ordinary ephemeral channel may stand in for a private one.

    The first channel of a topic gets all messages that wait there, and an ephemeral one takes them along when it goes.
    Other ephemeral channels may go at any time, so only a durable one protects what waits.

    Args:
        topic: The topic.
        channel: The channel that SUB would make.
        http_addresses: HTTP addresses of brokers, as the command line has them; each may be another broker's.
        lookupd_addresses: Discovery services, which know more of them.
        take_backlog: The user allows it for any topic.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        http_addresses: Sequence[str],
        lookupd_addresses: Sequence[str],
        take_backlog: bool,
    ) -> None:
        self._topic = topic
        self._channel = channel
        self._http_addresses = http_addresses
        self._lookupd_addresses = lookupd_addresses
        self._take_backlog = take_backlog
        self._connecting = ConnectOptions.of_command()
        self._warned: set[str] = set()

    async def check(self, address: str) -> None:
        """Return if the channel may be made at this broker, `host:port` over TCP, with a warning the first time.

        Raises:
            Failure: It would take what waits for the topic's first channel, or that cannot be known.
        """
        if not self._take_backlog:
            channels = await self._channels(address)
            if channels is None:
                raise self._refusal(
                    f"The broker at {address} has no private channels, and no HTTP address of it is known that tells "
                    f"whether {self._topic} has a channel: if it has none, this command would take all messages that "
                    f"wait there. Name that address with {HTTP_OPTION}, or allow it with {TAKE_BACKLOG}."
                )
            if all(map(is_ephemeral, channels)):
                raise self._refusal(
                    f"Topic {self._topic} has no durable channel on {address}, which has no private channels: this "
                    "command's would be the only one, or may become it, and would take along all messages that wait "
                    f"there. Create a durable one first, with 'qcli channel create {self._topic}/CHANNEL', or allow "
                    f"it with {TAKE_BACKLOG}."
                )
        if address not in self._warned:
            self._warned.add(address)
            print_diagnostic(
                f"Warning: the broker at {address} has no private channels: {self._channel} is an ordinary channel, "
                "which gets a copy of every message until this command ends."
            )

    def _refusal(self, text: str) -> Failure:
        return Failure(text, ExitCode.USAGE)

    async def _channels(self, address: str) -> set[str] | None:
        """The names of the topic's channels there, as far as it has the topic; None if nobody could tell."""
        for candidate in [*self._http_addresses, *await self._named_by_lookupds(address)]:
            try:
                return await trio.to_thread.run_sync(self._ask, candidate, address)
            except Failure:
                continue  # another broker's address, or none that is open to us
        return None

    def _ask(self, http_address: str, tcp_address: str) -> set[str]:
        """Raises Failure: no broker answers there, or another one."""
        broker = AdminClient(http_address, self._connecting)
        if not broker.listens_at(tcp_address):
            raise Failure(f"{http_address} is another broker's")
        topics = broker.stats(self._topic)["topics"]
        return {channel["channel_name"] for topic in topics for channel in topic["channels"] or []}

    async def _named_by_lookupds(self, address: str) -> list[str]:
        from trio_nsq.lookup.query import LookupFailed, lookup_topic
        from trio_nsq.protocol.address import format_address

        found: list[ProducerAddress] = []
        for lookupd in self._lookupd_addresses:
            try:
                found += await lookup_topic(lookupd, self._topic, timeout_s=LOOKUP_TIMEOUT_S)
            except LookupFailed:
                continue  # the consumer has said so
        return [
            format_address(broker.broadcast_address, broker.http_port)
            for broker in found
            if format_address(broker.broadcast_address, broker.tcp_port) == address and broker.http_port
        ]
