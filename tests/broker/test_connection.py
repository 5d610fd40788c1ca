"""Tests for a client's connection: its end, its effects on others, and its resources."""

import gc
import json
import os
import socket
import struct
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from struct import pack
from typing import Any

import pytest
import trio
import trio.testing

from broker.api import running_api
from broker.support import (
    PATIENCE_S,
    HeldFiles,
    RawClient,
    connected,
    identify,
    open_files,
    pub,
    running_broker,
    settle,
    threads_done,
)
from trio_nsq.broker.session.session import Session
from trio_nsq.event_loop.pacing import Pacing


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


async def test_client_that_stops_reading_is_disconnected_and_its_messages_go_to_others(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    """After its heartbeat interval, although it sends all the time."""
    body = bytes(1_000_000)
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with connected(bound.tcp_address) as stuck, connected(bound.tcp_address) as other:
            await stuck.send(identify(heartbeat_interval=2000))
            await stuck.ok()
            await stuck.subscribe("t", "c", ready_count=2500)
            for _ in range(20):
                await other.publish("t", body)
            await stuck.send(b"NOP\n")
            await threads_done()
            clock.jump(1.999)
            await stuck.send(b"NOP\n")
            await other.subscribe("t", "c", ready_count=20)
            got = [await other.message()]  # that did not fit into the other one's socket
            await threads_done()
            clock.jump(0.001)
            async with trio.open_nursery() as nursery:
                # The kernel may have accepted more data meanwhile: then the time starts again.
                nursery.start_soon(jump_when_blocked, clock, 2)
                got += [await other.message() for _ in range(19)]
                nursery.cancel_scope.cancel()
            assert len({message.id for message in got}) == 20
            assert {message.attempts for message in got} == {1, 2}


async def test_delivery_continues_when_the_socket_is_writable(tmp_path: Path) -> None:
    body = bytes(1_000_000)
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with connected(bound.tcp_address) as slow, connected(bound.tcp_address) as publisher:
            await slow.subscribe("t", "c", ready_count=2500)
            for _ in range(20):
                await publisher.publish("t", body)
            await settle()
            ids = {(await slow.message()).id for _ in range(20)}
            assert len(ids) == 20
            await publisher.publish("t", b"and the next")
            assert (await slow.message()).body == b"and the next"


async def test_unread_answers_do_not_fill_the_memory(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    """The broker stops reading commands, and continues without a loss when the client reads."""
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c")
        lines = b"FIN 0123456789abcdef\n" * 5000
        sent = 0
        while True:
            with trio.move_on_after(1):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(jump_when_blocked, clock)
                    await client.send(lines)
                    sent += 1
                    nursery.cancel_scope.cancel()
                continue
            break
        assert sent * len(lines) < 100_000_000
        text = b"E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight"
        frame = pack(">ii", 4 + len(text), 1) + text
        received = bytearray()
        while len(received) < sent * 5000 * len(frame):
            received += await client.stream.receive_some(1_000_000)
        assert received.startswith(frame * (sent * 5000))


async def test_half_closed_client_gets_its_answers(tmp_path: Path) -> None:
    """However many are waiting."""
    count = 50_000
    text = b"E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight"
    frame = pack(">ii", 4 + len(text), 1) + text
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        await client.subscribe("t", "c")
        await client.send(b"FIN 0123456789abcdef\n" * count)
        await client.stream.send_eof()
        await settle()
        received = bytearray()
        with trio.fail_after(PATIENCE_S):
            async for part in client.stream:
                received += part
        assert received == frame * count


async def test_half_closed_client_that_reads_nothing_is_disconnected(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    """After a heartbeat interval at most; its messages go to others at once."""
    async with running_api(tmp_path / "d") as api:
        host, port = api.tcp.stream.socket.getpeername()
        async with connected(f"{host}:{port}") as client:
            client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await client.send(identify(heartbeat_interval=2000))
            await client.ok()
            await client.subscribe("t", "c", ready_count=1)
            await api.tcp.publish("t", b"x")
            first = await client.message()
            await client.send(b"FIN 0123456789abcdef\n" * 50_000)
            await client.stream.send_eof()
            await api.tcp.subscribe("t", "c", ready_count=1)
            assert (await api.tcp.message()).id == first.id
            await settle()
            clock.jump(2)
            await settle()
            received = 0
            with trio.fail_after(PATIENCE_S):
                async for part in client.stream:
                    received += len(part)
            assert received < 3_000_000  # the rest of its output is dropped


async def test_no_heartbeat_after_the_last_frame(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    """The client may still be sending, and a heartbeat would reset the connection before it has read the
    error.
    """
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(identify(heartbeat_interval=1000))
        await client.ok()
        await settle()
        clock.jump(0.5)
        await client.send(b"NOPE\n")
        await settle()
        clock.jump(0.5)
        await settle()
        for _ in range(2):
            await client.send(bytes(1000))
            await settle()
        assert await client.error() == "E_INVALID invalid command NOPE"
        assert await client.frame() is None


async def test_silent_client_is_disconnected_after_two_intervals(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(identify(heartbeat_interval=1000))
        await client.ok()
        await settle()
        clock.jump(0.5)
        await client.nothing_more()
        await settle()
        for seconds in (0.5, 1):
            clock.jump(seconds)
            assert await client.frame() == (0, b"_heartbeat_")
            await settle()
        clock.jump(0.6)
        assert await client.frame() is None


@pytest.mark.parametrize(("stopped_s", "sent"), [(3, b"NOP\n"), (3, b""), (1.9, b"NOP\n")])
async def test_clients_are_not_silent_if_the_broker_was_late(
    tmp_path: Path, clock: trio.testing.MockClock, stopped_s: float, sent: bytes
) -> None:
    """They have sent in time, or had no heartbeat to answer: the event loop was stopped, for example by a disk."""
    async with running_broker(tmp_path / "d") as bound, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(bound.tcp_address)) for _ in range(10)]
        for client in clients:
            await client.send(identify(heartbeat_interval=1000))
            await client.ok()
        await settle()
        for client in clients:
            os.write(client.stream.socket.fileno(), sent)
        clock.jump(stopped_s)
        for client in clients:
            assert await client.frame() == (0, b"_heartbeat_")


async def jump_when_blocked(clock: trio.testing.MockClock, seconds: float = 1) -> None:
    """Let this much time pass when all tasks wait."""
    await trio.testing.wait_all_tasks_blocked(0.1)
    clock.jump(seconds)


async def test_client_with_a_slow_publish_is_not_silent(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    files = HeldFiles()
    async with running_broker(tmp_path / "d", files=files) as bound, connected(bound.tcp_address) as client:
        await client.send(identify(heartbeat_interval=1000))
        await client.ok()
        await client.publish("t", b"makes the segment")
        files.hold("sync")
        await client.send(pub("t", b"x"))
        await files.reached()
        for _ in range(5):
            clock.jump(1)
            assert await client.frame() == (0, b"_heartbeat_")
            await settle()
        files.release()
        await client.ok()


async def test_messages_of_a_refused_client_are_requeued_at_once(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    """Not only after it has read the error and disconnected."""
    async with running_broker(tmp_path / "d") as bound:
        async with connected(bound.tcp_address) as refused, connected(bound.tcp_address) as other:
            await refused.subscribe("t", "c", ready_count=1)
            await other.publish("t", b"1", b"2")
            first = await refused.message()
            await other.subscribe("t", "c", ready_count=1)
            assert (await other.message()).body == b"2"
            await other.send(b"RDY 2\n")
            await refused.send(b"NOPE\n")
            assert await refused.error() == "E_INVALID invalid command NOPE"
            again = await other.message()
            assert (again.id, again.attempts) == (first.id, 2)
            assert await refused.frame() is None


@pytest.mark.uncompiled
async def test_bug_ends_one_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError

    async with running_api(tmp_path / "d") as api:
        await api.tcp.publish("t", b"x")
        host, _, port = api.tcp.stream.socket.getpeername()[0], None, api.tcp.stream.socket.getpeername()[1]
        async with connected(f"{host}:{port}") as unlucky:
            with monkeypatch.context() as broken:
                broken.setattr("trio_nsq.broker.state.channel.Channel.touch", fail)
                await unlucky.subscribe("t", "c")
                await unlucky.send(b"TOUCH 0123456789abcdef\n")
                assert await unlucky.frame() is None
            assert "internal error" in caplog.text
        assert (await api.channel("t", "c"))["client_count"] == 0
        await api.tcp.subscribe("t", "c", ready_count=1)
        assert (await api.tcp.message()).body == b"x"


def reset(client: RawClient) -> None:
    """Reset the connection."""
    client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


ENDINGS: dict[str, tuple[bytes, Callable[[RawClient], None] | None]] = {
    "no magic": (b"", None),
    "magic only": (b"  V2", None),
    "reset": (b"  V2SUB t c\nRDY 5\n", reset),
    "fatal error": (b"  V2SUB t c\nNOPE\n", None),
    "reset after a fatal error": (b"  V2NOPE\n" + bytes(100_000), reset),
    "half a publish": (b"  V2PUB t\n" + pack(">i", 100) + b"half", None),
    "publish not waited for": (b"  V2" + pub("t", bytes(50_000)) * 3, reset),
    "consumer that never reads": (b"  V2SUB t c\nRDY 2500\n", None),
    "ephemeral": (b"  V2SUB t#ephemeral c#ephemeral\nRDY 1\n" + pub("t#ephemeral", b"x"), None),
    "too many consumers": (b"  V2SUB t limited\nSUB t limited\n", None),
}


async def test_connections_leak_no_files_tasks_or_memory(tmp_path: Path) -> None:
    # A thread that syncs has tasks. A second one is started by the first round that finds the first one busy.
    pacing = Pacing(min_commit_threads=1, max_commit_threads=1)
    async with running_broker(tmp_path / "d", pacing=pacing) as bound:
        host, _, port = bound.tcp_address.rpartition(":")

        async def one_of_each() -> None:
            async with AsyncExitStack() as stack:
                for sent, finish in ENDINGS.values():
                    stream = await stack.enter_async_context(await trio.open_tcp_stream(host, int(port)))
                    await stream.send_all(sent)
                    if finish is not None:
                        finish(RawClient(stream))
            await settle()

        def held() -> tuple[list[str], int, int]:
            gc.collect()
            connections = sum(isinstance(thing, Session) for thing in gc.get_objects())
            return open_files(), trio.lowlevel.current_statistics().tasks_living, connections

        async with connected(bound.tcp_address) as client:
            await client.publish("t", b"makes the files")
            await client.subscribe("t", "c")
        await settle()
        before = after = held()
        for _ in range(15):
            await one_of_each()
        with trio.move_on_after(PATIENCE_S):
            while (after := held()) != before:  # some end after a thread has finished
                await trio.testing.wait_all_tasks_blocked(0.01)
        assert after == before


async def test_large_identify_bodies_are_decoded_one_per_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 0
    decoded_in: list[int] = []
    decode = json.JSONDecoder.decode

    def noting(decoder: json.JSONDecoder, text: str) -> Any:
        if len(text) > 60_000:
            decoded_in.append(rounds)
        return decode(decoder, text)

    async def count_rounds() -> None:
        nonlocal rounds
        while True:
            await trio.lowlevel.checkpoint()
            rounds += 1

    monkeypatch.setattr(json.JSONDecoder, "decode", noting)
    body = b'{"ignored":[%s0]}' % (b"0," * 30_000)
    async with running_broker(tmp_path / "data") as bound, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(bound.tcp_address)) for _ in range(8)]
        for client in clients:
            await client.send(b"IDENTIFY\n" + pack(">i", len(body)) + body[:-1])
        await settle()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count_rounds)
            for client in clients:  # within one turn of the event loop
                os.write(client.stream.socket.fileno(), b"}")
            for client in clients:
                await client.ok()
            nursery.cancel_scope.cancel()
    assert len(set(decoded_in)) == len(clients)
