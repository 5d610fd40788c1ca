"""Logins in a browser: a viewer sees and does what its token allows, and logs out."""

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from access.support import ALL_ROLES, AuthFile, everything
from console.browser.support import PHONE, Visitor, accessibility_faults, overflow_px
from interop.peers import RunningConsole, qcli_admin, qcli_serve

pytestmark = pytest.mark.interop

OPERATOR, READER = "operator-secret", "reader-secret"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """The console of a broker that requires tokens."""
    folder = tmp_path_factory.mktemp("guarded")
    file = AuthFile(folder / "auth.toml")
    file.add_token("operator", everything(*ALL_ROLES), secret=OPERATOR)
    file.add_token("reader", everything("read"), secret=READER)
    path = file.write()
    with qcli_serve(folder / "data", f"--auth-file={path}") as broker:
        with qcli_admin(
            f"--nsqd-http-address={broker.http_address}", f"--auth-file={path}", f"--auth-secret={OPERATOR}"
        ) as console:
            yield console


def log_in(page: Page, token: str) -> None:
    """Fill in the form."""
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()


@pytest.mark.parametrize("javascript", [True, False], ids=["script", "plain"])
def test_operator(guarded: RunningConsole, visit: Callable[..., Visitor], javascript: bool) -> None:
    visitor = visit(guarded.origin, javascript=javascript)
    page = visitor.open("/create")
    expect(page).to_have_url(f"{guarded.url}login?next=%2Fcreate")
    if javascript:
        assert accessibility_faults(page) == []
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        assert overflow_px(page) == 0
    with visitor.expects("status of 4"):
        log_in(page, "wrong")
        expect(page.get_by_role("alert")).to_be_visible()
    log_in(page, OPERATOR)
    page.get_by_label("Topic").fill("mine")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.locator("#notice.ok")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    visitor.open("/topics/mine")
    expect(page.get_by_label("Token")).to_be_visible()


def test_reader(guarded: RunningConsole, visit: Callable[..., Visitor]) -> None:
    """It sees everything, and nothing that changes something."""
    visitor = visit(guarded.origin)
    page = visitor.open("/")
    log_in(page, READER)
    expect(page.locator("h1")).to_have_text("Topics")
    expect(page.get_by_role("link", name="Create topic")).to_have_count(0)
    with visitor.expects("status of 403"):
        visitor.open("/create")
        expect(page.locator("main")).to_contain_text("manage")
