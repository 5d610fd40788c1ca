"""What a page consists of."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response


class NotFound(Exception):
    """The page does not exist. The text says what is missing."""


class Unanswered(NotFound):
    """The page may exist, on a broker that does not answer. The text names it."""


@dataclass(frozen=True, slots=True)
class Table:
    """What a page lists, as a file.

    Attributes:
        name: The name of the file, without its end.
        columns: The keys of the records, in the order of the columns.
        records: A row each.
    """

    name: str
    columns: tuple[str, ...]
    records: Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class View:
    """A template and its variables. The application renders it.

    Attributes:
        context: The variables; `viewer`, `snapshot`, `options`, `request` and `page` are added.
        only_asks: The page asks whether to do something: nothing was changed or refused.
        table: What `?format=csv` and `json` give, if that is no `Listing` in the context; None: nothing.
    """

    template: str
    context: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    only_asks: bool = False
    table: Table | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """A page and its path.

    Attributes:
        path: Such as `/topics/{topic}`.
        name: For `url(name, ...)` in templates.
        handler: Returns the view; for an action, a redirection. Raises NotFound, Forbidden, UpstreamError.
        personal: The block depends on the viewer's preferences, too.
        acts: The page makes one change, after it has asked.
        live: The handler is called for each snapshot, too, and the template's block `live` is sent to viewers.
    """

    path: str
    name: str
    handler: Callable[[Request], Awaitable[View | Response]]
    methods: tuple[str, ...] = ("GET",)
    live: bool = False
    personal: bool = False
    acts: bool = False
