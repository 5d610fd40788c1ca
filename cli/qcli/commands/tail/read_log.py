"""`tail` of topics' logs: reads old and new messages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import trio

from trio_nsq.api import broker as api
from trio_nsq.client.reading.log_stream import is_for_all_channels
from trio_nsq.client.reading.topic_reader import TopicReader
from trio_nsq.log import RecordBatch
from trio_nsq.protocol.message_json import json_lines

from ...broker.connection_options import ConnectOptions, refuse_plain_http
from ...broker.requests import ask
from ...broker.topic_log import reading_errors, report_gap, report_start
from ...framework.errors import ExitCode
from ...framework.output import print_diagnostic, silence_library
from ...framework.params import without_scheme
from ...framework.signals import at_first_signal, run_trio
from ..shared.format_string import MessageColumns
from ..shared.messages import log_records
from .options import TailOptions
from .printer import Printer

BodiesOf = Callable[[str, Sequence[bytes]], Sequence[bytes]]
"""Returns the bodies of messages of a topic as they are written."""


class BrokerLog(TopicReader):
    """A reader of a topic's log at one of several brokers.

    Attributes:
        address: The broker's address.
        broker: The address, for JSON; empty if there is only one broker.
    """

    address = ""
    broker = ""

    def records(
        self, topic: str, batches: Iterable[RecordBatch], bodies_of: BodiesOf
    ) -> Iterator[dict[str, Any]]:
        named = {"broker": self.broker} if self.broker else {}
        for batch in batches:
            bodies = bodies_of(topic, batch.messages.bodies())
            for record in log_records(topic, batch, range(batch.count), bodies):
                yield named | record

    def columns(self, topic: str, batch: RecordBatch, bodies_of: BodiesOf) -> MessageColumns:
        return MessageColumns(
            bodies=bodies_of(topic, batch.messages.bodies()),
            ids=batch.ids(),
            topics=topic.encode(),
            sequences=range(batch.base_sequence, batch.base_sequence + batch.count),
            timestamps_ns=batch.timestamp_ns,
            dues_ns=batch.due_ns,
            brokers=self.address.encode(),
            headers=batch.headers(),
        )


class LogPrinter(Printer[BrokerLog]):
    """Writes the messages of readers; `damaged` says whether damaged messages were skipped."""

    def __init__(self, options: TailOptions) -> None:
        super().__init__(options)
        self.damaged = False
        self._first = options.first

    async def pass_on(self, topic: str, source: BrokerLog) -> None:
        report_start(topic, source, self._first)
        while found := await source.receive():
            batches: list[RecordBatch] = []
            for each in found:
                if isinstance(each, RecordBatch):
                    if is_for_all_channels(each):
                        batches.append(each)
                    continue
                await self._print(topic, source, batches)
                batches = []
                self.damaged |= report_gap(topic, each.first_sequence, each.next_sequence, each.reason)
            await self._print(topic, source, batches)

    async def _print(self, topic: str, source: BrokerLog, batches: list[RecordBatch]) -> None:
        if count := sum(batch.count for batch in batches):
            await self.print(count, partial(self._render, topic, source, batches))

    def _render(self, topic: str, source: BrokerLog, batches: Sequence[RecordBatch], count: int) -> bytes:
        if self.as_json:
            return json_lines(islice(source.records(topic, batches, self.bodies_of), count)).encode()
        if self.template is not None:
            parts = []
            for batch in batches:
                parts.append(
                    self.template.render(
                        source.columns(topic, batch, self.bodies_of), min(count, batch.count)
                    )
                )
                count -= min(count, batch.count)
            return b"".join(parts)
        bodies = [body for batch in batches for body in batch.messages.bodies()][:count]
        return self.raw(topic, self.bodies_of(topic, bodies))


def tail_log(options: TailOptions) -> ExitCode:
    """Write the messages of the topics' logs and return the exit code. Messages of several brokers alternate.

    Raises Failure: a log cannot be read; with several brokers, after the logs of the others.
    """
    silence_library()
    brokers = options.log_brokers()
    addresses = dict.fromkeys(dict.fromkeys(each.topic for each in options.sources), brokers.addresses)
    answers = []
    if brokers.is_fleet:  # without a broker that has not the topic, or does not answer
        for topic in addresses:
            answers.append(brokers.read(partial(ask, request=api.bounds(topic))))
            addresses[topic] = tuple(answers[-1].results)
    else:
        refuse_plain_http(brokers.addresses[0])
    connecting = ConnectOptions.of_command()
    readers = []
    for topic, found in addresses.items():
        for address in found:
            reader = BrokerLog(
                without_scheme(address),
                topic,
                tls=connecting.https_context(address),
                auth_secret=connecting.auth_secret,
                start=options.first or "earliest",
                end=options.end,
                follow=options.end is None,
                max_messages=options.count,
            )
            reader.address = address
            reader.broker = address if brokers.is_fleet else ""
            readers.append((topic, reader))
    for failure in [each for answer in answers for each in answer.failures.values()]:
        if options.end is None:  # the command may not end soon
            print_diagnostic(f"Warning: {failure.brief}")
    printer = LogPrinter(options)
    with reading_errors(brokers.addresses[0]):
        run_trio(_print_all, printer, readers)
    if printer.stopped:
        return printer.stopped
    for answer in answers:
        answer.check()
    return ExitCode.DAMAGED if printer.damaged else ExitCode.OK


async def _print_all(printer: LogPrinter, readers: Sequence[tuple[str, BrokerLog]]) -> None:
    async with trio.open_nursery() as nursery:
        at_first_signal(printer.stop)
        await printer.run(readers)
        nursery.cancel_scope.cancel()
