"""Publish from a form, and see what a channel delivers next."""

import base64
import json
from pathlib import Path

import pytest

from broker.api import Api
from broker.support import connected
from console.message_support import browsing, http_address


async def bodies(broker: Api, topic: str = "t") -> list[bytes]:
    """Return the bodies of a topic."""
    answer = await broker.get("/topic/read", topic=topic)
    return [bytes.fromhex(line) for line in map(_hex, answer.text.splitlines())]


def _hex(line: str) -> str:

    found = json.loads(line)
    encoded = found.get("body_base64")
    return (base64.b64decode(encoded) if encoded is not None else found["body"].encode()).hex()


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("text", "a\r\nb\r\n", [b"a\nb\n"]),
        ("text", " <script>é\u202e ", [" <script>é\u202e ".encode()]),
        ("lines", "a\r\n\r\nb c\r\n", [b"a", b"b c"]),
        ("hex", "00 ff\n0A", [b"\x00\xff\n"]),
        ("base64", "AP8K\nAP8K", [b"\x00\xff\n\x00\xff\n"]),
    ],
)
async def test_a_text_is_published_as_the_form_says(
    tmp_path: Path, form: str, text: str, expected: list[bytes]
) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.tcp.publish("t", b"before", expected[0])
        page = await site.submit("/topics/t/publish", body=text, format=form)
        count = len(expected)
        assert f"has stored {count} message" in page.text
        assert (await bodies(broker))[2:] == expected
        link = page.links["2" if count == 1 else f"2 to {1 + count}"]
        assert "2 of t" in (await site.page(link)).text or count > 1


async def test_a_file_is_published_unchanged(tmp_path: Path) -> None:
    body = bytes(range(256)) * 4000
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.post("/topic/create", topic="t")
        await site.submit("/topics/t/publish", {"file": body})
        await site.submit("/topics/t/publish", {"file": b"a\r\n\nb\xff"}, format="lines")
        assert await bodies(broker) == [body, b"a\r", b"b\xff"]
        page = await site.page("/topics/t/messages/0")
        assert f"{len(body):,} bytes" in page.text


async def test_a_draining_broker_is_the_last_choice(tmp_path: Path) -> None:
    """It refuses publishes, so the form selects another one, and names it."""
    async with browsing(tmp_path, 2) as (site, (first, second)):
        for broker in (first, second):
            await broker.post("/topic/create", topic="t")
        assert (await first.send("PUT", "/config/draining", body=b"true")).status_code == 200
        names = http_address(second), f"{http_address(first)} (draining)"
        await site.until_shown("/topics/t/publish", *names)
        page = await site.submit("/topics/t/publish", body="a")
        assert f"{names[0]} has stored 1 message" in page.text
        refused = await site.submit("/topics/t/publish", body="b", broker=http_address(first), status=502)
        assert "Nothing was published" in refused.text
        assert (await bodies(first), await bodies(second)) == ([], [b"a"])


@pytest.mark.parametrize("form", ["text", "lines"])
async def test_a_publish_can_be_deferred(tmp_path: Path, form: str) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.post("/topic/create", topic="t")
        await broker.post("/channel/create", topic="t", channel="c")
        page = await site.submit("/topics/t/publish", body="a\nb", format=form, defer="1h30m")
        assert "has stored" in page.text
        assert (await broker.channel("t", "c"))["deferred_count"] == (2 if form == "lines" else 1)
        peek = await site.page("/topics/t/c/messages", state="deferred")
        assert peek.text.count("deferred until") == (2 if form == "lines" else 1)


async def test_the_chosen_broker_gets_it(tmp_path: Path) -> None:
    async with browsing(tmp_path, 2) as (site, brokers):
        for broker in brokers:
            await broker.post("/topic/create", topic="t")
        await site.until_shown("/topics/t/publish", *map(http_address, brokers))
        page = await site.submit("/topics/t/publish", body="x", broker=http_address(brokers[1]))
        assert http_address(brokers[1]) in page.text
        assert [await bodies(broker) for broker in brokers] == [[], [b"x"]]


@pytest.mark.parametrize(
    ("fields", "files", "reason"),
    [
        ({"body": ""}, None, "the body is empty"),
        ({"body": "\r\n", "format": "lines"}, None, "the body is empty"),
        ({"body": "0", "format": "hex"}, None, "not hexadecimal"),
        ({"body": "!", "format": "base64"}, None, "not Base64"),
        ({"body": "x", "format": "xml"}, None, "is not a format"),
        ({"body": "x", "defer": "soon"}, None, "'soon' is not a duration"),
        ({"body": "x", "broker": "127.0.0.1:1"}, None, "not on a broker 127.0.0.1:1"),
        ({"body": "x"}, {"file": b"y"}, "either a text or a file"),
        ({"body": ""}, {"file": b""}, "the file is empty"),
    ],
)
async def test_a_wrong_form_publishes_nothing_and_stays_filled(
    tmp_path: Path, fields: dict[str, str], files: dict[str, bytes] | None, reason: str
) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.post("/topic/create", topic="t")
        page = await site.submit("/topics/t/publish", files, status=400, **fields)
        assert "Nothing was published: " in page.text
        assert reason in page.text
        assert page.fields.get("defer", "") == fields.get("defer", "")
        assert await bodies(broker) == []


async def test_what_the_broker_refuses_is_said(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.post("/topic/create", topic="t")
        page = await site.submit("/topics/t/publish", {"file": b"x" * 1_100_000}, status=502)
        assert "Nothing was published" in page.text
        assert "MSG_TOO_BIG" in page.text
        assert await bodies(broker) == []


async def test_a_channel_shows_what_it_delivers_next(tmp_path: Path) -> None:
    async with browsing(tmp_path, 2) as (site, brokers):
        first = brokers[0]
        for broker in brokers:
            await broker.post("/topic/create", topic="t")
            await broker.post("/channel/create", topic="t", channel="c")
        await first.tcp.publish("t", b"<b>returned</b>", b"fresh", b"\xff")
        await first.post("/pub", b"later", topic="t", defer=3_600_000)
        async with connected("%s:%d" % first.tcp.stream.socket.getpeername()[:2]) as consumer:
            await consumer.subscribe("t", "c", ready_count=1)
            message = await consumer.message()
            await consumer.send(b"RDY 0\nREQ %s 0\n" % message.id)
        path = "/topics/t/c/messages"
        page = await site.until_shown(path, *map(http_address, brokers), "requeued 1")
        assert page.text.index("<b>returned</b>") < page.text.index("later")
        assert "Nothing waits here." in page.text
        only = await site.page(path, state="fresh")
        assert "returned" not in only.text
        assert "ff" in only.text
        assert len(page.commands) == 4


async def test_a_channel_of_large_messages_shows_the_first_ones(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.post("/topic/create", topic="t")
        await broker.post("/channel/create", topic="t", channel="c")
        for _ in range(24):
            await broker.post("/pub", b"\xff" * 1_000_000, topic="t")
        page = await site.page("/topics/t/c/messages", count=25)
        assert "its messages are large: the page has only the first 1" in page.text
        assert 10 < page.tags.count("details") < 24


async def test_headers_are_published_and_shown(tmp_path: Path) -> None:
    """On the message's page, in the list, and in what a channel delivers next."""
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.post("/topic/create", topic="t")
        await broker.post("/channel/create", topic="t", channel="c")
        text = "tenant: sieben\N{RIGHT-TO-LEFT OVERRIDE}<b>\r\n\r\na:1\r\n"
        page = await site.submit("/topics/t/publish", body="x\r\ny\r\n", format="lines", headers=text)
        assert "has stored 2 messages" in page.text
        answer = await broker.get("/topic/read", topic="t")
        expected = {"tenant": "sieben\N{RIGHT-TO-LEFT OVERRIDE}<b>", "a": "1"}
        assert [json.loads(line)["headers"] for line in answer.text.splitlines()] == [expected] * 2
        await site.submit("/topics/t/publish", body="plain", format="text")
        for path in ("/topics/t/messages/1", "/topics/t/messages", "/topics/t/c/messages"):
            shown = (await site.page(path)).text
            assert r"sieben\u202e<b>" in shown
        assert "X-NSQ-Header-a: 1" in (await site.page("/topics/t/messages/1")).text
        assert 'aria-label="Headers"' not in (await site.page("/topics/t/messages/2")).text


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ("tenant", "is not a header"),
        ("Tenant: 7", "upper-case"),
        ("a: 1\na: 2", "twice"),
        ("a: \x07", "control"),
    ],
)
async def test_bad_headers_publish_nothing(tmp_path: Path, headers: str, problem: str) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.post("/topic/create", topic="t")
        page = await site.submit("/topics/t/publish", body="x", headers=headers, status=400)
        assert problem in page.text
        assert await bodies(broker) == []


async def test_long_headers_do_not_make_the_list_long(tmp_path: Path) -> None:
    """A message has up to 16 KiB of them."""
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.post("/topic/create", topic="t")
        headers = f"long: {'x' * 16_000}"
        await site.submit("/topics/t/publish", body="x\n" * 25, format="lines", headers=headers)
        assert (await site.client.get("/topics/t/messages")).text.count("x" * 16_000) <= 5
