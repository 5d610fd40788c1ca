"""Tests for /channel/deferred, and for the limits of deferring."""

import json
from pathlib import Path
from typing import Any

import pytest

from broker.api import Api, running_api
from broker.retention import FAST, fill, segments
from broker.support import dpub, until
from trio_nsq.broker.storage import retention
from trio_nsq.protocol import Limits

DAY_MS = 24 * 3_600_000


async def deferred(api: Api, channel: str = "c", **query: Any) -> list[dict[str, Any]]:
    answer = await api.get("/channel/deferred", topic="t", channel=channel, **query)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def cancel(api: Api, *ids: str, channel: str = "c") -> Any:
    path = f"/channel/deferred/cancel?topic=t&channel={channel}&id={','.join(ids)}"
    answer = await api.send("POST", path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def make(api: Api, *channels: str) -> None:
    await api.post("/topic/create", topic="t")
    for channel in channels:
        await api.post("/channel/create", topic="t", channel=channel)


async def defer(api: Api, body: bytes, defer_ms: int) -> None:
    assert await api.post("/pub", body=body, topic="t", defer=defer_ms) == (200, "OK")


async def test_list_with_due_times(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await make(api, "c")
        await defer(api, b"third", 3 * DAY_MS)
        await defer(api, b"first", DAY_MS)
        await defer(api, b"second", 2 * DAY_MS)
        found = await deferred(api)
        assert [each["body"] for each in found] == ["first", "second", "third"]
        assert [each["attempts"] for each in found] == [0, 0, 0]
        for each, days in zip(found, (1, 2, 3), strict=True):
            assert abs(each["due_ns"] - each["timestamp_ns"] - days * DAY_MS * 1_000_000) < 60 * 10**9
        assert [each["body"] for each in await deferred(api, max_messages=1)] == ["first"]
    async with running_api(tmp_path / "d") as api:
        assert await deferred(api) == found


async def test_counts_by_due_time(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await make(api, "c", "other")
        answer = await api.get("/channel/deferred/counts", topic="t", channel="c", before="@1")
        assert answer.json() == {
            "topic": "t",
            "channel": "c",
            "deferred_count": 0,
            "first_due_ns": None,
            "last_due_ns": None,
            "due_before": [0],
        }
        for days in (3, 1, 2, 1):
            await defer(api, b"x", days * DAY_MS)
        due = [each["due_ns"] for each in await deferred(api)]
        times_ns = [0, due[0], due[0] + 1, due[2], due[-1], due[-1] + 1, due[-1] * 2]
        before = ",".join(f"@{each // 10**9}.{each % 10**9:09d}" for each in times_ns)
        found = (await api.get("/channel/deferred/counts", topic="t", channel="c", before=before)).json()
        assert found["due_before"] == [sum(each < limit for each in due) for limit in times_ns]
        assert found["deferred_count"] == 4
        assert (found["first_due_ns"], found["last_due_ns"]) == (due[0], due[-1])


async def test_messages_requeued_with_a_delay_are_listed_with_their_attempts(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.publish("t", b"a")
        await api.tcp.subscribe("t", "c", 1)
        message = await api.tcp.message()
        await api.tcp.send(b"REQ %s 60000\n" % message.id)
        await api.tcp.nothing_more()
        (found,) = await deferred(api)
        assert (found["id"], found["attempts"]) == (message.id.decode(), 1)
        assert (await cancel(api, found["id"]))["cancelled"] == [found["id"]]
        assert await deferred(api) == []


async def test_cancelled_in_one_channel_permanently(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await make(api, "c", "other")
        for number in range(20):
            await api.tcp.publish("t", b"fresh")
            await defer(api, b"%d" % number, DAY_MS + number)
        found = await deferred(api)
        ids = [each["id"] for each in found]
        assert await cancel(api, ids[7], "f" * 16, ids[3]) == {
            "cancelled": [ids[7], ids[3]],
            "not_deferred": ["f" * 16],
        }
        left = [each for each in found if each["id"] not in (ids[7], ids[3])]
        assert await deferred(api) == left
        assert len(await deferred(api, "other")) == 20
        assert await cancel(api, ids[7]) == {"cancelled": [], "not_deferred": [ids[7]]}
    async with running_api(tmp_path / "d") as api:
        assert await deferred(api) == left
        assert len(await deferred(api, "other")) == 20


async def test_messages_that_are_not_deferred_are_not_cancelled(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await make(api, "c")
        await api.tcp.publish("t", b"a")
        (waiting,) = (await api.get("/channel/peek", topic="t", channel="c")).text.splitlines()
        message_id = json.loads(waiting)["id"]
        assert await cancel(api, message_id) == {"cancelled": [], "not_deferred": [message_id]}
        assert (await api.channel("t", "c"))["depth"] == 1


@pytest.mark.parametrize(
    ("method", "target", "status", "error"),
    [
        ("GET", "/channel/deferred?topic=t", 400, "MISSING_ARG_CHANNEL"),
        ("GET", "/channel/deferred?topic=t&channel=none", 404, "CHANNEL_NOT_FOUND"),
        ("GET", "/channel/deferred?topic=t&channel=c&max_messages=10001", 400,
         "INVALID_MAX_MESSAGES: at most 10000"),
        ("GET", "/channel/deferred/counts?topic=t", 400, "MISSING_ARG_CHANNEL"),
        ("GET", "/channel/deferred/counts?topic=t&channel=c&before=latest", 400,
         "INVALID_BEFORE: 'latest' is not a time such as @1700000000"),
        ("GET", "/channel/deferred/counts?topic=t&channel=c&before=" + ",".join(["@1"] * 201), 400,
         "INVALID_BEFORE: at most 200 times"),
        ("POST", "/channel/deferred/cancel?topic=t&channel=c", 400, "MISSING_ARG_ID"),
        ("POST", "/channel/deferred/cancel?topic=t&channel=c&id=12", 400,
         "INVALID_ID: '12' is not 16 of the digits 0-9 a-f"),
        ("POST", "/channel/deferred/cancel?topic=t&channel=c&id=" + ",".join(f"{n:016x}" for n in range(1001)), 400,
         "INVALID_ID: at most 1000 ids"),
    ],
)  # fmt: skip
async def test_refused_requests(tmp_path: Path, method: str, target: str, status: int, error: str) -> None:
    async with running_api(tmp_path / "d") as api:
        await make(api, "c")
        answer = await api.send(method, target)
        assert (answer.status_code, answer.json()) == (status, {"message": error})


async def test_carried_forward_message_is_found_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of its publish was deleted; the backlog of other messages is not searched."""
    monkeypatch.setattr(retention, "PINNED_BYTES", 20_000)
    monkeypatch.setattr(retention, "CARRIED_MESSAGES_SHARE", 0.1)
    data_path = tmp_path / "d"
    async with running_api(data_path, **FAST) as api:
        await make(api, "c")
        await defer(api, b"later", DAY_MS)
        await fill(api, 60)
        await api.tcp.subscribe("t", "c", 1)
        for _ in range(50):
            await api.tcp.send(b"FIN %s\n" % (await api.tcp.message()).id)
        await until(lambda: segments(data_path)[0] > 20)
        (found,) = await deferred(api)
        assert await cancel(api, found["id"]) == {"cancelled": [found["id"]], "not_deferred": []}
        assert (await api.channel("t", "c"))["deferred_count"] == 0


# ---------------------------------------------------------------------- limits of deferring


async def test_publisher_may_defer_for_a_year(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await make(api, "c")
        await api.tcp.send(dpub("t", 365 * DAY_MS, b"a"))
        await api.tcp.ok()
        await defer(api, b"b", 365 * DAY_MS)
        assert await api.post("/pub", body=b"x", topic="t", defer=365 * DAY_MS + 1) == (400, "INVALID_DEFER")
        await api.tcp.send(dpub("t", 365 * DAY_MS + 1, b"x"))
        assert await api.tcp.error() == "E_INVALID DPUB timeout 31536000001 out of range 0-31536000000"
        assert [each["body"] for each in await deferred(api)] == ["a", "b"]


async def test_publisher_may_defer_up_to_the_maximum(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", limits=Limits(max_defer_ms=5000)) as api:
        await make(api, "c")
        await defer(api, b"a", 5000)
        assert await api.post("/pub", body=b"x", topic="t", defer=5001) == (400, "INVALID_DEFER")
        await api.tcp.send(dpub("t", 5001, b"x"))
        assert await api.tcp.error() == "E_INVALID DPUB timeout 5001 out of range 0-5000"


async def test_delay_of_a_consumer_is_limited_to_max_req_timeout(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.publish("t", b"a")
        await api.tcp.subscribe("t", "c", 1)
        message = await api.tcp.message()
        await api.tcp.send(b"REQ %s %d\n" % (message.id, DAY_MS))
        await api.tcp.nothing_more()
        (found,) = await deferred(api)
        assert found["due_ns"] - found["timestamp_ns"] < 2 * 3_600_000 * 1_000_000
