"""The names of topics and channels on disk, so that a restart does not forget those that no broker has at the time.

    FOLDER/lookupd.json     {"format": 1, "topics": {"TOPIC": ["CHANNEL", ...], ...}}

Who has them is not kept: brokers register anew with a service that comes back.
"""

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path

from ...listening import StartupError
from ...log import Files
from ...protocol import is_valid_name
from ...untrusted_json import decode_json

FORMAT = 1
FILE_NAME = "lookupd.json"


class NamesFile:
    """The file, in a folder locked against any other server until `close`.

    Args:
        folder: Made if it is missing; its parent must be there.
        files: The file system; a test may bring its own.

    Raises:
        StartupError: The folder cannot be used.
    """

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self._files = files or Files()
        self.path = folder / FILE_NAME
        try:
            self._files.make_folder(folder)
            self._lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            raise StartupError(f"--data-path: cannot use {folder}: {exc.strerror}") from exc
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._lock_fd)
            raise StartupError(f"--data-path: {folder} is in use by another server") from exc

    def load(self) -> dict[str, list[str]]:
        """The channels of each topic; nothing if there is no file yet. Raises StartupError."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as exc:
            raise StartupError(f"cannot read {self.path}: {exc.strerror}") from exc
        try:
            return _decode(content)
        except ValueError as exc:
            advice = "if you move it away, topics that no broker has are forgotten"
            raise StartupError(f"{self.path} is damaged: {exc}; {advice}") from exc

    def try_to_save(self, names: Mapping[str, list[str]]) -> None:
        """Write what was loaded once more, to find out now whether that can be done.

        A disk that is full is no reason not to start: it may have room later, and brokers need the service.

        Raises:
            StartupError: Nothing can be written there.
        """
        try:
            self.save(names)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                reason = f"cannot write to {self.path.parent}: {exc.strerror}"
                raise StartupError(f"--data-path: {reason}") from exc

    def save(self, names: Mapping[str, list[str]]) -> None:
        """Put these names in place of those that were there. Raises OSError."""
        content = json.dumps({"format": FORMAT, "topics": names})
        self._files.replace(self.path, content.encode() + b"\n")

    def close(self) -> None:
        """Let another server have the folder."""
        os.close(self._lock_fd)


def _decode(content: bytes) -> dict[str, list[str]]:
    """Raises ValueError."""
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
