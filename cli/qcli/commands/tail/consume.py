"""`tail` of channels: receives messages, writes them, and only then finishes them."""

from __future__ import annotations

import json
import random
from functools import partial
from itertools import islice

import trio

from trio_nsq.client import ConnectionFailed, Consumer, MessageBatch

from ...broker.address_options import TCP_OPTION
from ...broker.connection_options import ConnectOptions
from ...framework.errors import connection_failure, leaf_exceptions, lookupd_unreachable
from ...framework.exit_codes import ExitCode
from ...framework.output import body_field, show_library_warnings, silence_library
from ...framework.signals import watch_signals
from .options import TailOptions
from .printer import Printer
from .private_channel import SharedChannel

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
        consumer.without_private_channels = SharedChannel(
            each.topic,
            channel,
            http_addresses=list(options.nsqd_http_addresses),
            lookupd_addresses=options.lookupd_addresses,
            take_backlog=options.take_backlog,
        ).check
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
        raise connection_failure(error.address, TCP_OPTION, error) from None
    return printer.stopped or ExitCode.OK
