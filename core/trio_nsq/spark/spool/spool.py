"""A spool: where messages of a channel are kept from when they are finished until they are in files.

An nsqd has no log to be read again, so a consumer makes one. It stores what it receives here, on stable storage, and
finishes it only then; ranges of it are exported like those of a broker's log, and what is in files is removed. So a
message comes here at least once, and goes from here into files exactly once.

    SPOOL/lock                   held by whoever uses it
    SPOOL/spool.json             which topic and channel it is for
    SPOOL/HOST%3APORT/*.log      a log of its own for each nsqd, with its own sequences, which never begin anew
    SPOOL/HOST%3APORT/recent     ids of messages that were there before, to be known if they come once more
"""

import fcntl
import json
import logging
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Protocol
from urllib.parse import quote, unquote

from zlib_ng.zlib_ng import crc32

from ...log import DiskLog, Files, OpenFiles, reasonable_limit
from ...protocol.errors import NSQError
from ..broker_log import Bounds
from ..export.manifest import BrokerRanges
from ..ranges import Span
from ..storage import make_folder
from .records import Spooled, SpooledRows, parse_ids, read_spool, record_of, rows_of

WINDOW = 100_000
"""So many messages of each nsqd, at least, are known if they come once more."""
_VERSION = 1
_ABOUT, _LOCK, _RECENT = "spool.json", "lock", "recent"
_CRC_BYTES = 4

logger = logging.getLogger("trio_nsq.spark")


class SpoolError(NSQError):
    """A spool cannot be used; the text says why."""


class Received(Protocol):
    """Messages that came together from one nsqd; a `trio_nsq.client.MessageBatch` is that."""

    bodies: list[bytes]
    ids: list[bytes]
    timestamps_ns: list[int]
    attempts: list[int]
    nsqd_address: str

    def __len__(self) -> int: ...


class Spool(AbstractContextManager["Spool"]):
    """A spool. One at a time may have it open; its logs may be read by anybody meanwhile.

    Methods block. One thread may `store` while another asks for `labels`, `messages` and `size_bytes`.

    Args:
        folder: Where it is, on a local disk; made if it is not there.
        topic, channel: What it is for.
        books: By nsqd, what is in files already: it goes on behind that, also if the spool was removed since.
        window: See `WINDOW`.

    Attributes:
        folder: The same, as an absolute path.

    Raises:
        SpoolError: Somebody else uses it, or it is for something else, or not what the books are about.
        OSError, LogError: It cannot be read or written.
    """

    def __init__(
        self, folder: Path, topic: str, channel: str, books: Mapping[str, BrokerRanges], window: int = WINDOW
    ) -> None:
        self.folder = folder.absolute()
        self._books = books
        self._window = window
        self._files = OpenFiles(Files(), reasonable_limit())
        self._logs: dict[str, _NsqdSpool] = {}
        self._lock = self._locked()
        try:
            self._check(topic, channel)
            for path in sorted(self.folder.iterdir()):
                if path.is_dir():
                    self._open(unquote(path.name))
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let others use it."""
        for log in self._logs.values():
            log.close()
        os.close(self._lock)

    def _locked(self) -> int:
        make_folder(self.folder)
        if {path.name for path in self.folder.iterdir()} - {_LOCK} and not (self.folder / _ABOUT).exists():
            raise SpoolError(f"{self.folder} is no spool, and not empty: name another folder for it")
        fd = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise SpoolError(f"the spool {self.folder} is used by another export") from None
        return fd

    def _check(self, topic: str, channel: str) -> None:
        """See that it is for this topic and channel; begin it if it is new."""
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
                f"the spool {self.folder} is of version {version}, and this program knows {_VERSION} only"
            )
        if source != [topic, channel]:
            raise SpoolError(
                f"the spool {self.folder} is for {'/'.join(map(str, source))}, and not for {topic}/{channel}: another "
                "channel brings every message a second time. Name another folder"
            )

    def _open(self, address: str) -> "_NsqdSpool":
        book = self._books.get(address) or BrokerRanges()
        end = max((span.end for span in [*book.done, *book.pending]), default=0)
        folder = self.folder / quote(address, safe="")
        log = self._logs[address] = _NsqdSpool(folder, end, self._files, self._window)
        foreign = book.last is not None and log.id_at(book.last.sequence) not in (None, book.last.id)
        if foreign or log.next_sequence < end:
            raise SpoolError(
                f"the spool {self.folder} is not the one whose messages of {address} are in the folder: "
                "name that, or another folder"
            )
        return log

    # ------------------------------------------------------------------ what is in it

    @property
    def labels(self) -> list[str]:
        """The nsqds of which anything is, or was, in it: `host:port` each."""
        return list(self._logs)

    @property
    def messages(self) -> int:
        """How many are in it, and not removed yet."""
        return sum(log.next_sequence - log.first_sequence for log in list(self._logs.values()))

    @property
    def size_bytes(self) -> int:
        """What its logs occupy."""
        return sum(log.size_bytes for log in list(self._logs.values()))

    def log(self, address: str) -> "SpoolLog":
        """What is in it of one of these, as a log."""
        return SpoolLog(self._logs[address])

    def store(self, batches: Sequence[Received]) -> int:
        """Put messages into it; on stable storage they are when this returns, and may be finished.

        Args:
            batches: At least one message each.

        Returns:
            How many were there already: they came a second time, and were left out.

        Raises:
            InvalidMessageId: An id is none.
            LogWriteError: They are not stored, or not all of them.
        """
        by_address: dict[str, list[Received]] = {}
        for batch in batches:
            by_address.setdefault(batch.nsqd_address, []).append(batch)
        return sum(
            (self._logs.get(address) or self._open(address)).store(received)
            for address, received in by_address.items()
        )


class _NsqdSpool:
    """What is in a spool of one nsqd.

    Args:
        folder: Where.
        first_sequence: Where to begin at least, if there is nothing.
        open_files: Shared.
        window: See `WINDOW`.
    """

    def __init__(self, folder: Path, first_sequence: int, open_files: OpenFiles, window: int) -> None:
        self.folder = folder
        self._files = open_files.files
        self._log = DiskLog(folder, first_sequence=first_sequence, open_files=open_files)
        self._recent = _Recent(window)
        self._noted_at = -1  # the end of the log when `recent` was written
        self._remember()

    def _remember(self) -> None:
        """Know again what was known when it was last open."""
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
        self._log.close()

    @property
    def first_sequence(self) -> int:
        return self._log.first_sequence

    @property
    def next_sequence(self) -> int:
        return self._log.next_sequence

    @property
    def size_bytes(self) -> int:
        return self._log.size_bytes

    def id_at(self, sequence: int) -> str | None:
        """The id of a message, 16 hex digits; None if it is not there any more."""
        if self.first_sequence <= sequence < self.next_sequence:
            for found in read_spool(self.folder, Span(sequence, sequence + 1)):
                if isinstance(found, SpooledRows):
                    return f"{found.ids[0]:016x}"
        return None

    def store(self, batches: Sequence[Received]) -> int:
        """See `Spool.store`; all from this nsqd."""
        ids = parse_ids(list(chain.from_iterable(batch.ids for batch in batches)))
        times_ns = list(chain.from_iterable(batch.timestamps_ns for batch in batches))
        attempts = list(chain.from_iterable(batch.attempts for batch in batches))
        bodies = list(chain.from_iterable(batch.bodies for batch in batches))
        new = self._recent.unknown(ids, times_ns)
        repeated = len(ids) - len(new)
        if repeated:
            ids = array("Q", [ids[place] for place in new])
            times_ns, attempts = ([column[place] for place in new] for column in (times_ns, attempts))
            bodies = [bodies[place] for place in new]
        if bodies:
            self._log.append([record_of(self.next_sequence, ids, times_ns, attempts, bodies)], sync=True)
            self._recent.add(ids, times_ns)  # not before they are there for good
        return repeated

    def discard_before(self, sequence: int) -> None:
        """Remove what lies before; only whole files go, and all of them if that is all there is."""
        if self._noted_at != self.next_sequence:
            # First: whoever is killed between the two knows more than enough.
            self._files.replace(self.folder / _RECENT, self._recent.dump())
            self._noted_at = self.next_sequence
        if sequence >= self.next_sequence:
            self._log.roll()  # the new one, empty, keeps the place
        self._log.discard_before(sequence)


class _Recent:
    """Which messages came last: at least as many as the window has, and at most twice as many.

    A message is told by its id and its time; the time never changes, and an id alone could be another topic's, of the
    same name, after the first was deleted.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def add(self, ids: Sequence[int], times_ns: Sequence[int]) -> None:
        """Know these from now on."""
        self._new.update(zip(ids, times_ns, strict=True))
        if len(self._new) >= self.window:
            self._old, self._new = self._new, {}

    def unknown(self, ids: Sequence[int], times_ns: Sequence[int]) -> Sequence[int]:
        """The places of those that are not known, each message once."""
        distinct = set(ids)
        if len(distinct) == len(ids) and distinct.isdisjoint(self._new) and distinct.isdisjoint(self._old):
            return range(len(ids))
        places = []
        seen: set[tuple[int, int]] = set()
        for place, message in enumerate(zip(ids, times_ns, strict=True)):
            if message not in seen and not self._knows(*message):
                places.append(place)
                seen.add(message)
        return places

    def _knows(self, message_id: int, time_ns: int) -> bool:
        return time_ns in (self._new.get(message_id), self._old.get(message_id))

    def dump(self) -> bytes:
        """What is known, as a file."""
        messages = list(chain(self._old.items(), self._new.items()))[-self.window :]
        columns = (array("Q", [each[0] for each in messages]), array("q", [each[1] for each in messages]))
        data = b"".join(column.tobytes() for column in columns)
        return crc32(data).to_bytes(_CRC_BYTES, "big") + data

    def load(self, content: bytes) -> None:
        """Know that again. Raises ValueError: it is damaged."""
        crc, data = content[:_CRC_BYTES], content[_CRC_BYTES:]
        if crc32(data).to_bytes(_CRC_BYTES, "big") != crc or len(data) % 16:
            raise ValueError("it does not match its checksum")
        half = len(data) // 2
        ids, times_ns = array("Q", data[:half]), array("q", data[half:])
        self.add(ids, times_ns)


class SpoolLog:
    """What is in a spool of one nsqd, with the methods of a `BrokerLog`.

    The channel stands where it begins, and is moved by removing what lies before.
    """

    def __init__(self, spool: _NsqdSpool) -> None:
        self._spool = spool

    @property
    def folder(self) -> Path:
        """Where it is; a task reads it from there."""
        return self._spool.folder

    def bounds(self, at: str = "latest") -> Bounds:
        """Where it begins and ends; it cannot be asked for any other position."""
        spool = self._spool
        first, end = spool.first_sequence, spool.next_sequence
        return Bounds(first, end, spool.size_bytes, end if at == "latest" else first)

    def id_at(self, sequence: int) -> str | None:
        """The id of a message, 16 hex digits; None if it is not there any more."""
        return self._spool.id_at(sequence)

    def read(self, span: Span) -> Iterator[Spooled]:
        """All there is of a span, and what is missing, in order."""
        return read_spool(self._spool.folder, span)

    def create_channel(self, channel: str) -> None:
        """Nothing has to be done."""

    def channel_position(self, channel: str) -> int:
        """The oldest sequence that is kept."""
        return self._spool.first_sequence

    def move_channel(self, channel: str, sequence: int) -> int:
        """Remove what lies before; returns the oldest sequence that is kept then. Raises LogWriteError, OSError."""
        self._spool.discard_before(sequence)
        return self._spool.first_sequence
