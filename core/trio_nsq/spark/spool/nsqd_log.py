"""The messages of one nsqd in a spool: a log on disk, and the ids by which a redelivered message is recognised.

`NsqdLog` has the methods of a `BrokerLog` that an export uses, so that a spool is exported like a broker.
"""

import logging
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

from zlib_ng.zlib_ng import crc32

from ...log import DiskLog, OpenFiles
from ..broker_log import Bounds
from ..ranges import Span
from .records import Spooled, SpooledRows, parse_ids, read_spool, record_of, rows_of

_RECENT = "recent"
_CRC_BYTES = 4

logger = logging.getLogger("trio_nsq.spark")


class ReceivedBatch(Protocol):
    """Messages that were received together from one nsqd; a `trio_nsq.client.MessageBatch` is one."""

    bodies: list[bytes]
    ids: list[bytes]
    timestamps_ns: list[int]
    attempts: list[int]
    nsqd_address: str

    def __len__(self) -> int: ...


class NsqdLog:
    """The messages of one nsqd. The channel's position is the start of the log: moving it discards messages.

    Args:
        folder: The folder of the log.
        first_sequence: The first sequence of a new log.
        open_files: Shared by the logs of a spool.
        window: At least this many of the last messages are recognised if they are delivered again.
    """

    def __init__(self, folder: Path, first_sequence: int, open_files: OpenFiles, window: int) -> None:
        self.folder = folder
        self._files = open_files.files
        self._log = DiskLog(folder, first_sequence=first_sequence, open_files=open_files)
        self._recent = _RecentMessages(window)
        self._recent_saved_at = -1  # the end of the log when `recent` was written
        self._load_recent()

    def _load_recent(self) -> None:
        try:
            self._recent.load((self.folder / _RECENT).read_bytes())
        except FileNotFoundError:
            pass
        except ValueError:
            logger.warning("%s is damaged: messages may come a second time", self.folder / _RECENT)
        at = max(self.first_sequence, self.next_sequence - self._recent.window)
        while at < self.next_sequence and (batches := self._log.read(at)):
            for rows in map(rows_of, batches):
                self._recent.add(rows.ids, rows.times_ns)
            at = batches[-1].next_sequence

    def close(self) -> None:
        """Close its files."""
        self._log.close()

    @property
    def first_sequence(self) -> int:
        """The oldest sequence that is kept."""
        return self._log.first_sequence

    @property
    def next_sequence(self) -> int:
        """The sequence of the next message."""
        return self._log.next_sequence

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return self._log.size_bytes

    def store(self, batches: Sequence[ReceivedBatch]) -> int:
        """Append messages and sync them; returns how many were redelivered and therefore left out.

        Raises:
            InvalidMessageId: An id is not 16 hex digits.
            LogWriteError: Not all messages are stored.
        """
        ids = parse_ids(list(chain.from_iterable(batch.ids for batch in batches)))
        times_ns = list(chain.from_iterable(batch.timestamps_ns for batch in batches))
        attempts = list(chain.from_iterable(batch.attempts for batch in batches))
        bodies = list(chain.from_iterable(batch.bodies for batch in batches))
        new = self._recent.unknown(ids, times_ns)
        repeated = len(ids) - len(new)
        if repeated:
            ids = array("Q", [ids[index] for index in new])
            times_ns, attempts = ([column[index] for index in new] for column in (times_ns, attempts))
            bodies = [bodies[index] for index in new]
        if bodies:
            self._log.append([record_of(self.next_sequence, ids, times_ns, attempts, bodies)], sync=True)
            self._recent.add(ids, times_ns)  # only once they are stored
        return repeated

    # ------------------------------------------------------------------ as a `BrokerLog`

    def bounds(self, at: str = "latest") -> Bounds:
        """The start and the end of the log; `at` is `earliest` or `latest`."""
        first, end = self.first_sequence, self.next_sequence
        return Bounds(first, end, self.size_bytes, end if at == "latest" else first)

    def id_at(self, sequence: int) -> str | None:
        """The id of a message, 16 hex digits; None if it is no longer kept."""
        if self.first_sequence <= sequence < self.next_sequence:
            for found in self.read(Span(sequence, sequence + 1)):
                if isinstance(found, SpooledRows):
                    return f"{found.ids[0]:016x}"
        return None

    def read(self, span: Span) -> Iterator[Spooled]:
        """The messages of a span and its gaps, in order."""
        return read_spool(self.folder, span)

    def create_channel(self, channel: str) -> None:
        """Nothing to do: a spool is for one channel."""

    def channel_position(self, channel: str) -> int:
        """The oldest sequence that is kept."""
        return self.first_sequence

    def move_channel(self, channel: str, sequence: int) -> int:
        """Discard the messages before a sequence; returns the oldest sequence that is kept.

        Whole files are removed, so older messages may stay.

        Raises:
            LogWriteError, OSError: The log cannot be changed.
        """
        if self._recent_saved_at != self.next_sequence:
            # Before the files go: if the process is killed in between, the ids are known from both.
            self._files.replace(self.folder / _RECENT, self._recent.dump())
            self._recent_saved_at = self.next_sequence
        if sequence >= self.next_sequence:
            self._log.roll()  # the new, empty segment keeps the next sequence
        self._log.discard_before(sequence)
        return self.first_sequence


class _RecentMessages:
    """The last messages: at least as many as the window, and at most twice as many.

    A message is identified by its id and its timestamp, which never changes. The id alone is not enough: a topic that
    was deleted and created again may reuse it.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def add(self, ids: Sequence[int], times_ns: Sequence[int]) -> None:
        """Remember messages."""
        self._new.update(zip(ids, times_ns, strict=True))
        if len(self._new) >= self.window:
            self._old, self._new = self._new, {}

    def unknown(self, ids: Sequence[int], times_ns: Sequence[int]) -> Sequence[int]:
        """The indexes of the messages that are not known, each message once."""
        distinct = set(ids)
        if len(distinct) == len(ids) and distinct.isdisjoint(self._new) and distinct.isdisjoint(self._old):
            return range(len(ids))
        indexes = []
        seen: set[tuple[int, int]] = set()
        for index, message in enumerate(zip(ids, times_ns, strict=True)):
            if message not in seen and not self._knows(*message):
                indexes.append(index)
                seen.add(message)
        return indexes

    def _knows(self, message_id: int, time_ns: int) -> bool:
        return time_ns in (self._new.get(message_id), self._old.get(message_id))

    def dump(self) -> bytes:
        """The messages of the window as the content of a file."""
        messages = list(chain(self._old.items(), self._new.items()))[-self.window :]
        columns = (array("Q", [each[0] for each in messages]), array("q", [each[1] for each in messages]))
        data = b"".join(column.tobytes() for column in columns)
        return crc32(data).to_bytes(_CRC_BYTES, "big") + data

    def load(self, content: bytes) -> None:
        """Remember the messages of a file. Raises ValueError: it is damaged."""
        crc, data = content[:_CRC_BYTES], content[_CRC_BYTES:]
        if crc32(data).to_bytes(_CRC_BYTES, "big") != crc or len(data) % 16:
            raise ValueError("it does not match its checksum")
        half = len(data) // 2
        self.add(array("Q", data[:half]), array("q", data[half:]))
