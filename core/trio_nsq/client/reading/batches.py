"""The batches of a topic's log, as a broker sends them, and the gaps between them. No IO, no trio."""

import json
from collections.abc import Sequence
from typing import TypeAlias

from ...log.gaps import Gap, gaps
from ...log.records import RecordBatch
from ...protocol import MessageSet

Found: TypeAlias = RecordBatch | Gap


def has_gaps(batches: Sequence[RecordBatch], position: int) -> bool:
    """Whether a message from `position` on is missing before or between batches."""
    ends = (position, *(batch.next_sequence for batch in batches))
    return any(batch.base_sequence > end for end, batch in zip(ends, batches, strict=False))


def batches_and_gaps(
    batches: Sequence[RecordBatch], position: int, end: int | None, first_sequence: int
) -> list[Found]:
    """Return the parts of batches that are in a range, and the gaps before and between them.

    Args:
        batches: In order, each with messages of the range.
        position: The start of the range.
        end: The end of the range; None: unlimited.
        first_sequence: The oldest retained sequence. If there are gaps, ask for it after the batches were received:
            retention may have deleted the missing messages meanwhile.
    """
    found: list[Found] = []
    for batch in batches:
        if batch.base_sequence > position:
            found += gaps(position, batch.base_sequence, first_sequence)
        found.append(_part(batch, position, end))
        position = found[-1].next_sequence
    return found


def is_for_all_channels(batch: RecordBatch) -> bool:
    """Whether a batch was published to the topic, not republished to one channel (see its metadata)."""
    return not (batch.metadata and batch.due_ns) or json.loads(batch.metadata).get("channel") is None


def _part(batch: RecordBatch, first: int, end: int | None) -> RecordBatch:
    """Return the messages of a batch that are in a range, as a batch."""
    start = max(first - batch.base_sequence, 0)
    stop = batch.count if end is None else min(end - batch.base_sequence, batch.count)
    if stop - start == batch.count:
        return batch
    sizes = batch.messages.sizes
    data_start = sum(sizes[:start]) + 4 * start
    part = sizes[start:stop]
    data = batch.messages.data[data_start : data_start + sum(part) + 4 * len(part)]
    return RecordBatch(
        batch.base_sequence + start,
        batch.first_id + start,
        batch.timestamp_ns,
        batch.due_ns,
        MessageSet(data, part),
        batch.metadata,
    )
