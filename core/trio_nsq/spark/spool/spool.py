"""A spool: the messages of a channel, from when they are received until they are exported.

nsqd has no log that can be read again, so the spool is one. Messages are stored and synced before they are
acknowledged. An export reads the spool like the segments of a broker; then the exported messages are discarded.
Receiving into the spool is at least once, exporting from it is exactly once.

    SPOOL/lock                   held by the process that uses the spool
    SPOOL/spool.json             the topic and the channel of the spool
    SPOOL/HOST%3APORT/*.log      a log for each nsqd; its sequences never restart
    SPOOL/HOST%3APORT/recent     ids of discarded messages, to detect redeliveries
"""

import json
import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote

from ...client.reading.broker_log import Bounds
from ...log import DiskLog, Files, OpenFiles, reasonable_limit
from ...platform.checksum import crc32
from ...protocol.errors import NSQError
from ...protocol.headers import Headers, encode_headers
from ...storage import lock_file, make_folder
from ..ranges import BrokerRanges, covered_up_to
from .records import HOUR_NS, SpooledMessage, SpoolLog, SpoolPlace, columns_of, parse_ids, record_of

WINDOW = 100_000
"""Redeliveries of at least this many of the last messages of each nsqd are detected."""
_VERSION = 2
_ABOUT, _LOCK, _RECENT = "spool.json", "lock", "recent"
_CRC_BYTES = 4

logger: logging.Logger = logging.getLogger("trio_nsq.spark")


class SpoolError(NSQError):
    """A spool cannot be used; the text has the reason."""


class ReceivedBatch(Protocol):
    """Messages that were received together from one nsqd, such as a `trio_nsq.client.MessageBatch`."""

    bodies: list[bytes]
    ids: list[bytes]
    timestamps_ns: list[int]
    attempts: list[int]
    nsqd_address: str

    @property
    def headers(self) -> list[Headers]: ...

    def __len__(self) -> int: ...


class Spool(AbstractContextManager["Spool"]):
    """A spool. One process at a time can open it; others may read its logs meanwhile.

    Methods block. One thread may call `store` while another one reads `messages` and `size_bytes`.

    Args:
        folder: A local folder; created if missing.
        topic, channel: The source of the messages.
        exported: The exported ranges of each nsqd: a new log starts after them.
        window: Redeliveries of at least this many of the last messages of each nsqd are detected.

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
        self.folder: Path = folder.absolute()
        self._exported = exported
        self._window = window
        self._files = OpenFiles(Files(), reasonable_limit())
        self._logs: dict[str, _NsqdLog] = {}
        make_folder(self.folder)
        if {path.name for path in self.folder.iterdir()} - {_LOCK} and not (self.folder / _ABOUT).exists():
            raise SpoolError(f"{self.folder} is not a spool and not empty: choose another folder")
        self._stack = ExitStack()
        lock = lock_file(
            self.folder / _LOCK,
            lambda holder: SpoolError(f"the spool {self.folder} is used by another export: {holder}"),
        )
        self._stack.enter_context(lock)
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
        self._stack.close()

    def _check(self, topic: str, channel: str) -> None:
        """Check that the spool is for this topic and channel; if it is new, store them."""
        path = self.folder / _ABOUT
        about = {"version": _VERSION, "topic": topic, "channel": channel}
        try:
            found = json.loads(path.read_bytes())
            version, *source = (found[name] for name in ("version", "topic", "channel"))
        except FileNotFoundError:
            version, source = _VERSION, [topic, channel]
            self._files.files.replace(path, json.dumps(about).encode() + b"\n")
        except (ValueError, KeyError, TypeError) as exc:
            raise SpoolError(f"{path} cannot be read: {exc!r}") from exc
        if version != _VERSION:
            raise SpoolError(
                f"the spool {self.folder} has version {version}, and this program supports version {_VERSION}: empty "
                "it with the program that wrote it, which exports its messages, and remove it"
            )
        if source != [topic, channel]:
            raise SpoolError(
                f"the spool {self.folder} is for {'/'.join(map(str, source))}, not for {topic}/{channel}: another "
                "channel would export every message again. Choose another folder"
            )

    def _open(self, address: str) -> "_NsqdLog":
        ranges = self._exported.get(address, BrokerRanges())
        log = _NsqdLog(self.folder / quote(address, safe=""), ranges.end, self._files, self._window)
        self._stack.callback(log.disk_log.close)
        bounds = Bounds(log.disk_log.first_sequence, log.disk_log.next_sequence, 0, 0)
        mark = replace(
            ranges.mark, incarnation=None
        )  # a spool that was removed when it was empty has another one
        if not mark.continues(SpoolLog(log.folder), bounds):
            raise SpoolError(
                f"the export folder has messages of {address} from another spool than {self.folder}: "
                "use that spool, or another export folder"
            )
        self._logs[address] = log
        return log

    def places(self, *, by_hour: bool = False) -> list[SpoolPlace]:
        """Return the logs that have messages, for an export; `by_hour`: see `SpoolLog`."""
        return [
            SpoolPlace(address, str(log.folder), by_hour)
            for address, log in self._logs.items()
            if log.messages
        ]

    @property
    def messages(self) -> int:
        """How many messages the spool has."""
        return sum(log.messages for log in list(self._logs.values()))

    @property
    def size_bytes(self) -> int:
        return sum(log.disk_log.size_bytes for log in list(self._logs.values()))

    def store(self, batches: Sequence[ReceivedBatch]) -> int:
        """Store and sync messages; then they may be acknowledged.

        Returns:
            How many messages were redelivered and not stored again.

        Raises:
            InvalidMessageId: An id is not 16 hex digits.
            LogWriteError: Not all messages are stored.
        """
        by_address: dict[str, list[SpooledMessage]] = {}
        for batch in batches:
            headers = map(encode_headers, batch.headers)
            columns = (parse_ids(batch.ids), batch.timestamps_ns, batch.attempts, batch.bodies, headers)
            by_address.setdefault(batch.nsqd_address, []).extend(map(SpooledMessage, *columns))
        return sum(
            (self._logs.get(address) or self._open(address)).store(received)
            for address, received in by_address.items()
        )

    def discard(self, exported: Mapping[str, BrokerRanges]) -> None:
        """Discard the messages in exported ranges. Whole files are removed, so some messages may stay for now.

        Raises:
            LogWriteError, OSError: A log cannot be changed.
        """
        for address, log in self._logs.items():
            if address in exported:
                log.discard_before(covered_up_to(log.disk_log.first_sequence, exported[address].done))


class _NsqdLog:
    """The messages of one nsqd: a log on disk, and the last messages, to detect redeliveries.

    A message is identified by its id and its timestamp, which never changes. The id alone is not enough: a recreated
    topic may reuse it.
    """

    def __init__(self, folder: Path, first_sequence: int, open_files: OpenFiles, window: int) -> None:
        self.folder = folder
        self.disk_log = DiskLog(folder, first_sequence=first_sequence, open_files=open_files)
        self._files = open_files.files
        self._window = window
        self._times_ns: dict[int, int] = {}  # of the last messages, by id: at least the window, at most two
        self._saved_at = -1  # the end of the log when `recent` was written
        self._load_recent()

    @property
    def messages(self) -> int:
        return self.disk_log.next_sequence - self.disk_log.first_sequence

    def store(self, received: Iterable[SpooledMessage]) -> int:
        """Append messages and sync them; return how many were redelivered and not stored again."""
        messages = list(received)
        new = {each[:2]: each for each in messages if self._times_ns.get(each.id) != each.time_ns}
        records = []
        at = self.disk_log.next_sequence
        for _, group in groupby(new.values(), key=lambda each: each.time_ns // HOUR_NS):
            records.append(record_of(at, list(group)))
            at = records[-1].next_sequence
        if records:
            self.disk_log.append(records, sync=True)
            self._add(new.keys())  # only after they are stored
        return len(messages) - len(new)

    def discard_before(self, sequence: int) -> None:
        if self._saved_at != self.disk_log.next_sequence:
            # Before the files are removed: if the process is killed in between, both have the ids.
            self._save_recent()
            self._saved_at = self.disk_log.next_sequence
        if sequence >= self.disk_log.next_sequence:
            self.disk_log.rotate_unless_empty()  # the new, empty segment keeps the next sequence
        self.disk_log.discard_before(sequence)

    def _add(self, messages: Iterable[tuple[int, int]]) -> None:
        self._times_ns.update(messages)
        if (extra := len(self._times_ns) - self._window) > self._window:
            self._times_ns = dict(islice(self._times_ns.items(), extra, None))

    def _load_recent(self) -> None:
        path = self.folder / _RECENT
        try:
            content = path.read_bytes()
            data = content[_CRC_BYTES:]
            if crc32(data).to_bytes(_CRC_BYTES, "big") != content[:_CRC_BYTES] or len(data) % 16:
                raise ValueError("it does not match its checksum")
            half = len(data) // 2
            self._add(zip(array("Q", data[:half]), array("q", data[half:]), strict=True))
        except FileNotFoundError:
            pass
        except ValueError:
            logger.warning("%s is damaged: redelivered messages may be exported twice", path)
        at = max(self.disk_log.first_sequence, self.disk_log.next_sequence - self._window)
        while at < self.disk_log.next_sequence and (batches := self.disk_log.read(at)):
            for columns in filter(None, map(columns_of, batches)):
                self._add(zip(columns.ids, columns.times_ns, strict=True))
            at = batches[-1].next_sequence

    def _save_recent(self) -> None:
        extra = max(0, len(self._times_ns) - self._window)
        messages = list(islice(self._times_ns.items(), extra, None))
        columns = (array("Q", [each[0] for each in messages]), array("q", [each[1] for each in messages]))
        data = b"".join(column.tobytes() for column in columns)
        self._files.replace(self.folder / _RECENT, crc32(data).to_bytes(_CRC_BYTES, "big") + data)
