"""A spool: the messages of a channel, from when they are received until they are exported.

nsqd has no log that can be read again, so the spool is one. Messages are stored and synced before they are
acknowledged. Ranges of the spool are exported like those of a broker's log; then the exported messages are discarded.
Receiving into the spool is at least once, exporting from it is exactly once.

    SPOOL/lock                   held by the process that uses the spool
    SPOOL/spool.json             the topic and the channel of the spool
    SPOOL/HOST%3APORT/*.log      a log for each nsqd; its sequences never restart
    SPOOL/HOST%3APORT/recent     ids of discarded messages, to detect redeliveries
"""

import json
import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote

from ...checksum import crc32
from ...client.reading.broker_log import Bounds
from ...log import DiskLog, Files, OpenFiles, reasonable_limit
from ...log.gaps import Span
from ...protocol.errors import NSQError
from ..ranges import BrokerRanges
from ..storage import lock_file, make_folder
from .records import Spooled, SpooledRows, SpoolPlace, parse_ids, read_spool, record_of, rows_of

WINDOW = 100_000
"""Redeliveries of at least this many of the last messages of each nsqd are detected."""
_VERSION = 1
_ABOUT, _LOCK, _RECENT = "spool.json", "lock", "recent"
_CRC_BYTES = 4

logger = logging.getLogger("trio_nsq.spark")


class SpoolError(NSQError):
    """A spool cannot be used; the text has the reason."""


class ReceivedBatch(Protocol):
    """Messages that were received together from one nsqd, such as a `trio_nsq.client.MessageBatch`."""

    bodies: list[bytes]
    ids: list[bytes]
    timestamps_ns: list[int]
    attempts: list[int]
    nsqd_address: str

    def __len__(self) -> int: ...


class NsqdLog:
    """The messages of one nsqd: a log on disk, and the ids to detect redeliveries.

    It has the methods of a `BrokerLog` that an export uses, so that a spool is exported like a broker. The channel's
    position is the start of the log: moving it discards messages.

    Args:
        open_files: Shared by the logs of a spool.
        window: Redeliveries of at least this many of the last messages are detected.
    """

    def __init__(self, folder: Path, first_sequence: int, open_files: OpenFiles, window: int) -> None:
        self.folder = folder
        self._files = open_files.files
        self.disk_log = DiskLog(folder, first_sequence=first_sequence, open_files=open_files)
        self._recent = _RecentMessages(window)
        self._recent_saved_at = -1  # the end of the log when `recent` was written
        self._load_recent()

    def _load_recent(self) -> None:
        try:
            self._recent.load((self.folder / _RECENT).read_bytes())
        except FileNotFoundError:
            pass
        except ValueError:
            logger.warning("%s is damaged: redelivered messages may be exported twice", self.folder / _RECENT)
        at = max(self.disk_log.first_sequence, self.disk_log.next_sequence - self._recent.window)
        while at < self.disk_log.next_sequence and (batches := self.disk_log.read(at)):
            for rows in map(rows_of, batches):
                self._recent.add(rows.ids, rows.times_ns)
            at = batches[-1].next_sequence

    def store(self, batches: Sequence[ReceivedBatch]) -> int:
        """Append messages and sync them; return how many were redelivered and not stored again.

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
            self.disk_log.append(
                [record_of(self.disk_log.next_sequence, ids, times_ns, attempts, bodies)], sync=True
            )
            self._recent.add(ids, times_ns)  # only after they are stored
        return repeated

    # ------------------------------------------------------------------ as a `BrokerLog`

    def bounds(self, at: str = "latest") -> Bounds:
        """Return the start and the end of the log; `at` is `earliest` or `latest`."""
        first, end = self.disk_log.first_sequence, self.disk_log.next_sequence
        return Bounds(first, end, self.disk_log.size_bytes, end if at == "latest" else first)

    def id_at(self, sequence: int) -> str | None:
        """Return the id of a message, 16 hex digits; None if it is no longer retained."""
        if self.disk_log.first_sequence <= sequence < self.disk_log.next_sequence:
            for found in self.read(Span(sequence, sequence + 1)):
                if isinstance(found, SpooledRows):
                    return f"{found.ids[0]:016x}"
        return None

    def read(self, span: Span) -> Iterator[Spooled]:
        """Read the messages of a span and its gaps, in order."""
        return read_spool(self.folder, span)

    def open_channel(self, channel: str) -> int:
        """Return the oldest retained sequence: a spool is for one channel."""
        return self.disk_log.first_sequence

    def move_channel(self, channel: str, sequence: int) -> None:
        """Discard the messages before a sequence. Whole files are removed, so older messages may stay.

        Raises:
            LogWriteError, OSError: The log cannot be changed.
        """
        if self._recent_saved_at != self.disk_log.next_sequence:
            # Before the files are removed: if the process is killed in between, both have the ids.
            self._files.replace(self.folder / _RECENT, self._recent.dump())
            self._recent_saved_at = self.disk_log.next_sequence
        if sequence >= self.disk_log.next_sequence:
            self.disk_log.roll()  # the new, empty segment keeps the next sequence
        self.disk_log.discard_before(sequence)


class _RecentMessages:
    """The last messages: at least as many as the window, and at most twice as many.

    A message is identified by its id and its timestamp, which never changes. The id alone is not enough: a recreated
    topic may reuse it.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def add(self, ids: Sequence[int], times_ns: Sequence[int]) -> None:
        self._new.update(zip(ids, times_ns, strict=True))
        if len(self._new) >= self.window:
            self._old, self._new = self._new, {}

    def unknown(self, ids: Sequence[int], times_ns: Sequence[int]) -> Sequence[int]:
        """Return the indexes of the unknown messages, without duplicates."""
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
        """Encode the messages of the window for a file."""
        messages = list(chain(self._old.items(), self._new.items()))[-self.window :]
        columns = (array("Q", [each[0] for each in messages]), array("q", [each[1] for each in messages]))
        data = b"".join(column.tobytes() for column in columns)
        return crc32(data).to_bytes(_CRC_BYTES, "big") + data

    def load(self, content: bytes) -> None:
        """Add the messages of a file. Raises ValueError if it is damaged."""
        crc, data = content[:_CRC_BYTES], content[_CRC_BYTES:]
        if crc32(data).to_bytes(_CRC_BYTES, "big") != crc or len(data) % 16:
            raise ValueError("it does not match its checksum")
        half = len(data) // 2
        self.add(array("Q", data[:half]), array("q", data[half:]))


class Spool(AbstractContextManager["Spool"]):
    """A spool. One process at a time can open it; others may read its logs meanwhile.

    Methods block. One thread may call `store` while another one reads `labels`, `messages` and `size_bytes`.

    Args:
        folder: A local folder; created if missing.
        topic, channel: The source of the messages.
        exported: The exported ranges of each nsqd: a new log starts after them.

    Attributes:
        folder: The folder as an absolute path.

    Raises:
        SpoolError: Another process uses the spool, it is for another channel, or it does not match the exported ranges.
        OSError, LogError: The spool cannot be read or written.
    """

    def __init__(
        self,
        folder: Path,
        topic: str,
        channel: str,
        exported: Mapping[str, BrokerRanges],
        window: int = WINDOW,
    ) -> None:
        self.folder = folder.absolute()
        self._exported = exported
        self._window = window
        self._files = OpenFiles(Files(), reasonable_limit())
        self._logs: dict[str, NsqdLog] = {}
        make_folder(self.folder)
        if {path.name for path in self.folder.iterdir()} - {_LOCK} and not (self.folder / _ABOUT).exists():
            raise SpoolError(f"{self.folder} is not a spool and not empty: choose another folder")
        self._lock = ExitStack()
        lock = lock_file(
            self.folder / _LOCK,
            lambda holder: SpoolError(f"the spool {self.folder} is used by another export: {holder}"),
        )
        self._lock.enter_context(lock)
        try:
            self._check(topic, channel)
            for path in sorted(self.folder.iterdir()):
                if path.is_dir():
                    self._open(unquote(path.name))
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the logs and release the lock."""
        for log in self._logs.values():
            log.disk_log.close()
        self._lock.close()

    def _check(self, topic: str, channel: str) -> None:
        """Check that the spool is for this topic and channel; if it is new, store them."""
        path = self.folder / _ABOUT
        try:
            found = json.loads(path.read_bytes())
            version, *source = (found[name] for name in ("version", "topic", "channel"))
        except FileNotFoundError:
            about = {"version": _VERSION, "topic": topic, "channel": channel}
            self._files.files.replace(path, json.dumps(about).encode() + b"\n")
            return
        except (ValueError, KeyError, TypeError) as exc:
            raise SpoolError(f"{path} cannot be read: {exc!r}") from exc
        if version != _VERSION:
            raise SpoolError(
                f"the spool {self.folder} has version {version}; this program supports only version {_VERSION}"
            )
        if source != [topic, channel]:
            raise SpoolError(
                f"the spool {self.folder} is for {'/'.join(map(str, source))}, not for {topic}/{channel}: another "
                "channel would export every message again. Choose another folder"
            )

    def _open(self, address: str) -> NsqdLog:
        exported = self._exported.get(address)
        end, last = (exported.end, exported.last) if exported is not None else (0, None)
        log = self._logs[address] = NsqdLog(
            self.folder / quote(address, safe=""), end, self._files, self._window
        )
        foreign = last is not None and log.id_at(last.sequence) not in (None, last.id)
        if foreign or log.disk_log.next_sequence < end:
            raise SpoolError(
                f"the export folder has messages of {address} from another spool than {self.folder}: "
                "use that spool, or another export folder"
            )
        return log

    @property
    def labels(self) -> list[str]:
        """The nsqds with a log in the spool, as `host:port`."""
        return list(self._logs)

    @property
    def places(self) -> list[SpoolPlace]:
        """The logs of `labels`, to be exported."""
        return [SpoolPlace(label, log.folder, log) for label, log in self._logs.items()]

    @property
    def messages(self) -> int:
        """How many messages the spool has."""
        return sum(log.next_sequence - log.first_sequence for log in self._disk_logs())

    @property
    def size_bytes(self) -> int:
        return sum(log.size_bytes for log in self._disk_logs())

    def _disk_logs(self) -> list[DiskLog]:
        return [each.disk_log for each in list(self._logs.values())]

    def log(self, address: str) -> NsqdLog:
        """Return the log of one nsqd, which must be one of `labels`."""
        return self._logs[address]

    def store(self, batches: Sequence[ReceivedBatch]) -> int:
        """Store and sync messages; then they may be acknowledged.

        Args:
            batches: Batches with at least one message each.

        Returns:
            How many messages were redelivered and not stored again.

        Raises:
            InvalidMessageId: An id is not 16 hex digits.
            LogWriteError: Not all messages are stored.
        """
        by_address: dict[str, list[ReceivedBatch]] = {}
        for batch in batches:
            by_address.setdefault(batch.nsqd_address, []).append(batch)
        return sum(
            (self._logs.get(address) or self._open(address)).store(received)
            for address, received in by_address.items()
        )
