"""Helpers for tests of `to_file`: batches of a log and of channels, outputs with real files, and their content."""

import gzip
import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from log.support import HastyFiles
from trio_nsq.connectors.source.batch import Position, SourceBatch
from trio_nsq.connectors.to_file.compression import Compressor
from trio_nsq.connectors.to_file.file_series import OutputSettings
from trio_nsq.connectors.to_file.formats import delimited
from trio_nsq.connectors.to_file.names import NameFormat
from trio_nsq.connectors.to_file.topic_output import TopicOutput
from trio_nsq.log import Files

TOPIC, CHANNEL, BROKER = "clicks", "archive", "127.0.0.1:4151"
NOON = datetime(2026, 11, 23, 12).timestamp()
HOUR = 3600.0
CHECKPOINTS = ".qcli-to-file"
_HAS_ZSTD = importlib.util.find_spec("zstandard") is not None or os.environ.get("CI") == "true"
ZSTD = pytest.param("zstd", marks=pytest.mark.skipif(not _HAS_ZSTD, reason="zstandard is not installed"))
COMPRESSIONS = ("none", "gzip", ZSTD)


def log_batch(first: int, bodies: Iterable[bytes], broker: str = BROKER) -> SourceBatch:
    """Return a batch of a log that begins at this sequence; the id of a message is its sequence."""
    found = list(bodies)
    end = first + len(found)
    return SourceBatch(
        TOPIC,
        broker,
        found,
        [b"%016x" % sequence for sequence in range(first, end)],
        [10**18] * len(found),
        [0] * len(found),
        sequences=range(first, end),
        dues_ns=[0] * len(found),
        position=Position(end, f"{end - 1:016x}"),
    )


def channel_batch(bodies: Iterable[bytes], broker: str = "127.0.0.1:4150") -> SourceBatch:
    """Return a batch of a channel."""
    return replace(log_batch(0, bodies, broker), sequences=None, dues_ns=None, position=None)


def numbered(first: int, count: int, size: int = 10) -> SourceBatch:
    """Return a batch whose bodies are their sequences, in this many digits."""
    return log_batch(first, [b"%0*d" % (size, sequence) for sequence in range(first, first + count)])


def settings(folder: Path, *, compression: str = "none", **changes: Any) -> OutputSettings:
    """Return settings for lines in this folder."""
    made: dict[str, Any] = {
        "output_dir": folder,
        "work_dir": folder,
        "encode": delimited(b"\n"),
        "extra_bytes": 1,
        "terminator": b"\n",
        "compressor": None if compression == "none" else Compressor(compression),
        "skip_empty_files": True,
    }
    return OutputSettings(**made | changes)


def open_output(
    to: OutputSettings,
    *,
    template: str = "<TOPIC><REV>.<DATETIME>.log",
    topic: str = TOPIC,
    channel: str = CHANNEL,
    files: Files | None = None,
) -> TopicOutput:
    """Open the output of a topic, as a new process would."""
    names = NameFormat.of_topic(
        template,
        "%H",
        topic=topic,
        host="host",
        pid=os.getpid(),
        suffix=to.compressor.suffix if to.compressor else "",
        revised=to.needs_revision,
    )
    return TopicOutput(to, names, topic, channel, files or HastyFiles())


def content(path: Path) -> bytes:
    """Return what is in a file, decompressed. Raises: it is not complete."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.suffix == ".zst":
        import zstandard

        with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
            found: bytes = reader.read()
            return found
    return data


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder and those below it, decompressed, by their relative paths; no checkpoints."""
    return {
        str(path.relative_to(folder)): content(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and CHECKPOINTS not in path.parts
    }


def lines_in(folder: Path) -> list[bytes]:
    """Return the lines of all files."""
    return [line for data in files_in(folder).values() for line in data.splitlines()]


def crash(output: TopicOutput) -> None:
    """Leave the files as a killed process leaves them."""
    output.release()


FailOn = Callable[[str], bool]


class FailingFiles(HastyFiles):
    """Files whose operations fail while `error` is set.

    Attributes:
        error: The error; None: everything works.
        kinds: The names of the operations that fail.
        partial: Whether a failing write writes half of the data.
    """

    def __init__(self, *kinds: str, partial: bool = True) -> None:
        self.error: OSError | None = None
        self.kinds = kinds
        self.partial = partial

    def _check(self, kind: str) -> None:
        if self.error is not None and kind in self.kinds:
            raise self.error

    def write(self, fd: int, offset: int, parts: Any) -> None:
        if self.error is not None and "write" in self.kinds and self.partial:
            data = b"".join(parts)
            super().write(fd, offset, [data[: len(data) // 2]])
        self._check("write")
        super().write(fd, offset, parts)

    def sync(self, fd: int) -> None:
        self._check("sync")
        super().sync(fd)

    def sync_folder(self, path: Path) -> None:
        self._check("sync_folder")
        super().sync_folder(path)

    def replace(self, path: Path, content: bytes) -> None:
        self._check("replace")
        super().replace(path, content)

    def open(self, path: Path) -> int:
        if path.suffix == ".checkpoint":
            self._check("replace")  # a checkpoint is replaced, or a line is appended to it
        return super().open(path)

    def link(self, path: Path, to: Path) -> None:
        self._check("link")
        super().link(path, to)

    def create(self, path: Path) -> int:
        self._check("create")
        return super().create(path)
