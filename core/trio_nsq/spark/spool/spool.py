"""A spool: the messages of a channel, from when they are received until they are exported.

A stock nsqd keeps no log that could be read again, so the spool is one. Messages are stored and synced before they are
acknowledged; ranges of the spool are exported like those of a broker's log, and what is in files is discarded. Into the
spool is at least once, from the spool into files is exactly once.

    SPOOL/lock                   held by the process that uses it
    SPOOL/spool.json             the topic and the channel that it is for
    SPOOL/HOST%3APORT/*.log      a log for each nsqd; its sequences never start again
    SPOOL/HOST%3APORT/recent     ids of messages that were discarded, by which a redelivery is recognised
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from urllib.parse import quote, unquote

from ...log import Files, OpenFiles, reasonable_limit
from ...protocol.errors import NSQError
from ..ranges import BrokerRanges
from ..storage import lock_file, make_folder
from .nsqd_log import NsqdLog, ReceivedBatch

WINDOW = 100_000
"""At least this many of the last messages of each nsqd are recognised if they are delivered again."""
_VERSION = 1
_ABOUT, _LOCK = "spool.json", "lock"


class SpoolError(NSQError):
    """A spool cannot be used; the text says why."""


class Spool(AbstractContextManager["Spool"]):
    """A spool. One process at a time can open it; others may read its logs meanwhile.

    Methods block. One thread may call `store` while another one reads `labels`, `messages` and `size_bytes`.

    Args:
        folder: A local folder; created if needed.
        topic, channel: What it is for.
        exported: How far the messages of each nsqd are exported: a new log starts there.
        window: See `WINDOW`.

    Attributes:
        folder: The folder as an absolute path.

    Raises:
        SpoolError: Another process uses it, it is for another channel, or it does not fit the exported ranges.
        OSError, LogError: It cannot be read or written.
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
            raise SpoolError(f"{self.folder} is no spool, and not empty: name another folder for it")
        self._lock = ExitStack()
        if_held = SpoolError(f"the spool {self.folder} is used by another export")
        self._lock.enter_context(lock_file(self.folder / _LOCK, if_held))
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
        """Close its logs and release the lock."""
        for log in self._logs.values():
            log.close()
        self._lock.close()

    def _check(self, topic: str, channel: str) -> None:
        """Check that it is for this topic and channel; if it is new, write that down."""
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

    def _open(self, address: str) -> NsqdLog:
        exported = self._exported.get(address)
        end, last = (exported.end, exported.last) if exported is not None else (0, None)
        log = self._logs[address] = NsqdLog(
            self.folder / quote(address, safe=""), end, self._files, self._window
        )
        foreign = last is not None and log.id_at(last.sequence) not in (None, last.id)
        if foreign or log.next_sequence < end:
            raise SpoolError(
                f"the spool {self.folder} is not the one whose messages of {address} are in the folder: "
                "name that, or another folder"
            )
        return log

    @property
    def labels(self) -> list[str]:
        """The nsqds whose messages were ever stored, as `host:port`."""
        return list(self._logs)

    @property
    def messages(self) -> int:
        """How many messages it holds."""
        return sum(log.next_sequence - log.first_sequence for log in list(self._logs.values()))

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return sum(log.size_bytes for log in list(self._logs.values()))

    def log(self, address: str) -> NsqdLog:
        """The log of one nsqd, which is one of `labels`."""
        return self._logs[address]

    def store(self, batches: Sequence[ReceivedBatch]) -> int:
        """Store and sync messages; afterwards they may be acknowledged.

        Args:
            batches: At least one message each.

        Returns:
            How many were redelivered and therefore left out.

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
