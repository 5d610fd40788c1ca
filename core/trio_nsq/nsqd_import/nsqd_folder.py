"""nsqd's data folder, locked so that no nsqd can run in it."""

import fcntl
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from ..log.inspection.findings import Finding, Kind
from ..text.wording import count_of
from .diskqueue import QueueFiles, list_queues
from .nsqd_metadata import ImportRefused, TopicMetadata, read_metadata

_SEPARATORS = ":;"
"""The separators of topic and channel in the name of a queue; `;` on Windows."""


def lock(path: Path, owner: str) -> int:
    """Lock a folder against brokers, until the returned descriptor is closed.

    Args:
        owner: For the error: the possible owner of the lock, and what to do.

    Raises:
        ImportRefused: The folder is locked.
        OSError: The folder cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ImportRefused(f"{path} is in use by {owner}") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


class NsqdFolder:
    """The data folder of an nsqd, locked against nsqd until `close` and never changed.

    Raises:
        ImportRefused: It is not nsqd's folder, an nsqd runs in it, or `nsqd.dat` is damaged.
        OSError: The operating system returned an error.

    Attributes:
        topics: The topics, sorted by name.
        findings: Skipped names, and files that belong to no topic.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = lock(path, "a running nsqd: stop it first")
        try:
            self._scan()
        except BaseException:
            self.close()
            raise

    def _scan(self) -> None:
        topics, self.findings = read_metadata(self.path)
        self.topics: list[TopicMetadata] = sorted(topics, key=lambda topic: topic.name)
        self._queues = list_queues(self.path)
        known = {name for topic in self.topics for name in self._names(topic)}
        for name, files in self._queues.items():
            if name not in known and (files.bad or files.data):
                paths = [*files.data.values(), *files.bad]
                size = sum(each.stat().st_size for each in paths)
                files_and_size = f"{count_of(len(paths), 'file')}, {size} bytes"
                what = f"belongs to a queue that is not in nsqd.dat ({files_and_size}): not imported"
                self.findings.append(Finding(Kind.NOTE, paths[0], 0, 0, what))

    def close(self) -> None:
        os.close(self._lock_fd)

    def queues(self, topic: TopicMetadata) -> list[QueueFiles]:
        """Return the files of the topic's own queue, and of its channels, in order."""
        return [self._queues.get(name, QueueFiles()) for name in self._names(topic)]

    def _names(self, topic: TopicMetadata) -> list[str]:
        names = [topic.name]
        for channel in topic.channels:
            candidates = [f"{topic.name}{separator}{channel.name}" for separator in _SEPARATORS]
            names.append(next((name for name in candidates if name in self._queues), candidates[0]))
        return names

    def fingerprint(self, topic: TopicMetadata) -> str:
        """Return a hash that changes when nsqd changes the topic, but not when the folder moves. Raises OSError."""
        queues = [
            [
                [[path.name, path.stat().st_size] for path in files.data.values()],
                files.meta.read_text("latin-1") if files.meta else None,
            ]
            for files in self.queues(topic)
        ]
        return hashlib.sha256(json.dumps([asdict(topic), queues]).encode()).hexdigest()
