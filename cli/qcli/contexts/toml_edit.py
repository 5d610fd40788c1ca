"""Edits a TOML file as text, statement by statement, so that comments, order and spelling stay."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Value = str | bool | Sequence[str]
Path = tuple[str, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class _Statement:
    """The lines `begin` to `end` of a file (from 0, without the end).

    Attributes:
        table: The table it belongs to, or whose header it is; of an array of tables, None.
        key: The first part of the key; None: a header, a comment or a blank line.
        is_header: Whether a table begins here.
    """

    begin: int
    end: int
    table: Path | None
    key: str | None = None
    is_header: bool = False

    @property
    def is_filler(self) -> bool:
        """Whether it is a comment or a blank line."""
        return self.key is None and not self.is_header


def _statements(lines: Sequence[str]) -> Iterator[_Statement]:
    """Yield the statements of a valid file. A statement is the shortest run of lines that is valid TOML."""
    table: Path | None = ()
    begin = 0
    while begin < len(lines):
        end = begin + 1
        while (data := _parsed(lines[begin:end])) is None:
            end += 1
        if lines[begin].lstrip().startswith("["):
            table = _header(data)
            yield _Statement(begin, end, table, is_header=True)
        else:
            yield _Statement(begin, end, table, next(iter(data), None))
        begin = end


def _parsed(lines: Sequence[str]) -> dict[str, Any] | None:
    try:
        return tomllib.loads("\n".join(line.rstrip("\r") for line in lines))
    except tomllib.TOMLDecodeError:
        return None


def _header(data: dict[str, Any]) -> Path | None:
    path = []
    while data:
        ((name, data),) = data.items()
        path.append(name)
        if not isinstance(data, dict):
            return None
    return tuple(path)


def line_of(text: str, table: Path, key: str | None = None) -> int:
    """Return the line, from 1, of a key in a table of a valid file; without the key, of the table; else 1."""
    first = 0
    for each in _statements(text.split("\n")):
        if key is not None and each.table == table and each.key == key:
            return each.begin + 1
        begins = each.is_header and table and each.table is not None and each.table[: len(table)] == table
        is_inline = table and each.table == table[:-1] and each.key == table[-1]
        if begins or is_inline:
            first = first or each.begin + 1
    return first or 1


def set_keys(text: str, table: Path, values: Mapping[str, Value | None]) -> str:
    """Return a file with some keys of a table changed, or removed (None). A missing table is appended.

    Raises ValueError: the file is not valid, or has the table in a form that this function does not know.
    """
    wanted = tomllib.loads(text)
    inner = wanted
    for name in table:
        inner = inner.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{'.'.join(table)} is not a table")
    for key, value in values.items():
        inner.pop(key, None)
        if value is not None:
            inner[key] = value if isinstance(value, str | bool) else list(value)

    new = {key: f"{_key(key)} = {_value(value)}" for key, value in values.items() if value is not None}
    lines = text.split("\n")
    statements = list(_statements(lines))
    own = [each for each in statements if each.table == table and not each.is_filler]
    if own:
        replaced = [
            (each, new.pop(each.key, None)) for each in own if each.key is not None and each.key in values
        ]
        # From the end, because the numbers of the lines before stay.
        lines[own[-1].end : own[-1].end] = list(new.values())
        for each, line in reversed(replaced):
            if line is None:
                _remove(lines, each.begin, each.end)
            else:
                lines[each.begin : each.end] = [line + _comment(lines[each.begin : each.end])]
    elif not table:
        at = _first_free_line(statements, lines)
        lines[at:at] = ["", *new.values()] if at else [*new.values(), ""]
    else:
        while lines and not lines[-1].strip():
            lines.pop()
        gap = [""] if lines else []
        lines += [*gap, f"[{'.'.join(map(_key, table))}]", *new.values(), ""]
    return _checked("\n".join(lines), wanted)


def remove_table(text: str, table: Path) -> str:
    """Return a file without a table. Comments before it stay. Raises ValueError as `set_keys`."""
    wanted = tomllib.loads(text)
    inner = wanted
    for name in table[:-1]:
        inner = inner.get(name, {})
    inner.pop(table[-1], None)
    lines = text.split("\n")
    statements = list(_statements(lines))
    found = [index for index, each in enumerate(statements) if each.is_header and each.table == table]
    for index in found:
        end = index + 1
        while end < len(statements) and not statements[end].is_header:
            end += 1
        while statements[end - 1].is_filler:
            end -= 1  # blank lines and comments belong to the next table
        _remove(lines, statements[index].begin, statements[end - 1].end)
    return _checked("\n".join(lines), wanted)


def _remove(lines: list[str], begin: int, end: int) -> None:
    """Remove lines, and one of the blank lines around them."""
    if end < len(lines) and not lines[end].strip():
        if begin and not lines[begin - 1].strip():
            begin -= 1
        elif not begin and end < len(lines) - 1:
            end += 1
    del lines[begin:end]


def _first_free_line(statements: Sequence[_Statement], lines: Sequence[str]) -> int:
    """Return where to insert the first key of the root: behind the comment that the file begins with, or 0."""
    for each in statements:
        if not each.is_filler:
            return 0  # the comment is about this table
        if not lines[each.begin].strip():
            return each.begin
    return 0


def _comment(lines: Sequence[str]) -> str:
    """Return the comment at the end of a statement of one line, with the space before it."""
    if len(lines) > 1:
        return ""
    data, line = _parsed(lines), lines[0]
    for found in re.finditer(r"\s*#", line):
        if _parsed([line[: found.start()]]) == data:
            return line[found.start() :]
    return ""


def _checked(text: str, wanted: dict[str, Any]) -> str:
    """Return a changed text. Raises ValueError unless it has these values."""
    try:
        found = tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"the change would make it invalid ({error}): edit it by hand") from error
    for data in (found, wanted):
        for name in [name for name, value in data.items() if value == {}]:
            del data[name]  # a table of tables that is empty now
    if found != wanted:
        raise ValueError("its tables are not written as [context.NAME]: edit it by hand")
    return text


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)


def _value(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return "[" + ", ".join(map(_value, value)) + "]"
