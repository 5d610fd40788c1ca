"""Writes the messages of topics to files, each topic to its own."""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import trio

from ...protocol.errors import NSQError
from ..monitoring.status import TopicStatus
from ..source.batch import Position, Source
from ..source.log_source import FoundLog
from ..source.options import SourceOptions
from ..source.run import run_sources
from .file_series import OutputSettings
from .file_system import OutputFiles, make_folders
from .names import DATETIME_FORMAT, FILENAME_FORMAT, NameFormat, host_identifier
from .topic_output import OutputCounts, TopicOutput
from .topic_writer import CannotWrite, TopicWriter, WriteFailures, WriterLimits, retried

SYNC_INTERVAL_S = 30.0


class FoldersDiffer(NSQError):
    """The work folder and the output folder are on different file systems: a file cannot move atomically."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToFileOptions:
    """How topics are written to files.

    Attributes:
        output: The format and the folders of files.
        filename_format: `<TOPIC>`, `<HOST>`, `<PID>`, `<DATETIME>` and `<REV>` are replaced.
        datetime_format: The strftime format of `<DATETIME>`, in the local time zone.
        host_identifier: See the function of this name.
        sync_interval_s: The longest time until a message is durable; also how often time-based rotation is checked.
    """

    output: OutputSettings
    filename_format: str = FILENAME_FORMAT
    datetime_format: str = DATETIME_FORMAT
    host_identifier: str = ""
    sync_interval_s: float = SYNC_INTERVAL_S

    def names(self, topic: str) -> NameFormat:
        """Return the names of a topic's files. Raises FileNameError."""
        compressor = self.output.compressor
        return NameFormat.of_topic(
            self.filename_format,
            self.datetime_format,
            topic=topic,
            host=host_identifier(self.host_identifier, socket.gethostname()),
            pid=os.getpid(),
            suffix=compressor.suffix if compressor else "",
            revised=self.output.needs_revision,
        )


class ToFile:
    """Copies topics to files until it is stopped.

    Args:
        sources: What to read.
        options: How to write it.
    """

    def __init__(
        self,
        sources: SourceOptions,
        options: ToFileOptions,
    ) -> None:
        self._sources = sources
        self._options = options
        self._files = OutputFiles()
        self._limits = WriterLimits()
        self._writers: dict[str, TopicWriter] = {}
        self._writing: trio.Nursery
        self._opening: dict[str, trio.Lock] = {}  # by topic
        self._counts: dict[str, list[OutputCounts]] = {}  # by topic, also of writers that have ended
        self._last_lag: dict[str, int | None] = {}  # of writers that have ended
        self._failures: list[CannotWrite] = []
        self._failed: dict[str, WriteFailures] = defaultdict(WriteFailures)  # by topic
        self._stopping = trio.Event()

    @property
    def counts(self) -> OutputCounts:
        """What was written durably so far, over all topics."""
        return _sum(each for parts in self._counts.values() for each in parts)

    def topics(self) -> list[TopicStatus]:
        """Return the status of each topic that is or was written. Other threads may call it."""
        found = []
        for topic, parts in list(self._counts.items()):
            counts = _sum(parts)
            writer = self._writers.get(topic)
            lag = self._last_lag.get(topic) if writer is None else writer.lag
            failed = self._failed[topic]
            found.append(
                TopicStatus(
                    topic,
                    counts.messages,
                    counts.body_bytes,
                    counts.files,
                    failures=failed.attempts,
                    error=failed.error,
                    lag=lag,
                )
            )
        return found

    def log_brokers(self) -> list[str]:
        """Return the HTTP addresses of the brokers whose logs are read. Other threads may call it."""
        return [address for writer in list(self._writers.values()) for address in writer.log_brokers]

    def stop(self) -> None:
        """Make everything received durable, finish the files, and end."""
        self._stopping.set()

    def reopen(self) -> None:
        """Finish all open files; the next messages begin new ones."""
        for writer in self._writers.values():
            writer.close_file()

    def prepare(self) -> None:
        """Create the folders. Blocks.

        Raises:
            FoldersDiffer: A finished file could not move to its folder.
            FileNameError: The name format cannot be used.
            OSError: A folder cannot be created or written.
        """
        output = self._options.output
        for topic in self._sources.topics or ("topic",):
            self._options.names(topic)
        for folder in (output.output_dir, output.work_dir):
            make_folders(self._files, folder)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "it is not writable", str(folder))
        if output.output_dir.stat().st_dev != output.work_dir.stat().st_dev:
            raise FoldersDiffer(
                f"--work-dir {output.work_dir} and --output-dir {output.output_dir} are on different file systems, "
                "between which a finished file cannot move atomically: choose folders on the same one"
            )

    async def run(self) -> None:
        """Write until `stop`. Call `prepare` first.

        Raises:
            OutputInUse: Another process writes the same files.
            CheckpointDamaged: A checkpoint cannot be used.
            CannotWrite: The disk failed at the end.
            NSQError: See `run_sources`.
        """
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as self._writing:
                reading: trio.CancelScope = await nursery.start(self._read)
                await self._stopping.wait()
                for writer in list(self._writers.values()):
                    writer.stop()
            # All writers have ended. Cancelling closes the sources, which send the last FINs and move the channels.
            reading.cancel()
        if self._failures:
            raise self._failures[0]

    async def _read(self, task_status: trio.TaskStatus[trio.CancelScope] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.CancelScope() as scope:
            task_status.started(scope)
            await run_sources(self._sources, self._position, self._consume)
            self.stop()  # every source is closed for good

    async def _position(self, found: FoundLog) -> Position | None:
        """Return where reading a log begins."""
        positions = (await self._writer(found.topic)).positions
        # The position by the address is of a log that was there before, which is reported.
        return positions.get(await found.known_as(positions) or found.broker)

    async def _consume(self, source: Source) -> None:
        await (await self._writer(source.topic)).consume(source)

    async def _writer(self, topic: str) -> TopicWriter:
        """Return the writer of a topic; begin it for the first source."""
        async with self._opening.setdefault(topic, trio.Lock()):
            if (writer := self._writers.get(topic)) is not None and writer.is_ending:
                await writer.ended.wait()
            if topic not in self._writers:
                output = await self._open(topic)
                if self._stopping.is_set():
                    output.release()
                    await trio.sleep_forever()  # until `run` cancels this
                self._limits.topics += 1
                interval_s = self._options.sync_interval_s
                self._writers[topic] = TopicWriter(
                    topic,
                    output,
                    self._limits,
                    interval_s,
                    time.time,
                    ends_when_idle=topic not in self._sources.topics,
                    failures=self._failed[topic],
                )
                self._counts[topic] = [_sum(self._counts.get(topic, ())), self._writers[topic].counts]
                self._writing.start_soon(self._write, self._writers[topic])
        return self._writers[topic]

    async def _open(self, topic: str) -> TopicOutput:
        options, channel = self._options, self._sources.channel
        open_output = partial(TopicOutput, options.output, options.names(topic), topic, channel, self._files)
        self._counts.setdefault(topic, [])  # its status says why it cannot be opened
        return await retried(topic, open_output, self._limits.threads, self._stopping, self._failed[topic])

    async def _write(self, writer: TopicWriter) -> None:
        try:
            await writer.run()
        except CannotWrite as error:
            self._failures.append(error)  # the other topics end in good order
        self._last_lag[writer.topic] = writer.lag
        del self._writers[writer.topic]
        self._limits.topics -= 1
        writer.ended.set()


def _sum(parts: Iterable[OutputCounts]) -> OutputCounts:
    total = OutputCounts()
    for each in parts:
        total.add(each)
    return total
