"""Paths that the commands of `qcli log` take: a data folder, a topic's folder, or one segment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode, Failure

if TYPE_CHECKING:
    from trio_nsq.log.inspection.findings import Finding
    from trio_nsq.log.inspection.segments import SegmentPath

NOT_A_LOG = (
    "The command line is wrong, or the path does not exist, cannot be read, or is not a data folder, a topic's folder "
    "or a segment."
)
"""The meaning of the exit code of usage errors."""


@dataclass(frozen=True, slots=True)
class Place:
    """A topic's log, or one segment of it.

    Attributes:
        path: The folder, or the segment.
        topic: The topic; None for a segment outside of a topic's folder.
    """

    path: Path
    topic: str | None

    @property
    def folder(self) -> Path | None:
        """The log's folder; None for a single segment."""
        return None if self._is_segment else self.path

    @property
    def _is_segment(self) -> bool:
        from trio_nsq.log.segment.format import SUFFIX as SEGMENT_SUFFIX

        return self.path.suffix == SEGMENT_SUFFIX and self.path.is_file()

    def segments(self) -> tuple[list[SegmentPath], list[Finding]]:
        """Return the segments, each with its end, and findings about other files. Raises LogReadError."""
        from trio_nsq.log import Files
        from trio_nsq.log.inspection.segments import segment_paths

        if self.folder is not None:
            return segment_paths(self.path, Files())
        segments, findings = segment_paths(self.path.parent, Files())
        return (
            [segment for segment in segments if segment.path == self.path],
            [finding for finding in findings if finding.path == self.path],
        )


class PathCommand(DocumentedCommand):
    """A command whose first argument is the path of a data folder, of a topic's folder or of a segment."""

    def about_extra(self, typed: Mapping[str, Any], extra: Sequence[str]) -> str:
        """Return where the topic is, if one of the words after the path names one."""
        from trio_nsq.broker.storage.data_folder import SUFFIX, TOPICS_FOLDER

        path, *others = [
            typed[param.name] for param in self.params if isinstance(param, click.Argument) and param.name
        ]
        for name in [*others, *extra]:
            folder = Path(path) / TOPICS_FOLDER / f"{name}{SUFFIX}"
            if folder.is_dir():
                return f"For the topic {name} alone, PATH is its folder: {folder}"
        return f"For one topic, PATH is its folder, DATA/{TOPICS_FOLDER}/TOPIC{SUFFIX}."


def total_bytes(found: Iterable[Place]) -> int:
    """Return the size of all segments of these places. Raises LogReadError."""
    from trio_nsq.log import Files
    from trio_nsq.log.inspection.segments import segment_bytes

    return sum(segment_bytes(segment, Files()) for place in found for segment in place.segments()[0])


def is_data_folder(path: Path) -> bool:
    """Return whether the folder has a folder of topics."""
    return (path / "topics").is_dir()


def places(path: Path) -> list[Place]:
    """Return all topics of a data folder, or the single place of the path. Raises Failure: neither."""
    from trio_nsq.broker.storage.data_folder import NSQD_FILE, STATE_FILE, SUFFIX
    from trio_nsq.broker.storage.process_folders import folders_in
    from trio_nsq.broker.storage.verify import topic_folders, topic_name
    from trio_nsq.log.segment.format import SUFFIX as SEGMENT_SUFFIX

    if is_data_folder(path):
        return [Place(folder, topic_name(folder)) for folder in topic_folders(path)]
    # Resolved, because the parent of a relative name may have no name.
    folder = path.resolve().parent
    in_topic = folder.name.endswith(SUFFIX)
    # Other programs write *.log too, but not in a topic's folder.
    if path.is_file() and path.suffix == SEGMENT_SUFFIX and (in_topic or _is_named_as_segment(path)):
        return [Place(path, topic_name(folder) if in_topic else None)]
    if path.is_dir() and (path.name.endswith(SUFFIX) or (path / STATE_FILE).exists() or _has_segments(path)):
        return [Place(path, topic_name(path.resolve()))]
    if (path / NSQD_FILE).exists():
        raise Failure(f"{path} is the data folder of an nsqd: see 'qcli log import --help'.", ExitCode.USAGE)
    if processes := folders_in(path):
        raise Failure(
            f"{path} is the data folder of several processes: name the folder of one of them, such as "
            f"{path / f'process-{processes[0]}'}.",
            ExitCode.USAGE,
        )
    raise Failure(
        f"{path} is neither a broker's data folder nor a topic's folder in one (DATA/topics/NAME{SUFFIX}) nor a "
        f"segment of its log (such as 00000000000000000000{SEGMENT_SUFFIX}).",
        ExitCode.USAGE,
    )


def _has_segments(folder: Path) -> bool:
    from trio_nsq.log.segment.format import SUFFIX as SEGMENT_SUFFIX

    return any(_is_named_as_segment(path) for path in folder.glob(f"*{SEGMENT_SUFFIX}"))


def _is_named_as_segment(path: Path) -> bool:
    from trio_nsq.log import NotASegmentError
    from trio_nsq.log.segment.format import base_in_name

    try:
        base_in_name(path)
    except NotASegmentError:
        return False
    return True
