"""Make an nsqd's data folder."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import pack
from typing import Any

START_NS = 1_700_000_000_000_000_000
FIRST_ID = 0x18A30B3465E690C0


@dataclass(frozen=True)
class Queued:
    """A message in a queue. By default, its fields depend on `number`."""

    number: int
    attempts: int = 0
    body: bytes | None = None
    id: int | None = None
    timestamp_ns: int | None = None

    @property
    def content(self) -> bytes:
        return b"message %d" % self.number if self.body is None else self.body

    @property
    def message_id(self) -> int:
        return FIRST_ID + self.number if self.id is None else self.id

    @property
    def time(self) -> int:
        return START_NS + self.number * 1000 if self.timestamp_ns is None else self.timestamp_ns

    def encode(self) -> bytes:
        """Encode it as in a file."""
        message = pack(">qH16s", self.time, self.attempts, b"%016x" % self.message_id) + self.content
        return pack(">i", len(message)) + message


def write_queue(
    folder: Path,
    name: str,
    *files: Sequence[Queued],
    read: tuple[int, int] = (0, 0),
    depth: int | None = None,
    write: tuple[int, int] | None = None,
) -> list[Path]:
    """Write a queue into files.

    Args:
        read: The messages before this one were read: (file, message in it).
        depth: The depth in its meta file, if it is not the real one.
        write: The write position in its meta file, in bytes, if it is not the end.
    """
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{name}.diskqueue.{number:06d}.dat" for number in range(len(files))]
    for path, messages in zip(paths, files, strict=True):
        path.write_bytes(b"".join(message.encode() for message in messages))
    number, index = read
    if files:
        position = sum(len(message.encode()) for message in files[number][:index])
        end = (len(files) - 1, paths[-1].stat().st_size)
    else:
        position, end = 0, (0, 0)
    if depth is None:
        depth = sum(map(len, files[number:])) - index
    at, offset = end if write is None else write
    (folder / f"{name}.diskqueue.meta.dat").write_text(f"{depth}\n{number},{position}\n{at},{offset}\n")
    for path in paths[:number]:
        path.unlink()  # nsqd removes files that it has read
    return paths


def write_metadata(folder: Path, topics: Mapping[str, Iterable[str]], paused: Iterable[str] = ()) -> None:
    """Write nsqd.dat.

    Args:
        topics: Channels by topic.
        paused: Names of topics, or TOPIC/CHANNEL.
    """
    folder.mkdir(exist_ok=True)

    def topic(name: str, channels: Iterable[str]) -> dict[str, Any]:
        entries = [{"name": each, "paused": f"{name}/{each}" in paused} for each in channels]
        return {"name": name, "paused": name in paused, "channels": entries or None}

    content = {"topics": [topic(*each) for each in topics.items()] or None, "version": "1.3.0"}
    (folder / "nsqd.dat").write_text(json.dumps(content))
