"""Tests for publishes over HTTP, which start in the poller's turn: sharing with others, and waiting."""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from struct import pack

import pytest
import trio
import trio.testing

from broker.api import raw_answer, raw_post, raw_post_with_length
from broker.support import (
    BOTH_SYNCS,
    FailingFiles,
    HeldFiles,
    RawClient,
    connected,
    left_open,
    open_files,
    pub,
    record_counts,
    running_broker,
    send_for_ever,
    settle,
)
from trio_nsq.broker import BoundAddresses
from trio_nsq.broker.api.publishing import Publishing
from trio_nsq.event_loop.pacing import Pacing
from trio_nsq.http.connection import IDLE_TIMEOUT_S, REQUEST_TIMEOUT_S
from trio_nsq.http.messages import Request, Response

OK = (200, b"OK")
PING = raw_post(b"/ping", method=b"GET")


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


@asynccontextmanager
async def http(bound: BoundAddresses, *sent: bytes) -> AsyncIterator[RawClient]:
    """A connection; every request must be answered with OK."""
    assert bound.http_address is not None
    async with connected(bound.http_address, b"".join(sent)) as client:
        for _ in sent:
            assert await raw_answer(client) == OK
        await settle()
        yield client


def publish(topic: str, body: bytes) -> bytes:
    return raw_post_with_length(b"/pub?topic=" + topic.encode(), body)


async def bodies(bound: BoundAddresses, topic: str, count: int) -> list[bytes]:
    """Return this many messages of a topic, through a new channel."""
    async with connected(bound.tcp_address) as client:
        await client.subscribe(topic, "c", count)
        return [(await client.message()).body for _ in range(count)]


@BOTH_SYNCS
async def test_publishes_need_no_task(tmp_path: Path, sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_tasks = []

    async def pub(self: Publishing, request: Request) -> Response:
        in_tasks.append(request.body)
        return await handler(self, request)

    handler = Publishing.pub
    monkeypatch.setattr(Publishing, "pub", pub)
    monkeypatch.setattr(Publishing, "mpub", pub)
    async with running_broker(tmp_path / "d", sync=sync) as bound, http(bound, publish("t", b"0")) as client:
        binary = pack(">ii", 2, 1) + b"4" + pack(">i", 1) + b"5"
        for request in (
            publish("t", b"1"),
            raw_post_with_length(b"/mpub?topic=t", b"2\n3\n"),
            raw_post_with_length(b"/mpub?topic=t&binary=true", binary),
        ):
            await client.send(request)
            assert await raw_answer(client) == OK
        assert await bodies(bound, "t", 6) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert in_tasks == [b"0"]  # the first publish of a topic needs one


@BOTH_SYNCS
async def test_other_and_invalid_publishes(tmp_path: Path, sync: str) -> None:
    async with running_broker(tmp_path / "d", sync=sync) as bound, http(bound) as client:
        numbered = b"/pub?topic=t&producer=p&number=1"
        requests = {
            raw_post_with_length(b"/mpub?topic=none", b"\n\n"): OK,
            publish("t", b"1"): OK,
            raw_post_with_length(numbered, b"2"): OK,
            publish("t", b"3"): OK,
            raw_post_with_length(b"/pub?topic=t&defer=3600000", b"deferred"): OK,
            raw_post_with_length(b"/mpub?topic=t&binary=1", b"bad"): (413, b'{"message":"BAD_BODY"}'),
            publish("t", b""): (400, b'{"message":"MSG_EMPTY"}'),
            publish("$", b"x"): (400, b'{"message":"INVALID_TOPIC"}'),
            raw_post_with_length(b"/mpub?topic=t&defer=1", b"4"): OK,  # as in nsqd, not deferred
            raw_post_with_length(numbered, b"again"): OK,
            publish("t", b"5"): OK,
        }
        for request, expected in requests.items():
            await client.send(request)
            assert await raw_answer(client) == expected
            await settle()
        assert await bodies(bound, "t", 5) == [b"1", b"2", b"3", b"4", b"5"]
    assert record_counts(tmp_path / "d") == [1] * 6
    assert [path.name for path in (tmp_path / "d" / "topics").iterdir()] == ["t.topic"]


@BOTH_SYNCS
async def test_pipelined_publishes_to_two_topics_in_turn(tmp_path: Path, sync: str) -> None:
    count = 600 if sync == "interval" else 200  # here each waits for a thread
    async with running_broker(tmp_path / "d", sync=sync) as bound, http(bound) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, b"".join(publish("ab"[n % 2], b"%d" % n) for n in range(count)))
            for _ in range(count):
                assert await raw_answer(client) == OK
        assert await bodies(bound, "b", count // 2) == [b"%d" % n for n in range(1, count, 2)]


async def test_publishes_of_one_round_are_one_record(tmp_path: Path) -> None:
    """Over HTTP or TCP, with --sync=interval. They are sent before the broker looks, because everything is
    one task.
    """
    pacing = Pacing(turn_s=60)  # a round may take long on a busy machine
    async with (
        running_broker(tmp_path / "d", sync="interval", pacing=pacing) as bound,
        AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(http(bound, publish("t", b"x"))) for _ in range(4)]
        other = await stack.enter_async_context(connected(bound.tcp_address))
        await other.publish("t", b"x")
        await settle()
        for client, request in [
            (other, pub("t", b"y")),
            *[(client, publish("t", b"y")) for client in clients],
        ]:
            with socket.socket(fileno=os.dup(client.stream.socket.fileno())) as sock:
                sock.send(request)
        await other.ok()
        for client in clients:
            assert await raw_answer(client) == OK
    assert record_counts(tmp_path / "d") == [1] * 5 + [5]


async def test_requests_after_a_publish_wait_for_the_log_and_others_do_not(tmp_path: Path) -> None:
    files = HeldFiles()
    async with running_broker(tmp_path / "d", files=files) as bound:
        async with http(bound, publish("t", b"makes the file")) as client, http(bound) as other:
            files.hold("sync")
            info = raw_post(b"/topic/producer?topic=t&producer=p", method=b"GET")
            await client.send(publish("t", b"x") + PING + info + publish("t", b"y"))
            await files.reached()
            await client.send(publish("t", b"z"))
            await other.send(PING + publish("t", b"joins y") + PING)
            assert await raw_answer(other) == OK
            await settle()
            with socket.socket(fileno=os.dup(client.stream.socket.fileno())) as sock:
                with pytest.raises(BlockingIOError):
                    sock.recv(1, socket.MSG_DONTWAIT)
            files.release()
            assert [await raw_answer(client) for _ in range(5)] == [
                OK, OK, (200, b'{"producer":"p","number":null,"instance":null,"may_be_forgotten":false}'), OK, OK
            ]  # fmt: skip
            assert [await raw_answer(other) for _ in range(2)] == [OK, OK]


@BOTH_SYNCS
async def test_client_that_disconnects_before_its_answer_has_published(tmp_path: Path, sync: str) -> None:
    files = HeldFiles()
    async with running_broker(tmp_path / "d", files=files, sync=sync) as bound:
        async with http(bound, publish("t", b"makes the file")) as other:
            await settle()
            before = open_files()
            async with http(bound) as leaver:
                if sync == "always":
                    files.hold("sync")
                await leaver.send(publish("t", b"stored") + publish("t", b"behind"))
                if sync == "always":
                    await files.reached()
                leaver.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            files.release()
            await other.send(publish("t", b"after"))
            assert await raw_answer(other) == OK
            await settle()
            assert not left_open(before)
    assert sum(record_counts(tmp_path / "d")) >= 2 + (sync == "always")


@BOTH_SYNCS
async def test_publish_refused_by_the_disk_names_the_reason_and_the_connection_continues(
    tmp_path: Path, sync: str
) -> None:
    files = FailingFiles()
    async with running_broker(tmp_path / "d", files=files, sync=sync) as bound:
        async with http(bound, publish("t", b"1"), publish("t", b"2")) as client:
            files.full_after = 0
            await client.send(publish("t", b"3") * 2 + PING)
            for status in (503, 503, 500):
                told = await raw_answer(client)
                assert told[0] == status
                assert b"No space left on device" in told[1]
            files.full_after = None
            await client.send(publish("t", b"4"))
            assert await raw_answer(client) == OK
            assert await bodies(bound, "t", 3) == [b"1", b"2", b"4"]


async def test_client_with_endless_requests_does_not_delay_others(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with http(bound) as greedy, http(bound) as other, connected(bound.tcp_address) as third:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(drain, greedy)
                nursery.start_soon(send_for_ever, greedy, PING * 1000)
                for _ in range(8):
                    await other.send(publish("t", b"x"))
                    assert await raw_answer(other) == OK
                    await third.publish("t", b"x")
                nursery.cancel_scope.cancel()


async def drain(client: RawClient) -> None:
    while await client.stream.receive_some():
        pass


async def test_deadlines_during_a_publish(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    """None runs while the log stores the message."""
    files = HeldFiles()
    async with running_broker(tmp_path / "d", files=files) as bound:
        async with http(bound, publish("t", b"x")) as resting, http(bound, publish("t", b"x")) as sending:
            await sending.send(publish("t", b"y")[:-1])
            await settle()
            clock.jump(REQUEST_TIMEOUT_S - 1)
            await settle()
            await sending.send(b"y")
            assert await raw_answer(sending) == OK
            await sending.send(publish("t", b"y")[:-1])
            await settle()
            clock.jump(REQUEST_TIMEOUT_S)
            assert await sending.exactly(1) is None
            await resting.send(PING)  # a second before its deadline
            assert await raw_answer(resting) == OK
            files.hold("sync")
            await resting.send(publish("t", b"z"))
            await files.reached()
            clock.jump(10 * IDLE_TIMEOUT_S)
            await settle()
            files.release()
            assert await raw_answer(resting) == OK
            await settle()
            clock.jump(IDLE_TIMEOUT_S - 1)
            await settle()
            await resting.send(PING)
            assert await raw_answer(resting) == OK
            await settle()
            clock.jump(IDLE_TIMEOUT_S)
            assert await resting.exactly(1) is None
