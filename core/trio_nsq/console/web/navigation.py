"""The links on the side of every page."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from .page import Page


@dataclass(frozen=True, slots=True)
class Link:
    """A link to a page.

    Attributes:
        path: The page's path, below the base path.
        key: The key after g that opens it.
        here: Whether the page that is shown is this one, or belongs to it.
    """

    text: str
    path: str
    icon: str
    key: str
    here: bool = False


CLUSTERS = "/clusters"
"""The path of the page of clusters."""
DEFINITIONS = "/definitions"
"""The path of the page of definitions."""
_GROUPS = (
    (
        "",
        (
            Link("Topics", "/", "topics", "t"),
            Link("Nodes", "/nodes", "nodes", "n"),
            Link("Cluster", CLUSTERS, "cluster", "u"),
            Link("Lookup", "/lookup", "lookup", "l"),
            Link("Counter", "/counter", "counter", "c"),
        ),
    ),
    (
        "Operations",
        (
            Link("Health", "/health", "health", "h"),
            Link("Dead letters", "/dead-letters", "dead", "d"),
            Link("Jobs", "/jobs", "jobs", "j"),
            Link("Definitions", DEFINITIONS, "definitions", "f"),
        ),
    ),
)


def navigation(here: str, existing: Collection[str]) -> Iterator[tuple[str, list[Link]]]:
    """Yield the groups of links, each with its heading.

    Args:
        here: The path of the page that is shown, below the base path.
        existing: The paths of all pages; links to others are left out.
    """
    for heading, links in _GROUPS:
        shown = [replace(link, here=_belongs(here, link.path)) for link in links if link.path in existing]
        if shown:
            yield heading, shown


def elsewhere(page: Page | None, here: str) -> str:
    """Return the path of a page in another fleet, which has other brokers and messages, but topics of the same names.

    Args:
        page: The page that is shown; None: an error.
        here: Its path, below the root of its fleet, with the escapes of its segments.
    """
    if page is None or page.name == "login":
        return "/"
    segments: Sequence[str] = here.split("/")[1:]
    names = page.path.split("/")[1:]
    shared = next(
        (n for n, name in enumerate(names) if name.startswith("{") and name not in ("{topic}", "{channel}")),
        len(names) - page.acts,
    )
    return "/" + "/".join(segments[:shared])


def _belongs(here: str, path: str) -> bool:
    if path == "/":
        return here == "/" or here.startswith("/topics")
    return here == path or here.startswith(f"{path}/")
