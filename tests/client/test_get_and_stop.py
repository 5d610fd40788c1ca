"""Check `Consumer.get`, `drain` and `close_soon` with a real broker, in programs on trio, on asyncio and in threads."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import anyio
import pytest

import trio_nsq.sync
from client.support.fake_broker import PATIENCE_S
from client.support.loops import Loop, on_both, run
from interop.peers import Broker, free_address, qcli_serve
from trio_nsq import Consumer, ConsumerClosed, Message, Producer

pytestmark = pytest.mark.slow  # starts a broker
_topics = map("topic{}".format, count())


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker for all tests; each uses a topic of its own."""
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data", "--sync=interval") as broker:
        yield broker


@pytest.fixture
def topic(broker: Broker) -> str:
    """A new topic with the channel `c` and the messages 0 to 9."""
    broker.create(name := next(_topics), "c")
    broker.post("/mpub", b"\n".join(b"%d" % number for number in range(10)), topic=name)
    return name


def consumer_of(broker: Broker, topic: str, max_in_flight: int = 5, **options: float) -> Consumer:
    # With a short timeout, a failed close would look like a clean one.
    return Consumer(
        topic,
        "c",
        nsqd_tcp_addresses=broker.tcp_address,
        max_in_flight=max_in_flight,
        close_timeout_s=options.get("close_timeout_s", 2 * PATIENCE_S),
    )


def sync_consumer_of(broker: Broker, topic: str, max_in_flight: int = 5) -> trio_nsq.sync.Consumer:
    return trio_nsq.sync.Consumer(
        topic,
        "c",
        nsqd_tcp_addresses=broker.tcp_address,
        max_in_flight=max_in_flight,
        close_timeout_s=2 * PATIENCE_S,
    )


def counts(broker: Broker, topic: str) -> tuple[int, int, int]:
    """Return how many messages wait, are in flight, and were requeued."""
    about = broker.channel_stats(topic, "c")
    return about["depth"], about["in_flight_count"], about["requeue_count"]


# ------------------------------------------------------------------ get


@on_both
def test_get(loop: Loop, broker: Broker, topic: str) -> None:
    async def main() -> None:
        async with consumer_of(broker, topic, 2) as consumer:
            first, second = await consumer.get(), await consumer.get(PATIENCE_S)
            assert second is not None
            assert (first.body, second.body) == (b"0", b"1")
            assert await consumer.get(0) is None  # no more may be in flight
            assert await consumer.get(0.01) is None
            first.finish()
            third = await consumer.get(None)
            assert third.body == b"2"
            with pytest.raises(ValueError, match="timeout_s is -1; it must be at least 0"):
                await consumer.get(-1)
            await consumer.aclose()
            with pytest.raises(ConsumerClosed):
                await consumer.get(PATIENCE_S)
            with pytest.raises(ConsumerClosed):
                await consumer.get()
        with pytest.raises(RuntimeError, match="inside its `async with` block"):
            await consumer_of(broker, topic).get()

    run(loop, main)
    assert counts(broker, topic) == (9, 0, 2)


@on_both
def test_get_with_no_time_returns_what_has_been_received(loop: Loop, broker: Broker, topic: str) -> None:
    async def main() -> None:
        async with consumer_of(broker, topic, 10) as consumer:
            (await consumer.get()).finish()
            taken = 1
            while taken < 10:
                # Each time, the others of the batch are there, or arrive while the loop runs.
                if (message := await consumer.get(0)) is not None:
                    message.finish()
                    taken += 1
                else:
                    await anyio.sleep(0.001)

    run(loop, main)
    assert counts(broker, topic) == (0, 0, 0)


@on_both
def test_get_without_time_takes_what_is_there_although_the_loop_has_other_work(
    loop: Loop, broker: Broker, topic: str
) -> None:
    async def main() -> None:
        async with consumer_of(broker, topic) as consumer:
            await until(lambda: consumer.stats().received == 5)
            for number in range(5):
                await anyio.sleep(0.02)  # longer than a loop may run before other tasks do
                message = await consumer.get(0)
                assert message is not None
                assert message.body == b"%d" % number

    run(loop, main)


def test_get_in_threads(broker: Broker, topic: str) -> None:
    with sync_consumer_of(broker, topic, 1) as consumer:
        first = consumer.get()
        assert isinstance(first, trio_nsq.sync.Message)
        assert consumer.get(0) is None
        first.finish()
        second = consumer.get(PATIENCE_S)
        assert second is not None
        assert second.body == b"1"
        consumer.close()
        with pytest.raises(ConsumerClosed):
            consumer.get()
    with pytest.raises(RuntimeError, match="inside its `with` block"):
        sync_consumer_of(broker, topic).get()


# ------------------------------------------------------------------ drain


@on_both
def test_drain_ends_a_loop_after_the_received_messages(loop: Loop, broker: Broker, topic: str) -> None:
    received = []

    async def main() -> None:
        async with consumer_of(broker, topic) as consumer, anyio.create_task_group() as tasks:
            message = await consumer.get()
            await until(lambda: consumer.stats().received == 5)
            tasks.start_soon(consumer.drain)
            await anyio.wait_all_tasks_blocked()  # it has begun
            message.finish()
            received.append(message.body)
            async for message in consumer:
                await anyio.sleep(0)
                received.append(message.body)
                message.finish()

    run(loop, main)
    assert received == [b"0", b"1", b"2", b"3", b"4"]
    assert counts(broker, topic) == (5, 0, 0)


@on_both
def test_drain_ends_run_after_the_received_messages(loop: Loop, broker: Broker, topic: str) -> None:
    handled: list[bytes] = []

    async def main() -> None:
        async with consumer_of(broker, topic) as consumer:

            async def handle(message: Message) -> None:
                if not handled:
                    await until(lambda: consumer.stats().received == 5)
                    await consumer.drain()  # returns at once
                    await consumer.drain()
                await anyio.sleep(0)
                handled.append(message.body)

            await consumer.run(handle, concurrency=2)

    run(loop, main)
    assert len(handled) == 5
    assert counts(broker, topic) == (5, 0, 0)


@on_both
def test_drain_returns_messages_after_the_timeout(loop: Loop, broker: Broker, topic: str) -> None:
    async def main() -> None:
        async with consumer_of(broker, topic) as consumer:
            kept = await consumer.get()
            await until(lambda: consumer.stats().received == 5)
            await consumer.drain(0.01)
            kept.finish()  # without effect
            await consumer.drain()  # it is closed
            with pytest.raises(ValueError, match="timeout_s is -1"):
                await consumer.drain(-1)

    run(loop, main)
    assert counts(broker, topic) == (10, 0, 5)


@on_both
def test_a_cancelled_drain_leaves_the_received_messages(loop: Loop, broker: Broker, topic: str) -> None:
    async def main() -> None:
        async with consumer_of(broker, topic) as consumer:
            message = await consumer.get()
            await until(lambda: consumer.stats().received == 5)
            with anyio.move_on_after(0.01) as scope:
                await consumer.drain(None)
            assert scope.cancelled_caught
            message.finish()
            for _ in range(4):
                (await consumer.get()).finish()
            await consumer.drain()  # sends CLS not again, which brokers refuse
            assert consumer.stats().finished == 5

    run(loop, main)
    assert counts(broker, topic) == (5, 0, 0)


def test_drain_in_threads(broker: Broker, topic: str) -> None:
    handled: list[bytes] = []
    with sync_consumer_of(broker, topic) as consumer:

        def handle(message: trio_nsq.sync.Message) -> None:
            if not handled:
                while consumer.stats().received < 5:
                    time.sleep(0.002)
                consumer.drain()  # returns at once
            handled.append(message.body)

        consumer.run(handle)
        consumer.drain()
    assert len(handled) == 5
    assert counts(broker, topic) == (5, 0, 0)


# ------------------------------------------------------------------ close_soon


def by_call(stop: Callable[[], None]) -> None:
    stop()


def by_thread(stop: Callable[[], None]) -> None:
    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()


def by_signal(stop: Callable[[], None]) -> None:
    with on_signal(stop):
        signal.raise_signal(signal.SIGUSR1)


@contextmanager
def on_signal(stop: Callable[[], None]) -> Iterator[None]:
    previous = signal.signal(signal.SIGUSR1, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, previous)


ways = pytest.mark.parametrize("way", [by_call, by_thread, by_signal])


@on_both
@ways
def test_close_soon_ends_run(
    loop: Loop, way: Callable[[Callable[[], None]], None], broker: Broker, topic: str
) -> None:
    handled: list[bytes] = []

    async def main() -> None:
        async with consumer_of(broker, topic) as consumer:

            async def handle(message: Message) -> None:
                await until(lambda: consumer.stats().received == 5)
                way(consumer.close_soon)
                way(consumer.close_soon)
                await anyio.sleep(0.01)
                handled.append(message.body)

            await consumer.run(handle)
            assert handled == [b"0"]
        way(consumer.close_soon)

    run(loop, main)
    assert counts(broker, topic) == (9, 0, 4)
    consumer = consumer_of(broker, topic)
    way(consumer.close_soon)  # before it is entered

    async def enter() -> None:
        async with consumer:
            assert [message async for message in consumer] == []

    run(loop, enter)


@on_both
def test_close_soon_of_another_thread_wakes_a_loop_that_waits(loop: Loop, broker: Broker, topic: str) -> None:
    async def main() -> None:
        async with consumer_of(broker, topic, 1) as consumer:
            message = await consumer.get()
            thread = threading.Timer(0.05, consumer.close_soon)
            thread.start()
            assert [each async for each in consumer] == []
            assert message.answered is False
            thread.join()

    run(loop, main)
    assert counts(broker, topic) == (10, 0, 1)


@on_both
@ways
def test_close_soon_ends_the_attempts_to_connect(
    loop: Loop, way: Callable[[Callable[[], None]], None]
) -> None:
    async def main() -> None:
        consumer = Consumer("t", "c", nsqd_tcp_addresses="127.0.0.1:1", connect_timeout_s=float("inf"))

        async def stop() -> None:
            await anyio.sleep(0.02)
            way(consumer.close_soon)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop)
            async with consumer:
                with pytest.raises(ConsumerClosed):
                    await consumer.get()

    run(loop, main)


@on_both
def test_close_soon_after_the_loop_has_ended(loop: Loop, broker: Broker, topic: str) -> None:
    consumer = consumer_of(broker, topic)

    async def main() -> None:
        async with consumer:
            pass

    run(loop, main)
    consumer.close_soon()


@ways
def test_close_soon_in_threads(way: Callable[[Callable[[], None]], None], broker: Broker, topic: str) -> None:
    """In the main thread: `run` waits, and signals are handled meanwhile."""
    with sync_consumer_of(broker, topic) as consumer:
        if way is by_signal:
            handled = threading.Event()

            def close_soon() -> None:
                consumer.close_soon()
                handled.set()

            def handle(_message: trio_nsq.sync.Message) -> None:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                assert handled.wait(PATIENCE_S)

            with on_signal(close_soon):
                consumer.run(handle)
        else:
            consumer.run(lambda _: way(consumer.close_soon))
    assert counts(broker, topic)[1] == 0
    assert counts(broker, topic)[0] > 0


# ------------------------------------------------------------------ connecting without a limit


@on_both
def test_clients_wait_for_a_broker_without_limit(
    loop: Loop, tmp_path_factory: pytest.TempPathFactory
) -> None:
    address, folder = free_address(), tmp_path_factory.mktemp("late")
    forever = float("inf")

    async def main() -> None:
        entered = []

        async def enter(client: Producer | Consumer) -> None:
            async with client:
                entered.append(client)

        clients = (
            Producer(address, connect_timeout_s=forever),
            Consumer("t", "c", nsqd_tcp_addresses=address, connect_timeout_s=forever),
        )
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(enter, client)
            await anyio.sleep(0.05)
            assert not entered
            with qcli_serve(folder / "data", f"--tcp-address={address}"):
                await until(lambda: len(entered) == 2)

    run(loop, main)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await anyio.sleep(0.002)
