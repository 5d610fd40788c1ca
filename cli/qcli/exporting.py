"""How `to-parquet` goes: rounds, the choice of an engine, progress, and what is said of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from .connecting import Connecting
from .errors import Failure, Terminated, reason_of, unreachable
from .exit_codes import ExitCode
from .options import HTTP_OPTION
from .output import json_lines, plain_terminal, rate, size, talk, talks_to_live_terminal, write

if TYPE_CHECKING:
    from trio_nsq.spark.export import Advance, ExportTask
    from trio_nsq.spark.run import Engine, Export, ExportRequest, Outcome

SPARK_WORTH_BYTES = 4 * 1024**3
"""With less to be read, this process is done before Spark has begun and caught up."""
LOOKUPD_TIMEOUT_S = 5.0
_REFRESH_S = 0.2
_RETRY_S = 5.0
"""So long after a failed round at the latest the next one is begun."""
_GO_ON = "The same command goes on from there."


@dataclass(frozen=True, slots=True)
class Running:
    """What the command line says of how it is to go.

    Attributes:
        addresses: Where brokers are asked, unless discovery services are.
        lookupd_addresses: Discovery services, if any.
        engine: `auto`, `inline` or `spark`.
        master: Of Spark; None: local, or what spark-submit says.
        every_s: From the beginning of one round to the next; None: there is one only.
        form: `text` or `json`.
        quiet: Say nothing but errors.
    """

    addresses: tuple[str, ...]
    lookupd_addresses: tuple[str, ...]
    engine: str
    master: str | None
    every_s: float | None
    form: str
    quiet: bool


def check_extra() -> None:
    """Raises Failure if what nothing works without is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise Failure(
            f"to-parquet needs the extra 'spark', which is not installed ({error}): pip install 'trio-nsq[spark]'. "
            "With pyarrow alone, pip install pyarrow, --engine inline works."
        ) from error


def export(request: ExportRequest, running: Running) -> int:
    """Run the command; returns its exit code.

    Raises:
        Failure: It did not go well.
    """
    from trio_nsq.spark.run import open_export

    connecting = Connecting.of_command()
    request = dataclasses.replace(request, tls=_tls_files(connecting))
    with _failures(), ExitStack() as stack:
        addresses = _find_brokers(running, request.topic)
        work = _Work(stack.enter_context(open_export(request, addresses)), running, stack)
        try:
            if running.every_s is None:
                return work.once(addresses)
            return work.follow(addresses, running.every_s)
        except (KeyboardInterrupt, Terminated) as stop:
            work.job.sweep()
            work.conclude()
            return ExitCode.INTERRUPTED if isinstance(stop, KeyboardInterrupt) else ExitCode.TERMINATED


def _tls_files(connecting: Connecting) -> Any:
    from trio_nsq.spark.broker_log import TLSFiles

    return TLSFiles(
        connecting.tls_root_ca_file,
        connecting.tls_cert,
        connecting.tls_key,
        connecting.tls_insecure_skip_verify,
    )


@contextmanager
def _failures() -> Iterator[None]:
    """Turn what the library raises inside into failures."""
    from trio_nsq.protocol import NSQError
    from trio_nsq.spark.broker_log import BrokerUnreachable, RequestRefused

    from .broker_log import not_readable
    from .params import Source

    try:
        yield
    except RequestRefused as error:
        raise not_readable(error.address, Source(error.topic, None), error.status, error.text) from error
    except BrokerUnreachable as error:
        reason = error.reason if error.cause is None else reason_of(error.cause)
        raise unreachable(error.address, HTTP_OPTION, reason) from error
    except NSQError as error:
        text = str(error)
        raise Failure(text[:1].upper() + text[1:] + "." * (not text.endswith("."))) from error


class _Work:
    """One run of the command.

    Args:
        job: What it works on.
        running: See there.
        stack: What is to be closed at its end.
    """

    def __init__(self, job: Export, running: Running, stack: ExitStack) -> None:
        self.job = job
        self._running = running
        self._stack = stack
        self._engine_name = ""
        self._engine: Engine | None = None
        self._damaged = False
        self._gaps_told = 0
        self._rounds_told = 0
        self._heading = ""
        self._begun_s = time.monotonic()

    def once(self, addresses: Sequence[str]) -> int:
        """One round."""
        try:
            self._round(addresses)
        except Exception as error:
            if self.job.outcome.ranges == 0:
                raise
            raise self._partial(error) from error
        self.report()
        return ExitCode.DAMAGED if self.job.outcome.damaged else ExitCode.OK

    def follow(self, addresses: Sequence[str], every_s: float) -> NoReturn:
        """Round after round, until interrupted; then the outcome is that of all of them, for people."""
        from trio_nsq.spark.run import Outcome

        begun_s, total = time.monotonic(), Outcome()
        try:
            self._rounds(addresses, every_s, total)
        except (KeyboardInterrupt, Terminated):
            several = self._rounds_told > 1 or (self._rounds_told and self._is_news())
            # A program that adds up the records of rounds would count one of all of them twice.
            if several and self._running.form != "json":
                total.merge(self.job.outcome)
                self.job.outcome, self._begun_s, self._rounds_told = total, begun_s, 0
                self._heading = "In all: "
            raise

    def _rounds(self, addresses: Sequence[str], every_s: float, total: Outcome) -> NoReturn:
        """The same. A round that fails for a reason that may pass is told of, and made up for."""
        from trio_nsq.spark.broker_log import BrokerUnreachable, RequestRefused

        failing = False
        while True:
            self._begun_s = time.monotonic()
            try:
                self._round(addresses)
                if failing:
                    talk("Note: it goes on.")
                failing = False
            except (BrokerUnreachable, RequestRefused) as error:
                if not failing:
                    talk(f"Warning: {error}; trying again.")
                failing = True
            outcome, self.job.outcome, self._gaps_told = self.job.outcome, type(total)(), 0
            total.merge(outcome)
            # One that failed is tried again soon: what is missing will be told then.
            if outcome.ranges or (not failing and (outcome.missing or not self._rounds_told)):
                self._rounds_told += 1  # before it is: an interruption meanwhile must not have it told again
                self.report(outcome)
            pause_s = min(every_s, _RETRY_S) if failing else every_s
            time.sleep(max(0.0, self._begun_s + pause_s - time.monotonic()))
            try:
                addresses = _find_brokers(self._running, self.job.request.topic)
            except Failure as failure:  # those that were known will do
                talk(f"Warning: {failure}")

    def _round(self, addresses: Sequence[str]) -> None:
        tasks = self.job.plan(addresses)
        self._tell_gaps()
        if not tasks:
            self.job.run(lambda *_: None, [], lambda *_: None)
            return
        engine = self._engine or self._choose(tasks)
        with _progress(self.job.outcome.planned_messages, self._running.quiet) as advance:
            self.job.run(engine, tasks, advance)
        self._tell_gaps()

    # ------------------------------------------------------------------ engines

    def _choose(self, tasks: Sequence[ExportTask]) -> Engine:
        """The engine of this and all further rounds."""
        from trio_nsq.spark.engines import run_inline

        wanted = self._running.engine
        why = ""
        if wanted == "auto":
            wanted, why = _better_engine(self.job.outcome.planned_bytes, len(tasks))
        self._engine_name = wanted
        if why and not self._running.quiet:
            talk(f"Note: engine {wanted}: {why}.")
        if wanted == "inline":
            self._engine = run_inline
        else:
            self._engine = self._stack.enter_context(_spark(self._running.master))
        return self._engine

    # ------------------------------------------------------------------ what is said

    def _tell_gaps(self) -> None:
        from .broker_log import note_gap

        gaps = self.job.outcome.gaps
        for broker, first, end, reason in gaps[self._gaps_told :]:
            self._damaged |= note_gap(f"{self.job.request.topic} on {broker}", first, end, reason)
        self._gaps_told = len(gaps)

    def _is_news(self) -> bool:
        """Whether the outcome has anything in it."""
        return bool(self.job.outcome.ranges or self.job.outcome.missing)

    def conclude(self) -> None:
        """Say how far it came when it was interrupted, unless a round's report has just said the same; how to go on."""
        if self._is_news() or not self._rounds_told:
            self.report()
        if not self._running.quiet:
            talk(_GO_ON)

    def report(self, outcome: Outcome | None = None) -> None:
        """Say what became of it so far, or of a round that is over."""
        outcome, request = outcome or self.job.outcome, self.job.request
        elapsed_s = time.monotonic() - self._begun_s
        if self._running.form == "json":
            fields = dataclasses.asdict(outcome)
            for name in ("gaps", "planned_messages", "planned_ranges", "planned_bytes"):
                del fields[name]
            head = {"topic": request.topic, "folder": request.place, "engine": self._engine_name or None}
            write(json_lines([{**head, **fields, "elapsed_s": round(elapsed_s, 3)}]))
        elif not self._running.quiet:
            talk(self._heading + _summary(request, outcome, elapsed_s))

    def _partial(self, error: Exception) -> Failure:
        """A failure after some of it was done."""
        self._tell_gaps()
        self.report()
        try:
            with _failures():
                raise error
        except Failure as failure:
            return Failure(f"{failure.message} {_GO_ON}", ExitCode.PARTIAL)
        except OSError as failure:
            where = f"{failure.filename}: " if failure.filename else ""
            return Failure(f"{where}{failure.strerror or failure}. {_GO_ON}", ExitCode.PARTIAL)
        except Exception:
            raise error from None


def _summary(request: ExportRequest, outcome: Outcome, elapsed_s: float) -> str:
    text = (
        f"{_count(outcome.messages, 'message')} ({size(outcome.body_bytes)}) of {request.topic} written to "
        f"{_count(outcome.files, 'file')} ({size(outcome.file_bytes)}) in {request.place} in {elapsed_s:.2f} s: "
        f"{rate(outcome.messages / elapsed_s)} messages/s"
    )
    if outcome.skipped_ranges:
        text += (
            f"; {_count(outcome.skipped_ranges, 'range')} ({_count(outcome.skipped_messages, 'message')}) "
            "there already"
        )
    if outcome.unparsed:
        text += f"; {outcome.unparsed:,} in the column unparsed"
    if outcome.for_one_channel:
        text += f"; {outcome.for_one_channel:,} left out, which had come back for one channel"
    if outcome.missing:
        text += f"; {outcome.missing:,} missing"
    return text


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Advance]:
    """Show a bar on standard error while the block runs, if that is a terminal."""
    if quiet or not talks_to_live_terminal():
        yield lambda _messages, _size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("messages, {task.fields[read]}, {task.fields[speed]} messages/s"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True, no_color=plain_terminal())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        shown = bar.add_task("", total=total, read="0 B", speed="0")
        begun_s = shown_s = time.monotonic()
        messages = read = 0

        def advance(more: int, more_bytes: int) -> None:
            nonlocal messages, read, shown_s
            messages += more
            read += more_bytes
            now_s = time.monotonic()
            if now_s - shown_s >= _REFRESH_S:
                shown_s = now_s
                speed = rate(messages / (now_s - begun_s))
                bar.update(shown, completed=messages, read=size(read), speed=speed, refresh=True)

        yield advance


# ---------------------------------------------------------------------- engines


def _better_engine(size_bytes: int, tasks: int) -> tuple[str, str]:
    """The engine that is done sooner, and why."""
    import os

    much = f"{size(size_bytes)} in {_count(tasks, 'range')}"
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return "spark", "spark-submit runs this"
    if size_bytes < SPARK_WORTH_BYTES or tasks < 2 or (os.cpu_count() or 1) < 2:
        return "inline", f"{much}; Spark would take longer to start than it saves (--engine spark)"
    try:
        from trio_nsq.spark.java import find_java_home
        from trio_nsq.spark.spark_engine import check_spark

        check_spark()
        find_java_home()
    except Exception as error:
        return "inline", f"{much} would be faster with Spark, but {error}"
    return "spark", much


@contextmanager
def _spark(master: str | None) -> Iterator[Engine]:
    import logging

    from trio_nsq.spark.spark_engine import open_spark

    # py4j logs every connection that a JVM does not answer on any more, at the root; we say that once.
    logging.getLogger().addHandler(logging.NullHandler())
    with open_spark(master) as engine:
        yield engine


# ---------------------------------------------------------------------- discovery


def _find_brokers(running: Running, topic: str) -> Sequence[str]:
    """The brokers' HTTP addresses. Raises Failure: no discovery service names any."""
    return _ask_lookupds(running.lookupd_addresses, topic) if running.lookupd_addresses else running.addresses


def _ask_lookupds(addresses: Sequence[str], topic: str) -> list[str]:
    """The HTTP addresses of all brokers that have a topic.

    Raises:
        Failure: There is none, or nobody knows.
    """
    import trio

    from trio_nsq.lookup.query import LookupFailed, lookup_topic
    from trio_nsq.protocol.address import format_address

    found: dict[str, None] = {}
    failures: list[LookupFailed] = []

    async def ask(address: str) -> None:
        try:
            for broker in await lookup_topic(address, topic, timeout_s=LOOKUPD_TIMEOUT_S):
                found[format_address(broker.broadcast_address, broker.http_port)] = None
        except LookupFailed as failure:
            failures.append(failure)

    async def ask_all() -> None:
        async with trio.open_nursery() as nursery:
            for address in addresses:
                nursery.start_soon(ask, address)

    trio.run(ask_all)
    if len(failures) == len(addresses):
        raise Failure(f"{failures[0]}.", ExitCode.UNREACHABLE)
    for failure in failures:
        talk(f"Warning: {failure}; brokers that only it knows are left out.")
    if not found:
        raise Failure(f"No broker that the discovery services name has topic {topic}.")
    return sorted(found)
