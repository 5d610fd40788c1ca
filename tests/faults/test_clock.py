"""Tests for changes of the machine's clock, back and forward: while the broker runs, and between two runs."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from broker.api import Api, running_api
from broker.moving import Mover
from broker.support import RawClient, connected, dpub, identify, running_broker, settle, until
from faults.scenario import http
from trio_nsq.broker.state.settings import TopicSettings

HOUR_S = 3600
DAY_S = 24 * HOUR_S
_START_S = 1_700_000_000


class WallClock:
    """The machine's clock: it follows the test's clock, and can be set.

    Args:
        clock: The monotonic time, which the test moves.
    """

    def __init__(self, clock: trio.testing.MockClock) -> None:
        self._clock = clock
        self._ahead_s = 0.0

    def time(self) -> float:
        """Return Unix seconds."""
        return _START_S + self._ahead_s + self._clock.current_time()

    def time_ns(self) -> int:
        """Return Unix nanoseconds."""
        return int(self.time() * 10**9)

    def set(self, by_s: float) -> None:
        """Move it forward, or back if negative."""
        self._ahead_s += by_s

    async def pass_time(self, seconds: float) -> None:
        """Let real time pass."""
        await settle()
        self._clock.jump(seconds)
        await settle()


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


@pytest.fixture
def wall(clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch) -> WallClock:
    """A simulated clock of the machine."""
    wall = WallClock(clock)
    monkeypatch.setattr(time, "time", wall.time)
    monkeypatch.setattr(time, "time_ns", wall.time_ns)
    return wall


async def defer(client: RawClient, seconds: int, body: bytes) -> None:
    """DPUB to topic t."""
    await client.send(dpub("t", seconds * 1000, body))
    await client.ok()


@pytest.mark.parametrize("by_s", [-DAY_S, -1, 1, DAY_S])
async def test_deferred_messages_of_a_running_broker_do_not_depend_on_the_clock(
    tmp_path: Path, clock: trio.testing.MockClock, wall: WallClock, by_s: int
) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        await defer(client, 20, b"before")
        wall.set(by_s)
        await defer(client, 20, b"after")
        await wall.pass_time(19)
        await client.nothing_more()
        await wall.pass_time(2)
        assert [(await client.message()).body for _ in range(2)] == [b"before", b"after"]


@pytest.mark.parametrize("by_s", [-DAY_S, -1, 1, DAY_S])
async def test_requeues_and_timeouts_do_not_depend_on_the_clock(
    tmp_path: Path, clock: trio.testing.MockClock, wall: WallClock, by_s: int
) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(identify(msg_timeout=20_000))
        await client.ok()
        await client.publish("t", b"requeued", b"unanswered")
        await client.send(b"SUB t c\n")
        await client.ok()
        await client.send(b"RDY 2\n")
        requeued, _ = await client.message(), await client.message()
        await client.send(b"REQ %s 20000\n" % requeued.id)
        await client.nothing_more()
        wall.set(by_s)
        await wall.pass_time(19)
        await client.nothing_more()
        await wall.pass_time(2)
        came = {
            message.body: message.attempts for message in [await client.message(), await client.message()]
        }
        assert came == {b"requeued": 2, b"unanswered": 2}


@pytest.mark.parametrize("by_s", [-HOUR_S, HOUR_S])
async def test_due_times_are_shown_by_the_clock(
    tmp_path: Path, clock: trio.testing.MockClock, wall: WallClock, by_s: int
) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await api.post("/pub", b"x", topic="t", defer=60_000)
        wall.set(by_s)
        due_s = int(wall.time()) + 60
        where: dict[str, Any] = {"topic": "t", "channel": "c"}
        before = f"@{due_s - 5},@{due_s + 5}"
        counts = (await api.get("/channel/deferred/counts", before=before, **where)).json()
        assert counts["due_before"] == [0, 1]
        for path in ("/channel/deferred", "/channel/peek"):
            assert (await api.get(path, **where)).json()["due_ns"] // 10**9 == due_s
        assert counts["first_due_ns"] // 10**9 == counts["last_due_ns"] // 10**9 == due_s


async def test_timestamps_follow_the_clock(
    tmp_path: Path, clock: trio.testing.MockClock, wall: WallClock
) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        await client.publish("t", b"before")
        wall.set(-HOUR_S)
        await client.publish("t", b"after")
        before, after = await client.message(), await client.message()
        assert (before.body, after.body) == (b"before", b"after")
        assert before.timestamp_ns - after.timestamp_ns == HOUR_S * 10**9


@pytest.mark.parametrize(
    ("by_s", "left_s"),
    [(0, HOUR_S), (-HOUR_S, 2 * HOUR_S), (HOUR_S // 2, HOUR_S // 2), (HOUR_S + 1, 0), (DAY_S, 0)],
)
async def test_after_a_restart_the_clock_decides_when_a_message_is_due(
    tmp_path: Path, clock: trio.testing.MockClock, wall: WallClock, by_s: int, left_s: int
) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await defer(client, HOUR_S, b"published")
        await client.publish("t", b"requeued")
        await client.subscribe("t", "c", ready_count=1)
        message = await client.message()
        await client.send(b"REQ %s %d\n" % (message.id, HOUR_S * 1000))
        await client.nothing_more()
    wall.set(by_s)
    async with running_broker(tmp_path / "d") as bound:
        if left_s:
            await wall.pass_time(left_s - 1)
            async with connected(bound.tcp_address) as client:
                await client.subscribe("t", "c", ready_count=10)
                await client.nothing_more()
            await wall.pass_time(2)
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c", ready_count=10)
            assert {(await client.message()).body for _ in range(2)} == {b"published", b"requeued"}


@pytest.mark.parametrize("graceful", [True, False])
@pytest.mark.parametrize("by_s", [-365 * DAY_S, -HOUR_S // 2, HOUR_S // 2, 365 * DAY_S])
async def test_after_a_restart_due_times_follow_a_clock_that_was_set_before(
    tmp_path: Path, clock: trio.testing.MockClock, wall: WallClock, by_s: int, graceful: bool
) -> None:
    """As of a machine whose clock is wrong until the network is there."""
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=2)
        await client.publish("t", b"requeued")
        requeued = await client.message()
        await defer(client, HOUR_S, b"before")
        await client.send(b"REQ %s %d\n" % (requeued.id, HOUR_S * 1000))
        await wall.pass_time(10)
        wall.set(by_s)
        await wall.pass_time(10)
        state = tmp_path / "d/topics/t.topic/state.json"
        await until(lambda: b'"ahead_ns"' in state.read_bytes())  # saved with the step
        await defer(client, HOUR_S, b"after")
        await client.send(dpub("no_channel", HOUR_S * 1000, b"waits"))
        await client.ok()
        shutil.copytree(tmp_path / "d", tmp_path / "killed")
    async with running_broker(tmp_path / ("d" if graceful else "killed")) as bound:
        await wall.pass_time(HOUR_S - 25)
        async with connected(bound.tcp_address) as client, connected(bound.tcp_address) as other:
            await client.subscribe("t", "c", ready_count=10)
            await other.subscribe("no_channel", "c", ready_count=10)
            await client.nothing_more()
            await wall.pass_time(15)
            assert {(await client.message()).body for _ in range(2)} == {b"before", b"requeued"}
            await client.nothing_more()
            await other.nothing_more()
            await wall.pass_time(12)
            assert (await client.message()).body == b"after"
            assert (await other.message()).body == b"waits"


@pytest.mark.parametrize("by_s", [-HOUR_S, HOUR_S])
async def test_a_channel_that_is_moved_back_defers_messages_again_after_the_clock_was_set(
    tmp_path: Path, clock: trio.testing.MockClock, wall: WallClock, by_s: int
) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        wall.set(by_s)
        await api.post("/pub", b"later", topic="t", defer=20_000)
        due_s = int(wall.time()) + 20
        where: dict[str, Any] = {"topic": "t", "channel": "c"}
        await api.post("/channel/empty", **where)
        await api.send("POST", "/channel/seek?topic=t&channel=c&to=earliest")
        assert (await api.get("/channel/peek", **where)).json()["due_ns"] // 10**9 == due_s
        await api.tcp.subscribe("t", "c", ready_count=1)
        await wall.pass_time(19)
        await api.tcp.nothing_more()
        await wall.pass_time(2)
        assert (await api.tcp.message()).body == b"later"


async def test_idle_topics_are_not_deleted_early_if_the_clock_was_set_before_a_restart(
    tmp_path: Path, clock: trio.testing.MockClock, wall: WallClock
) -> None:
    options: dict[str, Any] = {"topic_defaults": TopicSettings(expire_idle_ms=600_000)}

    async def topics_after(api: Api, minutes: float) -> int:
        for _ in range(int(2 * minutes)):
            await wall.pass_time(30)
        return len((await api.stats())["topics"])

    async with running_api(tmp_path / "d", **options) as api:
        api.client.headers["connection"] = "close"  # the broker closes idle connections
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        assert await topics_after(api, 3) == 1
        wall.set(365 * DAY_S)
        assert await topics_after(api, 0.5) == 1
    async with running_api(tmp_path / "d", **options) as api:
        api.client.headers["connection"] = "close"
        assert await topics_after(api, 6) == 1
        assert await topics_after(api, 5) == 0


@pytest.mark.parametrize("graceful", [True, False])
async def test_ids_do_not_repeat(
    tmp_path: Path, clock: trio.testing.MockClock, wall: WallClock, graceful: bool
) -> None:
    """The clock has any value in the second run, does not move while the broker runs, and the first run
    crashes.
    """
    ids: list[bytes] = []
    folder = tmp_path / "d"
    for number, by_s in enumerate((0, 0, -DAY_S, 10 * DAY_S, -30 * DAY_S, 1)):
        wall.set(by_s)
        async with running_broker(folder) as bound, connected(bound.tcp_address) as client:
            await client.publish("t", *[b"%d" % n for n in range(50)])
            wall.set(-1)
            await client.publish("t", *[b"%d" % n for n in range(50)])
            await client.subscribe("t", "c", ready_count=100)
            for _ in range(100):
                message = await client.message()
                ids.append(message.id)
                await client.send(b"FIN %s\n" % message.id)
            await client.nothing_more()
            assert bound.http_address is not None
            await http(bound.http_address, "POST", "/channel/pause", topic="t", channel="c")  # saves it
            await http(bound.http_address, "POST", "/channel/unpause", topic="t", channel="c")
            if not graceful:
                shutil.copytree(folder, tmp_path / f"killed{number}")
        if not graceful:
            folder = tmp_path / f"killed{number}"
    assert len(set(ids)) == len(ids) == 600
    assert ids == sorted(ids)


@pytest.mark.parametrize("by_s", [-2 * HOUR_S, 2 * HOUR_S])
async def test_move_between_brokers_whose_clocks_were_set(
    tmp_path: Path, clock: trio.testing.MockClock, wall: WallClock, by_s: int
) -> None:
    """The source's clock is set after its start; the target starts with the right clock."""
    async with running_api(tmp_path / "a") as source:
        wall.set(by_s)
        async with running_api(tmp_path / "b") as target:
            for api in (source, target):
                await api.post("/topic/create", topic="t")
                await api.post("/channel/create", topic="t", channel="c")
                answer = await api.client.put(
                    "/topic/settings", params={"topic": "t"}, json={"ttl_ms": HOUR_S * 1000}
                )
                assert answer.status_code == 200
            await source.post("/pub", b"fresh", topic="t")
            await source.post("/pub", b"later", topic="t", defer=str(20_000))
            mover = Mover(source, target)
            await mover.drain()
            assert sum((await mover.all()).values()) == 2
            await target.tcp.subscribe("t", "c", ready_count=10)
            assert (await target.tcp.message()).body == b"fresh"
            await wall.pass_time(18)
            await target.tcp.nothing_more()
            await wall.pass_time(4)
            assert (await target.tcp.message()).body == b"later"


async def test_copies_of_a_folder_that_start_in_the_same_second_have_other_ids(
    tmp_path: Path, clock: trio.testing.MockClock, wall: WallClock
) -> None:
    """So readers notice that both have got messages."""
    async with running_api(tmp_path / "one") as api:
        await api.post("/pub", b"old", topic="t")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    ids = []
    for name in ("one", "two"):
        async with running_api(tmp_path / name) as api:
            await api.post("/pub", b"new", topic="t")
            await api.tcp.subscribe("t", "c", ready_count=2)
            ids.append([(await api.tcp.message()).id for _ in range(2)])
    assert ids[0][0] == ids[1][0]
    assert ids[0][1] != ids[1][1]
