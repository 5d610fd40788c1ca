"""Records of files: `log`, `archive`."""

from typing import Literal, TypedDict


class FindingRecord(TypedDict):
    """Damage or a gap in a data folder.

    Attributes:
        kind: damage: stored messages cannot be read, or a broker would not serve them; torn: an incomplete write at
            the end of a log, which was never acknowledged; note: nothing is lost.
        offset, end: Bytes in the file.
        what: A sentence.
        sequence: Of the first affected message; null: unknown.
        messages: How many are lost; null: unknown.
    """

    kind: str
    file: str
    offset: int
    end: int
    what: str
    sequence: int | None
    messages: int | None


class VerifiedRecord(TypedDict):
    """A topic, or the data folder itself.

    Attributes:
        topic: null: the folder itself, or a segment file, which does not tell it.
        records, messages: Whole ones.
        next_sequence: The sequence after the last message.
        lost_messages: An upper limit; a lower limit if a finding has null messages.
    """

    topic: str | None
    path: str
    state: Literal["ok", "torn", "damaged"]
    segments: int
    size_bytes: int
    records: int
    messages: int
    first_sequence: int
    next_sequence: int
    lost_messages: int
    findings: list[FindingRecord]


class ImportedChannel(TypedDict):
    """A channel of an nsqd.

    Attributes:
        attempted: Messages that were delivered before.
    """

    channel: str
    paused: bool
    messages: int
    attempted: int


class ImportedRecord(TypedDict):
    """A topic of an nsqd.

    Attributes:
        outcome: imported, planned (with --dry-run), imported earlier, or skipped.
        messages: Each stored once.
        body_bytes: The size of their bodies.
        waiting: Messages that are in no channel yet.
    """

    topic: str
    outcome: str
    paused: bool
    messages: int
    body_bytes: int
    waiting: int
    channels: list[ImportedChannel]
    findings: list[FindingRecord]


class ImportFindingsRecord(TypedDict):
    """The findings that concern no topic: the last record, if there are some."""

    topic: None
    findings: list[FindingRecord]


class ArchivedTopicRecord(TypedDict):
    """A topic whose segments were copied into an archive.

    Attributes:
        incarnation: 32 hex digits; null: it has no segment.
        copied, copied_bytes: The segments that were copied, and their size.
        present: The segments that the archive had before.
        next_sequence: The sequence after the last archived message.
    """

    topic: str
    incarnation: str | None
    copied: int
    copied_bytes: int
    present: int
    next_sequence: int
    findings: list[FindingRecord]


class CheckpointRecord(TypedDict):
    """A copy of the data folder in an archive.

    Attributes:
        time, until: The broker can be restored as it was at any time between them, Unix seconds.
        size: Of the copy, bytes.
        objects: Those with the operations behind it.
        segments, segment_size: The archived segments that belong to it, and their bytes.
    """

    checkpoint: int
    time: float
    until: float
    size: int
    objects: int
    segments: int
    segment_size: int


class ArchiveFindingRecord(TypedDict):
    """An object of an archive that is missing or damaged.

    Attributes:
        checkpoint: The one that needs the object, or is before it.
        what: A sentence.
    """

    checkpoint: int
    what: str
