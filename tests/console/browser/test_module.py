"""The console's module in the browser: replacing in place, filter, keys, theme, copying, confirmation, charts."""

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, Route, expect

from console.browser.support import DEADLINE_MS, Visitor
from console.support import qcli_admin
from interop.peers import Broker, qcli_serve

pytestmark = pytest.mark.interop

Visit = Callable[..., Visitor]
TOPICS = ["clicks", "orders", *(f"tenant-{number:03}" for number in range(120))]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker with some topics."""
    with qcli_serve(tmp_path_factory.mktemp("data")) as running:
        for topic in TOPICS:
            running.http("POST", "/topic/create", topic=topic)
        running.create("clicks", "archive", "mail")
        running.post("/pub", b"one", topic="clicks")
        yield running


@pytest.fixture(scope="module")
def site(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The origin of a console."""
    flags = [f"--nsqd-http-address={broker.http_address}", "--poll-interval=100ms"]
    with qcli_admin(tmp_path_factory.mktemp("console"), *flags) as console:
        yield f"http://{console.address}"


class Tried:
    """A page of a test with the console's module, whose live block the test replaces."""

    def __init__(self, visitor: Visitor, block: str, main: str = "") -> None:
        self.page: Page = visitor.page
        self._updates: list[str] = []
        home = self.page.request.get(f"{visitor.site}/").text()
        script = home.split('type="module" src="')[1].split('"')[0]
        self._html = (
            f'<!doctype html><html lang=en><title>try</title><script type=module src="{script}"></script>'
            f"<main>{main}<div id=live data-live=/try-live>{block}</div></main>"
            "<div id=live-state hidden><span class=text></span></div><button id=live-pause>Pause</button>"
        )
        self.page.route("**/try", lambda route: route.fulfill(content_type="text/html", body=self._html))
        self.page.route("**/try-live*", self._events)
        visitor.open("/try")

    def update(self, block: str) -> None:
        """Send a block, and wait until the page shows it."""
        self._updates.append(f"{block}<i hidden id=update-{len(self._updates)}></i>")
        for _ in range(2):  # it connects again, and the focus stays
            self.page.evaluate("document.querySelector('#live-pause').click()")
        expect(self.page.locator(f"#update-{len(self._updates) - 1}")).to_be_attached()

    def _events(self, route: Route) -> None:
        event = f"event: update\ndata: {self._updates[-1]}\n\n" if self._updates else "event: beat\ndata:\n\n"
        route.fulfill(content_type="text/event-stream", body=event)


ROW = "<tr data-key={0}><td><a href=#{0}>{0}</a><td>{1}"


def table(**rows: int) -> str:
    """Return a table with these rows."""
    return f"<table><tbody>{''.join(ROW.format(name, number) for name, number in rows.items())}</table>"


def test_focus_stays_on_its_row(site: str, visit: Visit) -> None:
    tried = Tried(visit(site), table(a=1, b=2, c=3))
    link = tried.page.get_by_role("link", name="b")
    link.focus()
    tried.update(table(new=0, c=30, b=20))
    expect(link).to_be_focused()
    assert tried.page.locator("td").all_inner_texts() == ["new", "0", "c", "30", "b", "20"]


def test_order_of_rows_is_the_new_one(site: str, visit: Visit) -> None:
    tried = Tried(visit(site), table(a=1, b=2, c=3, d=4))
    for names in ("dcba", "bd", "xbyd", "abcdxy", "y", "ay"):
        tried.update(table(**{name: ord(name) for name in names}))
        assert "".join(tried.page.get_by_role("link").all_inner_texts()) == names


def test_parts_stay_when_another_appears_above(site: str, visit: Visit) -> None:
    part = "<section><p>{0}</p><details><summary>More of {0}</summary>Text of {0}</details></section>"
    tried = Tried(visit(site), f"{part.format('one')} <div data-key=two>{part.format('two')}</div>")
    tried.page.get_by_text("More of two").click()
    tried.update(f"<p>new</p> {part.format('one')} <div data-key=two>{part.format('two')}</div>")
    expect(tried.page.get_by_text("Text of two")).to_be_visible()


def test_open_details_stay_open(site: str, visit: Visit) -> None:
    tried = Tried(visit(site), "<details><summary>More</summary><p>one</p></details>")
    tried.page.get_by_text("More").click()
    tried.update("<details><summary>More</summary><p>two</p></details>")
    expect(tried.page.get_by_text("two")).to_be_visible()


def test_typed_text_stays(site: str, visit: Visit) -> None:
    tried = Tried(visit(site), "<input aria-label=name value=a><p>1</p>")
    tried.page.get_by_label("name").fill("typed")
    tried.update("<input aria-label=name value=b><p>2</p>")
    expect(tried.page.get_by_label("name")).to_have_value("typed")
    expect(tried.page.get_by_label("name")).to_be_focused()


def test_selected_text_stays_selected(site: str, visit: Visit) -> None:
    tried = Tried(visit(site), "<p>number 1</p>")
    tried.page.evaluate(
        "getSelection().setBaseAndExtent(...[0, 6].flatMap(n => [document.querySelector('p').firstChild, n]))"
    )
    tried.update("<p>number 2</p>")
    assert tried.page.evaluate("String(getSelection())") == "number"


def test_scrolled_block_stays_where_it_is(site: str, visit: Visit) -> None:
    rows = "<br>".join(str(number) for number in range(500))
    tried = Tried(visit(site), f"<pre>{rows}</pre>")
    tried.page.evaluate("scrollTo(0, 800)")
    tried.update(f"<pre>{rows}<br>end</pre>")
    assert tried.page.evaluate("scrollY") == 800


def test_filter_asks_the_server_while_typing(site: str, visit: Visit) -> None:
    page = visit(site).open("/")
    page.keyboard.press("/")
    page.keyboard.type("tenant-11")
    expect(page.locator("#topics tbody tr")).to_have_count(10)
    expect(page).to_have_url(f"{site}/?q=tenant-11")
    expect(page.get_by_label("Filter topics")).to_be_focused()
    expect(page.locator("#live-state")).to_have_attribute("data-state", "live")
    page.get_by_label("Filter topics").fill("nothing")
    expect(page.get_by_text("No topic matches")).to_be_visible()
    page.get_by_label("Filter topics").fill("")
    expect(page.locator("#topics tbody tr")).to_have_count(100)
    expect(page).to_have_url(f"{site}/")


def test_filter_works_without_javascript(site: str, visit: Visit) -> None:
    page = visit(site, javascript=False).open("/")
    page.get_by_label("Filter topics").fill("tenant-11")
    page.keyboard.press("Enter")
    expect(page.locator("#topics tbody tr")).to_have_count(10)


def test_keys_move_through_rows_and_pages(site: str, visit: Visit) -> None:
    page = visit(site).open("/")
    for key in ("j", "j", "ArrowDown", "k"):
        page.keyboard.press(key)
    expect(page.get_by_role("link", name="orders")).to_be_focused()
    page.keyboard.press("]")
    page.wait_for_url(f"{site}/?page=2")  # until its module has run
    page.keyboard.press("[")
    page.wait_for_url(f"{site}/")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{site}/topics/clicks")
    expect(page.get_by_role("heading", level=1)).to_have_text("clicks")
    page.keyboard.press("u")
    page.wait_for_url(f"{site}/")
    expect(page.get_by_role("heading", level=1)).to_have_text("Topics")
    page.keyboard.press("g")
    page.keyboard.press("n")
    expect(page).to_have_url(f"{site}/nodes")


def test_theme_is_kept(site: str, visit: Visit) -> None:
    visitor = visit(site, scheme="light")
    page = visitor.open("/")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Theme").click()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark != light
    visitor.open("/nodes")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    page.keyboard.press("d")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == light


def test_copy_button(site: str, visit: Visit) -> None:
    tried = Tried(visit(site), "<button class=needs-js data-copy='qcli pub a'>Copy</button>")
    button = tried.page.get_by_role("button", name="Copy")
    button.click()
    expect(tried.page.get_by_role("button", name="Copied")).to_be_visible()
    assert tried.page.evaluate("navigator.clipboard.readText()") == "qcli pub a"


def test_confirmation_enables_its_button(site: str, visit: Visit) -> None:
    form = "<form method=post><label>Name<input data-confirm=clicks></label><button>Delete</button></form>"
    tried = Tried(visit(site), "", form)
    button = tried.page.get_by_role("button", name="Delete")
    expect(button).to_be_disabled()
    tried.page.get_by_label("Name").fill("click")
    expect(button).to_be_disabled()
    tried.page.get_by_label("Name").fill("clicks")
    expect(button).to_be_enabled()


def test_values_of_a_chart_under_the_pointer(site: str, visit: Visit) -> None:
    page = visit(site).open("/topics/clicks")
    plot = page.get_by_role("img", name="Depth: ")
    plot.hover()
    expect(page.locator(".tip")).to_contain_text("min ago")
    page.mouse.move(1, 1)
    expect(page.locator(".tip")).to_be_hidden()


def test_a_hidden_window_gets_no_updates(site: str, visit: Visit) -> None:
    page = visit(site).open("/")
    state = page.locator("#live-state")
    expect(state).to_have_attribute("data-state", "live")
    hide = (
        "value => { Object.defineProperty(document, 'hidden', {value, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')) }"
    )
    with page.expect_event("requestfailed", lambda request: "/live?" in request.url):
        page.evaluate(hide, True)
    with page.expect_request("**/live?*"):
        page.evaluate(hide, False)
    expect(state).to_have_attribute("data-state", "live")


def test_too_many_viewers(site: str, visit: Visit) -> None:
    visitor = visit(site)
    visitor.page.route("**/live?*", lambda route: route.fulfill(status=503, body="full"))
    with visitor.expects("503"):
        page = visitor.open("/")
        expect(page.locator("#live-state")).to_contain_text("Too many viewers", timeout=DEADLINE_MS)
