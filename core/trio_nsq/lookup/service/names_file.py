"""Persist the names of topics and channels, so that a restart keeps those that no broker has at the time.

    FOLDER/lookupd.json     {"format": 1, "topics": {"TOPIC": ["CHANNEL", ...], ...}}

The file does not have the brokers: they register again with a restarted service.
"""

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path

from ...log import Files
from ...platform.folder_locks import lock_holder
from ...protocol import is_valid_name
from ...protocol.errors import StartupError
from ...protocol.untrusted_json import decode_json

FORMAT = 1
FILE_NAME = "lookupd.json"


def is_own_name(name: str) -> bool:
    """Whether a service uses this name in its data folder."""
    return name.removesuffix(".tmp") == FILE_NAME


class NamesFile:
    """The file of names; its folder is locked against other servers until `close`.

    Args:
        folder: Created if missing; its parent must exist.
        files: The file system; tests may pass their own.

    Raises:
        StartupError: The folder cannot be used.
    """

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self._files = files or Files()
        self.path: Path = folder / FILE_NAME
        try:
            self._files.make_folder(folder)
            self._lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            raise StartupError(f"--data-path: cannot use {folder}: {exc.strerror}") from exc
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = lock_holder(self._lock_fd)
            os.close(self._lock_fd)
            raise StartupError(
                f"--data-path: {folder} is in use by {holder}, probably another server. Stop it, or choose another "
                "--data-path"
            ) from exc

    def load(self) -> dict[str, list[str]]:
        """Load the channels of each topic; empty if there is no file yet. Raises StartupError."""
        return read_names(self.path)

    def try_to_save(self, names: Mapping[str, list[str]]) -> None:
        """Write the loaded names again, to detect at startup that the folder is not writable.

        A full disk does not prevent the start: it may have space later, and brokers need the service.

        Raises:
            StartupError: The file cannot be written.
        """
        try:
            self.save(names)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                reason = f"cannot write to {self.path.parent}: {exc.strerror}"
                raise StartupError(f"--data-path: {reason}") from exc

    def save(self, names: Mapping[str, list[str]]) -> None:
        """Replace the names in the file. Raises OSError."""
        content = json.dumps({"format": FORMAT, "topics": names})
        self._files.replace(self.path, content.encode() + b"\n")

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock_fd)


def read_names(path: Path) -> dict[str, list[str]]:
    """Read the channels of each topic from a file; empty if it does not exist. Raises StartupError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise StartupError(f"cannot read {path}: {exc.strerror}") from exc
    try:
        return _decode(content)
    except ValueError as exc:
        advice = "restore it, or move it away and lose the topics that no broker has"
        raise StartupError(f"{path} is damaged: {exc}; {advice}") from exc


def _decode(content: bytes) -> dict[str, list[str]]:
    """Decode and check the file's content. Raises ValueError."""
    saved = decode_json(content)
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    topics = saved.get("topics")
    if not isinstance(topics, dict) or not all(isinstance(channels, list) for channels in topics.values()):
        raise ValueError("topics are not lists of channels by name")
    for name in [*topics, *(channel for channels in topics.values() for channel in channels)]:
        if not isinstance(name, str) or not is_valid_name(name):
            raise ValueError(f"{name!r} is not a name")
    return topics
