"""A leader that acknowledges nothing while too few members are in sync."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
import trio

from broker.leading import Leading, Record, bodies_in, leading, no_answer, promote
from broker.support import PATIENCE_S, HeldFiles, connected, mpub, pub, running_broker, settle, until
from faults.power_cut import AHEAD, sync_options
from trio_nsq.replication.link import LinkError

SYNCS = pytest.mark.parametrize("sync", ["always", AHEAD, "interval"])
_ALONE = "only 1 of the cluster's members is in sync, and --min-in-sync is 2"


@asynccontextmanager
async def following(
    leader: Leading, folder: Path, member: str, files: HeldFiles | None = None
) -> AsyncIterator[None]:
    """Follow until the end of the block."""

    async def follow() -> None:
        with suppress(LinkError, trio.BrokenResourceError):
            await leader.follow(folder, member, files)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        yield
        nursery.cancel_scope.cancel()


@SYNCS
async def test_publishes_are_refused_before_anything_is_written(tmp_path: Path, sync: str) -> None:
    async with leading(tmp_path / "one", min_in_sync=2, **sync_options(sync)) as leader:
        url = f"http://{leader.addresses.http_address}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            for command, verb in ((pub("t", b"x"), "PUB"), (mpub("t", b"x"), "MPUB")):
                async with connected(leader.addresses.tcp_address) as client:
                    await client.send(command)
                    assert await client.frame() == (1, f"E_{verb}_FAILED {verb} failed {_ALONE}".encode())
            for path in (
                "/pub?topic=t",
                "/mpub?topic=t",
                "/pub?topic=t&defer=1",
                "/pub?topic=t&producer=p&number=1",
                "/topic/create?topic=t",
            ):
                answer = await http.post(path, content=b"x")
                assert (answer.status_code, answer.json()) == (503, {"message": _ALONE})
            assert list((tmp_path / "one" / "topics").iterdir()) == []
            assert (await http.get("/ping")).text == f"NOK - {_ALONE}"
            assert leader.replication.refuses_because == _ALONE
            async with connected(leader.addresses.tcp_address) as client:
                await client.publish("t#ephemeral", b"is not replicated")
                async with following(leader, tmp_path / "two", "two"):
                    await until(lambda: not leader.replication.refuses_because)
                    await client.publish("t", b"x")
                    assert (await http.post("/channel/create?topic=t&channel=c")).status_code == 200
                    assert (await http.get("/ping")).text == "OK"
                await until(lambda: bool(leader.replication.refuses_because))
                for path in (
                    "/topic/pause?topic=t",
                    "/channel/delete?topic=t&channel=c",
                    "/channel/create?topic=t&channel=new",
                    "/topic/delete?topic=t",
                ):
                    answer = await http.post(path)
                    assert (answer.status_code, answer.json()) == (503, {"message": _ALONE})
                await client.subscribe("t", "c", 1)
                assert (await client.message()).body == b"x"  # consumers go on
                await client.send(pub("t", b"too late"))
                assert await client.frame() == (1, f"E_PUB_FAILED PUB failed {_ALONE}".encode())


@SYNCS
async def test_publishes_that_wait_when_a_follower_leaves_wait_for_the_next_one(
    tmp_path: Path, sync: str
) -> None:
    files, record = HeldFiles(), Record()
    async with leading(tmp_path / "one", record=record, min_in_sync=2, **sync_options(sync)) as leader:
        async with (
            connected(leader.addresses.tcp_address) as client,
            connected(leader.addresses.tcp_address) as consumer,
        ):
            async with following(leader, tmp_path / "two", "two", files):
                await until(lambda: not leader.replication.refuses_because)
                await consumer.subscribe("t", "c", 10)
                files.hold("sync")
                await client.send(pub("t", b"waits"))
                await files.reached()
                await settle()
                leader.replication.disconnect("two")
                await until(lambda: record.members == frozenset())
                await until(lambda: leader.replication.waited_for == frozenset())
                files.release()
            await no_answer(client)
            async with following(leader, tmp_path / "three", "three"):
                await client.ok()
                assert record.members == {"three"}
                assert (await consumer.message()).body == b"waits"


@SYNCS
async def test_the_follower_that_has_left_has_all_that_was_acknowledged(tmp_path: Path, sync: str) -> None:
    """Under load; after it has left, nothing is acknowledged."""
    acknowledged: set[bytes] = set()
    async with leading(tmp_path / "one", min_in_sync=2, **sync_options(sync)) as leader:

        async def publish(name: int) -> None:
            number = 0
            async with connected(leader.addresses.tcp_address) as client:
                while True:
                    number += 1
                    body = b"%d/%d" % (name, number)
                    await client.send(pub("t", body))
                    frame = await client.frame()
                    if frame is None or frame[0] != 0:
                        return
                    acknowledged.add(body)

        async with trio.open_nursery() as publishing:
            async with following(leader, tmp_path / "two", "two"):
                await until(lambda: not leader.replication.refuses_because)
                for name in range(5):
                    publishing.start_soon(publish, name)
                await until(lambda: len(acknowledged) > 200)
            await until(lambda: leader.replication.waited_for == frozenset())
            await settle()
            publishing.cancel_scope.cancel()
        count = len(acknowledged)
        async with following(leader, tmp_path / "three", "three"):
            await until(lambda: not leader.replication.refuses_because)
    assert len(acknowledged) == count
    promote(tmp_path / "two")
    async with running_broker(tmp_path / "two", **sync_options(sync)) as addresses:
        assert acknowledged <= {body for _, body in await bodies_in(addresses, "t")}


async def test_a_follower_counts_while_it_is_surely_recorded(tmp_path: Path) -> None:
    """Whatever becomes of the attempt to record another one."""
    record = Record()
    async with leading(tmp_path / "one", record=record, min_in_sync=2) as leader:
        async with connected(leader.addresses.tcp_address) as client:
            record.fails = True
            async with following(leader, tmp_path / "two", "two"):
                await until(lambda: "two" in leader.replication.waited_for)
                attempts = record.attempts + 2
                await until(lambda: record.attempts >= attempts)
                assert leader.replication.refuses_because == _ALONE
                record.fails = False
                await leader.until_in_sync("two")
                await client.publish("t", b"two in sync")
                record.fails = True
                async with following(leader, tmp_path / "three", "three"):
                    await until(lambda: "three" in leader.replication.waited_for)
                    attempts = record.attempts + 2
                    await until(lambda: record.attempts >= attempts)
                    await client.publish("t", b"two is in sync, and three may be")
            record.fails = False


async def test_a_follower_that_leaves_does_not_count_whatever_is_being_recorded(tmp_path: Path) -> None:
    record = Record()
    async with leading(tmp_path / "one", record=record, min_in_sync=2) as leader:
        async with following(leader, tmp_path / "two", "two"):
            await leader.until_in_sync("two")
            record.hangs, attempts = True, record.attempts
            async with following(leader, tmp_path / "three", "three"):
                await until(lambda: record.attempts > attempts)
                assert not leader.replication.refuses_because
                leader.replication.disconnect("two")
                await until(lambda: leader.replication.refuses_because == _ALONE)
