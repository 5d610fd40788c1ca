"""Tests for `expire_idle`: topics and channels that nothing uses are deleted, and nothing that is used is lost."""

import errno
import json
import logging
import math
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from broker.api import DONE, OK, Api, address, running_api
from broker.audit_lines import lines_of
from broker.letters import fail, letters
from broker.state import Fixture
from broker.support import HeldFiles, connected, settle
from soak import in_soak, some
from trio_nsq.broker.moved_groups import MovedGroup
from trio_nsq.broker.state.settings import TopicSettings
from trio_nsq.log import Files
from trio_nsq.protocol.messages import pack_messages

DAY_MS = 86_400_000
MINUTE = 60
PATIENT_S = 0.01
IDLE_S = 0.001


@pytest.fixture
def autojump_clock(autojump_clock: MockClock) -> MockClock:
    """Return the clock of all tests, which also gives sockets time to answer before it jumps."""
    autojump_clock.autojump_threshold = PATIENT_S
    return autojump_clock


async def pass_time(clock: MockClock, duration_s: float) -> None:
    """Sleep while no client waits for an answer: the clock, which jumps about each second, need not be patient."""
    clock.autojump_threshold = IDLE_S
    await trio.sleep(duration_s)
    clock.autojump_threshold = PATIENT_S


async def put(api: Api, path: str, **settings: Any) -> None:
    response = await api.send("PUT", path, body=json.dumps(settings).encode())
    assert response.status_code == 200, response.text


async def names(api: Api) -> dict[str, list[str]]:
    """Return the topics, with their channels."""
    stats = await api.stats()
    return {
        topic["topic_name"]: [channel["channel_name"] for channel in topic["channels"]]
        for topic in stats["topics"]
    }


@asynccontextmanager
async def broker_with(
    tmp_path: Path, topic_s: float = 0, channel_s: float = 0, **options: Any
) -> AsyncIterator[Api]:
    """Run a broker with the topic `t` and the channel `t/c`, which expire after these times."""
    async with running_api(tmp_path / "d", **{"checkpoint_interval_ms": 30_000, **options}) as api:
        api.client.headers["connection"] = "close"  # the broker closes idle connections
        assert await api.post("/topic/create", topic="t") == DONE
        assert await api.post("/channel/create", topic="t", channel="c") == DONE
        await put(api, "/topic/settings?topic=t", expire_idle_ms=int(topic_s * 1000))
        await put(api, "/channel/settings?topic=t&channel=c", expire_idle_ms=int(channel_s * 1000))
        yield api


async def consume(api: Api, count: int = 1, topic: str = "t") -> list[bytes]:
    """Receive and finish all messages of the channel c, with a new client. Fails if these are not `count`."""
    async with connected(address(api)) as client:
        await client.subscribe(topic, "c", 100)
        bodies = []
        for _ in range(count):
            message = await client.message()
            await client.send(b"FIN %s\n" % message.id)
            bodies.append(message.body)
        with trio.fail_after(MINUTE):
            while any(await unfinished(api, topic)):
                await trio.sleep(0.1)
        return bodies


async def unfinished(api: Api, topic: str) -> list[int]:
    """Return the depth of the channel c, and the number of messages in flight and deferred."""
    (found,) = [each for each in (await api.stats())["topics"] if each["topic_name"] == topic]
    (channel,) = found["channels"]
    return [channel[name] for name in ("depth", "in_flight_count", "deferred_count")]


# ---------------------------------------------------------------------- what is deleted, and when


async def test_idle_topic_is_deleted_with_its_files(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trio_nsq.broker")
    audit = tmp_path / "audit"
    async with broker_with(tmp_path, 10 * MINUTE, audit_log=str(audit)) as api:
        assert await api.post("/pub", b"m", topic="t") == OK
        assert await consume(api) == [b"m"]
        await pass_time(autojump_clock, 9.5 * MINUTE)
        assert await names(api) == {"t": ["c"]}
        await pass_time(autojump_clock, MINUTE)
        assert await names(api) == {}
        assert not (tmp_path / "d" / "topics" / "t.topic").exists()
        assert "topic t is deleted: it was idle for 10m" in caplog.messages
        assert await api.post("/pub", b"again", topic="t") == OK
        assert await names(api) == {"t": []}
    (line,) = [each for each in lines_of(audit) if each["event"] == "expired"]
    assert line == {"event": "expired", "topic": "t"}


async def test_idle_channel_is_deleted_and_its_topic_stays(autojump_clock: MockClock, tmp_path: Path) -> None:
    audit = tmp_path / "audit"
    async with broker_with(tmp_path, 0, 10 * MINUTE, audit_log=str(audit)) as api:
        await pass_time(autojump_clock, 9.5 * MINUTE)
        assert await names(api) == {"t": ["c"]}
        await pass_time(autojump_clock, MINUTE)
        assert await names(api) == {"t": []}
        await pass_time(autojump_clock, MINUTE)
    async with running_api(tmp_path / "d") as api:
        assert await names(api) == {"t": []}
    assert {"event": "expired", "topic": "t", "channel": "c"} in lines_of(audit)


async def test_default_holds_for_topics_and_channels_unless_they_have_their_own(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    defaults = TopicSettings(expire_idle_ms=10 * MINUTE * 1000)
    async with running_api(tmp_path / "d", topic_defaults=defaults, checkpoint_interval_ms=30_000) as api:
        api.client.headers["connection"] = "close"  # the broker closes idle connections
        for topic in "abc":
            assert await api.post("/topic/create", topic=topic) == DONE
        for channel in "de":
            assert await api.post("/channel/create", topic="a", channel=channel) == DONE
        await put(api, "/channel/settings?topic=a&channel=d", expire_idle_ms=0)
        await put(api, "/topic/settings?topic=a", expire_idle_ms=0)
        await put(api, "/topic/settings?topic=b", expire_idle_ms=20 * MINUTE * 1000)
        await pass_time(autojump_clock, 9.5 * MINUTE)
        assert await names(api) == {"a": ["d", "e"], "b": [], "c": []}
        await pass_time(autojump_clock, MINUTE)
        assert await names(api) == {"a": ["d"], "b": []}
        await pass_time(autojump_clock, 10 * MINUTE)
        assert await names(api) == {"a": ["d"]}


USES = [
    *("a message waits", "a message is deferred", "a consumer", "a message in flight", "paused", "off"),
    *("a message waits in the paused topic", "a deferred one waits in the paused topic"),
]


@pytest.mark.parametrize(
    ("what", "use"),
    [
        *[("topic", use) for use in USES[:2] + USES[4:7]],
        *[("channel", use) for use in USES[2:6] + USES[7:]],
        *in_soak(*[("topic", use) for use in USES[2:4] + USES[7:]]),
        *in_soak(*[("channel", use) for use in USES[:2] + USES[6:7]]),
    ],
)
async def test_what_is_used_stays(autojump_clock: MockClock, tmp_path: Path, use: str, what: str) -> None:
    times = (MINUTE, 0) if what == "topic" else (0, MINUTE)
    async with broker_with(tmp_path, *times) as api, connected(address(api)) as client:
        if use == "a message waits":
            assert await api.post("/pub", b"m", topic="t") == OK
        elif use == "a message is deferred":
            assert await api.post("/pub", b"m", topic="t", defer=100 * DAY_MS) == OK
        elif use == "a consumer":
            await client.subscribe("t", "c")
        elif use == "a message in flight":
            assert await api.post("/pub", b"m", topic="t") == OK
            await client.subscribe("t", "c", 1)
            await client.message()
        elif use == "paused":
            assert await api.post(f"/{what}/pause", topic="t", channel="c") == DONE
        elif use.endswith("in the paused topic"):
            assert await api.post("/topic/pause", topic="t") == DONE
            later = {"defer": 100_000} if use.startswith("a deferred") else {}
            assert await api.post("/pub", b"m", topic="t", **later) == OK
        else:
            await put(api, f"/{what}/settings?topic=t&channel=c", expire_idle_ms=0)
        if use in ("a consumer", "a message in flight"):
            for _ in range(18):
                await client.send(b"NOP\n")
                await trio.sleep(5)
        else:
            await pass_time(autojump_clock, 90)
        assert await names(api) == {"t": ["c"]}
        if use.endswith("in the paused topic"):
            assert await api.post("/topic/unpause", topic="t") == DONE
            assert await consume(api) == [b"m"]


async def test_each_use_begins_the_time_anew(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with broker_with(tmp_path, 3 * MINUTE) as api:
        await pass_time(autojump_clock, 2.5 * MINUTE)
        assert await api.post("/pub", b"m", topic="t") == OK
        await pass_time(autojump_clock, 2.5 * MINUTE)
        assert await consume(api) == [b"m"]
        await pass_time(autojump_clock, 2.5 * MINUTE)
        assert await consume(api, 0) == []
        await pass_time(autojump_clock, 2.5 * MINUTE)
        assert "t" in await names(api)
        await pass_time(autojump_clock, MINUTE)
        assert "t" not in await names(api)


@pytest.mark.parametrize(
    ("settings", "after_ms"),
    [
        (TopicSettings(), 0),
        (TopicSettings(expire_idle_ms=5), 5),
        (TopicSettings(expire_idle_ms=5, retention_time_ms=3), 5),
        (TopicSettings(expire_idle_ms=5, retention_time_ms=7), 7),
        (TopicSettings(expire_idle_ms=5, retention_time_ms=-1), 0),
        (TopicSettings(expire_idle_ms=5, retention_bytes=1), 0),
        (TopicSettings(expire_idle_ms=5, retention_bytes=-1), 0),
        (TopicSettings(expire_idle_ms=5, retention_bytes=1, retention_time_ms=7), 7),
    ],
)
async def test_topic_stays_while_it_keeps_messages(settings: TopicSettings, after_ms: int) -> None:
    assert settings.expires_after_ms == after_ms


async def test_ephemeral_ones_have_their_own_rules(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with broker_with(tmp_path, MINUTE) as api:
        assert await api.post("/pub", b"m", topic="e#ephemeral") == OK
        await put(api, "/topic/settings?topic=e%23ephemeral", expire_idle_ms=1000)
        await pass_time(autojump_clock, 3 * MINUTE)
        assert await names(api) == {"e#ephemeral": []}


# ---------------------------------------------------------------------- restarts


async def test_time_goes_on_after_a_restart(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time_ns
    async with broker_with(tmp_path, 10 * MINUTE) as api:
        await pass_time(autojump_clock, 8 * MINUTE)
        assert await names(api) == {"t": ["c"]}
    monkeypatch.setattr(time, "time_ns", lambda: real() + 8 * MINUTE * 10**9)  # as the clock of the test
    async with running_api(tmp_path / "d", checkpoint_interval_ms=30_000) as api:
        api.client.headers["connection"] = "close"
        await pass_time(autojump_clock, 4 * MINUTE)
        assert await names(api) == {"t": ["c"]}  # clients may connect again
        await pass_time(autojump_clock, 2 * MINUTE)
        assert await names(api) == {}


async def test_use_after_a_restart_begins_the_time_anew(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with broker_with(tmp_path, 10 * MINUTE) as api:
        await pass_time(autojump_clock, 8 * MINUTE)
    async with running_api(tmp_path / "d", checkpoint_interval_ms=30_000) as api:
        api.client.headers["connection"] = "close"
        assert await consume(api, 0) == []
        await pass_time(autojump_clock, 9 * MINUTE)
        assert "t" in await names(api)
        await pass_time(autojump_clock, 2 * MINUTE)
        assert "t" not in await names(api)


def test_saved_time_is_that_of_the_last_use() -> None:
    """A use since the last examination is saved, too: a crash does not make the topic older."""
    fixture = Fixture()
    fixture.channel()
    fixture.topic.examine_use(fixture.now_ns)
    fixture.pass_ms(1000)
    idle_since = fixture.topic.idle_since_ns
    assert idle_since == fixture.now_ns - 10**9

    def restarted() -> tuple[int, int]:
        other = fixture.restarted(json.loads(json.dumps(fixture.topic.snapshot())))
        return other.topic.idle_since_ns, other.channel().idle_since_ns

    assert restarted() == (idle_since, idle_since)
    before = fixture.topic.snapshot()
    subscriber = fixture.subscriber()
    subscriber.leave()
    assert restarted() == (0, 0)
    fixture.topic.examine_use(fixture.now_ns)
    assert restarted() == (fixture.now_ns, fixture.now_ns)
    fixture.publish(b"m")
    assert fixture.drain() == [b"m"]
    assert restarted() == (0, 0)
    assert fixture.restarted(before).topic.idle_since_ns == 0  # the log has what the saved state lacks
    fixture.topic.examine_use(fixture.now_ns)
    fixture.now_ns -= 10**12  # the clock is set back
    fixture.topic.examine_use(fixture.now_ns)
    assert fixture.topic.idle_since_ns == fixture.now_ns


# ---------------------------------------------------------------------- publishes and subscriptions meanwhile


@pytest.mark.parametrize("what", ["topic", "channel"])
@pytest.mark.parametrize("client", ["PUB", "/pub", "SUB", "/channel/create"])
async def test_what_comes_during_a_deletion_waits(
    autojump_clock: MockClock, tmp_path: Path, what: str, client: str
) -> None:
    files = HeldFiles()
    times = (MINUTE, 0) if what == "topic" else (0, MINUTE)
    async with broker_with(tmp_path, *times, files=files) as api:
        await pass_time(autojump_clock, MINUTE - 1)
        files.hold("rename" if what == "topic" else "replace")
        await files.reached()
        async with connected(address(api)) as other, trio.open_nursery() as nursery:
            done: list[str] = []

            async def use() -> None:
                if client == "PUB":
                    await other.publish("t", b"m")
                elif client == "/pub":
                    assert await api.post("/pub", b"m", topic="t") == OK
                elif client == "SUB":
                    await other.subscribe("t", "c", 1)
                else:
                    status, _ = await api.post("/channel/create", topic="t", channel="c")
                    assert status == 200 or (status == 404 and what == "topic")  # the topic is gone then
                done.append(client)

            nursery.start_soon(use)
            await settle()
            assert not done
            files.release()
            with trio.fail_after(MINUTE):
                while not done:
                    await trio.sleep(0.1)
            if client == "SUB":
                assert await api.post("/pub", b"m", topic="t") == OK
                assert (await other.message()).body == b"m"
                return
        if client != "/channel/create":
            assert await consume(api) == [b"m"]


@pytest.mark.parametrize("what", ["topic", "channel"])
@pytest.mark.parametrize("request_", ["/channel/pub", "/dead_letters/requeue", "/topic/move/store"])
async def test_message_for_a_channel_that_is_being_deleted_is_refused(
    autojump_clock: MockClock, tmp_path: Path, what: str, request_: str
) -> None:
    """It waits for the end, and must not be acknowledged then: no channel would get it."""
    files = HeldFiles()
    times = (MINUTE, 0) if what == "topic" else (0, MINUTE)
    async with broker_with(tmp_path, *times, files=files, checkpoint_interval_ms=100 * DAY_MS) as api:
        settings = {"max_attempts": 1, "dead_letter_topic": "dead"}
        await put(api, "/channel/settings?topic=t&channel=c", **settings)
        assert await api.post("/pub", b"m", topic="t") == OK
        async with connected(address(api)) as client:
            await client.subscribe("t", "c", 1)
            await fail(client, 1)
            while (await names(api)).get("dead") != ["dead-letters"] or not await letters(api):
                await trio.sleep(0.1)
        await pass_time(autojump_clock, MINUTE - 1)
        files.hold("rename" if what == "topic" else "replace")
        await files.reached()
        group = MovedGroup(5, 5, pack_messages([b"moved"]), channel="c").encode()
        path, body, expected = {
            "/channel/pub": ("?topic=t&channel=c", b"m", (404, "CHANNEL_NOT_FOUND")),
            "/dead_letters/requeue": ("?topic=dead", b"", (200, "there is no channel t/c")),
            "/topic/move/store": (
                "?topic=t&producer=p",
                group,
                (409, "NO_CHANNEL: create channel t/c first"),
            ),
        }[request_]
        async with trio.open_nursery() as nursery:
            answers: list[tuple[int, str]] = []

            async def send() -> None:
                answer = await api.send("POST", request_ + path, body=body)
                answers.append((answer.status_code, answer.text))

            nursery.start_soon(send)
            await settle()
            assert not answers
            files.release()
        ((status, text),) = answers
        assert status == expected[0]
        assert expected[1] in text
        await settle()
        assert (await names(api)).get("t") == (None if what == "topic" else [])
        assert len(await letters(api)) == 1


async def test_publish_under_way_keeps_the_topic(autojump_clock: MockClock, tmp_path: Path) -> None:
    files = HeldFiles()
    async with broker_with(tmp_path, MINUTE, MINUTE, files=files) as api:
        assert await api.post("/pub", b"creates the log", topic="t") == OK
        assert await consume(api) == [b"creates the log"]
        await pass_time(autojump_clock, MINUTE - 5)
        autojump_clock.autojump_threshold = math.inf  # a thread takes no time of this clock
        files.hold("sync")
        async with connected(address(api)) as other, trio.open_nursery() as nursery:
            nursery.start_soon(other.publish, "t", b"m")
            await files.reached()
            autojump_clock.jump(20)  # the idle time is over
            await settle()
            files.release()
        autojump_clock.autojump_threshold = PATIENT_S
        await pass_time(autojump_clock, 3 * MINUTE)
        assert (await names(api))["t"] == ["c"]
        assert await consume(api) == [b"m"]


async def test_seek_under_way_keeps_the_channel(autojump_clock: MockClock, tmp_path: Path) -> None:
    files = HeldFiles()
    async with broker_with(tmp_path, 0, 100, files=files) as api:
        api.client.timeout = None
        await put(api, "/topic/settings?topic=t", retention_time_ms=DAY_MS)
        assert await api.post("/pub", b"m", topic="t") == OK
        assert await consume(api) == [b"m"]
        # The idle time begins within 10 s, when the broker examines the channel.
        await pass_time(autojump_clock, MINUTE)
        autojump_clock.autojump_threshold = math.inf
        files.hold("replace")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(api.send, "POST", "/channel/seek?topic=t&channel=c&to=earliest")
            await files.reached()
            autojump_clock.jump(60)  # the idle time is over
            await settle()
            files.release()
        autojump_clock.autojump_threshold = PATIENT_S
        await pass_time(autojump_clock, 3 * MINUTE)
        assert (await names(api))["t"] == ["c"]
        assert await consume(api) == [b"m"]


@pytest.mark.parametrize("seed", some(range(2)))
async def test_no_acknowledged_message_is_lost(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """Publishers and a consumer come back when the topic and channel are about to be deleted, or were just deleted."""
    caplog.set_level(logging.INFO, "trio_nsq.broker")
    rng = random.Random(seed)
    acknowledged: set[bytes] = set()
    received: set[bytes] = set()

    async def publish(api: Api, body: bytes, after_s: float) -> None:
        await trio.sleep(after_s)
        if await api.post("/pub", body, topic="t") == OK:
            acknowledged.add(body)

    async def drain(api: Api, after_s: float, for_s: float) -> None:
        await trio.sleep(after_s)
        async with connected(address(api)) as client:
            await client.subscribe("t", "c", 100)
            with trio.move_on_after(for_s):
                while True:
                    message = await client.message()
                    await client.send(b"FIN %s\n" % message.id)
                    received.add(message.body)

    async with broker_with(tmp_path) as api:
        for number in range(20):
            # What is new, or is just being deleted, gets the settings in the next round.
            for target in ("/topic/settings?topic=t", "/channel/settings?topic=t&channel=c"):
                await api.send("PUT", target, body=b'{"expire_idle_ms": 10000}')
            await pass_time(autojump_clock, rng.uniform(9, 13))
            async with trio.open_nursery() as nursery:
                for name in (b"a", b"b"):
                    nursery.start_soon(publish, api, b"%s %d" % (name, number), rng.uniform(0, 1))
                nursery.start_soon(drain, api, rng.uniform(0, 1), rng.uniform(0, 2))
        await drain(api, 0, 5)
    assert acknowledged
    assert received >= acknowledged
    assert any("is deleted: it was idle for 10s" in message for message in caplog.messages)


class UndeletableFiles(Files):
    """A file system on which no topic can be deleted, until `fails` is False."""

    fails = True

    def rename(self, path: Path, to: Path) -> None:
        if self.fails and "-deleted-" in to.name:
            raise OSError(errno.EIO, "Input/output error")
        super().rename(path, to)


async def test_failure_is_logged_once_and_tried_again(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = UndeletableFiles()
    async with broker_with(tmp_path, MINUTE, files=files) as api:
        await pass_time(autojump_clock, 3 * MINUTE)
        assert await names(api) == {"t": ["c"]}
        assert await api.post("/pub", b"m", topic="t") == OK
        assert await consume(api) == [b"m"]
        files.fails = False
        await pass_time(autojump_clock, 2 * MINUTE)
        assert "t" not in await names(api)
    assert caplog.messages.count("topic t is idle and cannot be deleted: Input/output error") == 1
