"""Tests for JSON bodies as columns."""

import json
import struct
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.spark.export.json_columns import JsonParser, infer_columns
from trio_nsq.spark.export.layout import (
    MAX_COLUMNS,
    BodyFormat,
    JsonColumn,
    Layout,
    LayoutError,
    name_columns,
)
from trio_nsq.spark.schemas.column_types import (
    ColumnType,
    DecimalType,
    JsonArray,
    JsonMap,
    JsonStruct,
    JsonType,
    parse_type,
    split_columns,
)
from trio_nsq.spark.schemas.contracts import SchemaContract
from trio_nsq.spark.schemas.promotions import Promotion

T = JsonType


def layout(*columns: tuple[str, ColumnType], rest: bool = False, widens: bool = False) -> Layout:
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
        (T.INT, "-2147483648", -(2**31)),
        (T.SHORT, "32767", 32767),
        (T.BYTE, "-128", -128),
        (T.DOUBLE, "1", 1.0),
        (T.DOUBLE, "1.5e3", 1500.0),
        (T.DOUBLE, "1152921504606846976", 2.0**60),
        (T.DOUBLE, "1.10", 1.1),
        (T.DOUBLE, "0.10000000000000001", 0.1),
        (T.DOUBLE, "0.1000000000000000055511151231257827", 0.1),
        (T.DOUBLE, "-0.000e9", 0.0),
        (T.DOUBLE, "5e-324", 5e-324),
        (T.FLOAT, "16777216", 2.0**24),
        (T.FLOAT, "1.10", 1.10000002384185791015625),
        (T.FLOAT, "0.10000000149011612", 0.100000001490116119384765625),
        (T.FLOAT, "3.4028235e38", 2.0**128 - 2.0**104),
        (T.BOOLEAN, "true", True),
        (T.DATE, '"2026-02-28"', date(2026, 2, 28)),
        (T.DATE, '"0001-01-01"', date(1, 1, 1)),
        (T.TIMESTAMP, '"1970-01-01T00:00:01.5Z"', 1_500_000),
        (T.TIMESTAMP, '"1970-01-01T01:00:00+01:00"', 0),
        (T.TIMESTAMP, '"1969-12-31T23:59:59"', -1_000_000),
        (T.TIMESTAMP, "1.5", 1_500_000),
        (T.TIMESTAMP, '"1970-01-01"', 0),
        (T.TIMESTAMP, '"1970-01-01t00:01z"', 60_000_000),
        (T.LONG, "-0", 0),
        (T.JSON, "-0", "-0"),
        (T.JSON, '[-0,{"a":-0},0]', '[-0,{"a":-0},0]'),
        (T.TIMESTAMP, '"0001-01-01T00:00:00Z"', -62_135_596_800_000_000),
        (T.TIMESTAMP, '"9999-12-31T23:59:59.999999Z"', 253_402_300_799_999_999),
        (T.JSON, '{"b": [1, "ä"]}', '{"b":[1,"ä"]}'),
        (T.JSON, '{"ä": [1.10, {"c": 1E+2, "d": 1.5}, "1.10"]}', '{"ä":[1.10,{"c":1E+2,"d":1.5},"1.10"]}'),
        (T.JSON, "12345678901234567.89", "12345678901234567.89"),
        (T.JSON, "1e999", "1e999"),
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
        (T.INT, b'{"x": 2147483648}'),
        (T.INT, b'{"x": 1.0}'),
        (T.INT, b'{"x": true}'),
        (T.SHORT, b'{"x": -32769}'),
        (T.BYTE, b'{"x": 128}'),
        (T.DOUBLE, b'{"x": 1e999}'),
        (T.DOUBLE, b'{"x": true}'),
        (T.DOUBLE, b'{"x": 9007199254740993}'),
        (T.DOUBLE, b'{"x": 9007199254740993.0}'),
        (T.DOUBLE, b'{"x": 12345678901234567.89}'),
        (T.DOUBLE, b'{"x": 0.1234567890123456789}'),
        (T.DOUBLE, b'{"x": 1e-999}'),
        (T.FLOAT, b'{"x": 16777217}'),
        (T.FLOAT, b'{"x": 0.123456789}'),
        (T.FLOAT, b'{"x": 3.5e38}'),
        (T.FLOAT, b'{"x": 1e-60}'),
        (T.FLOAT, b'{"x": true}'),
        (T.BOOLEAN, b'{"x": 1}'),
        (T.DATE, b'{"x": "2026-02-29"}'),
        (T.DATE, b'{"x": "2026-02-28T00:00:00Z"}'),
        (T.DATE, b'{"x": "10000-01-01"}'),
        (T.DATE, b'{"x": 20512}'),
        (T.TIMESTAMP, b'{"x": "yesterday"}'),
        (T.TIMESTAMP, b'{"x": "2024-W01-1"}'),
        (T.TIMESTAMP, b'{"x": "20240101T000000Z"}'),
        (T.TIMESTAMP, b'{"x": "2024-01-01x00:00:00"}'),
        (T.DATE, b'{"x": "2024-W01-1"}'),
        (T.DATE, b'{"x": "20240101"}'),
        (T.TIMESTAMP, b'{"x": 1e300}'),
        (T.TIMESTAMP, b'{"x": 1700000000000}'),
        (T.TIMESTAMP, b'{"x": -9e12}'),
        (T.TIMESTAMP, b'{"x": 253402300799.9999999}'),
        (T.TIMESTAMP, b'{"x": "9999-12-31T23:59:59-12:00"}'),
        (T.TIMESTAMP, b'{"x": "0001-01-01T00:00:00+01:00"}'),
        (T.JSON, b'{"x": "\\ud800"}'),
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


def test_of_a_repeated_field_the_last_value_counts() -> None:
    body = b'{"x": 1, "y": 1, "x": 2, "y": 2}'
    values, rest, unparsed = parse([body], layout(("x", JsonType.LONG), rest=True))
    assert (values, rest, unparsed) == ([[2]], ['{"y":2}'], [None])


def test_space_around_a_body() -> None:
    assert parse([b' \t\r\n{"x": 1}\r\n'], layout(("x", T.LONG)))[0] == [[1]]


def test_fields_without_a_column() -> None:
    assert parse([b'{"a": 1, "b": 1.10}'], layout(("a", T.LONG), rest=True))[1] == ['{"b":1.10}']
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


def test_a_negative_zero_stays_in_the_rest() -> None:
    body, chosen = b'{"a":-0,"b":-0,"day":"2026-01-05"}', layout(("a", T.LONG), rest=True)
    assert parse([body], chosen) == ([[0]], ['{"b":-0,"day":"2026-01-05"}'], [None])
    parser = JsonParser(chosen)
    parser.parse([body])
    assert parser.new_fields == {"b": "long", "day": "string"}


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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.10", "1.10"),
        ('"-12345678901234567.8"', "-12345678901234567.80"),
        ("12345678901234567.890", "12345678901234567.89"),
        ("0.1", "0.10"),
        ("15e-1", "1.50"),
        ("1e17", "100000000000000000.00"),
        ("7", "7.00"),
        ("1.105", None),
        ("1e18", None),
        ("123456789012345678901", None),
        ("1e-999999999999999999999", None),
        ("1e999999999999999999999", None),
        ("true", None),
        ('"1,5"', None),
        ('"NaN"', None),
    ],
)
def test_decimals(text: str, value: str | None) -> None:
    body = b'{"x":%b}' % text.encode()
    values, _, unparsed = parse([body], layout(("x", DecimalType(20, 2))))
    assert values == [[None if value is None else Decimal(value)]]
    assert unparsed == [body if value is None else None]


@pytest.mark.parametrize("text", ["1e99999999", "-1E+400", "421727271818557859589.5", "1" * 39])
def test_numbers_that_arrow_does_not_take_for_decimals(text: str) -> None:
    """It takes some for other numbers, and crashes with others."""
    body = b'{"x":%b}' % text.encode()
    assert parse([body], layout(("x", DecimalType(38, 24)))) == ([[None]], [None], [body])


@given(st.lists(st.decimals(-(10**9), 10**9, places=3), max_size=4), st.integers(1, 12), st.integers(0, 4))
def test_decimals_have_all_their_digits(found: list[Decimal], digits: int, scale: int) -> None:
    kind = DecimalType(digits + scale, scale)
    bodies = [b'{"x":%b}' % f"{value:f}".encode() for value in found]
    values, _, unparsed = parse(bodies, layout(("x", kind)))
    fits = [value == round(value, scale) and abs(value) < 10**digits for value in found]
    assert values == [[value if fit else None for value, fit in zip(found, fits, strict=True)]]
    assert [each is None for each in unparsed] == fits


@pytest.mark.parametrize(
    "text",
    [
        *("decimal", "decimal(0,0)", "decimal(39,1)", "decimal(5,6)", "decimal(5)", "integer", "", "long "),
        *(
            "array",
            "array<>",
            "array<int",
            "array<int>>",
            "map<int,int>",
            "map<string>",
            "struct<>",
            "struct<a>",
        ),
        *("struct<a:int,a:int>", "struct<a:int b:int>", 'struct<"a:int>', "timestamp()", "timestamp(min)"),
        *("timestamp(s,%d)", 'timestamp(s,"%d"', "local-timestamp", "array<" * 60 + "int" + ">" * 60),
    ],
)
def test_types_that_do_not_exist(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_type(text)


def test_list_of_columns() -> None:
    text = "a:decimal(10,2), b,c:decimal(3, 1),d(1,e"
    assert split_columns(text) == ["a:decimal(10,2)", "b", "c:decimal(3, 1)", "d(1", "e"]
    assert [str(parse_type(kind)) for kind in ("decimal(10,2)", "decimal(3, 1)", "long")] == [
        "decimal(10,2)",
        "decimal(3,1)",
        "long",
    ]


@given(
    st.datetimes(datetime(1700, 1, 1), datetime(2250, 1, 1)).map(lambda found: found.replace(microsecond=0)),
    st.text("0123456789", max_size=9),
    st.none() | st.integers(-14 * 60, 14 * 60),
    st.sampled_from(["timestamp(ns)", "timestamp(us)"]),
)
def test_times_have_all_digits_in_each_zone(
    moment: datetime, fraction: str, minutes: int | None, kind: str
) -> None:
    zone = UTC if minutes is None else timezone(timedelta(minutes=minutes))
    text = moment.isoformat() + (f".{fraction}" if fraction else "")
    text += (
        "Z"
        if minutes is None
        else f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02d}:{abs(minutes) % 60:02d}"
    )
    seconds = (moment.replace(tzinfo=zone) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)
    digits = 9 if kind == "timestamp(ns)" else 6
    wanted = seconds * 10**digits + int(f"{fraction:0<9}"[:digits])
    number = seconds * 10**digits
    bodies = [f'{{"a":"{text}"}}'.encode(), f'{{"a":{number}.0}}'.encode(), f'{{"a":{number}E0}}'.encode()]
    arrays = JsonParser(layout(("a", parse_type(kind)))).parse(bodies)
    assert arrays[0].cast("int64").to_pylist() == [wanted, number, number]


@pytest.mark.parametrize("kind", ["timestamp(ns)", "timestamp", "decimal(9,2)", "long", "double"])
@pytest.mark.parametrize("text", ["1e1000000", "-1e1000000", "1e-1000000", '"1e1000000"'])
@pytest.mark.parametrize("promotion", Promotion)
def test_a_number_with_a_large_exponent_is_counted_as_each_that_does_not_fit(
    kind: str, text: str, promotion: Promotion
) -> None:
    parser = JsonParser(layout(("a", parse_type(kind)), widens=True), SchemaContract.EVOLVE, promotion)
    arrays = parser.parse([f'{{"a":{text}}}'.encode()])
    assert not parser.widen
    assert arrays[0].null_count == len(parser.misfits) or kind == "timestamp"  # 0 seconds, rounded


def test_times_in_milliseconds() -> None:
    parser = JsonParser(layout(("a", T.TIMESTAMP), ("b", T.LONG)))
    parser.parse(
        [b'{"a": 1700000000000, "b": 1.5}', b'{"a": 1700000000000.5}', b'{"a": 17e17}', b'{"a": "x"}']
    )
    assert (parser.misfits, parser.milliseconds) == ({"a": 4, "b": 1}, {"a": 2})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.floats(allow_nan=False, allow_infinity=False).filter(bool), st.integers(0, 60))
def test_a_double_takes_its_own_digits(value: float, digits: int) -> None:
    """However many a program prints, as C's printf does; one more that is not its own does not fit."""
    text = f"{value:.{digits}e}"
    mantissa, _, exponent = text.partition("e")
    wrong = f"{mantissa}{'0' * 60}1e{exponent}"
    found, _, unparsed = parse(
        [b'{"x":%b}' % each.encode() for each in (text, wrong)], layout(("x", T.DOUBLE))
    )
    assert found == [[float(text), None]]
    assert [each is None for each in unparsed] == [True, False]


@given(st.floats(allow_nan=False, allow_infinity=False, width=32).filter(bool), st.integers(0, 60))
def test_a_float_takes_its_own_digits(value: float, digits: int) -> None:
    text = f"{value:.{digits}e}"
    try:
        nearest = nearest_float(text)
    except OverflowError:
        return  # the largest float, rounded up
    assert parse([b'{"x":%b}' % text.encode()], layout(("x", T.FLOAT))) == ([[nearest]], [None], [None])


@given(st.floats(-1e38, 1e38).filter(bool))
def test_a_float_takes_no_other_digits(value: float) -> None:
    """The float differs from the number by at most half of its last digit."""
    body = b'{"x":%b}' % repr(value).encode()
    nearest = nearest_float(repr(value))
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    fits = 2 * abs(Fraction(nearest) - Fraction(repr(value))) <= Fraction(10) ** int(exponent)
    values, _, unparsed = parse([body], layout(("x", T.FLOAT)))
    assert (values, unparsed) == (([[nearest]], [None]) if fits else ([[None]], [body]))


def nearest_float(text: str) -> float:
    found: float = struct.unpack("f", struct.pack("f", float(text)))[0]
    return found


@pytest.mark.parametrize(("kind", "bits"), [(T.LONG, 63), (T.INT, 31), (T.SHORT, 15), (T.BYTE, 7)])
def test_whole_numbers(kind: JsonType, bits: int) -> None:
    """In one array all fit, in the other one not."""
    low, high = -(2**bits), 2**bits - 1
    bodies = [b'{"x":%d}' % value for value in (low - 1, low, low + 1, high - 1, high, high + 1)]
    assert parse(bodies[1:5], layout(("x", kind)))[0] == [[low, low + 1, high - 1, high]]
    assert parse(bodies, layout(("x", kind)))[0] == [[None, low, low + 1, high - 1, high, None]]


scalars = st.sampled_from([*T, DecimalType(5, 2)])


@given(
    scalars, st.lists(json_values | st.dates().map(str) | st.decimals(-9, 9, places=2).map(float), max_size=4)
)
def test_values_inside_of_others(kind: ColumnType, found: list[Any]) -> None:
    """They are what they are alone."""
    alone = layout(("x", kind))
    arrays = JsonParser(alone).parse([json.dumps({"x": value}).encode() for value in found])
    expected, misfits = arrays[0].to_pylist(), [each is not None for each in arrays[1].to_pylist()]
    names = [f"k{number}" for number in range(len(found))]
    value = {"a": found, "s": dict(zip(names, found, strict=True)), "more": 1}
    deep = JsonStruct(
        (
            ("a", JsonArray(kind)),
            ("s", JsonStruct(tuple((name, kind) for name in names))),
            ("none", JsonArray(JsonMap(kind))),
        )
    )
    body = json.dumps({"deep": value, "map": {"k": value["s"]}, "n": 1}).encode()
    chosen = layout(("deep", deep), ("map", JsonMap(JsonMap(kind))), ("n", T.INT))
    parser = JsonParser(chosen)
    deep_array, map_array, number, unparsed = parser.parse([body])
    assert number.to_pylist() == [1]
    pairs = list(zip(names, expected, strict=True))
    assert deep_array.to_pylist() == [{"a": expected, "s": dict(pairs), "none": None}]
    assert map_array.to_pylist() == [[("k", pairs)]]
    assert unparsed.to_pylist() == [body if any(misfits) else None]
    counts = {f"deep.s.{name}": 1 for name, is_misfit in zip(names, misfits, strict=True) if is_misfit}
    if any(misfits):
        counts |= {"deep.a[]": sum(misfits), "map{}{}": sum(misfits)}
    assert parser.misfits == counts


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (JsonArray(T.INT), "1"),
        (JsonArray(T.INT), '{"0":1}'),
        (JsonStruct((("a", T.INT),)), "[1]"),
        (JsonStruct((("a", T.INT),)), '"{}"'),
        (JsonMap(T.INT), "[]"),
        (JsonMap(T.INT), '{"\\ud800":1}'),
    ],
)
def test_nested_values_that_do_not_fit(kind: ColumnType, text: str) -> None:
    body = b'{"x":%b}' % text.encode()
    assert parse([body], layout(("x", kind))) == ([[None]], [None], [body])


def test_a_value_inside_of_others_that_does_not_fit() -> None:
    """It is null, and counted by its path; all others have their values."""
    kind = JsonStruct((("a", JsonArray(JsonArray(T.INT))), ("m", JsonMap(JsonStruct((("n", T.BYTE),))))))
    body = b'{"x":{"a":[[1,"2"],3,null,[]],"m":{"k":{"n":1},"l":{"n":128},"o":5}}}'
    parser = JsonParser(layout(("x", kind)))
    found, unparsed = parser.parse([body])
    assert found.to_pylist() == [
        {"a": [[1, None], None, None, []], "m": [("k", {"n": 1}), ("l", {"n": None}), ("o", None)]}
    ]
    assert parser.misfits == {"x.a[][]": 1, "x.a[]": 1, "x.m{}.n": 1, "x.m{}": 1}
    assert unparsed.to_pylist() == [body]


def test_fields_that_a_struct_lacks_are_in_the_rest() -> None:
    kind = JsonArray(JsonStruct((("a", T.INT),)))
    bodies = [b'{"x":[{"a":1,"b":2}],"y":true}', b'{"x":[{"a":1,"b":null}]}', b'{"y":null}']
    found, rest, _ = parse(bodies, layout(("x", kind), rest=True))
    assert found == [[[{"a": 1}], [{"a": 1}], None]]
    assert rest == ['{"y":true,"x":[{"a":1,"b":2}]}', None, '{"y":null}']


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
        ([b'{"a": 1}', b'{"a": 1.10}'], [], [("a", T.DOUBLE)]),
        ([b'{"a": 12345678901234567.89}', b'{"a": 1}'], [], [("a", T.JSON)]),
        ([b'{"a": 18446744073709551615}'], [], [("a", T.JSON)]),
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
        (["a", "b.c", "d-e"], ["a", "b.c", "d-e"]),
        (["a b", "a_b", "a,b", "{c}(=;)"], ["a_b", "a_b_2", "a_b_3", "_c_____"]),
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


def test_columns_of_many_fields_are_those_of_most_messages() -> None:
    """The others are in `rest`: a message with ids as names must not end an export."""
    usual, ids = ["user", "amount"], [f"id{n}" for n in range(60_000)]
    bodies = [dict.fromkeys(ids, 1), dict.fromkeys(usual, 1), dict.fromkeys(usual, 2)]
    columns = infer_columns([json.dumps(body).encode() for body in bodies], [])
    assert [column.field for column in columns] == [*ids[: MAX_COLUMNS - 2], *usual]
