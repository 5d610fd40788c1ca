"""Properties of contracts, for generated types and bodies."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.spark.export.json_columns import JsonParser, RowRefused
from trio_nsq.spark.export.layout import BodyFormat, JsonColumn, Layout
from trio_nsq.spark.export.manifest import RangeResult
from trio_nsq.spark.export.request import ExportResult
from trio_nsq.spark.schemas.column_types import ColumnType, JsonArray, JsonMap, JsonStruct, JsonType
from trio_nsq.spark.schemas.contracts import SchemaContract

NAMES = ["a", "b", "c"]
scalars = st.sampled_from([JsonType.STRING, JsonType.LONG, JsonType.BOOLEAN, JsonType.DOUBLE, JsonType.JSON])
types: st.SearchStrategy[ColumnType] = st.recursive(
    scalars,
    lambda inner: (
        st.builds(JsonArray, inner)
        | st.builds(JsonMap, inner)
        | st.dictionaries(st.sampled_from(NAMES), inner, min_size=1).map(
            lambda found: JsonStruct(tuple(found.items()))
        )
    ),
    max_leaves=4,
)


def values_of(kind: ColumnType) -> st.SearchStrategy[Any]:
    """Return values that mostly fit a type."""
    others = st.none() | st.sampled_from([0, 0.5, "x", True, [], {}, {"a": 1}, [1]])
    match kind:
        case JsonArray():
            fitting: st.SearchStrategy[Any] = st.lists(values_of(kind.element), max_size=2)
        case JsonMap():
            fitting = st.dictionaries(st.sampled_from(NAMES), values_of(kind.values), max_size=2)
        case JsonStruct():
            fields = {name: values_of(each) for name, each in kind.fields}
            fitting = st.fixed_dictionaries({}, optional=fields) | st.fixed_dictionaries(
                fields | {"other": st.integers(0, 1)}
            )
        case JsonType.STRING:
            fitting = st.text(max_size=3)
        case JsonType.BOOLEAN:
            fitting = st.booleans()
        case JsonType.LONG:
            fitting = st.integers(-(2**63), 2**63 - 1)
        case _:
            fitting = st.floats(allow_nan=False, allow_infinity=False, width=32)
    return st.one_of(*[fitting] * 5, others)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, list[bytes]]:
    kinds = draw(st.dictionaries(st.sampled_from(["x", "y"]), types, min_size=1))
    fields = {name: values_of(kind) for name, kind in kinds.items()} | {"new": st.integers(0, 1) | st.none()}
    objects = st.fixed_dictionaries({}, optional=fields)
    found = draw(st.lists(st.one_of(objects, objects, objects, st.just([1])), min_size=1, max_size=5))
    columns = tuple(JsonColumn(name, kind, name) for name, kind in kinds.items())
    layout = Layout(body=BodyFormat.JSON, json_columns=columns, keep_rest=True)
    return layout, [json.dumps(each).encode() for each in found]


def parse(
    layout: Layout, bodies: list[bytes], contract: SchemaContract | None = None
) -> tuple[JsonParser, list[list[Any]], list[str | None], list[bytes | None]]:
    """Return the parser, and the values of the columns, of `rest`, and of `unparsed`."""
    parser = JsonParser(layout, contract)
    *columns, rest, unparsed = (each.to_pylist() for each in parser.parse(bodies))
    return parser, columns, rest, unparsed


def as_json(kind: ColumnType, value: Any) -> Any:
    """Return what a value of a column was in JSON."""
    if value is None:
        return None
    match kind:
        case JsonArray():
            return [as_json(kind.element, each) for each in value]
        case JsonMap():
            return {name: as_json(kind.values, each) for name, each in value}
        case JsonStruct():
            return {name: as_json(each, value[name]) for name, each in kind.fields}
    return json.loads(value) if kind is JsonType.JSON else value


def without_nulls(value: Any) -> Any:
    """Return a value without the null fields of its objects, which a missing field is the same as."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def needs_care(layout: Layout, bodies: list[bytes]) -> list[bool]:
    """Return which bodies have a value that the columns do not have."""
    _, _, rest, unparsed = parse(layout, bodies)
    return [
        bad is not None or bool(without_nulls(json.loads(more or "{}")))
        for bad, more in zip(unparsed, rest, strict=True)
    ]


@given(cases(), st.sampled_from([None, SchemaContract.EVOLVE]))
def test_each_value_arrives_or_is_kept(
    case: tuple[Layout, list[bytes]], contract: SchemaContract | None
) -> None:
    layout, bodies = case
    parser, columns, rest, unparsed = parse(layout, bodies, contract)
    for row, body in enumerate(bodies):
        if unparsed[row] is not None:
            assert unparsed[row] == body
            continue
        found = {
            column.field: as_json(column.type, values[row])
            for column, values in zip(layout.json_columns, columns, strict=True)
        }
        found |= json.loads(rest[row] or "{}")
        assert without_nulls(found) == without_nulls(json.loads(body))
    no_objects = sum(body == b"[1]" for body in bodies)
    misfits = parser.unparsed - no_objects
    assert bool(misfits) == bool(parser.misfits)


@given(cases())
def test_discard_row_leaves_out_exactly_what_needs_care(case: tuple[Layout, list[bytes]]) -> None:
    layout, bodies = case
    _, expected, _, _ = parse(layout, bodies)
    parser, columns, rest, unparsed = parse(layout, bodies, SchemaContract.DISCARD_ROW)
    refused = {row for row, bad in enumerate(needs_care(layout, bodies)) if bad}
    assert set(parser.refused_rows) == refused
    for row in {*range(len(bodies))} - refused:
        assert [values[row] for values in columns] == [values[row] for values in expected]
        assert without_nulls(json.loads(rest[row] or "{}")) == {}
    assert (unparsed, parser.unparsed) == ([None] * len(bodies), 0)


@given(cases())
def test_discard_value_keeps_all_that_fits(case: tuple[Layout, list[bytes]]) -> None:
    layout, bodies = case
    default, expected, _, _ = parse(layout, bodies)
    parser, columns, rest, unparsed = parse(layout, bodies, SchemaContract.DISCARD_VALUE)
    assert columns == expected
    assert rest == [None] * len(bodies)
    assert unparsed == [body if body == b"[1]" else None for body in bodies]
    assert parser.misfits == {}
    assert default.misfits.items() <= parser.discarded.items()
    assert bool(parser.discarded) == any(
        bad for bad, body in zip(needs_care(layout, bodies), bodies, strict=True) if body != b"[1]"
    )


@given(cases())
def test_freeze_refuses_exactly_what_needs_care(case: tuple[Layout, list[bytes]]) -> None:
    layout, bodies = case
    care = needs_care(layout, bodies)
    if not any(care):
        _, columns, _, _ = parse(layout, bodies, SchemaContract.FREEZE)
        assert columns == parse(layout, bodies)[1]
        return
    with pytest.raises(RowRefused) as refused:
        parse(layout, bodies, SchemaContract.FREEZE)
    assert care[refused.value.row]


def test_the_number_of_counted_paths_has_a_limit() -> None:
    """Producers name fields, and the counts are stored with each range and in the report."""
    layout = Layout(body=BodyFormat.JSON, json_columns=(JsonColumn("x", JsonType.LONG, "x"),), keep_rest=True)
    found = [json.dumps({f"{row}.{n}": 1 for n in range(30)} | {"k" * 300: 1}).encode() for row in range(100)]
    parser, *_ = parse(layout, found, SchemaContract.DISCARD_VALUE)
    total = ExportResult()
    for first in ("", "again"):
        counts = {f"{first}{path}": count for path, count in parser.discarded.items()}
        total.add(RangeResult("b", 0, 100, discarded=counts))
    for counts in (parser.discarded, total.discarded):
        assert len(counts) <= 1_001
        assert max(map(len, counts)) <= 255
    assert (sum(parser.discarded.values()), sum(total.discarded.values())) == (3_100, 6_200)
