"""Logins with a real OpenID Connect provider in a browser, which decides about cookies, redirections and policies."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from access.support import ALL_ROLES, AuthFile, everything
from console.browser.support import PHONE, Visitor, accessibility_faults, done, overflow_px
from console.oidc_support import CLIENT, SECRET, real_provider
from interop.peers import RunningConsole, free_ports, qcli_admin, qcli_serve
from soak import in_soak

pytestmark = pytest.mark.interop

Opener = Callable[..., tuple[Visitor, Page]]
TOKEN = "operator-secret"
USERS = {
    "ann": {"email": "ann@example.com", "groups": ["ops"]},
    "eve": {"email": "eve@example.com", "groups": ["others"]},
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """The console of a broker that requires tokens, and a provider."""
    folder: Path = tmp_path_factory.mktemp("oidc")
    [port] = free_ports(1)
    file = AuthFile(folder / "auth.toml")
    file.add_token("operator", everything(*ALL_ROLES), secret=TOKEN)
    path = file.write()
    (folder / "client.secret").write_text(f"{SECRET}\n")
    with (
        real_provider(USERS, f"http://127.0.0.1:{port}") as issuer,
        qcli_serve(folder / "data", f"--auth-file={path}") as broker,
        qcli_admin(
            f"--http-address=127.0.0.1:{port}",
            f"--nsqd-http-address={broker.http_address}",
            f"--auth-secret={TOKEN}",
            f"--oidc-issuer={issuer}",
            f"--oidc-client-id={CLIENT}",
            f"--oidc-client-secret-file={folder / 'client.secret'}",
            "--oidc-scopes=openid email groups",
            "--oidc-role=ops=all",
            "--oidc-name=Example",
        ) as console,
    ):
        yield console


@pytest.fixture
def open_page(visit: Callable[..., Visitor]) -> Opener:
    """Returns a visitor with a page: `open_page(site, path)`. The provider's pages get their font from nowhere."""

    def opened(site: str, path: str, **settings: bool) -> tuple[Visitor, Page]:
        visitor = visit(site, **settings)
        visitor.page.route(
            "https://fonts.googleapis.com/**", lambda route: route.fulfill(content_type="text/css", body="")
        )
        return visitor, visitor.open(path)

    return opened


def log_in(page: Page, user: str) -> None:
    """Log in with the provider, from the login page of the console."""
    page.get_by_role("link", name="Log in with Example").click()
    page.locator("input[name=login]").fill(user)
    page.locator("input[name=password]").fill("any")
    page.locator("button[type=submit]").click()


@pytest.mark.parametrize("javascript", [True, *in_soak(False)])
def test_a_user_of_a_provider(guarded: RunningConsole, open_page: Opener, javascript: bool) -> None:
    visitor, page = open_page(guarded.origin, "/create", javascript=javascript)
    expect(page).to_have_url(f"{guarded.url}login?next=%2Fcreate")
    if javascript:
        assert accessibility_faults(page) == []
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        assert overflow_px(page) == 0
    with visitor.expects("request to another origin"):
        log_in(page, "ann")
        page.get_by_label("Topic").fill(f"mine-{javascript}")
    page.get_by_role("button", name="Create", exact=True).click()
    done(page)
    expect(page.locator(".viewer")).to_contain_text("ann@example.com")
    page.get_by_role("button", name="Log out").click()
    with visitor.expects("request to another origin"):
        page.get_by_role("link", name="Log out of Example").click()
        page.get_by_role("button", name="Yes").click()
        expect(page).to_have_url(f"{guarded.url}login")
    visitor.open("/topics/mine-True")
    expect(page.get_by_role("link", name="Log in with Example")).to_be_visible()


def test_the_session_is_a_strict_cookie(guarded: RunningConsole, open_page: Opener) -> None:
    """The first page shows the user all the same, although a strict cookie is not sent after a redirection."""
    visitor, page = open_page(guarded.origin, "/login")
    with visitor.expects("request to another origin"):
        log_in(page, "ann")
        expect(page.locator("h1")).to_have_text("Topics")
    assert [each["sameSite"] for each in page.context.cookies() if "_session_" in str(each.get("name"))] == [
        "Strict"
    ]
    assert not [each for each in page.context.cookies() if "_oidc_" in str(each.get("name"))]


def test_a_user_without_a_role(guarded: RunningConsole, open_page: Opener) -> None:
    visitor, page = open_page(guarded.origin, "/login")
    with visitor.expects("request to another origin", "status of 403"):
        log_in(page, "eve")
        expect(page.get_by_role("alert")).to_contain_text("none of your groups has a role")
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Log in with a token").click()
    expect(page.locator("h1")).to_have_text("Topics")
