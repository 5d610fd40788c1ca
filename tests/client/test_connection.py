"""Tests for the connection on a stream in memory, where the test controls what each side sees and when."""

import pytest
import trio
import trio.testing

from client.support.fake_broker import bounded, error, message
from trio_nsq.client import BrokerError, ConnectionSettings
from trio_nsq.client.connection.connection import Connection, Event
from trio_nsq.protocol import NSQError
from trio_nsq.protocol.frames import HEARTBEAT_FRAME, ErrorFrame, MessageRun


class Wire:
    """A connection, and its writes."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.events: list[Event] = []
        self.reasons: list[NSQError] = []
        self.incoming = trio.testing.MemoryReceiveStream()
        self._outgoing = trio.testing.MemorySendStream(send_all_hook=self._on_write)
        self.broken = False
        self.may_write = trio.Event()
        self.may_write.set()
        self.stream = trio.StapledStream(self._outgoing, self.incoming)
        self.connection = Connection(self.stream, "host:1", ConnectionSettings())

    async def _on_write(self) -> None:
        if self.broken:
            raise trio.BrokenResourceError
        await self.may_write.wait()
        self.written.append(bytes(self._outgoing.get_data_nowait()))

    async def run(self) -> None:
        self.reasons.append(await self.connection.run(self._handle))

    def _handle(self, event: Event) -> None:
        if isinstance(event, ErrorFrame):
            raise BrokerError("host:1", event.code, event.text)
        self.events.append(event)


@bounded
async def test_writes_of_one_tick_are_sent_together() -> None:
    wire = Wire()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.run)
        for data in (b"a", b"b", b"c"):
            wire.connection.write(data)
        await trio.testing.wait_all_tasks_blocked()
        wire.connection.write(b"d")
        await trio.testing.wait_all_tasks_blocked()
        assert wire.written == [b"abc", b"d"]
        nursery.cancel_scope.cancel()


@bounded
async def test_failed_write_leaves_the_error_to_the_reader() -> None:
    wire = Wire()
    wire.broken = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.run)
        wire.connection.write(b"x")
        await trio.testing.wait_all_tasks_blocked()
        assert not wire.connection.ended.is_set()
        wire.incoming.put_data(error("E_BAD_TOPIC so it goes"))
    (reason,) = wire.reasons
    assert isinstance(reason, BrokerError)
    assert wire.connection.ended.is_set()


@bounded
async def test_frames_in_any_pieces_with_heartbeats_between() -> None:
    wire = Wire()
    data = message(1) + HEARTBEAT_FRAME + message(2, b"x" * 100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.run)
        for place in range(len(data)):
            wire.incoming.put_data(data[place : place + 1])
            await trio.testing.wait_all_tasks_blocked()
        wire.incoming.put_eof()
    bodies = [body for event in wire.events if isinstance(event, MessageRun) for body in event.bodies]
    assert bodies == [b"body 1", b"x" * 100]
    assert wire.written == [b"NOP\n"]
    assert str(wire.reasons[0]) == "lost the connection to host:1: the broker closed the connection"


@bounded
async def test_one_answer_waits_whatever_number_of_heartbeats_arrives() -> None:
    """The broker does not read; its heartbeats must not fill the memory."""
    wire = Wire()
    wire.may_write = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.run)
        for _ in range(5):
            wire.incoming.put_data(HEARTBEAT_FRAME * 1000)
            await trio.testing.wait_all_tasks_blocked()
        wire.connection.write(b"a")
        wire.incoming.put_data(HEARTBEAT_FRAME)
        await trio.testing.wait_all_tasks_blocked()
        wire.may_write.set()
        await trio.testing.wait_all_tasks_blocked()
        assert b"".join(wire.written) == b"NOP\nNOP\na"
        wire.incoming.put_data(HEARTBEAT_FRAME)
        await trio.testing.wait_all_tasks_blocked()
        assert b"".join(wire.written) == b"NOP\nNOP\naNOP\n"
        nursery.cancel_scope.cancel()


@bounded
async def test_eof_is_sent_after_all_queued_data() -> None:
    wire = Wire()
    wire.connection.write(b"x")
    wire.connection.write_eof()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.run)
        await trio.testing.wait_all_tasks_blocked()
        assert wire.written == [b"x"]
        with pytest.raises(trio.ClosedResourceError):
            await wire.stream.send_stream.send_all(b"y")
        assert not wire.connection.ended.is_set()
        wire.incoming.put_eof()
    assert wire.connection.ended.is_set()


@bounded
async def test_cancellation_closes_the_stream() -> None:
    wire = Wire()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert wire.connection.ended.is_set()
    with pytest.raises(trio.ClosedResourceError):
        await wire.stream.receive_some()
    wire.connection.write(b"goes nowhere")
