"""The layout of a folder: the columns of a new one, and whether a request fits an existing one.

JSON columns are inferred from a sample. It is taken from the whole export, because the first messages may all have
whole numbers, or lack a field.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...log.gaps import Span
from ...log.records import RecordBatch
from ...protocol.limits import MIB
from ..logs import LogPlace
from .json_columns import infer_columns
from .layout import BodyFormat, Layout, LayoutError, PartitionBy
from .request import ExportRequest

SAMPLE_MESSAGES = 10_000
_PIECES = 20
_SAMPLE_BYTES = 64 * MIB


def new_layout(request: ExportRequest, wanted: Sequence[tuple[LogPlace, Span]]) -> Layout:
    """Return the layout of a request, with its JSON columns.

    Args:
        wanted: The messages to export.

    Raises:
        LayoutError: There are no columns, or too many.
        NSQError, OSError: A log cannot be read.
    """
    asked = request.layout
    if asked.body is not BodyFormat.JSON:
        return asked
    columns = infer_columns(sample_bodies(wanted), request.json_fields)
    return replace(asked, json_columns=tuple(columns), keep_rest=not request.json_fields).named()


def check_layout(there: Layout, request: ExportRequest, place: str) -> None:
    """Check that a request has the layout of the folder, which messages call `place`. Raises LayoutError."""
    asked = request.layout
    same = (there.partition, there.body, there.keep_body) == (asked.partition, asked.body, asked.keep_body)
    if same and request.json_fields:
        types = {column.field: column.type for column in there.json_columns}
        fields = dict(request.json_fields)
        same = list(types) == list(fields) and all(
            kind in (None, types[name]) for name, kind in fields.items()
        )
    if not same:
        raise LayoutError(
            f"the folder {place} has files with {_describe(there)}, and all files need the same layout: use "
            "these options, or choose another folder"
        )


def _describe(layout: Layout) -> str:
    """Return the options of `to-parquet` for this layout."""
    words = []
    if layout.body is BodyFormat.TEXT:
        words.append("--text")
    if layout.body is BodyFormat.JSON:
        columns = ",".join(f"{column.field}:{column.type}" for column in layout.json_columns)
        words.append("--json" if layout.keep_rest else f"--json --columns {columns}")
    if layout.keep_body:
        words.append("--keep-body")
    if layout.partition is not PartitionBy.NONE:
        words.append(f"--partition-by {layout.partition}")
    return " ".join(words) or "binary bodies and no partitions"


# ---------------------------------------------------------------------- the sample


def sample_bodies(wanted: Sequence[tuple[LogPlace, Span]]) -> Iterator[bytes]:
    """Yield bodies of these messages. Raises NSQError, OSError: a log cannot be read."""
    for place, span in sample_spans(wanted):
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
