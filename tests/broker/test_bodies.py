"""Tests for large bodies that arrive slowly: how many at a time, and what happens to the others."""

import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from struct import unpack

import pytest
import trio
import trio.testing

from broker.support import RawClient, connected, identify, mpub, running_broker, settle
from trio_nsq.bodies import PATIENCE_S, Bodies
from trio_nsq.broker import BoundAddresses
from trio_nsq.protocol import Limits

LARGE = mpub("t", *5 * [bytes(1_000_000)])
AT_ONCE = 13
"""Bodies of 5 MB that fit at a time: 64 MiB."""


LIMITS = Limits(max_body_size=5_000_024)  # in chunks a body counts with its maximum size
MPUB = LARGE[LARGE.index(b"\n") + 5 :]  # as /mpub accepts it
POST = b"POST /mpub?topic=t&binary=true HTTP/1.1\r\nHost: localhost\r\n"
REQUESTS = {
    "HTTP": POST + b"Content-Length: %d\r\n\r\n%b" % (len(MPUB), MPUB),
    "HTTP in chunks": POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(MPUB), MPUB),
}
OK_OF_HTTP = b"\r\n\r\nOK"


class Publisher:
    """Publishes a large body, at first without its last byte.

    Attributes:
        sent: The broker has read it.
        closed: The broker has closed the connection.
    """

    def __init__(self, raw: RawClient, kind: str) -> None:
        self._raw = raw
        self._kind = kind
        self._data = LARGE if kind == "TCP" else REQUESTS[kind]
        self.sent = self.closed = False

    async def begin(self) -> None:
        await self._raw.send(self._data[:-1])
        self.sent = True

    async def end(self) -> None:
        """Send the rest, and expect success."""
        await self._raw.send(self._data[-1:])
        if self._kind == "TCP":
            while (frame := await self._raw.frame()) == (0, b"_heartbeat_"):
                pass
            assert frame == (0, b"OK")
            return
        answer = b""
        while not answer.endswith(OK_OF_HTTP):
            more = await self._raw.stream.receive_some(1000)
            assert more, answer
            answer += more
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")

    async def leave(self) -> None:
        """Disconnect."""
        await self._raw.stream.aclose()

    async def note_close(self) -> None:
        while await self._raw.stream.receive_some(1000):
            pass
        self.closed = True


@asynccontextmanager
async def publishing(bound: BoundAddresses, *kinds: str) -> AsyncIterator[list[Publisher]]:
    """Connect clients of these kinds."""
    assert bound.http_address
    async with AsyncExitStack() as stack:
        publishers = []
        for kind in kinds:
            client = connected(bound.tcp_address) if kind == "TCP" else connected(bound.http_address, b"")
            publishers.append(Publisher(await stack.enter_async_context(client), kind))
        yield publishers


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


@pytest.mark.parametrize("kinds", [["TCP"], ["HTTP"], ["HTTP in chunks"], ["TCP", "HTTP"]], ids=" and ".join)
async def test_excess_bodies_wait_for_room(
    kinds: list[str], tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    kinds = 20 // len(kinds) * kinds
    async with (
        running_broker(tmp_path / "d", sync="interval", limits=LIMITS) as bound,
        publishing(bound, *kinds) as publishers,
        trio.open_nursery() as nursery,
    ):
        for publisher in publishers:
            nursery.start_soon(publisher.begin)
        ended = set[Publisher]()
        for done in range(20):  # a body with room ends, and the next one gets the room
            await settle()
            sent = [publisher for publisher in publishers if publisher.sent]
            assert len(sent) == min(AT_ONCE + done, 20)
            last = next(publisher for publisher in sent if publisher not in ended)
            await last.end()
            ended.add(last)


@pytest.mark.parametrize("kind", ["TCP", "HTTP", "HTTP in chunks"])
async def test_stalled_body_is_closed_if_others_wait(
    kind: str, tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with (
        running_broker(tmp_path / "d", sync="interval", limits=LIMITS) as bound,
        publishing(bound, *AT_ONCE * [kind]) as stalled,
        publishing(bound, kind) as (other,),
        connected(bound.tcp_address) as small,
        trio.open_nursery() as nursery,
    ):
        for publisher in stalled:
            nursery.start_soon(publisher.begin)
        await settle()
        for publisher in stalled:
            nursery.start_soon(publisher.note_close)
        clock.jump(PATIENCE_S - 1)
        await settle()
        await small.publish("t", b"a small one needs no room")
        nursery.start_soon(other.begin)
        await settle()
        assert not other.sent
        assert not any(publisher.closed for publisher in stalled)
        clock.jump(1)
        await settle()
        assert other.sent
        await other.end()
        assert sum(publisher.closed for publisher in stalled) == 1
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["TCP", "HTTP", "HTTP in chunks"])
async def test_disconnect_within_a_body_frees_its_room_at_once(
    kind: str, tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with (
        running_broker(tmp_path / "d", sync="interval", limits=LIMITS) as bound,
        publishing(bound, *AT_ONCE * [kind]) as (leaving, *stalled),
        publishing(bound, kind) as (other,),
        trio.open_nursery() as nursery,
    ):
        for publisher in (leaving, *stalled):
            nursery.start_soon(publisher.begin)
        await settle()
        nursery.start_soon(other.begin)
        await settle()
        assert (leaving.sent, other.sent) == (True, False)
        await leaving.leave()
        await settle()
        assert other.sent
        await other.end()


async def exactly(client: RawClient, size: int) -> bytes:
    """Read this many bytes, and none after them."""
    data = b""
    while len(data) < size:
        data += (more := await client.stream.receive_some(size - len(data)))
        assert more
    return data


async def test_consecutive_bodies_take_turns_with_those_of_others(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    deflate, inflate = zlib.compressobj(0, wbits=-15), zlib.decompressobj(-15)

    def compressed(data: bytes) -> bytes:
        return deflate.compress(data) + deflate.flush(zlib.Z_SYNC_FLUSH)

    answers = b""

    async def answered(count: int) -> None:
        nonlocal answers
        while answers.count(b"OK") < count:
            answers += inflate.decompress(await busy.stream.receive_some(1000))

    async with (
        running_broker(tmp_path / "d", sync="interval") as bound,
        connected(bound.tcp_address) as busy,
        publishing(bound, *AT_ONCE * ["TCP"]) as (other, *stalled),
        trio.open_nursery() as nursery,
    ):
        await busy.send(identify(feature_negotiation=True, deflate=True))
        (size,) = unpack(">i", await exactly(busy, 4))
        await exactly(busy, size)
        await busy.send(compressed(LARGE[:-1]))
        for publisher in stalled:
            nursery.start_soon(publisher.begin)
        await settle()
        nursery.start_soon(other.begin)
        await settle()
        assert not other.sent
        # The read that returns the end of a body returns the start of the next.
        async with trio.open_nursery() as sending:
            sending.start_soon(busy.send, compressed(LARGE[-1:] + LARGE[:-1]))
            await answered(2)  # the first is for the upgrade
            await settle()
            assert other.sent
            await other.end()
        await busy.send(compressed(LARGE[-1:]))
        await answered(3)


class _Client:
    peer = "a client"

    def close(self) -> None:
        raise AssertionError("no client is slow here")


async def test_each_body_needs_its_own_room() -> None:
    bodies = Bodies(10)
    client, other = _Client(), _Client()
    assert bodies.admit(client, 1, 1)
    assert bodies.admit(other, 5, 1)
    assert not bodies.admit(client, 6, 2)
    assert bodies.admit(other, 10, 2)
    assert not bodies.admit(client, 1, 2)


async def test_each_body_has_its_own_time(autojump_clock: trio.testing.MockClock) -> None:
    bodies = Bodies(10)
    busy, other = _Client(), _Client()
    for number in range(5):
        assert bodies.admit(busy, 10, number)
        await trio.sleep(PATIENCE_S - 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bodies.wait, other, 10, 1)
        await settle()
        assert not bodies.admit(busy, 10, 5)
    assert bodies.admit(other, 10, 1)


async def test_cancelled_wait_lets_the_next_in(autojump_clock: trio.testing.MockClock) -> None:
    bodies = Bodies(10)
    first, large, small = _Client(), _Client(), _Client()
    assert bodies.admit(first, 5)
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as gone:
            gone.start_soon(bodies.wait, large, 10)
            await settle()
            nursery.start_soon(bodies.wait, small, 5)
            await settle()
            gone.cancel_scope.cancel()


async def test_body_larger_than_all_room_is_admitted_alone() -> None:
    bodies = Bodies(10)
    large, small, other = _Client(), _Client(), _Client()
    assert bodies.admit(large, 11)
    assert not bodies.admit(small, 1)
    bodies.leave(large)
    assert bodies.admit(small, 1)
    assert not bodies.admit(large, 11)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bodies.wait, large, 11)
        await settle()
        assert not bodies.admit(other, 1)  # it does not overtake waiting ones
        bodies.leave(small)
    assert bodies.admit(large, 5)


async def test_disconnected_client_waits_no_more() -> None:
    bodies = Bodies(10)
    first, gone, last = _Client(), _Client(), _Client()
    assert bodies.admit(first, 10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bodies.wait, gone, 10)
        await settle()
        nursery.cancel_scope.cancel()
    bodies.leave(gone)
    bodies.leave(first)
    assert bodies.admit(last, 10)
