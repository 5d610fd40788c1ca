"""Select the messages of an export by a condition on the columns of its files, such as `level = 'error'`.

It is the SQL of `qcli replay --where`: a condition selects the same messages of the log, and of files with all of them.
`body` is always there, as text. Only the columns in the condition are parsed for it.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..schemas.arrow_types import arrow_type
from ..schemas.promotions import Promotion
from ..sql_conditions import FilterError, as_text, open_condition, rows_of
from .json_columns import BodyReader, JsonParser
from .layout import (
    BODY,
    HEADERS,
    HEADERS_TYPE,
    MESSAGE_COLUMNS,
    REST,
    UNPARSED,
    BodyFormat,
    Layout,
    LayoutError,
)
from .masks import masks_of


class RowSelection:
    """The condition of a layout. Call `close` at the end.

    Args:
        layout: It has a condition.
        bodies, promotion: See `JsonParser`.

    Attributes:
        widen: See `JsonParser`; of the columns in the condition.

    Raises:
        FilterError: The condition is invalid, or DuckDB is not installed.
    """

    def __init__(
        self, layout: Layout, bodies: BodyReader | None = None, promotion: Promotion | None = None
    ) -> None:
        self._stack = ExitStack()
        self._where = self._stack.enter_context(open_condition(layout.where))
        self._where.shows_values = not layout.masks
        self._where.known = frozenset(_names_of(layout))
        self._body_format = layout.body
        self._needs_unparsed = self._uses(UNPARSED)
        self._bodies = bodies
        self._promotion = promotion
        self._masks = masks_of(layout)
        self._parser: JsonParser | None = None
        self._parsed: list[str] = []
        if layout.body.has_fields:
            self._open_parser(layout)

    def _open_parser(self, layout: Layout) -> None:
        """Parse only what the condition needs: the whole layout for the columns that depend on all others."""
        columns = [each for each in layout.json_columns if self._uses(each.name)]
        if not (self._uses(REST) and layout.keep_rest) and not self._needs_unparsed:
            # Whether a value fits may depend on its level, and the parser names the columns of the key.
            needed = {*layout.partition_fields, *layout.key}
            kept = [each for each in layout.json_columns if each in columns or each.field in needed]
            layout = replace(layout, json_columns=tuple(kept), keep_rest=False)
        if columns or layout.keep_rest or self._needs_unparsed:
            self._parser = JsonParser(layout, None, self._promotion, self._bodies)
            self._parsed = [each.name for each in layout.json_columns]
            self._parsed += [REST, UNPARSED] if layout.keep_rest else [UNPARSED]

    @property
    def widen(self) -> Mapping[str, str]:
        return {} if self._parser is None else self._parser.widen

    def _uses(self, name: str) -> bool:
        return self._where.used is None or name.lower() in self._where.used

    def check(self, *, adds_columns: bool) -> None:
        """Check the condition without messages.

        Args:
            adds_columns: Whether fields move from `rest` to columns of their own.

        Raises:
            FilterError: It is invalid.
            LayoutError: Its result changes: a range that is exported again after a kill would have other rows.
        """
        if adds_columns and REST in self._where.known and self._where.names(REST):
            raise LayoutError(
                f"--where cannot have {REST}, because new fields become columns, and then leave it: name the "
                "fields with --columns or --schema, or give --schema-contract discard-value or discard-row"
            )
        if name := self._where.changing():
            raise LayoutError(
                f"--where cannot have {name}: its result changes, and each message is to be selected once. Give a time "
                "as text, such as '2026-11-21T00:00:00Z', or use --since"
            )
        columns = {name: column for name, column in _no_messages().items() if name in self._where.known}
        self.matches(columns, pa.array([], pa.binary()))

    def matches(self, columns: Mapping[str, Any], bodies: Any) -> Any:
        """Return whether each message meets the condition, as a boolean Arrow array.

        Args:
            columns: Arrow arrays of the message columns and headers, by name.
            bodies: A binary Arrow array.

        Raises:
            FilterError: The evaluation failed.
        """
        found = {name: column for name, column in columns.items() if self._uses(name)}
        if self._parser is not None:
            values = bodies.to_pylist()
            arrays = self._parser.parse(values if self._masks is None else self._masks.readable(values))
            parsed = dict(zip(self._parsed, arrays, strict=True))
            found |= {name.lower(): column for name, column in parsed.items() if self._uses(name)}
            if self._needs_unparsed:
                is_unparsed = parsed[UNPARSED].is_valid()
                found[UNPARSED] = as_text(pc.if_else(is_unparsed, bodies, pa.scalar(None, pa.binary())))
        elif self._needs_unparsed and self._body_format is BodyFormat.TEXT:
            found[UNPARSED] = pa.array(map(_replaced, bodies.to_pylist()), pa.string())
        if self._uses(BODY):
            found[BODY] = as_text(bodies)
        return self._where.matches(rows_of(found, len(bodies)))

    def close(self) -> None:
        self._stack.close()


def check_condition(layout: Layout, *, adds_columns: bool) -> None:
    """Check the condition of a layout, if it has one; see `RowSelection.check`. Raises LayoutError, with the reason."""
    if layout.where:
        try:
            selection = RowSelection(layout)
            try:
                selection.check(adds_columns=adds_columns)
            finally:
                selection.close()
        except FilterError as error:
            raise LayoutError(str(error)) from error


def _names_of(layout: Layout) -> list[str]:
    """Return the columns that a condition can have."""
    names = [*MESSAGE_COLUMNS, BODY, *(column.name for column in layout.json_columns)]
    names += [HEADERS] if layout.headers else []
    names += [REST] if layout.keep_rest else []
    return names if layout.body is BodyFormat.BINARY else [*names, UNPARSED]


def _no_messages() -> dict[str, Any]:
    text, number = pa.array([], pa.string()), pa.array([], pa.int64())
    columns = dict.fromkeys(("topic", "broker", "id"), text) | dict.fromkeys(("seq", "ts_ns"), number)
    columns["ts"] = pa.array([], pa.timestamp("us", "UTC"))
    columns["attempts"] = pa.array([], pa.int32())
    columns[HEADERS] = pa.array([], arrow_type(HEADERS_TYPE))
    return columns


def _replaced(body: bytes) -> str | None:
    """Return the text of a body that is not UTF-8; None: it is."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return body.decode(errors="replace")
    return None
