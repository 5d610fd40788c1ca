"""Retention, limits and the time to live, in a running broker."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.support import PATIENCE_S, connected, identify, mpub, pub, running_broker
from broker.test_http_api import Api, running_api
from trio_nsq.broker import retention
from trio_nsq.broker.settings import TopicSettings

FAST: dict[str, Any] = {"max_bytes_per_file": 2000, "checkpoint_interval_ms": 10}
TOPIC = "/topic/settings?topic=t"


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await trio.sleep(0.01)


async def configure(api: Api, **settings: object) -> None:
    answer = await api.send("PUT", TOPIC, body=json.dumps(settings).encode())
    assert answer.status_code == 200, answer.text


async def stats(api: Api) -> dict[str, Any]:
    answer = await api.get("/stats", format="json", topic="t")
    (topic,) = answer.json()["topics"]
    assert isinstance(topic, dict)
    return topic


def segments(data_path: Path) -> list[int]:
    """The sequences at which the topic's files begin."""
    return sorted(int(path.stem) for path in (data_path / "topics" / "t.topic").glob("*.log"))


async def fill(api: Api, count: int = 30) -> None:
    """Messages in as many files as there are pairs of them; there is a channel, and it has passed them all."""
    for n in range(count):
        await api.tcp.publish("t", b"%03d" % n * 300)


async def pass_all(api: Api) -> None:
    await api.post("/channel/empty", topic="t", channel="c")


# ---------------------------------------------------------------------- retention


async def test_files_go_once_they_are_passed_and_nothing_keeps_them(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api)
        assert len(segments(tmp_path / "d")) == 15
        await pass_all(api)
        await until(lambda: len(segments(tmp_path / "d")) == 1)
        assert "first_sequence" not in await stats(api)


async def test_retention_keeps_them_until_it_is_changed(tmp_path: Path) -> None:
    keep = TopicSettings(retention_time_ms=10**9)
    async with running_api(tmp_path / "d", topic_defaults=keep, **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api)
        await pass_all(api)
        found = await stats(api)
        assert (found["first_sequence"], found["log_files"]) == (0, 15)
        assert 15 * 1800 < found["log_bytes"] < 15 * 2000
        await configure(api, retention_time_ms=-1, retention_bytes=6000)
        assert segments(tmp_path / "d") == [24, 26, 28]
        assert (await stats(api))["first_sequence"] == 24
        await configure(api, retention_time_ms=0, retention_bytes=0)
        assert segments(tmp_path / "d") == [28]


async def test_retention_keeps_nothing_back_from_a_channel(tmp_path: Path) -> None:
    drop = TopicSettings(retention_time_ms=1, retention_bytes=1)
    async with running_api(tmp_path / "d", topic_defaults=drop, **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api)
        await configure(api)  # saves it
        assert segments(tmp_path / "d")[:15] == list(range(0, 30, 2))
        await api.tcp.subscribe("t", "c", 100)
        for n in range(30):
            assert (await api.tcp.message()).body == b"%03d" % n * 300


@pytest.mark.parametrize("restart", [False, True])
async def test_a_topic_on_which_nothing_happens_loses_what_is_too_old(tmp_path: Path, restart: bool) -> None:
    """Also what is in the file that was written last."""
    keep = TopicSettings(retention_time_ms=1000)
    options = {"topic_defaults": keep, **FAST}
    async with running_api(tmp_path / "d", **options) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api, 10)
        await pass_all(api)
        assert segments(tmp_path / "d")[:5] == [0, 2, 4, 6, 8]
        if not restart:
            await until(lambda: segments(tmp_path / "d") == [10])
            await fill(api, 1)
            await api.tcp.subscribe("t", "c", 1)
            assert (await api.tcp.message()).body == b"000" * 300
    if restart:
        async with running_broker(tmp_path / "d", **options):
            await until(lambda: segments(tmp_path / "d") == [10])


async def test_publishes_wait_while_a_new_file_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With either sync mode nothing gets lost or out of order between the files."""
    monkeypatch.setattr(retention, "_LEAST_FILE_NS", 0)
    for sync in ("always", "interval"):
        folder = tmp_path / sync
        keep = TopicSettings(retention_time_ms=80)
        options: dict[str, Any] = {"checkpoint_interval_ms": 1, "sync": sync, "topic_defaults": keep}
        async with running_broker(folder, **options) as bound, connected(bound.tcp_address) as client:
            await client.send(identify(output_buffer_size=-1))
            await client.ok()
            await client.subscribe("t", "c", 2000)
            async with connected(bound.tcp_address) as producer:
                for n in range(400):
                    await producer.publish("t", b"%d" % n)
                    message = await client.message()
                    assert message.body == b"%d" % n
                    await client.send(b"FIN %s\n" % message.id)
                    if n % 40 == 0:
                        first = segments(folder)[0]
                        await until(lambda first=first, folder=folder: segments(folder)[0] > first)  # type: ignore[misc]


# ---------------------------------------------------------------------- limits


async def test_a_full_topic_refuses_until_there_is_room(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await configure(api, max_messages=3)
        await api.tcp.publish("t", b"a", b"b")
        await api.tcp.send(mpub("t", b"c", b"d"))
        reason = "topic t is full: 2 messages wait, max_messages is 3"
        assert await api.tcp.error() == f"E_MPUB_FAILED MPUB failed {reason}"
        assert await api.post("/pub", b"c", topic="t") == (200, "OK")
        refused = await api.post("/pub", b"d", topic="t")
        reason = "topic t is full: 3 messages wait, max_messages is 3"
        assert refused == (503, reason)
        assert (await api.get("/ping")).text == "OK"  # nothing is wrong with the broker
        await api.post("/topic/empty", topic="t")
        assert await api.post("/pub", b"d", topic="t") == (200, "OK")
        assert "dropped_count" not in await stats(api)


async def test_publishes_that_are_stored_together_do_not_exceed_the_limit(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await configure(api, max_messages=50)
        stored = 0

        async def publish(address: str) -> None:
            nonlocal stored
            async with connected(address) as client:
                while True:
                    await client.send(pub("t", b"x"))
                    frame = await client.frame()
                    if frame != (0, b"OK"):
                        assert frame is not None
                        assert frame[1].startswith(b"E_PUB_FAILED PUB failed topic t is full")
                        return
                    stored += 1

        address = "%s:%d" % api.tcp.stream.socket.getpeername()
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(publish, address)
        assert stored == (await stats(api))["depth"] == 50


async def test_the_oldest_make_room_and_are_counted(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await configure(api, max_messages=3, when_full="drop-oldest")
        for n in range(5):
            await api.tcp.publish("t", b"%d" % n)
        await api.post("/channel/create", topic="t", channel="c")
        await api.tcp.publish("t", b"5", b"6")
        found = await stats(api)
        assert (found["depth"], found["dropped_count"]) == (0, 2)
        assert (found["channels"][0]["depth"], found["channels"][0]["dropped_count"]) == (3, 2)
        figures = (await api.get("/metrics")).text
        assert 'nsq_topic_dropped_total{topic="t"} 2.0' in figures
        assert 'nsq_channel_dropped_total{channel="c",topic="t"} 2.0' in figures
        await api.tcp.subscribe("t", "c", 10)
        assert [(await api.tcp.message()).body for _ in range(3)] == [b"4", b"5", b"6"]


async def test_a_consumer_that_keeps_up_loses_nothing(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/channel/create", topic="t", channel="c")
        await api.post("/topic/create", topic="t")
        await configure(api, max_messages=1, when_full="drop-oldest")
        await api.tcp.subscribe("t", "c", 100)
        await api.tcp.publish("t", *[b"%d" % n for n in range(100)])
        assert [(await api.tcp.message()).body for _ in range(100)] == [b"%d" % n for n in range(100)]


# ---------------------------------------------------------------------- time to live


async def test_what_waits_too_long_goes_though_nobody_consumes(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api)
        await configure(api, ttl_ms=100)
        await until(lambda: segments(tmp_path / "d") == [28])
        channel = (await stats(api))["channels"][0]
        assert (channel["depth"], channel["expired_count"]) == (0, 30)
        assert 'nsq_channel_expired_total{channel="c",topic="t"} 30.0' in (await api.get("/metrics")).text


async def test_what_waits_too_long_goes_after_a_restart(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", **FAST) as api:
        await api.post("/topic/create", topic="t")
        await fill(api)
        await configure(api, ttl_ms=1500)
    async with running_api(tmp_path / "d", **FAST) as api:
        await until(lambda: segments(tmp_path / "d") == [28])
        found = await stats(api)
        assert (found["depth"], found["expired_count"]) == (0, 30)
