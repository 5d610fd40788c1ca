"""What strangers send is shown as text: nothing of it runs, breaks the layout, or makes a page large."""

from collections.abc import Callable
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from console.browser.links import get
from console.browser.lively_fleet import ALIKE, DOTS, HOSTILE_BODIES, LONGEST, MARKUP, LivelyFleet
from console.browser.support import PHONE, Visitor, overflow_px
from interop.peers import RunningConsole
from soak import in_soak

pytestmark = pytest.mark.interop

MAX_BYTES = 150 * 1024

FOREIGN = """() => [
  ...document.querySelectorAll("script:not([src]), iframe, object, embed, img, base"),
  ...document.querySelectorAll("[onerror], [onload], [onclick], [style]"),
  ...[...document.querySelectorAll("a[href], form[action]")].filter(
    (each) => !["http:", "https:"].includes(new URL(each.href || each.action, location).protocol)),
].map((each) => each.outerHTML.slice(0, 200))"""
"""Elements that no page of the console has."""


def check(page: Page) -> None:
    """Check a page with hostile content. The visitor's problems are checked at the end of the test."""
    assert page.evaluate(FOREIGN) == []
    assert "ran" not in page.title()
    assert overflow_px(page) == 0


def message_path(lively: LivelyFleet, sequence: int, view: str = "auto") -> str:
    """Return the path of a hostile message."""
    return (
        f"/topics/hostile/messages/{sequence}?broker={quote(lively.fleet.ours[0].http_address)}&view={view}"
    )


@pytest.mark.parametrize("size", [PHONE, *in_soak(((1280, 900),))])
def test_bodies(
    console: RunningConsole, lively: LivelyFleet, visit: Callable[..., Visitor], size: tuple[int, int]
) -> None:
    visitor = visit(console.origin, size=size)
    page = visitor.open("/topics/hostile/messages")
    expect(page.locator("main")).to_contain_text("</td></script><script>alert('ran')")
    check(page)
    for sequence in range(len(HOSTILE_BODIES)):
        check(visitor.open(message_path(lively, sequence)))


def test_bodies_are_text(console: RunningConsole, lively: LivelyFleet, visit: Callable[..., Visitor]) -> None:
    visitor = visit(console.origin)
    body = visitor.open(message_path(lively, 0)).locator("pre.body")
    expect(body).to_have_text(MARKUP)
    page = visitor.open(message_path(lively, 0, "hex"))
    expect(page.locator("pre.body")).to_contain_text("3c 2f 74 64 3e")
    check(page)


def test_pages_stay_small(console: RunningConsole, lively: LivelyFleet) -> None:
    paths = ["/topics/hostile/messages", "/topics/hostile/reader"]
    paths += [
        message_path(lively, each, view) for each in range(len(HOSTILE_BODIES)) for view in ("auto", "hex")
    ]
    answers = {path: get(console.http_address, path) for path in paths}
    assert {path: answer.status for path, answer in answers.items() if answer.status != 200} == {}
    assert {path: len(answer.body) for path, answer in answers.items() if len(answer.body) > MAX_BYTES} == {}


def test_download_is_never_a_page(console: RunningConsole, lively: LivelyFleet) -> None:
    """A browser saves it, and does not guess that it is HTML."""
    path = message_path(lively, 0).replace("/0?", "/0/body?")
    answer = get(console.http_address, path)
    assert answer.body == MARKUP.encode()
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_consumers(console: RunningConsole, visit: Callable[..., Visitor]) -> None:
    page = visit(console.origin).open("/topics/hostile/reader")
    expect(page.locator("main")).to_contain_text("</td></script><script>alert('ran')")
    check(page)
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    check(page)


def test_producer_that_is_no_broker(console: RunningConsole, visit: Callable[..., Visitor]) -> None:
    visitor = visit(console.origin)
    for path in ("/nodes", "/lookup", "/health", "/"):
        check(visitor.open(path))


def test_text_in_addresses(console: RunningConsole, visit: Callable[..., Visitor]) -> None:
    """Parameters and names of pages that do not exist are text, too."""
    visitor = visit(console.origin)
    hostile = quote(MARKUP, safe="")
    page = visitor.open(f"/?q={hostile}")
    expect(page.locator("main")).to_contain_text("<script>")
    check(page)
    for path in (
        f"/topics/{hostile}",
        f"/topics/clicks/{hostile}",
        f"/nodes/{hostile}",
        f"/{hostile}",
        f"/topics/hostile/messages?broker={hostile}",
    ):
        with visitor.expects("404"):
            check(visitor.open(path))
    check(visitor.open(f"/topics/hostile/messages?q={hostile}&from={hostile}"))


@pytest.mark.parametrize("name", [DOTS, LONGEST])
def test_names_of_topics(console: RunningConsole, visit: Callable[..., Visitor], name: str) -> None:
    """Each link on the way leads to the topic and its channel."""
    visitor = visit(console.origin, size=PHONE)
    page = visitor.open("/")
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.locator("h1")).to_contain_text(name)
    check(page)
    page.locator("main table").get_by_role("link", name=name, exact=True).first.click()
    expect(page.locator("h1")).to_contain_text(name)
    expect(page.locator("main")).to_contain_text("Clients")
    check(page)


@pytest.mark.parametrize("name", ALIKE)
def test_channels_with_the_names_of_pages(
    console: RunningConsole, visit: Callable[..., Visitor], name: str
) -> None:
    page = visit(console.origin).open("/topics/clicks")
    page.locator("main table").get_by_role("link", name=name, exact=True).click()
    expect(page.locator("h1")).to_contain_text(name)
    expect(page.locator("main")).to_contain_text("Clients")
    page.locator("main").get_by_role("link", name="Messages", exact=True).click()
    expect(page.locator(".crumbs")).to_contain_text(name)
    expect(page.locator("main")).not_to_contain_text("not a sequence")
