"""The layout of an archive of segments: docs/reference/archive.md describes it.

    TOPIC/INCARNATION/incarnation            the file of that name of the topic's folder
    TOPIC/INCARNATION/FIRST-LAST.index       the index of a segment, if it has one
    TOPIC/INCARNATION/FIRST-LAST.seg         a segment, unchanged

INCARNATION has 32 hex digits, FIRST and LAST 20 digits each: the sequences of the first and the last message.
"""

import re
from pathlib import Path
from typing import NamedTuple

from ..log.segment.format import SUFFIX, base_in_name
from ..log.segment.index import SUFFIX as INDEX_SUFFIX

ARCHIVED_SUFFIX = ".seg"
_TOPIC_SUFFIX = ".topic"
_DIGITS = 20
_NAME = re.compile(rf"([0-9]{{{_DIGITS}}})-([0-9]{{{_DIGITS}}})({ARCHIVED_SUFFIX}|{INDEX_SUFFIX})")
_INCARNATION = re.compile(r"[0-9a-f]{32}")


class ArchivedName(NamedTuple):
    """The name of a file of an archived segment: `last` is its last sequence."""

    first: int
    last: int
    suffix: str

    @classmethod
    def parse(cls, name: str) -> "ArchivedName | None":
        """Parse the last part of a file's name; None if it is not a file of an archived segment."""
        found = _NAME.fullmatch(name)
        return cls(int(found[1]), int(found[2]), found[3]) if found is not None else None

    def __str__(self) -> str:
        return f"{self.first:0{_DIGITS}d}-{self.last:0{_DIGITS}d}{self.suffix}"


def segment_object(path: Path, incarnation: bytes, next_sequence: int) -> str:
    """Return the name of a segment in an archive, with its folder.

    Args:
        path: Its path in a data folder.
        next_sequence: The sequence after its last message.
    """
    topic = path.parent.name.removesuffix(_TOPIC_SUFFIX)
    return (
        f"{topic}/{incarnation.hex()}/{ArchivedName(base_in_name(path), next_sequence - 1, ARCHIVED_SUFFIX)}"
    )


def segment_of(name: str) -> str | None:
    """Return the name of the segment that an object is, or is the index of; None: it is another object."""
    folder, _, last = name.rpartition("/")
    if folder.count("/") != 1 or parse_incarnation(folder.rpartition("/")[2]) is None:
        return None
    found = ArchivedName.parse(last)
    return None if found is None else f"{folder}/{found._replace(suffix=ARCHIVED_SUFFIX)}"


def segment_name_of(name: str) -> str:
    """Return the name that a file of an archive has in a topic's folder; other names do not change."""
    found = ArchivedName.parse(name)
    if found is None:
        return name
    return f"{found.first:0{_DIGITS}d}{SUFFIX if found.suffix == ARCHIVED_SUFFIX else INDEX_SUFFIX}"


def parse_incarnation(name: str) -> bytes | None:
    """Parse the name of an incarnation's folder; None if it is not one."""
    return bytes.fromhex(name) if _INCARNATION.fullmatch(name) else None
