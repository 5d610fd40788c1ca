"""Convert messages to Arrow tables.

Columns are built from buffers, many records at a time, because Python work per message limits the throughput. The
schema, in order; `topic` to `ts` and a binary `body` are never null:

    topic      string
    broker     string             the broker's HTTP address, without http://; with a channel its TCP address
    seq        int64              the sequence in the topic of that broker
    id         string             NSQ's message id, 16 hex digits
    ts_ns      int64              publish time, Unix nanoseconds
    ts         timestamp[us, UTC] the same, rounded down
    attempts   int32              from a channel: deliveries, including this one; from a log: null
    body       binary, or string  with JSON: the columns of its fields instead
    rest       string             JSON with inferred columns: an object of the other fields; null if there are none
    unparsed   binary             text and JSON: the body if it is not valid; otherwise null
"""

from array import array
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from ...log.records import RecordBatch
from ...log.segment.index import big_endian
from ..spool.records import SpooledRows
from .json_columns import parse_bodies
from .layout import REST, UNPARSED, BodyFormat, JsonType, Layout

ARROW_TYPES = {
    JsonType.STRING: pa.string(),
    JsonType.LONG: pa.int64(),
    JsonType.DOUBLE: pa.float64(),
    JsonType.BOOLEAN: pa.bool_(),
    JsonType.TIMESTAMP: pa.timestamp("us", tz="UTC"),
    JsonType.JSON: pa.string(),
}
DICTIONARY_COLUMNS = ["topic", "broker", "attempts"]
"""Columns with few values. For the others Parquet would build a dictionary and discard it."""
_ID_DIGITS = 16


def schema_of(layout: Layout) -> Any:
    """Return the Arrow schema of a layout."""
    fields = [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("broker", pa.string(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("ts_ns", pa.int64(), nullable=False),
        pa.field("ts", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("attempts", pa.int32()),
    ]
    if layout.body is BodyFormat.BINARY:
        fields.append(pa.field("body", pa.binary(), nullable=False))
    elif layout.body is BodyFormat.TEXT:
        fields.append(pa.field("body", pa.string()))
    else:
        fields += [pa.field(column.name, ARROW_TYPES[column.type]) for column in layout.json_columns]
        if layout.keep_rest:
            fields.append(pa.field(REST, pa.string()))
    if layout.body is not BodyFormat.BINARY:
        fields.append(pa.field(UNPARSED, pa.binary()))
    return pa.schema(fields)


class TableBuilder:
    """Collects messages and builds tables.

    Args:
        topic, broker: The values of these columns.

    Attributes:
        body_bytes: The size of the bodies that were added since the last table.
        unparsed: The number of messages so far whose body is in the column `unparsed`.
    """

    def __init__(self, topic: str, broker: str, layout: Layout) -> None:
        self.body_bytes = 0
        self.unparsed = 0
        self.schema = schema_of(layout)
        self._topic = topic
        self._broker = broker
        self._layout = layout
        self._clear()

    def _clear(self) -> None:
        self.body_bytes = 0
        self._bodies: list[bytes] = []
        self._sequences = array("q")
        self._ids = array("Q")
        self._times_ns = array("q")
        self._times_us = array("q")
        self._attempts = array("i")  # one per body, or empty

    def __len__(self) -> int:
        return len(self._bodies)

    def add(self, found: RecordBatch | SpooledRows) -> int:
        """Add the messages of a record or of a spool, and return the size of their bodies.

        A table cannot have messages of both.
        """
        bodies: Sequence[bytes]
        if isinstance(found, SpooledRows):
            bodies = found.bodies
            self._sequences.extend(found.sequences)
            self._ids.extend(found.ids)
            self._times_ns.extend(found.times_ns)
            self._times_us.extend([time_ns // 1000 for time_ns in found.times_ns])
            self._attempts.extend(array("i", found.attempts))
        else:
            bodies = found.messages.bodies()
            count = len(bodies)
            self._sequences.extend(range(found.base_sequence, found.next_sequence))
            self._ids.extend(range(found.first_id, found.first_id + count))
            self._times_ns.extend(array("q", [found.timestamp_ns]) * count)
            self._times_us.extend(array("q", [found.timestamp_ns // 1000]) * count)
        size = sum(map(len, bodies))
        self._bodies += bodies
        self.body_bytes += size
        return size

    def table(self) -> Any:
        """Return the messages as a table, and start the next one."""
        count = len(self._bodies)
        columns = [
            pa.repeat(pa.scalar(self._topic, pa.string()), count),
            pa.repeat(pa.scalar(self._broker, pa.string()), count),
            _fixed(self._sequences, pa.int64()),
            _hex(self._ids),
            _fixed(self._times_ns, pa.int64()),
            _fixed(self._times_us, pa.timestamp("us", tz="UTC")),
            _fixed(self._attempts, pa.int32()) if self._attempts else pa.nulls(count, pa.int32()),
            *self._body_columns(),
        ]
        self._clear()
        return pa.Table.from_arrays(columns, schema=self.schema)

    def _body_columns(self) -> list[Any]:
        if self._layout.body is BodyFormat.BINARY:
            return [pa.array(self._bodies, pa.binary())]
        if self._layout.body is BodyFormat.TEXT:
            return self._text_columns()
        values, rest, unparsed = parse_bodies(self._bodies, self._layout)
        self.unparsed += len(unparsed) - unparsed.count(None)
        columns = [
            pa.array(column_values, ARROW_TYPES[column.type])
            for column, column_values in zip(self._layout.json_columns, values, strict=True)
        ]
        if self._layout.keep_rest:
            columns.append(pa.array(rest, pa.string()))
        return [*columns, pa.array(unparsed, pa.binary())]

    def _text_columns(self) -> list[Any]:
        bodies = pa.array(self._bodies, pa.binary())
        try:
            text = bodies.cast(pa.string())  # checks for UTF-8
        except pa.ArrowInvalid:
            texts = list(map(_decoded, self._bodies))
            self.unparsed += texts.count(None)
            bad = [body if text is None else None for body, text in zip(self._bodies, texts, strict=True)]
            return [pa.array(texts, pa.string()), pa.array(bad, pa.binary())]
        return [text, pa.nulls(len(bodies), pa.binary())]


def _decoded(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _fixed(values: "array[int]", kind: Any) -> Any:
    """Make an Arrow array over the buffer of a Python array, without a copy."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _hex(ids: "array[int]") -> Any:
    """Convert ids to hexadecimal text."""
    count = len(ids)
    digits = big_endian(ids).hex().encode()
    offsets = array("i", range(0, count * _ID_DIGITS + 1, _ID_DIGITS))
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(digits))
