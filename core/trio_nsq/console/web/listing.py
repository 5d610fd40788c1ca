"""Filtered, sorted and paged tables: the parameters `q`, `sort`, `order` and `page` of a page's address."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from .forms import whole

_T = TypeVar("_T")
PAGE_ROWS = 100
_MAX_FILTER = 200


@dataclass(frozen=True, slots=True)
class Listing(Generic[_T]):
    """One page of a table, and what its links need.

    Attributes:
        page: The name of the page, for its links.
        parts: The variable parts of its path.
        q: The filter; empty: all rows.
        sort, descending: The column.
        number, pages: The number of this page, from 1, and how many there are.
        total: Rows on all pages.
        rows: Those of this page.
        every: Those of all pages.
        name: Names a row.
        kept: Further parameters of its links.
    """

    page: str
    parts: Mapping[str, str]
    q: str
    sort: str
    descending: bool
    number: int
    total: int
    rows: Sequence[_T]
    every: Sequence[_T] = field(repr=False)
    name: Callable[[_T], str] = field(repr=False)
    columns: Mapping[str, "Column[_T]"] = field(repr=False)
    default: str
    kept: Mapping[str, str]

    @property
    def pages(self) -> int:
        """How many pages there are, at least 1."""
        return max(1, -(-self.total // PAGE_ROWS))

    @property
    def first(self) -> int:
        """The number of the first row on this page, from 1."""
        return (self.number - 1) * PAGE_ROWS + 1

    @property
    def last(self) -> int:
        """The number of the last row on this page."""
        return self.first + len(self.rows) - 1

    def at(self, number: int) -> dict[str, Any]:
        """Return the query of another page of the same table."""
        return self._query(self.sort, self.descending) | {"page": number if number > 1 else None}

    def sorted_by(self, key: str) -> dict[str, Any]:
        """Return the query that sorts by a column; the other way round if it is sorted by it."""
        return self._query(key, not self.descending if key == self.sort else self.columns[key].descending)

    def _query(self, sort: str, descending: bool) -> dict[str, Any]:
        is_default = sort == self.default and descending == self.columns[sort].descending
        return {
            "q": self.q or None,
            "sort": None if is_default else sort,
            "order": None if descending == self.columns[sort].descending else "desc" if descending else "asc",
            **self.kept,
        }


@dataclass(frozen=True, slots=True)
class Column(Generic[_T]):
    """A column by which a table can be sorted. `key` returns None for rows that come last."""

    key: Callable[[_T], Any]
    descending: bool = True


def matches(q: str, name: str) -> bool:
    """Whether a filter matches the name of a row; an empty one matches all."""
    return q.casefold() in name.casefold()


def listing(
    request: Request,
    page: str,
    rows: Iterable[_T],
    columns: Mapping[str, Column[_T]],
    *,
    name: Callable[[_T], str],
    default: str,
    first: Callable[[_T], bool] | None = None,
    kept: Iterable[str] = (),
) -> Listing[_T]:
    """Select the rows that a request asks for. Unknown parameters count as missing.

    Args:
        page: The name of the page, for links.
        name: What the filter looks at, without regard to case. Rows that are equal are sorted by it.
        default: The column without a parameter.
        first: Whether a row comes before all others, whatever the column.
        kept: Further parameters of the page that the table's links keep.
    """
    query = request.query_params
    wanted = query.get("q", "").strip()[:_MAX_FILTER]
    found = list(rows)
    if wanted:
        found = [row for row in found if matches(wanted, name(row))]
    sort = query.get("sort", default)
    if sort not in columns:
        sort = default
    column = columns[sort]
    descending = {"asc": False, "desc": True}.get(query.get("order", ""), column.descending)
    found.sort(key=name)
    known = [row for row in found if column.key(row) is not None]
    unknown = [row for row in found if column.key(row) is None] if len(known) < len(found) else []
    known.sort(key=column.key, reverse=descending)
    found = known + unknown
    if first is not None:
        found.sort(key=lambda row: not first(row))
    pages = max(1, -(-len(found) // PAGE_ROWS))
    at = min(max(1, whole(query.get("page"))), pages)
    shown = found[(at - 1) * PAGE_ROWS : at * PAGE_ROWS]
    return Listing(
        page,
        dict(request.path_params),
        wanted,
        sort,
        descending,
        at,
        len(found),
        shown,
        found,
        name,
        columns,
        default,
        {each: query[each] for each in kept if each in query},
    )
