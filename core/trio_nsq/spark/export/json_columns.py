"""Convert JSON bodies to columns: infer the columns from a sample, and parse bodies into Arrow arrays.

A value that does not fit its place becomes null, and the body is kept in the column `unparsed`; the other values of the
row stay. A body that is not a JSON object is in `unparsed` only. A contract can say something else.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ...filters.exact_json import decode_object, json_text
from ..schemas.column_types import ColumnType, JsonType, parse_type
from ..schemas.contracts import SchemaContract
from ..schemas.promotions import Promotion, common_type
from .bulk_columns import BulkColumns, Piece
from .column_arrays import ColumnArrays
from .json_values import is_milliseconds, type_of
from .layout import MAX_COLUMNS, REST, JsonColumn, Layout, LayoutError, name_columns
from .levels import Transform
from .operations import is_operation
from .partitions import fits_folder
from .path_counts import count_path
from .paths import with_paths
from .wider_types import needs_double, type_with

_MAX_NEW_FIELDS = 100
_MAX_NAME_CHARS = 255
"""Fields with longer names have no column: they are in `rest`, and would make the manifest and every footer large."""
_NOTHING: Mapping[str, Any] = {}


class RowRefused(Exception):
    """A body does not fit the columns, and the contract is `SchemaContract.FREEZE`.

    Attributes:
        row: Its index.
        reason: The rest of a sentence about it.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(row, reason)
        self.row: int = row
        self.reason: str = reason


@dataclass(frozen=True, slots=True)
class BodyReader:
    """How `JsonParser` reads bodies; by default, as JSON.

    Attributes:
        decode: Returns the fields of a body. Raises ValueError or RecursionError: it is not valid.
        arrays: Converts the values of the fields.
        name: What a valid body is.
        refuses_unknown: Whether a field of a struct for which its type has no place is a value that does not fit.
    """

    decode: Callable[[bytes], Mapping[str, Any]] = decode_object
    arrays: type[ColumnArrays] = ColumnArrays
    name: str = "JSON object"
    refuses_unknown: bool = False


def _least_rounded(kind: Any, size: int) -> int:
    """Return the least value of a whole type that has a multiple of `size` at or below it, which the type has too."""
    values: int = 1 << (kind.bit_width - 1)  # below zero
    return -(values // size) * size


class Parsing(NamedTuple):
    """Bodies that are being parsed.

    Attributes:
        bodies: A binary Arrow array.
        pieces: See `BulkColumns.pieces`; None: bodies are parsed one by one.
    """

    bodies: Any
    pieces: Iterator[Piece] | None


class JsonParser:
    """Parses bodies into the columns of a layout, and counts what does not fit.

    Args:
        contract: What to do with what does not fit; None: see the module.
        promotion: How columns may get wider types; None: only as `JsonColumn.widens` says.
        bodies: How to read the bodies; None: as JSON.
        refuses_rows: Leave out the rows whose bodies would be in `unparsed`.

    Attributes:
        unparsed: The number of bodies so far that are in the column `unparsed`.
        misfits: The number of values so far that did not fit their column, by path; `rest` for the column `rest`.
        new_fields: Fields so far that have no column and a value other than null, with their types; at most 100.
        widen: The types that columns need for values so far, by field, of columns that may be widened.
        milliseconds: The timestamps among `misfits`, by path, that are plausible as Unix milliseconds.
        discarded: The number of values so far that a contract left out, by path; of many paths, see `count_path`.
        refused_rows: The rows of the last call of `parse` that are left out, with the first reason for each.
    """

    def __init__(
        self,
        layout: Layout,
        contract: SchemaContract | None = None,
        promotion: Promotion | None = None,
        bodies: BodyReader | None = None,
        *,
        refuses_rows: bool = False,
    ) -> None:
        self.unparsed: int = 0
        self.misfits: Counter[str] = Counter()
        self.new_fields: dict[str, str] = {}
        self.widen: dict[str, str] = {}
        self.milliseconds: Counter[str] = Counter()
        self.discarded: Counter[str] = Counter()
        self.refused_rows: dict[int, str] = {}
        self._columns = layout.json_columns
        self._known = frozenset(column.field for column in layout.json_columns)
        self._keep_rest = layout.keep_rest
        self._folders: dict[str, list[tuple[str, int | None]]] = {}
        """The names of folders with text of a field, and how many characters of it they have; None: all."""
        for level in layout.field_levels:
            if level.transform in (Transform.IDENTITY, Transform.TRUNCATE):
                name = layout.level_name(level)
                self._folders.setdefault(level.field, []).append((name, level.size or None))
        self._fixed = layout.fixed_fields
        self._contract = contract
        self._promotion = promotion
        self._refuses_rows = refuses_rows or contract is SchemaContract.DISCARD_ROW
        self._reasons: dict[int, str] = {}
        self._key = [layout.column_of(field) for field in layout.key]
        self._operation = layout.operation
        self._bodies = bodies or BodyReader(with_paths(decode_object, layout))
        self._bulk: BulkColumns | None = None
        rounds = any(  # `_column` checks these numbers
            level.transform is Transform.TRUNCATE
            and layout.column_of(level.field).type is not JsonType.STRING
            for level in layout.field_levels
        )
        if bodies is None and not rounds:
            self._bulk = BulkColumns(
                self._columns,
                self._folders,
                layout.key,
                layout.operation,
                dict(layout.paths),
                refuses_unknown=self._keep_rest,
            )

    def parse(self, bodies: Any) -> list[Any]:
        """Return the columns of bodies, see `begin` and `finish`."""
        return self.finish(self.begin(bodies))

    def begin(self, bodies: Any) -> "Parsing":
        """Begin to parse bodies; threads do most of it until `finish`.

        Args:
            bodies: A binary Arrow array without nulls, or what it can be made of.
        """
        bodies = pa.array(bodies, pa.binary())
        return Parsing(bodies, None if self._bulk is None else self._bulk.pieces(bodies))

    def finish(self, parsing: "Parsing") -> list[Any]:
        """Return Arrow arrays: the columns, `rest` if the layout has it, and `unparsed`.

        Raises:
            RowRefused: A body does not fit, and the contract forbids it.
        """
        bodies = parsing.bodies
        if parsing.pieces is None:
            return self._parse_each(bodies.to_pylist())
        pieces = list(parsing.pieces)
        left = [row for rows, arrays in pieces if arrays is None for row in rows]
        try:
            found = self._parse_each(bodies.take(pa.array(left, pa.int64())).to_pylist())
        except RowRefused as exc:
            raise RowRefused(left[exc.row], exc.reason) from None
        self.refused_rows = {left[row]: reason for row, reason in self.refused_rows.items()}
        if len(left) == len(bodies):
            return found
        begin, parts = 0, []
        for rows, arrays in pieces:
            if arrays is None:
                arrays = [each.slice(begin, len(rows)) for each in found]
                begin += len(rows)
            else:
                arrays += [pa.nulls(len(rows), each.type) for each in found[len(arrays) :]]
            parts.append(arrays)
        return [pa.concat_arrays(each) for each in zip(*parts, strict=True)]

    def _parse_each(self, bodies: Sequence[bytes]) -> list[Any]:
        """Parse bodies one by one. Returns and raises as `parse`."""
        objects: list[Mapping[str, Any]] = []
        rows, self._reasons = _Rows(), {}
        decode = self._bodies.decode
        for index, body in enumerate(bodies):
            try:
                objects.append(decode(body))
            except (ValueError, RecursionError):
                objects.append(_NOTHING)
                self._refuse(index, f"is no {self._bodies.name}")
                rows.bad.add(index)
        if self._key:
            self._drop_keyless(objects, rows)
        arrays = [self._column(column, objects, rows) for column in self._columns]
        if self._keep_rest:
            arrays.append(self._rest(objects, rows))
        reasons = self._reasons
        self.refused_rows = {row: reasons.get(row, "") for row in rows.bad} if self._refuses_rows else {}
        if self.refused_rows or not rows.bad:
            return [*arrays, pa.nulls(len(bodies), pa.binary())]
        self.unparsed += len(rows.bad)
        kept = [body if index in rows.bad else None for index, body in enumerate(bodies)]
        return [*arrays, pa.array(kept, pa.binary())]

    def _drop_keyless(self, objects: list[Mapping[str, Any]], rows: "_Rows") -> None:
        """Replace the fields of bodies without a key or with an unknown operation: they belong to no row of the table.

        So all their columns are null, as those of invalid bodies.
        """
        keyless: set[int] = set()

        def drop(row: int, path: str, reason: str) -> None:
            self._refuse(row, reason)
            rows.bad.add(row)
            if row not in keyless:
                self.misfits[path] += 1
            keyless.add(row)

        for column in self._key:
            misfits = self.misfits.copy()
            found = self._column(column, objects, _Rows())
            self.misfits = misfits  # those of values without a column of their type count below
            for row in pc.indices_nonzero(pc.is_null(found)).to_pylist():
                if objects[row] is not _NOTHING:
                    drop(
                        row,
                        column.field,
                        f"has no {column.type.value} as {column.field}, which is in the key",
                    )
        if name := self._operation:
            for row, each in enumerate(objects):
                if each is not _NOTHING and not is_operation(each.get(name)):
                    drop(row, name, f"has an unknown operation as {name}")
        for row in keyless:
            objects[row] = _NOTHING

    def _refuse(self, row: int, reason: str) -> None:
        if self._contract is SchemaContract.FREEZE:
            raise RowRefused(row, reason)
        if self._refuses_rows:
            self._reasons.setdefault(row, reason)

    def _column(self, column: JsonColumn, objects: Sequence[Mapping[str, Any]], rows: "_Rows") -> Any:
        field = column.field

        def misfit(row: int, path: str, kind: ColumnType, value: object) -> None:
            if kind is column.type and self._contract in (None, SchemaContract.EVOLVE):
                self._widen(column, value)
            self._note_misfit(rows, row, path, kind, value)

        def unknown(row: int, path: str) -> None:
            if self._bodies.refuses_unknown:
                self._note_misfit(rows, row, path, column.type, None)
                return
            self._note_unknown(rows, row, path)
            rows.incomplete.setdefault(row, set()).add(field)

        looks = self._keep_rest or self._bodies.refuses_unknown
        arrays = self._bodies.arrays(misfit, unknown if looks else None)
        values = [each.get(field) for each in objects]
        if field in self._folders and column.type is JsonType.STRING:
            folders = self._folders[field]
            for row, value in enumerate(values):
                if isinstance(value, str) and not all(
                    fits_folder(name, value[:size]) for name, size in folders
                ):
                    misfit(row, field, column.type, value)
                    values[row] = None
        found = arrays.build(column.type, values, field)
        if field in self._folders and pa.types.is_integer(found.type):
            least = max(_least_rounded(found.type, size or 1) for _, size in self._folders[field])
            too_small = pc.less(found, pa.scalar(least, found.type))
            if pc.any(too_small).as_py():
                for row in pc.indices_nonzero(too_small).to_pylist():
                    misfit(row, field, column.type, values[row])
                found = pc.if_else(too_small, pa.scalar(None, found.type), found)
        return found

    def _widen(self, column: JsonColumn, value: object) -> None:
        """Note the type that a column needs for a value, if it may have it."""
        kind = column.type
        if column.field in self._fixed:
            return
        if needs_double(kind, value):
            is_wider = column.widens or self._promotion is Promotion.FILES
            wider: ColumnType | None = JsonType.DOUBLE if is_wider else None
        else:
            wider = None if self._promotion is None else type_with(kind, value, self._promotion)
        if wider is not None:
            before = parse_type(self.widen.get(column.field, kind.value))
            wider = common_type(before, wider, self._promotion or Promotion.FILES)
            self.widen[column.field] = before.value if wider is None else wider.value

    def _note_misfit(self, rows: "_Rows", row: int, path: str, kind: ColumnType, value: object) -> None:
        self._refuse(row, f"has a value of {path} that is no {kind.value}")
        if self._contract is SchemaContract.DISCARD_VALUE:
            count_path(self.discarded, path)
            return
        rows.bad.add(row)
        self.misfits[path] += 1
        if kind is JsonType.TIMESTAMP and is_milliseconds(value):
            self.milliseconds[path] += 1

    def _note_unknown(self, rows: "_Rows", row: int, path: str) -> None:
        """Note a field for which there is no column."""
        self._refuse(row, f"has the new field {path}")
        if self._contract is SchemaContract.DISCARD_VALUE:
            count_path(self.discarded, path)
        elif self._contract is SchemaContract.DISCARD_ROW:
            rows.bad.add(row)

    def _rest(self, objects: Sequence[Mapping[str, Any]], rows: "_Rows") -> Any:
        known = self._known
        texts: list[str | None] = []
        for index, each in enumerate(objects):
            text = None
            if index in rows.incomplete or not known.issuperset(each):
                left = {name: value for name, value in each.items() if name not in known}
                for name, value in left.items():
                    if value is not None:
                        self._note_unknown(rows, index, name)
                if self._contract in (None, SchemaContract.EVOLVE):
                    self._note_fields(left)
                # A struct with other fields is here as a whole: they cannot be told apart inside of arrays.
                left |= {name: each[name] for name in rows.incomplete.get(index, ())}
                if self._contract is not SchemaContract.DISCARD_VALUE:
                    text = self._rest_text(left, rows, index)
            texts.append(text)
        return pa.array(texts, pa.string())

    def _rest_text(self, left: Mapping[str, Any], rows: "_Rows", row: int) -> str | None:
        try:
            return json_text(left)
        except (ValueError, RecursionError):
            self._refuse(row, "has fields that are no JSON text")
            rows.bad.add(row)
            self.misfits[REST] += 1
            return None

    def _note_fields(self, fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            before = self.new_fields.get(name)
            full = before is None and len(self.new_fields) >= _MAX_NEW_FIELDS
            if value is not None and not full and _is_name(name):
                kind = type_of(value)
                self.new_fields[name] = kind if before is None else common_json_type(JsonType(before), kind)


class _Rows:
    """Rows that need more than their columns.

    Attributes:
        bad: Those whose bodies are for `unparsed`, or which the contract leaves out.
        incomplete: Fields of rows with a struct that has more fields than its column.
    """

    def __init__(self) -> None:
        self.bad: set[int] = set()
        self.incomplete: dict[int, set[str]] = {}


def infer_columns(
    bodies: Iterable[bytes],
    given: Sequence[tuple[str, ColumnType | None]],
    decode: Callable[[bytes], Mapping[str, Any]] = decode_object,
) -> list[JsonColumn]:
    """Infer columns from a sample.

    Args:
        decode: See `BodyReader`.
        given: Fields, with a type or None to infer it; empty: all fields of the sample, or those in most messages if
            there are more than `MAX_COLUMNS`.

    Raises:
        LayoutError: There are no columns.
    """
    types: dict[str, JsonType | None] = {}
    counts = Counter[str]()
    for body in bodies:
        try:
            found = decode(body)
        except (ValueError, RecursionError):
            continue
        counts.update(found.keys())
        for name, value in found.items():
            before = types.setdefault(name, None)
            if value is not None:
                kind = type_of(value)
                types[name] = kind if before is None else common_json_type(before, kind)
    asked = given or [(name, None) for name in types if _is_name(name)]
    if not asked:
        raise LayoutError("no message of the sample is a JSON object: columns cannot be inferred")
    if len(asked) > MAX_COLUMNS and not given:
        kept = set(sorted((name for name, _ in asked), key=lambda name: -counts[name])[:MAX_COLUMNS])
        asked = [(name, kind) for name, kind in asked if name in kept]
    names = name_columns(field for field, _ in asked)
    return [
        JsonColumn(field, kind or types.get(field) or JsonType.STRING, name, kind is None)
        for (field, kind), name in zip(asked, names, strict=True)
    ]


def _is_name(field: str) -> bool:
    """Whether a field can name a column."""
    return 0 < len(field) <= _MAX_NAME_CHARS and field.isprintable()


def common_json_type(one: JsonType, other: JsonType) -> JsonType:
    """Return the type of a column with values of both."""
    if one is other:
        return one
    if {one, other} == {JsonType.LONG, JsonType.DOUBLE}:
        return JsonType.DOUBLE
    return JsonType.JSON
