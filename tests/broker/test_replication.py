"""A broker whose OKs wait for followers, and the brokers that open the followers' folders."""

import random
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from broker.leading import Leading, Record, bodies_in, leading, no_answer, post, promote
from broker.support import (
    BOTH_SYNCS,
    PATIENCE_S,
    HeldFiles,
    connected,
    mpub,
    pub,
    running_broker,
    settle,
    until,
)
from faults.power_cut import AHEAD, sync_options
from replication.leader import tree_of
from soak import some
from trio_nsq.replication.link import FrameKind, LinkError, encode_json, encode_number

SYNCS = pytest.mark.parametrize("sync", ["always", AHEAD, "interval"])


async def test_an_ok_waits_for_the_follower(tmp_path: Path) -> None:
    files = HeldFiles()
    async with leading(tmp_path / "one") as leader, trio.open_nursery() as nursery:
        nursery.start_soon(leader.follow, tmp_path / "two", "two", files)
        await leader.until_in_sync("two")
        async with connected(leader.addresses.tcp_address) as client:
            await client.publish("t", b"before")
            files.hold("sync")
            await client.send(pub("t", b"held"))
            await files.reached()
            async with connected(leader.addresses.tcp_address) as other:
                await other.publish("e#ephemeral", b"is not replicated")
            await settle()
            await no_answer(client)
            files.release()
            await client.ok()
        nursery.cancel_scope.cancel()


async def test_a_change_waits_for_the_follower(tmp_path: Path) -> None:
    files = HeldFiles()
    answered = trio.Event()
    async with leading(tmp_path / "one") as leader, trio.open_nursery() as nursery:
        nursery.start_soon(leader.follow, tmp_path / "two", "two", files)
        await leader.until_in_sync("two")

        async def change(path: str) -> None:
            await post(leader.addresses, path)
            answered.set()

        for path in ("/topic/create?topic=t", "/channel/create?topic=t&channel=c", "/topic/delete?topic=t"):
            files.hold("sync")
            nursery.start_soon(change, path)
            await files.reached()
            with trio.move_on_after(0.2):
                await answered.wait()
                pytest.fail(f"{path} is answered before the follower has it")
            files.release()
            await answered.wait()
            answered = trio.Event()
        nursery.cancel_scope.cancel()


async def test_a_leader_goes_on_alone(tmp_path: Path) -> None:
    async with leading(tmp_path / "one") as leader, connected(leader.addresses.tcp_address) as client:
        await client.publish("t", b"alone")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leader.follow, tmp_path / "two", "two")
            nursery.start_soon(leader.follow, tmp_path / "three", "three")
            await leader.until_in_sync("two", "three")
            await client.publish("t", b"with followers")
            nursery.cancel_scope.cancel()
        await leader.until_in_sync()
        await client.publish("t", b"alone again")
    promote(tmp_path / "two")
    async with running_broker(tmp_path / "two") as addresses:
        assert [body for _, body in await bodies_in(addresses, "t")] == [b"alone", b"with followers"]


class Load:
    """Publishers and consumers with a ledger.

    Attributes:
        acknowledged: The bodies for which there was an OK, by topic.
        finished: The bodies of messages that a consumer has finished, by topic: their files may be deleted.
    """

    def __init__(self, leader: Leading, seed: int) -> None:
        self.acknowledged: dict[str, set[bytes]] = {}
        self.finished: dict[str, set[bytes]] = {}
        self._addresses = leader.addresses
        self._chance = random.Random(seed)
        self._number = 0

    def _bodies(self) -> list[bytes]:
        count = self._chance.choice((1, 1, 20))
        self._number += count
        return [b"%d " % (self._number - each) + bytes(self._chance.randrange(200)) for each in range(count)]

    async def publish(self, topic: str) -> None:
        """Publish until cancelled."""
        async with connected(self._addresses.tcp_address) as client:
            while True:
                bodies = self._bodies()
                await client.send(mpub(topic, *bodies))
                await client.ok()
                self.acknowledged.setdefault(topic, set()).update(bodies)

    async def consume(self, topic: str, channel: str) -> None:
        """Consume until cancelled; some messages are requeued."""
        async with connected(self._addresses.tcp_address) as client:
            await client.subscribe(topic, channel, 10)
            while True:
                frame = await client.frame()
                assert frame is not None
                if frame[0] == 2:
                    answer = b"REQ %s 0\n"
                    if self._chance.random() < 0.9:
                        self.finished.setdefault(topic, set()).add(frame[1][26:])
                        answer = b"FIN %s\n"
                    await client.send(answer % frame[1][10:26])
                elif frame[1] == b"_heartbeat_":
                    await client.send(b"NOP\n")

    async def administer(self) -> None:
        """Create, change and delete topics and channels until cancelled."""
        while True:
            path = self._chance.choice(
                (
                    "/topic/create?topic=x",
                    "/channel/create?topic=x&channel=c",
                    "/channel/pause?topic=a&channel=c",
                    "/channel/unpause?topic=a&channel=c",
                    "/topic/delete?topic=x",
                )
            )
            await post(self._addresses, path)


@SYNCS
@pytest.mark.parametrize("seed", some(range(2)))
async def test_a_follower_has_all_that_was_acknowledged(tmp_path: Path, sync: str, seed: int) -> None:
    """It is cut off at some moment, and a broker opens its folder."""
    chance = random.Random(seed)
    options = sync_options(sync) | {"max_bytes_per_file": 20_000, "checkpoint_interval_ms": 50}
    async with leading(tmp_path / "one", **options) as leader, trio.open_nursery() as nursery:
        load = Load(leader, seed)
        topics = ("a", "b", "c", "d")
        for topic in topics:
            nursery.start_soon(load.publish, topic)
            nursery.start_soon(load.publish, topic)
        for topic in topics[:2]:
            nursery.start_soon(load.consume, topic, "c")
        nursery.start_soon(load.administer)
        await until(lambda: sum(map(len, load.acknowledged.values())) > 500)
        async with trio.open_nursery() as following:
            following.start_soon(leader.follow, tmp_path / "two", "two")
            await leader.until_in_sync("two")
            more = sum(map(len, load.acknowledged.values())) + chance.randint(200, 1000)
            await until(lambda: sum(map(len, load.acknowledged.values())) > more)
            acknowledged = {topic: set(bodies) for topic, bodies in load.acknowledged.items()}
            following.cancel_scope.cancel()
        nursery.cancel_scope.cancel()
    promote(tmp_path / "two")
    async with running_broker(tmp_path / "two", **sync_options(sync)) as addresses:
        for topic in topics:
            found = await bodies_in(addresses, topic)
            assert acknowledged[topic] - load.finished.get(topic, set()) <= {body for _, body in found}
            assert len({message_id for message_id, _ in found}) == len(found)
        async with connected(addresses.tcp_address) as client:
            await client.publish("a", b"new")
        new = (await bodies_in(addresses, "a"))[-1]
        assert new[1] == b"new"


@BOTH_SYNCS
async def test_folders_are_the_same_after_a_stop(tmp_path: Path, sync: str) -> None:
    """A broker that stops cleanly leaves its followers the same files."""
    followed = trio.Event()
    async with trio.open_nursery() as nursery:
        async with leading(tmp_path / "one", sync=sync, max_bytes_per_file=5000) as leader:

            async def follow_to_the_end() -> None:
                with suppress(LinkError, trio.BrokenResourceError):
                    await leader.follow(tmp_path / "two", "two")
                followed.set()

            nursery.start_soon(follow_to_the_end)
            await leader.until_in_sync("two")
            async with connected(leader.addresses.tcp_address) as client:
                await client.subscribe("t", "c", 5)
                for number in range(50):
                    await client.publish("t", b"%d " % number * 100)
                    message = await client.message()
                    await client.send(b"FIN " + message.id + b"\n")
        with trio.fail_after(PATIENCE_S):
            await followed.wait()
    promote(tmp_path / "two")
    assert without_ids(tree_of(tmp_path / "two")) == without_ids(tree_of(tmp_path / "one"))


def without_ids(tree: dict[bytes, bytes | None]) -> dict[bytes, bytes | None]:
    """Return files without those that the end of a leadership changes."""
    return {path: data for path, data in tree.items() if not path.startswith(b"broker.json")}


async def test_an_old_leader_follows(tmp_path: Path) -> None:
    """What it had and nobody acknowledged is kept aside, with its write-ahead log; then its folder is the same."""
    options = sync_options(AHEAD)
    async with leading(tmp_path / "one", **options) as leader, trio.open_nursery() as nursery:
        nursery.start_soon(leader.follow, tmp_path / "two", "two")
        await leader.until_in_sync("two")
        async with connected(leader.addresses.tcp_address) as client:
            await client.publish("t", b"both have it")
            nursery.cancel_scope.cancel()
    async with (
        leading(tmp_path / "one", **options) as leader,
        connected(leader.addresses.tcp_address) as client,
    ):
        await client.publish("t", b"only the old leader has it")
    (tmp_path / "one" / "write-ahead.7").write_bytes(b"x")
    promote(tmp_path / "two")
    async with leading(tmp_path / "two", epoch=2, **options) as leader:
        async with connected(leader.addresses.tcp_address) as client:
            await client.publish("t", b"from the new leader")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leader.follow, tmp_path / "one", "three")
            await leader.until_in_sync("three")
            nursery.cancel_scope.cancel()
    kept = {
        path.name: path.read_bytes()
        for path in (tmp_path / "one" / "diverged-2").rglob("*")
        if path.is_file()
    }
    assert kept["write-ahead.7"] == b"x"
    assert any(b"only the old leader has it" in content for content in kept.values())
    promote(tmp_path / "one")
    async with running_broker(tmp_path / "one") as addresses:
        found = [body for _, body in await bodies_in(addresses, "t")]
    assert found == [b"both have it", b"from the new leader"]


async def test_a_follower_that_is_gone_is_recorded_so_before_the_next_ok(tmp_path: Path) -> None:
    """While that cannot be recorded, there is no OK: the follower could be elected."""
    record = Record()
    async with leading(tmp_path / "one", record=record) as leader:
        async with connected(leader.addresses.tcp_address) as client:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leader.follow, tmp_path / "two", "two")
                await until(lambda: record.members == {"two"})
                await client.publish("t", b"both")
                record.fails = True
                nursery.cancel_scope.cancel()
            await client.send(pub("t", b"alone"))
            attempts = record.attempts + 3
            await until(lambda: record.attempts >= attempts)
            assert record.members == {"two"}
            await no_answer(client)
            record.fails = False
            await client.ok()
            assert record.members == frozenset()


async def test_followers_that_are_disconnected_at_the_end_stay_recorded(tmp_path: Path) -> None:
    """One of them shall lead next."""
    record = Record()
    async with leading(tmp_path / "one", record=record) as leader, trio.open_nursery() as nursery:
        nursery.start_soon(follow_until_end, leader, tmp_path / "two")
        await leader.until_in_sync("two")
        leader.replication.end()
        await until(lambda: not leader.replication.connected)
        await settle()
        assert record.members == {"two"}
        leader.replication.fence("the test ends")  # otherwise the stop waits for the follower


async def test_a_follower_that_is_slow_while_the_leader_stops_stays_recorded(tmp_path: Path) -> None:
    """It has all that was acknowledged, and shall lead next."""
    record = Record()
    async with leading(tmp_path / "one", record=record, stall_s=0.5, stop_s=2.0) as leader:
        async with connected(leader.addresses.tcp_address) as client:
            await client.publish("t", b"before")
        last = leader.replication.operations.last_number
        hello = {
            "versions": [1],
            "cluster": "prod",
            "member": "two",
            "position": {"epoch": 1, "number": last},
        }
        async with await trio.open_tcp_stream("127.0.0.1", leader.port) as follower:
            await follower.send_all(b"".join(encode_json(FrameKind.HELLO, hello)))
            await until(lambda: record.members == {"two"})
            leader.stop()
            await leader.stopped()
    assert record.members == {"two"}
    assert "followers lack operations" in leader.replication.fenced_because


async def follow_until_end(leader: Leading, folder: Path) -> None:
    with suppress(LinkError, trio.BrokenResourceError):
        await leader.follow(folder, "two")


async def test_a_follower_is_recorded_when_it_has_what_was_acknowledged_without_it(tmp_path: Path) -> None:
    record = Record()
    async with leading(tmp_path / "one", record=record) as leader:
        async with connected(leader.addresses.tcp_address) as client:
            await client.publish("t", b"alone")
            position = {"epoch": 1, "number": 0}
            hello = {"versions": [1], "cluster": "prod", "member": "two", "position": position}
            async with await trio.open_tcp_stream("127.0.0.1", leader.port) as follower:
                await follower.send_all(b"".join(encode_json(FrameKind.HELLO, hello)))
                await until(lambda: "two" in leader.replication.waited_for)
                await settle()
                assert record.members == frozenset()
                await client.send(pub("t", b"waits for it"))
                last = leader.replication.operations.last_number
                await until(lambda: leader.replication.operations.last_number > last)
                await settle()
                assert record.members == frozenset()
                stored = encode_number(FrameKind.STORED, leader.replication.operations.last_number)
                await follower.send_all(b"".join(stored))
                await client.ok()
                await until(lambda: record.members == {"two"})


async def test_nothing_is_acknowledged_before_earlier_followers_are_recorded_no_longer(
    tmp_path: Path,
) -> None:
    """One of them could be elected."""
    record = Record()
    record.members = frozenset({"earlier"})
    record.fails = True
    async with leading(tmp_path / "one", record=record) as leader:
        async with connected(leader.addresses.tcp_address) as client:
            await client.send(pub("t", b"alone"))
            attempts = record.attempts + 2
            await until(lambda: record.attempts >= attempts)
            await no_answer(client)
            record.fails = False
            await client.ok()
            assert record.members == frozenset()


async def test_nothing_is_acknowledged_before_the_other_followers_of_an_earlier_leader_follow(
    tmp_path: Path,
) -> None:
    """Otherwise each failover has a time in which only the new leader has what is acknowledged."""
    record = Record()
    record.members = frozenset({"two", "earlier"})
    async with leading(tmp_path / "one", record=record, expected=frozenset({"two"})) as leader:
        async with connected(leader.addresses.tcp_address) as client, trio.open_nursery() as nursery:
            await client.send(pub("t", b"both have it"))
            await no_answer(client)
            assert not record.attempts
            nursery.start_soon(leader.follow, tmp_path / "two", "two")
            await client.ok()
            assert record.members == {"two"}
            nursery.cancel_scope.cancel()


async def test_followers_of_an_earlier_leader_are_not_expected_for_long(tmp_path: Path) -> None:
    record = Record()
    record.members = expected = frozenset({"two"})
    async with leading(tmp_path / "one", record=record, expected=expected, join_s=0.1) as leader:
        async with connected(leader.addresses.tcp_address) as client:
            await client.publish("t", b"alone")
            assert record.members == frozenset()


async def test_a_follower_whose_recording_has_an_unknown_result_is_waited_for(tmp_path: Path) -> None:
    record = Record()
    async with leading(tmp_path / "one", record=record) as leader:
        async with connected(leader.addresses.tcp_address) as client:
            await until(lambda: record.attempts > 0)
            record.fails = record.is_lost = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leader.follow, tmp_path / "two", "two")
                await until(lambda: record.members == {"two"})
                record.is_lost = False
                nursery.cancel_scope.cancel()
            await client.send(pub("t", b"alone"))
            await no_answer(client)
            record.fails = False
            await client.ok()
            assert record.members == frozenset()


async def test_a_follower_that_stores_nothing_is_disconnected(tmp_path: Path) -> None:
    """Its disk hangs, and it says that it is alive."""
    files = HeldFiles()
    record = Record()
    async with (
        leading(tmp_path / "one", record=record, stall_s=0.2) as leader,
        trio.open_nursery() as nursery,
    ):

        async def follow_with_a_disk_that_hangs() -> None:
            with suppress(LinkError, trio.BrokenResourceError):
                await leader.follow(tmp_path / "two", "two", files)

        nursery.start_soon(follow_with_a_disk_that_hangs)
        await until(lambda: record.members == {"two"})
        files.hold("sync")
        async with connected(leader.addresses.tcp_address) as client:
            await client.publish("t", b"the follower's disk hangs")
        assert record.members == frozenset()
        files.release()
        nursery.cancel_scope.cancel()
