"""Paths that the commands of `qcli log` take: a data folder, a topic's folder, or one segment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...framework.errors import ExitCode, Failure

if TYPE_CHECKING:
    from trio_nsq.log.inspection.findings import Finding
    from trio_nsq.log.inspection.segments import SegmentPath

NOT_A_LOG = (
    "The command line is wrong, or what it names is not there, cannot be read, or is no data folder, topic's folder or "
    "segment."
)
"""What a usage error is, for these commands."""


@dataclass(frozen=True, slots=True)
class Place:
    """A topic's log, or one segment of it.

    Attributes:
        path: The folder, or the segment.
        topic: Whose it is; None for a segment that lies somewhere else.
    """

    path: Path
    topic: str | None

    @property
    def folder(self) -> Path | None:
        """That of the log, if all of it is meant."""
        return None if self._is_segment else self.path

    @property
    def _is_segment(self) -> bool:
        from trio_nsq.log.segment.format import SUFFIX as SEGMENT_SUFFIX

        return self.path.suffix == SEGMENT_SUFFIX and self.path.is_file()

    def segments(self) -> tuple[list[SegmentPath], list[Finding]]:
        """Its segments, or the one, each with where it has to end; and files that are none. Raises LogReadError."""
        from trio_nsq.log import Files
        from trio_nsq.log.inspection.segments import segment_paths

        if self.folder is not None:
            return segment_paths(self.path, Files())
        segments, findings = segment_paths(self.path.parent, Files())
        return (
            [segment for segment in segments if segment.path == self.path],
            [finding for finding in findings if finding.path == self.path],
        )


def is_data_folder(path: Path) -> bool:
    """Whether topics lie in it."""
    return (path / "topics").is_dir()


def places(path: Path) -> list[Place]:
    """All topics of a data folder, or the one place that is meant. Raises Failure: it is something else."""
    from trio_nsq.broker.storage.data_folder import NSQD_FILE, STATE_FILE, SUFFIX
    from trio_nsq.broker.storage.verify import topic_folders, topic_name
    from trio_nsq.log.segment.format import SUFFIX as SEGMENT_SUFFIX

    if is_data_folder(path):
        return [Place(folder, topic_name(folder)) for folder in topic_folders(path)]
    # A relative name has a parent without a name of its own.
    folder = path.resolve().parent
    in_topic = folder.name.endswith(SUFFIX)
    # Programs of all kinds write *.log; in a topic's folder there should be none but ours.
    if path.is_file() and path.suffix == SEGMENT_SUFFIX and (in_topic or _is_named_as_segment(path)):
        return [Place(path, topic_name(folder) if in_topic else None)]
    if path.is_dir() and (path.name.endswith(SUFFIX) or (path / STATE_FILE).exists() or _has_segments(path)):
        return [Place(path, topic_name(path.resolve()))]
    if (path / NSQD_FILE).exists():
        raise Failure(f"{path} is the data folder of an nsqd: see 'qcli log import --help'.", ExitCode.USAGE)
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
