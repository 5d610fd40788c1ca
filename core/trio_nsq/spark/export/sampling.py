"""The layout of a folder: the columns of a new one, and whether a request fits an existing one.

Columns of Avro and Protobuf bodies are those of their schema.

JSON columns are inferred from a sample. It is taken from the whole export, because the first messages may all have
whole numbers, or lack a field.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ...filters.exact_json import decode_object
from ...log.gaps import Span
from ...log.records import RecordBatch
from ...protocol.limits import MIB
from ..bodies.schema import BodySchema
from ..logs import LogPlace, resolve
from ..places import storage_at
from ..schemas.column_types import ColumnType
from ..schemas.promotions import Promotion, can_widen
from .json_columns import infer_columns
from .layout import MAX_COLUMNS, BodyFormat, JsonColumn, Layout, LayoutError, PartitionBy
from .manifest import Manifest, manifest_path
from .masks import check_masks, with_types_of_masks
from .partitions import check_levels, with_partition_columns
from .paths import type_at, with_paths
from .request import ExportRequest
from .selection import check_condition
from .sorting import check_order, shown_order

SAMPLE_MESSAGES = 10_000
_PIECES = 20
_SAMPLE_BYTES = 64 * MIB


def new_layout(request: ExportRequest, wanted: Sequence[tuple[LogPlace, Span]]) -> Layout:
    """Return the layout of a request, with the columns of fields.

    Args:
        wanted: The messages to export.

    Raises:
        LayoutError: There are no columns, or too many, or the condition is invalid.
        NSQError, OSError: A log cannot be read, or there is no schema.
    """
    layout = request.layout
    if request.schemas is not None:
        schema = request.schemas.reader(request.topic)
        found = columns_of_schema(schema, request.json_fields, layout)
        layout = replace(layout, json_columns=tuple(found), body_schema=schema)
    elif layout.body is BodyFormat.JSON:
        is_given = request.json_fields and all(kind is not None for _, kind in request.json_fields)
        decode = with_paths(decode_object, layout)
        columns = infer_columns(() if is_given else sample_bodies(wanted), request.json_fields, decode)
        columns = with_types_of_masks(columns, layout)
        keep_rest = layout.keep_rest or not request.json_fields
        layout = replace(layout, json_columns=tuple(columns), keep_rest=keep_rest)
    if layout.body.has_fields:
        layout = with_partition_columns(layout, request.event_time_type).named()
        check_levels(layout)
        check_masks(layout)
    check_order(layout)
    check_condition(layout, adds_columns=request.adds_columns)
    return layout


def columns_of_schema(
    schema: BodySchema, asked: Sequence[tuple[str, ColumnType | None]], layout: Layout
) -> list[JsonColumn]:
    """Return the columns of a schema, without names.

    Args:
        asked: The fields to return, with the type of the schema or None; empty: all.

    Raises:
        LayoutError: There are no columns, or too many, or the schema has no such field, or another type for it.
        BodySchemaError: The schema cannot be used.
    """
    there = dict(schema.columns())
    there |= {field: type_at(there, layout.path_of(field)) for field, _ in asked}
    for field, kind in asked:
        if kind not in (None, there[field]):
            raise LayoutError(f"the field {field} is {there[field].value} in the schema, not {kind}")
    fields = [field for field, _ in asked] or list(there)
    if not fields:
        raise LayoutError("the schema has no fields, so there are no columns")
    if len(fields) > MAX_COLUMNS and not asked:
        raise LayoutError(
            f"the schema has {len(fields)} fields, more than {MAX_COLUMNS}: choose some with --columns"
        )
    return [JsonColumn(field, there[field], "") for field in fields]


def check_layout(there: Layout, request: ExportRequest, place: str) -> None:
    """Check that a request has the layout of the folder, which messages call `place`. Raises LayoutError."""
    if there.where and request.evolves:
        check_condition(there, adds_columns=True)
    asked = request.layout
    same = all(
        getattr(there, name) == getattr(asked, name)
        for name in (
            "partition",
            "levels",
            "event_time",
            "keeps_levels",
            "body",
            "keep_body",
            "where",
            "masks",
            "key",
            "operation",
            "paths",
            "sort_by",
        )
    )
    if same and request.json_fields:
        types = {column.field: column.type for column in there.json_columns}
        fields = dict(request.json_fields)
        if asked.keep_rest and not there.keep_rest:
            raise LayoutError(
                f"the folder {place} has files with {_describe(there)}, without the column rest, which has the fields "
                "that a schema lacks: use these options, or choose another folder"
            )
        if asked.keep_rest or request.evolves:
            _check_schema(types, request, place)
        else:
            same = list(types) == list(fields) and all(
                _has_values(types[name], kind) for name, kind in fields.items()
            )
    if not same:
        raise LayoutError(
            f"the folder {place} has files with {_describe(there)}, and all files need the same layout: use "
            "these options, or choose another folder"
        )


def _check_schema(types: Mapping[str, ColumnType], request: ExportRequest, place: str) -> None:
    """Check that a folder has the columns of a schema, or can get them; it may have more. Raises LayoutError."""
    for name, kind in request.json_fields:
        there, promotion = types.get(name), request.promotion
        if there is None and not request.evolves:
            raise LayoutError(
                f"the folder {place} has no column for the field {name}: give --schema-contract evolve, which adds it, "
                "or choose another folder"
            )
        if there is None and kind is None:
            raise LayoutError(
                f"the folder {place} has no column for the field {name}, and its type is not inferred: give it one, as "
                f"in {_option('--columns', f'{name}:string')}"
            )
        if there is None or _has_values(there, kind):
            continue
        if kind is None or promotion is None or not can_widen(there, kind, promotion):
            raise LayoutError(
                f"the field {name} is {kind} in the schema, and {there} in the folder {place}: use the type of the "
                "folder, which --print-schema prints, or choose another folder"
            )


def _has_values(there: ColumnType, kind: ColumnType | None) -> bool:
    """Whether a column of a folder has all values of the type that is asked for; None: any type will do.

    An earlier export with the contract evolve may have made it wider than the same schema asks for.
    """
    return kind in (None, there) or (kind is not None and can_widen(kind, there, Promotion.FILES))


def find_columns(request: ExportRequest, places: Sequence[LogPlace]) -> Sequence[tuple[str, ColumnType]]:
    """Return the fields that an export has columns for, with their types: those of its folder, or of a sample.

    Nothing is exported or locked.

    Raises:
        LayoutError: The folder has no JSON columns, or none can be inferred.
        NSQError, OSError: A log or the folder cannot be read.
    """
    storage = storage_at(request.place)
    if (found := storage.read(manifest_path(request.topic))) is not None:
        layout = Manifest.from_bytes(found.data).layout
        if not layout.body.has_fields:
            raise LayoutError(f"the folder {storage.shown} has files with {_describe(layout)}, and no schema")
        columns: Sequence[JsonColumn] = layout.json_columns
    elif request.schemas is not None:
        schema = request.schemas.reader(request.topic)
        columns = columns_of_schema(schema, request.json_fields, request.layout)
    else:
        decode = with_paths(decode_object, request.layout)
        columns = infer_columns(sample_bodies(_retained(request, places)), request.json_fields, decode)
        columns = with_types_of_masks(columns, request.layout)
    return [(column.field, column.type) for column in columns]


def _retained(request: ExportRequest, places: Sequence[LogPlace]) -> Iterator[tuple[LogPlace, Span]]:
    """Yield the messages of a request that are in the logs."""
    for place in places:
        log = place.open()
        bounds, first = resolve(log, request.first)
        _, end = resolve(log, request.end)
        span = Span(max(first, bounds.first), end)
        if span.first < span.end:
            yield place, span


def _describe(layout: Layout) -> str:
    """Return the options of `to-parquet` for this layout, as a shell takes them."""
    words = []
    if layout.body is BodyFormat.TEXT:
        words.append("--text")
    if layout.body is BodyFormat.JSON:
        columns = ",".join(f"{_as(layout, column.field)}:{column.type}" for column in layout.json_columns)
        words.append("--json" if layout.keep_rest else f"--json {_option('--columns', columns)}")
    if layout.body.has_schema:
        words.append(f"--body-format {layout.body}")
    if layout.keep_body:
        words.append("--keep-body")
    if layout.levels or layout.partition is not PartitionBy.NONE:
        words.append(_option("--partition-by", ",".join(layout.levels or [layout.partition])))
    if layout.event_time:
        kind = layout.column_of(layout.event_time).type
        words.append(_option("--event-time", f"{layout.event_time}:{kind}"))
    if layout.sort_by:
        words.append(_option("--sort-by", ",".join(map(shown_order, layout.sort_by))))
    if layout.where:
        words.append(_option("--where", layout.where))
    if layout.masks:
        words.append(_option("--mask", ",".join(f"{field}={mask}" for field, mask in layout.masks)))
    if layout.key:
        words.append(_option("--key", ",".join(layout.key)))
    if layout.operation:
        words.append(_option("--op", layout.operation))
    return " ".join(words) or "binary bodies and no partitions"


def _option(name: str, value: str) -> str:
    """Return an option as a shell takes it."""
    return f"{name} {shlex.quote(value)}"


def _as(layout: Layout, field: str) -> str:
    return field if (path := layout.path_of(field)) == field else f"{path} AS {field}"


# ---------------------------------------------------------------------- the sample


def sample_bodies(wanted: Iterable[tuple[LogPlace, Span]]) -> Iterator[bytes]:
    """Yield bodies of these messages. Raises NSQError, OSError: a log cannot be read."""
    for place, span in sample_spans(list(wanted)):
        left_bytes = _SAMPLE_BYTES // _PIECES
        for found in place.open().read(span):
            bodies: Sequence[bytes] = ()
            if isinstance(found, RecordBatch):
                bodies = found.messages.bodies()
            yield from bodies
            left_bytes -= sum(map(len, bodies))
            if left_bytes <= 0:
                break


def sample_spans(wanted: Sequence[tuple[LogPlace, Span]]) -> Iterator[tuple[LogPlace, Span]]:
    """Yield the spans of a sample: everything, or pieces at equal distances of all logs, one after the other."""
    total = sum(span.length for _, span in wanted)
    if total <= SAMPLE_MESSAGES:
        yield from wanted
        return
    length = SAMPLE_MESSAGES // _PIECES
    starts = [(total - length) * piece // (_PIECES - 1) for piece in range(_PIECES)]
    before = 0
    for place, span in wanted:
        for start in starts:
            first = span.first + max(0, start - before)
            end = min(span.end, span.first + start - before + length)
            if first < end:
                yield place, Span(first, end)
        before += span.length
