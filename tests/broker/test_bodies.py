"""Tests for large bodies that arrive slowly: how many at a time, and what happens to the others."""

import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from struct import unpack

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.support import RawClient, connected, identify, mpub, running_broker, settle
from soak import examples
from trio_nsq.broker import BoundAddresses
from trio_nsq.protocol import Limits
from trio_nsq.protocol.limits import MIB
from trio_nsq.server.body_memory import LEAST_BYTES_PER_S, PATIENCE_S, STALL_S, BodyMemoryLimit

LARGE = mpub("t", *5 * [bytes(1_000_000)])
AT_ONCE = 6
"""Bodies of 5 MB of one address that are admitted at a time: half of 64 MiB."""
OTHER_ADDRESS = "127.0.0.2"


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
async def publishing(
    bound: BoundAddresses, *kinds: str, source: str | None = None
) -> AsyncIterator[list[Publisher]]:
    """Connect clients of these kinds, from another loopback address if one is given."""
    assert bound.http_address
    async with AsyncExitStack() as stack:
        publishers = []
        for kind in kinds:
            tcp, http = (bound.tcp_address, b"  V2"), (bound.http_address, b"")
            client = connected(*(tcp if kind == "TCP" else http), source)
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
        clock.jump(PATIENCE_S - 10)
        await settle()
        await small.publish("t", b"a small one needs no room")
        nursery.start_soon(other.begin)
        await settle()
        for _ in range(3):
            assert not other.sent
            assert not any(publisher.closed for publisher in stalled)
            clock.jump(STALL_S / 4)
            await settle()
        clock.jump(STALL_S / 4)
        await settle()
        assert other.sent
        await other.end()
        assert sum(publisher.closed for publisher in stalled) == 1
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["TCP", "HTTP"])
async def test_stalled_bodies_do_not_delay_other_addresses_and_smaller_ones(
    kind: str, tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    """The clock stands still."""
    async with (
        running_broker(tmp_path / "d", sync="interval", limits=LIMITS) as bound,
        publishing(bound, *5 * AT_ONCE * [kind]) as stalled,
        publishing(bound, "TCP", "HTTP", "HTTP in chunks", source=OTHER_ADDRESS) as others,
        connected(bound.tcp_address) as smaller,
        trio.open_nursery() as nursery,
    ):
        for publisher in stalled:
            nursery.start_soon(publisher.begin)
        await settle()
        assert sum(publisher.sent for publisher in stalled) == AT_ONCE
        for publisher in others:
            await publisher.begin()
            await publisher.end()
        await smaller.publish("t", bytes(900_000))
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
    """A client with one body.

    Attributes:
        peer: Its address.
        closed: It was closed.
    """

    def __init__(self, host: str = "10.0.0.1") -> None:
        self.peer = f"{host}:1"
        self.closed = trio.Event()

    def close(self) -> None:
        self.closed.set()

    async def transfer(self, bodies: BodyMemoryLimit, size: int, bytes_per_s: float) -> bool:
        """Transfer a body; returns whether the client was not closed."""
        if not bodies.admit(self, size):
            await bodies.wait(self, size)
        left = size
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._stop, scope)
                while left > 0:
                    await trio.sleep(0.25)
                    left -= int(bytes_per_s / 4)
                    assert left <= 0 or self.closed.is_set() or bodies.admit(self, left)
                nursery.cancel_scope.cancel()
        bodies.leave(self)
        return not self.closed.is_set()

    async def _stop(self, scope: trio.CancelScope) -> None:
        await self.closed.wait()
        scope.cancel()


async def test_each_body_needs_its_own_room() -> None:
    bodies = BodyMemoryLimit(20)
    client, other = _Client(), _Client()
    assert bodies.admit(client, 1, 1)
    assert bodies.admit(other, 5, 1)
    assert not bodies.admit(client, 9, 2)
    assert bodies.admit(other, 10, 2)
    assert not bodies.admit(client, 1, 2)


async def test_each_body_has_its_own_time(autojump_clock: trio.testing.MockClock) -> None:
    bodies = BodyMemoryLimit(10)
    busy, other = _Client(), _Client()
    for number in range(5):
        assert bodies.admit(busy, 10, number)
        await trio.sleep(PATIENCE_S - 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bodies.wait, other, 10, 1)
        await settle()
        assert not bodies.admit(busy, 10, 5)
    assert bodies.admit(other, 10, 1)
    assert not busy.closed.is_set()


async def test_cancelled_wait_lets_the_next_in(autojump_clock: trio.testing.MockClock) -> None:
    bodies = BodyMemoryLimit(10)
    first, large, small = _Client(), _Client(), _Client()
    assert bodies.admit(first, 2)
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as gone:
            gone.start_soon(bodies.wait, large, 10)
            await settle()
            nursery.start_soon(bodies.wait, small, 2)
            await settle()
            gone.cancel_scope.cancel()
    assert not first.closed.is_set()


async def test_body_larger_than_all_room_is_admitted_alone() -> None:
    bodies = BodyMemoryLimit(10)
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
    bodies = BodyMemoryLimit(10)
    first, gone, last = _Client(), _Client(), _Client()
    assert bodies.admit(first, 10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bodies.wait, gone, 10)
        await settle()
        nursery.cancel_scope.cancel()
    bodies.leave(gone)
    bodies.leave(first)
    assert bodies.admit(last, 10)


async def test_a_large_body_is_not_overtaken_without_end(autojump_clock: trio.testing.MockClock) -> None:
    bodies = BodyMemoryLimit(10 * MIB)
    large = _Client("10.0.0.9")
    async with trio.open_nursery() as nursery:

        async def small_ones(host: str) -> None:
            while not large.closed.is_set():
                await _Client(host).transfer(bodies, 2 * MIB, MIB)

        for number in range(5):
            nursery.start_soon(small_ones, f"10.0.0.{number}")
        await settle()
        with trio.fail_after(PATIENCE_S):
            assert await large.transfer(bodies, 9 * MIB, MIB)
        large.close()


async def test_a_slow_body_ends_only_if_others_wait_for_its_room(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bodies = BodyMemoryLimit(10 * MIB)
    slow, moving, crawling = _Client(), _Client("10.0.0.2"), _Client("10.0.0.3")
    ended: dict[_Client, tuple[bool, float]] = {}

    async def transfer(client: _Client, size: int, bytes_per_s: float) -> None:
        ended[client] = await client.transfer(bodies, size, bytes_per_s), trio.current_time()

    async with trio.open_nursery() as nursery:
        began_s = trio.current_time()
        nursery.start_soon(transfer, slow, 4 * MIB, 1.5 * LEAST_BYTES_PER_S)  # it would take 43 s
        nursery.start_soon(transfer, moving, 3 * MIB, 1.5 * LEAST_BYTES_PER_S)
        nursery.start_soon(transfer, crawling, 2 * MIB, LEAST_BYTES_PER_S / 4)
        await trio.sleep(10)
        # The address that holds most waits for more: this is no reason to close those that hold less.
        assert await _Client().transfer(bodies, 3 * MIB, MIB)
        assert ended[slow][0] is False
        assert ended[slow][1] - began_s == pytest.approx(PATIENCE_S, abs=1)
    assert ended[moving][0]
    assert ended[crawling][0]


HOSTS = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


@settings(max_examples=examples(25), deadline=None)
@given(
    stalled=st.lists(st.tuples(st.sampled_from(HOSTS[:2]), st.integers(MIB // 16, 8 * MIB)), max_size=40),
    honest=st.lists(
        st.tuples(st.sampled_from(HOSTS), st.integers(MIB // 16, 5 * MIB)), min_size=1, max_size=6
    ),
)
def test_every_moving_body_arrives_within_seconds(
    stalled: list[tuple[str, int]], honest: list[tuple[str, int]]
) -> None:
    async def attack() -> None:
        bodies = BodyMemoryLimit()

        async def stall(host: str, size: int) -> None:
            assert not await _Client(host).transfer(bodies, size, 0)

        async def transfer(host: str, size: int) -> None:
            assert await _Client(host).transfer(bodies, size, 5 * MIB)

        async with trio.open_nursery() as attackers:
            for each in stalled:
                attackers.start_soon(stall, *each)
            await settle()
            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    for each in honest:
                        nursery.start_soon(transfer, *each)
            attackers.cancel_scope.cancel()

    trio.run(attack, clock=trio.testing.MockClock(autojump_threshold=0))
