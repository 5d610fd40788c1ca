"""Tests for retention, limits and the TTL, in a running broker."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.api import Api, running_api
from broker.retention import FAST, fill, segments
from broker.support import (
    PATIENCE_S,
    HeldFiles,
    connected,
    identify,
    mpub,
    pub,
    running_broker,
    settle,
    until,
)
from trio_nsq import Producer, PublishFailed
from trio_nsq.broker.state.settings import TopicSettings
from trio_nsq.broker.storage import retention
from trio_nsq.log import Files

TOPIC = "/topic/settings?topic=t"


async def configure(api: Api, **settings: object) -> None:
    answer = await api.send("PUT", TOPIC, body=json.dumps(settings).encode())
    assert answer.status_code == 200, answer.text


async def stats(api: Api) -> dict[str, Any]:
    answer = await api.get("/stats", format="json", topic="t")
    (topic,) = answer.json()["topics"]
    assert isinstance(topic, dict)
    return topic


async def pass_all(api: Api) -> None:
    await api.post("/channel/empty", topic="t", channel="c")


# ---------------------------------------------------------------------- retention


async def test_passed_files_are_deleted_without_retention(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api)
        assert len(segments(tmp_path / "d")) == 15
        await pass_all(api)
        await until(lambda: len(segments(tmp_path / "d")) == 1)
        assert "first_sequence" not in await stats(api)


async def test_retention_keeps_files_until_it_is_changed(tmp_path: Path) -> None:
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


async def test_retention_does_not_affect_delivery(tmp_path: Path) -> None:
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
async def test_idle_topic_deletes_old_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    """Also those in the last file."""
    keep = TopicSettings(retention_time_ms=1000)
    options = {"topic_defaults": keep, **FAST}
    now_ns, real_ns = time.time_ns(), time.time_ns
    is_stopped = True  # so that nothing is too old before all is there
    monkeypatch.setattr(time, "time_ns", lambda: now_ns if is_stopped else real_ns())
    async with running_api(tmp_path / "d", **options) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api, 10)
        await pass_all(api)
        assert segments(tmp_path / "d")[:5] == [0, 2, 4, 6, 8]
        is_stopped = restart
        if not restart:
            await until(lambda: segments(tmp_path / "d") == [10])
            await fill(api, 1)
            await api.tcp.subscribe("t", "c", 1)
            assert (await api.tcp.message()).body == b"000" * 300
    is_stopped = False
    if restart:
        async with running_broker(tmp_path / "d", **options):
            await until(lambda: segments(tmp_path / "d") == [10])


class Counting(Files):
    """Counts operations, and may refuse to delete."""

    def __init__(self) -> None:
        self.replaced = 0
        self.read_bytes = 0
        self.keeps = False
        self.kept = 0

    def replace(self, path: Path, content: bytes) -> None:
        self.replaced += path.name == "state.json"
        super().replace(path, content)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        self.read_bytes += size
        return super().read(fd, size, offset)

    def unlink(self, path: Path) -> None:
        if self.keeps:
            self.kept += 1
            raise OSError(30, "Read-only file system")
        super().unlink(path)


async def pass_time(clock: trio.testing.MockClock, seconds: float, step_s: float = 1) -> None:
    """Let time pass in steps, so that periodic work is done."""
    for _ in range(int(seconds / step_s)):
        clock.jump(step_s)
        await settle()


@pytest.mark.parametrize(
    ("keep", "passed"),
    [
        (TopicSettings(retention_time_ms=3_600_000), True),
        (TopicSettings(ttl_ms=60_000), True),
        (TopicSettings(), False),
    ],
)
async def test_topics_without_old_messages_cost_nothing_after_a_start(
    tmp_path: Path, mock_clock: trio.testing.MockClock, keep: TopicSettings, passed: bool
) -> None:
    """There may be ten thousand of them."""
    options: dict[str, Any] = {"topic_defaults": keep, "max_bytes_per_file": 2000}
    async with running_api(tmp_path / "d", **options) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api, 6)
        if passed:
            await pass_all(api)
    files = Counting()
    async with running_broker(tmp_path / "d", files=files, checkpoint_interval_ms=1000, **options):
        await settle()
        found = files.replaced, files.read_bytes
        await pass_time(mock_clock, 30, step_s=5)
        assert (files.replaced - found[0], files.read_bytes - found[1]) == (0, 0)


class SlowDeletions(Files):
    """Deleting a file of a log takes a second."""

    def __init__(self, clock: trio.testing.MockClock) -> None:
        self._clock = clock

    def unlink(self, path: Path) -> None:
        if path.suffix == ".log":
            trio.from_thread.run_sync(self._clock.jump, 1.0)
        super().unlink(path)


async def test_states_are_saved_while_many_files_are_deleted(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    """Otherwise a kill would bring back what was finished meanwhile, in any topic."""
    files = SlowDeletions(mock_clock)
    options: dict[str, Any] = {"max_bytes_per_file": 2000, "checkpoint_interval_ms": 1000}
    async with running_api(tmp_path / "d", files=files, **options) as api:
        for topic in ("t", "other"):
            await api.post("/topic/create", topic=topic)
            await api.post("/channel/create", topic=topic, channel="c")
        await fill(api)
        await api.tcp.publish("other", b"finished")
        await api.tcp.subscribe("other", "c", 1)
        message = await api.tcp.message()
        await pass_all(api)
        assert len(segments(tmp_path / "d")) == 14
        await api.tcp.send(b"FIN %s\n" % message.id)
        await settle()
        await pass_time(mock_clock, 3)
        shutil.copytree(tmp_path / "d", tmp_path / "killed")
        await pass_time(mock_clock, 60)
        assert len(segments(tmp_path / "d")) == 1
    assert len(segments(tmp_path / "killed")) > 1
    async with running_api(tmp_path / "killed", **options) as api:
        assert (await api.channel("other", "c"))["depth"] == 0
        await pass_time(mock_clock, 5)
        assert len(segments(tmp_path / "killed")) == 1


async def test_new_file_is_started_in_time_after_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the only file of an idle topic would stay forever."""
    monkeypatch.setattr(retention, "MIN_FILE_NS", 0)
    async with running_api(tmp_path / "d", **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api, 1)
        await pass_all(api)
    assert segments(tmp_path / "d") == [0]
    async with running_broker(tmp_path / "d", topic_defaults=TopicSettings(retention_time_ms=200), **FAST):
        await until(lambda: segments(tmp_path / "d") == [1])


@pytest.mark.parametrize(
    "keep", [TopicSettings(), TopicSettings(retention_bytes=4000), TopicSettings(retention_time_ms=800)]
)
async def test_shorter_retention_at_a_start_applies_to_idle_topics(
    tmp_path: Path, keep: TopicSettings
) -> None:
    before = TopicSettings(retention_time_ms=10**9)
    async with running_api(tmp_path / "d", topic_defaults=before, **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api, 10)
        await pass_all(api)
    assert segments(tmp_path / "d") == [0, 2, 4, 6, 8]
    async with running_broker(tmp_path / "d", topic_defaults=keep, **FAST):
        await until(lambda: segments(tmp_path / "d")[0] >= 6)


async def test_age_of_a_message_follows_the_machines_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is corrected while the broker runs, as after booting; timestamps follow it."""
    real, ahead_s = time.time_ns, 3600
    monkeypatch.setattr(time, "time_ns", lambda: real() + ahead_s * 10**9)
    keep = TopicSettings(retention_time_ms=600_000)
    async with running_api(tmp_path / "d", topic_defaults=keep, **FAST) as api:
        ahead_s = 0
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api, 10)
        await pass_all(api)
        await configure(api)  # saves it
        assert segments(tmp_path / "d") == [0, 2, 4, 6, 8]
        ahead_s = 601
        await configure(api)
        assert segments(tmp_path / "d") == [10]


@pytest.mark.parametrize("set_back", [True, False])
async def test_ttl_follows_the_machines_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_back: bool
) -> None:
    """For a new message and a redelivered one."""
    real, ahead_s = time.time_ns, 3600
    monkeypatch.setattr(time, "time_ns", lambda: real() + ahead_s * 10**9)
    async with running_api(tmp_path / "d", topic_defaults=TopicSettings(ttl_ms=600_000)) as api:
        ahead_s = 0 if set_back else 3600
        await api.tcp.publish("t", b"again")
        await api.tcp.publish("t", b"fresh")
        await api.tcp.subscribe("t", "c", ready_count=1)
        message = await api.tcp.message()
        ahead_s += 0 if set_back else 601
        await api.tcp.send(b"RDY 0\nREQ %s 0\nRDY 2\n" % message.id)
        if set_back:
            assert {(await api.tcp.message()).body for _ in range(2)} == {b"again", b"fresh"}
        else:
            await api.tcp.nothing_more()
            assert (await api.channel("t", "c"))["depth"] == 0


async def test_failed_deletion_of_files_does_not_affect_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Counting()
    async with running_api(tmp_path / "d", files=files, **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api, 10)
        files.keeps = True
        await pass_all(api)
        assert (await api.post("/channel/create", topic="t", channel="d"))[0] == 200
        assert (await api.send("POST", "/channel/seek?topic=t&channel=c&to=4")).status_code == 200
        await until(lambda: "Read-only file system" in caplog.text)
        assert "NOK" in (await api.get("/ping")).text
        assert segments(tmp_path / "d") == [0, 2, 4, 6, 8]
        await pass_all(api)
        files.keeps = False
        await until(lambda: segments(tmp_path / "d") == [8])
        with trio.fail_after(PATIENCE_S):
            while (await api.get("/ping")).text != "OK":
                pass  # a thread deletes the files


async def test_failed_deletion_of_files_is_retried_in_an_idle_broker(tmp_path: Path) -> None:
    files = Counting()
    async with running_api(tmp_path / "d", files=files, **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api, 10)
        files.keeps = True
        await pass_all(api)
        await until(lambda: files.kept > 5)
        files.keeps = False
        await until(lambda: segments(tmp_path / "d") == [8])


async def test_publishes_wait_for_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both sync modes, no message is lost or out of order between the files."""
    monkeypatch.setattr(retention, "MIN_FILE_NS", 0)
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


async def test_full_topic_refuses_until_there_is_room(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await configure(api, max_messages=3)
        await api.tcp.publish("t", b"a", b"b")
        await api.tcp.send(mpub("t", b"c", b"d"))
        stored = "nothing of it was stored"
        reason = f"topic t is full: 2 messages wait, 2 more are too many: max_messages is 3; {stored}"
        assert await api.tcp.error() == f"E_TOPIC_FULL MPUB failed {reason}"
        reason = f"topic t cannot take 4 messages at once: max_messages is 3; {stored}"
        assert await api.post("/mpub", b"1\n2\n3\n4", topic="t") == (503, reason)
        assert await api.post("/pub", b"c", topic="t") == (200, "OK")
        refused = await api.post("/pub", b"d", topic="t")
        reason = f"topic t is full: 3 messages wait, 1 more are too many: max_messages is 3; {stored}"
        assert refused == (503, reason)
        assert (await api.get("/ping")).text == "OK"  # the broker is healthy
        await api.post("/topic/empty", topic="t")
        assert await api.post("/pub", b"d", topic="t") == (200, "OK")
        assert "dropped_count" not in await stats(api)


async def test_publishes_stored_together_respect_the_limit(tmp_path: Path) -> None:
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
                        assert frame[1].startswith(b"E_TOPIC_FULL PUB failed topic t is full")
                        return
                    stored += 1

        address = "%s:%d" % api.tcp.stream.socket.getpeername()
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(publish, address)
        assert stored == (await stats(api))["depth"] == 50


async def test_publishes_that_wait_for_a_sync_count_for_the_limit(tmp_path: Path) -> None:
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        await api.tcp.publish("t", b"makes the file")
        await configure(api, max_messages=3)
        async with connected("%s:%d" % api.tcp.stream.socket.getpeername()) as other:
            files.hold("sync")
            await api.tcp.send(mpub("t", b"a", b"b"))
            await files.reached()
            await settle()  # what has reached it may be another sync
            await other.send(pub("t", b"c"))
            await settle()
            files.release()
            assert "topic t is full" in await other.error()
        await api.tcp.ok()
        assert (await stats(api))["depth"] == 3


async def test_oldest_messages_are_dropped_and_counted(tmp_path: Path) -> None:
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


async def test_smaller_limit_applies_at_once(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await api.tcp.publish("t", b"0", b"1", b"2")
        await configure(api, max_messages=1, when_full="drop-oldest")
        channel = (await stats(api))["channels"][0]
        assert (channel["depth"], channel["dropped_count"]) == (1, 2)


async def test_fast_consumer_loses_nothing(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/channel/create", topic="t", channel="c")
        await api.post("/topic/create", topic="t")
        await configure(api, max_messages=1, when_full="drop-oldest")
        await api.tcp.subscribe("t", "c", 100)
        await api.tcp.publish("t", *[b"%d" % n for n in range(100)])
        assert [(await api.tcp.message()).body for _ in range(100)] == [b"%d" % n for n in range(100)]


# ---------------------------------------------------------------------- TTL


async def test_old_messages_are_dropped_without_a_consumer(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", **FAST) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await fill(api)
        await configure(api, ttl_ms=100)
        await until(lambda: segments(tmp_path / "d") == [28])
        await until_depth(api, 0)  # the two messages of the last file may be younger
        channel = (await stats(api))["channels"][0]
        assert (channel["depth"], channel["expired_count"]) == (0, 30)
        assert 'nsq_channel_expired_total{channel="c",topic="t"} 30.0' in (await api.get("/metrics")).text


async def test_old_messages_are_dropped_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.time_ns()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now_ns)  # so that nothing is too old before the restart
        async with running_api(tmp_path / "d", **FAST) as api:
            await api.post("/topic/create", topic="t")
            await fill(api)
            await configure(api, ttl_ms=1500)
    async with running_api(tmp_path / "d", **FAST) as api:
        await until(lambda: segments(tmp_path / "d") == [28])
        with trio.fail_after(PATIENCE_S):
            while (await stats(api))["depth"]:
                pass  # they become too old
        assert (await stats(api))["expired_count"] == 30


async def test_old_redelivered_messages_do_not_delay_others(tmp_path: Path) -> None:
    """They exceed the drops of one turn; dropping continues although nothing else happens."""
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await api.tcp.publish("t", *[b"%d" % n for n in range(2000)])
        address = "%s:%d" % api.tcp.stream.socket.getpeername()
        async with connected(address) as client:
            await client.subscribe("t", "c", 2500)
            for _ in range(2000):
                await client.message()
        await until_depth(api, 2000)
        await configure(api, ttl_ms=1)
        await api.tcp.subscribe("t", "c", 1)
        await until_depth(api, 0)
        assert (await stats(api))["channels"][0]["expired_count"] == 2000


async def until_depth(api: Api, depth: int) -> None:
    with trio.fail_after(PATIENCE_S):
        while (await stats(api))["channels"][0]["depth"] != depth:
            pass  # it takes some turns


async def test_active_settings_are_in_the_stats(tmp_path: Path) -> None:
    usual = {"retention_time_ms", "retention_bytes", "ttl_ms", "max_messages", "max_bytes", "when_full"}
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        assert not usual & (await stats(api)).keys()
        await configure(api, ttl_ms=5, max_messages=7)
    async with running_api(tmp_path / "d") as api:
        found = await stats(api)
        assert {name: found[name] for name in usual & found.keys()} == {
            "ttl_ms": 5,
            "max_messages": 7,
            "when_full": "reject",
        }


async def test_producer_knows_that_a_full_topic_stored_nothing(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await configure(api, max_messages=1)
        await api.tcp.publish("t", b"a")
        async with Producer("%s:%d" % api.tcp.stream.socket.getpeername()) as producer:
            with pytest.raises(
                PublishFailed, match="E_TOPIC_FULL PUB failed topic t is full: 1 messages"
            ) as failed:
                await producer.publish("t", b"b")
        assert not failed.value.maybe_stored


async def test_first_of_several_refused_publishes_is_answered(tmp_path: Path) -> None:
    full = TopicSettings(max_messages=1)
    async with (
        running_broker(tmp_path / "d", topic_defaults=full) as bound,
        connected(bound.tcp_address) as client,
    ):
        await client.subscribe("t", "c")
        await client.publish("t", b"x")
        await client.send(pub("t", b"y") + mpub("t", b"y", b"z"))
        assert (await client.error()).startswith("E_TOPIC_FULL PUB failed")
