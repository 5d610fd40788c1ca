"""Find the pages of a console as a visitor would: by its links."""

import http.client
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from starlette.routing import compile_path

from interop.peers import CLIENT_DEADLINE_S
from trio_nsq.console.web.app import PAGES

MOST_OF_A_PAGE = 8
"""Links to the same page with other names or parameters that are followed."""


@dataclass
class Answer:
    """The answer to a GET request."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Site:
    """What links lead to.

    Attributes:
        by_page: The paths that were followed, by the name of the page.
        broken: Paths that were not answered with 200 or a redirection, with the status and the path that links to them.
        answers: By path.
    """

    by_page: dict[str, list[str]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag in ("a", "link") and attributes.get("href"):
            self.found.append(attributes["href"] or "")
        if tag == "script" and attributes.get("src"):
            self.found.append(attributes["src"] or "")


_PATTERNS = {page.name: compile_path(page.path)[0] for page in PAGES}


def page_of(path: str) -> str:
    """Return the name of the page at a path; empty for anything else."""
    plain = unquote(urlsplit(path).path)
    return next((name for name, pattern in _PATTERNS.items() if pattern.match(plain)), "")


def get(address: str, path: str, headers: Mapping[str, str] | None = None) -> Answer:
    """Make one GET request."""
    connection = http.client.HTTPConnection(address, timeout=CLIENT_DEADLINE_S)
    try:
        connection.request("GET", path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return Answer(answer.status, dict(answer.headers), answer.read())
    finally:
        connection.close()


def links_of(path: str, answer: Answer) -> list[str]:
    """Return the links of a page to its own site, resolved as browsers do."""
    if not answer.headers.get("content-type", "").startswith("text/html"):
        return []
    parser = _Links()
    parser.feed(answer.body.decode())
    base = f"http://site{path}"
    absolute = (urldefrag(urljoin(base, link))[0] for link in parser.found)
    return [link.removeprefix("http://site") for link in absolute if link.startswith("http://site/")]


def walk(address: str) -> Site:
    """Follow all links from the first page; of a page with very many, some."""
    site = Site()
    waiting = deque([("/", "")])
    seen = {"/"}
    while waiting:
        path, origin = waiting.popleft()
        name = page_of(path)
        followed = site.by_page.setdefault(name, [])
        if len(followed) >= MOST_OF_A_PAGE:
            continue
        followed.append(path)
        answer = site.answers[path] = get(address, path)
        if answer.status not in (200, 303):
            site.broken.append(f"{answer.status} {path} (linked from {origin})")
        links = links_of(path, answer)
        if location := answer.headers.get("location", ""):
            links.append(location)
        for link in links:
            if link not in seen:
                seen.add(link)
                waiting.append((link, path))
    return site
