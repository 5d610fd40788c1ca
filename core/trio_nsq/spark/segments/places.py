"""Where the segments of a topic are: in a copy of a data folder, or in an archive, on a disk or in a bucket."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ...archive.segment_names import ARCHIVED_SUFFIX, parse_incarnation
from ...archive.stored_files import StoredFiles
from ...archive.tail import ArchiveTail
from ...protocol.errors import NSQError
from ...storage import Storage, absolute_place, local_path, place_below, shown_place
from ..places import keep_secrets, storage_at
from .log import ArchivedLog, SegmentLog

_TOPICS, _TOPIC_SUFFIX = "topics", ".topic"
_LABEL_DIGITS = 8
_BROKER = re.compile(r"[^/=]+(?==)")


class SegmentsError(NSQError):
    """A place does not have the segments of a topic; the text has the reason."""


class TopicNotThere(SegmentsError):
    """A place has no segments of a topic."""


@dataclass(frozen=True, slots=True)
class SegmentsPlace:
    """The segments of one topic. A `LogPlace`.

    Attributes:
        label: The value of the column `broker`.
        folder: The folder of the segments: a path, or a URI without secrets, see `keep_secrets`.
        archived: Whether the segments have the names of an archive.
        given: The label before `named`; empty: `label`.
        incarnation: The identity of the log, so that no task reads another log in this folder; None: unknown.
    """

    label: str
    folder: str
    archived: bool = False
    given: str = ""
    incarnation: str | None = None

    @property
    def where(self) -> str:
        return self.given or self.label

    def named(self, label: str, incarnation: str | None) -> "SegmentsPlace":
        return replace(self, label=label, given=self.where, incarnation=incarnation)

    def open(self) -> SegmentLog:
        return _open(self.folder, self.archived).expecting(self.incarnation)


@lru_cache(maxsize=64)
def _open(folder: str, archived: bool) -> SegmentLog:
    """Return the log of a place; the same one again, because it knows its end."""
    if not archived and (local := local_path(folder)) is not None:
        return SegmentLog(local)
    storage = storage_at(folder)
    if archived:
        archive, topic = _above(folder)
        return ArchivedLog(storage, _tail_of(archive), topic)
    return SegmentLog(Path(storage.shown), StoredFiles(storage), storage.shown)


def _tail_of(archive: str) -> ArchiveTail:
    """Return what has the newest messages of an archive; the same one again, because it knows what it has read."""
    return _tail_at(_join(archive))


@lru_cache(maxsize=8)
def _tail_at(archive: str) -> ArchiveTail:
    return ArchiveTail(storage_at(archive))


def parse_places(texts: Sequence[str], topic: str) -> list[SegmentsPlace]:
    """Find the segments of a topic in places given as `[BROKER=]FOLDER`.

    FOLDER is a data folder, the folder of a topic in one, an archive, or the folder of an incarnation in one. Without
    BROKER the label is the last part of FOLDER; in an archive it continues with the beginning of the incarnation,
    because every incarnation is a log of its own.

    Raises:
        SegmentsError: A place has no segments of the topic, or two have the same label.
        StorageError, OSError: A place cannot be read.
    """
    found = [place for text in texts for place in find_places(*_split(text), topic)]
    _check_labels(found)
    return found


def places_of(texts: Sequence[str], topic: str) -> list[SegmentsPlace]:
    """As `parse_places`, but the topic need not be in all places. Empty if it is in none."""
    found: list[SegmentsPlace] = []
    for text in texts:
        with suppress(TopicNotThere):
            found += find_places(*_split(text), topic)
    _check_labels(found)
    return found


def topics_in(text: str) -> list[str]:
    """Return the topics in a place, given as `[BROKER=]FOLDER`. Raises StorageError, OSError."""
    _, folder = _split(text)
    names = _names(_join(folder, _TOPICS))
    in_data = {name.partition("/")[0] for name in names if "/" in name}
    if in_data:
        return sorted(name.removesuffix(_TOPIC_SUFFIX) for name in in_data if name.endswith(_TOPIC_SUFFIX))
    archived = {name.split("/")[0] for name in _names(folder) if name.endswith(ARCHIVED_SUFFIX)}
    return sorted(archived.union(_tail_of(absolute_place(keep_secrets(folder))).topics()))


def _split(text: str) -> tuple[str | None, str]:
    """Split `[BROKER=]FOLDER`."""
    broker = _BROKER.match(text)
    return (None, text) if broker is None else (broker[0], text[broker.end() + 1 :])


def _check_labels(places: Sequence[SegmentsPlace]) -> None:
    labels = [place.label for place in places]
    for label in labels:
        if labels.count(label) > 1:
            raise SegmentsError(
                f"two folders would have the same value {label!r} in the column broker: give them as NAME=FOLDER"
            )


def find_places(label: str | None, folder: str, topic: str) -> list[SegmentsPlace]:
    """Find the segments of a topic in one folder; see `parse_places`.

    Args:
        label: The label; None: the last part of the folder.

    Raises:
        TopicNotThere: The folder has no segments of the topic.
        SegmentsError: The folder is of another topic.
        StorageError, OSError: The folder cannot be read.
    """
    folder = absolute_place(keep_secrets(folder))
    parts = [part for part in folder.partition("?")[0].split("/") if part]
    name = label or (parts[-1] if parts else "segments")
    if parts[-1:] == [f"{topic}{_TOPIC_SUFFIX}"] and _exists(folder):
        return [SegmentsPlace(label or topic, folder)]
    if parse_incarnation(parts[-1] if parts else "") is not None:
        is_there = _exists(folder)
        if parts[-2:-1] == [topic] and (
            is_there or _newest_incarnation(_above(folder)[0], topic) == parts[-1]
        ):
            return [SegmentsPlace(label or name[:_LABEL_DIGITS], folder, True)]
        if is_there:
            raise SegmentsError(f"the folder {shown_place(folder)} is not in an archive of topic {topic}")
    in_data = _join(folder, _TOPICS, f"{topic}{_TOPIC_SUFFIX}")
    if _exists(in_data):
        return [SegmentsPlace(name, in_data)]
    in_archive = _join(folder, topic)
    incarnations = {
        parent
        for parent, _, file in (each.rpartition("/") for each in _names(in_archive))
        if file.endswith(ARCHIVED_SUFFIX) and parse_incarnation(parent) is not None
    }
    if newest := _newest_incarnation(folder, topic):
        incarnations.add(newest)
    if not incarnations:
        raise TopicNotThere(
            f"there is no topic {topic} in {shown_place(folder)}: it has neither "
            f"{_TOPICS}/{topic}{_TOPIC_SUFFIX}, as a data folder, nor {topic}/INCARNATION/*{ARCHIVED_SUFFIX}, as "
            "an archive"
        )
    return [
        SegmentsPlace(f"{name}-{each[:_LABEL_DIGITS]}", _join(in_archive, each), True)
        for each in sorted(incarnations)
    ]


def _newest_incarnation(archive: str, topic: str) -> str | None:
    """Return the incarnation of the topic of which a broker's archive has newest messages; None: it has none."""
    found = _tail_of(archive).log(topic)
    return None if found is None else found.incarnation


def storage_below(place: str, *names: str) -> Storage:
    """Return the storage of a folder below a place. Raises StorageError."""
    return storage_at(_join(place, *names))


def _names(folder: str) -> list[str]:
    """List the files of a folder and its subfolders. Raises StorageError, OSError."""
    found = storage_at(folder).files()
    return [file.name for file in found] if isinstance(found, list) else []


def _exists(folder: str) -> bool:
    """Whether a folder exists; in a bucket, whether it has files."""
    local = local_path(folder)
    return local.is_dir() if local is not None else bool(_names(folder))


def _above(place: str) -> tuple[str, str]:
    """Return the archive that has the folder of an incarnation, and the topic of it."""
    if local_path(place) is not None:
        path = Path(absolute_place(place))
        return str(path.parent.parent), path.parent.name
    head, mark, options = place.partition("?")
    archive, topic, _ = head.rstrip("/").rsplit("/", 2)
    return archive + mark + options, topic


def _join(place: str, *names: str) -> str:
    """Return the place below another one. A local one is absolute: a relative one may look like a URL without `./`."""
    return place_below(absolute_place(place), *names)
