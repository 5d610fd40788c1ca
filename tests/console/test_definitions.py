"""Definitions on a page: the file of a fleet, what another file would change, and its application."""

import json
import re
import zlib
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from access.support import ALL_ROLES, AuthFile, Given, everything
from broker.api import Api, running_api
from console.access_support import Browser, guarded_broker
from console.access_support import running_console as guarded_console
from console.message_support import ConsoleSite, PageText, browsing, http_address, running_console
from soak import examples
from trio_nsq.console.actions.definitions import fingerprint
from trio_nsq.fleet.definitions.changes import DefinitionChange
from trio_nsq.fleet.definitions.progress import Progress

MIB = 1024 * 1024


def document(**topics: Any) -> bytes:
    return json.dumps({"version": 1, "topics": topics}).encode()


RETENTION = {"settings": {"retention_time": "7d"}}


class Definitions:
    """Sends the forms of the page of definitions."""

    def __init__(self, site: ConsoleSite) -> None:
        self.client = site.client
        self.site = site

    async def file(self, **query: str) -> dict[str, Any]:
        """Download the file."""
        answer = await self.site.get("/definitions/file", **query)
        assert answer.status_code == 200, answer.text[-500:]
        assert answer.headers["content-disposition"] == 'attachment; filename="definitions.json"'
        found: dict[str, Any] = answer.json()["topics"]
        return found

    async def upload(self, content: bytes, *, status: int = 200, **fields: str) -> PageText:
        """Send a file; return the page with the changes."""
        form = PageText((await self.site.get("/definitions")).text)
        data = {"csrf": form.fields["csrf"], **fields}
        return await self._post(data, {"file": ("d.json", content)}, status)

    async def confirm(self, shown: PageText, *, status: int = 303, **fields: str) -> PageText:
        """Send the form of the page with the changes."""
        return await self._post({**shown.fields, **fields}, None, status)

    async def _post(self, data: dict[str, str], files: Any, status: int) -> PageText:
        origin = {"Origin": str(self.client.base_url).rstrip("/")}
        answer = await self.client.post("/definitions/apply", data=data, files=files, headers=origin)
        assert answer.status_code == status, (answer.status_code, answer.text[-2000:])
        if status == 303:
            answer = await self.client.get(answer.headers["location"])
        return PageText(answer.text)


@asynccontextmanager
async def defining(folder: Path, count: int = 1) -> AsyncIterator[tuple[Definitions, list[Api]]]:
    """Run brokers with the topic `clicks` and its channel `archive`, and a console."""
    async with browsing(folder, count) as (site, brokers):
        for broker in brokers:
            await broker.post("/topic/create", topic="clicks")
            await broker.post("/channel/create", topic="clicks", channel="archive")
        await site.until_shown("/topics/clicks", "archive")
        yield Definitions(site), brokers


async def test_the_file_is_compared_and_applied_once(tmp_path: Path) -> None:
    async with defining(tmp_path, 2) as (page, brokers):
        assert await page.file() == {"clicks": {"channels": {"archive": {}}}}
        wanted = document(clicks={**RETENTION, "channels": {"archive": {"paused": True}}}, orders={})
        plan = await page.upload(wanted)
        assert "6 changes" in plan.text
        for text in ("orders create", "clicks setretention_time: default -> 7d", "clicks/archive pause"):
            assert plan.text.count(text) == 2
        for broker in brokers:
            assert http_address(broker) in plan.text
        assert await page.file() == {"clicks": {"channels": {"archive": {}}}}  # nothing was changed
        done = await page.confirm(plan)
        assert "6 changes made" in done.text
        expected = {"clicks": {**RETENTION, "channels": {"archive": {"paused": True}}}, "orders": {}}
        assert await page.file() == expected
        assert await page.file(topic="ord*") == {"orders": {}}
        again = await page.upload(json.dumps({"version": 1, "topics": expected}).encode())
        assert "Nothing to change" in again.text
        assert "plan" not in again.fields


async def test_nothing_is_deleted_unless_it_is_wanted_and_confirmed(tmp_path: Path) -> None:
    async with defining(tmp_path) as (page, (broker,)):
        await broker.tcp.publish("clicks", b"a", b"b")
        assert "Nothing to change" in (await page.upload(document())).text
        plan = await page.upload(document(), delete="1")
        assert "clicks deletedeletes 2 messages" in plan.text
        refused = await page.confirm(plan, status=422)
        assert "Nothing was changed: type delete to confirm." in refused.text
        assert "clicks" in await page.file()
        assert "1 change made" in (await page.confirm(plan, typed="delete")).text
        assert await page.file() == {}


async def test_a_plan_that_is_no_longer_true_is_not_applied(tmp_path: Path) -> None:
    async with defining(tmp_path) as (page, (broker,)):
        plan = await page.upload(document(orders={}, clicks={}))
        await broker.post("/topic/create", topic="orders")
        await broker.post("/topic/delete", topic="clicks")
        refused = await page.confirm(plan, status=409)
        assert "Nothing was changed: the brokers are not as they were" in refused.text
        assert "clicks create" in refused.text
        assert await page.file() == {"orders": {}}
        # Many more messages than were shown: 1,000 are no surprise if 999 were.
        plan = await page.upload(document(), delete="1")
        await broker.tcp.publish("orders", *(b"x" for _ in range(2000)))
        assert "Look again" in (await page.confirm(plan, status=409, typed="delete")).text


BROKEN = [
    (b"", "The file is empty."),
    (b"\xff", "The document is not UTF-8 text."),
    (b'{"version": 1, "topics": {"a": {', "The document is not JSON"),
    (b"[" * 100_000, "The document has too many levels."),
    (b'{"version": 2, "topics": {}}', "this trio-nsq reads version 1"),
    (document(**{"<script>": {}}), "a name has 1 to 64"),
    (document(a={"settings": {"retention_time": "soon"}}), "retention_time"),
    (document(**{f"{number} !": {} for number in range(500)}), "and 450 more"),
    (document(**{"x" * 1_000_000: {}}), "a name has 1 to 64"),
    (b" " * (4 * MIB + 1), "The file has more than 4 MiB."),
    (document(**{"\u202ea": {}}), "\\u202ea"),
]
"""Files that cannot be used, each with the reason."""


async def test_broken_files_are_answered_with_the_reason(tmp_path: Path) -> None:
    async with defining(tmp_path) as (page, _):
        for content, reason in BROKEN:
            shown = await page.upload(content, status=422)
            assert "Nothing was changed." in shown.text
            assert reason in shown.text
            assert len(shown.text) < 30_000
            assert "\u202e" not in shown.text


async def test_a_file_of_10_mb_is_refused_with_the_limit(tmp_path: Path) -> None:
    async with defining(tmp_path) as (page, _):
        shown = await page.upload(b" " * (10 * MIB), status=413)
        assert "8192 KiB" in shown.text


async def test_brokers_that_differ_have_no_file(tmp_path: Path) -> None:
    async with defining(tmp_path, 2) as (page, (one, two)):
        await one.send("PUT", "/topic/settings?topic=clicks", body=b'{"max_messages": 5}')
        await two.post("/topic/create", topic="more")
        shown = PageText((await page.site.get("/definitions")).text)
        assert "brokers differ" in shown.text
        assert f"max_messages is 5 on {http_address(one)}, default on {http_address(two)}" in shown.text
        assert f'The topic "more" is not on {http_address(one)}.' in shown.text
        refused = await page.site.get("/definitions/file")
        assert refused.status_code == 409
        assert "max_messages is 5" in PageText(refused.text).text
        assert "8 changes" not in (await page.upload(document(clicks={"settings": {"max_messages": 5}}))).text


async def test_a_broker_that_does_not_answer_keeps_all_as_they_are(tmp_path: Path) -> None:
    async with (
        running_api(tmp_path) as broker,
        running_console([http_address(broker), "127.0.0.1:1"]) as site,
    ):
        page = Definitions(site)
        await site.until_shown("/definitions", "127.0.0.1:1 does not answer")
        plan = await page.upload(document(orders={}))
        assert "The file cannot be applied now" in plan.text
        assert "plan" not in plan.fields
        form = await site.page("/definitions")
        forged = await page.confirm(form, status=200, plan="x", packed=base64_of(document(orders={})))
        assert "The file cannot be applied now" in forged.text
        assert not (await broker.stats())["topics"]
        assert (await site.get("/definitions/file")).status_code == 502


def base64_of(content: bytes) -> str:
    """Return a file as the form that confirms has it."""
    return urlsafe_b64encode(zlib.compress(content)).decode()


# ---------------------------------------------------------------------- rights


@asynccontextmanager
async def guarded_site(folder: Path) -> AsyncIterator[tuple[Any, Any]]:
    file = AuthFile(folder / "auth.toml")
    file.add_token("console", everything("read"))
    file.add_token("admin", everything(*ALL_ROLES))
    file.add_token("reader", everything("read"))
    file.add_token("team", Given(ALL_ROLES, ("clicks",)))
    file.write()
    async with guarded_broker(folder, auth_file=file.path) as broker, guarded_console(folder, broker) as site:
        yield site, broker


async def send(web: Browser, fields: dict[str, str], content: bytes | None = None) -> httpx.Response:
    """Send the form, with the viewer's own token of the form."""
    data = {"csrf": await web.csrf(), **fields}
    files = None if content is None else {"file": ("d.json", content)}
    origin = str(web.client.base_url).rstrip("/")
    return await web.client.post("/definitions/apply", data=data, files=files, headers={"Origin": origin})


async def test_reading_compares_and_only_managing_applies(tmp_path: Path) -> None:
    async with guarded_site(tmp_path) as (site, _):
        async with site.browser() as team, site.browser() as reader, site.browser() as admin:
            await team.log_in("team")
            assert (await team.get("/definitions")).status_code == 403
            assert (await team.get("/definitions/file")).status_code == 403
            assert (await send(team, {}, document())).status_code == 403
            assert 'href="/definitions"' not in (await team.get("/")).text
            await reader.log_in("reader")
            assert 'href="/definitions"' in (await reader.get("/")).text
            assert set((await reader.get("/definitions/file")).json()["topics"]) == {"clicks", "orders"}
            plan = await send(reader, {}, document(new={}))
            assert "you need the role manage on all topics" in PageText(plan.text).text
            await admin.log_in("admin")
            fields = PageText((await send(admin, {}, document(new={}))).text).fields
            fields = {name: fields[name] for name in ("packed", "delete", "plan", "messages")}
            assert (await send(reader, fields)).status_code == 403
            wrong = await admin.post("/definitions/apply", fields, csrf="wrong")
            assert wrong.status_code == 403
            foreign = await admin.post("/definitions/apply", fields, headers={"Origin": "http://evil"})
            assert foreign.status_code == 403
            assert (await send(admin, fields)).status_code == 303
            assert "new" in (await reader.get("/definitions/file")).json()["topics"]
        lines = [line for line in site.audited() if "definitions" in str(line.get("action"))]
        done = [(line["name"], line["event"]) for line in lines if line["status"] in (200, 303)]
        assert done == [("admin", "action")]  # questions change nothing
        assert lines[-1]["count"] == 1
        refused = [line["name"] for line in lines if line["event"] == "refused"]
        assert sorted(refused) == ["admin", "admin", "reader", "team", "team", "team"]


async def test_forged_forms(tmp_path: Path) -> None:
    """None, no base64, no zlib, and one that is cut off."""
    async with defining(tmp_path) as (page, _):
        for packed in ("", "!", "AAAA", "eJzt" * 10):
            plan = await page.upload(document(orders={}))
            shown = await page.confirm(plan, status=422, packed=packed)
            assert re.search("Select a file|select the file again|not JSON", shown.text), packed


# ---------------------------------------------------------------------- the changes


NAMES = st.sampled_from(["a", "b", "c"])
CHANGES = st.lists(
    st.builds(
        DefinitionChange, st.sampled_from(["create", "set", "pause", "delete"]), NAMES, st.just("") | NAMES
    ),
    max_size=8,
)


@settings(max_examples=examples())
@given(CHANGES, st.data())
def test_changes_that_need_a_refused_one_are_left_out(plan: Sequence[DefinitionChange], data: Any) -> None:
    progress, lacking = Progress(plan), set[str]()
    for places in progress.rounds():
        for place in places:
            assert lacking.isdisjoint({plan[place].topic, plan[place].name})
        for place in places:
            if data.draw(st.booleans()):
                progress.note_failure(place, no_answer=False)
                if plan[place].verb == "create":
                    lacking.add(plan[place].name)
            else:
                progress.done.add(place)
    left = set(range(len(plan))) - progress.done
    if not lacking:
        assert all(place in progress.done or place in left for place in range(len(plan)))


def test_a_broker_that_is_lost_is_told_once() -> None:
    plan = [DefinitionChange("create", each) for each in "abc"] + [DefinitionChange("pause", "a")]
    progress = Progress(plan)
    rounds = progress.rounds()
    assert next(rounds) == [0, 1, 2]
    assert [progress.note_failure(place, no_answer=True) for place in (0, 1)] == [True, False]
    assert list(rounds) == []


def test_the_fingerprint_is_that_of_the_changes() -> None:
    one = {"b:1": [DefinitionChange("delete", "a", messages=1)]}
    assert fingerprint(one) == fingerprint({"b:1": [DefinitionChange("delete", "a", messages=9)]})
    assert fingerprint(one) != fingerprint({"b:2": one["b:1"]})
    assert fingerprint(one) != fingerprint({"b:1": [DefinitionChange("delete", "a", "a")]})
