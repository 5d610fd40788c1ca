"""Runs the measurements, and prints their reports."""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain

import trio

from trio_nsq.client import BrokerError, ConnectionLost
from trio_nsq.protocol import NSQError

from ...broker.connection_options import ConnectOptions
from ...broker.failures import refused
from ...framework.errors import ExitCode, Failure, Terminated
from ...framework.output import is_live_terminal, is_terminal, print_diagnostic, silence_library, write
from ...framework.params import Source
from ...framework.signals import watch_signals
from ...terminal.progress import show_progress
from .bench_topic import CHANNEL, check_consent, own_topic
from .connecting import open_links
from .consume import Consuming
from .latency import Latency
from .link import Link
from .load import Load
from .measurement import Measurement
from .options import BenchOptions
from .publish import Publishing
from .report import as_record, as_text
from .targets import Target, targets_of, tcp_addresses

BUSY = 0.9
"""A client that uses so much of a processor may be the limit."""
_FILL = {"batch_size": 200, "pipeline": 4}
"""How a backlog is published, which is not measured: as fast as possible."""


def run_pub(options: BenchOptions) -> ExitCode:
    """Run `qcli bench pub`. Raises Failure."""
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

        settings = {"batch_size": options.batch_size, "pipeline": options.pipeline, "size": options.size}
        return _Run("pub", options, targets, Source(topic, None), settings).measure(load)


def run_sub(options: BenchOptions) -> ExitCode:
    """Run `qcli bench sub`. Raises Failure."""
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

        return _Run("sub", options, targets, wanted, {"max_in_flight": options.max_in_flight}).measure(load)


def run_latency(options: BenchOptions) -> ExitCode:
    """Run `qcli bench latency`. Raises Failure."""
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

        settings = {"rate": options.rate, "size": options.size}
        return _Run("latency", options, targets, source, settings).measure(load)


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

    print_diagnostic(f"Publishing {options.backlog:,} messages to {topic}.")
    outcome = _produce(load, lambda load: load.counter.total / options.backlog)
    if outcome.failure is not None:
        raise outcome.failure
    if outcome.signal is not None:
        raise Terminated if outcome.signal is ExitCode.TERMINATED else KeyboardInterrupt


@dataclass(slots=True)
class _Outcome:
    """What a load has measured, and why it ended early: a failure or a signal."""

    measured: Measurement | None = None
    failure: Failure | None = None
    signal: ExitCode | None = None


def _produce(make: Callable[[], Awaitable[Load]], share: Callable[[Load], float]) -> _Outcome:
    """Produce a load to its end, with a status line on a terminal.

    Args:
        make: Connects, and returns the load.
        share: Returns how much of it is done, 0 to 1.

    Raises Failure: the load did not begin.
    """
    outcome = _Outcome()
    early: Exception | None = None

    async def main() -> None:
        nonlocal early
        load: Load | None = None

        def stop(code: ExitCode) -> None:
            outcome.signal = code
            if load is None:
                nursery.cancel_scope.cancel()
            else:
                load.stop()

        async with trio.open_nursery() as nursery:
            await nursery.start(watch_signals, stop)
            try:
                load = await make()
            except Exception as error:  # raised below: the nursery would wrap it
                early = error
            else:
                if is_live_terminal(sys.stderr):
                    nursery.start_soon(
                        show_progress, lambda: (load.counter.total, load.body_bytes, share(load))
                    )
                await _run_in_thread(load, outcome)
            nursery.cancel_scope.cancel()

    trio.run(main)
    if early is not None:
        raise early
    return outcome


async def _run_in_thread(load: Load, outcome: _Outcome) -> None:
    cpu_s = time.process_time()
    try:
        await trio.to_thread.run_sync(load.run)
    except NSQError as error:
        outcome.failure = _failure(error)
    finally:
        load.close()
    outcome.measured = load.result()
    outcome.measured.cpu_s = time.process_time() - cpu_s


def _failure(error: NSQError) -> Failure:
    if isinstance(error, BrokerError):
        return Failure(refused(f"The broker at {error.address}", error))
    if isinstance(error, ConnectionLost):
        return Failure(
            f"The broker at {error.address} did not take part to the end: {error.reason}. See its log.",
            ExitCode.UNREACHABLE,
        )
    return Failure(f"{error}.")


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
        outcome = _produce(make, self._share)
        measured = outcome.measured
        if measured is not None and measured.messages:
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
        return min(1.0, *shares) if len(shares) == 1 else min(1.0, max(shares))

    def _report(self, measured: Measurement) -> str:
        if self.options.form == "json":
            about = {
                "benchmark": self.kind,
                "brokers": tcp_addresses(self.targets),
                "topic": self.source.topic,
                "channel": self.source.channel,
                "settings": self.settings,
            }
            return json.dumps(as_record(about, measured)) + "\n"
        width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else 80
        place = f"{self.source} at {', '.join(tcp_addresses(self.targets))}"
        return as_text(self.kind, place, measured, width)
