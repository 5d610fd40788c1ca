"""Tests for /channel/peek and /channel/seek."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from broker.api import Api, running_api
from broker.state import damage
from broker.support import FailingFiles, HeldFiles, connected, dpub, settle
from trio_nsq.broker.state.seek import Seek
from trio_nsq.broker.storage.data_folder import decode_state


async def prepare(api: Api, count: int = 6) -> None:
    """Create topic t with channel c, and messages whose bodies are their sequences, one per record."""
    await api.post("/topic/create", topic="t")
    await api.post("/channel/create", topic="t", channel="c")
    for number in range(count):
        await api.tcp.publish("t", b"%d" % number)


async def peek(api: Api, topic: str = "t", **query: Any) -> list[dict[str, Any]]:
    answer = await api.get("/channel/peek", topic=topic, channel="c", **query)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.content.splitlines()]


async def seek(api: Api, to: str, **query: Any) -> httpx.Response:
    return await api.send(
        "POST", f"/channel/seek?{httpx.QueryParams(topic='t', channel='c', to=to, **query)}"
    )


def tcp_address(api: Api) -> str:
    """For a second client."""
    host, port = api.tcp.stream.socket.getpeername()
    return f"{host}:{port}"


def brief(lines: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    return [(line["state"], line["body"], line["attempts"]) for line in lines]


# ---------------------------------------------------------------------- peek


async def test_peek(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await prepare(api, 4)
        async with connected(tcp_address(api)) as client:
            await client.subscribe("t", "c", ready_count=3)
            ids = [(await client.message()).id for _ in range(3)]
            await client.send(b"RDY 0\nREQ %s 0\nREQ %s 60000\n" % (ids[1], ids[0]))
            await client.nothing_more()
            await api.tcp.send(dpub("t", 30_000, b"later"))
            await api.tcp.ok()
            lines = await peek(api)
            assert brief(lines) == [
                ("requeued", "1", 1),
                ("fresh", "3", 0),
                ("deferred", "later", 0),
                ("deferred", "0", 1),
            ]
            assert [list(line) for line in lines] == [
                ["topic", "id", "timestamp_ns", "attempts", "sequence", "due_ns", "channel", "state", "body"]
            ] * 4
            assert [line["sequence"] for line in lines] == [1, 3, 4, 0]
            assert [line["id"] for line in lines[::3]] == [ids[1].decode(), ids[0].decode()]
            assert [line["due_ns"] is None for line in lines] == [True, True, False, False]
            assert {(line["topic"], line["channel"]) for line in lines} == {("t", "c")}
            stats = await api.channel("t", "c")
            assert (stats["depth"], stats["in_flight_count"], stats["deferred_count"]) == (2, 1, 2)


async def test_peek_with_filters(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await prepare(api, 15)
        await api.tcp.send(dpub("t", 30_000, b"later"))
        await api.tcp.ok()
        assert [line["body"] for line in await peek(api)] == [str(number) for number in range(10)]
        assert [line["body"] for line in await peek(api, max_messages=2)] == ["0", "1"]
        assert len(await peek(api, max_messages=10_000)) == 16
        assert brief(await peek(api, state="deferred")) == [("deferred", "later", 0)]
        assert brief(await peek(api, state="deferred,fresh", max_messages=1)) == [("fresh", "0", 0)]
        assert await peek(api, state="requeued") == []


@pytest.mark.parametrize(
    ("target", "status", "error"),
    [
        ("?channel=c", 400, "MISSING_ARG_TOPIC"),
        ("?topic=t", 400, "MISSING_ARG_CHANNEL"),
        ("?topic=none&channel=c", 404, "TOPIC_NOT_FOUND"),
        ("?topic=t&channel=none", 404, "CHANNEL_NOT_FOUND"),
        ("?topic=t&channel=c&max_messages=0", 400, "INVALID_MAX_MESSAGES: not a whole number of 1 or more"),
        ("?topic=t&channel=c&max_messages=10001", 400, "INVALID_MAX_MESSAGES: at most 10000"),
        ("?topic=t&channel=c&state=x", 400, "INVALID_STATE: 'x' is not a comma-separated list of requeued, fresh, "
         "deferred"),
    ],
)  # fmt: skip
async def test_invalid_peeks(tmp_path: Path, target: str, status: int, error: str) -> None:
    async with running_api(tmp_path / "d") as api:
        await prepare(api, 0)
        answer = await api.send("GET", f"/channel/peek{target}")
        assert (answer.status_code, answer.json()) == (status, {"message": error})


async def test_peek_at_damaged_messages(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await prepare(api, 2)
        await api.tcp.publish("t", b"bad", b"luck")
        await api.tcp.publish("t", b"4")
    damage(tmp_path / "d" / "topics" / "t.topic", b"luck")
    async with running_api(tmp_path / "d") as api:
        lines = await peek(api)
        gap = {"topic": "t", "gap": "damaged", "channel": "c", "state": "fresh"}
        assert lines[2:4] == [
            gap | {"first_sequence": 2, "next_sequence": 3},
            gap | {"first_sequence": 3, "next_sequence": 4},
        ]
        assert [line.get("body") for line in lines] == ["0", "1", None, None, "4"]


async def test_peek_in_an_ephemeral_topic(tmp_path: Path) -> None:
    """Its log may have dropped messages that the channel still has."""
    async with running_api(tmp_path / "d", mem_queue_size=2) as api:
        await api.post("/topic/create", topic="t#ephemeral")
        await api.post("/channel/create", topic="t#ephemeral", channel="c")
        async with connected(tcp_address(api)) as client:
            await client.subscribe("t#ephemeral", "c", ready_count=1)
            await api.tcp.publish("t#ephemeral", b"0", b"first")
            message = await client.message()
            await client.send(b"RDY 0\nREQ %s 60000\n" % message.id)
            await client.nothing_more()
            for number in range(2, 6):
                await api.tcp.publish("t#ephemeral", b"%d" % number)
            lines = await peek(api, "t#ephemeral")
            assert brief(lines) == [("fresh", "4", 0), ("fresh", "5", 0), ("deferred", "0", 1)]
            assert lines[2]["id"] == message.id.decode()
            assert lines[2]["timestamp_ns"] == message.timestamp_ns


async def test_peek_at_scattered_and_many_messages(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", max_bytes_per_file=3000) as api:
        await prepare(api, 300)
        async with connected(tcp_address(api)) as client:
            await client.subscribe("t", "c", ready_count=300)
            received = [await client.message() for _ in range(300)]
            await client.send(b"RDY 0\n")
            for message in reversed(received[::7]):
                await client.send(b"REQ %s 0\n" % message.id)
            await client.send(
                b"".join(b"FIN %s\n" % message.id for index, message in enumerate(received) if index % 7)
            )
            await client.nothing_more()
        found = sorted(int(line["body"]) for line in await peek(api, max_messages=1000))
        assert found == list(range(0, 300, 7))


# ---------------------------------------------------------------------- seek


async def test_seek_back(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await prepare(api)
        await api.post("/channel/empty", topic="t", channel="c")
        answer = await seek(api, "4")
        assert (answer.status_code, answer.json()) == (
            200,
            {
                "topic": "t",
                "channel": "c",
                "from_sequence": 6,
                "to_sequence": 4,
                "delivered_again": 2,
                "skipped": 0,
                "in_flight": 0,
                "limited_by": None,
                "dry_run": False,
            },
        )
        assert brief(await peek(api)) == [("fresh", "4", 0), ("fresh", "5", 0)]
        await api.tcp.subscribe("t", "c", ready_count=10)
        assert [(await api.tcp.message()).body for _ in range(2)] == [b"4", b"5"]


async def test_consumers_get_redelivered_messages_at_once(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await prepare(api)
        await api.tcp.subscribe("t", "c", ready_count=10)
        first = [await api.tcp.message() for _ in range(6)]
        assert (await seek(api, "3")).json()["in_flight"] == 6
        again = [await api.tcp.message() for _ in range(3)]
        assert [message.body for message in again] == [b"3", b"4", b"5"]
        assert [message.id for message in again] == [message.id for message in first[3:]]
        await api.tcp.send(b"FIN %s\n" % first[0].id)
        assert await api.tcp.error() == f"E_FIN_FAILED FIN {first[0].id.decode()} failed ID not in flight"
        await api.tcp.send(b"".join(b"FIN %s\n" % message.id for message in again))
        await api.tcp.nothing_more()
        stats = await api.channel("t", "c")
        assert (stats["depth"], stats["in_flight_count"]) == (0, 0)


async def test_dry_run_moves_nothing(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await prepare(api)
        told = (await seek(api, "4", dry_run="true")).json()
        assert (told["to_sequence"], told["skipped"], told["dry_run"]) == (4, 4, True)
        assert (await api.channel("t", "c"))["depth"] == 6
        assert (await seek(api, "4", dry_run="false")).json() == told | {"dry_run": False}
        assert (await api.channel("t", "c"))["depth"] == 2


@pytest.mark.parametrize(
    ("to", "sequence", "limited_by"),
    [
        ("0", 4, "earliest"),
        ("3", 4, "earliest"),
        ("4", 4, None),
        ("earliest", 4, None),
        ("-1h", 4, "earliest"),
        ("@0", 4, "earliest"),
        ("5", 5, None),
        ("6", 6, None),
        ("7", 6, "latest"),
        ("latest", 6, None),
        ("-0", 6, None),
    ],
)
async def test_seek_beyond_the_log(tmp_path: Path, to: str, sequence: int, limited_by: str | None) -> None:
    async with running_api(tmp_path / "d", max_bytes_per_file=1) as api:
        await prepare(api)
        assert (await seek(api, "4")).json()["skipped"] == 4  # and their files are deleted
        assert (await api.get("/topic/bounds", topic="t")).json()["first_sequence"] == 4
        answer = (await seek(api, to)).json()
        assert (answer["to_sequence"], answer["limited_by"]) == (sequence, limited_by)


async def test_number_of_published_messages_is_no_limit(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await prepare(api)
        assert (await seek(api, "-1h")).json()["limited_by"] is None


async def test_seek_by_time(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await prepare(api)
        for number, line in enumerate(await peek(api)):
            at = f"@{line['timestamp_ns'] // 10**9}.{line['timestamp_ns'] % 10**9:09d}"
            assert (await seek(api, at, dry_run="1")).json()["to_sequence"] == number


@pytest.mark.parametrize(
    ("target", "status", "error"),
    [
        ("?channel=c&to=0", 400, "MISSING_ARG_TOPIC"),
        ("?topic=t&to=0", 400, "MISSING_ARG_CHANNEL"),
        ("?topic=t&channel=c", 400, "MISSING_ARG_TO"),
        ("?topic=none&channel=c&to=0", 404, "TOPIC_NOT_FOUND"),
        ("?topic=t&channel=none&to=0", 404, "CHANNEL_NOT_FOUND"),
        (
            "?topic=t&channel=c&to=0&incarnation=AB",
            400,
            "INVALID_INCARNATION: 'AB' is not 32 of the digits 0-9 a-f",
        ),
        ("?topic=t&channel=c&to=-1", 400, "INVALID_TO: '1' is not a duration such as 500ms, 2s or 1m30s"),
    ],
)
async def test_invalid_seeks(tmp_path: Path, target: str, status: int, error: str) -> None:
    async with running_api(tmp_path / "d") as api:
        await prepare(api, 0)
        answer = await api.send("POST", f"/channel/seek{target}")
        assert (answer.status_code, answer.json()) == (status, {"message": error})


@pytest.mark.parametrize("dry_run", ["true", "false"])
@pytest.mark.parametrize("empty", [True, False])
async def test_seek_in_another_log_moves_nothing(tmp_path: Path, empty: bool, dry_run: str) -> None:
    """The topic was deleted and created again, perhaps without a message yet."""
    async with running_api(tmp_path / "d") as api:
        await prepare(api)
        old = (await api.get("/topic/bounds", topic="t")).json()["incarnation"]
        await api.post("/topic/delete", topic="t")
        await prepare(api, 0 if empty else 6)
        answer = await seek(api, "2", incarnation=old, dry_run=dry_run)
        assert answer.status_code == 409
        assert answer.json()["message"].startswith("OTHER_LOG: topic t has another log")
        assert (await seek(api, "0", dry_run="true")).json()["from_sequence"] == 0
        if not empty:
            new = (await api.get("/topic/bounds", topic="t")).json()["incarnation"]
            assert (await seek(api, "2", incarnation=new)).json()["to_sequence"] == 2


async def test_seek_is_saved_before_the_answer(tmp_path: Path) -> None:
    """Not only with the next checkpoint, of which there is none here."""
    async with running_api(tmp_path / "d", checkpoint_interval_ms=10**9) as api:
        await prepare(api)
        await seek(api, "4")
        state = decode_state((tmp_path / "d" / "topics" / "t.topic" / "state.json").read_bytes())
        assert [channel["cursor"] for channel in state["channels"]] == [4]
    async with running_api(tmp_path / "d") as api:
        assert [line["body"] for line in await peek(api)] == ["4", "5"]


async def test_disk_that_cannot_save_the_seek(tmp_path: Path) -> None:
    files = FailingFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        await prepare(api)
        files.full_after = 0
        answer = await seek(api, "4")
        assert answer.status_code == 503
        assert "No space left on device" in answer.json()["message"]
        files.full_after = None
        assert (await seek(api, "3")).json()["from_sequence"] == 0  # it was not moved


async def test_seek_back_to_messages_that_a_running_save_deletes(tmp_path: Path) -> None:
    """The save began before, and does not know the new position."""
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files, max_bytes_per_file=1) as api:
        await prepare(api)
        results: list[Any] = []

        async def empty() -> None:
            results.append(await api.post("/channel/empty", topic="t", channel="c"))

        async def move() -> None:
            results.append((await seek(api, "2")).json())

        files.hold("replace")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(empty)
            await files.reached()
            nursery.start_soon(move)
            await settle()
            files.release()
        moved = next(result for result in results if isinstance(result, dict))
        first = (await api.get("/topic/bounds", topic="t")).json()["first_sequence"]
        assert moved["to_sequence"] == first == 5
        assert (moved["delivered_again"], moved["limited_by"]) == (1, "earliest")
        assert [line["body"] for line in await peek(api)] == ["5"]


async def test_deferred_message_from_before_the_channel_is_delivered_when_due(tmp_path: Path) -> None:
    """It was published before the channel was created."""
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="other")
        await api.tcp.publish("t", b"now")
        await api.tcp.send(dpub("t", 300, b"soon"))
        await api.tcp.ok()
        await api.post("/channel/create", topic="t", channel="c")
        await api.tcp.subscribe("t", "c", ready_count=10)
        assert (await seek(api, "0")).json()["delivered_again"] == 2
        assert (await api.tcp.message()).body == b"now"
        soon = await api.tcp.message()
        assert soon.body == b"soon"
        assert time.time_ns() - soon.timestamp_ns > 250_000_000


@pytest.mark.parametrize("dry_run", [False, True])
async def test_clients_are_served_during_a_search_of_many_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    async with running_api(tmp_path / "d") as api:
        await prepare(api, 0)
        query = httpx.QueryParams(topic="t", producer="p", number=1, defer=3_600_000)
        await api.send("POST", f"/mpub?{query}", body=b"x\n" * 30_000)
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        preparing = Seek.prepare

        def watched(seek: Seek) -> Iterator[None]:
            before = turns
            yield from preparing(seek)
            assert turns - before > 25

        monkeypatch.setattr(Seek, "prepare", watched)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count_turns)
            moved = (await seek(api, "29990", **({"dry_run": "true"} if dry_run else {}))).json()
            nursery.cancel_scope.cancel()
        assert (moved["to_sequence"], moved["skipped"]) == (29_990, 29_990)
        (channel,) = (await api.get("/stats", format="json", topic="t")).json()["topics"][0]["channels"]
        assert (channel["depth"], channel["deferred_count"]) == (0, 30_000 if dry_run else 10)
