"""`tail` of channels: receives messages, writes them, and only then finishes them.

Without a channel, at a broker without private channels, such as nsqd, it first checks that it may consume.
"""

import json
import random
from functools import partial
from itertools import islice

import trio

from trio_nsq.client import ConnectionFailed, Consumer, MessageBatch
from trio_nsq.protocol.address import format_address
from trio_nsq.protocol.names import is_ephemeral

from ...broker.address_options import HTTP_OPTION
from ...broker.admin_client import AdminClient
from ...broker.connection_options import ConnectOptions
from ...broker.discovery import ask_lookupds
from ...broker.failures import connection_failure, lookupd_unreachable
from ...framework.errors import ExitCode, Failure, leaf_exceptions
from ...framework.output import body_field, print_diagnostic, show_library_warnings, silence_library
from ...framework.signals import watch_signals
from .options import TAKE_BACKLOG, TailOptions
from .printer import Printer

IDLE_S, REDISTRIBUTE_S = 1.0, 0.5
"""With more brokers than messages wanted: how soon another is asked if one has nothing. Somebody is watching."""


def _json(topic: str, batch: MessageBatch, count: int) -> bytes:
    """A JSON object per line."""
    lines = []
    for body, id_, timestamp_ns, attempts in islice(
        zip(batch.bodies, batch.ids, batch.timestamps_ns, batch.attempts, strict=True), count
    ):
        record: dict[str, object] = {
            "topic": topic,
            "id": id_.decode("ascii", "replace"),
            "timestamp_ns": timestamp_ns,
            "attempts": attempts,
        } | body_field(body)
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    return "".join(lines).encode()


class ConsumerPrinter(Printer[Consumer]):
    """Writes what consumers receive, and finishes it then."""

    async def pass_on(self, topic: str, source: Consumer) -> None:
        """Print the messages of a consumer."""
        async for batch in source.batches():
            count = await self.print(len(batch), partial(self._render, topic, batch))
            # Before there is room for others: the broker counts each delivery as an attempt.
            source.max_in_flight = int(min(source.max_in_flight, self.messages_left))
            if count == len(batch):
                batch.finish()
            else:
                for message in islice(batch, count):
                    message.finish()

    def _render(self, topic: str, batch: MessageBatch, count: int) -> bytes:
        """The output for the first messages of a batch."""
        if self.as_json:
            return _json(topic, batch, count)
        return self.raw(topic, batch.bodies if count == len(batch) else batch.bodies[:count])


async def tail_channels(options: TailOptions) -> ExitCode:
    """Write what channels deliver; returns the exit code.

    Raises:
        Failure: No broker can be reached, or a private channel would take a topic's backlog.
    """
    if len(options.nsqd_tcp_addresses) > 1 and not options.lookupd_addresses:
        show_library_warnings()  # others go on while one of them is away
    else:
        silence_library()
    connecting = ConnectOptions.of_command().options()
    consumers = []
    for each in options.sources:
        channel = each.channel or f"tail{random.randrange(10**6):06d}#ephemeral"
        consumer = Consumer(
            each.topic,
            channel,
            nsqd_tcp_addresses=[] if options.lookupd_addresses else options.nsqd_tcp_addresses,
            lookupd_http_addresses=options.lookupd_addresses,
            max_in_flight=min(options.max_in_flight, options.count or options.max_in_flight),
            private_channel=each.channel is None,
            low_rdy_idle_timeout_s=IDLE_S,
            rdy_redistribute_interval_s=REDISTRIBUTE_S,
            **connecting,
        )
        consumer.without_private_channels = SharedChannel(options, each.topic, channel).check
        consumers.append((each.topic, consumer))
    printer = ConsumerPrinter(options)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(watch_signals, printer.stop)
            await printer.run(
                consumers, f"Waiting for messages of {', '.join(map(str, options.sources))}; Ctrl-C ends."
            )
            nursery.cancel_scope.cancel()
    except* ConnectionFailed as group:
        (error, *_) = leaf_exceptions(group)
        assert isinstance(error, ConnectionFailed)
        if options.lookupd_addresses:
            raise lookupd_unreachable(error.address, error.reason) from None
        raise connection_failure(error) from None
    return printer.stopped or ExitCode.OK


class SharedChannel:
    """Decides whether an ordinary ephemeral channel may stand in for a private one.

    The first channel of a topic gets all messages that wait there, and an ephemeral one takes them along when it goes.
    Other ephemeral channels may go at any time, so only a durable one protects what waits.
    """

    def __init__(self, options: TailOptions, topic: str, channel: str) -> None:
        self._options = options
        self._topic = topic
        self._channel = channel
        self._connecting = ConnectOptions.of_command()
        self._warned: set[str] = set()

    async def check(self, address: str) -> None:
        """Return if the channel may be made at this broker, `host:port` over TCP, with a warning the first time.

        Raises Failure: it would take what waits for the topic's first channel, or that cannot be known.
        """
        if not self._options.take_backlog:
            channels = await self._channels(address)
            if channels is None:
                raise Failure(
                    f"The broker at {address} has no private channels, and no HTTP address of it is known that tells "
                    f"whether {self._topic} has a channel: if it has none, this command would take all messages that "
                    f"wait there. Name that address with {HTTP_OPTION}, or allow it with {TAKE_BACKLOG}.",
                    ExitCode.USAGE,
                )
            if all(map(is_ephemeral, channels)):
                raise Failure(
                    f"Topic {self._topic} has no durable channel on {address}, which has no private channels: this "
                    "command's would be the only one, or may become it, and would take along all messages that wait "
                    f"there. Create a durable one first, with 'qcli channel create {self._topic}/CHANNEL', or allow "
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
        """The names of the topic's channels there, as far as it has the topic; None if nobody could tell."""
        for candidate in [*self._options.nsqd_http_addresses, *await self._named_by_lookupds(address)]:
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
        # What the discovery services that do not answer might have said, the consumer has reported.
        found, _ = await ask_lookupds(self._options.lookupd_addresses, self._topic)
        return [
            format_address(broker.broadcast_address, broker.http_port)
            for broker in found
            if format_address(broker.broadcast_address, broker.tcp_port) == address and broker.http_port
        ]
