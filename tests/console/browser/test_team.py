"""A team at work: four people with different rights use one console of two fleets, with the keyboard and on a phone.

`look_around` is what all of them can do, about 30 actions; one of them does it in `make test`. What each may change
follows. No page may scroll sideways, have a target that is too small for a thumb, or a fault of accessibility.
"""

import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Page, expect

from access.support import ALL_ROLES, AuthFile, Given, bearer, everything
from cli.contexts import NO_ADDRESSES, contexts_file, write
from cli.support import Cli
from console.browser.support import (
    PHONE,
    Visitor,
    accessibility_faults,
    confirm,
    done,
    overflow_px,
    small_targets,
)
from interop.peers import RunningConsole, qcli_admin, qcli_serve
from soak import in_soak

pytestmark = pytest.mark.interop

PRODUCTION = "/c/production"


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """A console of `production`, whose broker requires tokens, and of `staging`, which is open. All may read."""
    folder = tmp_path_factory.mktemp("team")
    file = AuthFile(folder / "auth.toml")
    file.add_token("console", everything("read"))
    file.add_token("reader", everything("read"))
    file.add_token("operator", Given(["read", "publish", "manage"], ["orders*"]))
    file.add_token("admin", everything(*ALL_ROLES))
    (folder / "secret").write_text("console-secret\n")
    (folder / "secret").chmod(0o600)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        production = stack.enter_context(qcli_serve(folder / "production", f"--auth-file={file.write()}"))
        staging = stack.enter_context(qcli_serve(folder / "staging"))
        write(
            contexts_file(folder),
            f"""\
[context.production]
nsqd_http_address = "{production.http_address}"
auth_secret_file = "{folder / "secret"}"
title_color = "red"

[context.staging]
nsqd_http_address = "{staging.http_address}"
title_color = "green"
""",
        )
        admin = {"QCLI_CLIENT_AUTH_SECRET": "admin-secret"}
        for broker, env in ((production, admin), (staging, {})):
            cli = Cli("", broker.http_address, env)
            for name in ("orders/billing", "payments/charge", "test-1/work"):
                topic = name.partition("/")[0]
                assert cli("topic", "create", topic).code == cli("channel", "create", name).code == 0
                request = urllib.request.Request(
                    f"http://{broker.http_address}/mpub?topic={topic}",
                    b"\n".join(b'{"order": %d}' % number for number in range(30)),
                    {"Authorization": bearer("admin")} if env else {},
                )
                urllib.request.urlopen(request).close()
        for name, value in {"XDG_CONFIG_HOME": str(folder), **NO_ADDRESSES}.items():
            patch.setenv(name, value)
        with qcli_admin("--fleet=production,staging", "--anonymous=read", "--hide-topic=test-*") as console:
            yield console


def press(page: Page, *keys: str) -> None:
    """Press keys of the console, one after the other, once its script has run."""
    page.locator("html.js").wait_for(state="attached")
    for key in keys:
        page.keyboard.press(key)


def find(page: Page, typed: str) -> None:
    """Find something with Ctrl-K, and open the first result."""
    press(page, "Control+k")
    page.keyboard.type(typed)
    first = page.locator("#palette li").first
    expect(page.locator("#palette input")).to_have_value(typed)
    expect(first).to_contain_text(typed.split()[-1], ignore_case=True)
    page.keyboard.press("Enter")


def open_tab(page: Page, name: str) -> None:
    """Open a page of the topic or channel that is shown."""
    page.get_by_role("navigation", name="Sections").get_by_role("link", name=name).click()


def on_phone(page: Page) -> None:
    """Check the page that is shown, as a phone shows it."""
    before = page.viewport_size
    assert before is not None
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    assert overflow_px(page) == 0
    assert small_targets(page) == []
    page.set_viewport_size(before)


def log_in(visitor: Visitor, name: str) -> Page:
    """Log in to production, and return its first page."""
    page = visitor.open(f"{PRODUCTION}/")
    page.get_by_role("link", name="Log in").click()
    page.get_by_label("Token").fill(f"{name}-secret")
    on_phone(page)
    page.get_by_role("button", name="Log in").click()
    expect(page.locator(".viewer")).to_contain_text(name)
    return page


def look_around(page: Page, *, topics: tuple[str, ...], sees_health: bool = True) -> None:
    """Do what needs no right but to read the topics that the viewer sees."""
    here = page.url.partition("/c/")[0] + PRODUCTION
    expect(page.locator("#topics tbody tr")).to_have_count(len(topics))
    on_phone(page)
    find(page, "orders")
    expect(page).to_have_url(f"{here}/topics/orders")
    expect(page.locator("#live-state")).to_contain_text("Live")
    page.get_by_role("button", name="Favourite: orders").click()
    expect(page.get_by_role("button", name="Favourite: orders")).to_have_attribute("aria-pressed", "true")
    on_phone(page)
    open_tab(page, "Messages")
    page.get_by_label("Search").fill("7")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.locator("table.messages")).to_contain_text("17")
    on_phone(page)
    page.locator("table.messages td.when a").first.click()
    expect(page.locator(".json")).to_contain_text("order")
    on_phone(page)
    page.locator(".switch summary").click()
    page.get_by_role("navigation", name="Fleets").get_by_role("link", name="staging").click()
    expect(page).to_have_url(f"{here.replace('production', 'staging')}/topics/orders/messages")
    expect(page.locator("html")).to_have_attribute("data-color", "green")
    find(page, "production")
    expect(page).to_have_url(f"{here}/")
    press(page, "j", "Enter")  # the favourite is the first one
    expect(page.locator("h1")).to_contain_text("orders")
    press(page, "j", "Enter")
    expect(page).to_have_url(f"{here}/topics/orders/billing")
    open_tab(page, "Deferred")
    on_phone(page)
    press(page, "u")
    expect(page).to_have_url(f"{here}/topics/orders/billing")
    find(page, "settings orders/billing")
    expect(page).to_have_url(f"{here}/topics/orders/billing/settings")
    on_phone(page)
    for key, name in (
        ("n", "nodes"),
        ("c", "counter"),
        ("d", "dead-letters"),
        ("j", "jobs"),
        ("h", "health"),
    ):
        press(page, "g", key)
        expect(page).to_have_url(f"{here}/{name}")
    on_phone(page)
    if sees_health:
        expect(page.locator("main")).to_contain_text("Disk")
    press(page, "g", "t")
    expect(page).to_have_url(f"{here}/")
    page.get_by_role("button", name="Favourite: orders").click()
    page.get_by_role("link", name="Favourite and hidden topics").click()
    page.get_by_label("Hidden", exact=True).fill("pay*")
    on_phone(page)
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#topics tbody tr")).to_have_count(1)
    press(page, "/")
    page.keyboard.type("nothing")
    expect(page.locator("#topics")).to_have_count(0)
    press(page, "Escape", "d")
    assert accessibility_faults(page) == []


def cannot_change(visitor: Visitor, topic: str, *actions: str) -> None:
    """Neither buttons nor results lead to an action, and its page refuses."""
    page = visitor.open(f"{PRODUCTION}/topics/{topic}")
    expect(page.locator("h1")).to_contain_text(topic)
    for name in ("Pause", "Empty", "Delete"):
        expect(page.get_by_role("link", name=name, exact=True)).to_have_count(0)
    page.keyboard.press("Control+k")
    page.keyboard.type(f"pause {topic}")
    expect(page.locator("#palette [role=status]")).to_contain_text("Nothing matches")
    for action in actions:
        with visitor.expects("status of 403"):
            visitor.open(f"{PRODUCTION}/topics/{topic}/{action}")
            expect(visitor.page.locator("main")).to_contain_text("needs the role")
    on_phone(page)


@pytest.mark.parametrize("name", ["", *in_soak("reader", "operator", "admin")])
def test_look_around(team: RunningConsole, visit: Callable[..., Visitor], name: str) -> None:
    visitor = visit(team.origin)
    page = log_in(visitor, name) if name else visitor.open(f"{PRODUCTION}/")
    limited = name == "operator"
    look_around(page, topics=("orders",) if limited else ("orders", "payments"), sees_health=not limited)


def test_anonymous(team: RunningConsole, visit: Callable[..., Visitor]) -> None:
    visitor = visit(team.origin)
    page = visitor.open("/")
    expect(page).to_have_url(f"{team.origin}{PRODUCTION}/")
    cannot_change(visitor, "orders", "delete", "empty", "publish")


def test_reader(team: RunningConsole, visit: Callable[..., Visitor]) -> None:
    visitor = visit(team.origin)
    page = log_in(visitor, "reader")
    expect(page.locator("#topics tbody tr")).to_have_count(2)
    cannot_change(visitor, "orders", "delete", "publish")
    visitor.open(f"{PRODUCTION}/").get_by_role("button", name="Log out").click()
    expect(visitor.page.get_by_label("Token")).to_be_visible()


def test_operator_of_some_topics(team: RunningConsole, visit: Callable[..., Visitor]) -> None:
    visitor = visit(team.origin)
    page = log_in(visitor, "operator")
    expect(page.locator("#topics tbody tr")).to_have_count(1)
    with visitor.expects("status of 404"):
        visitor.open(f"{PRODUCTION}/topics/payments")
    visitor.open(f"{PRODUCTION}/")
    for action in ("Pause", "Unpause"):
        find(page, f"{action.lower()} orders")
        on_phone(page)
        confirm(page, f"{action} topic")
        done(page)
    visitor.open(f"{PRODUCTION}/topics/orders/publish")
    page.get_by_label("Body", exact=True).fill('{"order": "by hand"}')
    on_phone(page)
    page.get_by_role("button", name="Publish", exact=True).click()
    expect(page.locator("main")).to_contain_text("has stored 1 message")
    with visitor.expects("status of 403"):
        visitor.open(f"{PRODUCTION}/create")
        page.get_by_label("Topic").or_(page.get_by_role("alert")).first.wait_for()
    find(page, "staging")  # where this login does not count
    expect(page).to_have_url(f"{team.origin}/c/staging/")
    expect(page.locator(".side")).not_to_contain_text("operator")


def test_admin(team: RunningConsole, visit: Callable[..., Visitor]) -> None:
    visitor = visit(team.origin)
    page = log_in(visitor, "admin")
    expect(page.locator("#topics")).to_contain_text("payments")
    find(page, "create")
    page.get_by_label("Topic").fill("orders.new")
    page.get_by_label("Channel").fill("work")
    on_phone(page)
    page.get_by_role("button", name="Create", exact=True).click()
    done(page)
    find(page, "pause orders.new/work")
    confirm(page, "Pause channel")
    done(page)
    find(page, "seek orders.new/work")
    page.get_by_label("The oldest message that is kept").check()
    on_phone(page)
    page.get_by_role("button", name="Show what would happen").click()
    on_phone(page)
    find(page, "delete orders.new")
    page.locator(".switch summary").click()  # the same question is not asked in another fleet
    other = page.get_by_role("navigation", name="Fleets").get_by_role("link", name="staging")
    expect(other).to_have_attribute("href", "/c/staging/topics/orders.new")
    on_phone(page)
    confirm(page, "Delete topic", "orders.new")
    done(page)
    press(page, "g", "n")
    expect(page.locator("h1")).to_have_text("Nodes")
    press(page, "j", "Enter")
    expect(page.locator("h1")).to_contain_text("127.0.0.1")
    page.get_by_role("link", name="Drain", exact=True).click()
    on_phone(page)
    assert accessibility_faults(page) == []
    page.get_by_role("link", name="Go back").click()
    expect(page.locator("h1")).to_contain_text("127.0.0.1")
