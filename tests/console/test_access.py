"""Who the viewers of a console are, and what they may do: real sockets, real brokers with auth files."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.support import running_broker
from console.access_support import Browser, Site, auth_file, guarded_broker, running_console


@asynccontextmanager
async def guarded(folder: Path, **options: Any) -> AsyncIterator[Site]:
    """A console of a broker with tokens."""
    async with guarded_broker(folder) as broker, running_console(folder, broker, **options) as site:
        yield site


@asynccontextmanager
async def open_site(folder: Path, **options: Any) -> AsyncIterator[Site]:
    """A console of a broker without authentication."""
    async with running_broker(folder / "d") as broker:
        async with running_console(folder, broker, **options) as site:
            yield site


def cookie_of(answer: Any, kind: str) -> str:
    """The `Set-Cookie` header of an answer, for a kind of cookie; empty without one."""
    return next((each for each in answer.headers.get_list("set-cookie") if f"_{kind}_" in each), "")


# ---------------------------------------------------------------------- login


async def test_a_viewer_logs_in_sees_its_topics_and_logs_out(tmp_path: Path) -> None:
    async with guarded(tmp_path) as site, site.browser() as browser:
        answer = await browser.get("/")
        assert (answer.status_code, answer.headers["location"]) == (303, "/login")
        answer = await browser.log_in("web")
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        page = (await browser.get("/")).text
        assert "clicks" in page
        assert "orders" not in page
        assert ">web<" in page
        assert "Log out" in page
        session = dict(browser.client.cookies)
        assert (await browser.post("/logout")).status_code == 303
        assert (await browser.get("/")).headers["location"] == "/login"
        browser.client.cookies.update(session)  # as if it had been stolen
        assert (await browser.get("/")).headers["location"] == "/login"


async def test_the_login_leads_to_the_page_that_was_asked_for(tmp_path: Path) -> None:
    async with guarded(tmp_path, base_path="/nsq") as site, site.browser() as browser:
        assert site.root.endswith("/nsq")
        answer = await browser.get("/?filter=a%26b")
        assert answer.headers["location"] == "/nsq/login?next=%2F%3Ffilter%3Da%2526b"
        assert 'value="/?filter=a%26amp;b"' not in (page := await browser.get("/login?next=/%3Fx=1")).text
        assert 'name="next" value="/?x=1"' in page.text
        assert (await browser.log_in("admin", next="/?filter=a")).headers["location"] == "/nsq/?filter=a"


@pytest.mark.parametrize(
    "target", ["//evil.example/", "https://evil.example", "/\\evil.example", "/a\nb", "x"]
)
async def test_the_login_leads_to_no_other_site(tmp_path: Path, target: str) -> None:
    async with guarded(tmp_path) as site, site.browser() as browser:
        assert (await browser.log_in("admin", next=target)).headers["location"] == "/"


@pytest.mark.parametrize("name", ["stranger", "expired", ""])
async def test_a_wrong_token_is_refused(tmp_path: Path, name: str) -> None:
    async with guarded(tmp_path) as site, site.browser() as browser:
        answer = await browser.log_in(name)
        assert answer.status_code == 401
        assert "unknown, expired or revoked" in answer.text
        assert not cookie_of(answer, "session")
        line = await site.await_audited("login_failed")
        assert (line["action"], line["error"]) == ("POST /login", "INVALID_TOKEN")
        assert "secret" not in site.audit.read_text()


async def test_the_cookie_of_a_session(tmp_path: Path) -> None:
    async with (
        guarded(tmp_path, base_path="/nsq", session_lifetime_ms=60_000) as site,
        site.browser() as browser,
    ):
        cookie = cookie_of(await browser.log_in("admin"), "session")
        attributes = {part.strip() for part in cookie.split(";")[1:]}
        assert attributes == {"HttpOnly", "SameSite=Strict", "Path=/nsq", "Max-Age=60"} or attributes == {
            "HttpOnly", "SameSite=Strict", "Path=/nsq", "Max-Age=59"
        }  # fmt: skip
        assert "admin-secret" not in cookie
        secure = await browser.post(
            "/login", {"token": "admin-secret"}, headers={"X-Forwarded-Proto": "https"}
        )
        assert "Secure" in cookie_of(secure, "session")


async def test_a_page_has_the_headers_that_protect_it(tmp_path: Path) -> None:
    async with guarded(tmp_path) as site, site.browser() as browser:
        for path in ("/login", "/", "/nothing"):
            headers = (await browser.get(path)).headers
            assert headers["content-security-policy"] == (
                "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
                "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
            )
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "DENY"
            assert headers["referrer-policy"] == "same-origin"
            assert headers["cache-control"] == "no-store"
            assert "strict-transport-security" not in headers


# ---------------------------------------------------------------------- who needs no login


@pytest.mark.parametrize(
    ("options", "rights"),
    [
        ({}, "manage"),
        ({"secret": ""}, "manage"),
        ({"http_address": "0.0.0.0:0"}, "read"),
        ({"admin_users": ("alice",)}, "read"),
        ({"anonymous": "none"}, "none"),
        ({"anonymous": "read"}, "read"),
        ({"anonymous": "manage", "http_address": "0.0.0.0:0"}, "manage"),
        ({"auth_file": True}, "none"),
    ],
)
async def test_what_strangers_may_do_without_authentication(
    tmp_path: Path, options: dict[str, Any], rights: str
) -> None:
    if "auth_file" in options:
        options = {"auth_file": auth_file(tmp_path).path}
    if "secret" in options:
        from trio_nsq.secret import NO_SECRET

        options = {"secret": NO_SECRET}
    async with open_site(tmp_path, **options) as site:
        async with site.browser() as browser:
            await check_rights(browser, rights)


async def check_rights(browser: Browser, rights: str) -> None:
    """Check what a browser may do on all topics: see them, and change them."""
    status = (await browser.get("/")).status_code
    assert status == (303 if rights == "none" else 200)
