"""The data folder: who owns it, what topics lie in it, and their saved state.

broker.json                     {"crc32": C, "format": 1, "next_id": N}: message ids below N may have been used
broker.json.copy                the same again, for when the other is damaged
spare-room                      see `SpareRoom`
topics/NAME.topic/              one folder per topic (the suffix keeps a topic called ".." harmless)
    state.json                  `Checkpoint`: pause flags, channels, what is unfinished; with a "crc32" before it
    state.json.previous         the one saved before, for when the other is damaged
    state.json.damaged          one that was damaged, set aside for people to look at
    00000000000000000000.log    segments of its log
    00000000000000000000.log.*  a segment that was set aside: `.foreign` is another topic's, `.damaged` cannot be read
    incarnation                 which segments are the topic's, see `Identity`
topics/NAME.topic-deleted-N/    what is left of a deleted topic; no topic's folder can be called so
topics/NAME.topic-importing/    a topic that is being imported, or the import was cut short

In the JSON files "crc32", eight hex digits, is of all that follows it and the comma: a number that has changed on the
disk would else be as good as any, and messages be skipped by it.
"""

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from errno import EBADMSG, EFBIG, EIO, ENOSPC, EUCLEAN
from pathlib import Path
from typing import Any

from zlib_ng.zlib_ng import crc32

from ...log import Files, LogReadError, OpenFiles, is_disk_full, reasonable_limit
from ...log.files import NO_FILE, temporary_of
from ...protocol import is_valid_name
from ..errors import StartupError
from ..state.broker import COUNTER_BITS
from ..state.topic import StateError
from .spare_room import SpareRoom

logger = logging.getLogger("trio_nsq.broker")

FORMAT = 1
SUFFIX = ".topic"
STATE_FILE = "state.json"
PREVIOUS_STATE_FILE = "state.json.previous"
DAMAGED_STATE_FILE = "state.json.damaged"
BROKER_FILE = "broker.json"
BROKER_COPY_FILE = "broker.json.copy"
NSQD_FILE = "nsqd.dat"
_RETIRED = re.compile(r"\.topic-(deleted-[0-9]+|importing)\Z")
DAMAGE = NO_FILE | {EIO, EBADMSG, EUCLEAN, EFBIG}
"""Errors of a read that another attempt does not cure: the disk cannot read a place, the file system is damaged, what
has the file's name is no file, or the file is too large to be the broker's."""
MOST_STATE_BYTES = 1024**3
"""A topic's state is smaller: this is room for 40 million deferred messages."""
MOST_BROKER_BYTES = 64 * 1024
_IDS_PER_SECOND_BITS = 20
_CHECKED_FROM = len('{"crc32":"00000000",')
ID_RESERVE = 2**32
"""Ids reserved at a time: after a crash the broker goes on above all it can have used."""


class DataFolder:
    """A data folder, locked against any other broker until `close`.

    Args:
        path: Made if it is missing; its parent must be there.
        files: The file system; a test may bring its own.

    Attributes:
        open_files: The topics' logs share it.
        spare_room: Who appends to logs has to ask it first.

    Raises:
        StartupError: It cannot be used.
    """

    def __init__(self, path: Path, files: Files | None = None) -> None:
        self.path = path
        self.files = files or Files()
        self.spare_room = SpareRoom(path / "spare-room", self.files)
        self.open_files = OpenFiles(self.files, reasonable_limit())
        try:
            self.files.make_folder(path)
            self._lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            if not path.parent.is_dir():
                raise StartupError(f"--data-path: the folder {path.parent} does not exist") from exc
            if path.exists() and not path.is_dir():
                raise StartupError(f"--data-path: {path} is not a folder") from exc
            raise StartupError(f"--data-path: cannot use {path}: {exc.strerror}") from exc
        try:
            self._take()
        except BaseException:
            os.close(self._lock_fd)
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise StartupError(f"--data-path: {self.path} is in use by another broker") from exc
        if (self.path / NSQD_FILE).exists() and not (self.path / BROKER_FILE).exists():
            raise StartupError(
                f"--data-path: {self.path} holds the queues of an nsqd. Choose another folder; to bring the queues "
                f"over, stop nsqd and run 'qcli log import {self.path} --data-path ANOTHER' first"
            )
        topics = self.path / "topics"
        try:
            self.files.make_folder(topics)
            # A broker that was killed may have made names that are there, but not stable yet.
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
            pass  # then it was somebody else who made a folder there

    def close(self) -> None:
        os.close(self._lock_fd)

    # ------------------------------------------------------------------ ids

    def first_id(self) -> int:
        """A counter value above every id given out so far; `reserve_ids` before using it. Raises StartupError.

        It is at least the time in seconds times 2**20, so that ids do not repeat even when the folder is wiped.
        """
        by_time = int(time.time()) << _IDS_PER_SECOND_BITS
        return max(self._reserved_ids(), by_time) % (1 << COUNTER_BITS)

    def _reserved_ids(self) -> int:
        """The counter value in `broker.json`, or its copy if it is damaged; 0 if there is none. Raises StartupError."""
        paths = self.path / BROKER_FILE, self.path / BROKER_COPY_FILE
        problem = ""
        for path in paths:
            try:
                saved = decode_ids(self.files.content(path, MOST_BROKER_BYTES))
            except FileNotFoundError:
                problem = problem or f"{path} is missing"
            except (OSError, ValueError) as exc:
                problem = problem or _problem(path, exc)
            else:
                if problem:
                    logger.error("%s: %s is used instead", problem, path)
                return saved
        if any(path.exists() for path in paths):
            advice = "if you move it and its copy away, ids go on from the machine's clock, which has to be right then"
            raise StartupError(f"{problem}; {advice}")
        if any((self.path / "topics").iterdir()):
            logger.warning("%s: ids go on from the machine's clock, which has to be right", problem)
        return 0

    def reserve_ids(self, below: int) -> None:
        """Remember that ids below this may be used. Raises OSError."""
        content = encode_checked(json.dumps({"format": FORMAT, "next_id": below}).encode())
        for name in (BROKER_FILE, BROKER_COPY_FILE):
            self.spare_room.replace(self.path / name, content + b"\n")

    # ------------------------------------------------------------------ topics

    def topic_folder(self, name: str) -> Path:
        return self.path / "topics" / (name + SUFFIX)

    def import_folder(self, name: str) -> Path:
        return self.path / "topics" / f"{name}{SUFFIX}-importing"

    def topic_names(self) -> Iterator[str]:
        """The topics that have a folder, sorted. What a deletion or an import left unfinished is removed.

        Raises:
            StartupError: The folder cannot be read.
        """
        topics = self.path / "topics"
        try:
            paths = sorted(topics.iterdir())
        except OSError as exc:
            raise StartupError(f"cannot read {topics}: {exc.strerror}") from exc
        for path in paths:
            if _RETIRED.search(path.name):
                self.files.remove_folder(path)  # what resists is tried again at the next start
            elif path.name.endswith(SUFFIX) and is_valid_name(path.name.removesuffix(SUFFIX)):
                yield path.name.removesuffix(SUFFIX)

    def read_state(self, name: str) -> tuple[dict[str, Any] | None, bool]:
        """A topic's saved state.

        If `state.json` is damaged, it is set aside, the state saved before is taken, and that is reported.

        Returns:
            The state, None if there is none; and whether it is the one saved before.

        Raises:
            StateError: Neither can be used.
            OSError, LogReadError: The operating system refused.
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
            advice = "if you move it away, the topic has no channel, and all messages in its log wait for a first one"
            raise StateError(f"{problem}; {advice}") from None
        except ValueError as exc:
            advice = "if you move both away, the topic has no channel, and all messages in its log wait for a first one"
            raise StateError(f"{problem}; {exc}; {advice}") from None
        if path.exists():
            self.files.rename(path, folder / DAMAGED_STATE_FILE)
        what = (
            "%s: the state saved before is taken; messages that were finished since come again, and "
            "what was changed of the topic and its channels since is lost"
        )
        logger.error(what, problem)
        return state, True

    def _read_state(self, path: Path, name: str) -> dict[str, Any]:
        """Raises ValueError, which names the file; FileNotFoundError; LogReadError if it may be better later."""
        try:
            return decode_state(self.files.content(path, MOST_STATE_BYTES), name)
        except FileNotFoundError:
            raise
        except OSError as exc:
            if exc.errno not in DAMAGE:
                raise LogReadError(path, exc) from exc
            raise ValueError(_problem(path, exc)) from exc
        except ValueError as exc:
            raise ValueError(_problem(path, exc)) from exc

    def write_state(self, name: str, content: bytes, *, keep_previous: bool = True) -> None:
        """Save a topic's state, a JSON object, atomically and durably, and keep the one before it.

        Without `keep_previous` nothing is kept of the states before: they must never be taken up again.

        Raises:
            OSError: The one before is still in force, or this one, whole.
        """
        folder = self.topic_folder(name)
        content = encode_checked(content)
        if len(content) > MOST_STATE_BYTES:
            reason = f"the state of topic {name} has {len(content):,} bytes, and at most {MOST_STATE_BYTES:,} are read"
            raise OSError(EFBIG, reason)
        if self.spare_room.shortage and not folder.is_dir():
            # A new topic would take what the others need to be emptied.
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        self.files.make_folder(folder)
        path, previous = folder / STATE_FILE, folder / PREVIOUS_STATE_FILE
        linked = temporary_of(previous)
        kept = keep_previous and self._link(path, linked)
        if not keep_previous:
            for each in (linked, previous):
                if each.exists():
                    self.files.unlink(each)
        self.spare_room.make_fit(len(content))

        def replace() -> None:
            try:
                self.files.replace(path, content)
            except OSError as exc:
                if kept:
                    self._remove(linked)
                    if is_disk_full(
                        exc
                    ):  # the spare room, which lets the disk become empty, is worth more than a copy
                        self._remove(previous)
                raise

        self.spare_room.use(replace)
        if kept:
            try:
                self.files.rename(linked, previous)
            except OSError:
                pass  # the state is saved; there is no copy, or the next time keeps it

    def _link(self, path: Path, to: Path) -> bool:
        """Give a file a second name, instead of whatever has that; False if there is no file, or it cannot be done."""
        for _ in range(2):
            try:
                self.files.link(path, to)
            except FileExistsError:
                self._remove(to)  # it is left from a broker that was killed
            except OSError:
                return False  # on a file system without links there is no second copy
            else:
                return True
        return False

    def _remove(self, path: Path) -> bool:
        """Remove a file; False if there is none, or it resists."""
        try:
            self.files.unlink(path)
        except OSError:
            return False
        return True

    def retire_topic(self, name: str) -> Path | None:
        """Put a topic's folder out of use, in one step; who has its files open may go on.

        Returns:
            What is then to be removed; None if the topic has no folder.

        Raises:
            OSError: The folder is as it was.
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


def encode_checked(content: bytes) -> bytes:
    """A JSON object that is not empty, with a checksum put in front."""
    rest = content[1:]
    return b'{"crc32":"%08x",%s' % (crc32(rest), rest)


def decode_checked(content: bytes) -> dict[str, Any]:
    """What was encoded; objects without a checksum, as people write them, are taken, too.

    Raises:
        ValueError: It is damaged.
    """
    try:
        state = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(state, dict):
        raise ValueError("it holds no JSON object")
    noted = state.pop("crc32", None)
    if noted is not None and noted != f"{crc32(content.rstrip()[_CHECKED_FROM:]):08x}":
        raise ValueError("its checksum does not match what it says")
    return state


def decode_state(content: bytes, name: str) -> dict[str, Any]:
    """The saved state of the topic of this name. Raises ValueError: it is damaged, or another topic's."""
    state = decode_checked(content)
    if state.get("name", name) != name:
        raise ValueError(f"it is the state of topic {state['name']}")
    return state


def decode_ids(content: bytes) -> int:
    """What `DataFolder.reserve_ids` has written. Raises ValueError."""
    state = decode_checked(content)
    next_id = state.get("next_id")
    if state.get("format") != FORMAT or not isinstance(next_id, int):
        raise ValueError("it is from another version of this program, or none of its files")
    return next_id
