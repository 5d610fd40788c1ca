"""output_buffer_size and output_buffer_timeout: how long messages wait for more (NSQ protocol: output buffering)."""

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
    """A clock that stands still until a test moves it."""
    return trio.testing.MockClock()


@asynccontextmanager
async def one_that_waits(tmp_path: Path) -> AsyncIterator[tuple[BoundAddresses, Watched, RawClient]]:
    """A broker, a consumer that has had `1` while `2` waits for more, and the client that has published them."""
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with watching(bound.tcp_address) as client, connected(bound.tcp_address) as publisher:
            await publisher.publish("t", b"1")
            await publisher.publish("t", b"2")
            assert await client.here() == [b"1"]
            yield bound, client, publisher


async def test_after_a_pause_a_message_goes_at_once_and_the_next_waits(
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


async def test_a_full_buffer_does_not_wait(tmp_path: Path, clock: trio.testing.MockClock) -> None:
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
async def test_the_last_message_that_a_client_can_take_does_not_wait(
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
async def test_what_a_client_that_wants_no_more_was_to_wait_for_goes_to_another(
    tmp_path: Path, clock: trio.testing.MockClock, command: bytes
) -> None:
    async with one_that_waits(tmp_path) as (bound, client, _):
        await client.send(command)
        await settle()
        async with watching(bound.tcp_address) as other:
            clock.jump(0.255)
            message = await other.message()
            assert (message.body, message.attempts) == (b"2", 1)


async def test_without_a_timer_a_client_that_wants_no_more_gets_what_was_held_back(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with watching(bound.tcp_address, output_buffer_timeout=-1) as client:
            async with connected(bound.tcp_address) as publisher:
                await publisher.publish("t", b"1")
                assert await client.here() == []
                await client.send(b"RDY 0\n")
                assert await client.here() == [b"1"]


async def test_in_a_paused_channel_messages_go_on_waiting(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with one_that_waits(tmp_path) as (bound, client, _):
        async with httpx.AsyncClient(base_url=f"http://{bound.http_address}") as api:
            await api.post("/channel/pause?topic=t&channel=c")
            clock.jump(0.3)
            assert await client.here() == []
            await api.post("/channel/unpause?topic=t&channel=c")
            assert await client.here() == [b"2"]


async def test_without_a_timer_a_pause_sends_what_was_held_back(
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


async def test_messages_that_wait_go_before_any_answer(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    async with one_that_waits(tmp_path) as (_, client, publisher):
        await client.send(pub("other", b"x"))
        assert (await client.message()).body == b"2"
        assert await client.frame() == (0, b"OK")
        await publisher.publish("t", b"3")
        assert await client.here() == []
        await client.send(b"FIN 0123456789abcdef\n")
        assert (await client.message()).body == b"3"
        assert (await client.error()).startswith("E_FIN_FAILED")


async def test_what_a_client_publishes_to_its_own_channel_goes_along_with_the_answer(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with one_that_waits(tmp_path) as (_, client, _):
        await client.send(pub("t", b"3"))
        assert (await client.message()).body == b"2"
        assert await client.frame() == (0, b"OK")
        assert await client.here() == [b"3"]


async def test_what_comes_while_a_clients_publish_is_stored_goes_along_with_the_answer(
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


async def test_finishing_is_no_answer(tmp_path: Path, clock: trio.testing.MockClock) -> None:
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


async def test_a_mistake_of_ours_in_one_channel_reaches_no_other(
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


async def test_when_the_broker_stops_nothing_is_sent_to_whom_it_would_be_taken_from(
    tmp_path: Path, clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client says in the very turn in which it is closed is obeyed, and answered."""
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


async def test_what_clients_have_when_the_broker_stops_does_not_go_from_one_to_the_next(
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


async def test_what_a_pause_of_the_topic_has_held_back_goes_when_that_ends(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    """Nobody has to send anything for that."""
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
        clock.jump(0.3)  # so long after a message another goes at once
        assert await client.here() == []
        await api.post("/topic/unpause?topic=t")
        assert await client.here() == [b"2"]


async def test_a_stop_sends_what_is_held_back(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with running_broker(tmp_path / "d", sync="interval") as bound:
            client = await stack.enter_async_context(watching(bound.tcp_address, output_buffer_timeout=-1))
            async with connected(bound.tcp_address) as publisher:
                await publisher.publish("t", b"1")
                assert await client.here() == []
        assert await client.here() == [b"1"]


async def test_a_buffer_that_is_just_full_is_sent(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(identify(output_buffer_size=68, output_buffer_timeout=-1))
        await client.ok()
        await client.subscribe("t", "c", ready_count=10)
        async with connected(bound.tcp_address) as publisher:
            await publisher.publish("t", b"x" * 34)  # with the frame's head: 68 bytes
            assert (await client.message()).body == b"x" * 34
            await publisher.publish("t", b"x" * 33)
            await settle()
            await publisher.publish("t", b"y")
        assert [(await client.message()).body for _ in range(2)] == [b"x" * 33, b"y"]
