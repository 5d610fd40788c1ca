"""Messages of lists as CSV and JSON: the filter and order of the page, on all its pages; and masks."""

import csv
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api import DONE, Api, running_api
from broker.support import PATIENCE_S
from console.fleet.fake_brokers import FakeBroker, fake_brokers
from console.masks_support import BODY, leaks, masked_site
from console.message_support import ConsoleSite, all_pages, browsing, http_address, running_console
from interop.peers import free_ports
from trio_nsq.api import broker as api
from trio_nsq.bodies.bodies_file import TopicReaders
from trio_nsq.bodies.reading import ReadBody
from trio_nsq.client.connection.tls import TLSFiles
from trio_nsq.console.messages.bodies import TopicBodies
from trio_nsq.console.messages.list_download import (
    COLUMNS,
    LINE_COLUMNS,
    MAX_LINES,
    download_lines,
    download_list,
)
from trio_nsq.console.messages.paging import Start
from trio_nsq.console.record_files import RecordWriter, file_headers
from trio_nsq.console.upstream.client import Upstream
from trio_nsq.protocol.limits import MIB

csv.field_size_limit(10**9)
FORMULAS = ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1", "\n=1", "\uff1d1+1"]


def records(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines."""
    assert answer.status_code == 200, answer.text[-500:]
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.headers["content-disposition"].startswith("attachment; filename=")
    return [json.loads(line) for line in answer.text.splitlines()]


def rows(answer: httpx.Response) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    assert answer.status_code == 200, answer.text[-500:]
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    return list(csv.DictReader(io.StringIO(answer.text, newline="")))


async def bodies(site: ConsoleSite, path: str, **query: Any) -> list[str]:
    """Return the bodies of a file, which has the same as CSV and as JSON."""
    found = [each["body"] for each in records(await site.get(path, format="json", **query))]
    assert [row["body"] for row in rows(await site.get(path, format="csv", **query))] == found
    return found


# ---------------------------------------------------------------------- topics


async def test_a_file_has_all_pages_of_a_list(tmp_path: Path) -> None:
    """Also more than one part of it, in the order of the page, from all brokers by time."""
    async with browsing(tmp_path, 2) as (site, brokers):
        names = [f"{number:04}" for number in range(1200)]
        for start in range(0, 1200, 100):
            await brokers[start // 100 % 2].tcp.publish(
                "t", *(n.encode() for n in names[start : start + 100])
            )
        page = await site.until_shown("/topics/t/messages", *map(http_address, brokers))
        assert await bodies(site, "/topics/t/messages") == names[::-1]
        assert await bodies(site, "/topics/t/messages", order="oldest", count=10) == names
        assert [each["body"] for each in records(await site.get(page.links["JSON"]))] == names[::-1]
        first = records(await site.get("/topics/t/messages", format="json", order="oldest"))[0]
        assert (first["topic"], first["broker"], first["sequence"]) == ("t", http_address(brokers[0]), 0)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*Z", first["timestamp"])


async def test_the_filter_is_kept(tmp_path: Path) -> None:
    async with browsing(tmp_path, 2) as (site, brokers):
        for broker in brokers:
            await broker.tcp.publish("t", *(b'{"n":%d,"even":%d}' % (n, n % 2 == 0) for n in range(20)))
        address = http_address(brokers[1])
        await site.until_shown("/topics/t/messages", *map(http_address, brokers))
        path = "/topics/t/messages"

        async def numbers(**query: Any) -> list[int]:
            return [json.loads(each)["n"] for each in await bodies(site, path, broker=address, **query)]

        assert await numbers(q='"n":3,', order="oldest") == [3]
        assert await numbers(q="n>=15", kind="json", order="oldest") == [15, 16, 17, 18, 19]
        assert await numbers(q="EVEN.:1", kind="regex", ignore_case="1") == list(range(18, -1, -2))
        assert await numbers(at="5", until="9", order="oldest") == [5, 6, 7, 8]
        assert await numbers(at="9", until="5") == [8, 7, 6, 5]
        assert await numbers(at="9", until="5", q="even=1", kind="json") == [8, 6]
        assert len(await bodies(site, path, until="1h")) == 40  # from now back to an hour ago
        assert await bodies(site, path, at="1h") == []
        shown = await site.page(path, broker=address, order="oldest", at="5", until="7")
        assert (
            shown.links["JSON"]
            == f"{path}?broker={address.replace(':', '%3A')}&order=oldest&at=5&until=7&format=json"
        )
        assert (await site.get(path, format="json", q="(", kind="regex")).status_code == 400


async def test_pages_end_at_the_end_of_a_range(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.tcp.publish("t", *(b"%d" % n for n in range(40)))
        page = await site.page("/topics/t/messages", at="35", until="12", count=10)
        found = [sequence for _, sequence in await all_pages(site, page, "Older")]
        assert found == list(range(34, 11, -1))
        page = await site.page("/topics/t/messages", at="12", until="35", count=10, order="oldest")
        assert [sequence for _, sequence in await all_pages(site, page, "Newer")] == list(range(12, 35))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text() | st.sampled_from(FORMULAS) | st.binary(), min_size=1))
def test_no_cell_is_a_formula_and_nothing_is_lost(values: list[str | bytes]) -> None:
    """JSON is exact; in CSV, text that a spreadsheet would execute begins with an apostrophe."""
    texts = [each.decode("latin-1") if isinstance(each, bytes) else each for each in values]
    texts = [each.encode("utf-8", "replace").decode() for each in texts]
    given = [{"body": each, "headers": {"a": each}} for each in texts]
    columns = ("body", "headers")
    as_json = RecordWriter("json", columns)
    assert list(map(json.loads, (as_json.head() + as_json.lines(given)).decode().splitlines())) == given
    as_csv = RecordWriter("csv", columns)
    text = (as_csv.head() + as_csv.lines(given)).decode()
    head, *cells = csv.reader(io.StringIO(text, newline=""))
    assert tuple(head) == columns
    assert [row[0].removeprefix("'") for row in cells] == [each.removeprefix("'") for each in texts]
    assert not [row for row in cells if row[0].startswith(("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d"))]
    assert [json.loads(row[1]) for row in cells] == [{"a": each} for each in texts]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("a.b-c_1", "a.b-c_1"),
        ("..", "_."),
        ("-rf", "_rf"),
        ('x";\r\nSet-Cookie: a', "x____Set-Cookie__a"),
        ("é", "_"),
    ],
)
def test_names_of_files_are_safe(name: str, file: str) -> None:
    assert file_headers(name, "csv")["Content-Disposition"] == f'attachment; filename="{file}.csv"'


async def test_bodies_are_whole_and_decoded(tmp_path: Path) -> None:
    large = json.dumps({"text": "x" * 200_000}).encode()
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.tcp.publish("t", large, gzip.compress(b'{"a":1}'), b"\xff\x00", b"=1+1")
        path = "/topics/t/messages"
        found = records(await site.get(path, format="json", order="oldest"))
        assert found[0]["body"] == large.decode()
        assert (found[1]["body"], found[1]["formats"]) == ('{"a":1}', ["gzip"])
        assert (found[2]["body_base64"], "body" in found[2]) == ("/wA=", False)
        assert rows(await site.get(path, format="csv"))[0]["body"] == "'=1+1"


async def test_a_long_file_ends_with_its_limit(tmp_path: Path) -> None:
    """And begins with the brokers whose messages it lacks."""
    async with running_api(tmp_path / "d") as api:
        await api.tcp.publish("t", *(b"%d" % n for n in range(1500)))
        upstream = Upstream(TLSFiles(), connect_timeout_s=5, request_timeout_s=5)
        pieces = download_list(
            upstream,
            TopicBodies(TopicReaders(), "t", as_published=True),
            [http_address(api)],
            Start(False, None, "earliest"),
            None,
            lambda message: ReadBody(message.body),
            RecordWriter("json", COLUMNS),
            missing={"10.0.0.7:4151": "Connection refused"},
            max_messages=600,
        )
        first, *found, last = [json.loads(line) async for piece in pieces for line in piece.splitlines()]
        await upstream.aclose()
    assert first == {"broker": "10.0.0.7:4151", "gap": "no answer: Connection refused"}
    assert last == {"topic": "t", "gap": "limit"}
    assert [each["body"] for each in found] == [str(n) for n in range(1000)]


async def test_a_viewer_who_leaves_ends_a_download(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        for _ in range(30):
            await broker.tcp.publish("t", *(b"x" * 900_000 for _ in range(2)))
        host, _, port = site.addresses.http_address.rpartition(":")
        for form in "csv", "json":
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                head = f"GET /topics/t/messages?format={form} HTTP/1.1\r\nHost: localhost\r\n\r\n"
                await stream.send_all(head.encode())
                assert (await stream.receive_some(1000)).startswith(b"HTTP/1.1 200")
        assert len(await bodies(site, "/topics/t/messages", until="0", at="3")) == 3
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_list_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """A script that saves a file would take a page, or nothing, for the messages."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    path = "/topics/t/messages"
    async with running_console([address]) as site:
        async with running_api(tmp_path / "d", http_address=address) as broker:
            await broker.tcp.publish("t", b"1")
            assert await broker.post("/channel/create", topic="t", channel="c") == DONE
            with trio.fail_after(PATIENCE_S):
                while (await site.get("/topics/t/c")).status_code != 200:
                    pass
            for form in "csv", "json":
                assert (await site.get(path, format=form, q="0" * 16, kind="id")).status_code == 400
                assert (await site.get("/dead-letters/t", format=form)).status_code == 404
                assert (await site.get("/topics/t/d/deferred", format=form)).status_code == 404
        await site.until_shown("/health", "does not answer")
        for url in path, f"{path}?broker={address}", "/topics/t/c/messages", "/topics/t/c/deferred":
            answer = await site.client.get(httpx.URL(url).copy_merge_params({"format": "json"}))
            assert (answer.status_code, address in answer.text) == (502, True), url


async def test_a_line_that_is_too_long_is_not_passed_over() -> None:
    broker = FakeBroker(more={"/dead_letters/messages": {"body": "x" * 17 * MIB}})
    async with fake_brokers(broker):
        upstream = Upstream(TLSFiles(), connect_timeout_s=5, request_timeout_s=5)
        pieces = download_lines(
            upstream,
            [broker.address],
            lambda at: api.dead_letters("dead", None, None, at, MAX_LINES),
            {"topic": "dead"},
            lambda body, _: ReadBody(body),
            RecordWriter("json", LINE_COLUMNS),
            has_more=True,
            missing={},
        )
        found = [json.loads(line) async for piece in pieces for line in piece.splitlines()]
        await upstream.aclose()
    assert found == [{"topic": "dead", "broker": broker.address, "gap": "limit"}]


# ---------------------------------------------------------------------- channels


async def test_messages_of_a_channel(tmp_path: Path) -> None:
    """More than the page shows, with the state that is selected."""
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.post("/topic/create", topic="t")
        assert await broker.post("/channel/create", topic="t", channel="c") == DONE
        await broker.tcp.publish("t", *(b"%d" % n for n in range(300)))
        await broker.send("POST", "/pub?topic=t&defer=3600000", body=b'{"late": "=1"}')
        await site.until_shown("/topics/t/c/messages", "deferred")
        path = "/topics/t/c/messages"
        assert len(await bodies(site, path)) == 301
        (late,) = records(await site.get(path, format="json", state="deferred"))
        assert (late["channel"], late["state"], late["body"]) == ("c", "deferred", '{"late": "=1"}')
        assert late["due_ns"] > late["timestamp_ns"]
        found = await site.get("/topics/t/c/deferred", format="csv")
        assert found.headers["content-disposition"] == 'attachment; filename="t-c-deferred.csv"'
        (row,) = rows(found)
        assert (row["id"], row["body"]) == (late["id"], '{"late": "=1"}')
        for page in path, "/topics/t/c/deferred":
            assert (await site.get((await site.page(page)).links["CSV"])).status_code == 200


async def dead_letters(api: Api, *sent: bytes) -> None:
    """Make these messages dead letters."""
    await api.post("/topic/create", topic="t")
    assert await api.post("/channel/create", topic="t", channel="c") == DONE
    rule = {"max_attempts": 1, "dead_letter_topic": "dead"}
    await api.send("PUT", "/channel/settings?topic=t&channel=c", body=json.dumps(rule).encode())
    await api.tcp.publish("t", *sent)
    await api.tcp.subscribe("t", "c", ready_count=len(sent))
    for _ in sent:
        message = await api.tcp.message()
        await api.tcp.send(b"REQ %s 0\n" % message.id)
    with trio.fail_after(PATIENCE_S):
        while sum(each["message_count"] for each in (await api.stats(topic="dead"))["topics"] or ()) < len(
            sent
        ):
            await trio.lowlevel.checkpoint()


async def test_dead_letters_with_their_filter(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await dead_letters(api, *(b"%d" % n for n in range(50)))
        await api.tcp.publish("dead", b"own")
        async with running_console([http_address(api)]) as site:
            page = await site.until_shown("/dead-letters/dead", "t/c")
            every = records(await site.get(page.links["JSON"]))
            assert [each["body"] for each in every] == [*(str(n) for n in range(50)), "own"]
            origin = every[0]["origin"]
            assert [origin[key] for key in ("topic", "channel", "reason")] == ["t", "c", "requeued"]
            assert "origin" not in every[-1]
            filtered = await site.page("/dead-letters/dead", origin="t/c")
            assert len(rows(await site.get(filtered.links["CSV"]))) == 50
            assert not records(await site.get("/dead-letters/dead", format="json", origin="other"))
            (topic,) = records(await site.get("/dead-letters", format="json"))
            assert topic == {"topic": "dead", "broker": http_address(api), "dead_letters": 51, "in_flight": 0}


# ---------------------------------------------------------------------- masks

FILES = (
    "/topics/clicks/messages?",
    "/topics/clicks/messages?order=oldest&q=level&",
    "/topics/clicks/messages?q=level%3Derror&kind=json&",
    "/topics/clicks/c/messages?",
    "/topics/clicks/c/deferred?",
    "/topics/dead/dead-letters/messages?",
)


@pytest.mark.parametrize("name", ["reader", "admin"])
async def test_no_file_has_masked_values(tmp_path: Path, name: str) -> None:
    """Also not those of viewers who may see them: they have to ask."""
    async with (
        masked_site(tmp_path, [BODY, gzip.compress(BODY), BODY[:-1]]) as (site, _),
        site.browser() as web,
    ):
        await web.log_in(name)
        for path in FILES:
            for form in ("csv", "json"):
                answer = await web.get(f"{path}format={form}")
                assert answer.status_code == 200, path
                assert "***" in answer.text or "withheld" in answer.text, path
                assert not leaks(answer.text), path
        answer = await web.get("/topics/clicks/messages?format=json&q=tops3cret")
        assert (answer.status_code, answer.text) == (200, "")


async def test_unmasked_files_need_the_role_and_are_audited(tmp_path: Path) -> None:
    async with masked_site(tmp_path, [BODY, b'{"level":"info"}']) as (site, _):
        async with site.browser() as reader, site.browser() as admin:
            await reader.log_in("reader")
            await admin.log_in("admin")
            path = "/topics/clicks/messages/unmasked?q=level%3Derror&kind=json"
            assert "unmasked" not in (await reader.get("/topics/clicks/messages")).text
            refused = await reader.post(path, {"format": "json"})
            assert refused.status_code == 403
            assert "This needs the role unmask on topic clicks." in refused.text
            assert (await admin.get(path)).status_code == 404
            assert (await admin.post(path, csrf="wrong")).status_code == 403
            assert (
                'action="/topics/clicks/messages/unmasked?q=level'
                in (await admin.get("/topics/clicks/messages?q=level%3Derror&kind=json")).text
            )
            found = await admin.post(path, {"format": "csv"})
            assert {row["body"] for row in rows(found)} == {BODY.decode()}
            lines = [line for line in site.audited() if "/messages/unmasked" in str(line.get("action"))]
        assert [(line["event"], line["name"], line["status"]) for line in lines] == [
            ("refused", "reader", 403),
            ("refused", "admin", 403),
            ("action", "admin", 200),
        ]
        assert lines[-1]["topic"] == "clicks"
