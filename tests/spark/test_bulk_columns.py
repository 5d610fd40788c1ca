"""Tests for bodies that Arrow reads: the arrays are those of bodies that are parsed one by one."""

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soak import examples
from trio_nsq.spark.export.bulk_columns import BulkColumns
from trio_nsq.spark.export.json_columns import JsonParser, RowRefused
from trio_nsq.spark.export.layout import BodyFormat, JsonColumn, Layout, PartitionBy
from trio_nsq.spark.schemas.column_types import ColumnType, JsonArray, JsonMap, JsonStruct, parse_type
from trio_nsq.spark.schemas.contracts import SchemaContract

LEAVES = [
    *[
        "string",
        "long",
        "int",
        "short",
        "byte",
        "double",
        "float",
        "boolean",
        "date",
        "time",
        "binary",
        "json",
    ],
    *["decimal(5,2)", "decimal(3,3)", "decimal(38,18)", "decimal(20,0)"],
    *["timestamp", "timestamp(ms)", "timestamp(ns)", "local-timestamp(us)", 'timestamp(s,"%Y%m%d")'],
]
NAMES = ["a", "b", "é"]
TEXTS = [
    *["1", "-1", "0", "-0", "1.0", "-0.0", "1e2", "1E400", "127", "128", "99999", "0.5", "1.25", "999.99", "1000"],
    *["9.999", "0.1", "0.30000000000000004", "0.30000000000000001", "123456789012345.25", "123456789012345678"],
    *["5e-324", "9007199254740993", "9223372036854775807", "9223372036854775808", "1234567890123456789012"],
    *["0.1234567890123456789", "1e1000000", "1.10", "0.001", "1795262400000", "253402300800", "-62135596801"],
    *["NaN", "-Infinity", "01", "+1", "1.", "true", "null", '""', '"1"', '"+1"', '"NaN"', '"20240229"'],
    *['"2024-02-29"', '"2023-02-29"', '"0000-01-01"', '"2024-02-29T01:02:03Z"', '"2024-02-29T01:02:03.123456Z"'],
    *['"2024-02-29T24:00:00Z"', '"2024-02-29T23:59:60Z"', '"0000-12-31T00:00:00Z"', '"0001-01-01T00:00:00Z"'],
    *['"9999-12-31T23:59:59.9Z"', '"2024-02-29T01:02:03+01:00"', '"2024-02-29 01:02"', '"2024-13-01T00:00:00Z"'],
    *['"10:20:30.5"', '"YWI="', '"\\u0000"', '"\\ud800"', '"\\udc00x"', '"\\ud83d\\ude00"', '"\\q"', '"a\nb"'],
    *["16777217", "0.123456", "0.1234567", "1234567.8", "0.0000001", "1e-39", "3.4e39"],
    *['"\xff"', '"é"', "[1,]", "[]", "{}", "[null]", '{"a":1}}{"a":1', "[" * 2000 + "]" * 2000, "1" * 4301],
]  # fmt: skip
NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,8})(\.[0-9]{1,9})?", fullmatch=True)
SPACES = ["", " ", "\n\t"]
kinds: st.SearchStrategy[ColumnType] = st.recursive(
    st.sampled_from(LEAVES).map(parse_type),
    lambda inner: st.one_of(
        inner.map(JsonArray),
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=3).map(
            lambda each: JsonStruct(tuple(each.items()))
        ),
        inner.map(JsonMap),
    ),
    max_leaves=4,
)


def texts(kind: ColumnType) -> st.SearchStrategy[str]:
    """Return texts that may be of a type."""
    match kind:
        case JsonArray():
            fitting = st.lists(texts(kind.element), max_size=3).map(lambda each: f"[{','.join(each)}]")
        case JsonStruct():
            fitting = objects([*kind.fields])
        case JsonMap():
            fitting = objects([(name, kind.values) for name in NAMES])
        case _:
            fitting = st.one_of(st.sampled_from(TEXTS), NUMBERS)
    return st.integers(0, 19).flatmap(lambda one: fitting if one else st.sampled_from(TEXTS))


def objects(fields: list[tuple[str, ColumnType]]) -> st.SearchStrategy[str]:
    """Return texts of objects with some of the fields, rarely with another one, or one of them twice."""
    member = st.one_of(
        [
            st.tuples(st.sampled_from(SPACES), texts(kind)).map(
                lambda each, name=name: f"{json.dumps(name)}:{each[0]}{each[1]}"  # type: ignore[misc]
            )
            for name, kind in fields
        ]
        or [st.just('"more":null')]
    )
    more = st.sampled_from(
        ['"more":1', '"more":null', '"more":NaN', '"more":"\\ud800"', '"more":' + "[" * 2000 + "]" * 2000]
    )
    members = st.lists(st.integers(0, 29).flatmap(lambda one: member if one else more), max_size=4)
    return st.tuples(st.sampled_from(["", " ", "\n"]), members).map(
        lambda each: f"{{{','.join(each[1])}{each[0]}}}"
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, bytes]:
    fields = draw(st.dictionaries(st.sampled_from(NAMES), kinds, min_size=1, max_size=3))
    body = draw(objects([*fields.items()])) + draw(st.sampled_from(["", "", "", " \n", "x", "{}"]))
    # What is no UTF-8 is one byte here.
    return layout_of(fields, rest=draw(st.booleans())), body.encode().replace("\xff".encode(), b"\xff")


def layout_of(fields: dict[str, ColumnType], *, rest: bool = True) -> Layout:
    columns = tuple(JsonColumn(name, kind, name) for name, kind in fields.items())
    return Layout(body=BodyFormat.JSON, json_columns=columns, keep_rest=rest)


def read(layout: Layout, bodies: list[bytes]) -> list[Any] | None:
    """Return the arrays of bodies that are converted at once; None: they are not."""
    columns = BulkColumns(
        layout.json_columns,
        {},
        layout.key,
        layout.operation,
        dict(layout.paths),
        refuses_unknown=layout.keep_rest,
    )
    return columns.read(pa.array(bodies, pa.binary()))


@given(cases())
def test_arrays_are_those_of_a_body_alone(case: tuple[Layout, bytes]) -> None:
    """A parser reads one body by itself."""
    layout, body = case
    parser = JsonParser(layout)
    *expected, unparsed = parser.parse([body])
    found = read(layout, [body, body])
    if found is None:
        return
    for one, many in zip(expected, found, strict=False):
        many.validate(full=True)
        assert many.equals(pa.concat_arrays([one, one]))
    assert unparsed.null_count == 1
    assert not parser.misfits
    assert not parser.new_fields
    assert not layout.keep_rest or expected[-1].null_count == 1


def rows_of(parser: JsonParser, bodies: list[bytes]) -> list[list[Any]]:
    arrays = [each.to_pylist() for each in parser.parse(bodies)]
    return [list(row) for row in zip(*arrays, strict=True)]


def outcome(parser: JsonParser, bodies: list[bytes]) -> tuple[list[list[Any]] | str, dict[int, str]]:
    """Return the values of all arrays, or why a body is refused, and the rows that are left out."""
    try:
        return rows_of(parser, bodies), parser.refused_rows
    except RowRefused as exc:
        return f"{bodies[exc.row]!r} {exc.reason}", {}


@settings(max_examples=examples(40))
@given(cases(), st.sampled_from([None, *SchemaContract]))
def test_a_body_among_many(case: tuple[Layout, bytes], contract: SchemaContract | None) -> None:
    """A parser finds in it what it finds in the body alone."""
    layout, body = case
    alone, parser = JsonParser(layout, contract), JsonParser(layout, contract)
    expected, refused = outcome(alone, [body, b"{}"])
    found, refused_rows = outcome(parser, [b"{}"] * 150 + [body] + [b"{}"] * 49)
    if not isinstance(expected, str):
        row, empty = expected
        expected = [empty] * 150 + [row] + [empty] * 49
    assert found == expected
    assert refused_rows == {row + 150: reason for row, reason in refused.items()}
    assert (parser.unparsed, parser.misfits, parser.discarded) == (
        alone.unparsed,
        alone.misfits,
        alone.discarded,
    )
    assert (parser.new_fields, parser.widen) == (alone.new_fields, alone.widen)


@pytest.mark.parametrize("kind", LEAVES)
def test_each_text_as_each_type(kind: str) -> None:
    """Also where the field has no column and is left out."""
    one, many = parse_type(kind), JsonArray(parse_type(kind))
    for name, space, layout in [
        ("x", "", layout_of({"x": one}, rest=False)),
        ("x", " \n", layout_of({"x": one}, rest=False)),
        ("x", "[null, ", layout_of({"x": many}, rest=False)),
        ("more", "", layout_of({"x": one}, rest=False)),
    ]:
        for text in TEXTS:
            end = "]" if "[" in space else ""
            body = f'{{"{name}":{space}{text}{end}}}'.encode().replace(b"\xc3\xbf", b"\xff")
            expected, unparsed = JsonParser(layout).parse([body])
            if (found := read(layout, [body])) is not None:
                assert unparsed.null_count == 1, body
                assert found[0].equals(expected), body


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("long", "-9223372036854775808"),
        ("double", "0.30000000000000004"),
        ("float", "0.1"),
        ("float", "16777216"),
        ("array<float>", "[123456, 0.5, 0.000001, null]"),
        ("decimal(38,18)", "12.5"),
        ("decimal(10,2)", "12345678.91"),
        ("timestamp(ms)", "1795262400123"),
        ("timestamp", '"2024-02-29T01:02:03.5Z"'),
        ("date", '"2024-02-29"'),
        ("binary", '"YWI="'),
        ('timestamp(s,"%Y%m%d")', '"20240229"'),
        ("array<struct<a:array<decimal(3,1)>,b:timestamp(us)>>", '[{"a":[1.5,null],"b":5},null,{"b":null}]'),
    ],
)
def test_bodies_that_are_converted_at_once(kind: str, text: str) -> None:
    layout = layout_of({"x": parse_type(kind), "time": parse_type("timestamp(ns)")})
    bodies = [b'{"x":%b}' % text.encode(), b' {"x":null}\n', b"{}"]
    found = read(layout, bodies)
    assert found is not None
    assert found[0].equals(pa.concat_arrays([JsonParser(layout).parse([body])[0] for body in bodies]))


def test_a_text_that_no_folder_can_have_does_not_fit() -> None:
    fields = {"country": parse_type("string"), "n": parse_type("int")}
    layout = Layout(
        PartitionBy.NONE, BodyFormat.JSON, layout_of(fields).json_columns, True, levels=("country",)
    )
    parser = JsonParser(layout)
    bodies = [b'{"country":"de","n":1}'] * 200 + [b'{"country":"","n":2}']
    country, number, _, unparsed = parser.parse(bodies)
    assert country.to_pylist() == ["de"] * 200 + [None]
    assert number.to_pylist() == [1] * 200 + [2]
    assert (unparsed.null_count, parser.misfits) == (200, {"country": 1})


@pytest.mark.parametrize(
    "body",
    [
        '{"id":1,"at":2,"op":"u"}',
        '{"id":1,"at":2,"op":"DELETE"}',
        '{"id":1,"at":2,"op":"x"}',
        '{"id":1,"at":2}',
        '{"id":1,"at":2,"op":null}',
        '{"id":1,"op":"c"}',
        '{"id":null,"at":2,"op":"c"}',
        '{"id":1.5,"at":2,"op":"c"}',
        '{"id":1,"at":2,"op":1}',
        "[]",
    ],
)
def test_a_body_without_its_key_among_others(body: str) -> None:
    fields = {"id": "long", "at": "timestamp", "op": "string", "n": "int"}
    layout = replace(
        layout_of({name: parse_type(kind) for name, kind in fields.items()}), key=("id", "at"), operation="op"
    )
    before = [b'{"id":%d,"at":1,"op":"c","n":7}' % number for number in range(150)]
    assert read(layout, before) is not None
    alone, parser = JsonParser(layout), JsonParser(layout)
    (row,) = rows_of(alone, [body.encode()])
    first = rows_of(JsonParser(layout), before)[0]
    found = rows_of(parser, [*before, body.encode(), *before])
    assert found[150] == row
    assert found[0] == found[151] == first
    assert (parser.unparsed, parser.misfits) == (alone.unparsed, alone.misfits)


def test_rows_of_many_threads_keep_their_order() -> None:
    layout = layout_of({"n": parse_type("long")})
    bodies = [b'{"n":%d}' % number for number in range(12_000)]
    bodies[7_000] = b'{"n":"7000"}'
    parser = JsonParser(layout)
    numbers, _, unparsed = parser.parse(bodies)
    assert numbers.to_pylist() == [None if number == 7_000 else number for number in range(12_000)]
    assert unparsed.drop_null().to_pylist() == [bodies[7_000]]


def test_parts_of_an_array_of_bodies() -> None:
    layout = layout_of({"n": parse_type("long")})
    bodies = pa.array([b'{"n":%d}' % number for number in range(300)], pa.binary()).slice(100, 150)
    assert JsonParser(layout).parse(bodies)[0].to_pylist() == [*range(100, 250)]


PATHS = replace(
    layout_of(
        {
            name: parse_type(kind)
            for name, kind in {"uid": "long", "city": "string", "m": "int", "n": "int"}.items()
        },
        rest=False,
    ),
    paths=(("uid", "user.id"), ("city", "user.home.city"), ("m", "n"), ("n", "m")),
)
MEMBERS = ["user", "id", "home", "city", "m", "n", "uid", "user.id", "us\\u0065r.id", "user.home.city"]
members = st.recursive(
    st.sampled_from(["1", "2", "null", '"x"', "{}"]),
    lambda inner: st.lists(
        st.tuples(st.sampled_from(MEMBERS), inner).map(lambda each: f'"{each[0]}":{each[1]}'), max_size=4
    ).map(lambda each: f"{{{','.join(each)}}}"),
    max_leaves=8,
)


@given(members)
def test_fields_at_paths(text: str) -> None:
    parser = JsonParser(PATHS)
    *expected, unparsed = parser.parse([text.encode()])
    if (found := read(PATHS, [text.encode()])) is not None:
        assert [each.to_pylist() for each in found] == [each.to_pylist() for each in expected]
        assert unparsed.null_count == 1


@pytest.mark.parametrize("name", ["user.id", "us\\u0065r.id"])
def test_a_field_whose_name_is_a_path(name: str) -> None:
    text = '{"m":1,"n":2,"user":{"id":3,"home":{"city":"Ulm","x":[1]}},"uid":"x"%s}'
    found = read(PATHS, [b"{}", (text % "").encode()])
    assert found is not None
    assert [each.to_pylist() for each in found] == [[None, 3], [None, "Ulm"], [None, 2], [None, 1]]
    body = (text % f',"{name}":4').encode()
    assert read(PATHS, [body]) is None
    assert JsonParser(PATHS).parse([body] * 100)[0].to_pylist() == [4] * 100
