"""Conditions in DuckDB's SQL on Arrow tables: of replays and of exports.

DuckDB sees no file and no network: see docs/decisions/0025-conditions-of-replays.md.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..protocol.errors import NSQError

_ROW = "trio_nsq_row"
"""The column with the number of a row."""
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    # With `enable_external_access`: a condition cannot read or write files, use the network, load extensions, or see
    # the variables of this process.
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_persistent_secrets": "false",
    "temp_directory": "",
    "memory_limit": "1GB",
    "threads": "1",
}
_SETTINGS = """
    SET TimeZone = 'UTC';
    CREATE MACRO get_json_object(json, path)
        AS CASE WHEN json_valid(json) THEN json_extract_string(json, path) END;
    CREATE MACRO regexp_like(text, pattern) AS regexp_matches(text, pattern);
    CREATE MACRO rand() AS random();
    SET enable_external_access = false;
    SET lock_configuration = true;
"""
"""The macros are functions of Spark, so that conditions with them have the same result with both."""
_CHANGING = r"""
    SELECT DISTINCT function_name FROM duckdb_functions()
    WHERE stability <> 'CONSISTENT' OR regexp_matches(macro_definition, 'random\(\)|current_timestamp')
"""
_CHANGING_NAMES = {"current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"}
"""These have no parentheses: they look like columns."""
_OF_NOW = "age"
"""With one argument, the time since then."""
_MAX_NAMES = 50
"""The most names of columns in an error message."""


class FilterError(NSQError):
    """A condition is invalid; the text has the reason."""


class SqlCondition:
    """A condition, in a database of its own. Created by `open_condition`.

    Attributes:
        used: The names in the condition that may be columns, in lower case; None: all columns.
        known: The names of the columns, for error messages.
        shows_values: Whether error messages may have values of the rows.
    """

    def __init__(self, database: Any, text: str) -> None:
        self.used: frozenset[str] | None
        self.known: frozenset[str] = frozenset()
        self.shows_values: bool = True
        self._database = database
        self._names: set[str] = set()
        self._functions: set[str] = set()
        self._parse(text)

    def _parse(self, text: str) -> None:
        import duckdb

        # In parentheses, and on lines of its own because of comments: nothing may follow the condition.
        self._where = duckdb.SQLExpression(f"(\n{text}\n)")
        ((tree,),) = self._database.execute(
            "SELECT json_serialize_sql(?)", [f"SELECT (\n{text}\n)"]
        ).fetchall()
        has_star = False
        nodes = [json.loads(tree)]
        while nodes:
            node = nodes.pop()
            if isinstance(node, dict):
                has_star |= node.get("class") == "STAR"
                self._names.update(map(str.lower, node.get("column_names", ())))
                name = str(node.get("function_name", "")).lower()
                # DuckDB 2 calls them arguments.
                if name != _OF_NOW or len(node.get("children") or node.get("arguments") or ()) < 2:
                    self._functions.add(name)
            if isinstance(node, dict | list):
                nodes += node.values() if isinstance(node, dict) else node
        self.used = None if has_star else frozenset(self._names)

    def names(self, column: str) -> bool:
        """Whether the condition has this name, in lower case."""
        return column in self._names

    def changing(self) -> str | None:
        """Return a function of the condition whose result changes, such as `random` or `now`; None: there is none."""
        found = {name for (name,) in self._database.execute(_CHANGING).fetchall()} | {_OF_NOW}
        return min((found & self._functions) | (_CHANGING_NAMES & self._names), default=None)

    def matches(self, rows: Any) -> Any:
        """Return whether each row of a table meets the condition, as a boolean Arrow array; `rows`: see `rows_of`.

        Raises:
            FilterError: The condition is invalid, or its evaluation failed.
        """
        with _explained(self, hides_values=not self.shows_values and len(rows) > 0):
            relation = self._database.from_arrow(rows).filter(self._where)
            found = relation.project(_ROW).to_arrow_table()[_ROW]
        return pc.is_in(rows[_ROW], value_set=found).combine_chunks()


@contextmanager
def open_condition(text: str) -> Iterator[SqlCondition]:
    """Parse a condition as in WHERE, until the end of the block.

    Raises:
        FilterError: It is invalid, or DuckDB is not installed.
    """
    try:
        import duckdb
    except ImportError as error:
        raise FilterError(
            f"--where needs DuckDB, which is not installed ({error}): pip install duckdb"
        ) from error
    with duckdb.connect(":memory:", config=_CONFIG) as database:
        with _explained(None):
            database.execute(_SETTINGS)
            condition = SqlCondition(database, text)
        yield condition


@contextmanager
def _explained(condition: SqlCondition | None, *, hides_values: bool = False) -> Iterator[None]:
    """Convert errors of DuckDB.

    Args:
        hides_values: Leave out DuckDB's message, in which there may be values of the rows.
    """
    import duckdb

    try:
        yield
        return
    except duckdb.Error as exc:
        reason = _sentence(exc, condition.known if condition is not None else ())
        if hides_values and not isinstance(exc, duckdb.BinderException):  # it is about names and types
            reason = f"its evaluation failed for a message ({type(exc).__name__}); --mask hides the value"
        if isinstance(exc, duckdb.ConversionException):
            reason += ". TRY_CAST(... AS BIGINT) is null where CAST fails"
        cause = None if hides_values else exc
    raise FilterError(
        f"--where cannot be used: {reason}"
    ) from cause  # outside of `except`: no context either


def as_text(column: Any) -> Any:
    """Return the text of an Arrow array of binary values, as conditions see it: what is not UTF-8 is U+FFFD."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:  # not UTF-8
        texts = [None if value is None else value.decode(errors="replace") for value in column.to_pylist()]
        return pa.array(texts, pa.string())


def rows_of(columns: Mapping[str, Any], count: int) -> Any:
    """Return a table for `SqlCondition.matches`, with the number of each row.

    Args:
        columns: Arrow arrays by name, in lower case: DuckDB does not distinguish the case.
    """
    return pa.table({**columns, _ROW: pa.array(range(count), pa.int64())})


def _sentence(error: Exception, names: Iterable[str]) -> str:
    """Return DuckDB's message in one line, without its class and the position; `names` are those of the columns."""
    text = str(error).partition("\n\n")[0].partition(" Error: ")[2] or str(error)
    lines = [line.strip().rstrip("!.;") for line in text.splitlines() if line.strip()]
    if any("Candidate bindings" in line for line in lines):  # only of the columns that were read
        lines[1:] = [f"there are {', '.join(sorted(names)[:_MAX_NAMES])}"]
    return "; ".join(lines)
