"""Pages change without a reload, and show what happens to brokers. Keys lead everywhere."""

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from console.browser.support import Visitor
from fleet.support import Fleet, hung, running_fleet, take_down
from interop.peers import RunningConsole, qcli_admin

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def own_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet for the tests of this file. The last one that uses it may end and stop its processes."""
    with running_fleet(tmp_path_factory.mktemp("live"), ours=2) as running:
        running.create("orders", "billing")
        running.create("visits", "billing")
        yield running


@pytest.fixture
def own_console(own_fleet: Fleet) -> Iterator[RunningConsole]:
    """A console of this fleet. It polls often, and waits for a second."""
    with qcli_admin(
        *(f"--lookupd-http-address={each}" for each in own_fleet.lookupd_addresses),
        "--poll-interval=200ms",
        "--http-client-request-timeout=1s",
    ) as running:
        yield running


def stay(page: Page) -> None:
    """Mark the page's document, to see later that it was not loaded again."""
    page.evaluate("window.stays = true")


def stayed(page: Page) -> bool:
    """Return whether this is the document that was marked."""
    return bool(page.evaluate("window.stays === true"))


def row(name: str) -> str:
    """Return the selector of a row."""
    return f'tr[data-key="{name}"]'


def test_numbers_change_without_a_reload(
    own_fleet: Fleet, own_console: RunningConsole, visit: Callable[..., Visitor]
) -> None:
    visitor = visit(own_console.origin)
    page = visitor.open("/")
    other = visitor.another_page()
    other.goto("/topics/orders")
    expect(page.locator("#live-state")).to_contain_text("Live")
    stay(page)
    for broker in own_fleet.brokers:
        for _ in range(100):
            broker.post("/pub", b"x", topic="orders")
    expect(page.locator(row("orders"))).to_contain_text("300")
    expect(other.locator("#live")).to_contain_text("300")
    own_fleet.ours[0].create("arrived")
    expect(page.locator(row("arrived"))).to_be_visible()
    own_fleet.ours[0].http("POST", "/topic/delete", topic="arrived")
    expect(page.locator(row("arrived"))).to_have_count(0)
    assert stayed(page)


def test_paused_updates(own_fleet: Fleet, own_console: RunningConsole, visit: Callable[..., Visitor]) -> None:
    page = visit(own_console.origin).open("/")
    expect(page.locator("#live-state")).to_contain_text("Live")
    page.keyboard.press("p")
    expect(page.locator("#live-state")).to_contain_text("Paused")
    own_fleet.ours[0].create("later")
    expect(visit(own_console.origin).open("/").locator(row("later"))).to_be_visible()
    expect(page.locator(row("later"))).to_have_count(0)
    page.keyboard.press("p")
    expect(page.locator(row("later"))).to_be_visible()


def test_console_that_ends(own_console: RunningConsole, visit: Callable[..., Visitor]) -> None:
    """The page says that its numbers are old, and keeps them."""
    visitor = visit(own_console.origin)
    page = visitor.open("/")
    expect(page.locator("#live-state")).to_contain_text("Live")
    with visitor.expects("ERR_"):
        own_console.process.kill()
        own_console.process.wait()
        expect(page.locator("#live-state")).to_contain_text("No connection since")
        expect(page.locator(row("orders"))).to_be_visible()
        page.close()  # it would go on trying


def test_brokers_that_hang_and_end(
    own_fleet: Fleet, own_console: RunningConsole, visit: Callable[..., Visitor]
) -> None:
    """They are shown as such; the numbers of the others go on."""
    page = visit(own_console.origin).open("/")
    nodes = visit(own_console.origin).open("/nodes")
    stay(page)
    well, ending = own_fleet.ours
    with hung(own_fleet.nsqd):
        expect(page.locator("#live")).to_contain_text("no answer within 1 s")
        expect(nodes.locator("#live")).to_contain_text("no answer within 1 s")
        for _ in range(100):
            well.post("/pub", b"x", topic="visits")
        expect(page.locator(row("visits"))).to_contain_text("100")
        assert own_fleet.nsqd.http_address in page.inner_text("#live")
        take_down(ending)
        expect(page.locator("#live")).to_contain_text("Connection refused")
        fresh = visit(own_console.origin).open("/topics/visits")  # a page does not wait for them
        expect(fresh.locator("#live")).to_contain_text("100")
    expect(page.locator("#live")).not_to_contain_text("no answer within")
    assert stayed(page)


def test_keys(console: RunningConsole, visit: Callable[..., Visitor]) -> None:
    """From the list to a topic, its channel, and back; filter, help and theme."""
    page = visit(console.origin).open("/")
    page.keyboard.press("/")
    page.keyboard.type("click")
    expect(page.locator("tbody tr[data-key]")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text("clicks")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{console.url}topics/clicks/archive")
    page.keyboard.press("u")
    expect(page).to_have_url(f"{console.url}topics/clicks")
    page.keyboard.press("g")
    page.keyboard.press("n")
    expect(page).to_have_url(f"{console.url}nodes")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("d")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_tab_reaches_everything(console: RunningConsole, visit: Callable[..., Visitor]) -> None:
    """The first Tab offers to skip the navigation; each focused element can be seen."""
    page = visit(console.origin).open("/")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    wanted = page.locator("main a:visible, main button:visible, main input:visible").count()
    focused = set()
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        focused.add(
            page.evaluate("document.activeElement.closest('main') ? document.activeElement.outerHTML : ''")
        )
    assert len(focused - {""}) >= wanted
