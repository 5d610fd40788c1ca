"""Tests for /dead_letters and /channel/pub."""

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.api import Api, running_api
from broker.letters import client_of, configure, fail, letters
from broker.support import FailingFiles
from trio_nsq.broker.api import dead_letters as http_dead_letters
from trio_nsq.broker.dead_letters import DEAD_LETTERS
from trio_nsq.broker.state.channel_messages import ChannelMessages


async def post(api: Api, path: str) -> tuple[int, Any]:
    answer = await api.send("POST", path)
    return answer.status_code, answer.json()


async def bury(api: Api, source: str, *bodies: bytes, topic: str = "dead") -> None:
    """Let these messages fail in a channel, which is created if missing."""
    name, _, channel = source.partition("/")
    await configure(api, name, channel, max_attempts=1, dead_letter_topic=topic)
    async with client_of(api) as client, client_of(api) as reader:
        await reader.subscribe(topic, "copy#ephemeral", 100)
        await client.publish(name, *bodies)
        await client.subscribe(name, channel, 1)
        await fail(client, len(bodies))
        for _ in bodies:
            await reader.message()


async def bodies(api: Api, **query: Any) -> list[str]:
    return [letter["body"] for letter in await letters(api, **query)]


async def test_counts_by_origin_and_reason(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        assert (await api.get("/dead_letters")).json() == {"topics": []}
        await bury(api, "t/c", b"1", b"2")
        await bury(api, "u/d", b"3")
        await api.post("/pub", body=b"a stranger", topic="dead")
        assert (await api.get("/dead_letters")).json() == {
            "topics": [{"topic": "dead", "waiting": 4, "in_flight": 0}]
        }
        found = (await api.get("/dead_letters", topic="dead")).json()
        assert (found["topic"], found["waiting"], found["next_sequence"]) == ("dead", 4, None)
        assert [(row["topic"], row["channel"], row["reason"], row["count"]) for row in found["origins"]] == [
            ("t", "c", "requeued", 2),
            ("u", "d", "requeued", 1),
            (None, None, None, 1),
        ]
        first, second, third = [letter["timestamp_ns"] for letter in await letters(api)][:3]
        assert [(row["first_ns"], row["last_ns"]) for row in found["origins"]][:2] == [
            (first, second),
            (third, third),
        ]


async def test_selection_of_letters(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await bury(api, "t/c", b"1", b"2")
        await bury(api, "t/d", b"3")
        await bury(api, "u/c", b"4")
        await api.post("/pub", body=b"5", topic="dead")
        every = await letters(api)
        assert await bodies(api, origin="t/c") == ["1", "2"]
        assert set(await bodies(api, origin="t")) == {"1", "2", "3"}
        assert await bodies(api, origin="u/c") == ["4"]
        assert await bodies(api, origin="u/d") == []
        assert len(await bodies(api, reason="requeued")) == len(every) - 1
        assert await bodies(api, reason="timed_out") == []
        assert await bodies(api, max_messages=1) == ["1"]
        start = every[1]["sequence"]
        assert await bodies(api, **{"from": start}) == [letter["body"] for letter in every[1:]]
        wanted = ",".join([every[-1]["id"], every[0]["id"], "f" * 16])
        assert await bodies(api, id=wanted) == ["1", "5"]
        assert await bodies(api, id=every[0]["id"], **{"from": start}) == []


async def test_letter_requeued_to_its_channel_goes_to_no_other(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, client_of(api) as other:
        await bury(api, "t/c", b"a")
        await other.subscribe("t", "later", 9)
        (letter,) = await letters(api)
        assert await post(api, "/dead_letters/requeue?topic=dead") == (
            200, {"requeued": 1, "kept": [], "next_sequence": None},
        )  # fmt: skip
        assert await letters(api) == []
        await api.tcp.subscribe("t", "c", 1)
        message = await api.tcp.message()
        assert (message.body, message.attempts) == (b"a", 1)
        assert message.id.decode() not in (letter["id"], letter["origin"]["id"])
        await api.tcp.send(b"FIN %s\n" % message.id)
        await other.nothing_more()
        await api.tcp.nothing_more()
    async with running_api(tmp_path / "d") as api:
        assert await letters(api) == []
        assert (await api.channel("t", "c"))["depth"] == (await api.channel("t", "later"))["depth"] == 0


async def test_letter_requeued_to_the_topic(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, client_of(api) as other:
        await bury(api, "t/c", b"a")
        await other.subscribe("t", "later", 9)
        assert (await post(api, "/dead_letters/requeue?topic=dead&to=topic"))[1]["requeued"] == 1
        await api.tcp.subscribe("t", "c", 1)
        assert (await api.tcp.message()).body == (await other.message()).body == b"a"


async def test_letter_of_a_deleted_channel_stays(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await bury(api, "t/gone", b"a", b"b")
        await bury(api, "t/c", b"c")
        await api.post("/pub", body=b"from nowhere", topic="dead")
        await api.post("/channel/delete", topic="t", channel="gone")
        before = await letters(api)
        assert await post(api, "/dead_letters/requeue?topic=dead") == (
            200,
            {
                "requeued": len(before) - 3,
                "kept": [
                    {"why": "there is no channel t/gone", "count": 2},
                    {
                        "why": "they have no origin: a producer published them to the dead-letter topic",
                        "count": 1,
                    },
                ],
                "next_sequence": None,
            },
        )
        assert await bodies(api) == ["a", "b", "from nowhere"]
        await api.post("/topic/delete", topic="t")
        assert (await post(api, "/dead_letters/requeue?topic=dead"))[1]["requeued"] == 0
        assert (await post(api, "/dead_letters/requeue?topic=dead&to=topic"))[1]["requeued"] == 2
        assert await bodies(api) == ["from nowhere"]
        assert await api.depth("t") == 2


async def test_letter_in_flight_stays(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await bury(api, "t/c", b"a", b"b")
        await api.tcp.subscribe("dead", "dead-letters", 1)
        held = await api.tcp.message()
        assert held.body == b"a"
        assert (await api.get("/dead_letters", topic="dead")).json()["in_flight"] == 1
        assert (await post(api, f"/dead_letters/drop?topic=dead&id={held.id.decode()}"))[1]["dropped"] == 0
        assert (await post(api, "/dead_letters/requeue?topic=dead"))[1]["requeued"] == 1
        await api.tcp.send(b"FIN %s\n" % held.id)
        await api.tcp.nothing_more()


async def test_dropped_letters(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await bury(api, "t/c", b"1", b"2", b"3", b"4")
        second, third = [letter["id"] for letter in await letters(api)][1:3]
        assert await post(api, f"/dead_letters/drop?topic=dead&id={third},{second}") == (
            200, {"dropped": 2, "next_sequence": None},
        )  # fmt: skip
        assert await post(api, "/dead_letters/drop?topic=dead&max_messages=1") == (
            200, {"dropped": 1, "next_sequence": 3},
        )  # fmt: skip
        assert await bodies(api) == ["4"]
    async with running_api(tmp_path / "d") as api:
        assert await bodies(api) == ["4"]
        assert (await post(api, "/dead_letters/drop?topic=dead"))[1]["dropped"] == 1
        assert await bodies(api) == []


@pytest.mark.parametrize(("path", "done"), [("drop", "dropped"), ("requeue", "requeued")])
async def test_next_sequence_skips_no_letter_if_a_read_returns_more_than_max_messages(
    tmp_path: Path, path: str, done: str
) -> None:
    async with running_api(tmp_path / "d") as api:
        for body in (b"1", b"2", b"3", b"4"):  # one record each
            await bury(api, "t/c", body)
        start: int | None = 0
        counts: list[int] = []
        while start is not None:
            _, answer = await post(api, f"/dead_letters/{path}?topic=dead&max_messages=1&from={start}")
            start = answer["next_sequence"]
            counts.append(answer[done])
        assert sum(counts) == 4
        assert await bodies(api) == []


async def test_request_has_a_time_limit_and_reports_where_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_dead_letters, "PATIENCE_S", 1e-9)
    monkeypatch.setattr(http_dead_letters, "READ_BYTES", 1)
    async with running_api(tmp_path / "d") as api:
        for body in (b"1", b"2", b"3"):
            await bury(api, "t/c", body)
        found = (await api.get("/dead_letters", topic="dead")).json()
        assert (sum(row["count"] for row in found["origins"]), found["next_sequence"]) == (1, 1)
        assert await post(api, "/dead_letters/drop?topic=dead&from=1") == (
            200,
            {"dropped": 1, "next_sequence": 2},
        )
        assert await bodies(api) == ["1", "3"]


async def test_clients_are_served_during_a_search_of_many_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="dead")
        await api.post("/channel/create", topic="dead", channel=DEAD_LETTERS)
        mpub = {"topic": "dead", "producer": "p", "number": 1, "defer": 3_600_000}
        await api.post("/mpub", body=b"x\n" * 30_000, **mpub)
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        find_waiting = ChannelMessages.find_waiting

        def watched(
            messages: ChannelMessages, sequence: int, found: deque[tuple[int, int]]
        ) -> Iterator[None]:
            before = turns
            yield from find_waiting(messages, sequence, found)
            assert turns - before > 25

        monkeypatch.setattr(ChannelMessages, "find_waiting", watched)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count_turns)
            found = (await api.get("/dead_letters", topic="dead", **{"from": 29_990})).json()
            nursery.cancel_scope.cancel()
        assert [row["count"] for row in found["origins"]] == [10]


async def test_full_disk_keeps_letters(tmp_path: Path) -> None:
    files = FailingFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        await bury(api, "t/c", b"a")
        files.full_after = 0
        status, answer = await post(api, "/dead_letters/requeue?topic=dead")
        assert status == 503
        assert "No space left on device" in answer["message"]
        files.full_after = None
        assert await bodies(api) == ["a"]
        assert (await post(api, "/dead_letters/requeue?topic=dead"))[1]["requeued"] == 1


async def test_letters_of_an_ephemeral_topic(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await bury(api, "t/c", b"a", b"b", topic="dead#ephemeral")
        path = "/dead_letters/requeue?topic=dead%23ephemeral&max_messages=1"
        assert (await post(api, path))[1]["requeued"] == 1
        assert [letter["body"] for letter in await letters(api, "dead#ephemeral")] == ["b"]
        assert (await api.channel("t", "c"))["depth"] == 1


@pytest.mark.parametrize(
    ("method", "target", "status", "error"),
    [
        ("GET", "/dead_letters?topic=none", 404, "TOPIC_NOT_FOUND"),
        ("GET", "/dead_letters?topic=t", 404, "CHANNEL_NOT_FOUND"),
        ("GET", "/dead_letters/messages", 400, "MISSING_ARG_TOPIC"),
        ("GET", "/dead_letters/messages?topic=dead&reason=bad", 400,
         "INVALID_REASON: 'bad' is not one of requeued, timed_out, connection_lost"),
        ("GET", "/dead_letters/messages?topic=dead&id=xyz", 400, "INVALID_ID: 'xyz' is not 16 of the digits 0-9 a-f"),
        ("GET", "/dead_letters/messages?topic=dead&max_messages=0", 400,
         "INVALID_MAX_MESSAGES: not a whole number of 1 or more"),
        ("GET", "/dead_letters/messages?topic=dead&from=-1", 400,
         "INVALID_FROM: not a whole number of 0 or more"),
        ("POST", "/dead_letters/requeue?topic=dead&to=both", 400, "INVALID_TO: 'both' is neither channel nor topic"),
        ("POST", "/dead_letters/drop?topic=t", 404, "CHANNEL_NOT_FOUND"),
        ("GET", "/dead_letters/drop?topic=dead", 405, "METHOD_NOT_ALLOWED"),
        ("POST", "/channel/pub?topic=t&channel=c", 400, "MSG_EMPTY"),
    ],
)  # fmt: skip
async def test_refused_requests(tmp_path: Path, method: str, target: str, status: int, error: str) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await api.post("/topic/create", topic="dead")
        await api.post("/topic/create", topic="dead")
        await api.post("/channel/create", topic="dead", channel=DEAD_LETTERS)
        answer = await api.send(method, target)
        assert (answer.status_code, answer.json()) == (status, {"message": error})


# ---------------------------------------------------------------------- messages for one channel


async def test_publish_for_one_channel(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        for channel in ("a", "b"):
            await api.post("/channel/create", topic="t", channel=channel)
        assert await api.post("/channel/pub", body=b"now", topic="t", channel="a") == (200, "OK")
        assert await api.post("/channel/pub", body=b"later", topic="t", channel="a", defer=3_600_000) == (
            200,
            "OK",
        )
        assert await api.post("/channel/pub", body=b"x", topic="t", channel="a", defer="soon") == (
            400,
            "INVALID_DEFER",
        )
        assert await api.post("/channel/pub", body=b"x", topic="t", channel="c") == (404, "CHANNEL_NOT_FOUND")
        assert await api.post("/channel/pub", body=bytes(1048577), topic="t", channel="a") == (
            413,
            "MSG_TOO_BIG",
        )
    async with running_api(tmp_path / "d") as api:
        a, b = await api.channel("t", "a"), await api.channel("t", "b")
        assert [(each["depth"], each["deferred_count"]) for each in (a, b)] == [(1, 1), (0, 0)]
        await api.tcp.subscribe("t", "a", 2)
        assert (await api.tcp.message()).body == b"now"
        await api.tcp.nothing_more()


async def test_letters_are_valid_json(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await bury(api, "t/c", b"\xff\0")
        answer = await api.get("/dead_letters/messages", topic="dead")
        assert answer.headers["content-type"] == "application/x-ndjson; charset=utf-8"
        (line,) = answer.text.splitlines()
        letter = json.loads(line)
        assert list(letter) == [
            "topic",
            "id",
            "timestamp_ns",
            "attempts",
            "sequence",
            "due_ns",
            "origin",
            "body_base64",
        ]
        assert letter["body_base64"] == "/wA="
