"""Pages show the invisible characters and bidirectional overrides of strangers as escapes."""

import json
import re
import sys
import time
import unicodedata
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path

from broker.api import DONE, OK, Api, address
from broker.support import connected, identify
from console.fleet.fake_brokers import FakeBroker, channel, fake_brokers, topic
from console.message_support import ConsoleSite, browsing
from console.web.support import visited
from trio_nsq.console.web import rendering
from trio_nsq.console.web.formats import visible_text


@cache  # not when workers collect tests: it takes as long as the collection of 20 modules
def hidden() -> list[str]:
    """Return all invisible characters."""
    return [
        char
        for char in map(chr, range(sys.maxunicode + 1))
        if not char.isprintable()
        and char not in "\n\t"
        and unicodedata.category(char) not in ("Cn", "Co", "Cs")
    ]


def texts() -> list[str]:
    """Return texts with all invisible characters."""
    chars = hidden()
    return [f"<i>{''.join(chars[start : start + 16])}\" onclick='x'" for start in range(0, len(chars), 16)]


async def check(site: ConsoleSite, path: str) -> None:
    """Wait until a page has the escapes of all hidden characters, and check that it has none of them raw."""
    page = await site.until_shown(path, *(char.encode("unicode_escape").decode() for char in hidden()))
    assert "i" not in page.tags
    html = (await site.get(path)).text
    assert not [char for char in html if not char.isprintable() and char not in "\n\t"]


async def create(site: ConsoleSite, broker: Api) -> None:
    """Create a topic and a channel, and wait until the console knows them."""
    assert await broker.post("/topic/create", topic="t") == DONE
    assert await broker.post("/channel/create", topic="t", channel="readers") == DONE
    await site.until_shown("/counter", "readers")


async def test_dead_letters(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, [broker]):
        await create(site, broker)
        rule = json.dumps({"max_attempts": 1, "dead_letter_topic": "dead"}).encode()
        answer = await broker.client.put("/channel/settings?topic=t&channel=readers", content=rule)
        assert answer.status_code == 200, answer.text
        await broker.tcp.subscribe("t", "readers", ready_count=1)
        for text in texts():
            assert await broker.post("/pub", text.encode(), topic="t") == OK
            await broker.tcp.send(b"REQ %s 0\n" % (await broker.tcp.message()).id)
        await check(site, "/dead-letters/dead")


async def test_deferred_messages(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, [broker]):
        await create(site, broker)
        for text in texts():
            assert await broker.post("/pub", text.encode(), topic="t", defer=3_600_000) == OK
        await check(site, "/topics/t/readers/deferred")


async def test_jobs(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, [broker]):
        for number, text in enumerate(texts()):
            job = {"kind": "replay", "topic": "t", "started_at": time.time(), "unit": text[3:19]}
            job |= dict.fromkeys(("name", "host", "message"), text)
            answer = await broker.send("PUT", f"/jobs/{number}", body=json.dumps(job).encode())
            assert answer.status_code == 200, answer.text
        await check(site, "/jobs")


async def test_clients(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, [broker]), AsyncExitStack() as consumers:
        await create(site, broker)
        for text in texts():
            consumer = await consumers.enter_async_context(connected(address(broker)))
            await consumer.send(identify(client_id=text, hostname=text, user_agent=text))
            await consumer.ok()
            await consumer.subscribe("t", "readers")
        await check(site, "/topics/t/readers")


async def test_what_brokers_tell_about_themselves() -> None:
    """Every template escapes what it prints, without a filter at each place."""
    bad = "1\u202e\x1b[2J\u200b"
    one = FakeBroker(topics=[topic("clicks", channel("archive"), unavailable=bad)], text=bad)
    async with fake_brokers(one), visited(one) as client:
        for path in ("/", "/health", "/nodes", f"/nodes/{one.address}", "/topics/clicks"):
            html = (await client.get(path)).text
            assert r"1\u202e\x1b[2J" in html, path
            assert not [char for char in html if not char.isprintable() and char not in "\n\t"], path


async def test_fields_of_forms_are_sent_back_as_they_were_typed() -> None:
    typed = "a\u200db"
    one = FakeBroker(topics=[topic("clicks")])
    async with fake_brokers(one), visited(one) as client:
        assert f'value="{typed}"' in (await client.get("/", params={"q": typed})).text
    folder = Path(rendering.__file__).parent / "templates"
    fields = [
        field
        for path in folder.glob("*.html")
        for field in re.findall(r"<(?:input|option)\b[^>]*?\bvalue=\"(.*?)\"", path.read_text())
        if "{{" in field
    ]
    assert [field for field in fields if "| e }}" not in field] == [
        "{{ 'desc' if listing.descending else 'asc' }}"
    ]


def test_long_texts_are_cut() -> None:
    found = visible_text("\u202e" * 10_000)
    assert len(found) <= 8001
    assert found.endswith("</span>…")
    assert visible_text("a\nb & c") == "a\nb &amp; c"
