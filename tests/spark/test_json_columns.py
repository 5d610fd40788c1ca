"""Tests for JSON bodies as columns."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.spark.export.json_columns import infer_columns, parse_bodies
from trio_nsq.spark.export.layout import BodyFormat, JsonColumn, JsonType, Layout, LayoutError, PartitionBy

T = JsonType


def layout(*columns: tuple[str, JsonType], rest: bool = False) -> Layout:
    return Layout(PartitionBy.NONE, BodyFormat.JSON, tuple(JsonColumn(*each) for each in columns), rest)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (T.STRING, '"a\\u00e4"', "aä"),
        (T.LONG, "-9223372036854775808", -(2**63)),
        (T.DOUBLE, "1", 1.0),
        (T.DOUBLE, "1.5e3", 1500.0),
        (T.BOOLEAN, "true", True),
        (T.TIMESTAMP, '"1970-01-01T00:00:01.5Z"', 1_500_000),
        (T.TIMESTAMP, '"1970-01-01T01:00:00+01:00"', 0),
        (T.TIMESTAMP, '"1969-12-31T23:59:59"', -1_000_000),
        (T.TIMESTAMP, "1.5", 1_500_000),
        (T.JSON, '{"b": [1, "ä"]}', '{"b":[1,"ä"]}'),
        (T.LONG, "null", None),
    ],
)
def test_valid_values(kind: JsonType, text: str, value: object) -> None:
    values, _, unparsed = parse_bodies([b'{"x": %b}' % text.encode()], layout(("x", kind)))
    assert (values, unparsed) == ([[value]], [None])


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (T.STRING, b'{"x": 1}'),
        (T.STRING, b'{"x": "\\ud800"}'),
        (T.LONG, b'{"x": true}'),
        (T.LONG, b'{"x": 1.0}'),
        (T.LONG, b'{"x": 9223372036854775808}'),
        (T.DOUBLE, b'{"x": 1e999}'),
        (T.DOUBLE, b'{"x": NaN}'),
        (T.DOUBLE, b'{"x": 9007199254740993}'),
        (T.BOOLEAN, b'{"x": 1}'),
        (T.TIMESTAMP, b'{"x": "yesterday"}'),
        (T.TIMESTAMP, b'{"x": 1e300}'),
        (T.JSON, b'{"x": Infinity}'),
        (T.LONG, b"not JSON"),
        (T.LONG, b"[1]"),
        (T.LONG, b""),
        (T.LONG, b'{"x": "\xff"}'),
        (T.LONG, b'{"x":' * 100_000),
    ],
)
def test_invalid_values_are_kept_unparsed(kind: JsonType, body: bytes) -> None:
    values, rest, unparsed = parse_bodies([body, b'{"x": null}'], layout(("x", kind), rest=True))
    assert (values, rest, unparsed) == ([[None, None]], [None, None], [body, None])


def test_fields_without_a_column() -> None:
    body = '{"a": 1, "b": "ä", "c": null}'.encode()
    assert parse_bodies([body], layout(("a", T.LONG), rest=True))[1] == ['{"b":"ä","c":null}']
    assert parse_bodies([body], layout(("a", T.LONG)))[1] == [None]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.lists(st.dictionaries(st.sampled_from(["a", "b", "c"]), json_values) | json_values, max_size=6),
    st.integers(0, 6),
)
def test_bodies_can_be_rebuilt(found: list[Any], sampled: int) -> None:
    """Each body can be rebuilt from its columns, whichever sample the columns were inferred from."""
    bodies = [json.dumps(each).encode() for each in found]
    try:
        columns = infer_columns(bodies[:sampled], [])
    except LayoutError:
        return
    chosen = Layout(PartitionBy.NONE, BodyFormat.JSON, tuple(columns), True)
    values, rest, unparsed = parse_bodies(bodies, chosen)
    for index, each in enumerate(found):
        if unparsed[index] is not None:
            assert unparsed[index] == bodies[index]
            continue
        again = json.loads(rest[index] or "{}")
        for column, column_values in zip(columns, values, strict=True):
            if (value := column_values[index]) is not None:
                again[column.field] = json.loads(value) if column.type is T.JSON else value
        # Columns do not distinguish null from a missing field.
        assert again == {name: value for name, value in each.items() if value is not None or name in again}


@pytest.mark.parametrize(
    ("bodies", "given", "expected"),
    [
        ([b'{"a": 1, "b": "x"}'], [], [("a", T.LONG), ("b", T.STRING)]),
        ([b'{"a": 1}', b'{"a": 1.5}'], [], [("a", T.DOUBLE)]),
        ([b'{"a": 1}', b'{"a": "x"}'], [], [("a", T.JSON)]),
        ([b'{"a": null}', b'{"a": true}'], [], [("a", T.BOOLEAN)]),
        ([b'{"a": null}'], [], [("a", T.STRING)]),
        ([b'{"a": {}}', b"nonsense"], [], [("a", T.JSON)]),
        ([b'{"a": 1, "b": 2}'], [("b", None), ("z", None)], [("b", T.LONG), ("z", T.STRING)]),
        ([b'{"a": 1}'], [("a", T.STRING)], [("a", T.STRING)]),
        ([], [("a", None)], [("a", T.STRING)]),
    ],
)
def test_inferred_columns(
    bodies: list[bytes], given: list[tuple[str, JsonType | None]], expected: list[tuple[str, JsonType]]
) -> None:
    assert [(column.field, column.type) for column in infer_columns(bodies, given)] == expected


def test_duplicate_column_names() -> None:
    assert JsonColumn("TS", T.LONG).name == "body_TS"
    with pytest.raises(LayoutError, match="share the column"):
        infer_columns([b'{"a": 1, "A": 2}'], [])
    with pytest.raises(LayoutError, match="share the column"):
        infer_columns([], [("ts", None), ("body_ts", None)])
    with pytest.raises(LayoutError, match="no message of the sample"):
        infer_columns([b"x"], [])
    with pytest.raises(LayoutError, match="501 different fields"):
        infer_columns([json.dumps({f"k{n}": 1 for n in range(501)}).encode()], [])
