"""Who the viewers of a console are, and what they may do: real sockets, real brokers with auth files."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from access.support import Given, everything
from broker.certificates import Certificates
from broker.support import PATIENCE_S, running_broker, until
from console.access_support import Browser, auth_file, guarded, guarded_broker, open_site, running_console
from trio_nsq.access.secret import NO_SECRET
from trio_nsq.broker import BoundAddresses


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


async def test_the_login_leads_to_no_other_site(tmp_path: Path) -> None:
    async with guarded(tmp_path) as site, site.browser() as browser:
        for target in ("//evil.example/", "https://evil.example", "/\\evil.example", "/a\nb", "x"):
            assert (await browser.log_in("admin", next=target)).headers["location"] == "/", target


async def test_a_wrong_token_is_refused(tmp_path: Path) -> None:
    async with guarded(tmp_path) as site, site.browser() as browser:
        for name in ("stranger", "expired", ""):
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
        ({"secret": NO_SECRET}, "manage"),
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
    async with open_site(tmp_path, **options) as site:
        async with site.browser() as browser:
            await check_rights(browser, rights)


async def check_rights(browser: Browser, rights: str) -> None:
    """Check what a browser may do on all topics: see them, and change them."""
    status = (await browser.get("/")).status_code
    assert status == (303 if rights == "none" else 200)


# ---------------------------------------------------------------------- cookies


async def test_a_changed_cookie_is_no_session(tmp_path: Path) -> None:
    async with guarded(tmp_path) as site, site.browser() as browser:
        await browser.log_in("admin")
        (name,) = [each for each in browser.client.cookies if "session" in each]
        cookie = browser.client.cookies[name]
        other_character = "B" if cookie[60] == "A" else "A"
        for changed in (cookie[:60] + other_character + cookie[61:], cookie[:50], "x", "", "admin-secret"):
            headers = {"Cookie": f"{name}={changed}"}
            async with site.browser() as other:
                assert (await other.get("/", headers)).headers["location"] == "/login"


async def test_a_session_outlives_a_restart_with_a_key_file_only(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    async with guarded_broker(tmp_path) as broker:
        for file, status in ((key_file, 200), (None, 303)):
            options: dict[str, Any] = {"session_key_file": file}
            async with running_console(tmp_path, broker, **options) as site, site.browser() as browser:
                await browser.log_in("web")
                (cookie,) = [value for name, value in browser.client.cookies.items() if "session" in name]
            async with running_console(tmp_path, broker, **options) as site, site.browser() as browser:
                port = site.root.rpartition(":")[2]
                headers = {"Cookie": f"trio_nsq_session_{port}={cookie}"}
                assert (await browser.get("/", headers)).status_code == status


async def test_a_session_expires(tmp_path: Path) -> None:
    async with guarded(tmp_path, session_lifetime_ms=1500) as site, site.browser() as browser:
        await browser.log_in("admin")
        session = dict(browser.client.cookies)

        async def is_over() -> bool:
            browser.client.cookies.update(session)
            return (await browser.get("/")).status_code == 303

        with trio.fail_after(PATIENCE_S):
            while not await is_over():
                await trio.sleep(0.1)


# ---------------------------------------------------------------------- several brokers


async def test_only_what_every_broker_allows(tmp_path: Path) -> None:
    one, two = auth_file(tmp_path, "1.toml"), auth_file(tmp_path, "2.toml")
    two.add_token("web", Given(["read"], ["orders", "clicks"]))
    two.add_token("only-here", everything("read"))
    async with (
        guarded_broker(tmp_path, "1", auth_file=one.path) as first,
        guarded_broker(tmp_path, "2", auth_file=two.write()) as second,
        running_broker(tmp_path / "3") as open_broker,
        running_console(tmp_path, first, second, open_broker) as site,
        site.browser() as browser,
    ):
        answer = await browser.log_in("only-here")
        assert answer.status_code == 401
        assert f"{second.http_address} accepts this token, but {first.http_address} refuses it" in answer.text
        await browser.log_in("web")
        page = (await browser.get("/")).text
        assert "clicks" in page
        assert "orders" not in page


async def test_a_broker_that_is_down_keeps_nobody_from_logging_in(tmp_path: Path) -> None:
    down = BoundAddresses("127.0.0.1:1", "127.0.0.1:1")
    async with guarded_broker(tmp_path) as broker, running_console(tmp_path, down, broker) as site:
        async with site.browser() as browser:
            assert (await browser.log_in("web")).status_code == 303
            assert "clicks" in (await browser.get("/")).text


async def test_without_any_broker_nobody_logs_in_and_the_console_lends_nothing(tmp_path: Path) -> None:
    down = BoundAddresses("127.0.0.1:1", "127.0.0.1:1")
    async with running_console(tmp_path, down) as site, site.browser() as browser:
        assert (await browser.get("/")).status_code == 303
        answer = await browser.log_in("admin")
        assert answer.status_code == 503
        assert "no broker answers" in answer.text


# ---------------------------------------------------------------------- revocation


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that stands still until a test moves it; for tests that ask for it."""
    return trio.testing.MockClock()


async def test_a_revoked_token_ends_its_session_and_its_streams(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    file = auth_file(tmp_path)
    async with (
        guarded_broker(tmp_path, auth_file=file.path) as broker,
        running_console(tmp_path, broker) as site,
        site.browser() as browser,
        site.browser() as admin,
    ):
        await browser.log_in("web")
        await admin.log_in("admin")
        async with browser.client.stream("GET", "/live?path=/") as stream:
            assert stream.status_code == 200
            del file.entries["web"]
            file.write()
            async with httpx.AsyncClient(headers={"Authorization": "Bearer admin-secret"}) as client:
                answer = await client.put(
                    f"http://{broker.http_address}/config/auth_file", content=str(file.path)
                )
                assert answer.status_code == 200
            assert (await browser.get("/")).status_code == 200  # not checked again yet
            clock.rate = 15  # a minute takes four seconds
            began_s = trio.current_time()
            with trio.fail_after(60 * PATIENCE_S):
                async for _ in stream.aiter_raw():
                    pass
            assert trio.current_time() - began_s < 500  # after 600 s, it would have ended anyway
            clock.rate = 1
        session = dict(browser.client.cookies)
        answer = await browser.get("/")
        assert answer.headers["location"] == "/login"
        assert "Max-Age=0" in cookie_of(answer, "session")
        browser.client.cookies.update(session)
        assert (await browser.get("/")).headers["location"] == "/login"
        assert (await admin.get("/")).status_code == 200


# ---------------------------------------------------------------------- proxies


async def test_a_trusted_proxy_names_the_viewer(tmp_path: Path) -> None:
    async with open_site(tmp_path, admin_users=("alice", "bob"), anonymous="none") as site:
        async with site.browser() as browser:
            for name, shown in (("alice", True), ("carol", True), ("", False), ("alice, bob", False)):
                answer = await browser.get("/", {"X-Forwarded-User": name})
                assert (answer.status_code == 200) is shown, name
                assert (f">{name}<" in answer.text) is shown
            two = [("X-Forwarded-User", "carol"), ("X-Forwarded-User", "alice")]
            assert (await browser.client.get("/", headers=two)).status_code == 303


async def test_nobody_else_names_the_viewer(tmp_path: Path) -> None:
    """Neither an address that is not trusted, nor another header, nor without --admin-user."""
    spoofed = {"X-Forwarded-User": "alice", "X-Forwarded-For": "10.0.0.1"}
    given = {"admin_users": ("alice",), "anonymous": "none"}
    async with running_broker(tmp_path / "d") as broker:
        for changes in (
            {"trusted_proxies": ("10.0.0.0/8",)},
            {"acl_http_header": "X-Login"},
            {"admin_users": ()},
        ):
            options: dict[str, Any] = {**given, **changes}
            async with running_console(tmp_path, broker, **options) as site, site.browser() as browser:
                assert (await browser.get("/", spoofed)).status_code == 303, changes


# ---------------------------------------------------------------------- the console's own auth file


async def test_an_auth_file_of_the_console_for_brokers_without_tokens(tmp_path: Path) -> None:
    file = auth_file(tmp_path)
    send, receive = trio.open_memory_channel[None](1)
    async with (
        open_site(tmp_path, auth_file=file.path, reloads=receive) as site,
        site.browser() as browser,
        site.browser() as admin,
    ):
        assert (await browser.log_in("stranger")).status_code == 401
        assert (await browser.log_in("web")).status_code == 303
        assert (await admin.log_in("admin")).status_code == 303
        del file.entries["web"]
        file.write()
        await send.send(None)
        assert (await site.await_audited("reload"))["tokens"] == 4
        answer = await browser.get("/")
        assert answer.headers["location"] == "/login"
        assert "Max-Age=0" in cookie_of(answer, "session")
        assert (await admin.get("/")).status_code == 200
        file.path.write_text("[[tok")
        await send.send(None)

        def has_failed() -> bool:
            return any("error" in line for line in site.audited() if line["event"] == "reload")

        await until(has_failed)
        assert (await admin.get("/")).status_code == 200


# ---------------------------------------------------------------------- HTTPS


async def test_https_and_a_new_certificate_without_a_restart(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    send, receive = trio.open_memory_channel[None](1)
    cert, key = certificates.options["tls_cert"], certificates.options["tls_key"]
    options = {"https_cert": cert, "https_key": key, "reloads": receive}
    async with guarded(tmp_path, **options) as site:
        assert site.root.startswith("https://")
        host, _, port = site.root.removeprefix("https://").rpartition(":")

        async def serial() -> int:
            stream = await trio.open_tcp_stream(host, int(port))
            async with trio.SSLStream(
                stream, certificates.client_context(), server_hostname="127.0.0.1", https_compatible=True
            ) as secure:
                await secure.do_handshake()
                found = secure.getpeercert()
                assert found is not None
                return int(str(found["serialNumber"]), 16)

        before = await serial()
        async with site.browser(verify=certificates.client_context()) as browser:
            assert "Secure" in cookie_of(await browser.log_in("admin"), "session")
        key.write_text("no key")
        await send.send(None)
        await send.send(None)
        assert await serial() == before
        certificates.renew()
        await send.send(None)
        with trio.fail_after(PATIENCE_S):
            while await serial() == before:
                await trio.sleep(0.05)
