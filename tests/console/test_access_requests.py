"""Which requests the console accepts: forms, pages of other origins, names of hosts, bodies, programs, floods."""

from base64 import b64encode
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import httpx
import trio

from broker.support import PATIENCE_S, until
from console.access_support import guarded, open_site

# ---------------------------------------------------------------------- forms and pages


async def test_a_form_needs_the_token_of_its_session(tmp_path: Path) -> None:
    async with guarded(tmp_path) as site, site.browser() as browser, site.browser() as other:
        before = await browser.csrf()
        await browser.log_in("admin")
        await other.log_in("admin")
        for wrong in ("", "x", "é", before, await other.csrf()):
            answer = await browser.post("/logout", csrf=wrong)
            assert answer.status_code == 403
            assert "reload the page" in answer.text
        assert (await browser.get("/")).status_code == 200
        line = await site.await_audited("refused")
        assert (line["name"], line["action"], line["error"]) == ("admin", "POST /logout", "FORM_OUTDATED")
        token = await browser.csrf()
        answer = await browser.post("/logout", csrf="", headers={"X-CSRF-Token": token})
        assert answer.headers["location"] == "/login"


async def test_a_form_without_cookies_is_refused(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site, site.browser() as browser:
        token = await browser.csrf()
        browser.client.cookies.clear()
        assert (await browser.post("/logout", csrf=token)).status_code == 403


async def test_pages_of_other_origins_change_nothing(tmp_path: Path) -> None:
    evil = "https://evil.example"
    async with guarded(tmp_path) as site, site.browser() as browser:
        await browser.log_in("admin")
        token = await browser.csrf()
        for headers in (
            {"Origin": evil},
            {"Origin": "null"},
            {"Origin": "", "Referer": f"{evil}/"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
        ):
            answer = await browser.post("/logout", csrf=token, headers=headers)
            assert answer.status_code == 403, headers
            assert (await site.await_audited("refused"))["error"] == "NOT_FOR_WEB_PAGES"
        for headers in (
            {"Sec-Fetch-Site": "same-origin"},
            {"Sec-Fetch-Site": "same-origin", "Origin": "https://behind.proxy"},
            {"Origin": "https://nsq.example", "X-Forwarded-Host": "nsq.example"},
            {},
        ):
            await browser.log_in("admin")
            assert (await browser.post("/logout", headers=headers)).status_code == 303, headers


async def test_a_proxy_that_changes_the_host_is_named_with_the_setting(tmp_path: Path) -> None:
    async with guarded(tmp_path) as site, site.browser() as browser:
        await browser.log_in("admin")
        answer = await browser.post("/logout", headers={"Origin": "http://nsq.example"})
        assert answer.status_code == 403
        for text in ("http://nsq.example", "proxy_set_header Host", "--http-allowed-host"):
            assert text in answer.text
        headers = {"Origin": "http://nsq.example", "Sec-Fetch-Site": "cross-site"}
        assert "proxy_set_header" not in (await browser.post("/logout", headers=headers)).text


async def test_a_proxy_that_is_not_trusted_cannot_tell_another_host(tmp_path: Path) -> None:
    async with guarded(tmp_path, trusted_proxies=("10.0.0.0/8",)) as site, site.browser() as browser:
        await browser.log_in("admin")
        headers = {"Origin": "https://evil.example", "X-Forwarded-Host": "evil.example"}
        assert (await browser.post("/logout", headers=headers)).status_code == 403


async def test_the_host_must_be_a_name_of_the_console(tmp_path: Path) -> None:
    async with guarded(tmp_path, http_allowed_hosts=("nsq.example",)) as site, site.browser() as browser:
        for more in ({}, {"Authorization": "Bearer admin-secret"}, {"X-Forwarded-Host": "localhost"}):
            for path in ("/", "/login", "/api/topics"):
                answer = await browser.get(path, {"Host": "evil.example", "Accept-Language": "en", **more})
                assert answer.status_code == 403
                assert "evil.example is not a name of this console" in answer.text
            assert (await browser.get("/login", {"Host": "nsq.example:80", **more})).status_code == 200
        assert (await site.await_audited("refused"))["error"] == "HOST_NOT_ALLOWED"


async def test_a_link_on_another_site_leads_to_the_page_with_the_session(tmp_path: Path) -> None:
    """The browser sends no strict cookie then, but does when a page of the console asks it to."""
    async with guarded(tmp_path) as site, site.browser() as browser:
        headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        answer = await browser.get('/topics/a%22%3E%3Cb?x="', headers)
        assert answer.status_code == 200
        assert 'content="0; url=/topics/a%22%3E%3Cb?x=%22"' in answer.text
        assert "<b" not in answer.text.replace("<body", "")
        same = await browser.get("/topics/a", {**headers, "Sec-Fetch-Site": "same-origin"})
        assert same.headers["location"].startswith("/login")


async def test_bodies_are_limited_before_they_are_parsed(tmp_path: Path) -> None:
    async with guarded(tmp_path) as site, site.browser() as browser:
        token = await browser.csrf()
        answer = await browser.post("/login", {"token": "x" * 70_000}, csrf=token)
        assert answer.status_code == 413
        await browser.log_in("admin")
        token = await browser.csrf()
        many = {str(number): "" for number in range(6000)}
        assert (await browser.post("/logout", many, csrf=token)).status_code == 413

        host, _, port = site.root.removeprefix("http://").rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            head = f"POST /login HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100000000000\r\n\r\n"
            await stream.send_all(head.encode())
            with trio.fail_after(PATIENCE_S):  # without a byte of the body
                assert bytes(await stream.receive_some()).startswith(b"HTTP/1.1 413 ")


# ---------------------------------------------------------------------- programs


async def test_a_program_sends_its_token_with_each_request(tmp_path: Path) -> None:
    async with guarded(tmp_path) as site, site.browser() as browser:
        client = browser.client
        answer = await client.get("/api/nothing")
        assert answer.status_code == 401
        assert answer.json() == {"message": "AUTH_REQUIRED: Log in first."}
        assert answer.headers["www-authenticate"].startswith("Bearer ")
        for scheme in ("Bearer admin-secret", f"Basic {b64encode(b'x:admin-secret').decode()}"):
            assert (await client.get("/", headers={"Authorization": scheme})).status_code == 200
            for headers in ({}, {"Origin": "https://evil.example"}):
                answer = await client.post("/api/nothing", headers={"Authorization": scheme, **headers})
                foreign = bool(headers) and scheme.startswith("Basic")  # browsers repeat it by themselves
                assert (answer.status_code == 403) is foreign
                assert not answer.headers.get_list("set-cookie")
        for wrong in ("Bearer stranger-secret", "Basic !", "Digest x", "Bearer é"):
            answer = await client.get("/api/nothing", headers=[(b"Authorization", wrong.encode())])
            assert answer.status_code == 401, wrong
            assert answer.json()["message"].startswith("INVALID_TOKEN: ")
        assert (await site.await_audited("login_failed"))["action"] == "GET /api/nothing"


async def test_a_program_without_a_token_uses_the_api_of_an_open_console(tmp_path: Path) -> None:
    """As nsqadmin's scripts do. A page in a browser cannot: browsers tell which page sends a request."""
    async with open_site(tmp_path) as site, site.browser() as browser:
        assert (await browser.client.post("/api/nothing", content=b"{}")).status_code in (404, 405)
        for headers in (
            {"Origin": site.root},
            {"Origin": "https://evil.example"},
            {"Cookie": "a=b"},
            {"Referer": site.root},
            {"Sec-Fetch-Site": "none"},
        ):
            answer = await browser.client.post("/api/nothing", content=b"{}", headers=headers)
            assert answer.status_code == 403, headers
        assert (await browser.client.post("/logout", content=b"")).status_code == 403


async def unless_busy(request: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    """Repeat a request twice while the console says that the broker did not answer in time."""
    for _ in range(2):
        if (answer := await request()).status_code != 503:
            return answer
    return await request()


async def test_a_flood_of_wrong_tokens_from_one_address_delays_no_other(tmp_path: Path) -> None:
    statuses: list[int] = []
    async with guarded(tmp_path) as site, trio.open_nursery() as nursery:

        async def flood() -> None:
            headers = {"Authorization": "Bearer wrong"}
            # Loading certificates would hold up the console, which runs in the same event loop, for a second.
            transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2", verify=False)
            async with httpx.AsyncClient(transport=transport, timeout=60) as client:
                statuses.append((await client.get(f"{site.root}/api/x", headers=headers)).status_code)

        for _ in range(40):
            nursery.start_soon(flood)
        await until(lambda: bool(statuses))
        async with site.browser() as browser:
            # On a busy machine, a broker may not answer in time.
            logged_in = await unless_busy(partial(browser.log_in, "admin"))
            assert logged_in.status_code == 303
            assert (await unless_busy(partial(browser.get, "/"))).status_code == 200

        nursery.cancel_scope.cancel()
    assert set(statuses) <= {401, 429, 503}  # wrong, too many at once, or the broker has delayed its answer
