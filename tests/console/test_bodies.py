"""Bodies in the console: decoded as a bodies file says, and with masked fields that nobody gets without the right."""

import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import fastavro
import httpx
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api import DONE, running_api
from broker.support import PATIENCE_S, connected, running_broker
from console.access_support import running_console
from console.masks_support import BODIES, BODY, SECRET, leaks, masked_site
from console.message_support import PageText, browsing, http_address
from console.message_support import running_console as plain_console
from soak import examples
from trio_nsq.bodies.bodies_file import TopicReaders
from trio_nsq.bodies.reading import PLAIN, BodyReader
from trio_nsq.console.messages.bodies import PageBodies, TopicBodies
from trio_nsq.console.messages.message import matching
from trio_nsq.console.options import ConsoleOptions
from trio_nsq.console.server import serve
from trio_nsq.filters.masks import Mask
from trio_nsq.log.records import RecordBatch
from trio_nsq.protocol import pack_messages
from trio_nsq.protocol.errors import StartupError

CLICK = {"type": "record", "name": "C", "fields": [{"name": "user", "type": "string"}]}


READS = (
    "/topics/clicks/messages",
    "/topics/clicks/messages?order=oldest&count=100",
    "/topics/clicks/messages?q=level&kind=text",
    "/topics/clicks/messages?q=level%3Derror&kind=json",
    "/topics/clicks/messages/0",
    "/topics/clicks/messages/0?view=text",
    "/topics/clicks/messages/0?view=hex",
    "/topics/clicks/messages/0?view=raw",
    "/topics/clicks/messages/0/body",
    "/topics/clicks/messages.ndjson?from=0&until=100",
    "/topics/clicks/tail",
    "/topics/clicks/c/messages",
    "/topics/clicks/c/deferred",
    "/topics/clicks/publish",
    "/topics/dead/dead-letters/messages",
    "/topics/clicks",
)


@pytest.mark.parametrize("name", ["reader", "admin"])
async def test_no_page_has_masked_values(tmp_path: Path, name: str) -> None:
    """Also for those who may see them: they have to ask for each message."""
    bodies = [BODY, gzip.compress(BODY), BODY[:-1], SECRET.encode() + b"\xff", json.dumps([SECRET]).encode()]
    async with masked_site(tmp_path, bodies) as (site, _), site.browser() as web:
        await web.log_in(name)
        for path in READS:
            answer = await web.get(path)
            assert answer.status_code == (403 if path.endswith("/body") else 200), path
            assert not leaks(answer.text), path
        for sequence in range(len(bodies)):
            assert not leaks((await web.get(f"/topics/clicks/messages/{sequence}")).text)
        shown = PageText((await web.get("/topics/clicks/messages/0")).text)
        assert '"card": "***"' in shown.text.replace('" :', '":')
        assert "masked" in shown.text
        seen = ""
        async with web.client.stream("GET", "/live?path=/topics/clicks/tail", timeout=None) as events:
            with trio.CancelScope() as reading:
                async for piece in events.aiter_raw():
                    seen += piece.decode()
                    if "withheld" in seen:
                        reading.cancel()
        assert not leaks(seen)


@pytest.mark.parametrize(("text", "kind"), [(SECRET, "text"), ("tops3", "regex"), (f"card={SECRET}", "json")])
async def test_masked_values_are_not_found(tmp_path: Path, text: str, kind: str) -> None:
    """A search would tell a value by trying."""
    async with masked_site(tmp_path, [BODY]) as (site, _), site.browser() as web:
        await web.log_in("admin")
        query = httpx.QueryParams({"q": text, "kind": kind})
        page = PageText((await web.get(f"/topics/clicks/messages?{query}")).text)
        assert "No message matches." in page.text
        query = httpx.QueryParams({"q": "level=error", "kind": "json"})
        assert "No match" not in (await web.get(f"/topics/clicks/messages?{query}")).text


async def test_masked_fields_are_shown_on_request_and_audited(tmp_path: Path) -> None:
    async with masked_site(tmp_path, [b"first", BODY]) as (site, broker):
        async with site.browser() as reader, site.browser() as admin:
            await reader.log_in("reader")
            await admin.log_in("admin")
            assert "unmask" not in PageText((await reader.get("/topics/clicks/messages/1")).text).hrefs
            for path in ("/topics/clicks/messages/1/unmask", "/topics/clicks/messages/1/body"):
                refused = await reader.post(path)
                assert refused.status_code == 403
                assert "This needs the role unmask on topic clicks." in refused.text
                assert not leaks(refused.text)
            assert (await admin.get("/topics/clicks/messages/1/unmask")).status_code == 405
            assert (await admin.post("/topics/clicks/messages/1/unmask", csrf="wrong")).status_code == 403
            shown = await admin.post("/topics/clicks/messages/1/unmask")
            assert shown.status_code == 200
            assert SECRET in PageText(shown.text).text
            assert "Mask again" in shown.text
            assert (await admin.post("/topics/clicks/messages/1/body")).content == BODY
            assert not leaks((await admin.get("/topics/clicks/messages/1")).text)
            lines = [line for line in site.audited() if "/messages/1/" in str(line.get("action"))]
        assert [(line["event"], line["name"], line["status"]) for line in lines] == [
            ("refused", "reader", 403),
            ("refused", "reader", 403),
            ("refused", "admin", 403),
            ("action", "admin", 200),
            ("action", "admin", 200),
        ]
        assert lines[-1]["action"] == "POST /topics/clicks/messages/1/body"
        assert (lines[-1]["topic"], lines[-1]["node"], lines[-1]["sequence"]) == (
            "clicks",
            broker.http_address,
            1,
        )


async def test_dead_letters_keep_their_masks(tmp_path: Path) -> None:
    """In a topic of another name, for which the file says nothing."""
    (tmp_path / "bodies.toml").write_text(BODIES)
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="clicks")
        assert await api.post("/channel/create", topic="clicks", channel="c") == DONE
        rule = {"max_attempts": 1, "dead_letter_topic": "dead"}
        await api.send("PUT", "/channel/settings?topic=clicks&channel=c", body=json.dumps(rule).encode())
        await api.tcp.publish("clicks", BODY)
        await api.tcp.subscribe("clicks", "c", ready_count=1)
        message = await api.tcp.message()
        await api.tcp.send(b"REQ %s 0\n" % message.id)
        with trio.fail_after(PATIENCE_S):
            while not any(each["message_count"] for each in (await api.stats(topic="dead"))["topics"] or ()):
                await trio.lowlevel.checkpoint()
        async with plain_console([http_address(api)], bodies_file=tmp_path / "bodies.toml") as site:
            await site.until_shown("/topics/dead", "dead-letters")
            for path in (
                "/topics/dead/messages",
                "/topics/dead/messages/0",
                "/topics/dead/tail",
                "/topics/dead/messages.ndjson?from=0&until=1",
                "/topics/dead/dead-letters/messages",
                "/dead-letters/dead",
                "/topics/dead/messages?q=tops3cret",
                "/topics/dead/messages?format=csv",
                "/topics/dead/dead-letters/messages?format=json",
                "/dead-letters/dead?format=json",
                "/dead-letters/dead?format=csv",
            ):
                answer = await site.get(path)
                assert answer.status_code == 200, path
                assert "***" in answer.text or "No match" in answer.text, path
                assert "9999" not in answer.text, path
            assert (await site.get("/topics/dead/messages/0/body")).status_code == 403


async def test_dead_letters_of_dead_letters_keep_their_masks(tmp_path: Path) -> None:
    """They say only the last topic that they come from: the fields of all topics are masked."""
    (tmp_path / "bodies.toml").write_text(BODIES + '[[topic]]\nname = "first"\nmask = ["other"]\n')
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="clicks")
        assert await api.post("/channel/create", topic="clicks", channel="c") == DONE
        await api.tcp.publish("clicks", BODY)
        for topic, channel, target in ("clicks", "c", "first"), ("first", "dead-letters", "second"):
            rule = {"max_attempts": 1, "dead_letter_topic": target}
            path = f"/channel/settings?topic={topic}&channel={channel}"
            await api.send("PUT", path, body=json.dumps(rule).encode())
            async with connected(api.tcp_address) as consumer:
                await consumer.subscribe(topic, channel, ready_count=1)
                message = await consumer.message()
                await consumer.send(b"REQ %s 0\n" % message.id)
                with trio.fail_after(PATIENCE_S):
                    while not any(
                        each["message_count"] for each in (await api.stats(topic=target))["topics"] or ()
                    ):
                        await trio.lowlevel.checkpoint()
        async with plain_console([http_address(api)], bodies_file=tmp_path / "bodies.toml") as site:
            await site.until_shown("/topics/second", "dead-letters")
            for path in (
                "/topics/second/messages",
                "/topics/second/messages/0",
                "/topics/second/tail",
                "/topics/second/messages.ndjson?from=0&until=1",
                "/topics/second/dead-letters/messages",
                "/dead-letters/second",
                "/topics/second/messages?q=tops3cret",
            ):
                answer = await site.get(path)
                assert answer.status_code == 200, path
                assert "***" in answer.text or "No match" in answer.text, path
                assert "9999" not in answer.text, path
            assert (await site.get("/topics/second/messages/0/body")).status_code == 403


async def test_download_has_all_bodies(tmp_path: Path) -> None:
    """However large they are when they are decompressed."""
    large = json.dumps({"card": SECRET, "text": "x" * 900_000}).encode()
    async with masked_site(tmp_path, [gzip.compress(large)] * 6) as (site, _), site.browser() as web:
        await web.log_in("reader")
        answer = await web.get("/topics/clicks/messages.ndjson?from=0&until=6")
        assert answer.status_code == 200
        bodies = [json.loads(line)["body"] for line in answer.text.splitlines()]
        assert [json.loads(body)["card"] for body in bodies] == ["***"] * 6


def test_page_without_time_leaves_bodies() -> None:
    """Any body may take a second, and a page has a hundred. What is masked is withheld then."""
    page, masked = PageBodies(0.0), BodyReader(masks=[("card", Mask.HIDE)])
    assert (
        page.read(PLAIN, gzip.compress(BODY)).problem == "It is not decoded in this list: open the message."
    )
    assert page.read(PLAIN, BODY).content == BODY
    assert page.read(masked, BODY).content == b"withheld: %d bytes" % len(BODY)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.booleans(), st.data())
@settings(max_examples=examples(50))
def test_search_without_time_continues(sizes: list[int], backwards: bool, data: st.DataObject) -> None:
    """It looks at one body at least, says how far it came, and finds the same."""
    records: list[RecordBatch] = []
    end = 0
    for size in sizes:
        bodies = [gzip.compress(b"%d" % (end + index)) for index in range(size)]
        records.append(RecordBatch(end, 1 + end, 1, 0, pack_messages(bodies)))
        end += size
    shown = TopicBodies(TopicReaders(), "t")
    found: list[int] = []
    at, rounds = (end if backwards else 0), 0
    while at != (0 if backwards else end):
        first, until = (0, at) if backwards else (at, end)
        part = [each for each in records if each.next_sequence > first and each.base_sequence < until]
        hits, at = matching(
            "b",
            part,
            first,
            until,
            shown,
            lambda body: int(body) % 2 == 0,
            backwards=backwards,
            goes_on=lambda: data.draw(st.booleans()),
        )
        found += [each.sequence for each in hits]
        rounds += 1
    assert rounds <= end
    assert found == sorted(range(0, end, 2), reverse=backwards)


NAMES = st.sampled_from(["card", "user", "email", "other"])
VALUES = st.recursive(
    st.none() | st.integers() | st.just(SECRET),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(NAMES, VALUES, min_size=1), min_size=30, max_size=30))
@settings(max_examples=2, deadline=None)
def test_generated_bodies(bodies: list[dict[str, Any]]) -> None:
    """The only place of the secret is a masked field, whatever is around it."""
    values = [_only_in(body, "card") for body in bodies]

    async def check() -> None:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            encoded = [json.dumps(value).encode() for value in values]
            async with masked_site(Path(folder), encoded) as (site, _), site.browser() as web:
                await web.log_in("reader")
                for path in READS[:11]:
                    assert not leaks((await web.get(path)).text), path

    trio.run(check)


def _only_in(value: Any, field: str) -> Any:
    """Return a body whose secrets are in one field."""
    found = json.loads(
        json.dumps({name: each for name, each in value.items() if name != field}).replace(SECRET, "-")
    )
    return found | {field: value.get(field, SECRET)}


async def test_decoded_bodies(tmp_path: Path) -> None:
    """Lists, search, pages and downloads have decoded bodies; the bytes can be seen, too."""
    (tmp_path / "c.avsc").write_text(json.dumps(CLICK))
    (tmp_path / "bodies.toml").write_text('[[topic]]\nname = "t"\nformat = "avro"\nschema = "c.avsc"\n')
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, CLICK, {"user": "<b>ada</b>"})
    async with browsing(tmp_path) as (_, (broker,)):
        await broker.post("/topic/create", topic="t")
        await broker.tcp.publish("t", gzip.compress(stream.getvalue()), b"\xff")
        async with plain_console([http_address(broker)], bodies_file=tmp_path / "bodies.toml") as site:
            page = await site.page("/topics/t/messages")
            assert '{"user": "<b>ada</b>"}' in page.text
            assert "gzip avro" in page.text
            assert "Not decoded: The body is no record of its schema" in page.text
            found = await site.page("/topics/t/messages", q='user="<b>ada</b>"', kind="json")
            assert "<b>ada</b>" in found.text
            single = await site.page("/topics/t/messages/0")
            assert '"<b>ada</b>"' in single.text
            assert "@body.bin" in " ".join(single.commands)
            raw = await site.page("/topics/t/messages/0", view="raw")
            assert "1f 8b 08" in raw.text
            lines = (await site.get("/topics/t/messages.ndjson?from=0&until=1")).text.splitlines()
            assert "body_base64" in json.loads(lines[0])
            assert gzip.decompress((await site.get("/topics/t/messages/0/body")).content) == stream.getvalue()


async def test_bodies_say_what_they_are_without_a_file(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.post("/topic/create", topic="t")
        await broker.tcp.publish(
            "t", gzip.compress(b'{"a": "zipped"}'), gzip.compress(bytes(10_000_000)), b"\x1f\x8b\x08x"
        )
        page = await site.page("/topics/t/messages", order="oldest")
        assert "zipped" in page.text
        assert "Not decoded: The body is not valid gzip" in page.text
        assert "zipped" in (await site.page("/topics/t/messages", q="zipped")).text
        shown = (await site.page("/topics/t/messages/1")).text
        assert re.search(r"The first [0-9.]+ KiB of 1", shown)


async def test_file_that_cannot_be_used(tmp_path: Path) -> None:
    options = ConsoleOptions(http_address="127.0.0.1:0", bodies_file=tmp_path / "none.toml")
    with pytest.raises(StartupError, match=r"--bodies-file: cannot read .*none\.toml: No such file"):
        await serve(options)


async def test_file_is_read_again(tmp_path: Path) -> None:
    """A file that cannot be used changes nothing: masks stay."""
    file = tmp_path / "bodies.toml"
    file.write_text('[[topic]]\nname = "t"\nmask = ["a"]\n')
    send, receive = trio.open_memory_channel[None](0)
    async with running_broker(tmp_path / "d") as broker:
        async with httpx.AsyncClient(base_url=f"http://{broker.http_address}") as api:
            await api.post("/pub?topic=t", content=b'{"a": "A1", "b": "B1"}')
        async with running_console(tmp_path, broker, reloads=receive, bodies_file=file) as site:
            async with site.browser() as web:
                for text, hidden in (
                    ('[[topic]]\nname = "t"\nmask = ["a"]\n', "A1"),
                    ('[[topic]]\nname = "t"\nmask = ["b"]\n', "B1"),
                    ("[[topic]]\nmask", "B1"),
                ):
                    file.write_text(text)
                    await send.send(None)
                    await send.send(None)  # the one before has been answered
                    shown = (await web.get("/topics/t/messages/0")).text
                    assert [each for each in ("A1", "B1") if each not in shown] == [hidden]
