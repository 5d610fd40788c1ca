"""Convert messages to Arrow tables.

Columns are built from buffers, many records at a time, without a Python object for each message: otherwise they limit
the throughput. The schema, in order; `topic` to `ts` and a binary `body` are never null:

    topic      string
    broker     string             the broker's HTTP address, without http://; with a channel its TCP address
    seq        int64              the sequence in the topic of that broker
    id         string             NSQ's message id, 16 hex digits
    ts_ns      int64              publish time, Unix nanoseconds
    ts         timestamp[us, UTC] the same, rounded down
    attempts   int32              from a channel: deliveries, including this one; from a log: null
    headers    map<string,string> the headers of the message; null if it has none. Only if the layout has headers
    body       binary, or string  with fields: only if the layout keeps bodies
    ...                           JSON, Avro, Protobuf: the columns of the fields
    rest       string             JSON with inferred columns: an object of the other fields; null if there are none
    unparsed   binary             all but binary: the body if it is not valid or does not fit; otherwise null
"""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ...log.records import RecordBatch
from ...log.segment.index import big_endian
from ...protocol.headers import decode_headers
from ...protocol.messages import MessageSet
from ..bodies.schema import SchemaSource, registry_at
from ..schemas.arrow_types import arrow_type
from ..schemas.contracts import SchemaContract, SchemaViolation
from ..schemas.promotions import Promotion
from ..spool.records import columns_of, headers_of
from .dead_letters import Letter
from .json_columns import BodyReader, JsonParser, Parsing, RowRefused
from .layout import BODY, HEADERS, HEADERS_TYPE, REST, UNPARSED, BodyFormat, Layout
from .masks import masks_of
from .paths import with_paths
from .selection import RowSelection
from .typed_arrays import TypedArrays

DICTIONARY_COLUMNS = ["topic", "broker", "attempts", f"{HEADERS}.key_value.key"]
"""Columns with few values. For the others Parquet would build a dictionary and discard it."""
_SEQ = 2
"""The index of the column `seq`."""
_ID_DIGITS = 16
_SIZE_BYTES = 4
"""The size field before each body of a message set."""
_MAX_INT32 = 2**31 - 1
_UINT64 = 2**64 - 1


def schema_of(layout: Layout) -> Any:
    """Return the schema of the messages, with all columns of the layout."""
    fields = [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("broker", pa.string(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("ts_ns", pa.int64(), nullable=False),
        pa.field("ts", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("attempts", pa.int32()),
    ]
    if layout.headers:
        fields.append(pa.field(HEADERS, arrow_type(HEADERS_TYPE)))
    if layout.body is BodyFormat.BINARY or layout.keep_body:
        fields.append(pa.field(BODY, pa.binary(), nullable=False))
    elif layout.body is BodyFormat.TEXT:
        fields.append(pa.field(BODY, pa.string()))
    fields += [pa.field(column.name, arrow_type(column.type)) for column in layout.json_columns]
    if layout.keep_rest:
        fields.append(pa.field(REST, pa.string()))
    if layout.body is not BodyFormat.BINARY:
        fields.append(pa.field(UNPARSED, pa.binary()))
    return pa.schema(fields)


def file_schema(layout: Layout) -> Any:
    """Return the schema of the files: without the columns whose values are in the names of folders."""
    dropped = layout.dropped_columns
    return pa.schema([field for field in schema_of(layout) if field.name not in dropped])


class PendingTable(NamedTuple):
    """A table that is being converted.

    Attributes:
        columns: Those before the columns of the bodies.
        published, bodies: The bodies, and as they are in the table: a field may be masked.
        parsing: The columns of their fields; None: they have no fields.
    """

    columns: list[Any]
    published: Any
    bodies: Any
    parsing: Parsing | None


class TableBuilder:
    """Collects messages and builds tables.

    Args:
        topic, broker: The values of these columns.
        contract, promotion: See `JsonParser`.
        schemas: Where the schemas of bodies come from, if the layout's format needs them.
        keeps_letters: Leave out the messages whose bodies would be in `unparsed`, and collect them as dead letters.

    Raises:
        BodySchemaError: The schema of the layout cannot be used, or the extra for it is not installed.
        FilterError: The condition of the layout is invalid.

    Attributes:
        filtered: The number of messages so far that do not meet the condition of the layout.
        body_bytes: The size of the bodies, and of headers, that were added since the last table.
        discarded_rows: The number of messages so far that the contract left out.
        letters: The dead letters so far, for the caller to take.
        dead_letters: Their number, also of those that were taken.
        left_out_bytes: The size of the bodies of `filtered`, `discarded_rows` and `dead_letters`.
        without_column: The number of messages so far whose headers are lost, as the layout has no column for them.
    """

    def __init__(
        self,
        topic: str,
        broker: str,
        layout: Layout,
        contract: SchemaContract | None = None,
        promotion: Promotion | None = None,
        schemas: SchemaSource | None = None,
        *,
        keeps_letters: bool = False,
    ) -> None:
        self.schema: Any = schema_of(layout)
        self._topic = topic
        self._broker = broker
        self._layout = layout
        bodies = _reader_of(layout, schemas)
        self._parser = JsonParser(layout, contract, promotion, bodies, refuses_rows=keeps_letters)
        self._keeps_letters = keeps_letters
        self.letters: list[Letter] = []
        self.dead_letters: int = 0
        widens = contract in (None, SchemaContract.EVOLVE)
        selected = layout if widens else layout.fixed()  # the condition, too, sees columns as they are
        self._selection = RowSelection(selected, bodies, promotion) if layout.where else None
        self._masks = masks_of(layout)
        self.without_column: int = 0
        self.discarded_rows: int = 0
        self.filtered: int = 0
        self.left_out_bytes: int = 0
        self._clear()

    def _clear(self) -> None:
        self.body_bytes = 0
        self._count = 0
        self._sets: list[MessageSet] = []
        # One value a record, or a message of a spool: a sequence and an id minus the number of its first row.
        self._run_ends = array("i")
        self._sequences = array("q")
        self._ids = array("Q")
        self._times_ns = array("q")
        self._times_us = array("q")
        self._attempts = array("i")  # one a row, or empty
        self._headers: list[tuple[int, Sequence[str]]] = []  # texts from a row on; other rows have none

    def __len__(self) -> int:
        return self._count

    @property
    def unparsed(self) -> int:
        """The number of messages so far whose body is in the column `unparsed`."""
        return self._parser.unparsed

    @property
    def masked(self) -> Mapping[str, int]:
        """How many values each mask has hidden so far, by its field."""
        return {} if self._masks is None else self._masks.hidden

    @property
    def misfits(self) -> Counter[str]:
        """See `JsonParser`."""
        return self._parser.misfits

    @property
    def milliseconds(self) -> Counter[str]:
        """See `JsonParser`."""
        return self._parser.milliseconds

    @property
    def discarded(self) -> Counter[str]:
        """See `JsonParser`."""
        return self._parser.discarded

    @property
    def new_fields(self) -> dict[str, str]:
        """See `JsonParser`."""
        return self._parser.new_fields

    @property
    def widen(self) -> dict[str, str]:
        """See `JsonParser`."""
        if self._selection is None:
            return self._parser.widen
        # The condition sees the values of all messages, and so the widest type of a column.
        return {**self._parser.widen, **self._selection.widen}

    def add(self, found: RecordBatch) -> int:
        """Add the messages of a record, and return the size of their bodies.

        A table cannot have records of a spool and others.
        """
        row, count = self._count, found.count
        self._sets.append(found.messages)
        self._count += count
        if found.metadata and (texts := headers_of(found)):
            if self._layout.headers:
                self._headers.append((row, texts))
                self.body_bytes += sum(map(len, texts))
            else:
                self.without_column += len(texts) - texts.count("")
        if (columns := columns_of(found)) is None:
            self._sequences.append(found.base_sequence - row)
            self._ids.append((found.first_id - row) & _UINT64)
            self._times_ns.append(found.timestamp_ns)
            self._times_us.append(found.timestamp_ns // 1000)
            self._run_ends.append(row + count)
        else:
            self._sequences.extend([found.base_sequence - row] * count)
            self._ids.extend([(each - number) & _UINT64 for number, each in enumerate(columns.ids, row)])
            self._times_ns.extend(columns.times_ns)
            self._times_us.extend([time_ns // 1000 for time_ns in columns.times_ns])
            self._run_ends.extend(range(row + 1, row + count + 1))
            self._attempts.fromlist(columns.attempts.tolist())
        size = found.messages.body_bytes
        self.body_bytes += size
        return size

    def table(self) -> Any:
        """Return the added messages that meet the condition as a table, see `begin` and `finish`."""
        return self.finish(self.begin())

    def begin(self) -> "PendingTable":
        """Begin to convert the added messages, and start the next table. Threads parse JSON bodies meanwhile.

        Raises:
            FilterError: The condition of the layout cannot be evaluated.
        """
        count = self._count
        rows = pa.arange(0, count)
        columns = [
            pa.repeat(pa.scalar(self._topic, pa.string()), count),
            pa.repeat(pa.scalar(self._broker, pa.string()), count),
            self._of_runs(self._sequences, rows),
            _hex(self._of_runs(self._ids, rows)),
            self._of_runs(self._times_ns),
            self._of_runs(self._times_us).cast(pa.timestamp("us", tz="UTC")),
            _fixed(self._attempts, pa.int32()) if self._attempts else pa.nulls(count, pa.int32()),
            *([self._headers_column()] if self._layout.headers else []),
        ]
        bodies = self._published()
        self._clear()
        if self._selection is not None:
            kept = self._selection.matches(dict(zip(self.schema.names, columns, strict=False)), bodies)
            left_out = bodies.filter(pc.invert(kept))
            self.filtered += len(left_out)
            self.left_out_bytes += _size_of(left_out)
            columns, bodies = [each.filter(kept) for each in columns], bodies.filter(kept)
        published = bodies
        if self._masks is not None:
            bodies = pa.array(self._masks.masked(bodies.to_pylist()), pa.binary())
        parsing = self._parser.begin(bodies) if self._layout.body.has_fields else None
        return PendingTable(columns, published, bodies, parsing)

    def finish(self, pending: "PendingTable") -> Any:
        """Return the rows of `begin` as a table; it may have no row. Tables finish in the order in which they began.

        Raises:
            SchemaViolation: A message does not fit the columns, and the contract forbids that.
        """
        columns = [*pending.columns, *self._body_columns(pending)]
        refused = self._parser.refused_rows
        if refused and self._keeps_letters:
            self._add_letters(refused, columns, pending.bodies)
        elif refused:
            self.discarded_rows += len(refused)
        if refused:
            self.left_out_bytes += _size_of(pending.published.take(pa.array(list(refused), pa.int64())))
        table = pa.Table.from_arrays(columns, schema=self.schema)
        if not refused:
            return table
        return table.filter(pa.array([row not in refused for row in range(len(table))], pa.bool_()))

    def _of_runs(self, values: "array[int]", rows: Any = None) -> Any:
        """Return the int64 values of all rows; `rows`, the number of each row, is added to those of records."""
        runs = pa.RunEndEncodedArray.from_arrays(
            _fixed(self._run_ends, pa.int32()), _fixed(values, pa.int64())
        )
        found = pc.run_end_decode(runs)
        return found if rows is None else pc.add(found, rows)

    def _add_letters(self, reasons: Mapping[int, str], columns: Sequence[Any], bodies: Any) -> None:
        headers = columns[self.schema.names.index(HEADERS)] if self._layout.headers else None
        for row, reason in sorted(reasons.items()):
            own = dict((headers[row].as_py() if headers is not None else None) or ())
            self.letters.append(Letter(columns[_SEQ][row].as_py(), bodies[row].as_py(), own, reason))
        self.dead_letters += len(reasons)

    def _headers_column(self) -> Any:
        kind = arrow_type(HEADERS_TYPE)
        if not self._headers:
            return pa.nulls(self._count, kind)
        found: list[list[tuple[str, str]] | None] = [None] * self._count
        for row, texts in self._headers:
            for index, text in enumerate(texts, row):
                if text:
                    found[index] = [*decode_headers(text).items()]
        return pa.array(found, kind)

    def close(self) -> None:
        """Close what evaluates the condition."""
        if self._selection is not None:
            self._selection.close()

    def _body_columns(self, pending: "PendingTable") -> list[Any]:
        layout = self._layout
        if layout.body is BodyFormat.TEXT:
            return self._text_columns(pending.bodies)
        columns = [pending.bodies] if layout.keep_body or not layout.body.has_fields else []
        if pending.parsing is not None:
            try:
                columns += self._parser.finish(pending.parsing)
            except RowRefused as exc:
                sequence = pending.columns[_SEQ][exc.row].as_py()
                raise SchemaViolation(
                    f"message {sequence} of {self._topic} on {self._broker} {exc.reason}, and the schema contract is "
                    f"{SchemaContract.FREEZE}: change the schema, choose another contract, or export to another folder"
                ) from exc
        return columns

    def _published(self) -> Any:
        """Return the bodies as a binary Arrow array, without a Python object for each."""
        sizes = array("i")
        for messages in self._sets:
            sizes.fromlist(messages.sizes)
        ends = pc.cumulative_sum_checked(
            pc.add(_fixed(sizes, pa.int32()), pa.scalar(_SIZE_BYTES, pa.int32()))
        )
        offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
        data = b"".join([messages.data for messages in self._sets])
        buffers = [None, offsets.buffers()[1], pa.py_buffer(data)]
        return pc.binary_slice(
            pa.Array.from_buffers(pa.binary(), len(sizes), buffers), _SIZE_BYTES, _MAX_INT32
        )

    def _text_columns(self, bodies: Any) -> list[Any]:
        self._parser.refused_rows = {}
        try:
            return [bodies.cast(pa.string()), pa.nulls(len(bodies), pa.binary())]  # checks for UTF-8
        except pa.ArrowInvalid:
            bodies = bodies.to_pylist()
        texts = list(map(_decoded, bodies))
        if self._keeps_letters:
            self._parser.refused_rows = {
                row: "is not UTF-8" for row, text in enumerate(texts) if text is None
            }
            return [pa.array(texts, pa.string()), pa.nulls(len(bodies), pa.binary())]
        self._parser.unparsed += texts.count(None)
        bad = [body if text is None else None for body, text in zip(bodies, texts, strict=True)]
        return [pa.array(texts, pa.string()), pa.array(bad, pa.binary())]


def _reader_of(layout: Layout, schemas: SchemaSource | None) -> BodyReader | None:
    """Return how to read the bodies of a layout; None: as JSON. Raises BodySchemaError."""
    if layout.body_schema is None:
        return None
    registry = schemas.registry if schemas is not None else None
    decoder = layout.body_schema.decoder(registry_at(registry) if registry is not None else None)
    decode = with_paths(decoder.decode, layout)
    return BodyReader(decode, TypedArrays, f"valid {layout.body} body", refuses_unknown=True)


def _decoded(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _fixed(values: "array[int]", kind: Any) -> Any:
    """Make an Arrow array over the buffer of a Python array, without a copy."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _size_of(bodies: Any) -> int:
    """Return the size of binary values in bytes."""
    return pc.sum(pc.binary_length(bodies)).as_py() or 0


def _hex(ids: Any) -> Any:
    """Convert an int64 array, the bits of ids, to hexadecimal text."""
    count = len(ids)
    numbers = array("Q")
    if count:
        numbers.frombytes(memoryview(ids.buffers()[1])[: 8 * count])
    digits = pa.py_buffer(big_endian(numbers).hex().encode())
    return pa.Array.from_buffers(pa.binary(_ID_DIGITS), count, [None, digits]).cast(pa.string())
