"""The message browser in front of real brokers: lists, single messages, commands, downloads."""

import gc
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trio

from broker.api import Api, running_api
from broker.retention import FAST
from broker.state import damage
from broker.support import PATIENCE_S, connected
from console.message_support import all_pages, browsing, http_address, listed
from processes.shell import CLIENT, serving

MARKUP = "</td></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'`$(id)&lt;"
HOSTILE = [
    MARKUP.encode(),
    json.dumps({MARKUP: [MARKUP]}).encode(),
    "\u202eabc \u05d0\u2066".encode(),
    b"\xff\xfe\x00\x80 invalid \xc3(",
    bytes(range(256)),
    b"x" * (1024 * 1024),
    b"[" * 20_000,
    b'{"n": 12345678901234567890.123, "n": 1e999, "nan": NaN}',
    b"\x1b]0;title\x07\x1b[201~\nrm -rf /",
    b"\x00" * 5000,
    b"--help",
    b"@/etc/passwd",
    b'it\'s $HOME `id` \\ "quoted"',
]


# ---------------------------------------------------------------------- lists


async def test_pages_have_each_message_of_all_brokers_once_newest_first(tmp_path: Path) -> None:
    async with browsing(tmp_path, 2) as (site, brokers):
        for number in range(70):
            await brokers[number % 3 == 0].tcp.publish("t", b"%d" % number)
        await site.until_shown("/topics/t/messages", *map(http_address, brokers))
        first = await site.page("/topics/t/messages", count=10)
        assert "Newer" not in first.links
        second = await site.follow(first, "Older")
        found = await all_pages(site, first, "Older")
        assert len(found) == len(set(found)) == 70
        addresses = [http_address(each) for each in brokers]
        expected = [addresses[number % 3 == 0] for number in range(70)]
        assert [address for address, _ in found] == expected[::-1]
        assert listed(await site.follow(second, "Newer")) == listed(first)
        oldest = await site.page("/topics/t/messages", count=10, order="oldest")
        assert await all_pages(site, oldest, "Newer") == found[::-1]


async def test_new_messages_appear_behind_the_end(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.tcp.publish("t", b"a")
        page = await site.page("/topics/t/messages", order="oldest")
        await broker.tcp.publish("t", b"b")
        assert [sequence for _, sequence in listed(await site.follow(page, "Newer"))] == [1]


async def test_a_list_begins_at_a_sequence_or_time_on_one_broker(tmp_path: Path) -> None:
    async with browsing(tmp_path, 2) as (site, brokers):
        for broker in brokers:
            await broker.tcp.publish("t", *(b"%d" % n for n in range(20)))
        address = http_address(brokers[1])
        await site.until_shown("/topics/t/messages", *map(http_address, brokers))
        page = await site.page("/topics/t/messages", order="oldest", at="17", broker=address)
        assert listed(page) == [(address, 17), (address, 18), (address, 19)]
        page = await site.page("/topics/t/messages", at="2", broker=address)
        assert listed(page) == [(address, 1), (address, 0)]
        assert len(listed(await site.page("/topics/t/messages", at="1h", order="oldest", count=100))) == 40
        assert "No messages here" in (await site.page("/topics/t/messages", at="1h")).text
        wrong = await site.page("/topics/t/messages", status=400, at="yesterday")
        assert "'yesterday' is not a position" in wrong.text


async def test_looking_takes_nothing(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.post("/topic/create", topic="t")
        await broker.post("/channel/create", topic="t", channel="c")
        await broker.tcp.publish("t", b"a", b"b")
        before = await waiting(broker)
        await site.page("/topics/t/messages")
        await site.page("/topics/t/messages/0")
        await site.page("/topics/t/c/messages")
        await site.page("/topics/t/messages", q="a")
        assert await waiting(broker) == before == (2, 0, 0, 0)


async def waiting(broker: Api) -> tuple[int, ...]:
    """Return the numbers of channel t/c that a delivery changes."""
    found = await broker.channel("t", "c")
    return tuple(found[name] for name in ("depth", "in_flight_count", "requeue_count", "timeout_count"))


async def test_hostile_bodies_do_no_harm(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        for body in HOSTILE:
            await broker.post("/pub", body, topic="t")
        clean = (await site.page("/topics/t/messages", at="0")).tags
        for page in (
            await site.page("/topics/t/messages", count=100),
            *[await site.page(f"/topics/t/messages/{n}") for n in range(len(HOSTILE))],
        ):
            assert not {"img", "iframe"} & set(page.tags)
            assert page.tags.count("script") == clean.count("script")
        for number, body in enumerate(HOSTILE):
            answer = await site.get(f"/topics/t/messages/{number}/body")
            assert answer.content == body
            assert answer.headers["content-type"] == "application/octet-stream"
            assert answer.headers["content-disposition"] == f'attachment; filename="t-{number}.bin"'
            assert answer.headers["x-content-type-options"] == "nosniff"


async def test_large_messages_make_short_pages_that_continue(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        for number in range(24):
            await broker.post("/pub", b"%d " % number + b"x" * 1_000_000, topic="t")
        for order, link in (("newest", "Older"), ("oldest", "Newer")):
            first = await site.page("/topics/t/messages", order=order)
            assert 10 < len(listed(first)) < 24
            assert len(set(await all_pages(site, first, link))) == 24


async def test_gaps_are_shown(tmp_path: Path) -> None:
    async with running_api(tmp_path / "0") as broker:
        await broker.tcp.publish("t", b"a0", b"a1")
        await broker.tcp.publish("t", b"bad", b"luck")
        await broker.tcp.publish("t", b"b0")
    damage(tmp_path / "0" / "topics" / "t.topic", b"luck")
    async with browsing(tmp_path) as (site, _):
        for order in ("newest", "oldest"):
            page = await site.page("/topics/t/messages", order=order)
            assert {sequence for _, sequence in listed(page)} == {0, 1, 4}
            assert "2 messages are damaged or missing in the log: sequence 2 to 3." in page.text
        assert "Message 2 is damaged or missing in the log" in (await site.page("/topics/t/messages/2")).text


async def test_retention_that_moves_under_the_pages_is_shown(tmp_path: Path) -> None:
    async with browsing(tmp_path, **FAST) as (site, (broker,)):
        await broker.post("/topic/create", topic="t")
        await broker.client.put("/topic/settings", params={"topic": "t"}, content=b'{"retention_bytes": -1}')
        await broker.post("/channel/create", topic="t", channel="c")
        for n in range(40):
            await broker.tcp.publish("t", b"%03d" % n * 300)
        middle = await site.page("/topics/t/messages", order="oldest", count=10)
        await broker.post("/channel/empty", topic="t", channel="c")
        settings = b'{"retention_bytes": 0, "retention_time_ms": 0}'
        await broker.client.put("/topic/settings", params={"topic": "t"}, content=settings)
        with trio.fail_after(PATIENCE_S):
            while (first := await first_sequence(broker)) < 30:
                await trio.lowlevel.checkpoint()
        page = await site.follow(middle, "Newer")
        kept_from = (
            min(sequence for _, sequence in listed(page)) if listed(page) else await first_sequence(broker)
        )
        assert f"no longer kept (retention): sequence 10 to {kept_from - 1}." in page.text
        gone = await site.page("/topics/t/messages/3")
        assert "Message 3 is no longer kept" in gone.text
        assert (await site.page("/topics/t/messages")).text
        assert first <= kept_from


async def first_sequence(broker: Api) -> int:
    """Return the oldest sequence of topic t."""
    found: int = (await broker.get("/topic/bounds", topic="t")).json()["first_sequence"]
    return found


async def test_what_does_not_exist_is_said(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.tcp.publish("t", b"a")
        await site.page("/topics/t/messages")
        for path in (
            "/topics/no/messages",
            "/topics/t/no/messages",
            "/topics/no/messages/1",
            "/topics/no/publish",
        ):
            assert "There is no" in (await site.page(path, status=404)).text
        assert "ends before message 7" in (await site.page("/topics/t/messages/7", status=404)).text
        assert "not the sequence" in (await site.page("/topics/t/messages/1x", status=404)).text
        await site.page("/topics/t/messages/" + "9" * 5000, status=404)
        await site.page("/topics/t/messages", status=400, before="broken")
        await site.page("/topics/t/messages", status=404, broker="169.254.169.254:80")
        await broker.post("/topic/delete", topic="t")
        gone = await site.get("/topics/t/messages")
        assert gone.status_code in (200, 404)
        assert "There is no" in gone.text or "TOPIC_NOT_FOUND" in gone.text


async def test_a_cursor_cannot_name_a_foreign_server(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)), running_api(tmp_path / "foreign") as foreign:
        await broker.tcp.publish("t", b"a")
        await foreign.tcp.publish("t", b"b")
        page = await site.page("/topics/t/messages", before=f"{http_address(foreign)}~5,@{10**19 - 1}")
        assert [address for address, _ in listed(page)] == [http_address(broker)]


# ---------------------------------------------------------------------- one message


async def test_metadata_of_a_message(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.tcp.publish("t", b"a", b"b", b"c")
        await broker.post("/pub", b"later", topic="t", defer=3_600_000)
        await broker.client.post(
            "/mpub", params={"topic": "t", "producer": "p1", "number": "7"}, content=b"x\ny"
        )
        page = await site.page("/topics/t/messages/1")
        line = json.loads((await broker.get("/topic/read", topic="t", **{"from": 1, "until": 2})).text)
        assert f"Id {line['id']}" in page.text
        assert "sequence 0 to 2" in page.text
        assert "Deferred until" in (await site.page("/topics/t/messages/3")).text
        assert "Idempotent producer p1, batch 7" in (await site.page("/topics/t/messages/4")).text
        assert (
            (await site.get("/topics/t/messages", q=line["id"], kind="id"))
            .headers["location"]
            .startswith("/topics/t/messages/1?")
        )
        for wrong in ("x", "0" * 16):
            assert "id" in (await site.page("/topics/t/messages", status=400, q=wrong, kind="id")).text


async def test_an_id_is_found_among_many(tmp_path: Path) -> None:
    async with browsing(tmp_path, 2) as (site, brokers):
        for broker in brokers:
            for _ in range(30):
                await broker.tcp.publish("t", *[b"x"] * 17)
            for _ in range(15):
                await broker.tcp.publish("t", b"x")
        await site.until_shown("/topics/t/messages", *map(http_address, brokers))
        lines = (await brokers[1].get("/topic/read", topic="t")).text.splitlines()
        for number in (0, 1, 16, 17, 250, *range(505, 525)):
            wanted = json.loads(lines[number])["id"]
            answer = await site.get(
                "/topics/t/messages", q=wanted, kind="id", broker=http_address(brokers[1])
            )
            assert answer.status_code == 303
            assert (
                f"/messages/{number}?broker={http_address(brokers[1]).replace(':', '%3A')}"
                in answer.headers["location"]
            )


async def test_dead_letters_tell_their_origin(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.post("/topic/create", topic="t")
        await broker.post("/channel/create", topic="t", channel="c")
        rule = b'{"max_attempts": 1, "dead_letter_topic": "dead"}'
        await broker.client.put("/channel/settings", params={"topic": "t", "channel": "c"}, content=rule)
        await broker.post("/pub", b"fails", topic="t")
        async with connected("%s:%d" % broker.tcp.stream.socket.getpeername()[:2]) as consumer:
            await consumer.subscribe("t", "c", ready_count=1)
            message = await consumer.message()
            await consumer.send(b"REQ %s 0\n" % message.id)
            with trio.fail_after(PATIENCE_S):
                while not (await broker.get("/topic/read", topic="dead")).text:
                    await trio.lowlevel.checkpoint()
        page = await site.page("/topics/dead/messages/0")
        assert f"Dead letter of t/c, sequence 0, id {message.id.decode()}" in page.text
        assert "Attempts there 1; the last one ended as requeued" in page.text
        assert "dead letter of t/c" in (await site.page("/topics/dead/messages")).text


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a `qcli` for shells, which starts as `processes.shell` says."""
    folder = tmp_path_factory.mktemp("programs")
    with serving() as path:
        client = shlex.join([sys.executable, "-I", "-S", str(CLIENT), str(path)])
        (folder / "qcli").write_text(f'#!/bin/sh\nexec {client} "$@"\n')
        (folder / "qcli").chmod(0o755)
        yield folder


async def test_the_command_lines_do_what_they_say(tmp_path: Path, programs: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        for number, body in enumerate(HOSTILE):
            topic = f"t{number}"
            await broker.post("/pub", body, topic=topic)
            (tmp_path / "body.bin").write_bytes(body)
            page = await site.page(f"/topics/{topic}/messages/0")
            assert len(page.commands) == 4
            assert all(command.isprintable() for command in page.commands)
            reads, publishes = page.commands[:2], page.commands[2:]
            if number not in (0, 3):
                reads = reads[:1]  # each start of a shell takes a while
                publishes = publishes[:1]
            for command in reads:
                answer = json.loads((await run(command, tmp_path, programs)).splitlines()[0])
                assert answer["sequence"] == 0
            for command in publishes:
                await run(command, tmp_path, programs)
            for sequence in range(1, 1 + len(publishes)):
                assert (await site.get(f"/topics/{topic}/messages/{sequence}/body")).content == body


async def run(command: str, folder: Path, programs: Path) -> bytes:
    """Run a command line in a shell, with the qcli of this project."""
    path = f"{programs}:{os.environ['PATH']}"
    with trio.fail_after(60):
        done = await trio.run_process(
            ["bash", "-o", "pipefail", "-c", command],
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            cwd=folder,
            env={**os.environ, "PATH": path},
        )
    assert done.returncode == 0, done.stderr
    return bytes(done.stdout)


async def test_a_range_is_downloaded_as_json_lines(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.tcp.publish("t", *(b"%d" % n for n in range(500)))
        page = await site.page("/topics/t/messages", order="oldest", count=100, at="5")
        answer = await site.client.get(page.links["Download"])
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert [line["sequence"] for line in lines] == list(range(5, 105))
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert answer.headers["content-disposition"] == 'attachment; filename="t-5-105.ndjson"'
        assert (await site.get("/topics/t/messages.ndjson", **{"from": "x", "until": "5"})).status_code == 400
        assert (await site.get("/topics/no/messages.ndjson", **{"from": 0, "until": 5})).status_code == 404


async def test_a_download_that_the_browser_ends_leaves_no_task(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        for _ in range(60):
            await broker.post("/pub", b"x" * 1_000_000, topic="t")
        before = trio.lowlevel.current_statistics().tasks_living
        host, port = site.client.base_url.host, site.client.base_url.port
        assert port is not None
        stream = await trio.open_tcp_stream(host, port)
        await stream.send_all(
            b"GET /topics/t/messages.ndjson?from=0&until=60 HTTP/1.1\r\nHost: %s:%d\r\n\r\n"
            % (host.encode(), port)
        )
        assert (await stream.receive_some(15)).startswith(b"HTTP/1.1 200")
        await trio.aclose_forcefully(stream)
        with trio.fail_after(PATIENCE_S):
            while trio.lowlevel.current_statistics().tasks_living > before:
                await trio.lowlevel.checkpoint()
        gc.collect()  # warns of generators that were not finished, which fails the test


async def test_a_download_that_breaks_is_not_complete(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        for _ in range(60):
            await broker.post("/pub", b"x" * 1_000_000, topic="t")

        async def download() -> None:
            async with site.client.stream("GET", "/topics/t/messages.ndjson?from=0&until=60") as answer:
                assert answer.status_code == 200
                async for _ in answer.aiter_raw():
                    await broker.post("/topic/delete", topic="t")

        with pytest.raises(httpx.RemoteProtocolError):
            await download()
