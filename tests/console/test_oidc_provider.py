"""Logins with a real OpenID Connect provider: oidc-provider, which is certified."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from console.access_support import Browser, Site, guarded_broker, running_console
from console.oidc_support import authorize, options, real_provider, shown_user
from interop.peers import free_ports
from trio_nsq.access.secret import Secret

pytestmark = pytest.mark.interop

USERS = {
    "ann": {"email": "ann@example.com", "groups": ["ops", "élan, ltd=1"]},
    "bob": {"email": "bob@example.com", "groups": ["readers"]},
    "eve": {"email": "eve@example.com", "groups": ["others"]},
}
ROLES = ("ops=read+publish+consume+manage+admin", "readers=read@clicks")


@asynccontextmanager
async def site(
    folder: Path, *roles: str, port: int = 0, public: bool = False, **more: Any
) -> AsyncIterator[Site]:
    """A console of a broker with tokens, whose own token has all roles; and the real provider."""
    console = f"127.0.0.1:{free_ports(1)[0]}"
    async with AsyncExitStack() as stack:
        issuer = stack.enter_context(real_provider(USERS, f"http://{console}", port=port, public=public))
        oidc = options(issuer, *(roles or ROLES), scopes=("openid", "email", "groups"))
        broker = await stack.enter_async_context(guarded_broker(folder))
        settings = {"http_address": console, "secret": Secret("admin-secret"), "oidc": oidc, **more}
        yield await stack.enter_async_context(running_console(folder, broker, **settings))


async def log_in(browser: Browser, user: str, path: str = "/oidc/login") -> httpx.Response:
    return await browser.get(await authorize(browser, user, path))


async def test_a_user_logs_in_acts_and_logs_out(tmp_path: Path) -> None:
    async with site(tmp_path) as found, found.browser() as browser:
        assert (await browser.get("/topics/clicks")).headers["location"] == "/login?next=%2Ftopics%2Fclicks"
        page = await browser.get("/login?next=%2Ftopics%2Fclicks")
        assert 'href="/oidc/login?next=%2Ftopics%2Fclicks"' in page.text
        assert 'name="token"' in page.text
        back = await log_in(browser, "ann", "/oidc/login?next=%2Ftopics%2Fclicks")
        assert (back.status_code, "url=/topics/clicks" in back.text) == (200, True)
        assert await shown_user(browser) == "ann@example.com"
        answer = await browser.client.post(
            "/topics/clicks/pause", data={"csrf": await browser.csrf(), "confirm": "clicks"}
        )
        assert answer.status_code in (200, 303), answer.text
        left = await browser.post("/logout")
        assert left.headers["location"] == "/login?ended=provider"
        page = await browser.get("/login?ended=provider")
        assert "/session/end?client_id=console" in page.text
        assert (await browser.get("/")).status_code == 303
        events = [
            {key: line.get(key) for key in ("event", "name", "source", "subject", "action")}
            for line in found.audited()
        ]
        ann = {"name": "ann@example.com", "source": "oidc", "subject": "ann"}
        assert events == [
            {"event": "login", **ann, "action": None},
            {"event": "action", **ann, "action": "POST /topics/clicks/pause"},
            {"event": "logout", **ann, "action": None},
        ]


async def test_groups_limit_what_users_see_and_do(tmp_path: Path) -> None:
    async with site(tmp_path) as found, found.browser() as browser:
        await log_in(browser, "bob")
        page = await browser.get("/")
        assert ("clicks" in page.text, "orders" in page.text) == (True, False)
        assert (await browser.get("/topics/orders")).status_code == 404
        denied = await browser.post("/topics/clicks/pause", {"confirm": "clicks"})
        assert denied.status_code == 403
        line = await found.await_audited("refused")
        assert (line["name"], line["subject"], line["error"]) == ("bob@example.com", "bob", "FORBIDDEN")


async def test_a_user_without_a_role_gets_no_session(tmp_path: Path) -> None:
    async with site(tmp_path) as found, found.browser() as browser:
        answer = await log_in(browser, "eve")
        assert answer.status_code == 403
        assert "You are eve@example.com" in answer.text
        assert "none of your groups has a role" in answer.text
        assert (await browser.get("/")).status_code == 303
        assert (await found.await_audited("login_failed"))["error"] == "NO_ROLE"


async def test_group_names_may_have_any_characters(tmp_path: Path) -> None:
    async with site(tmp_path, "élan, ltd=1=read@clicks") as found, found.browser() as browser:
        assert (await log_in(browser, "ann")).status_code == 200
        assert (await browser.get("/topics/clicks")).status_code == 200


async def test_a_public_client_logs_in_with_pkce_alone(tmp_path: Path) -> None:
    console = f"127.0.0.1:{free_ports(1)[0]}"
    with real_provider(USERS, f"http://{console}", public=True) as issuer:
        oidc = options(issuer, *ROLES, scopes=("openid", "email", "groups"), client_secret=Secret())
        async with (
            guarded_broker(tmp_path) as broker,
            running_console(tmp_path, broker, http_address=console, oidc=oidc) as found,
            found.browser() as browser,
        ):
            assert (await log_in(browser, "ann")).status_code == 200


async def test_a_code_counts_once_and_in_one_browser(tmp_path: Path) -> None:
    async with site(tmp_path) as found, found.browser() as browser, found.browser() as other:
        path = await authorize(browser, "ann")
        assert (await other.get(path)).status_code == 403
        assert await shown_user(other) == ""
        other.client.cookies = httpx.Cookies(browser.client.cookies)
        assert (await browser.get(path)).status_code == 200
        again = await other.get(path)
        assert (again.status_code, "Log in again" in again.text) == (403, True)


async def test_new_keys_of_the_provider_are_found(tmp_path: Path) -> None:
    console, port = f"127.0.0.1:{free_ports(1)[0]}", free_ports(1)[0]
    oidc = options(f"http://127.0.0.1:{port}", *ROLES, scopes=("openid", "email", "groups"))
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(guarded_broker(tmp_path))
        with real_provider(USERS, f"http://{console}", port=port):
            found = await stack.enter_async_context(
                running_console(tmp_path, broker, http_address=console, oidc=oidc)
            )
            async with found.browser() as browser:
                assert (await log_in(browser, "ann")).status_code == 200
        with real_provider(USERS, f"http://{console}", port=port, seed="second"):
            async with found.browser() as browser:
                assert (await log_in(browser, "ann")).status_code == 200


async def test_a_provider_that_is_down_leaves_the_login_with_a_token(tmp_path: Path) -> None:
    console, port = f"127.0.0.1:{free_ports(1)[0]}", free_ports(1)[0]
    async with guarded_broker(tmp_path) as broker:
        oidc = options(f"http://127.0.0.1:{port}", *ROLES)
        async with running_console(tmp_path, broker, http_address=console, oidc=oidc) as found:
            async with found.browser() as browser:
                answer = await browser.get("/oidc/login")
                assert answer.status_code == 503
                assert f"http://127.0.0.1:{port} cannot be used" in answer.text
                assert 'name="token"' in answer.text
                assert (await browser.log_in("admin")).status_code == 303
