"""Runs the measurements, and prints their reports."""

import json
import secrets
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain

from trio_nsq.text.wording import count_of

from ...broker.connection_options import ConnectOptions
from ...framework.errors import ExitCode, Failure, Terminated
from ...framework.output import is_terminal, print_diagnostic, silence_library, write
from ...framework.params import Source
from ...records.jobs import BenchSubject
from .consume import Consuming
from .latency import Latency
from .link import Link, open_links
from .load import Load
from .measurement import Measurement
from .options import BenchOptions
from .produce import produce
from .publish import Publishing
from .report import as_record, as_text
from .targets import CHANNEL, Target, check_consent, own_topic, targets_of, tcp_addresses

BUSY = 0.9
"""A client that uses so much of a processor may be the limit."""
_FILL = {"batch_size": 200, "pipeline": 4}
"""How a backlog is published, which is not measured: as fast as possible."""


def run_pub(options: BenchOptions) -> ExitCode:
    targets = targets_of(options)
    with _topic(options, targets, options.topic) as topic:

        async def load() -> Load:
            return Publishing(
                await _links(options, targets),
                topic,
                duration_s=options.duration_s,
                count=options.count,
                size=options.size,
                batch_size=options.batch_size,
                pipeline=options.pipeline,
            )

        settings = {
            **_limits(options),
            "count": options.count,
            "size": options.size,
            "batch_size": options.batch_size,
            "pipeline": options.pipeline,
        }
        return _Run("pub", options, targets, Source(topic, None), settings).measure(load)


def run_sub(options: BenchOptions) -> ExitCode:
    source, targets = options.source, targets_of(options)
    if source is not None:
        check_consent(source.topic, f"This consumes the messages of {source}", options.yes)
    with _topic(options, targets, source and source.topic, CHANNEL) as topic:
        wanted = source or Source(topic, CHANNEL)
        if source is None:
            _fill(options, targets, topic)

        async def load() -> Load:
            return Consuming(
                await _links(options, targets, wanted),
                duration_s=options.duration_s,
                max_in_flight=options.max_in_flight,
                count=None if source else options.backlog,
            )

        settings = {
            **_limits(options),
            "backlog": None if source else options.backlog,
            "max_in_flight": options.max_in_flight,
        }
        return _Run("sub", options, targets, wanted, settings).measure(load)


def run_latency(options: BenchOptions) -> ExitCode:
    targets = targets_of(options)
    if options.topic is not None:
        what = f"This publishes to {options.topic}, and takes its backlog if it has no channel"
        check_consent(options.topic, what, options.yes)
    with _topic(options, targets, options.topic) as topic:
        source = Source(topic, f"{CHANNEL}-{secrets.token_hex(4)}#ephemeral")

        async def load() -> Load:
            return Latency(
                await _pairs(targets, source),
                topic,
                duration_s=options.duration_s,
                rate=options.rate,
                size=options.size,
            )

        settings = {**_limits(options), "connections": 2, "rate": options.rate, "size": options.size}
        return _Run("latency", options, targets, source, settings).measure(load)


def _limits(options: BenchOptions) -> dict[str, object]:
    """Return the settings that all reports have; `connections` is the number to each broker."""
    duration_ms = options.duration_ms
    return {
        "duration_seconds": None if duration_ms is None else duration_ms / 1000,
        "connections": options.connections_per_broker,
    }


def _topic(
    options: BenchOptions, targets: Sequence[Target], named: str | None, channel: str | None = None
) -> AbstractContextManager[str]:
    silence_library()
    return nullcontext(named) if named else own_topic(targets, keep=options.keep, channel=channel)


async def _links(
    options: BenchOptions, targets: Sequence[Target], source: Source | None = None
) -> list[Link]:
    connecting = ConnectOptions.of_command()
    return await open_links(tcp_addresses(targets), options.connections_per_broker, connecting, source)


async def _pairs(targets: Sequence[Target], source: Source) -> list[Link]:
    """Return a connection to publish and a subscribed one for each broker."""
    connecting, addresses = ConnectOptions.of_command(), tcp_addresses(targets)
    consumers = await open_links(addresses, 1, connecting, source, buffered=False)
    publishers = await open_links(addresses, 1, connecting)
    return list(chain.from_iterable(zip(publishers, consumers, strict=True)))


def _fill(options: BenchOptions, targets: Sequence[Target], topic: str) -> None:
    """Publish the backlog. Raises Failure, or KeyboardInterrupt or Terminated after a signal."""

    async def load() -> Load:
        return Publishing(
            await _links(options, targets), topic, count=options.backlog, size=options.size, **_FILL
        )

    print_diagnostic(f"Publishing {count_of(options.backlog, 'message')} to {topic}.")
    outcome = produce(load, lambda load: load.counter.total / options.backlog)
    if outcome.failure is not None:
        raise outcome.failure
    if outcome.signal is not None:
        raise Terminated if outcome.signal is ExitCode.TERMINATED else KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class _Run:
    """A measurement: what it does, and where."""

    kind: str
    options: BenchOptions
    targets: Sequence[Target]
    source: Source
    settings: Mapping[str, object]

    def measure(self, make: Callable[[], Awaitable[Load]]) -> ExitCode:
        """Measure, print the report, and return the exit code of the end.

        Raises Failure: the load failed. `PARTIAL`: the report of what was done before is written.
        """
        outcome = produce(make, self._share)
        measured = outcome.measured
        if measured is not None and (measured.messages or measured.afterwards):
            write(self._report(measured))
            if outcome.failure is not None:
                raise Failure(outcome.failure.message, ExitCode.PARTIAL)
            if measured.cpu_s > BUSY * measured.seconds:
                print_diagnostic(
                    "Warning: this client used a whole processor, so it may be the limit: run several, and add rates."
                )
        elif outcome.failure is None and outcome.signal is None:
            raise Failure(f"No message of {self.source} arrived: publish to {self.source.topic} first.")
        if outcome.failure is not None:
            raise outcome.failure
        return outcome.signal or ExitCode.OK

    def _share(self, load: Load) -> float:
        begun_s = load.counter.begun_s
        shares = [(time.perf_counter() - begun_s) / self.options.duration_s if begun_s else 0.0]
        if count := self.options.count or self.options.backlog:
            shares.append(load.counter.total / count)
        return min(1.0, max(shares))

    def _report(self, measured: Measurement) -> str:
        if self.options.form == "json":
            about: BenchSubject = {
                "benchmark": self.kind,
                "brokers": [*tcp_addresses(self.targets)],
                "topic": self.source.topic,
                "channel": self.source.channel,
                "settings": dict(self.settings),
            }
            return json.dumps(as_record(about, measured)) + "\n"
        width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else 80
        place = f"{self.source} at {', '.join(tcp_addresses(self.targets))}"
        return as_text(self.kind, place, measured, width)
