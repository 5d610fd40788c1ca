"""Every page with viewers of different roles: nobody learns of a topic, or changes it, without a role on it."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from access.support import Given, bearer
from console.access_support import Site, auth_file, guarded_broker, running_console
from trio_nsq.access.secret import Secret
from trio_nsq.console.web.app import PAGES

HIDDEN = "orders"
OPEN = {"login", "logout", "oidc_login", "oidc_callback"}


@asynccontextmanager
async def site_with_channels(folder: Path, **options: Any) -> AsyncIterator[tuple[Site, str]]:
    """A console of a broker with a channel of each topic; and the address of the broker."""
    file = auth_file(folder)
    file.add_token("reader-of-clicks", Given(["read"], ["clicks"]))
    file.write()
    async with guarded_broker(folder, auth_file=file.path) as broker:
        async with httpx.AsyncClient(headers={"Authorization": "Bearer admin-secret"}) as client:
            for topic in ("clicks", HIDDEN):
                url = f"http://{broker.http_address}/channel/create?topic={topic}&channel={topic}-ch"
                assert (await client.post(url)).status_code == 200
        async with running_console(folder, broker, **options) as site:
            yield site, str(broker.http_address)


def target(path: str, topic: str, broker: str) -> str:
    """The path of a page, filled in."""
    parts = {"topic": topic, "channel": f"{topic}-ch", "sequence": "0", "node": broker}
    filled = re.sub(r"\{(\w+)(:\w+)?\}", lambda match: parts.get(match[1], "x"), path)
    return f"{filled}?topic={topic}" if "{node}" in path else filled


async def test_no_page_tells_of_a_topic_without_a_role_on_it(tmp_path: Path) -> None:
    async with site_with_channels(tmp_path) as (site, broker), site.browser() as browser:
        await browser.log_in("web")
        for page in PAGES:
            if "GET" not in page.methods or page.name in OPEN:
                continue
            shown = await browser.get(target(page.path, "clicks", broker))
            assert HIDDEN not in shown.text, page.path
            if "{topic}" in page.path:
                hidden, absent = [
                    await browser.get(target(page.path, topic, broker)) for topic in (HIDDEN, "absent")
                ]
                assert hidden.status_code in (403, 404), page.path
                assert hidden.status_code == absent.status_code, page.path
                assert hidden.text.replace(HIDDEN, "absent") == absent.text, page.path


_TABS = re.compile(r'<nav class="tabs".*?</nav>', re.DOTALL)
_TAB = re.compile(r'<a href="([^"]+)"[^>]*>(\w+)</a>')


async def test_the_tabs_of_a_topic_lead_to_what_the_viewer_may_see(tmp_path: Path) -> None:
    """Of each role: all tabs whose pages answer are there, and no other."""
    file = auth_file(tmp_path)
    roles = ("read", "publish", "manage", "consume")
    for role in roles:
        file.add_token(f"{role}-only", Given([role], ["clicks"]))
    file.write()
    pages = {
        "clicks": ("messages", "publish", "settings"),
        "clicks/ch": ("messages", "deferred", "seek", "settings"),
    }
    async with guarded_broker(tmp_path, auth_file=file.path) as broker:
        async with httpx.AsyncClient(headers={"Authorization": "Bearer admin-secret"}) as client:
            url = f"http://{broker.http_address}/channel/create?topic=clicks&channel=ch"
            assert (await client.post(url)).status_code == 200
        async with running_console(tmp_path, broker) as site:
            for role in roles:
                async with site.browser() as browser:
                    await browser.log_in(f"{role}-only")
                    for place, names in pages.items():
                        found = _TABS.search((await browser.get(f"/topics/{place}")).text)
                        assert found is not None
                        tabs = {text.lower() for _, text in _TAB.findall(found[0])}
                        answered = {
                            name
                            for name in names
                            if (await browser.get(f"/topics/{place}/{name}")).status_code == 200
                        }
                        assert tabs == {"overview"} | answered, (role, place)


async def test_who_may_only_read_changes_nothing(tmp_path: Path) -> None:
    async with site_with_channels(tmp_path) as (site, broker), site.browser() as browser:
        await browser.log_in("reader")
        token = await browser.csrf()
        own = {*OPEN, "preferences", "apply_definitions"}  # kept by the browser; only compares without a plan
        changes = [page for page in PAGES if "POST" in page.methods and page.name not in own]
        for page in changes:
            path = target(page.path, "clicks", broker)
            answer = await browser.post(path, {"topic": "clicks", "confirm": "clicks"}, csrf=token)
            assert answer.status_code == 403, page.path
            assert "the role" in answer.text, page.path
        if changes:
            line = await site.await_audited("refused")
            assert (line["name"], line["error"], line["status"]) == ("reader", "FORBIDDEN", 403)


async def test_strangers_get_no_page(tmp_path: Path) -> None:
    async with site_with_channels(tmp_path) as (site, broker), site.browser() as browser:
        token = await browser.csrf()
        for page in PAGES:
            if page.name in OPEN:
                continue
            path = target(page.path, "clicks", broker)
            if "GET" in page.methods:
                answer = await browser.get(path)
                assert answer.status_code in (303, 401), page.path
                assert "clicks" not in answer.text
            if "POST" in page.methods:
                assert (await browser.post(path, csrf=token)).status_code == 401, page.path


async def test_a_form_that_outlives_its_login_leads_to_the_login(tmp_path: Path) -> None:
    async with site_with_channels(tmp_path) as (site, _), site.browser() as browser:
        await browser.log_in("web")
        assert 'href="/login"' not in (await browser.get("/topics/clicks")).text
        await browser.post("/logout")
        answer = await browser.post("/topics/clicks/pause")
        assert answer.status_code == 401
        shown = answer.text.partition("<main")[2]
        assert "Log in first." in shown
        assert 'href="/login"' in shown


async def test_the_audit_log_tells_who_has_changed_what(tmp_path: Path) -> None:
    async with site_with_channels(tmp_path) as (site, _), site.browser() as browser:
        for name, status in (("reader", 403), ("admin", 200)):
            answer = await browser.client.post(
                "/api/topics/clicks", json={"action": "pause"}, headers={"Authorization": bearer(name)}
            )
            assert answer.status_code == status
        refused, done = await site.await_audited("refused"), await site.await_audited("action")
        assert (refused["name"], refused["topic"], refused["status"]) == ("reader", "clicks", 403)
        assert refused["error"] == "FORBIDDEN"
        assert {
            key: done[key] for key in ("name", "source", "action", "topic", "status", "done", "failed")
        } == {
            "name": "admin",
            "source": "token",
            "action": "POST /api/topics/clicks",
            "topic": "clicks",
            "status": 200,
            "done": 1,
            "failed": 0,
        }


async def test_the_broker_refuses_a_revoked_token_at_once(tmp_path: Path) -> None:
    """Even while the console has not noticed yet: actions have the viewer's token, not that of the console."""
    async with (
        site_with_channels(tmp_path, secret=Secret("admin-secret")) as (site, broker),
        site.browser() as browser,
    ):
        await browser.log_in("web")
        token = await browser.csrf()
        file = auth_file(tmp_path)
        del file.entries["web"]
        path = str(file.write())
        async with httpx.AsyncClient(headers={"Authorization": bearer("admin")}) as client:
            answer = await client.put(f"http://{broker}/config/auth_file", content=path)
            assert answer.status_code == 200
            await browser.client.post(
                "/api/topics/clicks", json={"action": "pause"}, headers={"X-CSRF-Token": token}
            )
            stats = (await client.get(f"http://{broker}/stats?format=json&topic=clicks")).json()
            assert stats["topics"][0]["paused"] is False
