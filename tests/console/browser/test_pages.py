"""Every page of the console: its links, its look, its weight, and its accessibility; with JavaScript and without."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from console.browser.links import Site, get, links_of, walk
from console.browser.support import (
    DESKTOP,
    PHONE,
    Visitor,
    accessibility_faults,
    cut_off,
    overflow_px,
    small_targets,
)
from interop.peers import RunningConsole
from soak import in_soak
from trio_nsq.console.web.app import PAGES

pytestmark = pytest.mark.interop

MAX_PAGE_BYTES = 150 * 1024
"""Of a page with its style sheet, script and icon, uncompressed."""
DOWNLOADS = {"message_body", "messages_ndjson", "definitions_file"}
ALIKE = re.compile(
    r"(pause|unpause|empty)_(topic|channel)|delete_channel|drain|undrain|tombstone|switch_leader|remove_member"
)
"""Pages that ask before an action, as `delete_topic` does; the tests of actions use them."""
SHOWN = sorted(
    {page.name for page in PAGES if "GET" in page.methods and not ALIKE.fullmatch(page.name)}
    - {"login", "oidc_login", "oidc_callback", "clusters", *DOWNLOADS}
)
"""The pages that links lead to; those of logins are for consoles that need one, `clusters` for a fleet that has one."""
IN_DARK_COLOURS = ("channel", "create", "health", "message", "messages", "node", "topics")
"""Those that `make test` checks in dark colours. All have one style sheet."""
INTERESTING = (
    "/clicks/archive",
    "/payments/charge",
    "payments.dead",
    "/clicks",
    "/orders/billing",
    "/orders",
)
"""Topics and channels that fill a page best, in this order."""


@pytest.fixture(scope="module")
def site(console: RunningConsole) -> Site:
    """What links lead to."""
    return walk(console.http_address)


@contextmanager
def reading(browser: Browser, console: RunningConsole, **settings: Any) -> Iterator[Visitor]:
    """A visitor that opens all pages, one after another: a new one for each takes as long as the page."""
    visitor = Visitor(browser, console.origin, **settings)
    yield visitor
    visitor.close()
    assert visitor.problems == []


@pytest.fixture(scope="module")
def reader(browser: Browser, console: RunningConsole) -> Iterator[Visitor]:
    with reading(browser, console) as visitor:
        yield visitor


@pytest.fixture(scope="module")
def plain_reader(browser: Browser, console: RunningConsole) -> Iterator[Visitor]:
    """One without JavaScript, on a phone."""
    with reading(browser, console, javascript=False, size=PHONE) as visitor:
        yield visitor


@pytest.fixture(scope="module")
def static_bytes() -> dict[str, int]:
    """The sizes of files that pages share, as far as they are known."""
    return {}


@pytest.fixture
def path(site: Site, request: pytest.FixtureRequest) -> str:
    """The most interesting path of the page that the test is for."""
    found = site.by_page.get(request.param, [])
    assert found, f"no link leads to the page {request.param}"
    best = [path for part in INTERESTING for path in found if part in path]
    return (best or found)[0]


each_page = pytest.mark.parametrize("path", SHOWN, indirect=True)


def test_no_link_is_broken(site: Site) -> None:
    assert site.broken == []


@each_page
def test_page(reader: Visitor, path: str) -> None:
    """In light colours, and on a phone."""
    page = look(reader, path, "light")
    expect(page.locator("h1")).to_have_count(1)
    assert page.title()
    assert accessibility_faults(page) == []
    assert fits(page) == []
    assert reader.problems == []


@pytest.mark.parametrize(
    "path",
    [*IN_DARK_COLOURS, *in_soak(*(name for name in SHOWN if name not in IN_DARK_COLOURS))],
    indirect=True,
)
def test_page_in_dark_colours(reader: Visitor, path: str) -> None:
    page = look(reader, path, "dark")
    assert accessibility_faults(page, rule="color-contrast") == []


def look(reader: Visitor, path: str, scheme: Literal["light", "dark"]) -> Page:
    """Open a page in these colours."""
    reader.page.set_viewport_size({"width": DESKTOP[0], "height": DESKTOP[1]})
    reader.page.emulate_media(color_scheme=scheme)
    return reader.open(path)


def fits(page: Page) -> list[str]:
    """Return what is wrong with a page's layout in each size of window."""
    wrong = []
    for width, height in ((1280, 800), (390, 844), PHONE):
        page.set_viewport_size({"width": width, "height": height})
        if overflow := overflow_px(page):
            wrong.append(f"{width} px: {overflow} px beyond the edge")
        if width < 640:
            wrong += [f"{width} px: target {each}" for each in small_targets(page)]
            wrong += [f"{width} px: cut off: {each}" for each in cut_off(page)]
    return wrong


def test_pages_that_ask_fit(console: RunningConsole, site: Site, visit: Callable[..., Visitor]) -> None:
    """Those before an action, in dark colours; `SHOWN` are the others."""
    visitor, asked = visit(console.origin, scheme="dark"), set()
    for name, paths in site.by_page.items():
        if ALIKE.fullmatch(name) and paths:
            assert fits(visitor.open(paths[-1])) == [], name
            asked.add(name)
    assert {"pause_topic", "empty_channel", "tombstone"} <= asked


@each_page
def test_page_without_javascript(plain_reader: Visitor, path: str) -> None:
    """All that needs scripts is hidden, and everything else is there."""
    page = plain_reader.open(path)
    expect(page.locator("h1")).to_have_count(1)
    expect(page.locator(".needs-js:visible")).to_have_count(0)
    assert plain_reader.problems == []


@each_page
def test_weight_of_a_page(
    console: RunningConsole, site: Site, path: str, static_bytes: dict[str, int]
) -> None:
    parts = {link for link in links_of(path, site.answers[path]) if link.startswith("/static/")}
    assert parts
    for part in parts - static_bytes.keys():
        static_bytes[part] = len(get(console.http_address, part).body)
    sizes = {path: len(site.answers[path].body)} | {part: static_bytes[part] for part in parts}
    assert sum(sizes.values()) < MAX_PAGE_BYTES, sizes


@each_page
def test_headers_of_a_page(site: Site, path: str) -> None:
    headers = site.answers[path].headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
