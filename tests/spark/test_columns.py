"""Tests for the tables that an export builds from the buffers of records."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.log.records import RecordBatch
from trio_nsq.protocol import pack_messages
from trio_nsq.spark.export.columns import TableBuilder
from trio_nsq.spark.export.layout import BodyFormat, Layout

numbers = st.integers(0, 2**62) | st.integers(0, 5)
records = st.lists(
    st.tuples(
        numbers, st.integers(0, 2**64 - 20), numbers, st.lists(st.binary(max_size=5), min_size=1, max_size=9)
    ),
    max_size=6,
)


def rows_of(builder: TableBuilder) -> list[dict[str, Any]]:
    """Return the rows of the next table, with times as microseconds."""
    table = builder.table()
    index = table.schema.get_field_index("ts")
    found: list[dict[str, Any]] = table.set_column(index, "ts", table["ts"].cast("int64")).to_pylist()
    return found


@given(records, st.sampled_from([BodyFormat.BINARY, BodyFormat.TEXT]), st.booleans())
def test_rows_of_records(
    found: list[tuple[int, int, int, list[bytes]]], body: BodyFormat, split: bool
) -> None:
    """Each message is a row, whatever the records, and whatever was in the table before."""
    builder = TableBuilder("t", "b:1", Layout(body=body))
    got: list[dict[str, Any]] = []
    for sequence, first_id, time_ns, bodies in found:
        size = builder.add(RecordBatch(sequence, first_id, time_ns, 0, pack_messages(bodies)))
        assert size == sum(map(len, bodies))
        if split:
            got += rows_of(builder)
    if len(builder):
        got += rows_of(builder)
    assert (len(builder), builder.body_bytes) == (0, 0)
    wanted = [
        {
            "topic": "t",
            "broker": "b:1",
            "seq": sequence + number,
            "id": f"{first_id + number:016x}",
            "ts_ns": time_ns,
            "ts": time_ns // 1000,
            "attempts": None,
            **columns_of(each, body),
        }
        for sequence, first_id, time_ns, bodies in found
        for number, each in enumerate(bodies)
    ]
    assert got == wanted


def columns_of(body: bytes, form: BodyFormat) -> dict[str, Any]:
    if form is BodyFormat.BINARY:
        return {"body": body}
    try:
        return {"body": body.decode(), "unparsed": None}
    except UnicodeDecodeError:
        return {"body": None, "unparsed": body}
