"""The batches of a topic's log, as a broker sends them, and the gaps between them. No IO; it does not need trio."""

import json
from collections.abc import Sequence
from typing import TypeAlias

from ...log.gaps import Gap, gaps
from ...log.records import RecordBatch
from ...log.selection import Selection
from ...protocol import MessageSet

Found: TypeAlias = RecordBatch | Gap


def has_gaps(batches: Sequence[RecordBatch], position: int) -> bool:
    """Whether a message from `position` on is missing before or between batches."""
    ends = (position, *(batch.next_sequence for batch in batches))
    return any(batch.base_sequence > end for end, batch in zip(ends, batches, strict=False))


def batches_and_gaps(
    batches: Sequence[RecordBatch], position: int, end: int | None, first_sequence: int
) -> list[Found]:
    """Return what batches have of a range, and the gaps before and between them.

    Args:
        batches: In order, each with messages of the range.
        position: The beginning of the range.
        end: Its end; None: it has none.
        first_sequence: The oldest sequence that is kept, not known before the batches came if there are gaps: what is
            missing may have been discarded meanwhile.
    """
    found: list[Found] = []
    for batch in batches:
        found += gaps(position, batch.base_sequence, first_sequence)
        selection = Selection(position) if end is None else Selection(position, end)
        found.append(_part(batch, selection.indexes(batch)))
        position = found[-1].next_sequence
    return found


def is_for_all_channels(batch: RecordBatch) -> bool:
    """Whether a batch was published to the topic, and not republished for one channel (see its metadata)."""
    return not (batch.metadata and batch.due_ns) or json.loads(batch.metadata).get("channel") is None


def _part(batch: RecordBatch, indexes: range) -> RecordBatch:
    """Some messages of a batch as a batch."""
    if len(indexes) == batch.count:
        return batch
    sizes = batch.messages.sizes
    start = sum(sizes[: indexes.start]) + 4 * indexes.start
    part = sizes[indexes.start : indexes.stop]
    data = batch.messages.data[start : start + sum(part) + 4 * len(part)]
    return RecordBatch(
        batch.base_sequence + indexes.start,
        batch.first_id + indexes.start,
        batch.timestamp_ns,
        batch.due_ns,
        MessageSet(data, part),
        batch.metadata,
    )
