"""Tests for the scheduler: the order of a broker's work, how it waits for more, and calls from threads."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

import pytest
import trio
import trio.testing

from broker.state import BUFFERED, MS, ChannelClient, next_record
from broker.support import BOTH_SYNCS, PATIENCE_S, PolledClient, a_delivery, settle, until
from trio_nsq.broker import BrokerOptions
from trio_nsq.broker.clock import BrokerClock
from trio_nsq.broker.ingest.publication import Publication
from trio_nsq.broker.ingest.write_path import WritePath
from trio_nsq.broker.scheduler import Scheduler
from trio_nsq.broker.state.broker import Broker, MessageIds
from trio_nsq.broker.storage.disk_reserve import DiskReserve
from trio_nsq.event_loop.pacing import Pacing
from trio_nsq.event_loop.reactor import Poller
from trio_nsq.log import Files, MemoryLog
from trio_nsq.log.interface import LogFileFacts, Rotation, SyncPoint
from trio_nsq.protocol.messages import pack_messages


class OneFile(NamedTuple):
    """A file with a message."""

    base_sequence: int = 0
    next_sequence: int = 1
    size: int = 1
    created_ns: int = 0
    first_ns: int = 0

    def last_ns(self) -> int:
        return 0


class HeldLog(MemoryLog):
    """Creates a new file, and syncs, when it is released.

    Attributes:
        go_on: Set to release it.
        syncing: Set when a sync has begun.
        is_broken: `needs_rotation` fails, as after a defect.
    """

    files: Sequence[LogFileFacts] = [OneFile()]

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.syncing = threading.Event()
        self.is_broken = False

    def needs_rotation(self, size: int) -> bool:
        if self.is_broken:
            raise ZeroDivisionError("a defect")
        return False

    def rotation(self) -> Rotation:
        return HeldRotation(self)

    def sync_point(self) -> SyncPoint:
        return HeldSync(self)


class HeldRotation:
    """The beginning of a file that is created when its log is released."""

    def __init__(self, log: HeldLog) -> None:
        self._log = log

    def create(self) -> None:
        assert self._log.go_on.wait(PATIENCE_S)

    def use(self) -> None: ...

    def finish(self) -> None: ...


class HeldSync:
    """A sync that ends when its log is released."""

    def __init__(self, log: HeldLog) -> None:
        self._log = log

    def sync(self) -> None:
        self._log.syncing.set()
        assert self._log.go_on.wait(PATIENCE_S)


class Scheduled:
    """The parts of a broker that the scheduler runs, with one topic, whose log is held."""

    def __init__(self, nursery: trio.Nursery, options: BrokerOptions, clock_s: Callable[[], float]) -> None:
        self.log = HeldLog()
        broker = Broker(options, lambda name: self.log)
        self.topic = broker.topic("t")
        self.poller = Poller(options.pacing, clock_s)
        self.clock = BrokerClock()
        self.delivery = a_delivery(broker, options, self.poller, nursery)
        room = DiskReserve(options.data_path / "spare-room", Files())
        self.write_path = WritePath(options, MessageIds(0, 0), nursery, room, self.poller, self.delivery)
        self.scheduler = Scheduler(
            self.poller, self.write_path, self.delivery, options.pacing, syncs_first=options.sync == "always"
        )

    def submit(self, on_complete: Callable[[object], None] = lambda error: None, *bodies: bytes) -> None:
        """Publish to the topic."""
        messages = pack_messages(bodies or (b"x",))
        self.write_path.submit(self.topic, [Publication([messages])], on_complete)


@asynccontextmanager
async def scheduling(
    pacing: Pacing | None = None,
    clock_s: Callable[[], float] = perf_counter,
    *,
    sync: Literal["always", "interval"] = "interval",
    runs: bool = True,
) -> AsyncIterator[Scheduled]:
    """Run a scheduler, unless `runs` is false."""
    options = BrokerOptions(data_path=Path("/nowhere"), pacing=pacing or Pacing(), sync=sync)
    async with trio.open_nursery() as nursery:
        running = Scheduled(nursery, options, clock_s)
        try:
            async with trio.open_nursery() as scheduled:
                if runs:
                    scheduled.start_soon(running.scheduler.run)
                    await settle()
                yield running
                scheduled.cancel_scope.cancel()
        finally:
            running.log.go_on.set()
        await running.write_path.close()


# ---------------------------------------------------------------------- the order


async def test_idle_work_is_done_when_no_client_has_sent_anything() -> None:
    order: list[str] = []

    class Consumer(ChannelClient):
        """Another client sends when there is one more delivery to make."""

        def send_delivered(self) -> None:
            super().send_delivered()
            order.append("delivery")
            if order.count("delivery") == 4:
                client.other.send(b"x")

    async with scheduling(Pacing(channels_per_turn=1)) as running:
        client = PolledClient("client", order, running.poller)
        await settle()
        for name in "abcde":
            Consumer(running.topic.add_channel(name), (1, 0), 100)
        running.poller.call_soon(running.submit, lambda error: order.append("answer"))
        await settle()
        # After the answer, one channel is served at once, one at the end of the round, one in each idle moment. The
        # round of the client ends with another.
        assert order == ["client", "answer", *["delivery"] * 4, "client", "delivery"]
        client.close()


async def test_work_that_waits_for_clients_is_done_before_the_sleep() -> None:
    order: list[str] = []

    class Consumer(ChannelClient):
        def send_delivered(self) -> None:
            super().send_delivered()
            order.append("refill")

    class Finishing(PolledClient):
        """Each consumer finishes a message when it is served."""

        def serve_data(self, data: bytes | None) -> None:
            super().serve_data(data)
            for consumer in consumers:
                consumer.finish(1)
                running.delivery.deliver(consumer.channel)

    consumers: list[Consumer] = []
    async with scheduling(Pacing(refilling_s=1000)) as running:
        consumers += [Consumer(running.topic.add_channel(name), BUFFERED, 100) for name in "ab"]
        running.submit(lambda error: None, *[b"x"] * 200)
        await settle()
        order.clear()
        client = Finishing("client", order, running.poller)
        await settle()
        assert order == ["client", "refill", "refill"]
        client.close()


async def test_round_ends_even_if_its_end_raises() -> None:
    def complete(error: object) -> None:
        raise ZeroDivisionError("a defect")

    async with scheduling(runs=False) as running:

        async def run() -> None:
            with pytest.raises(ZeroDivisionError):
                await running.scheduler.run()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await settle()
            running.poller.call_soon(running.submit, complete)
        assert not running.poller.in_round


async def test_publish_is_refused_if_its_log_has_a_defect_and_later_ones_are_stored() -> None:
    completed: list[str] = []
    async with scheduling() as running:
        running.log.is_broken = True
        running.submit(lambda error: completed.append(str(error)))
        await settle()
        running.log.is_broken = False
        running.submit(lambda error: completed.append(str(error)))
        await settle()
    assert completed == ["internal error", "None"]


# ---------------------------------------------------------------------- busy-waiting


async def test_data_that_arrives_while_busy_waiting_is_served() -> None:
    served: list[str] = []
    readings = [0, 0]  # of the clock, and how many clients were served at the last one
    gone_s = 0.0

    def clock_s() -> float:
        """Only a busy-wait reads the clock a hundred times while no client is served."""
        nonlocal gone_s
        readings[:] = [readings[0] + 1 if readings[1] == len(served) else 0, len(served)]
        if readings[0] == 100:
            if len(served) < 4:
                client.other.send(b"x")
            else:
                gone_s += 2 * PATIENCE_S
        return gone_s

    async with scheduling(Pacing(spin_s=PATIENCE_S), clock_s) as running:
        client = PolledClient("served", served, running.poller)
        with trio.fail_after(PATIENCE_S):
            await settle()
        assert served == ["served"] * 4
        client.close()


async def test_no_busy_wait_while_others_need_the_event_loop() -> None:
    looks = 0
    slept_s = 0.0
    others: trio.Nursery | None = None  # if another task is to run before the wait

    def clock_s() -> float:
        """Tick when it is read, as a busy-wait does."""
        nonlocal looks
        looks += 1
        return looks / 100 + slept_s

    class Waking(PolledClient):
        def serve_data(self, data: bytes | None) -> None:
            super().serve_data(data)
            if others is not None:
                others.start_soon(trio.lowlevel.checkpoint)

    async def waits(sleep_s: float = 0, *, needs_rotation: bool = False) -> bool:
        nonlocal looks, slept_s
        pacing = Pacing(spin_s=1, turn_s=100)
        async with scheduling(pacing, clock_s) as running, trio.open_nursery() as nursery:
            client = Waking("client", [], running.poller)
            if needs_rotation:
                nursery.start_soon(running.write_path.rotate, running.topic)
            await settle()
            looks = 0
            slept_s += sleep_s
            client.other.send(b"x")
            await settle()
            looked = looks
            running.log.go_on.set()
            client.close()
        assert looked < 50 or looked >= 100
        return looked >= 100

    assert await waits()
    assert not await waits(sleep_s=10)  # it arrives rarely
    assert not await waits(needs_rotation=True)
    async with trio.open_nursery() as nursery:
        others = nursery
        assert not await waits()
        others = None
    assert await waits()


# ---------------------------------------------------------------------- naps


class Served(PolledClient):
    """A client, and what notices when it is served.

    Attributes:
        served: Set then, for a thread.
        on_served: Called then.
    """

    def __init__(self, poller: Poller) -> None:
        self.served = threading.Event()
        self.on_served: Callable[[], None] = lambda: None
        super().__init__("client", [], poller)

    def serve_data(self, data: bytes | None) -> None:
        super().serve_data(data)
        self.served.set()
        self.on_served()


class SleepsOfTrio(trio.abc.Instrument):
    """Notes whether trio looks for events, or sleeps, after a client was served."""

    def __init__(self, client: Served) -> None:
        self.slept = threading.Event()
        self._client = client

    def before_io_wait(self, timeout: float) -> None:
        if self._client.served.is_set():
            self.slept.set()


@asynccontextmanager
async def napping(nap_s: float) -> AsyncIterator[tuple[Scheduled, Served]]:
    """Run a scheduler, with a client that has been served, while a thread syncs."""
    ahead_s = 0.0

    def clock_s() -> float:
        return perf_counter() + ahead_s

    async with scheduling(Pacing(nap_s=nap_s, spin_s=0, turn_s=PATIENCE_S), clock_s) as running:
        ahead_s = 100 * nap_s  # the client has not sent for a while: no nap in vain now
        client = Served(running.poller)
        await settle()
        running.write_path.local.request(running.topic)
        await until(running.log.syncing.is_set)
        client.served.clear()
        yield running, client
        client.close()


async def test_nap_without_trio_while_a_thread_is_about_to_call() -> None:
    slept_in_trio: list[bool] = []

    def work() -> None:
        assert client.served.wait(PATIENCE_S)
        slept_in_trio.append(sleeps.slept.wait(0.2))
        running.log.go_on.set()

    async with napping(PATIENCE_S) as (running, client):
        sleeps = SleepsOfTrio(client)
        thread = threading.Thread(target=work)
        thread.start()
        trio.lowlevel.add_instrument(sleeps)
        client.other.send(b"x")
        await running.write_path.local.until_idle(running.topic)
        trio.lowlevel.remove_instrument(sleeps)
        thread.join()
    assert slept_in_trio == [False]


async def test_one_nap_while_a_thread_hangs() -> None:
    nap_s = 0.2
    took_s: list[float] = []  # until trio runs a task after the client was served
    token = trio.lowlevel.current_trio_token()
    done = trio.Event()

    def look() -> None:
        for _ in range(10):
            client.served.clear()
            client.other.send(b"x")
            assert client.served.wait(PATIENCE_S)
            began_s = perf_counter()
            ran = threading.Event()
            token.run_sync_soon(ran.set)
            assert ran.wait(PATIENCE_S)
            took_s.append(perf_counter() - began_s)
        token.run_sync_soon(done.set)

    async with napping(nap_s) as (_, client):
        thread = threading.Thread(target=look)
        thread.start()
        await done.wait()
        thread.join()
    assert took_s[0] > nap_s / 2
    assert sum(took_s[1:]) < 9 * nap_s / 2


async def test_no_nap_if_other_tasks_can_run() -> None:
    async with napping(PATIENCE_S / 2) as (_, client):
        served = trio.Event()
        client.on_served = served.set
        began_s = perf_counter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(served.wait)
            await settle()
            client.other.send(b"x")
        assert perf_counter() - began_s < PATIENCE_S / 2


async def test_nap_without_trio_while_clients_send_often() -> None:
    slept_in_trio: list[bool] = []
    done = trio.Event()

    def work() -> None:
        for _ in range(2):
            assert client.served.wait(PATIENCE_S)
            slept_in_trio.append(sleeps.slept.wait(0.2))
            client.served.clear()
            client.other.send(b"x")
        assert client.served.wait(PATIENCE_S)
        running.poller.call_soon(done.set)

    pacing = Pacing(nap_s=PATIENCE_S, spin_s=0, turn_s=PATIENCE_S)
    async with scheduling(pacing) as running:
        client = Served(running.poller)
        await until(client.served.is_set)
        client.served.clear()
        sleeps = SleepsOfTrio(client)
        thread = threading.Thread(target=work)
        thread.start()
        trio.lowlevel.add_instrument(sleeps)
        client.other.send(b"x")
        await done.wait()
        trio.lowlevel.remove_instrument(sleeps)
        thread.join()
        client.close()
    assert slept_in_trio == [False, False]


@pytest.mark.parametrize("napped_s", [0, 10])
async def test_busy_wait_after_a_nap_if_a_client_has_sent_again_at_once(napped_s: float) -> None:
    looks = 0
    gone_s = 0.0
    busy_waited = threading.Event()
    done = trio.Event()
    found: list[bool] = []

    def clock_s() -> float:
        """Tick when it is read, as a busy-wait does."""
        nonlocal looks
        looks += 1
        if looks >= 100:
            busy_waited.set()
        return gone_s + looks / 100

    def served() -> None:
        nonlocal looks, gone_s
        gone_s += looks / 100
        looks = 0

    def work() -> None:
        nonlocal gone_s
        assert client.served.wait(PATIENCE_S)
        found.append(busy_waited.wait(0.2))
        client.served.clear()
        gone_s += napped_s
        client.other.send(b"x")
        assert client.served.wait(PATIENCE_S)
        found.append(busy_waited.wait(0.2 if napped_s else PATIENCE_S))
        running.poller.call_soon(done.set)

    async with scheduling(Pacing(nap_s=PATIENCE_S, spin_s=1, turn_s=100 * PATIENCE_S), clock_s) as running:
        client = Served(running.poller)
        client.on_served = served
        await until(client.served.is_set)
        await settle()
        client.served.clear()
        busy_waited.clear()
        gone_s += 10  # the client has not sent for a while
        thread = threading.Thread(target=work)
        thread.start()
        client.other.send(b"x")
        await done.wait()
        thread.join()
        client.close()
    assert found == [False, not napped_s]


# ---------------------------------------------------------------------- timers


async def test_due_messages_are_delivered_while_clients_send_all_the_time() -> None:
    class SendsAgain(PolledClient):
        def serve_data(self, data: bytes | None) -> None:
            super().serve_data(data)
            self.other.send(b"x")

    async with scheduling() as running:
        client = SendsAgain("client", [], running.poller)
        consumer = ChannelClient(running.topic.add_channel("c"), (1, 0), 100)
        due_ns = running.clock.now_ns() + 20 * MS
        running.write_path.submit(
            running.topic, [Publication([pack_messages([b"x"])], due_ns)], lambda _: None
        )
        await until(lambda: consumer.bodies == [b"x"])
        client.close()


async def test_timer_that_a_task_sets_wakes_the_sleeping_scheduler() -> None:
    async with scheduling() as running:
        consumer = ChannelClient(running.topic.add_channel("c"), (1, 0), 100)
        await until(lambda: running.poller.is_asleep)
        record = next_record(running.topic, pack_messages([b"x"]), 1, running.clock.now_ns() + 20 * MS)
        running.log.append([record], sync=False)
        running.topic.accept([record])
        await until(lambda: consumer.bodies == [b"x"])


# ---------------------------------------------------------------------- calls from threads


async def test_calls_from_a_thread_run_in_a_round() -> None:
    heard: list[str] = []

    def hear() -> None:
        heard.append(f"in round: {running.poller.in_round}")
        running.submit(lambda error: heard.append("written at its end"))

    async with scheduling() as running:
        await trio.to_thread.run_sync(running.poller.call_soon, hear)
        await settle()
        assert heard == ["in round: True", "written at its end"]
        assert not running.poller.in_round


async def test_no_call_from_a_thread_is_lost() -> None:
    """Also if it arrives while a round runs another one, or before a sleep."""
    heard: list[int] = []
    answered = threading.Event()

    def hear(number: int) -> None:
        heard.append(number)
        answered.set()

    def call(first: int) -> None:
        for number in range(first, first + 3000):
            running.poller.call_soon(hear, number)
            if number % 3 == 0:
                assert answered.wait(PATIENCE_S)
                answered.clear()

    async with scheduling() as running:
        await trio.to_thread.run_sync(call, 0)
        await settle()
        assert heard == [*range(3000)]


async def test_calls_from_threads_run_while_the_scheduler_does_not() -> None:
    heard: list[int] = []
    async with scheduling(runs=False) as running:
        poller = running.poller
        await trio.to_thread.run_sync(poller.call_soon, heard.append, 1)
        await settle()
        assert heard == [1]
        for number in (2, 3):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(running.scheduler.run)
                await settle()
                nursery.cancel_scope.cancel()
                poller.call_soon(heard.append, number)
            await settle()
            assert heard[-1] == number


# ---------------------------------------------------------------------- other work of the log


@BOTH_SYNCS
async def test_publish_during_the_creation_of_a_file_is_stored_afterwards(
    sync: Literal["always", "interval"],
) -> None:
    stored: list[object] = []
    async with scheduling(sync=sync, runs=False) as running, trio.open_nursery() as nursery:
        nursery.start_soon(running.write_path.rotate, running.topic)
        await settle()
        for _ in range(2):
            running.submit(stored.append)
        await settle()
        assert not stored
        running.log.go_on.set()
    assert stored == [None, None]
    assert running.log.next_sequence == 2
