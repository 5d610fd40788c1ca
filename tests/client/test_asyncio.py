"""Check what only programs on asyncio do: enter and leave in any task, `Task.cancel`, and errors of other tasks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import outcome
import pytest
import trio

from client.support.fake_broker import PATIENCE_S
from client.support.loops import run
from interop.peers import Broker
from trio_nsq import ConnectionFailed, Consumer, Message, Producer, PublishFailed, Receipt, TopicReader
from trio_nsq.client import ProducerClosed
from trio_nsq.client.discovery.discovery import Discovery

pytestmark = pytest.mark.slow  # starts a broker


def consumer_of(real_broker: Broker, topic: str) -> Consumer:
    return Consumer(
        topic,
        "c",
        nsqd_tcp_addresses=real_broker.tcp_address,
        max_in_flight=10,
        default_requeue_delay_s=0,
        backoff_after=1,
        backoff_multiplier_s=0.001,
    )


def is_idle(real_broker: Broker, topic: str) -> bool:
    """Whether no message is in flight and no client is connected to the channel."""
    stats = real_broker.channel_stats(topic, "c")
    return not stats["in_flight_count"] and not stats["client_count"]


def test_entered_and_left_by_different_tasks_in_any_order(real_broker: Broker, topic: str) -> None:
    async def main() -> None:
        clients: list[Producer | Consumer | TopicReader] = [
            Producer(real_broker.tcp_address),
            consumer_of(real_broker, topic),
            consumer_of(real_broker, topic),
            TopicReader(real_broker.http_address, topic),
        ]
        for client in clients:
            await asyncio.create_task(client.__aenter__())
        producer, consumer, *_ = clients
        assert isinstance(producer, Producer)
        assert isinstance(consumer, Consumer)
        await producer.publish_many(topic, [b"%d" % number for number in range(15)])
        (await anext(consumer)).finish()
        # In the order in which they were entered, and by other tasks than entered them.
        for client in clients:
            await asyncio.create_task(client.__aexit__(None, None, None))

    run("asyncio", main)
    assert is_idle(real_broker, topic)
    assert real_broker.channel_stats(topic, "c")["depth"] == 14


def test_a_lifespan_whose_parts_run_in_two_tasks(real_broker: Broker, topic: str) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[Producer]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(consumer_of(real_broker, topic))
            yield await stack.enter_async_context(Producer(real_broker.tcp_address))

    async def main() -> None:
        manager = lifespan()
        producer = await asyncio.create_task(manager.__aenter__())
        await asyncio.gather(*(producer.publish(topic, b"request") for _ in range(10)))
        await asyncio.create_task(manager.__aexit__(None, None, None))

    run("asyncio", main)
    assert is_idle(real_broker, topic)


def test_cancelling_the_task_that_closes_a_consumer_still_returns_its_messages(
    real_broker: Broker, topic: str
) -> None:
    async def main() -> None:
        async with Producer(real_broker.tcp_address) as producer:
            await producer.publish_many(topic, [b"x"] * 10)
        consumer = consumer_of(real_broker, topic)
        await consumer.__aenter__()
        await anext(consumer)
        closing = asyncio.create_task(consumer.__aexit__(None, None, None))
        for _ in range(3):
            await asyncio.sleep(0)
            assert closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert is_idle(real_broker, topic)  # at once, not when the loop ends

    run("asyncio", main)


def test_a_program_that_is_cancelled_inside_the_block_returns_its_messages(
    real_broker: Broker, topic: str
) -> None:
    async def main() -> None:
        async def work() -> None:
            async with (
                Producer(real_broker.tcp_address) as producer,
                consumer_of(real_broker, topic) as consumer,
            ):
                await producer.publish_many(topic, [b"x"] * 10)
                await anext(consumer)
                received.set()
                await asyncio.sleep(3600)

        received = asyncio.Event()
        working = asyncio.create_task(work())
        await received.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert is_idle(real_broker, topic)

    run("asyncio", main)


def test_a_loop_that_ends_before_the_block_ends_all_tasks(real_broker: Broker, topic: str) -> None:
    async def main() -> None:
        await Producer(real_broker.tcp_address).__aenter__()
        await consumer_of(real_broker, topic).__aenter__()

    run("asyncio", main)  # warnings about tasks that were never awaited would fail this test


def test_entering_can_be_cancelled(real_broker: Broker, topic: str) -> None:
    async def main() -> None:
        nowhere = "127.0.0.1:1"
        for client in (
            Producer(nowhere, connect_timeout_s=3600),
            Consumer(topic, "c", nsqd_tcp_addresses=nowhere, connect_timeout_s=3600),
        ):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.__aenter__()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run("asyncio", main)


def test_a_timeout_of_asyncio_around_each_wait(real_broker: Broker, topic: str) -> None:
    async def main() -> None:
        async with Producer(real_broker.tcp_address) as producer, consumer_of(real_broker, topic) as consumer:
            for wait in (lambda: anext(consumer), lambda: anext(consumer.batches())):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(wait(), 0.01)
            await producer.publish(topic, b"1")
            assert (await asyncio.wait_for(anext(consumer), 50)).body == b"1"

    run("asyncio", main)


def test_a_handler_that_awaits_a_cancelled_task_has_failed(
    real_broker: Broker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = []

    async def main() -> None:
        async with (
            Producer(real_broker.tcp_address) as producer,
            consumer_of(real_broker, topic) as consumer,
        ):

            async def handle(message: Message) -> None:
                attempts.append(message.attempts)
                if message.attempts == 1:
                    other = asyncio.create_task(asyncio.sleep(3600))
                    other.cancel()
                    await other
                await consumer.aclose()

            await producer.publish(topic, b"1")
            await consumer.run(handle)

    run("asyncio", main)
    assert attempts == [1, 2]
    assert real_broker.is_drained(topic, "c")
    assert "CancelledError" in caplog.text


def test_a_callback_may_answer_messages(real_broker: Broker, topic: str) -> None:
    async def main() -> None:
        async with Producer(real_broker.tcp_address) as producer, consumer_of(real_broker, topic) as consumer:
            await producer.publish_many(topic, [b"1", b"2"])
            for answer in (Message.requeue, Message.finish, Message.requeue, Message.finish):
                # The failures pause the consumer, which needs the time.
                asyncio.get_running_loop().call_soon(answer, await anext(consumer))

    run("asyncio", main)
    assert real_broker.is_drained(topic, "c")


def test_a_task_of_a_handler_may_close_the_consumer(real_broker: Broker, topic: str) -> None:
    async def main() -> None:
        async with Producer(real_broker.tcp_address) as producer, consumer_of(real_broker, topic) as consumer:

            async def handle(message: Message) -> None:
                await asyncio.wait_for(asyncio.create_task(consumer.aclose()), 50)
                assert not message.answered

            await producer.publish(topic, b"1")
            await consumer.run(handle)
            assert consumer.stats().finished == 1  # `aclose` would wait for the handler, and then requeue it

    run("asyncio", main)


def test_a_defect_ends_all_that_wait_for_messages(
    real_broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        consumer = consumer_of(real_broker, topic)
        await consumer.__aenter__()
        with pytest.raises(ExceptionGroup) as caught:
            await anext(consumer)
        assert caught.group_contains(ZeroDivisionError)
        with pytest.raises(ExceptionGroup, match="tasks in the background failed"):
            await consumer.__aexit__(None, None, None)

    async def crash(_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Discovery, "keep_asking", crash)
    run("asyncio", main)


def test_a_defect_fails_publishes(real_broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        producer = Producer(real_broker.tcp_address)
        await producer.__aenter__()
        publishing = asyncio.create_task(producer.publish_many(topic, [b"1"] * 1_000_000))
        await asyncio.sleep(0)
        crashing.set()
        with pytest.raises(PublishFailed, match="a defect"):
            await publishing
        with pytest.raises(ProducerClosed, match="a defect"):
            await producer.publish(topic, b"1")
        with pytest.raises(ExceptionGroup, match="tasks in the background failed"):
            await producer.__aexit__(None, None, None)

    crashing = asyncio.Event()

    async def crash_later(_: object) -> None:
        await crashing.wait()
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Discovery, "keep_asking", crash_later)
    run("asyncio", main)


def test_connecting_tries_the_next_address(
    real_broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        port = int(real_broker.tcp_address.rpartition(":")[2])

        async def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
            # The first is refused, the second does not answer (TEST-NET-1) or is unreachable.
            places = [("127.0.0.1", 1), ("192.0.2.1", port), ("127.0.0.1", port)]
            return [(2, 1, 6, "", place) for place in places]

        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        async with Producer(f"several.example:{port}") as producer:
            await producer.publish(topic, b"1")
        with pytest.raises(ConnectionFailed):
            await Producer("127.0.0.1:1").__aenter__()

    run("asyncio", main)


def test_loops_that_run_in_turn(real_broker: Broker, topic: str) -> None:
    """As those of a test framework: a client works in the loop that entered it, and refuses others."""
    loops = asyncio.new_event_loop(), asyncio.new_event_loop()

    async def enter() -> tuple[Producer, Consumer]:
        return await Producer(real_broker.tcp_address).__aenter__(), await consumer_of(
            real_broker, topic
        ).__aenter__()

    async def refused(producer: Producer, consumer: Consumer) -> None:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(RuntimeError, match="belongs to another event loop"):
                await producer.publish(topic, b"x")
            with pytest.raises(RuntimeError, match="belongs to another event loop"):
                await consumer.get()

    async def use(receipt: Receipt, producer: Producer, consumer: Consumer) -> None:
        await receipt.wait()
        (await consumer.get()).finish()
        await consumer.aclose()
        await producer.aclose()

    clients = loops[0].run_until_complete(enter())
    loops[1].run_until_complete(refused(*clients))
    receipt = clients[0].submit(topic, b"1")  # while its loop does not run
    loops[0].run_until_complete(use(receipt, *clients))
    assert real_broker.is_drained(topic, "c")
    asyncio.run(refused(*asyncio.run(enter())))  # the loop of these has ended
    for loop in loops:
        loop.close()


def test_trio_as_a_guest_of_asyncio(real_broker: Broker, topic: str) -> None:
    async def consume() -> bytes:
        async with Producer(real_broker.tcp_address) as producer, consumer_of(real_broker, topic) as consumer:
            await producer.publish(topic, b"1")
            message = await anext(consumer)
            message.finish()
            return message.body

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[outcome.Outcome[bytes]] = loop.create_future()
        trio.lowlevel.start_guest_run(
            consume,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            done_callback=ended.set_result,
            host_uses_signal_set_wakeup_fd=True,
        )
        assert (await ended).unwrap() == b"1"
        async with Producer(real_broker.tcp_address) as producer:  # a client of asyncio beside it
            await producer.publish(topic, b"2")

    run("asyncio", main)
