"""Tests for output_buffer_size and output_buffer_timeout: how long messages wait for more."""

import os
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio
import trio.testing

from broker.support import (
    RawClient,
    TopicsFiles,
    Watched,
    connected,
    dpub,
    identify,
    pub,
    running_broker,
    settle,
    until,
    watching,
)
from trio_nsq.broker import BoundAddresses
from trio_nsq.broker.session.session import Session
from trio_nsq.broker.state.dispatcher import Dispatcher, Grant


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


@asynccontextmanager
async def one_that_waits(tmp_path: Path) -> AsyncIterator[tuple[BoundAddresses, Watched, RawClient]]:
    """Run a broker, a consumer that has received `1` while `2` waits for more, and the publishing client."""
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with watching(bound.tcp_address) as client, connected(bound.tcp_address) as publisher:
            await publisher.publish("t", b"1")
            await publisher.publish("t", b"2")
            assert await client.here() == [b"1"]
            yield bound, client, publisher


async def test_after_a_pause_a_message_is_sent_at_once_and_the_next_waits(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with watching(bound.tcp_address) as client, connected(bound.tcp_address) as publisher:
            await publisher.publish("t", b"1")
            assert await client.here() == [b"1"]
            await publisher.publish("t", b"2")
            await publisher.publish("t", b"3")
            assert await client.here() == []
            clock.jump(0.249)
            assert await client.here() == []
            clock.jump(0.006)
            assert await client.here() == [b"2", b"3"]
            clock.jump(0.2)
            await publisher.publish("t", b"4")
            assert await client.here() == []
            clock.jump(0.055)
            assert await client.here() == [b"4"]
            clock.jump(0.3)
            await publisher.publish("t", b"5")
            assert await client.here() == [b"5"]


async def test_requeued_and_deferred_messages_wait_with_the_others(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with watching(bound.tcp_address) as client, connected(bound.tcp_address) as publisher:
            await publisher.publish("t", b"1")
            message_id = (await client.message()).id
            await publisher.send(dpub("t", 100, b"2"))
            await publisher.ok()
            await client.send(b"REQ " + message_id + b" 0\n")
            await publisher.publish("t", b"3")
            assert await client.here() == []
            clock.jump(0.101)
            assert await client.here() == []
            clock.jump(0.154)
            assert sorted(await client.here()) == [b"1", b"2", b"3"]


async def test_after_a_pause_a_requeued_message_is_sent_at_once(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with watching(bound.tcp_address) as client, connected(bound.tcp_address) as publisher:
            await publisher.publish("t", b"1")
            message_id = (await client.message()).id
            clock.jump(0.3)
            await client.send(b"REQ " + message_id + b" 0\n")
            assert await client.here() == [b"1"]


async def test_requeued_message_of_a_client_without_output_buffering_is_sent_at_once(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with watching(bound.tcp_address, output_buffer_size=-1) as client:
            async with connected(bound.tcp_address) as publisher:
                await publisher.publish("t", b"1")
                await client.send(b"REQ " + (await client.message()).id + b" 0\n")
                assert await client.here() == [b"1"]


async def test_full_buffer_does_not_wait(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    frame = 34
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with watching(bound.tcp_address, output_buffer_size=200) as client:
            async with connected(bound.tcp_address) as publisher:
                await publisher.publish("t", b"first")
                assert await client.here() == [b"first"]
                await publisher.publish("t", bytes(100 - frame))
                assert await client.here() == []
                await publisher.publish("t", bytes(99 - frame))
                assert await client.here() == []
                await publisher.publish("t", b"x")
                assert len(await client.here()) == 3


@pytest.mark.parametrize("ready", [1, 3])
async def test_last_message_that_fits_the_window_does_not_wait(
    tmp_path: Path, clock: trio.testing.MockClock, ready: int
) -> None:
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with watching(bound.tcp_address, ready=ready + 1) as client:
            async with connected(bound.tcp_address) as publisher:
                await publisher.publish("t", b"first")
                assert await client.here() == [b"first"]
                for number in range(ready):
                    assert await client.here() == []
                    await publisher.publish("t", b"%d" % number)
                assert await client.here() == [b"%d" % number for number in range(ready)]


@pytest.mark.parametrize("command", [b"RDY 0\n", b"RDY 1\n", b"CLS\n"])
async def test_message_held_for_a_client_with_rdy_0_goes_to_another(
    tmp_path: Path, clock: trio.testing.MockClock, command: bytes
) -> None:
    async with one_that_waits(tmp_path) as (bound, client, _):
        await client.send(command)
        await settle()
        async with watching(bound.tcp_address) as other:
            clock.jump(0.255)
            message = await other.message()
            assert (message.body, message.attempts) == (b"2", 1)


async def test_without_a_timer_a_client_with_rdy_0_gets_its_held_messages(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with watching(bound.tcp_address, output_buffer_timeout=-1) as client:
            async with connected(bound.tcp_address) as publisher:
                await publisher.publish("t", b"1")
                assert await client.here() == []
                await client.send(b"RDY 0\n")
                assert await client.here() == [b"1"]


async def test_in_a_paused_channel_messages_keep_waiting(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with one_that_waits(tmp_path) as (bound, client, _):
        async with httpx.AsyncClient(base_url=f"http://{bound.http_address}") as api:
            await api.post("/channel/pause?topic=t&channel=c")
            clock.jump(0.3)
            assert await client.here() == []
            await api.post("/channel/unpause?topic=t&channel=c")
            assert await client.here() == [b"2"]


async def test_without_a_timer_a_pause_sends_held_messages(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with watching(bound.tcp_address, output_buffer_timeout=-1) as client:
            async with connected(bound.tcp_address) as publisher:
                await publisher.publish("t", b"1")
                assert await client.here() == []
                async with httpx.AsyncClient(base_url=f"http://{bound.http_address}") as api:
                    await api.post("/channel/pause?topic=t&channel=c")
                assert await client.here() == [b"1"]


async def test_without_a_timer_messages_of_a_key_are_sent_one_by_one(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    """RDY is not used up, but the next message waits for FIN: nothing else would send this one."""
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with watching(bound.tcp_address, output_buffer_timeout=-1) as client:
            async with httpx.AsyncClient(base_url=f"http://{bound.http_address}") as api:
                changed = await api.put("/channel/settings?topic=t&channel=c", json={"order_by": "json:user"})
                assert changed.status_code == 200
            async with connected(bound.tcp_address) as publisher:
                await publisher.publish("t", b'{"user": 1}', b'{"user": 1, "n": 2}')
                assert await client.here() == [b'{"user": 1}']


async def test_held_messages_are_sent_before_any_answer(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with one_that_waits(tmp_path) as (_, client, publisher):
        await client.send(pub("other", b"x"))
        assert (await client.message()).body == b"2"
        assert await client.frame() == (0, b"OK")
        await publisher.publish("t", b"3")
        assert await client.here() == []
        await client.send(b"FIN 0123456789abcdef\n")
        assert (await client.message()).body == b"3"
        assert (await client.error()).startswith("E_FIN_FAILED")


async def test_message_published_by_its_consumer_is_sent_with_the_answer(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with one_that_waits(tmp_path) as (_, client, _):
        await client.send(pub("t", b"3"))
        assert (await client.message()).body == b"2"
        assert await client.frame() == (0, b"OK")
        assert await client.here() == [b"3"]


async def test_message_that_arrives_during_a_publish_is_sent_with_its_answer(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    files = TopicsFiles()
    async with running_broker(tmp_path / "d", files=files) as bound:
        async with watching(bound.tcp_address) as client, connected(bound.tcp_address) as publisher:
            await publisher.publish("t", b"1")
            await publisher.publish("other", b"makes the file")
            assert await client.here() == [b"1"]
            files.gates["other"] = gate = threading.Event()
            await client.send(pub("other", b"x"))
            await until(lambda: "other" in files.syncing)
            await publisher.publish("t", b"2")
            assert await client.here() == []
            gate.set()
            await client.ok()
            assert await client.here() == [b"2"]


async def test_fin_has_no_answer(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with watching(bound.tcp_address) as client, connected(bound.tcp_address) as publisher:
            await publisher.publish("t", b"1")
            first = await client.message()
            await publisher.publish("t", b"2")
            await client.send(b"FIN %b\n" % first.id)
            assert await client.here() == []
            clock.jump(0.255)
            assert await client.here() == [b"2"]


async def test_without_a_timer_messages_wait_for_a_heartbeat(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with watching(
            bound.tcp_address, output_buffer_timeout=-1, msg_timeout=900_000, heartbeat_interval=60_000
        ) as client:
            async with connected(bound.tcp_address) as publisher:
                await publisher.publish("t", b"1")
                clock.jump(59.9)
                assert await client.here() == []
                clock.jump(0.1)
                assert (await client.message()).body == b"1"
                assert await client.frame() == (0, b"_heartbeat_")


async def test_without_a_buffer_nothing_waits(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with watching(bound.tcp_address, output_buffer_size=-1) as client:
            async with connected(bound.tcp_address) as publisher:
                for number in range(3):
                    await publisher.publish("t", b"%d" % number)
                    assert await client.here() == [b"%d" % number]


@pytest.mark.uncompiled
async def test_exception_in_one_channel_does_not_affect_others(
    tmp_path: Path,
    clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatch = Dispatcher.dispatch
    mistaken = {"first"}

    def dispatch_or_fail(dispatcher: Dispatcher, now_ns: int, ahead_ns: int = 0) -> list[Grant]:
        if dispatcher.name in mistaken:
            raise ZeroDivisionError("a mistake")
        return dispatch(dispatcher, now_ns, ahead_ns)

    async with (
        running_broker(tmp_path / "d", sync="interval") as bound,
        watching(bound.tcp_address, channel="first") as first,
        watching(bound.tcp_address, channel="second") as second,
        connected(bound.tcp_address) as publisher,
    ):
        await publisher.publish("t", b"1")
        assert (await first.here(), await second.here()) == ([b"1"], [b"1"])
        await publisher.publish("t", b"2")
        monkeypatch.setattr(Dispatcher, "dispatch", dispatch_or_fail)
        clock.jump(0.255)
        assert (await first.here(), await second.here()) == ([], [b"2"])
        assert "t/first: messages could not be delivered" in caplog.text
        mistaken.clear()
        await publisher.publish("t", b"3")
        clock.jump(0.255)
        assert (await first.here(), await second.here()) == ([b"2", b"3"], [b"3"])


async def test_stopping_broker_does_not_redeliver_to_clients_about_to_be_closed(
    tmp_path: Path, clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that arrive in the turn in which a client is closed are executed and answered."""
    close = Session.close
    async with AsyncExitStack() as stack:
        async with running_broker(tmp_path / "d", sync="interval") as bound:
            client = await stack.enter_async_context(watching(bound.tcp_address))
            async with connected(bound.tcp_address) as publisher:
                await publisher.publish("t", b"1")
                await publisher.publish("t", b"2")
            assert await client.here() == [b"1"]

            def close_while_it_speaks(session: Session) -> None:
                close(session)
                os.write(client.stream.socket.fileno(), b"FIN 0123456789abcdef\n")
                session.serve()

            monkeypatch.setattr(Session, "close", close_while_it_speaks)
        assert (await client.error()).startswith("E_FIN_FAILED")
    monkeypatch.undo()
    async with running_broker(tmp_path / "d") as bound, watching(bound.tcp_address) as client:
        assert [(await client.message()).attempts for _ in range(2)] == [2, 1]


async def test_messages_in_flight_at_the_stop_are_not_redelivered(
    tmp_path: Path,
) -> None:
    count = 5
    async with AsyncExitStack() as stack:
        async with running_broker(tmp_path / "d", sync="interval") as bound:
            for _ in range(count):
                await stack.enter_async_context(watching(bound.tcp_address))
            async with connected(bound.tcp_address) as publisher:
                await publisher.publish("t", *[b"x"] * count)
                await settle()
    async with running_broker(tmp_path / "d") as bound, watching(bound.tcp_address) as client:
        assert [(await client.message()).attempts for _ in range(count)] == [2] * count


async def test_messages_held_by_a_pause_of_the_topic_are_sent_when_it_ends(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    """Without any command of a client."""
    async with (
        running_broker(tmp_path / "d", sync="interval") as bound,
        watching(bound.tcp_address) as client,
        connected(bound.tcp_address) as publisher,
        httpx.AsyncClient(base_url=f"http://{bound.http_address}") as api,
    ):
        await publisher.publish("t", b"1")
        assert await client.here() == [b"1"]
        await api.post("/topic/pause?topic=t")
        await publisher.publish("t", b"2")
        clock.jump(0.3)  # after this time, another message is sent at once
        assert await client.here() == []
        await api.post("/topic/unpause?topic=t")
        assert await client.here() == [b"2"]


async def test_stop_sends_held_messages(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with running_broker(tmp_path / "d", sync="interval") as bound:
            client = await stack.enter_async_context(watching(bound.tcp_address, output_buffer_timeout=-1))
            async with connected(bound.tcp_address) as publisher:
                await publisher.publish("t", b"1")
                assert await client.here() == []
        assert await client.here() == [b"1"]


async def test_exactly_full_buffer_is_sent(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(identify(output_buffer_size=68, output_buffer_timeout=-1))
        await client.ok()
        await client.subscribe("t", "c", ready_count=10)
        async with connected(bound.tcp_address) as publisher:
            await publisher.publish("t", b"x" * 34)  # with the head of the frame: 68 bytes
            assert (await client.message()).body == b"x" * 34
            await publisher.publish("t", b"x" * 33)
            await settle()
            await publisher.publish("t", b"y")
        assert [(await client.message()).body for _ in range(2)] == [b"x" * 33, b"y"]
