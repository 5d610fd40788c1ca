"""Ctrl-K: everything is found and opened with the keyboard alone, and a screen reader is told about it."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, Route, expect

from console.browser.support import PHONE, Visitor, accessibility_faults, overflow_px
from interop.peers import RunningConsole

pytestmark = pytest.mark.interop


def chosen(page: Page) -> str:
    """Return the text of the option that the field names as the active one."""
    field = page.locator("#palette input")
    option = page.locator(f"#{field.get_attribute('aria-activedescendant')}")
    expect(option).to_have_attribute("aria-selected", "true")
    expect(page.locator("#palette [aria-selected=true]")).to_have_count(1)
    return option.locator("span").first.inner_text()


def find(page: Page, typed: str, first: str) -> None:
    """Open the palette, type, and wait until this is the first result."""
    page.keyboard.press("Control+k")
    expect(page.locator("#palette")).to_be_visible()
    expect(page.locator("#palette input")).to_be_focused()
    page.keyboard.type(typed)
    expect(page.locator("#palette li").first).to_contain_text(first)


def test_go_to_a_topic_a_channel_a_node_and_an_action(
    console: RunningConsole, visit: Callable[..., Visitor]
) -> None:
    page = visit(console.origin).open("/")
    find(page, "clicks", "clicks")
    assert chosen(page) == "clicks"
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{console.url}topics/clicks")
    find(page, "ordbil", "orders/billing")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{console.url}topics/orders/billing")
    find(page, "nodes", "Nodes")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{console.url}nodes")
    find(page, "pause clicks", "Pause clicks")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{console.url}topics/clicks/pause")
    expect(page.locator("h1")).to_contain_text("Pause")


def test_arrows_wrap_and_escape_gives_the_focus_back(
    console: RunningConsole, visit: Callable[..., Visitor]
) -> None:
    page = visit(console.origin).open("/")
    page.keyboard.press("/")  # there is a filter
    expect(page.locator("[data-search]")).to_be_focused()
    find(page, "click", "clicks")
    options = page.locator("#palette li")
    count = options.count()
    assert count > 2
    page.keyboard.press("ArrowDown")
    assert chosen(page) == options.nth(1).locator("span").first.inner_text()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    assert chosen(page) == options.nth(count - 1).locator("span").first.inner_text()
    for _ in range(6):  # the focus stays inside
        page.keyboard.press("Tab")
        assert page.evaluate(
            "document.activeElement === document.body || !!document.activeElement.closest('#palette')"
        )
    page.keyboard.press("Escape")
    expect(page.locator("#palette")).to_be_hidden()
    expect(page.locator("[data-search]")).to_be_focused()


def test_actions_of_this_page_come_first(console: RunningConsole, visit: Callable[..., Visitor]) -> None:
    page = visit(console.origin).open("/topics/orders/billing")
    page.keyboard.press("/")  # there is no filter
    page.keyboard.type("deferred")
    expect(page.locator("#palette li").first).to_contain_text("this page")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{console.url}topics/orders/billing/deferred")


def test_enter_goes_to_what_is_typed_not_to_earlier_results(
    console: RunningConsole, visit: Callable[..., Visitor]
) -> None:
    page = visit(console.origin).open("/topics/orders/billing")
    page.keyboard.press("/")
    expect(page.locator("#palette li").first).to_be_visible()
    page.keyboard.type("deferred")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{console.url}topics/orders/billing/deferred")


def test_escape_after_enter_goes_nowhere(console: RunningConsole, visit: Callable[..., Visitor]) -> None:
    page = visit(console.origin).open("/")
    held: list[Route] = []
    page.route("**/find?q=clicks", lambda route: held.append(route))
    page.keyboard.press("Control+k")
    with page.expect_request("**/find?q=clicks"):
        page.keyboard.type("clicks")
        page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(page.locator("#palette")).to_be_hidden()
    with page.expect_request_finished():
        for route in held:
            route.continue_()
    page.evaluate("new Promise(requestAnimationFrame)")  # the answer is read
    expect(page).to_have_url(console.url)


@pytest.mark.parametrize("size", [(1280, 800), PHONE])
def test_accessibility(console: RunningConsole, visit: Callable[..., Visitor], size: tuple[int, int]) -> None:
    """With results and without, in both colours; a screen reader hears how many there are."""
    page = visit(console.origin, size=size).open("/topics/clicks")
    page.get_by_role("link", name="Find").click()
    expect(page.locator("#palette li").first).to_be_visible()
    assert accessibility_faults(page) == []
    page.keyboard.type("clicks")
    expect(page.locator("#palette [role=status]")).to_contain_text("results")
    page.keyboard.type(" nothing like this")
    expect(page.locator("#palette [role=status]")).to_contain_text("Nothing matches")
    expect(page.locator("#palette input")).to_have_attribute("aria-expanded", "false")
    assert accessibility_faults(page) == []
    page.emulate_media(color_scheme="dark")
    assert accessibility_faults(page, rule="color-contrast") == []
    assert overflow_px(page) == 0
    page.locator("#palette button").click()
    expect(page.locator("#palette")).to_be_hidden()


def test_without_javascript_it_is_a_page(console: RunningConsole, visit: Callable[..., Visitor]) -> None:
    page = visit(console.origin, javascript=False).open("/")
    page.get_by_role("link", name="Find").click()
    page.get_by_role("searchbox", name="Find").fill("orders bil")
    page.get_by_role("button", name="Find").click()
    page.get_by_role("link", name="orders/billing", exact=True).click()
    expect(page).to_have_url(f"{console.url}topics/orders/billing")


def test_stars_are_kept(console: RunningConsole, visit: Callable[..., Visitor]) -> None:
    """In the list, on a topic's page, with the keyboard, and after a reload; the row keeps the focus."""
    visitor = visit(console.origin)
    page = visitor.open("/")
    star = page.get_by_role("button", name="Favourite: payments", exact=True)
    expect(star).to_have_attribute("aria-pressed", "false")
    star.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#topics tbody tr").first).to_contain_text("payments")
    expect(star).to_have_attribute("aria-pressed", "true")
    expect(star).to_be_focused()
    page.reload()
    expect(page.locator("#topics tbody tr").first).to_contain_text("payments")
    visitor.open("/topics/payments").get_by_role("button", name="Favourite: payments", exact=True).click()
    expect(star).to_have_attribute("aria-pressed", "false")
    page.get_by_role("button", name="Hide in list").click()
    expect(page.get_by_role("button", name="Show in list")).to_be_visible()
    visitor.open("/")
    expect(page.locator("main")).to_contain_text("1 topic hidden")
    expect(page.locator("#topics tr[data-key=payments]")).to_have_count(0)
    page.get_by_role("link", name="show", exact=True).click()
    expect(page.locator("#topics tr[data-key=payments]")).to_contain_text("hidden")
    assert accessibility_faults(page) == []
