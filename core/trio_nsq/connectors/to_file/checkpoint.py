"""The checkpoint of a topic's output: the open file, how much of it is synced, and the positions behind those bytes.

    OUTPUT/.qcli-to-file/TOPIC@CHANNEL.checkpoint
    OUTPUT/.qcli-to-file/TOPIC@CHANNEL.lock         held by the process that writes the topic's files; its time of
                                                    modification is that of the last write to them
    OUTPUT/.qcli-to-file/TOPIC@CHANNEL.cut-N        bytes that another program may have appended to the open file
                                                    after a kill

A checkpoint is saved after the bytes that it describes are on stable storage. So after a crash, everything up to
`OpenFileRecord.length` is in the file and before the positions, and everything after it is not.

Each line of the file is a checkpoint, a JSON object after its CRC-32; the last one counts. The rest of the file is
filled with blanks, which the next lines overwrite: one sync of data without metadata, instead of the two syncs of a
replacement. A line that does not match its CRC was not completed.
"""

import fcntl
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from ...log import Files
from ...platform.checksum import crc32
from ...platform.folder_locks import lock_holder
from ...protocol.errors import NSQError
from ...protocol.untrusted_json import decode_json
from ..source.batch import Position

FOLDER = ".qcli-to-file"
_VERSION = 1
_FILE_BYTES = 64 * 1024
_MOST_BYTES = 16 * 1024 * 1024
_Record = TypeVar("_Record", Position, "OpenFileRecord")


class OutputInUse(NSQError):
    """Another process writes the files of the topic, or one of them; the text says which."""


class CheckpointDamaged(NSQError):
    """A checkpoint cannot be used; the text has the reason and what to do."""


@dataclass(frozen=True, slots=True)
class OpenFileRecord:
    """The file that messages are being appended to.

    Attributes:
        path: Where it is now; absolute.
        final: Its path once it is finished; the same as `path` if it is not renamed.
        key: The name with `<REV>`, from which `final` was made.
        revision: The revision in `final`.
        inode: The file's inode; 0: the file is about to be created.
        length: The bytes that are synced.
        tail_crc: The CRC-32 of the last synced bytes: another file of the same name is recognized.
        raw_bytes: The bytes before compression.
        opened_at: When the file was created, Unix seconds.
        finishing: Whether the file is being renamed to `final`.
    """

    path: str
    final: str
    key: str
    revision: int
    inode: int
    length: int
    tail_crc: int
    raw_bytes: int
    opened_at: float
    finishing: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is durable of one topic's output.

    Attributes:
        positions: Where reading of each log continues, by `FoundLog.key`. Older versions kept the broker's address.
        file: The open file; None: there is none.
    """

    positions: Mapping[str, Position] = field(default_factory=dict)
    file: OpenFileRecord | None = None

    def encode(self, topic: str, channel: str) -> bytes:
        """Return the line of a checkpoint file."""
        about = {"version": _VERSION, "topic": topic, "channel": channel}
        data = json.dumps(about | asdict(self)).encode()
        return b"%08x %s\n" % (crc32(data), data)

    @classmethod
    def decode(cls, content: bytes) -> "Checkpoint":
        """Return the last checkpoint of a file. Raises ValueError, KeyError, TypeError: the file is damaged."""
        last = b""
        for line in content.splitlines():
            crc, _, data = line.partition(b" ")
            if crc != b"%08x" % crc32(data):
                break
            last = data
        found: dict[str, Any] = decode_json(last)
        if found["version"] != _VERSION:
            raise ValueError(f"it has version {found['version']}, and this program supports only {_VERSION}")
        positions = {broker: _record(Position, each) for broker, each in dict(found["positions"]).items()}
        file = found["file"]
        return cls(positions, None if file is None else _record(OpenFileRecord, file))


def _record(kind: type[_Record], values: Mapping[str, Any]) -> _Record:
    """Return values from JSON as an object. Raises ValueError, TypeError: they do not fit."""
    made = kind(**values)
    for each in fields(kind):
        value = getattr(made, each.name)
        if isinstance(value, int) and value >= 0 and each.type is float:
            continue
        fits = isinstance(value, each.type)  # type: ignore[arg-type]  # the annotations are types here
        if not fits or (isinstance(value, int) and value < 0) or (isinstance(value, str) and "\0" in value):
            raise ValueError(f"{each.name} is {value!r}")
    return made


class CheckpointFile:
    """The checkpoint file of a topic and channel, and its lock. One process at a time has it.

    Args:
        folder: The output folder; it must exist.

    Attributes:
        saved: The checkpoint on disk.
        last_write: When the last process called `touch`, Unix seconds.

    Raises:
        OutputInUse: Another process has the lock.
        CheckpointDamaged: The file cannot be used.
        OSError: The folder cannot be read or written.
    """

    def __init__(self, folder: Path, topic: str, channel: str, files: Files) -> None:
        self._end = _FILE_BYTES  # of the last line; at first the file is written anew
        self._topic = topic
        self._channel = channel
        self._files = files
        self._path = folder / FOLDER / f"{topic}@{channel}.checkpoint"
        files.make_folder(self._path.parent)
        self._lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            take_lock(
                self._lock,
                f'topic "{topic}", channel "{channel}": {folder}',
                "choose another --output-dir, or another --channel and --filename-format",
            )
            self.last_write: float = os.fstat(self._lock).st_mtime
            self.saved: Checkpoint = self._load()
        except BaseException:
            os.close(self._lock)
            raise

    def _load(self) -> Checkpoint:
        try:
            return Checkpoint.decode(self._files.content(self._path, _MOST_BYTES))
        except FileNotFoundError:
            return Checkpoint()
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointDamaged(
                f"the checkpoint {self._path} cannot be used ({error!r}): remove it. Reading then continues at the "
                f"position of the channel {self._channel}, and the last messages may be written twice"
            ) from error

    def save(self, checkpoint: Checkpoint) -> None:
        """Save a checkpoint durably. Raises OSError; then the old or the new one is on disk."""
        line = checkpoint.encode(self._topic, self._channel)
        if self._end + len(line) > _FILE_BYTES or not self._append(line):
            self._files.make_folder(self._path.parent)
            self._files.replace(self._path, line.ljust(_FILE_BYTES))
            self._end = 0
        self._end += len(line)
        self.saved = checkpoint

    def _append(self, line: bytes) -> bool:
        """Write a line after the last one; return False if the file does not exist any more."""
        try:
            fd = self._files.open(self._path)
        except FileNotFoundError:
            return False
        try:
            self._files.write(fd, self._end, [line])
            self._files.sync(fd)
        finally:
            self._files.close(fd)
        return True

    def touch(self) -> None:
        """Record that the open file was just written to."""
        os.utime(self._lock)

    def cut_path(self) -> Path:
        """Return a free name for bytes that are cut from a file."""
        numbers = itertools.count(1)
        return next(path for n in numbers if not (path := self._path.with_suffix(f".cut-{n}")).exists())

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)


def take_lock(fd: int, what: str, advice: str) -> None:
    """Lock a file until it is closed.

    Raises:
        OutputInUse: Another process has the lock. The text begins with `what` and ends with `advice`.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputInUse(f"{what} is being written by {lock_holder(fd)}: {advice}") from None
