"""A message of a topic's log as a JSON object, for `tail` and `log dump`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...framework.output import body_field

if TYPE_CHECKING:
    from trio_nsq.log import RecordBatch


def log_record(topic: str | None, batch: RecordBatch, index: int, body: bytes) -> dict[str, object]:
    """The object of one message of a batch.

    Args:
        topic: Its name, if that is known.
        batch: The batch.
        index: Of the message in the batch.
        body: Of the message.
    """
    return {
        "topic": topic,
        "id": f"{batch.first_id + index:016x}",
        "timestamp_ns": batch.timestamp_ns,
        "attempts": 0,
        "sequence": batch.base_sequence + index,
        "due_ns": batch.due_ns or None,
        **body_field(body),
    }
