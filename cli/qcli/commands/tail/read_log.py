"""`tail` of topics' logs: reads old and new messages."""

from collections.abc import Sequence
from functools import partial

import trio

from trio_nsq.client.reading.batches import is_for_all_channels
from trio_nsq.client.reading.topic_reader import TopicReader
from trio_nsq.log import RecordBatch

from ...broker.connection_options import ConnectOptions
from ...broker.topic_log import reading_errors, report_gap, report_start
from ...framework.errors import ExitCode
from ...framework.output import json_lines, silence_library
from ...framework.params import without_scheme
from ...framework.signals import watch_signals
from ..shared.messages import log_record
from .options import TailOptions
from .printer import Printer


def _json(topic: str, batches: Sequence[RecordBatch], count: int) -> bytes:
    """Return a JSON object per line."""
    records = (
        log_record(topic, batch, index, body)
        for batch in batches
        for index, body in enumerate(batch.messages.bodies())
    )
    return json_lines(record for _, record in zip(range(count), records, strict=False)).encode()


class LogPrinter(Printer[TopicReader]):
    """Writes the messages of readers; `damaged` says whether damaged messages were skipped."""

    def __init__(self, options: TailOptions) -> None:
        super().__init__(options)
        self.damaged = False
        self._first = options.first

    async def pass_on(self, topic: str, source: TopicReader) -> None:
        """Print the messages of a reader."""
        report_start(topic, source, self._first)
        while found := await source.receive():
            batches: list[RecordBatch] = []
            for each in found:
                if isinstance(each, RecordBatch):
                    if is_for_all_channels(each):
                        batches.append(each)
                    continue
                await self._print(topic, batches)
                batches = []
                self.damaged |= report_gap(topic, each.first_sequence, each.next_sequence, each.reason)
            await self._print(topic, batches)

    async def _print(self, topic: str, batches: list[RecordBatch]) -> None:
        if count := sum(batch.count for batch in batches):
            await self.print(count, partial(self._render, topic, batches))

    def _render(self, topic: str, batches: Sequence[RecordBatch], count: int) -> bytes:
        """Return the output for the first messages of batches."""
        if self.as_json:
            return _json(topic, batches, count)
        return self.raw(topic, [body for batch in batches for body in batch.messages.bodies()][:count])


async def tail_log(options: TailOptions) -> ExitCode:
    """Write the messages of the topics' logs and return the exit code. Raises Failure: a log cannot be read."""
    silence_library()
    (address,) = options.nsqd_http_addresses
    connecting = ConnectOptions.of_command()
    tls = connecting.https_context(address)
    readers = [
        (
            each.topic,
            TopicReader(
                without_scheme(address),
                each.topic,
                tls=tls,
                auth_secret=connecting.auth_secret,
                start=options.first or "earliest",
                end=options.end,
                follow=options.end is None,
                max_messages=options.count,
            ),
        )
        for each in options.sources
    ]
    printer = LogPrinter(options)
    with reading_errors(address):
        async with trio.open_nursery() as nursery:
            await nursery.start(watch_signals, printer.stop)
            await printer.run(readers)
            nursery.cancel_scope.cancel()
    return printer.stopped or (ExitCode.DAMAGED if printer.damaged else ExitCode.OK)
