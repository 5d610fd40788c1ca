"""A leader that no longer leads: it acknowledges nothing, and it stops without waiting for anyone."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from broker.leading import Leading, Record, bodies_in, leading
from broker.support import PATIENCE_S, HeldFiles, RawClient, connected, pub, running_broker, settle, until
from faults.power_cut import AHEAD, sync_options
from trio_nsq.replication.link import LinkError

SYNCS = pytest.mark.parametrize("sync", ["always", AHEAD, "interval"])
_REASON = "another member leads"


class Certainty:
    """Until when no other member can lead.

    Attributes:
        checks_left: How often it is certain yet.
    """

    def __init__(self) -> None:
        self.checks_left = 1_000_000_000

    def __call__(self) -> float | None:
        self.checks_left -= 1
        return inf if self.checks_left >= 0 else 0.0


@asynccontextmanager
async def with_slow_follower(
    tmp_path: Path, sync: str = "always", **replication: Any
) -> AsyncIterator[tuple[Leading, HeldFiles]]:
    """Run a leader with a follower whose disk can be held."""
    files = HeldFiles()
    async with trio.open_nursery() as nursery:
        async with leading(tmp_path / "one", **sync_options(sync), **replication) as leader:

            async def follow() -> None:
                with suppress(LinkError, trio.BrokenResourceError):
                    await leader.follow(tmp_path / "two", "two", files)

            nursery.start_soon(follow)
            await leader.until_in_sync("two")
            try:
                yield leader, files
            finally:
                files.release()
        nursery.cancel_scope.cancel()


async def closed_without_answer(client: RawClient) -> None:
    """Check that a client gets nothing before its connection ends."""
    with suppress(trio.BrokenResourceError):
        assert await client.frame() is None


@SYNCS
async def test_nothing_is_acknowledged_after_a_fence(tmp_path: Path, sync: str) -> None:
    """Not what waits, and not what comes, whatever the followers still store."""
    async with with_slow_follower(tmp_path, sync) as (leader, files):
        async with (
            connected(leader.addresses.tcp_address) as client,
            connected(leader.addresses.tcp_address) as late,
            connected(leader.addresses.tcp_address) as consumer,
        ):
            await consumer.subscribe("t", "c", 10)
            await client.publish("t", b"before")
            assert (await consumer.message()).body == b"before"
            files.hold("sync")
            await client.send(pub("t", b"waits"))
            await files.reached()
            await settle()
            leader.replication.fence(_REASON)
            files.release()
            with suppress(trio.BrokenResourceError):
                await late.send(pub("t", b"too late") + pub("t#ephemeral", b"too late"))
            for each in (client, late, consumer):
                await closed_without_answer(each)
            with suppress(OSError, trio.BrokenResourceError):
                async with connected(leader.addresses.tcp_address) as new:
                    await new.send(pub("t", b"too late"))
                    await closed_without_answer(new)


PATHS = [
    "/topic/create?topic=new",
    "/channel/create?topic=t&channel=new",
    "/topic/pause?topic=t",
    "/channel/pause?topic=t&channel=c",
    "/channel/delete?topic=t&channel=c",
    "/topic/delete?topic=t",
    "/pub?topic=t",
    "/pub?topic=t&producer=p&number=1",
    "/channel/pub?topic=t&channel=c",
]


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_that_waits_is_refused_at_a_fence(tmp_path: Path, path: str) -> None:
    async with with_slow_follower(tmp_path) as (leader, files), trio.open_nursery() as nursery:
        url = f"http://{leader.addresses.http_address}"
        answers: list[httpx.Response] = []
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

            async def post(path: str) -> None:
                answers.append(await client.post(path, content=b"x"))

            await post("/topic/create?topic=t")
            await post("/channel/create?topic=t&channel=c")
            files.hold("sync")
            nursery.start_soon(post, path)
            await files.reached()
            await settle()
            assert len(answers) == 2
            leader.replication.fence(_REASON)
            await until(lambda: len(answers) == 3)
            await post(path)  # a new request
        assert [answer.status_code for answer in answers] == [200, 200, 503, 503]
        assert all(_REASON in answer.text for answer in answers[2:]), answers[3].text


async def test_a_change_is_not_made_after_a_fence(tmp_path: Path) -> None:
    async with with_slow_follower(tmp_path) as (leader, files), trio.open_nursery() as nursery:
        url = f"http://{leader.addresses.http_address}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            answered = trio.Event()

            async def pause() -> None:
                assert (await client.post("/topic/pause?topic=t")).status_code == 503
                answered.set()

            await client.post("/topic/create?topic=t")
            files.hold("sync")
            nursery.start_soon(pause)
            await files.reached()
            await settle()
            leader.replication.fence(_REASON)
            files.release()
            await answered.wait()
            stats = (await client.get("/stats?format=json")).json()
        assert [topic["paused"] for topic in stats["topics"]] == [False]


@pytest.mark.parametrize("checks", [0, 1])
@pytest.mark.parametrize("topic", ["t", "t#ephemeral"])
@SYNCS
async def test_a_leader_alone_acknowledges_only_while_it_certainly_leads(
    tmp_path: Path, sync: str, topic: str, checks: int
) -> None:
    """It is asked before each report of a sync, too: the process may have been stopped during the sync."""
    certainty = Certainty()
    async with leading(tmp_path / "one", certain_until=certainty, **sync_options(sync)) as leader:
        await leader.until_in_sync()
        async with connected(leader.addresses.tcp_address) as client:
            await client.publish(topic, b"certain")
            await settle()
            certainty.checks_left = checks if sync != "interval" and topic == "t" else 0
            await client.send(pub(topic, b"uncertain"))
            await closed_without_answer(client)
        assert leader.replication.fenced_because
        await leader.replication.until_fenced()


@SYNCS
async def test_a_leader_with_followers_acknowledges_only_while_it_certainly_leads(
    tmp_path: Path, sync: str
) -> None:
    """Its process was stopped, and what the followers have stored is in its sockets."""
    certainty = Certainty()
    async with with_slow_follower(tmp_path, sync, certain_until=certainty) as (leader, files):
        async with connected(leader.addresses.tcp_address) as client:
            await client.publish("t", b"certain")
            files.hold("sync")
            await client.send(pub("t", b"uncertain"))
            await files.reached()
            await settle()
            certainty.checks_left = 0
            files.release()
            await closed_without_answer(client)
        assert leader.replication.fenced_because


async def test_a_change_is_made_only_while_the_leader_certainly_leads(tmp_path: Path) -> None:
    certainty = Certainty()
    async with leading(tmp_path / "one", certain_until=certainty) as leader:
        url = f"http://{leader.addresses.http_address}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            assert (await client.post("/topic/create?topic=t")).status_code == 200
            certainty.checks_left = 0
            assert (await client.post("/topic/create?topic=t")).status_code == 503
    async with running_broker(tmp_path / "one"):
        pass


@SYNCS
@pytest.mark.parametrize("fences", [True, False])
async def test_a_stop_does_not_wait_for_those_that_never_answer(
    tmp_path: Path, sync: str, fences: bool
) -> None:
    """The follower's disk hangs, and so does the coordinator. What was acknowledged is in the folder."""
    record = Record()
    stop_s = PATIENCE_S * 10 if fences else 0.1
    async with with_slow_follower(tmp_path, sync, record=record, stop_s=stop_s) as (leader, files):
        url = f"http://{leader.addresses.http_address}"
        async with (
            connected(leader.addresses.tcp_address) as client,
            connected(leader.addresses.tcp_address) as consumer,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
            trio.open_nursery() as nursery,
        ):

            async def delete() -> None:
                with suppress(httpx.TransportError):
                    assert (await http.post("/topic/delete?topic=other")).status_code == 503

            await consumer.subscribe("t", "c", 10)
            await client.publish("t", b"acknowledged")
            await client.publish("other", b"acknowledged")
            files.hold("sync")
            record.hangs = True
            await client.send(pub("t", b"not acknowledged"))
            nursery.start_soon(delete)
            await files.reached()
            await settle()
            if fences:
                leader.replication.fence(_REASON)
            leader.stop()
            await closed_without_answer(client)
            await leader.stopped()
    async with running_broker(tmp_path / "one", **sync_options(sync)) as addresses:
        assert b"acknowledged" in [body for _, body in await bodies_in(addresses, "t")]


async def test_a_stop_waits_for_the_followers_for_a_while(tmp_path: Path) -> None:
    async with with_slow_follower(tmp_path) as (leader, files):
        async with connected(leader.addresses.tcp_address) as client:
            files.hold("sync")
            await client.send(pub("t", b"waits"))
            await files.reached()
            leader.stop()
            await settle()
            files.release()
            await client.ok()


async def test_checkpoints_do_not_wait_for_followers(tmp_path: Path) -> None:
    """Otherwise a leader that waits for the coordinator would forget what consumers have finished since then."""
    record = Record()
    async with leading(tmp_path / "one", record=record, checkpoint_interval_ms=20) as leader:
        async with connected(leader.addresses.tcp_address) as consumer:
            await consumer.subscribe("t", "c", 10)
            async with connected(leader.addresses.tcp_address) as client:
                await client.publish("t", b"1", b"2")
            first, second = await consumer.message(), await consumer.message()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leader.follow, tmp_path / "two", "two")
                await leader.until_in_sync("two")
                record.fails = True
                nursery.cancel_scope.cancel()
            attempts = record.attempts
            await until(lambda: record.attempts > attempts)
            state = tmp_path / "one" / "topics" / "t.topic" / "state.json"
            states = [state.read_bytes()]
            for message in (first, second):
                await consumer.send(b"FIN " + message.id + b"\n")
                await until(lambda: state.read_bytes() not in states)
                states.append(state.read_bytes())
        record.fails = False
