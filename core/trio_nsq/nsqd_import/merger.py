"""Merge the messages of a topic's queues into one order, each message once.

nsqd gives every channel a copy of a message, with the same id. Each copy gets a key. Keys sort by id, and copies of a
message have the same prefix. To limit memory, this is an external merge sort: it merges sorted runs in unnamed files.
"""

import tempfile
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import groupby
from pathlib import Path
from struct import Struct
from typing import IO, NamedTuple

from ..platform.checksum import crc32
from .diskqueue import QueueMessage

_KEY = Struct(">8sQIIHHIQ")
_IDENTITY_BYTES = 8 + 8 + 4 + 4
_RUN_KEYS = 1_000_000
"""About 80 MB of memory."""
_READ_KEYS = 10_000


class Copy(NamedTuple):
    """A message in one queue: its attempts there, and the file and offset of its body."""

    queue: int
    attempts: int
    number: int
    offset: int


class MergedMessage(NamedTuple):
    """A message, with all its copies, in the order of the queues."""

    id: int
    timestamp_ns: int
    size: int
    copies: list[Copy]


class Merger:
    """Sorts and merges the messages of queues.

    Args:
        folder: The folder for the runs; None: the system's folder for temporary files.
        run_keys: How many messages to keep in memory.
    """

    def __init__(self, folder: Path | None = None, run_keys: int = _RUN_KEYS) -> None:
        self._folder = folder
        self._run_keys = run_keys
        self._keys: list[bytes] = []
        self._runs: list[IO[bytes]] = []

    def add(self, queue: int, messages: Iterable[QueueMessage]) -> None:
        """Add the messages of a queue. Raises OSError."""
        pack, keys = _KEY.pack, self._keys
        for message in messages:
            body = message.body
            keys.append(
                # Two messages may share an id if a clock or a node id was changed: nsqd derives ids from these.
                pack(
                    message.id,
                    message.timestamp_ns,
                    crc32(body),
                    len(body),
                    queue,
                    message.attempts,
                    message.number,
                    message.offset,
                )
            )
            if len(keys) >= self._run_keys:
                self._spill()

    def _spill(self) -> None:
        self._keys.sort()
        run = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - `close` closes it
        self._runs.append(run)
        for start in range(0, len(self._keys), _READ_KEYS):
            run.write(b"".join(self._keys[start : start + _READ_KEYS]))
        self._keys.clear()

    def merged(self) -> Iterator[MergedMessage]:
        """Yield all messages by id; of duplicates in a queue, the copy with more attempts. Raises OSError."""
        self._keys.sort()
        keys = merge(*map(_read_run, self._runs), self._keys) if self._runs else self._keys
        for _, same in groupby(keys, key=_identity):
            copies: dict[int, Copy] = {}
            for key in same:
                message_id, timestamp_ns, _, size, *copy = _KEY.unpack(key)
                copies[copy[0]] = Copy(*copy)
            yield MergedMessage(int.from_bytes(message_id, "big"), timestamp_ns, size, list(copies.values()))

    def close(self) -> None:
        for run in self._runs:
            run.close()
        self._keys.clear()


def _identity(key: bytes) -> bytes:
    return key[:_IDENTITY_BYTES]


def _read_run(run: IO[bytes]) -> Iterator[bytes]:
    run.seek(0)
    while data := run.read(_KEY.size * _READ_KEYS):
        for start in range(0, len(data), _KEY.size):
            yield data[start : start + _KEY.size]
