"""Tests for JSON bodies as columns."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.spark.export.json_columns import JsonParser, infer_columns
from trio_nsq.spark.export.layout import (
    MAX_COLUMNS,
    BodyFormat,
    JsonColumn,
    JsonType,
    Layout,
    LayoutError,
    name_columns,
)

T = JsonType


def layout(*columns: tuple[str, JsonType], rest: bool = False, widens: bool = False) -> Layout:
    json_columns = tuple(JsonColumn(field, kind, field, widens) for field, kind in columns)
    return Layout(body=BodyFormat.JSON, json_columns=json_columns, keep_rest=rest)


def parse(
    bodies: list[bytes], chosen: Layout
) -> tuple[list[list[Any]], list[str | None], list[bytes | None]]:
    """Return the values of each column, of `rest`, and of `unparsed`; timestamps as microseconds."""
    arrays = JsonParser(chosen).parse(bodies)
    values = [
        (each.cast("int64") if column.type is T.TIMESTAMP else each).to_pylist()
        for column, each in zip(chosen.json_columns, arrays, strict=False)
    ]
    rest = arrays[-2].to_pylist() if chosen.keep_rest else [None] * len(bodies)
    return values, rest, arrays[-1].to_pylist()


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (T.STRING, '"a\\u00e4"', "aä"),
        (T.LONG, "-9223372036854775808", -(2**63)),
        (T.DOUBLE, "1", 1.0),
        (T.DOUBLE, "1.5e3", 1500.0),
        (T.DOUBLE, "1152921504606846976", 2.0**60),
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
    values, _, unparsed = parse([b'{"x": %b}' % text.encode()], layout(("x", kind)))
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
        (T.DOUBLE, b'{"x": true}'),
        (T.DOUBLE, b'{"x": 9007199254740993}'),
        (T.BOOLEAN, b'{"x": 1}'),
        (T.TIMESTAMP, b'{"x": "yesterday"}'),
        (T.TIMESTAMP, b'{"x": 1e300}'),
        (T.JSON, b'{"x": 1e999}'),
    ],
)
def test_a_value_that_does_not_fit_is_null(kind: JsonType, body: bytes) -> None:
    """The other columns keep their values, and the body is kept as a whole."""
    chosen = layout(("x", kind), ("y", T.LONG), rest=True)
    whole = body[:-1] + b', "y": 1, "z": 2}'
    values, rest, unparsed = parse([b'{"y": 3}', whole, b'{"x": null}'], chosen)
    assert (values, rest) == ([[None, None, None], [3, 1, None]], [None, '{"z":2}', None])
    assert unparsed == [None, whole, None]
    parser = JsonParser(chosen)
    parser.parse([whole, whole])
    parser.parse([whole])
    assert (parser.unparsed, parser.misfits) == (3, {"x": 3})


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (T.JSON, b'{"x": Infinity}'),
        (T.DOUBLE, b'{"x": NaN}'),
        (T.LONG, b"not JSON"),
        (T.LONG, b'{"x": 1} 2'),
        (T.LONG, '\u00a0{"x": 1}'.encode()),
        (T.LONG, b"[1]"),
        (T.LONG, b""),
        (T.LONG, b'{"x": "\xff"}'),
        (T.LONG, b'{"x":' * 100_000),
    ],
)
def test_bodies_that_are_no_objects_are_kept_unparsed(kind: JsonType, body: bytes) -> None:
    values, rest, unparsed = parse([body, b'{"x": null}'], layout(("x", kind), rest=True))
    assert (values, rest, unparsed) == ([[None, None]], [None, None], [body, None])


def test_space_around_a_body() -> None:
    assert parse([b' \t\r\n{"x": 1}\r\n'], layout(("x", T.LONG)))[0] == [[1]]


def test_fields_without_a_column() -> None:
    body = '{"a": 1, "b": "ä", "c": null}'.encode()
    assert parse([body], layout(("a", T.LONG), rest=True))[1] == ['{"b":"ä","c":null}']
    assert parse([body], layout(("a", T.LONG)))[1] == [None]


def test_a_rest_that_is_no_text_is_null() -> None:
    body = b'{"a": 1, "b": "\\ud800"}'
    chosen = layout(("a", T.LONG), rest=True)
    assert parse([body], chosen) == ([[1]], [None], [body])
    parser = JsonParser(chosen)
    parser.parse([body])
    assert parser.misfits == {"rest": 1}


def test_new_fields() -> None:
    """They have the types that columns would be inferred with, and can become columns."""
    chosen = layout(("a", T.LONG), rest=True)
    parser = JsonParser(chosen)
    parser.parse([b'{"a": 1, "b": 2, "n": null}', b'{"b": 2.5, "c": "x", "A": true, "": 1}', b'{"c": [1]}'])
    assert parser.new_fields == {"b": "double", "c": "json", "A": "boolean"}
    more = chosen.with_fields(parser.new_fields | {"a": "string"})
    assert [(each.field, each.type, each.name) for each in more.json_columns] == [
        ("a", T.LONG, "a"),
        ("b", T.DOUBLE, "b"),
        ("c", T.JSON, "c"),
        ("A", T.BOOLEAN, "A_2"),
    ]
    assert parse([b'{"b": 2, "A": true}'], more)[:2] == ([[None], [2.0], [None], [True]], [None])
    long = JsonParser(chosen)
    long.parse([json.dumps({"x" * 256: 1, "y" * 255: 2}).encode()])
    assert list(long.new_fields) == ["y" * 255]
    many = JsonParser(chosen)
    many.parse([json.dumps({f"k{number}": 1 for number in range(101)}).encode()])
    assert len(many.new_fields) == 100
    full = chosen.with_fields({f"k{number}": "long" for number in range(MAX_COLUMNS)})
    assert len(full.json_columns) == MAX_COLUMNS


def test_wider_types() -> None:
    """A column with an inferred type needs a wider one for a fraction, but not for a value that never fits."""
    parser = JsonParser(layout(("a", T.LONG), ("b", T.LONG), ("c", T.STRING), widens=True))
    parser.parse([b'{"a": 1, "b": 1}', b'{"a": 1.5, "b": "x", "c": 1.5}', b'{"b": 18446744073709551617}'])
    assert parser.widen == {"a": "double"}
    stated = JsonParser(layout(("a", T.LONG)))
    stated.parse([b'{"a": 1.5}'])
    assert (stated.widen, stated.misfits) == ({}, {"a": 1})


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
    chosen = Layout(body=BodyFormat.JSON, json_columns=tuple(columns), keep_rest=True)
    values, rest, unparsed = parse(bodies, chosen)
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


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (["a", "b c"], ["a", "b c"]),
        (["user", "User", "USER"], ["user", "User_2", "USER_3"]),
        (["ts", "Ts", "TS"], ["body_ts", "body_Ts_2", "body_TS_3"]),
        (["body_ts", "ts"], ["body_ts", "body_ts_2"]),
        (["hour", "unparsed", "rest", "body"], ["body_hour", "body_unparsed", "body_rest", "body_body"]),
        (["x", "x_2", "X"], ["x", "x_2", "X_3"]),
        (["\u00fc", "\u00dc"], ["\u00fc", "\u00dc_2"]),
    ],
)
def test_column_names(fields: list[str], names: list[str]) -> None:
    """Names are unique for readers that ignore case, too."""
    assert name_columns(fields) == names
    columns = infer_columns([json.dumps(dict.fromkeys(fields, 1)).encode()], [])
    assert [(column.field, column.name) for column in columns] == list(zip(fields, names, strict=True))


def test_columns_that_cannot_be_inferred() -> None:
    with pytest.raises(LayoutError, match="no message of the sample"):
        infer_columns([b"x"], [])
    with pytest.raises(LayoutError, match="501 different fields"):
        infer_columns([json.dumps({f"k{n}": 1 for n in range(501)}).encode()], [])
