"""Tests for /topic/read and /topic/bounds, with httpx."""

import base64
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from broker.api import Api, running_api
from broker.state import damage
from broker.support import PATIENCE_S, connected, dpub, running_broker, settle
from soak import in_soak
from trio_nsq.log.files import Files
from trio_nsq.log.raw import RawStreamReader
from trio_nsq.log.records import RecordBatch
from trio_nsq.log.segment.identity import Identity
from trio_nsq.server.body_memory import ROOM_BYTES, SMALL_PIECES_BYTES


async def read(api: Api, **query: Any) -> list[dict[str, Any]]:
    """Return the lines of /topic/read for topic t."""
    answer = await api.get("/topic/read", topic="t", **query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson; charset=utf-8"
    return [json.loads(line) for line in answer.content.splitlines()]


async def sequences(api: Api, **query: Any) -> list[int]:
    """Return the sequences of the messages."""
    return [line["sequence"] for line in await read(api, **query)]


async def read_raw(api: Api, **query: Any) -> list[RecordBatch]:
    """Return the decoded raw form of /topic/read for topic t."""
    answer = await api.get("/topic/read", topic="t", format="raw", **query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    reader = RawStreamReader()
    batches = reader.receive_data(answer.content)
    reader.end()
    return batches


async def publish_numbers(api: Api, count: int, start: int = 0) -> None:
    """Publish messages whose bodies are their sequences, one per record."""
    for number in range(start, start + count):
        await api.tcp.publish("t", b"%d" % number)


def places(answer: httpx.Response) -> tuple[int, int, int | None]:
    """Return the first, start and end sequence in the headers."""
    first, start, end = (answer.headers.get(f"x-nsq-{name}-sequence") for name in ("first", "start", "end"))
    return int(first), int(start), int(end) if end is not None else None


# ---------------------------------------------------------------------- content


async def test_json_lines(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.publish("t", b"plain", '"quoted"\nä\u2028'.encode(), b"\xff\x00")
        await api.tcp.send(dpub("t", 60_000, b"later"))
        await api.tcp.ok()
        lines = await read(api)
        assert [list(line) for line in lines] == [
            ["topic", "id", "timestamp_ns", "attempts", "sequence", "due_ns", body]
            for body in ("body", "body", "body_base64", "body")
        ]
        assert [line["sequence"] for line in lines] == [0, 1, 2, 3]
        assert [line.get("body") for line in lines] == ["plain", '"quoted"\nä\u2028', None, "later"]
        assert base64.b64decode(lines[2]["body_base64"]) == b"\xff\x00"
        assert {(line["topic"], line["attempts"]) for line in lines} == {("t", 0)}
        assert [line["due_ns"] for line in lines[:3]] == [None] * 3
        assert 59 < (lines[3]["due_ns"] - lines[3]["timestamp_ns"]) / 1e9 < 61
        await api.post("/channel/create", topic="t", channel="c")
        await api.tcp.subscribe("t", "c", ready_count=10)
        for line in lines[:3]:
            message = await api.tcp.message()
            assert (message.id.decode(), message.timestamp_ns) == (line["id"], line["timestamp_ns"])


async def test_raw_form_equals_the_file(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", max_bytes_per_file=200) as api:
        await publish_numbers(api, 10)
        await api.tcp.publish("t", b"a", b"b", b"c")
        answer = await api.get("/topic/read", topic="t", format="raw")
        files = sorted((tmp_path / "d" / "topics" / "t.topic").glob("*.log"))
        assert len(files) > 3
        assert answer.content == b"".join(path.read_bytes() for path in files)
        assert [batch.base_sequence for batch in await read_raw(api)] == list(range(11))
        # Records are complete: the reader leaves out what it did not request.
        assert [batch.base_sequence for batch in await read_raw(api, until="11", **{"from": 9})] == [9, 10]
        assert [batch.base_sequence for batch in await read_raw(api, **{"from": 12})] == [10]


RANGES: list[tuple[dict[str, str], range | list[int], int, int]] = [
    ({}, range(10), 0, 10),
    ({"from": "earliest"}, range(10), 0, 10),
    ({"from": "latest"}, [], 10, 10),
    ({"from": "4"}, range(4, 10), 4, 10),
    ({"from": "10"}, [], 10, 10),
    ({"from": "11"}, [], 10, 10),
    ({"from": "99999999999999999999"}, [], 10, 10),
    ({"until": "4"}, range(4), 0, 4),
    ({"until": "0"}, [], 0, 0),
    ({"until": "99"}, range(10), 0, 10),
    ({"until": "earliest"}, [], 0, 0),
    ({"until": "latest"}, range(10), 0, 10),
    ({"from": "3", "until": "7"}, range(3, 7), 3, 7),
    ({"from": "7", "until": "3"}, [], 7, 7),
    ({"from": "-1h"}, range(10), 0, 10),
    ({"from": "-0"}, [], 10, 10),
    ({"until": "-1h"}, [], 0, 0),
    ({"from": "@0"}, range(10), 0, 10),
    ({"from": "3", "max_messages": "2"}, [3, 4], 3, 10),
    ({"max_messages": "100"}, range(10), 0, 10),
    ({"max_bytes": "1"}, [0], 0, 10),
    ({"wait": "0"}, range(10), 0, 10),
]  # fmt: skip
"""Queries, with the sequences in the answer, and where it starts and ends."""


async def test_range_of_sequences(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.publish("t", *(b"%d" % number for number in range(3)))
        await publish_numbers(api, 7, 3)
        for query, expected, start, end in RANGES:
            assert await sequences(api, **query) == list(expected), query
            answer = await api.get("/topic/read", topic="t", **query)
            assert places(answer) == (0, start, end), query
            assert answer.headers["x-nsq-next-sequence"] == "10"


async def test_by_time(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", max_bytes_per_file=200) as api:
        await publish_numbers(api, 12)
        times = [line["timestamp_ns"] for line in await read(api)]
        assert times == sorted(set(times))
        for number, time_ns in enumerate(times):
            at = f"@{time_ns // 10**9}.{time_ns % 10**9:09d}"
            assert await sequences(api, **{"from": at}) == list(range(number, 12))
            assert await sequences(api, until=at) == list(range(number))
            bounds = (await api.get("/topic/bounds", topic="t", at=at)).json()
            assert bounds["at_sequence"] == number


async def test_max_bytes_limits_the_answer_approximately(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await publish_numbers(api, 10)
        lines = (await api.get("/topic/read", topic="t")).content.splitlines(keepends=True)
        size = len(lines[0])
        for max_bytes, count in ((1, 1), (size, 1), (2 * size - 1, 1), (2 * size, 2), (5 * size + 1, 5)):
            answer = await api.get("/topic/read", topic="t", max_bytes=max_bytes)
            assert answer.content == b"".join(lines[:count])
        record = len((await api.get("/topic/read", topic="t", format="raw", max_bytes=1)).content) - 32
        assert len(await read_raw(api, max_bytes=3 * record)) == 3
        assert len(await read_raw(api, max_messages=4)) == 4


async def test_raw_record_larger_than_max_bytes_is_sent_if_it_is_the_first(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.publish("t", b"a", b"b", b"c")
        await api.tcp.publish("t", b"d")
        assert [batch.count for batch in await read_raw(api, max_messages=2)] == [3]
        assert [batch.count for batch in await read_raw(api, max_messages=3)] == [3]
        assert [batch.count for batch in await read_raw(api, max_messages=4)] == [3, 1]
        assert await sequences(api, max_messages=2) == [0, 1]


REFUSED = [
    ("/topic/read", 400, "MISSING_ARG_TOPIC"),
    ("/topic/read?topic=none", 404, "TOPIC_NOT_FOUND"),
    ("/topic/read?topic=t&from=x", 400, "INVALID_FROM: 'x' is not a sequence, earliest, latest, -DURATION such as "
     "-1h30m, or @TIME: Unix seconds or RFC 3339"),
    ("/topic/read?topic=t&until=-x", 400, "INVALID_UNTIL: 'x' is not a duration such as 500ms, 2s or 1m30s"),
    ("/topic/read?topic=t&format=xml", 400, "INVALID_FORMAT: 'xml' is neither jsonl nor raw"),
    ("/topic/read?topic=t&max_bytes=0", 400, "INVALID_MAX_BYTES: not a whole number of 1 or more"),
    ("/topic/read?topic=t&max_messages=-1", 400, "INVALID_MAX_MESSAGES: not a whole number of 1 or more"),
    ("/topic/read?topic=t&max_messages=%C2%B2", 400, "INVALID_MAX_MESSAGES: not a whole number of 1 or more"),
    ("/topic/read?topic=t&wait=1", 400, "INVALID_WAIT: '1' is not a duration such as 500ms, 2s or 1m30s"),
    ("/topic/read?topic=t&wait=61s", 400, "INVALID_WAIT: at most 60s"),
    ("/topic/bounds", 400, "MISSING_ARG_TOPIC"),
    ("/topic/bounds?topic=none", 404, "TOPIC_NOT_FOUND"),
    ("/topic/bounds?topic=t&at=", 400, "INVALID_AT: '' is not a sequence, earliest, latest, -DURATION such as "
     "-1h30m, or @TIME: Unix seconds or RFC 3339"),
]  # fmt: skip
"""Targets, with the status and the error of their answers."""


async def test_refused_requests(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        for target, status, error in REFUSED:
            answer = await api.send("GET", target)
            assert (answer.status_code, answer.json()) == (status, {"message": error}), target


async def test_bounds(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", max_bytes_per_file=200) as api:
        await api.post("/topic/create", topic="t")
        assert (await api.get("/topic/bounds", topic="t")).json() == {
            "topic": "t",
            "first_sequence": 0,
            "disk_first_sequence": 0,
            "next_sequence": 0,
            "first_timestamp_ns": None,
            "last_timestamp_ns": None,
            "bytes": 0,
            "segments": 0,
            "incarnation": None,
        }
        await publish_numbers(api, 10)
        lines = await read(api)
        files = sorted((tmp_path / "d" / "topics" / "t.topic").glob("*.log"))
        identity = Identity.read(Files(), files[0].parent)
        assert identity is not None
        assert (await api.get("/topic/bounds", topic="t", at="latest")).json() == {
            "topic": "t",
            "first_sequence": 0,
            "disk_first_sequence": 0,
            "next_sequence": 10,
            "first_timestamp_ns": lines[0]["timestamp_ns"],
            "last_timestamp_ns": lines[-1]["timestamp_ns"],
            "bytes": sum(path.stat().st_size for path in files),
            "segments": len(files),
            "incarnation": identity.incarnation.hex(),
            "at_sequence": 10,
            "bytes_from_at": 0,
        }
        ahead = [
            (await api.get("/topic/bounds", topic="t", at=at)).json()["bytes_from_at"] for at in range(10)
        ]
        assert ahead == sorted(ahead, reverse=True)
        assert ahead[0] == sum(path.stat().st_size for path in files) > ahead[5] > ahead[9] > 0


async def test_reading_changes_no_channel_or_topic(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.publish("t", b"a", b"b")
        await read(api)
        await read_raw(api)
        await api.get("/topic/bounds", topic="t", at="-1h")
        (topic,) = (await api.stats(topic="t"))["topics"]
        assert (topic["depth"], topic["message_count"], topic["channels"]) == (2, 2, [])


# ---------------------------------------------------------------------- waiting


@asynccontextmanager
async def streamed(api: Api, **query: Any) -> AsyncIterator[httpx.Response]:
    async with api.client.stream("GET", "/topic/read", params={"topic": "t", **query}) as answer:
        yield answer


async def test_new_message_is_sent_at_once(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await publish_numbers(api, 1)
        async with streamed(api, wait="60s", until="4") as answer:
            assert places(answer) == (0, 0, 4)
            lines = answer.aiter_lines()
            for number in range(1, 5):
                assert json.loads(await anext(lines))["body"] == str(number - 1)
                await publish_numbers(api, 1, number)
            assert [line async for line in lines] == []  # the end is reached: no more waiting


async def test_answer_ends_after_the_idle_time(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await publish_numbers(api, 2)
        began_s = trio.current_time()
        assert await sequences(api, wait="50ms") == [0, 1]
        assert trio.current_time() - began_s >= 0.05
        async with streamed(api, wait="10ms", **{"from": "latest"}) as answer:
            assert places(answer) == (0, 2, None)
            assert await answer.aread() == b""


async def test_max_messages_ends_the_wait(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await publish_numbers(api, 3)
        with trio.fail_after(PATIENCE_S):
            assert await sequences(api, wait="60s", max_messages=3) == [0, 1, 2]
            assert len(await read_raw(api, wait="60s", max_messages=3)) == 3


async def test_each_message_is_sent_once_during_publishes(tmp_path: Path) -> None:
    """With small segments, so that files begin and end meanwhile."""
    async with running_broker(tmp_path / "d", max_bytes_per_file=2000) as bound:
        total, publishers = 400, 4
        bodies: dict[str, list[str]] = {"jsonl": [], "raw": []}

        async def publish(number: int) -> None:
            async with connected(bound.tcp_address) as client:
                for index in range(total // publishers):
                    await client.publish("t", b"%d.%d" % (number, index))

        async def follow(client: httpx.AsyncClient, form: str) -> None:
            query = {"topic": "t", "wait": "20s", "format": form, "until": str(total)}
            async with client.stream("GET", "/topic/read", params=query) as answer:
                reader, rest = RawStreamReader(), b""
                async for piece in answer.aiter_raw():
                    if form == "raw":
                        for batch in reader.receive_data(piece):
                            bodies[form] += [body.decode() for body in batch.messages.bodies()]
                    else:
                        *lines, rest = (rest + piece).split(b"\n")
                        bodies[form] += [json.loads(line)["body"] for line in lines]

        async with httpx.AsyncClient(base_url=f"http://{bound.http_address}", timeout=PATIENCE_S) as client:
            await client.post("/topic/create", params={"topic": "t"})
            async with trio.open_nursery() as nursery:
                for form in bodies:
                    nursery.start_soon(follow, client, form)
                for number in range(publishers):
                    nursery.start_soon(publish, number)
        assert bodies["jsonl"] == bodies["raw"]
        assert sorted(bodies["raw"]) == sorted(
            f"{number}.{index}" for number in range(publishers) for index in range(total // publishers)
        )


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_stop_does_not_wait_for_readers(tmp_path: Path, sync: str) -> None:
    began_s = trio.current_time()
    async with running_api(tmp_path / "d", sync=sync) as api:
        await publish_numbers(api, 1)
        async with trio.open_nursery() as nursery:

            async def follow() -> None:
                with pytest.raises(httpx.TransportError):
                    await sequences(api, wait="60s")

            nursery.start_soon(follow)
            await settle()
            nursery.cancel_scope.cancel()
    assert trio.current_time() - began_s < PATIENCE_S


# ---------------------------------------------------------------------- missing messages


async def test_after_a_restart(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", max_bytes_per_file=200) as api:
        await publish_numbers(api, 10)
        before = await read(api)
    async with running_api(tmp_path / "d", max_bytes_per_file=200) as api:
        await publish_numbers(api, 2, 10)
        after = await read(api)
        assert after[:10] == before
        assert [line["sequence"] for line in after] == list(range(12))


async def test_damage_in_the_middle_is_reported(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await publish_numbers(api, 3)
        await api.tcp.publish("t", b"bad", b"luck")
        await publish_numbers(api, 2, 5)
    damage(tmp_path / "d" / "topics" / "t.topic", b"luck")
    async with running_api(tmp_path / "d") as api:
        gap = {"topic": "t", "gap": "damaged", "first_sequence": 3, "next_sequence": 5}
        lines = await read(api)
        assert lines[3] == gap
        assert [line.get("body") for line in lines] == ["0", "1", "2", None, "5", "6"]
        assert (await read(api, **{"from": 4}))[0] == gap | {"first_sequence": 4}
        assert await read(api, **{"from": 3, "until": 4}) == [gap | {"next_sequence": 4}]
        assert [batch.base_sequence for batch in await read_raw(api)] == [0, 1, 2, 5, 6]
        assert (await api.get("/topic/bounds", topic="t")).json()["next_sequence"] == 7


async def test_deleted_messages_are_reported(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", max_bytes_per_file=1) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await publish_numbers(api, 10)
        await api.post("/channel/empty", topic="t", channel="c")
        first = (await api.get("/topic/bounds", topic="t")).json()["first_sequence"]
        assert first == 9
        answer = await api.get("/topic/read", topic="t", **{"from": 2})
        assert places(answer) == (9, 9, 10)
        gap, line = (json.loads(line) for line in answer.content.splitlines())
        assert gap == {"topic": "t", "gap": "discarded", "first_sequence": 2, "next_sequence": 9}
        assert line["sequence"] == 9
        for words in ("earliest", "-1h", "@0"):  # they are before the requested start
            assert await sequences(api, **{"from": words}) == [9]
        assert (await read(api, until=5, **{"from": 2}))[0]["next_sequence"] in (5, 9)


async def test_segments_deleted_during_a_slow_read(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", max_bytes_per_file=1_000_000, cache_bytes=1_000_000) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        body = b"x" * 100_000
        for number in range(300):
            await api.tcp.publish("t", b"%d " % number + body)
        async with streamed(api) as answer:
            lines = answer.aiter_lines()
            assert json.loads(await anext(lines))["sequence"] == 0
            await settle()  # it has sent what fits into the buffers in between
            await api.post("/channel/empty", topic="t", channel="c")
            found = [json.loads(line) async for line in lines]
        at = 1
        gaps = [line for line in found if "gap" in line]
        for line in found:  # without a gap, nothing is missing
            assert line.get("first_sequence", line.get("sequence")) == at
            at = line.get("next_sequence", at + 1)
        assert at == 300
        assert {gap["gap"] for gap in gaps} == {"discarded"}
        first = (await api.get("/topic/bounds", topic="t")).json()["first_sequence"]
        assert gaps[-1]["next_sequence"] == first > 250


async def test_deleted_topic_ends_the_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_api(tmp_path / "d", max_bytes_per_file=1_000_000, cache_bytes=1_000_000) as api:
        for _ in range(200):
            await api.tcp.publish("t", b"x" * 100_000)
        async with streamed(api, wait="60s") as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            await settle()
            assert await api.post("/topic/delete", topic="t") == (200, "")
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in pieces:
                    pass
    warnings = [record.getMessage() for record in caplog.records if "cut off" in record.getMessage()]
    assert warnings == [
        "the response to GET /topic/read was cut off: topic t was deleted, or the broker is stopping"
    ]


async def test_topic_deleted_while_a_reader_waits(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await publish_numbers(api, 1)
        async with streamed(api, wait="60s") as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            await api.post("/topic/delete", topic="t")
            with trio.fail_after(PATIENCE_S), pytest.raises(httpx.RemoteProtocolError):
                await anext(lines)


async def test_ephemeral_topics(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", mem_queue_size=5) as api:
        for number in range(12):
            await api.tcp.publish("t#ephemeral", b"%d" % number)
        answer = await api.get("/topic/read", topic="t#ephemeral", **{"from": 3})
        assert places(answer) == (7, 7, 12)
        gap, *lines = (json.loads(line) for line in answer.content.splitlines())
        assert (gap["gap"], gap["first_sequence"], gap["next_sequence"]) == ("discarded", 3, 7)
        assert [line["body"] for line in lines] == ["7", "8", "9", "10", "11"]
        raw = await api.get("/topic/read", topic="t#ephemeral", format="raw")
        batches = RawStreamReader().receive_data(raw.content)
        assert [batch.messages.bodies() for batch in batches] == [[b"%d" % number] for number in range(7, 12)]
        bounds = (await api.get("/topic/bounds", topic="t#ephemeral", at="-1h")).json()
        assert (bounds["first_sequence"], bounds["next_sequence"], bounds["at_sequence"]) == (7, 12, 7)
        assert bounds["segments"] == 0


# ---------------------------------------------------------------------- cost


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jsonl", "raw"])
async def test_large_topic_is_read_in_little_memory(tmp_path: Path, form: str) -> None:
    """By a reader that first reads nothing, and then little by little."""
    size = 0
    async with running_broker(tmp_path / "d", cache_bytes=1_000_000, mem_queue_size=10) as bound:
        async with connected(bound.tcp_address) as client:
            bodies = [b"%05d" % number * 400 for number in range(200)]
            for _ in range(30):
                await client.publish("t", *bodies)
        host, _, port = str(bound.http_address).rpartition(":")
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                head = "Host: localhost\r\nConnection: close\r\n\r\n"
                request = f"GET /topic/read?topic=t&format={form} HTTP/1.1\r\n{head}"
                await stream.send_all(request.encode())
                await settle()
                with trio.fail_after(10 * PATIENCE_S):
                    while data := await stream.receive_some(100_000):
                        size += len(data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert size > 12_000_000
    assert peak - before < 6_000_000


async def test_clients_are_served_during_a_read(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        for _ in range(5):
            await api.tcp.publish("t", *(b"%d" % number for number in range(4000)))
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        async with trio.open_nursery() as nursery:
            async with streamed(api) as answer:
                nursery.start_soon(take_turns)
                pieces = [piece async for piece in answer.aiter_raw()]
            nursery.cancel_scope.cancel()
        assert b"".join(pieces).count(b"\n") == 20_000
        assert turns >= 20_000 / 200


async def test_reading_does_not_fill_the_cache(tmp_path: Path) -> None:
    """Consumers will not need the same messages."""
    async with running_api(tmp_path / "d") as api:
        for number in range(50):
            await api.tcp.publish("t", b"%d " % number + b"x" * 10_000)
    async with running_api(tmp_path / "d") as api:
        await read(api)
        assert (await api.get("/debug/memory")).json()["cache"]["bytes"] == 0


LARGE_PIECES = (1_000_000, 60, ROOM_BYTES + 30_000_000)
SMALL_PIECES = (100_000, 300, SMALL_PIECES_BYTES + 20_000_000)
READ, READ_RAW = "/topic/read?topic=t", "/topic/read?topic=t&format=raw"
PEEK = "/channel/peek?topic=t&channel=c"


@pytest.mark.parametrize(
    ("path", "pieces"),
    [
        *((READ, SMALL_PIECES), (READ_RAW, LARGE_PIECES), (PEEK, LARGE_PIECES)),
        *in_soak((READ, LARGE_PIECES), (READ_RAW, SMALL_PIECES), (PEEK, SMALL_PIECES)),
    ],
)
async def test_readers_that_do_not_read(tmp_path: Path, path: str, pieces: tuple[int, int, int]) -> None:
    """They hold a limited amount of memory, and do not keep it from others."""
    size, count, most = pieces
    body = b"x" * size  # more messages than the system buffers for a client
    async with running_api(tmp_path / "d") as api:
        stalled = []
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        for _ in range(17):
            await api.post("/pub", topic="t", body=body)
        url = api.client.base_url
        expected = len((await api.client.get(path)).content)
        tracemalloc.start()
        try:
            for _ in range(count):
                sock = trio.socket.socket()
                stalled.append(sock)
                sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 4096)
                await sock.connect((url.host, url.port))
                await sock.send(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            with trio.fail_after(PATIENCE_S):
                assert len((await api.client.get(path)).content) == expected
            assert tracemalloc.get_traced_memory()[1] < most
        finally:
            tracemalloc.stop()
            for sock in stalled:
                sock.close()
