"""How the bodies of a topic are shown: decoded, masked and cut."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import trio

from ...bodies.bodies_file import BodiesFileError, TopicReaders, read_bodies_file
from ...bodies.reading import BodyReader, ReadBody
from ...protocol.errors import StartupError

DECODING = trio.CapacityLimiter(2)
"""The threads that decode bodies and search them, so that they do not delay pages without messages."""
WHOLE = 2**31
"""Keeps every body whole."""
PAGE_S = 3.0
"""How long bodies are decompressed, decoded and masked for one page, about. A small body can take a second."""


class Bodies:
    """The formats and masks of all topics.

    Args:
        file: The bodies file; None: none.

    Attributes:
        readers: What it says.

    Raises:
        StartupError: The file cannot be used.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self.readers: TopicReaders = read_readers(file)

    async def reload(self) -> None:
        """Read the file again. Raises StartupError: what it said before stays in use."""
        self.readers = await trio.to_thread.run_sync(read_readers, self._file)


def read_readers(file: Path | None) -> TopicReaders:
    """Read a bodies file; None: nothing is known of bodies. Raises StartupError."""
    if file is None:
        return TopicReaders()
    try:
        return read_bodies_file(file)
    except BodiesFileError as exc:
        raise StartupError(f"--bodies-file: {exc}") from exc


class PageBodies:
    """Reads bodies for one page, as long as the page has time for it.

    Args:
        limit_s: The time; infinite: as long as it takes.
    """

    def __init__(self, limit_s: float = PAGE_S) -> None:
        self._left_s = limit_s

    def read(self, reader: BodyReader, body: bytes) -> ReadBody:
        """Read a body; it stays unread if there is no time left."""
        if not reader.changes(body):
            return ReadBody(body)
        if self._left_s <= 0:
            return reader.unread(body)
        began_s = time.monotonic()
        found = reader.read(body)
        self._left_s -= time.monotonic() - began_s
        return found


class TopicBodies:
    """How one page shows the bodies of a topic.

    Args:
        readers: Of all topics.
        topic: The topic.
        keep_bytes: Keep this much of each body.
        masks: Whether fields are masked; False: the viewer may see them.
        as_published: Whether bodies stay as they are, without masks.
        limit_s: As of `PageBodies`.
        may_have_letters: Whether a topic may have dead letters itself. A letter that comes from there may come from any
            topic: the fields of all are masked.

    Attributes:
        topic, keep_bytes: As given.
    """

    def __init__(
        self,
        readers: TopicReaders,
        topic: str,
        keep_bytes: int = WHOLE,
        *,
        masks: bool = True,
        as_published: bool = False,
        limit_s: float = PAGE_S,
        may_have_letters: Callable[[str], bool] = lambda topic: False,
    ) -> None:
        self.topic = topic
        self.keep_bytes: int = keep_bytes
        self._readers = readers
        self._masks = masks
        self._as_published = as_published
        self._page = PageBodies(limit_s)
        self._may_have_letters = may_have_letters

    def without_limit(self) -> "TopicBodies":
        """Return the same, with as much time as it takes."""
        return TopicBodies(
            self._readers,
            self.topic,
            self.keep_bytes,
            masks=self._masks,
            as_published=self._as_published,
            limit_s=math.inf,
            may_have_letters=self._may_have_letters,
        )

    def reader(self, origin: str = "") -> BodyReader:
        """Return what reads bodies; `origin` is the topic that a dead letter comes from."""
        if origin and self._readers.have_masks and self._may_have_letters(origin):
            found = self._readers.of_unknown_origin(self.topic, origin)
        else:
            found = self._readers.of(self.topic, origin)
        return found if self._masks else found.without_masks()

    def read(self, body: bytes, origin: str = "") -> ReadBody:
        """Read a body, as long as the page has time for it."""
        if self._as_published:
            return ReadBody(body)
        return self._page.read(self.reader(origin), body)
