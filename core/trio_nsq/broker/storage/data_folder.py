"""The data folder: its lock, its topics, and their saved state.

broker.json                     {"crc32": C, "format": F, "next_id": N}: message ids below N may have been used; the
                                format is 2 while there may be a write-ahead log, which older versions would ignore
broker.json.copy                a copy, used if broker.json is damaged
cluster.json                    in the folder of a member of a cluster: see `trio_nsq.cluster.membership`
cluster-state.json              of the coordinator `static:`
archive.json                    the id that the folder shares with its archive: see `trio_nsq.archive.owner`
restore-incomplete              there while the folder is restored from an archive
replica-journal.N               of a follower: see `trio_nsq.replication.journal`
diverged-EPOCH/                 what a former leader had and the next one has not
spare-room                      see `DiskReserve`
write-ahead.N                   what the topics' segments may lack after a power cut, see `WriteAhead`
process-N/                      not of a broker: in the folder of a node, the data folder of a process
topics/NAME.topic/              one folder per topic (the suffix keeps a topic called ".." harmless)
    state.json                  `Checkpoint`: pause flags, channels, unfinished messages; starts with a "crc32". New
                                channels follow, see `Addition`: one JSON object a line, each with a "crc32"
    state.json.previous         the previous state, used if state.json is damaged
    state.json.damaged          a damaged state.json, kept for inspection
    00000000000000000000.log    segments of its log
    00000000000000000000.log.*  a quarantined segment: `.foreign` is another topic's, `.damaged` cannot be read
    incarnation                 identifies the topic's segments, see `Identity`
topics/NAME.topic-deleted-N/    remains of a deleted topic; not a valid name of a topic's folder
topics/NAME.topic-importing/    a topic during its import, or after an interrupted one

In the JSON files, "crc32" has eight hex digits and covers all bytes after the comma that follows it. Without it, a
number that changed on the disk would go unnoticed and could make the broker skip messages.
"""

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from errno import EBADMSG, EFBIG, EIO, EMLINK, ENOSPC, EUCLEAN
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, NewType

from ...archive import OWNER_FILE
from ...log import Files, LogReadError, OpenFiles, is_disk_full, reasonable_limit
from ...log.files import NO_FILE, temporary_of
from ...log.write_ahead.file import write_ahead_files
from ...platform.checksum import crc32
from ...platform.folder_locks import lock_holder
from ...protocol import is_valid_name
from ..errors import StartupError
from ..state.broker import COUNTER_BITS
from ..state.checkpoint import ADDITIONS, Checkpoint
from ..state.topic import StateError
from .disk_reserve import DiskReserve
from .process_folders import folders_in, number_of, unusable

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

SavedCheckpoint = NewType("SavedCheckpoint", Checkpoint)
"""A checkpoint that is on disk. Only `DataFolder.save` makes one: what it no longer needs may be deleted."""

FORMAT = 1
FORMAT_WITH_WRITE_AHEAD = 2
SUFFIX = ".topic"
STATE_FILE = "state.json"
PREVIOUS_STATE_FILE = "state.json.previous"
DAMAGED_STATE_FILE = "state.json.damaged"
BROKER_FILE = "broker.json"
BROKER_COPY_FILE = "broker.json.copy"
NSQD_FILE = "nsqd.dat"
MEMBER_FILE = "cluster.json"
RESTORING_FILE = "restore-incomplete"
RESERVE_FILE = "spare-room"  # older than the name of `DiskReserve`, and stays on disk
TOPICS_FOLDER = "topics"
_RETIRED = re.compile(r"\.topic-(deleted-[0-9]+|importing)\Z")
DAMAGE = NO_FILE | {EIO, EBADMSG, EUCLEAN, EFBIG}
"""Read errors that a retry does not cure: a bad sector, a damaged file system, a path that is not a file, or a file too
large to be the broker's."""
MAX_STATE_BYTES = 1024**3
"""Maximum size of a topic's state; enough for 40 million deferred messages."""
MAX_BROKER_BYTES = 64 * 1024
_IDS_PER_SECOND_BITS = 20
_CHECKED = b'{"crc32":"'
_CHECKED_FROM = len('{"crc32":"00000000",')
_WITHOUT_STATE = "the topic has no channels, and its first channel gets all messages in the log"
MISSING_WRITE_AHEAD = (
    f"missing: {BROKER_FILE} says that there may be a write-ahead log. If the files were lost or left out of a copy, "
    "messages that only they had are lost. Nothing is lost if the broker was killed in the moment in which it began "
    "the log or removed it"
)
ID_RESERVE = 2**32
"""Ids reserved at a time. After a crash, ids continue above the reserved ones, so none repeats."""


def is_own_name(name: str) -> bool:
    """Whether the broker uses this name in a data folder, or refuses a folder that has it."""
    name = name.removesuffix(".tmp").removesuffix(".probe")
    names = (
        BROKER_FILE,
        BROKER_COPY_FILE,
        RESERVE_FILE,
        TOPICS_FOLDER,
        NSQD_FILE,
        MEMBER_FILE,
        RESTORING_FILE,
        OWNER_FILE,
    )
    return name in names or number_of(name) is not None or bool(write_ahead_files(Path(), [name]))


def has_file(path: Path, name: str) -> bool:
    """Return whether a data folder has a file. Raises StartupError: the folder cannot be used."""
    try:
        return (path / name).exists()
    except OSError as exc:
        raise unusable(path, exc) from exc


def refuse_nsqd_folder(path: Path) -> None:
    """Raises StartupError: the folder is that of an nsqd."""
    if has_file(path, NSQD_FILE) and not has_file(path, BROKER_FILE):
        raise StartupError(
            f"--data-path: {path} holds the queues of an nsqd. Choose another folder; to bring the queues over, stop "
            f"nsqd and run 'qcli log import {path} --data-path ANOTHER' first"
        )


def refuse_unfinished_restore(path: Path) -> None:
    """Raise StartupError: the folder was not restored completely."""
    if has_file(path, RESTORING_FILE):
        raise StartupError(
            f"--data-path: {path} was not restored completely, and messages are missing in it: restore it again"
        )


def refuse_member_folder(path: Path) -> None:
    """Raise StartupError: the folder is that of a member of a cluster, which a broker alone must not open."""
    if has_file(path, MEMBER_FILE):
        raise StartupError(
            f"--data-path: {path} is the data folder of a member of a cluster, as {MEMBER_FILE} in it says: give "
            "--cluster and --coordinator. A broker alone would have messages that the other members lack"
        )


def refuse_node_folder(path: Path) -> None:
    """Raise StartupError: the folder is that of a node of several processes, which a broker alone must not open."""
    if found := folders_in(path):
        raise StartupError(
            f"--data-path: {path} has the folders of {len(found)} processes: give --processes {found[-1] + 1}, or the "
            f"folder of one of them, {path}/process-{found[0]}"
        )


class FolderLock:
    """Keeps other brokers from a data folder until `close`, or until the process ends.

    Args:
        path: The folder. Created if missing; its parent must exist.
        restores: Whether it is locked to restore it.

    Raises:
        StartupError: The folder cannot be used.
    """

    def __init__(self, path: Path, files: Files | None = None, *, restores: bool = False) -> None:
        try:
            (files or Files()).make_folder(path)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as exc:
            if path.parent.is_dir():  # a folder such as /proc, in which none can be created
                raise unusable(path, exc) from exc
            raise StartupError(
                f"--data-path: the folder {path.parent} does not exist; create it first"
            ) from exc
        except (FileExistsError, NotADirectoryError) as exc:
            raise StartupError(f"--data-path: {path} is not a folder") from exc
        except OSError as exc:
            raise unusable(path, exc) from exc
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = lock_holder(self._fd)
            os.close(self._fd)
            raise StartupError(
                f"--data-path: {path} is in use by {holder}, probably another broker. Stop it, or choose another "
                "--data-path"
            ) from exc
        try:
            refuse_nsqd_folder(path)
            if not restores:
                refuse_unfinished_restore(path)
        except StartupError:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)


class DataFolder:
    """A data folder, locked against other brokers until `close`.

    Args:
        path: Created if missing; its parent must exist.
        files: The file system; tests may pass their own.
        lock: The lock of the folder, which stays locked after `close`; None: the folder is locked here.

    Attributes:
        open_files: Shared by the topics' logs.
        disk_reserve: Must permit every append to a log.
        lacks_write_ahead: `broker.json` says that there may be a write-ahead log, and there is none. Set by `first_id`.

    Raises:
        StartupError: The folder cannot be used.
    """

    def __init__(self, path: Path, files: Files | None = None, lock: FolderLock | None = None) -> None:
        self.path = path
        self._topics = (
            path / TOPICS_FOLDER
        )  # joined once: a start asks for the folder of each topic several times
        self.files: Files = files or Files()
        self.disk_reserve: DiskReserve = DiskReserve(path / RESERVE_FILE, self.files)
        self.open_files: OpenFiles = OpenFiles(self.files, reasonable_limit())
        self._own_lock = FolderLock(path, self.files) if lock is None else None
        self._saving_ids = Lock()
        self._reserved_below = 0
        self.lacks_write_ahead: bool = False
        try:
            self._prepare()
            self._has_write_ahead = bool(write_ahead_files(path, self.files.names(path)))
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        topics = self.path / TOPICS_FOLDER
        try:
            self.files.make_folder(topics)
            # A broker that was killed may have created folders and files without syncing their names.
            self.files.sync_folder(topics)
            if not (self.path / BROKER_FILE).exists():
                self.files.sync_folder(self.path)
                self._sync_parent()
        except OSError as exc:
            raise StartupError(f"--data-path: cannot write to {self.path}: {exc.strerror}") from exc

    def _sync_parent(self) -> None:
        try:
            self.files.sync_folder(self.path.parent)
        except PermissionError:
            pass  # without write permission there, the broker did not create the folder either

    def close(self) -> None:
        if self._own_lock is not None:
            self._own_lock.close()

    # ------------------------------------------------------------------ ids

    def first_id(self) -> int:
        """Return a counter value above all ids used so far; call `reserve_ids` before using it. Raises StartupError.

        The value is at least the time in seconds times 2**20, so ids do not repeat even if the folder is wiped. A part
        is random: otherwise two brokers with copies of one folder that start in the same second use the same ids, and
        readers could not tell their messages apart.
        """
        by_time = int(time.time()) << _IDS_PER_SECOND_BITS
        random_part = int.from_bytes(os.urandom(2), "big")
        return (max(self._reserved_ids(), by_time) + random_part) % (1 << COUNTER_BITS)

    def _reserved_ids(self) -> int:
        """Return the counter in `broker.json`, or in its copy if damaged; 0 if neither exists. Raises StartupError."""
        paths = self.path / BROKER_FILE, self.path / BROKER_COPY_FILE
        problem = ""
        for path in paths:
            try:
                saved = decode_ids(self.files.content(path, MAX_BROKER_BYTES))
            except FileNotFoundError:
                problem = problem or f"{path} is missing"
            except (OSError, ValueError) as exc:
                problem = problem or _problem(path, exc)
            else:
                if problem:
                    logger.error("%s: %s is used instead", problem, path)
                self.lacks_write_ahead = saved.has_write_ahead and not self._has_write_ahead
                return saved.next_id
        if any(path.exists() for path in paths):
            advice = "if you move it and its copy away, ids continue from the machine's clock, which must be right then"
            raise StartupError(f"{problem}; {advice}")
        if any((self.path / TOPICS_FOLDER).iterdir()):
            logger.warning("%s: ids continue from the machine's clock, which must be right", problem)
        return 0

    def reserve_ids(self, below: int) -> None:
        """Save that ids below this may be used. Thread-safe. Raises OSError."""
        with self._saving_ids:
            self._save_ids(below, has_write_ahead=self._has_write_ahead)

    def begin_write_ahead(self) -> None:
        """Save that there may be a write-ahead log. Thread-safe. Raises OSError."""
        with self._saving_ids:
            if not self._has_write_ahead:
                if not self._reserved_below:  # the disk was full at the start
                    raise OSError(ENOSPC, os.strerror(ENOSPC))
                self._save_ids(self._reserved_below, has_write_ahead=True)

    def end_write_ahead(self) -> None:
        """Save that there is no write-ahead log, if there is none. Not while one may begin. Raises OSError."""
        with self._saving_ids:
            if self._has_write_ahead and not write_ahead_files(self.path, self.files.names(self.path)):
                self._save_ids(self._reserved_below, has_write_ahead=False)

    def _save_ids(self, below: int, *, has_write_ahead: bool) -> None:
        content = _encode_ids(below, has_write_ahead=has_write_ahead)
        for name in (BROKER_FILE, BROKER_COPY_FILE):
            self.disk_reserve.replace(self.path / name, content)
        self._reserved_below = below
        self._has_write_ahead = has_write_ahead

    # ------------------------------------------------------------------ topics

    def topic_folder(self, name: str) -> Path:
        return self._topics / (name + SUFFIX)

    def import_folder(self, name: str) -> Path:
        return self.path / TOPICS_FOLDER / f"{name}{SUFFIX}-importing"

    def topic_names(self) -> Iterator[str]:
        """Yield the topics that have a folder, sorted. Removes the remains of interrupted deletions and imports.

        Raises:
            StartupError: The folder cannot be read.
        """
        topics = self.path / TOPICS_FOLDER
        try:
            paths = sorted(topics.iterdir())
        except OSError as exc:
            raise StartupError(f"cannot read {topics}: {exc.strerror}") from exc
        for path in paths:
            if _RETIRED.search(path.name):
                self.files.remove_folder(path)  # the next start retries what could not be removed
            elif path.name.endswith(SUFFIX) and is_valid_name(path.name.removesuffix(SUFFIX)):
                yield path.name.removesuffix(SUFFIX)

    def read_state(self, name: str) -> tuple[dict[str, Any] | None, bool]:
        """Read a topic's saved state.

        If `state.json` is damaged, renames it, uses the previous state, and logs that.

        Returns:
            The state, None if there is none; and whether it is the previous one.

        Raises:
            StateError: Neither state can be used.
            OSError, LogReadError: The operating system failed to read.
        """
        folder = self.topic_folder(name)
        path, previous = folder / STATE_FILE, folder / PREVIOUS_STATE_FILE
        problem = ""
        try:
            return self._read_state(path, name), False
        except FileNotFoundError:
            problem = f"{path} is missing"
        except ValueError as exc:
            problem = str(exc)
        try:
            state = self._read_state(previous, name)
        except FileNotFoundError:
            if not path.exists():
                return None, False
            advice = f"if you move it away, {_WITHOUT_STATE}"
            raise StateError(f"{problem}; {advice}") from None
        except ValueError as exc:
            advice = f"if you move both away, {_WITHOUT_STATE}"
            raise StateError(f"{problem}; {exc}; {advice}") from None
        if path.exists():
            self.files.rename(path, folder / DAMAGED_STATE_FILE)
        what = (
            "%s: the previous state is used; messages finished since then are delivered again, and changes to the "
            "topic and its channels since then are lost"
        )
        logger.error(what, problem)
        return state, True

    def _read_state(self, path: Path, name: str) -> dict[str, Any]:
        """Raises ValueError, which names the file; FileNotFoundError; LogReadError if a retry may succeed."""
        try:
            state = decode_state(self.files.content(path, MAX_STATE_BYTES), name)
            if incomplete := state.pop(INCOMPLETE, 0):
                what = "%s: its last %d bytes are incomplete, as after a crash while a channel was created"
                logger.warning(what, path, incomplete)
            return state
        except FileNotFoundError:
            raise
        except OSError as exc:
            if exc.errno not in DAMAGE:
                raise LogReadError(path, exc) from exc
            raise ValueError(_problem(path, exc)) from exc
        except ValueError as exc:
            raise ValueError(_problem(path, exc)) from exc

    def save(self, name: str, checkpoint: Checkpoint) -> SavedCheckpoint:
        """Save an encoded checkpoint of a topic, as `write_state`. Raises OSError."""
        self.write_state(name, checkpoint.content)
        return SavedCheckpoint(checkpoint)

    def write_state(self, name: str, content: bytes, *, keep_previous: bool = True) -> None:
        """Save a topic's state, a JSON object, atomically and durably, and keep the previous one.

        Without `keep_previous`, removes the previous states, because they must not be loaded again.

        Raises:
            OSError: Either the previous or the new state is on disk, complete.
        """
        folder = self.topic_folder(name)
        # The line ends here: in a power cut, an addition may leave zeros instead of its first bytes.
        content = encode_checked(content) + b"\n"
        if len(content) > MAX_STATE_BYTES:
            reason = (
                f"the state of topic {name} has {len(content):,} bytes; the maximum is {MAX_STATE_BYTES:,}"
            )
            raise OSError(EFBIG, reason)
        if self.disk_reserve.shortage and not folder.is_dir():
            # A new topic would take the space that the others need to free theirs.
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        self.files.make_folder(folder)
        path, previous = folder / STATE_FILE, folder / PREVIOUS_STATE_FILE
        linked = temporary_of(previous)
        kept = keep_previous and self._link(path, linked)
        if not keep_previous:
            for each in (linked, previous):
                if each.exists():
                    self.files.unlink(each)
        self.disk_reserve.make_fit(len(content))

        def replace() -> None:
            try:
                self.files.replace(path, content)
            except OSError as exc:
                if kept:
                    self._remove(linked)
                    if is_disk_full(exc):
                        # Freeing space matters more than a copy of the state.
                        self._remove(previous)
                raise

        self.disk_reserve.use(replace)
        if kept:
            try:
                self.files.rename(linked, previous)
            except OSError:
                pass  # the state is saved, without a copy of the previous one

    def append_to_state(self, name: str, addition: bytes) -> None:
        """Append a JSON object to a topic's state, durably, after `write_state`.

        It does not use the disk reserve, as `write_state` does.

        Raises:
            OSError: The object, or a part of it, may be in the file. A broker ignores a part at its end. Or the file
                has another name: a backup through links would get a state that is newer than its messages.
        """
        path = self.topic_folder(name) / STATE_FILE
        line = encode_checked(addition) + b"\n"
        found = path.stat()
        if found.st_size + len(line) > MAX_STATE_BYTES:
            raise OSError(EFBIG, os.strerror(EFBIG))
        if found.st_nlink > 1:
            raise OSError(EMLINK, os.strerror(EMLINK))
        self.files.extend(path, found.st_size, line)

    def _link(self, path: Path, to: Path) -> bool:
        """Link a file to a second name, replacing a file of that name; False if that fails or there is no file."""
        for _ in range(2):
            try:
                self.files.link(path, to)
            except FileExistsError:
                self._remove(to)  # left by a broker that was killed
            except OSError:
                return False  # a file system without links keeps no previous state
            else:
                return True
        return False

    def _remove(self, path: Path) -> bool:
        """Remove a file; False if it does not exist or cannot be removed."""
        try:
            self.files.unlink(path)
        except OSError:
            return False
        return True

    def retire_topic(self, name: str) -> Path | None:
        """Rename a topic's folder so that it no longer counts as the topic's; open files stay usable.

        Returns:
            The renamed folder, which the caller removes; None if the topic has no folder.

        Raises:
            OSError: The folder is unchanged.
        """
        folder = self.topic_folder(name)
        if not folder.exists():
            return None
        retired = folder.with_name(f"{folder.name}-deleted-{time.time_ns()}")
        self.files.rename(folder, retired)
        try:
            self.files.sync_folder(folder.parent)
        except OSError:
            self.files.rename(retired, folder)
            raise
        return retired


def _problem(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"cannot read {path}: {error.strerror}"
    return f"{path} is damaged: {error}"


def end_following(files: Files, path: Path, used_ids: int = 0) -> None:
    """Make a data folder that followed a leader one that a broker opens: the leader's write-ahead log is not in it.

    The files have all that was in that log. Raises OSError, or ValueError: `broker.json` is damaged.

    Args:
        used_ids: The leader may have used so many ids that the folder does not know of.
    """
    for each in (path / BROKER_FILE, path / BROKER_COPY_FILE):
        saved = decode_ids(files.content(each, MAX_BROKER_BYTES))
        files.replace(each, _encode_ids(saved.next_id + used_ids, has_write_ahead=False))


def _encode_ids(below: int, *, has_write_ahead: bool) -> bytes:
    format_now = FORMAT_WITH_WRITE_AHEAD if has_write_ahead else FORMAT
    return encode_checked(json.dumps({"format": format_now, "next_id": below}).encode()) + b"\n"


def encode_checked(content: bytes) -> bytes:
    """Add a checksum at the start of a JSON object, which must not be empty."""
    rest = content[1:]
    return b'{"crc32":"%08x",%s' % (crc32(rest), rest)


def decode_checked(content: bytes) -> dict[str, Any]:
    """Decode a JSON object and verify its checksum. Accepts objects without one, for files written by hand.

    Raises:
        ValueError: The content is damaged.
    """
    try:
        state = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(state, dict):
        raise ValueError("it is not a JSON object")
    expected = state.pop("crc32", None)
    if expected is not None and expected != f"{crc32(content.rstrip()[_CHECKED_FROM:]):08x}":
        raise ValueError("its checksum does not match its content")
    return state


INCOMPLETE = "incomplete"
"""The field of a decoded state with the size of an addition at its end that was not written completely."""


def decode_state(content: bytes, name: str = "") -> dict[str, Any]:
    """Decode a topic's saved state, with the channels that follow the checkpoint as `ADDITIONS`.

    Args:
        name: The topic; empty: not known.

    Raises:
        ValueError: It is damaged, or another topic's.
    """
    lines = [content]
    if content.startswith(_CHECKED):  # otherwise it is written by hand, and may have several lines
        lines = content.rstrip().split(b"\n")
    state = decode_checked(lines[0])
    if name and state.get("name", name) != name:
        raise ValueError(f"it is the state of topic {state['name']}")
    additions = []
    for number, line in enumerate(lines[1:], 2):
        try:
            additions.append(decode_checked(line))
        except ValueError:
            if number < len(lines):
                raise
            state[INCOMPLETE] = len(line)
    if additions or INCOMPLETE in state:
        state[ADDITIONS] = additions
    return state


class SavedIds(NamedTuple):
    """The content of `broker.json`.

    Attributes:
        next_id: Ids below it may have been used.
        has_write_ahead: There may be a write-ahead log.
    """

    next_id: int
    has_write_ahead: bool


def decode_ids(content: bytes) -> SavedIds:
    """Decode the output of `DataFolder.reserve_ids`. Raises ValueError."""
    state = decode_checked(content)
    next_id = state.get("next_id")
    if state.get("format") not in (FORMAT, FORMAT_WITH_WRITE_AHEAD) or not isinstance(next_id, int):
        raise ValueError("it is from another version of this program, or not one of its files")
    return SavedIds(next_id, state["format"] == FORMAT_WITH_WRITE_AHEAD)
