"""Check the client with a real broker, in programs on trio and on asyncio."""

from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from pathlib import Path

import anyio
import pytest

from broker.certificates import Certificates
from client.support.fake_broker import PATIENCE_S
from client.support.loops import Loop, on_both, run
from interop.peers import Broker, free_address, qcli_lookupd, qcli_serve
from trio_nsq import ConnectionFailed, Consumer, Message, Producer, PublishFailed, TopicReader
from trio_nsq.client import ConnectionOptions, RecordBatch
from trio_nsq.protocol import pack_messages

pytestmark = pytest.mark.slow  # starts a broker
_topics = map("topic{}".format, count())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Broker]:
    """A broker for all tests; each uses a topic of its own."""
    certificate, key = certificates.renew()
    flags = "--sync=interval", f"--tls-cert={certificate}", f"--tls-key={key}"
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data", *flags) as broker:
        yield broker


@pytest.fixture
def topic(broker: Broker) -> str:
    """A new topic with the channel `c`."""
    broker.create(name := next(_topics), "c")
    return name


def consumer_of(broker: Broker, topic: str, max_in_flight: int = 10) -> Consumer:
    return Consumer(topic, "c", nsqd_tcp_addresses=broker.tcp_address, max_in_flight=max_in_flight)


@on_both
@pytest.mark.parametrize(
    "options",
    [{}, {"snappy": True}, {"deflate": True, "tls_v1": True, "tls_insecure_skip_verify": True}],
    ids=["plain", "snappy", "deflate in TLS"],
)
def test_round_trip(loop: Loop, broker: Broker, topic: str, options: ConnectionOptions) -> None:
    async def main() -> None:
        received = []
        async with Producer(broker.tcp_address, **options) as producer:
            async with anyio.create_task_group() as tasks:
                for number in range(100):
                    tasks.start_soon(producer.publish, topic, b"%d" % number)
            await producer.publish_many(topic, [b"%d" % number for number in range(100, 300)])
            await producer.publish_set(topic, pack_messages([b"%d" % number for number in range(300, 310)]))
            await producer.publish(topic, b"310", defer_s=0.001)
        async with Consumer(
            topic, "c", nsqd_tcp_addresses=broker.tcp_address, max_in_flight=7, **options
        ) as consumer:
            async for message in consumer:
                message.finish()
                received.append(message.body)
                if len(received) == 50:
                    break
            async for batch in consumer.batches(max_wait_s=0.01):
                batch.finish()
                received += batch.bodies
                if len(received) == 311:
                    break
        assert sorted(received, key=int) == [b"%d" % number for number in range(311)]

    run(loop, main)
    assert broker.is_drained(topic, "c")


@on_both
def test_large_messages_fill_the_socket(loop: Loop, broker: Broker, topic: str) -> None:
    bodies = [bytes([number]) * 1_000_000 for number in range(16)]

    async def main() -> None:
        async with Producer(broker.tcp_address) as producer, consumer_of(broker, topic, 16) as consumer:
            async with anyio.create_task_group() as tasks:
                for body in bodies:
                    tasks.start_soon(producer.publish, topic, body)
            received = [await anext(consumer) for _ in bodies]
            assert sorted(message.body for message in received) == bodies
            for message in received:
                message.finish()

    run(loop, main)
    assert broker.is_drained(topic, "c")


@on_both
def test_handlers(loop: Loop, broker: Broker, topic: str) -> None:
    handled: list[bytes] = []
    active = most = 0

    async def main() -> None:
        async with (
            Producer(broker.tcp_address) as producer,
            Consumer(
                topic,
                "c",
                nsqd_tcp_addresses=broker.tcp_address,
                max_in_flight=10,
                default_requeue_delay_s=0,
            ) as consumer,
        ):

            async def handle(message: Message) -> None:
                nonlocal active, most
                active += 1
                most = max(most, active)
                await anyio.sleep(0)
                active -= 1
                if message.attempts == 1 and message.body == b"7":
                    raise KeyError("it succeeds at the second attempt")
                handled.append(message.body)
                if len(handled) == 100:
                    await consumer.aclose()

            await producer.publish_many(topic, [b"%d" % number for number in range(100)])
            await consumer.run(handle, concurrency=5, auto_touch=True)

    run(loop, main)
    assert sorted(handled, key=int) == [b"%d" % number for number in range(100)]
    assert most == 5
    assert broker.is_drained(topic, "c")


@on_both
def test_a_cancelled_handler_leaves_its_message_to_the_next_loop(
    loop: Loop, broker: Broker, topic: str
) -> None:
    async def main() -> None:
        async with Producer(broker.tcp_address) as producer, consumer_of(broker, topic) as consumer:
            await producer.publish_many(topic, [b"1", b"2"])
            with anyio.CancelScope() as scope:

                async def handle(_: Message) -> None:
                    scope.cancel()
                    await anyio.sleep_forever()

                await consumer.run(handle)
            assert [(await anext(consumer)).body for _ in range(2)] == [b"1", b"2"]
            assert consumer.stats().requeued == 0

    run(loop, main)
    assert broker.channel_stats(topic, "c")["depth"] == 2  # returned at the end
    assert broker.channel_stats(topic, "c")["in_flight_count"] == 0


@on_both
def test_discovery(loop: Loop, tmp_path: Path) -> None:
    with (
        qcli_lookupd() as lookupd,
        qcli_serve(tmp_path / "data", f"--lookupd-tcp-address={lookupd.tcp_address}"),
    ):

        async def main() -> None:
            services = lookupd.http_address
            async with Producer(lookupd_http_addresses=services, connect_timeout_s=50) as producer:
                await producer.publish("found", b"1")
                async with Consumer("found", "c", lookupd_http_addresses=services) as consumer:
                    message = await anext(consumer)
                    assert message.body == b"1"
                    message.finish()

        run(loop, main)


@on_both
def test_topic_reader(loop: Loop, broker: Broker, topic: str) -> None:
    async def main() -> None:
        async with Producer(broker.tcp_address) as producer:
            await producer.publish_many(topic, [b"%d" % number for number in range(1000)])
            counted = 0
            async with TopicReader(broker.http_address, topic) as reader:
                while found := await reader.receive():
                    counted += sum(each.count for each in found if isinstance(each, RecordBatch))
            assert counted == 1000
            async with TopicReader(broker.http_address, topic, follow=True, start=1000) as reader:
                with anyio.move_on_after(0.05) as scope:
                    await reader.receive()
                assert scope.cancelled_caught
                await producer.publish(topic, b"last")
                (last,) = await reader.receive()
                assert isinstance(last, RecordBatch)
                assert (last.base_sequence, last.messages.bodies()) == (1000, [b"last"])

    run(loop, main)


@on_both
def test_topic_reader_over_https(loop: Loop, broker: Broker, topic: str, certificates: Certificates) -> None:
    async def main() -> None:
        async with Producer(broker.tcp_address) as producer:
            await producer.publish_many(topic, [b"x" * 1000] * 2000)
        https = f"https://{broker.https_address}"
        async with TopicReader(https, topic, tls=certificates.client_context()) as reader:
            counted = 0
            while found := await reader.receive():
                counted += sum(each.count for each in found if isinstance(each, RecordBatch))
        assert counted == 2000
        with pytest.raises(ConnectionFailed, match="certificate"):
            await TopicReader(https, topic).__aenter__()

    run(loop, main)


@on_both
def test_a_broker_that_is_killed_and_started_again(loop: Loop, tmp_path: Path) -> None:
    address, http_address = free_address(), free_address()
    flags = f"--tcp-address={address}", f"--http-address={http_address}", "--sync=interval"

    async def main() -> None:
        async with AsyncExitStack() as stack:
            with qcli_serve(tmp_path / "data", *flags) as first:
                producer = await stack.enter_async_context(Producer(address))
                consumer = await stack.enter_async_context(
                    Consumer("t", "c", nsqd_tcp_addresses=address, reconnect_max_s=0.2)
                )
                await producer.publish("t", b"1")
                (await anext(consumer)).finish()
                first.process.kill()
                first.process.wait()
                receipt = producer.submit("t", b"lost")
                with pytest.raises(PublishFailed):
                    await receipt.wait()
                assert receipt.state == "failed"
                assert not receipt.withdraw()
            with qcli_serve(tmp_path / "data", *flags):
                await producer.publish("t", b"2")
                async for message in consumer:
                    message.finish()
                    if message.body == b"2":
                        break

    run(loop, main)


@on_both
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:1", "Connection refused"),
        ("no-such-host.invalid:4150", "host cannot be found|not known|name resolution"),
    ],
)
def test_no_broker(loop: Loop, address: str, reason: str) -> None:
    async def main() -> None:
        for client in (Producer(address), Consumer("t", "c", nsqd_tcp_addresses=address)):
            with pytest.raises(ConnectionFailed, match=reason):
                await client.__aenter__()
        with pytest.raises(ConnectionFailed, match=reason):
            await TopicReader(address, "t").__aenter__()

    run(loop, main)


@on_both
def test_a_client_refuses_calls_in_another_loop(loop: Loop, broker: Broker, topic: str) -> None:
    """There, its waits would never end."""
    refusals: list[str] = []

    async def handle(_: Message) -> None:
        """Do nothing."""

    async def call(producer: Producer, consumer: Consumer) -> None:
        calls = (
            lambda: producer.publish(topic, b"x"),
            lambda: producer.publish_many(topic, [b"x"]),
            lambda: producer.publish_set(topic, pack_messages([b"x"])),
            lambda: producer.last_number(topic),
            producer.flush,
            producer.aclose,
            lambda: producer.__aexit__(None, None, None),
            consumer.get,
            lambda: anext(consumer),
            lambda: anext(consumer.batches()),
            lambda: consumer.run(handle),
            consumer.drain,
            lambda: consumer.__aexit__(None, None, None),
            consumer.aclose,
        )
        for each in calls:
            with (
                anyio.fail_after(PATIENCE_S),
                pytest.raises(RuntimeError, match="belongs to another event loop") as refused,
            ):
                await each()
            refusals.append(str(refused.value))
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            producer.submit(topic, b"x")

    async def main() -> None:
        async with Producer(broker.tcp_address) as producer, consumer_of(broker, topic) as consumer:
            await anyio.to_thread.run_sync(partial(anyio.run, call, producer, consumer, backend=loop))
            await producer.publish(topic, b"1")
            (await consumer.get()).finish()

    run(loop, main)
    assert broker.is_drained(topic, "c")
    assert "trio_nsq.sync.Producer" in refusals[0]
    assert "trio_nsq.sync.Consumer" in refusals[-1]
