"""Renders templates."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NoReturn
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request

from ...text.wording import printable
from ..access.viewer import viewer_of
from ..console import console_of, snapshot_of
from ..fleet.clusters import has_clusters
from ..graphite import Graphite
from . import formats
from .forms import csrf_field
from .navigation import CLUSTERS, DEFINITIONS, elsewhere, navigation
from .page import View
from .paths import segment
from .static_files import static_path

_THEMES = ("light", "dark")
_MAX_NEXT = 2000


@cache
def environment() -> Environment:
    """Return the environment of all templates; every value is escaped, also its invisible characters."""
    found = Environment(
        loader=PackageLoader("trio_nsq.console.web", "templates"),
        autoescape=True,
        finalize=_finalized,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.filters.update(formats.FILTERS)
    return found


def _finalized(value: Any) -> Any:
    """Return what a template prints for a value: text of brokers cannot hide a part of itself.

    HTML stays as it is, and so does the value of a form's field, which is sent back: `{{ value | e }}`.
    """
    return (
        printable(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value
    )


def render(request: Request, view: View, block: str = "", *, live: bool = False) -> str:
    """Return a view as HTML.

    Args:
        block: Return only this block of the template.
        live: Whether the page gets live updates.
    """
    template = environment().get_template(view.template)
    context = template.new_context({**_common(request, live, block), **view.context})
    if block:
        return "".join(template.blocks[block](context))
    return "".join(template.root_render_func(context))


def path_of(request: Request, name: str, query: Mapping[str, Any] | None = None, **parts: str) -> str:
    """Return the path of a page, below the base path.

    Args:
        name: The page's name.
        query: Parameters; those that are None are left out.
        parts: The variable parts of its path, such as `topic`.
    """
    reserved = request.app.state.reserved
    segments = {key: segment(part, reserved) for key, part in parts.items()}
    path = str(request.app.url_path_for(name, **segments))
    base = console_of(request).options.root.rstrip("/")
    given = {key: value for key, value in (query or {}).items() if value is not None}
    return base + path + (f"?{urlencode(given)}" if given else "")


def local_path(path: str) -> str:
    """Return a path of this console, below the base path; `/` for anything else: no other site is reached by it."""
    plain = path.startswith("/") and not path.startswith("//") and "\\" not in path and path.isprintable()
    return path if plain and path.isascii() and len(path) <= _MAX_NEXT else "/"


def existing_pages(request: Request) -> set[str]:
    """Return the paths of all pages that the viewer finds."""
    paths = {route.path for route in request.app.routes}
    if not viewer_of(request).allows("read"):
        return paths - {CLUSTERS, DEFINITIONS}
    return paths if has_clusters(snapshot_of(request)) else paths - {CLUSTERS}


def _common(request: Request, live: bool, block: str) -> dict[str, Any]:
    console = console_of(request)
    base = console.options.root.rstrip("/")

    def url(name: str, query: Mapping[str, Any] | None = None, **parts: str) -> str:
        return path_of(request, name, query, **parts)

    def at(*parts: str) -> str:
        """Return the path of these segments, below the base path: `at("topics", topic, "delete")`.

        If there are four, the third one is a channel.
        """
        reserved = request.app.state.reserved if len(parts) == 4 else ()
        return f"{base}/" + "/".join(
            segment(part, reserved if n == 2 else ()) for n, part in enumerate(parts)
        )

    paths = {route.path for route in request.app.routes}
    here = request.url.path.removeprefix(base) or "/"
    raw = request.scope["raw_path"].decode("latin-1").removeprefix(base) or "/"
    return {
        "request": request,
        "viewer": viewer_of(request),
        "options": console.options,
        "snapshot": snapshot_of(request),
        "url": url,
        "csrf": _no_forms if block else partial(csrf_field, request),
        "graphite": Graphite(console.options),
        "can_log_in": console.access.can_log_in,
        "at": at,
        "static": partial(static_path, base),
        "path": request.url.path,
        "here": raw + (f"?{request.url.query}" if request.url.query else ""),
        "base": base,
        "theme": theme if (theme := request.cookies.get("theme")) in _THEMES else "",
        "paths": paths,
        "navigation": partial(navigation, here, existing_pages(request)),
        "notice": console.notices.get(viewer_of(request).name, request.query_params.get("notice")),
        "live_url": f"{base}/live" if live else "",
        "switch": [
            (each, console.options.root_of(each.name) + elsewhere(getattr(request.state, "page", None), raw))
            for each in console.options.fleets
        ],
    }


def _no_forms() -> NoReturn:
    raise RuntimeError(
        "a form in the block `live`: viewers with equal rights share it, but not the token of their forms"
    )
