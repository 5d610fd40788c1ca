"""Tests for the distribution of deliveries over a poller's rounds: what waits, and for how long."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from broker.state import BUFFERED, UNBUFFERED, ChannelClient, next_record
from broker.support import a_delivery
from trio_nsq.broker import BrokerOptions
from trio_nsq.broker.delivery import Deliverer
from trio_nsq.broker.state.broker import Broker
from trio_nsq.event_loop.pacing import Pacing
from trio_nsq.event_loop.reactor import Poller
from trio_nsq.log import MemoryLog
from trio_nsq.protocol.messages import pack_messages


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


class SetClock:
    """The clock that limits turns, set by the test.

    Attributes:
        now_s: The time.
        step_s: Added at each reading.
    """

    def __init__(self) -> None:
        self.now_s = 100.0
        self.step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


class Rounds:
    """A topic with deliveries, in rounds that a test makes.

    Attributes:
        turns: The clock that limits turns, and the waits of deliveries.
    """

    def __init__(self, delivery: Deliverer, broker: Broker, poller: Poller, turns: SetClock) -> None:
        self.turns = turns
        self._delivery = delivery
        self._poller = poller
        self._topic = broker.topic("t")
        self._next_id = 1

    def client(
        self, channel: str = "c", buffer: tuple[int, int] = UNBUFFERED, ready: int = 100
    ) -> ChannelClient:
        """Add a client of a channel."""
        return ChannelClient(self._topic.add_channel(channel), buffer, ready)

    def rested(self, clock: trio.testing.MockClock, clients: list[ChannelClient]) -> None:
        """Wait until the next message of each client could be sent at once, but for other clients."""
        self.round(b"before")
        self.pause()
        for client in clients:
            assert client.bodies == [b"before"]
            client.bodies.clear()
        clock.jump(0.3)

    def round(self, *bodies: bytes) -> None:
        """Run a round in which these messages are published and other data waits."""
        self._poller.in_round = True
        if bodies:
            record = next_record(self._topic, pack_messages(bodies), self._next_id)
            self._next_id += len(bodies)
            self._topic.log.append([record], sync=False)
            self._topic.accept([record])
            self._delivery.deliver_published(self._topic)
        self._delivery.end_round()
        self._poller.in_round = False

    def finish(self, client: ChannelClient, count: int) -> None:
        """Run a round in which a client finishes this many messages."""
        self._poller.in_round = True
        client.finish(count)
        self._delivery.deliver(client.channel)
        self._delivery.end_round()
        self._poller.in_round = False

    def sleep(self) -> None:
        """Do what the poller does before it sleeps."""
        while self._delivery.before_sleep():
            pass

    def served_by_round(self, clients: list[ChannelClient], rounds: int, *bodies: bytes) -> list[int]:
        """Return how many clients got a message by the end of the round with these publishes, and of the
        next.
        """
        served: list[int] = []
        for number in range(rounds):
            self.round(*bodies if not number else ())
            served.append(sum(bool(client.bodies) for client in clients))
        return served

    def pause(self) -> None:
        """Run rounds without input until everything is done."""
        while self._delivery.idle():
            pass


@asynccontextmanager
async def delivering(pacing: Pacing) -> AsyncIterator[Rounds]:
    """Run one topic with a log in memory."""
    turns = SetClock()
    options, poller = BrokerOptions(data_path=Path("/nowhere"), pacing=pacing), Poller(pacing, turns)
    broker = Broker(options, lambda name: MemoryLog())
    async with trio.open_nursery() as nursery:
        yield Rounds(a_delivery(broker, options, poller, nursery), broker, poller, turns)


async def test_deliveries_wait_for_a_pause(clock: trio.testing.MockClock) -> None:
    async with delivering(Pacing(waiting_s=1000)) as rounds:
        client = rounds.client(buffer=BUFFERED)
        rounds.rested(clock, [client])
        for _ in range(10):
            rounds.round(b"x")
            rounds.round()
        assert client.bodies == []
        rounds.pause()
        assert client.bodies == [b"x"] * 10


async def test_deliveries_wait_for_a_limited_time(clock: trio.testing.MockClock) -> None:
    """New messages do not extend it."""
    async with delivering(Pacing(waiting_s=0)) as rounds:
        client = rounds.client(buffer=BUFFERED)
        rounds.rested(clock, [client])
        rounds.round(b"x")
        assert client.bodies == [b"x"]
    async with delivering(Pacing(waiting_s=0.2)) as rounds:
        client = rounds.client(buffer=(1_000_000_000, 250), ready=1_000_000_000)  # too large to be filled
        rounds.rested(clock, [client])
        for _ in range(3):
            rounds.round(b"x")
            rounds.turns.now_s += 0.09
        assert client.bodies == []
        rounds.round(b"x")
        assert client.bodies == [b"x"] * 4


async def test_deliveries_without_a_buffer_do_not_wait() -> None:
    async with delivering(Pacing(waiting_s=1000)) as rounds:
        client = rounds.client()
        rounds.round(b"x")
        assert client.bodies == [b"x"]


async def test_some_of_many_channels_are_served_in_each_round() -> None:
    async with delivering(Pacing(channels_per_turn=1)) as rounds:
        clients = [rounds.client(f"c{n}") for n in range(4)]
        # One when it is stored, and one from the queue at the end of each round.
        assert rounds.served_by_round(clients, 4, b"x") == [2, 3, 4, 4]


async def test_some_of_many_clients_of_a_channel_are_served_in_each_turn() -> None:
    async with delivering(Pacing(grants_per_turn=1)) as rounds:
        clients = [rounds.client(ready=1) for _ in range(64)]
        # This many at a time, whatever they get.
        assert rounds.served_by_round(clients, 4, *[b"x"] * 64) == [32, 48, 64, 64]


async def test_late_deliveries_do_not_wait_for_a_turn(
    clock: trio.testing.MockClock,
) -> None:
    async with delivering(Pacing(waiting_s=0, turn_s=1.5)) as rounds:
        clients = [rounds.client(f"c{n}", buffer=BUFFERED) for n in range(3)]
        rounds.rested(clock, clients)
        rounds.turns.step_s = 1.0
        assert rounds.served_by_round(clients, 4, b"x") == [1, 2, 3, 3]


async def test_client_with_much_in_flight_gets_more_once_it_has_room() -> None:
    """Single answers cause no delivery of a single message each, unless the poller has nothing else to do."""
    async with delivering(Pacing(refilling_s=1000)) as rounds:
        client = rounds.client(buffer=BUFFERED, ready=32)
        rounds.round(*[b"x"] * 100)
        assert len(client.bodies) == 32
        for _ in range(3):
            rounds.finish(client, 1)
            rounds.pause()
        assert len(client.bodies) == 32
        rounds.finish(client, 1)
        assert len(client.bodies) == 36
        rounds.finish(client, 2)
        assert len(client.bodies) == 36
        rounds.sleep()
        assert len(client.bodies) == 38


async def test_client_with_much_in_flight_waits_for_a_limited_time() -> None:
    """Further answers do not extend it."""
    async with delivering(Pacing(refilling_s=0.2)) as rounds:
        client = rounds.client(buffer=BUFFERED, ready=100)
        rounds.round(*[b"x"] * 200)
        for _ in range(3):
            rounds.finish(client, 1)
            rounds.turns.now_s += 0.09
        assert len(client.bodies) == 100
        rounds.round()
        assert len(client.bodies) == 103
        rounds.finish(client, 1)
        assert len(client.bodies) == 103


@pytest.mark.parametrize(("buffer", "ready"), [(UNBUFFERED, 100), (BUFFERED, 8)])
async def test_clients_that_do_not_wait_for_room(buffer: tuple[int, int], ready: int) -> None:
    async with delivering(Pacing(refilling_s=1000)) as rounds:
        client = rounds.client(buffer=buffer, ready=ready)
        rounds.round(*[b"x"] * 200)
        rounds.finish(client, 1)
        assert len(client.bodies) == ready + 1


async def test_another_client_with_room_does_not_wait_for_one_without() -> None:
    async with delivering(Pacing(refilling_s=1000)) as rounds:
        busy = rounds.client(buffer=BUFFERED, ready=100)
        rounds.round(*[b"x"] * 200)
        rounds.finish(busy, 1)
        idle = rounds.client(buffer=BUFFERED, ready=5)
        rounds.round()
        rounds.finish(busy, 1)
        assert len(idle.bodies) == 5
        assert len(busy.bodies) == 102
