"""The links on the side of every page."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace


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


def _belongs(here: str, path: str) -> bool:
    if path == "/":
        return here == "/" or here.startswith("/topics")
    return here == path or here.startswith(f"{path}/")
