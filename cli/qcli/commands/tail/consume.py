"""`tail` of channels: receives messages, writes them, then finishes them.

Without a channel, on a broker without private channels such as nsqd, it first checks that it would not take a backlog.
"""

import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice

import trio

from trio_nsq.client import AuthRefused, ConnectionFailed, Consumer, MessageBatch
from trio_nsq.protocol.address import format_address
from trio_nsq.protocol.message_json import json_lines, message_record
from trio_nsq.protocol.names import is_ephemeral
from trio_nsq.text.wording import count_of

from ...broker.address_options import HTTP_OPTION
from ...broker.admin_client import channels_by_topic, client_of
from ...broker.connection_options import ConnectOptions
from ...broker.discovery import ask_lookupds
from ...broker.failures import connection_failure, lookupd_unreachable, note_if_slow
from ...framework.errors import ExitCode, Failure, leaf_exceptions
from ...framework.output import print_diagnostic, show_library_warnings, silence_library
from ...framework.signals import at_first_signal
from ..shared.format_string import MessageColumns
from .options import TAKE_BACKLOG, TailOptions
from .printer import Printer

IDLE_S, REDISTRIBUTE_S = 1.0, 0.5
"""With more brokers than wanted messages: how soon RDY moves from an idle broker to another one."""


def _json(topic: str, batch: MessageBatch, bodies: Sequence[bytes], count: int) -> bytes:
    messages = zip(bodies, batch.ids, batch.timestamps_ns, batch.attempts, batch.headers, strict=True)
    records = (
        message_record(topic, id_.decode("ascii", "replace"), timestamp_ns, attempts, body, headers=headers)
        for body, id_, timestamp_ns, attempts, headers in islice(messages, count)
    )
    return json_lines(records).encode()


def _columns(topic: str, channel: str, batch: MessageBatch, bodies: Sequence[bytes]) -> MessageColumns:
    return MessageColumns(
        bodies=bodies,
        ids=batch.ids,
        topics=topic.encode(),
        channels=channel.encode(),
        timestamps_ns=batch.timestamps_ns,
        attempts=batch.attempts,
        brokers=[message.nsqd_address.encode() for message in batch]
        if "," in batch.nsqd_address
        else batch.nsqd_address.encode(),
        headers=batch.headers,
    )


class ConsumerPrinter(Printer[Consumer]):
    """Writes the messages of consumers, then finishes them.

    Attributes:
        connected: The number of brokers that each consumer was connected to at the end, or more.

    Args:
        channels: The channel of each consumer, as the user named it; empty: none.
    """

    def __init__(self, options: TailOptions, channels: Mapping[Consumer, str]) -> None:
        super().__init__(options)
        self._channels = channels
        self.connected = sys.maxsize

    async def pass_on(self, topic: str, source: Consumer) -> None:
        try:
            async for batch in source.batches():
                count = await self.print(len(batch), partial(self._render, topic, source, batch))
                # Before finishing, which lets the broker deliver more: each delivery counts as an attempt.
                source.max_in_flight = int(min(source.max_in_flight, self.messages_left))
                if count == len(batch):
                    batch.finish()
                else:
                    for message in islice(batch, count):
                        message.finish()
        finally:
            self.connected = min(self.connected, source.stats().connections)

    def _render(self, topic: str, source: Consumer, batch: MessageBatch, count: int) -> bytes:
        bodies = self.bodies_of(topic, batch.bodies)
        if self.as_json:
            return _json(topic, batch, bodies, count)
        if self.template is not None:
            return self.template.render(_columns(topic, self._channels[source], batch, bodies), count)
        return self.raw(topic, bodies if count == len(batch) else bodies[:count])


async def tail_channels(options: TailOptions) -> ExitCode:
    """Write the messages of channels and return the exit code.

    Raises:
        Failure: No broker is reachable, or an ordinary channel would take a topic's backlog.
    """
    if options.nsqd_tcp_addresses and len(options.nsqd_tcp_addresses + options.lookupd_addresses) > 1:
        show_library_warnings()  # other brokers continue while one is unreachable
    else:
        silence_library()
    connecting = ConnectOptions.of_command().options()
    consumers = []
    for each in options.sources:
        channel = each.channel or f"tail{random.randrange(10**6):06d}#ephemeral"
        consumer = Consumer(
            each.topic,
            channel,
            nsqd_tcp_addresses=options.nsqd_tcp_addresses,
            lookupd_http_addresses=options.lookupd_addresses,
            lookupd_allowed_hosts=options.lookupd_allowed_hosts,
            max_in_flight=min(options.max_in_flight, options.count or options.max_in_flight),
            private_channel=each.channel is None,
            low_rdy_idle_timeout_s=IDLE_S,
            rdy_redistribute_interval_s=REDISTRIBUTE_S,
            **connecting,
        )
        consumer.without_private_channels = SharedChannel(options, each.topic, channel).check
        consumers.append((each.topic, consumer))
    channels = {
        consumer: each.channel or "" for each, (_, consumer) in zip(options.sources, consumers, strict=True)
    }
    printer = ConsumerPrinter(options, channels)
    try:
        async with trio.open_nursery() as nursery:
            at_first_signal(printer.stop)
            servers = options.nsqd_tcp_addresses + options.lookupd_addresses
            nursery.start_soon(note_if_slow, servers, printer.opened)
            await printer.run(consumers, lambda: _welcome(options, consumers))
            nursery.cancel_scope.cancel()
    except* ConnectionFailed as group:
        (error, *_) = leaf_exceptions(group)
        assert isinstance(error, ConnectionFailed)
        only_lookupds = options.lookupd_addresses and not options.nsqd_tcp_addresses
        if only_lookupds and not isinstance(error, AuthRefused):
            raise lookupd_unreachable(error.address, error.reason) from None
        raise connection_failure(error) from None
    if printer.stopped:
        return printer.stopped
    away = len(options.nsqd_tcp_addresses) - printer.connected
    if away > 0 and printer.messages_left and not options.lookupd_addresses:
        raise Failure(
            f"The idle timeout expired while {away} of {count_of(len(options.nsqd_tcp_addresses), 'broker')} "
            f"{'was' if away == 1 else 'were'} unreachable; the warnings say which. Messages may be missing.",
            ExitCode.PARTIAL,
        )
    return ExitCode.OK


def _welcome(options: TailOptions, consumers: Sequence[tuple[str, Consumer]]) -> str:
    """Return what a user sees while there are no messages."""
    text = f"Waiting for messages of {', '.join(map(str, options.sources))}; Ctrl-C ends."
    if missing := [topic for topic, consumer in consumers if not consumer.stats().connections]:
        text += (
            f"\nNote: no broker that is registered at {', '.join(options.lookupd_addresses)} has "
            f"{' or '.join(missing)} yet. 'qcli serve --lookupd-tcp-address HOST:4160' registers."
        )
    return text


class SharedChannel:
    """Decides whether an ordinary ephemeral channel may replace a private one.

    The first channel of a topic gets the topic's backlog, and an ephemeral channel deletes it with itself.
    Other ephemeral channels may be deleted at any time, so only a durable channel protects the backlog.
    """

    def __init__(self, options: TailOptions, topic: str, channel: str) -> None:
        self._options = options
        self._topic = topic
        self._channel = channel
        self._connecting = ConnectOptions.of_command()
        self._warned: set[str] = set()

    async def check(self, address: str) -> None:
        """Return if the channel may be created at this broker (TCP address), with a warning the first time.

        Raises Failure: it would take the topic's backlog, or this cannot be determined.
        """
        if not self._options.take_backlog:
            channels = await self._channels(address)
            if channels is None:
                raise Failure(
                    f"The broker at {address} has no private channels, and its HTTP address, which could tell whether "
                    f"{self._topic} has a channel, is not known: if it has none, this command would take the topic's "
                    f"backlog. Give that address with {HTTP_OPTION}, or allow it with {TAKE_BACKLOG}.",
                    ExitCode.USAGE,
                )
            if all(map(is_ephemeral, channels)):
                raise Failure(
                    f"Topic {self._topic} has no durable channel on {address}, which has no private channels: this "
                    "command would take the topic's backlog and lose it at the end. "
                    f"Create a durable channel first: 'qcli channel create {self._topic}/CHANNEL', or allow "
                    f"it with {TAKE_BACKLOG}.",
                    ExitCode.USAGE,
                )
        if address not in self._warned:
            self._warned.add(address)
            print_diagnostic(
                f"Warning: the broker at {address} has no private channels: {self._channel} is an ordinary channel, "
                "which gets a copy of every message until this command ends."
            )

    async def _channels(self, address: str) -> set[str] | None:
        """Return the names of the topic's channels at this broker; None: unknown."""
        candidates = [*self._options.nsqd_http_addresses, *await self._named_by_lookupds(address)]

        def ask() -> set[str] | None:
            with suppress(Failure):
                broker = client_of(address, candidates, self._connecting)
                if broker is not None:
                    return {*channels_by_topic(broker.stats(self._topic)["topics"]).get(self._topic, ())}
            return None

        return await trio.to_thread.run_sync(ask)

    async def _named_by_lookupds(self, address: str) -> list[str]:
        # The consumer reports discovery services that do not answer.
        found, _ = await ask_lookupds(
            self._options.lookupd_addresses,
            self._topic,
            self._connecting,
            self._options.lookupd_allowed_hosts,
        )
        return [
            format_address(broker.broadcast_address, broker.http_port)
            for broker in found
            if format_address(broker.broadcast_address, broker.tcp_port) == address and broker.http_port
        ]
