"""Messages of batches as JSON objects, one per line, with the fields of `qcli tail --format json`."""

from collections.abc import Iterator

from trio_nsq.connectors.source.batch import SourceBatch

from ...framework.output import body_field, json_lines
from ...framework.times import rfc3339

RECORD_BYTES = 170
"""About what the object adds to a body, for rotation by size."""


def json_records(batch: SourceBatch, start: int, stop: int) -> bytes:
    """Return the lines of the messages from one index to another; an encoder for files."""
    return json_lines(_records(batch, start, stop), have_times=True).encode()


def _records(batch: SourceBatch, start: int, stop: int) -> Iterator[dict[str, object]]:
    topic, sequences, dues_ns = batch.topic, batch.sequences, batch.dues_ns
    for index in range(start, stop):
        timestamp_ns = batch.timestamps_ns[index]
        record: dict[str, object] = {
            "topic": topic,
            "id": batch.ids[index].decode("ascii", "replace"),
            "timestamp_ns": timestamp_ns,
            "timestamp": rfc3339(timestamp_ns),
            "attempts": batch.attempts[index],
        }
        if sequences is not None and dues_ns is not None:
            due_ns = dues_ns[index]
            record["sequence"] = sequences[index]
            record["due_ns"] = due_ns or None
            record["due"] = rfc3339(due_ns) if due_ns else None
        yield record | body_field(batch.bodies[index])
