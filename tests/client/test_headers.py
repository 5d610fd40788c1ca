"""Tests for headers of messages in the client: with a real broker under both loops, and with brokers that know none."""

import pickle
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from threading import Thread
from typing import Any

import anyio
import pytest

from broker.certificates import Certificates
from client.support.fake_broker import FakeBroker, bounded, identify_reply, message, pub
from client.support.loops import Loop, on_both, run
from client.support.producers import Outcome, opened, opened_on
from interop.peers import Broker, qcli_serve
from trio_nsq import (
    Consumer,
    HeadersRefused,
    IdempotentProducer,
    Message,
    Producer,
    PublishFailed,
    RecordBatch,
    RequestRefused,
    TopicReader,
    sync,
)
from trio_nsq.client import ConnectionOptions
from trio_nsq.protocol.frames import OK_FRAME
from trio_nsq.protocol.headers import MAX_HPUB_MESSAGES
from trio_nsq.testing import FakeMessage, FakeProducer, deliver

TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tenant": "sieben: ü"}
OTHER = {"tenant": "8"}
LONGEST = {"a": "x" * 16_381}
_topics = map("topic{}".format, count())


@pytest.fixture(scope="module")
def broker_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    certificate, key = Certificates(tmp_path_factory.mktemp("certificates")).renew()
    flags = "--sync=interval", f"--tls-cert={certificate}", f"--tls-key={key}"
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data", *flags) as process:
        yield process


@pytest.fixture
def topic(broker_process: Broker) -> str:
    """A new topic with the channel `c`."""
    broker_process.create(name := next(_topics), "c")
    return name


async def receive(
    broker: Broker, topic: str, many: int, **options: Any
) -> list[tuple[bytes, Mapping[str, str]]]:
    """Receive and finish this many messages; return the bodies and headers."""
    found: list[tuple[bytes, Mapping[str, str]]] = []
    async with Consumer(
        topic, "c", nsqd_tcp_addresses=broker.tcp_address, max_in_flight=50, **options
    ) as consumer:
        async for each in consumer:
            found.append((each.body, each.headers))
            each.finish()
            if len(found) == many:
                break
    return found


@pytest.mark.slow  # starts a broker
@on_both
@pytest.mark.parametrize(
    "options",
    [{}, {"snappy": True}, {"deflate": True, "tls_v1": True, "tls_insecure_skip_verify": True}],
    ids=["plain", "snappy", "deflate in TLS"],
)
def test_round_trip(loop: Loop, broker_process: Broker, topic: str, options: ConnectionOptions) -> None:
    async def main() -> None:
        expected: list[tuple[bytes, Mapping[str, str]]] = [(b"plain", {}), (b"none", {})]
        async with Producer(broker_process.tcp_address, **options) as producer:
            await producer.publish(topic, b"plain")
            await producer.publish(topic, b"none", headers={})
            await producer.publish(topic, b"longest", headers=LONGEST)
            await producer.publish(topic, b"deferred", headers=OTHER, defer_s=0.001)
            await producer.submit(topic, b"submitted", headers=TRACE).wait()
            await producer.publish_many(topic, [b"a", b"b"], headers=OTHER)
            await producer.publish_many(topic, [b"c", b"d", b"e"], headers=[TRACE, {}, OTHER])
            await producer.publish_many(topic, [b"f", b"g"], headers=[TRACE, OTHER], defer_s=0.001)
            expected += [(b"longest", LONGEST), (b"deferred", OTHER), (b"submitted", TRACE), (b"a", OTHER)]
            expected += [
                (b"b", OTHER),
                (b"c", TRACE),
                (b"d", {}),
                (b"e", OTHER),
                (b"f", TRACE),
                (b"g", OTHER),
            ]
            async with anyio.create_task_group() as tasks:
                for number in range(100):
                    headers = {"number": str(number)} if number % 3 else None
                    body = b"%d" % number
                    tasks.start_soon(partial(producer.publish, topic, body, headers=headers))
                    expected.append((body, headers or {}))
        found = await receive(broker_process, topic, len(expected), **options)
        assert sorted(found, key=lambda each: each[0]) == sorted(expected, key=lambda each: each[0])

    run(loop, main)


@pytest.mark.slow
@on_both
def test_batches(loop: Loop, broker_process: Broker, topic: str) -> None:
    """Also combined ones, and parts of them."""

    async def main() -> None:
        many = 2 * MAX_HPUB_MESSAGES + 1
        bodies = [b"%04d" % number for number in range(many)]
        async with Producer(broker_process.tcp_address) as producer:
            await producer.publish_many(topic, bodies, headers=[{"n": str(number)} for number in range(many)])
            await producer.publish(topic, b"last")
        found: dict[bytes, Mapping[str, str]] = {}
        async with Consumer(
            topic, "c", nsqd_tcp_addresses=broker_process.tcp_address, max_in_flight=2000
        ) as consumer:
            async for batch in consumer.batches(max_messages=700, max_wait_s=0.1):
                assert len(batch.headers) == len(batch)
                assert [each.headers for each in batch] == batch.headers
                found |= dict(zip(batch.bodies, batch.headers, strict=True))
                batch.finish()
                if len(found) == many + 1:
                    break
        assert found == {body: {"n": str(int(body))} for body in bodies} | {b"last": {}}

    run(loop, main)


@pytest.mark.slow
@on_both
def test_dead_letters_keep_headers(loop: Loop, broker_process: Broker, topic: str) -> None:
    """Those that the client publishes when a handler gives up."""

    async def main() -> None:
        broker_process.create(dead := f"{topic}-dead", "c")
        async with Producer(broker_process.tcp_address) as producer:
            await producer.publish(topic, b"bad", headers=TRACE)

        async def fail(_: Message) -> None:
            raise ValueError

        async with Consumer(topic, "c", nsqd_tcp_addresses=broker_process.tcp_address) as consumer:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: consumer.run(fail, max_attempts=1, dead_letter_topic=dead))
                assert await receive(broker_process, dead, 1) == [(b"bad", TRACE)]
                tasks.cancel_scope.cancel()

    run(loop, main)


@pytest.mark.slow
@on_both
def test_producer_with_a_name(loop: Loop, broker_process: Broker, topic: str) -> None:
    async def main() -> None:
        async with Producer(broker_process.tcp_address, name="writer") as producer:
            await producer.publish(topic, b"1", headers=TRACE)
            await producer.publish_many(topic, [b"2", b"3"], headers=[{}, OTHER])
            assert await producer.last_number(topic) == 2
        assert await receive(broker_process, topic, 3) == [(b"1", TRACE), (b"2", {}), (b"3", OTHER)]

    run(loop, main)


@pytest.mark.slow
@on_both
def test_reading_a_topic(loop: Loop, broker_process: Broker, topic: str) -> None:
    """Also from the middle of a record."""

    async def main() -> None:
        async with Producer(broker_process.tcp_address) as producer:
            await producer.publish(topic, b"0")
            await producer.publish_many(topic, [b"1", b"2", b"3"], headers=[TRACE, {}, OTHER])
        found: list[Mapping[str, str]] = []
        async with TopicReader(broker_process.http_address, topic, start=2) as reader:
            while batches := await reader.receive():
                for batch in batches:
                    assert isinstance(batch, RecordBatch)
                    assert len(batch.headers()) == batch.count
                    found += batch.headers()
        assert found == [{}, OTHER]

    run(loop, main)


@pytest.mark.slow
def test_without_async_code(broker_process: Broker, topic: str) -> None:
    with sync.Producer(broker_process.tcp_address) as producer:
        producer.publish(topic, b"1", headers=TRACE)
        producer.publish_many(topic, [b"2", b"3"], headers=[{}, OTHER])
        producer.submit(topic, b"4", headers=OTHER).wait()
    with IdempotentProducer(broker_process.http_address, topic, "writer") as numbered:
        for _ in range(2):
            numbered.publish([b"5", b"6"], 1, headers=[TRACE, {}])
        numbered.publish([b"7"], 2, headers=OTHER)
        numbered.publish([b"8"], 3)
    expected = [TRACE, {}, OTHER, OTHER, TRACE, {}, OTHER, {}]
    found: dict[bytes, Mapping[str, str]] = {}
    with sync.Consumer(
        topic, "c", nsqd_tcp_addresses=broker_process.tcp_address, max_in_flight=9
    ) as consumer:
        for each in consumer:
            found[each.body] = each.headers
            each.finish()
            if len(found) == len(expected):
                break
    assert found == {b"%d" % number: headers for number, headers in enumerate(expected, 1)}


# ---------------------------------------------------------------------- brokers that know no headers


@bounded
async def test_broker_without_headers_refuses_before_anything_is_sent(broker: FakeBroker) -> None:
    async with opened(broker, survive_refusals=True) as (producer, peer, nursery):
        with pytest.raises(PublishFailed, match="does not know headers of messages: it is an nsqd") as caught:
            await producer.publish("t", b"x", headers=TRACE)
        assert not caught.value.maybe_stored
        assert isinstance(caught.value.__cause__, HeadersRefused)
        assert caught.value.__cause__.address == broker.address
        assert str(pickle.loads(pickle.dumps(caught.value.__cause__))) == str(caught.value.__cause__)
        with pytest.raises(PublishFailed) as of_many:
            await producer.publish_many("t", [b"x"] * 3000, headers=TRACE)
        assert (of_many.value.acknowledged, of_many.value.maybe_stored) == (0, False)
        await peer.expect_nothing()
        plain = Outcome(nursery, producer.publish, "t", b"plain")
        await peer.expect(pub("t", b"plain"))
        await peer.send(OK_FRAME)
        await plain.success()


@bounded
async def test_another_broker_takes_what_one_without_headers_cannot(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    """Two of three brokers know none. All messages with headers reach the third."""
    third = FakeBroker()
    await third.start()
    try:
        async with opened_on(broker, other_broker) as (producer, peers, nursery):
            failed = Outcome(nursery, lambda: producer.publish("t", b"x", headers=TRACE))
            await failed.ended.wait()
            assert str(failed.error).count("does not know headers") == 2
            for peer in peers:
                await peer.expect_nothing()
        async with anyio.create_task_group() as tasks:

            async def greet(place: FakeBroker, **more: Any) -> None:
                peer = await place.accept()
                await peer.greet(**more)
                if more:
                    for number in range(4):
                        await peer.expect(b"HPUB t 0\n\0\0\0\x0f\0\0\0\1\0\0\0\x07\0\4a:1\n%d" % number)
                        await peer.send(OK_FRAME)

            tasks.start_soon(greet, broker)
            tasks.start_soon(greet, other_broker)
            tasks.start_soon(lambda: greet(third, message_headers=True))
            addresses = [each.address for each in (broker, other_broker, third)]
            async with Producer(addresses, random=lambda: 0.0) as producer:
                for number in range(4):
                    await producer.publish("t", b"%d" % number, headers={"a": "1"})
                tasks.cancel_scope.cancel()
    finally:
        third.close()


@bounded
async def test_ordered_producer_fails_at_once(broker: FakeBroker) -> None:
    async with opened(broker, ordered=True) as (producer, peer, _):
        with pytest.raises(PublishFailed, match="does not know headers"):
            await producer.publish("t", b"x", headers=TRACE)
        await peer.expect_nothing()


@bounded
async def test_consumer_asks_for_headers_and_works_without(broker: FakeBroker) -> None:
    received = anyio.Event()
    async with anyio.create_task_group() as tasks:

        async def serve() -> None:
            peer = await broker.accept()
            assert (await peer.expect_identify())["message_headers"] is True
            await peer.send(identify_reply())
            line = await peer.receive_line()
            assert line.startswith(b"SUB t c")
            await peer.send(OK_FRAME, message(1, b"x"))
            await received.wait()
            peer.hang_up()

        tasks.start_soon(serve)
        async with Consumer("t", "c", nsqd_tcp_addresses=broker.address) as consumer:
            async for each in consumer:
                assert (each.body, each.headers) == (b"x", {})
                received.set()
                break
            tasks.cancel_scope.cancel()


class _WithoutHeaders(BaseHTTPRequestHandler):
    """An nsqd, as far as batches over HTTP go: it has no path but /mpub."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = self.path.startswith("/mpub")
        body = b"OK" if found else b'{"message":"NOT_FOUND"}'
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        """Write nothing."""


def test_batch_over_http_needs_a_broker_that_knows_headers() -> None:
    with HTTPServer(("127.0.0.1", 0), _WithoutHeaders) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            with IdempotentProducer(f"127.0.0.1:{server.server_port}", "t", "p") as producer:
                producer.publish([b"x"], 1)
                with pytest.raises(RequestRefused, match="NOT_FOUND"):
                    producer.publish([b"x"], 2, headers=TRACE)
        finally:
            server.shutdown()
            thread.join()


# ---------------------------------------------------------------------- arguments


WRONG: list[tuple[Any, type[Exception], str]] = [
    ("a", TypeError, "headers must be a mapping"),
    ({"a": 1}, TypeError, "the value of header 'a' must be a string, not int"),
    ({b"a": "1"}, TypeError, "the name of a header must be a string, not bytes"),
    ({"Tenant-Id": "1"}, ValueError, "has upper-case letters: use 'tenant-id'"),
    ({"a b": "1"}, ValueError, "is not valid"),
    ({"": "1"}, ValueError, "is not valid"),
    ({"a" * 129: "1"}, ValueError, "is not valid"),
    ({"a": "1\n2"}, ValueError, "control character"),
    ({"a": "\ud800"}, ValueError, "cannot be encoded as UTF-8"),
    ({str(number): "" for number in range(65)}, ValueError, "65 headers, more than 64"),
    ({"a": "x" * 16_382}, ValueError, "headers of 16385 bytes, more than 16384"),
]


@on_both
@pytest.mark.parametrize(("headers", "kind", "text"), WRONG)
def test_wrong_headers(loop: Loop, headers: Any, kind: type[Exception], text: str) -> None:
    async def main() -> None:
        async with FakeProducer() as producer:
            with pytest.raises(kind, match=text):
                await producer.publish("t", b"x", headers=headers)
            with pytest.raises(kind, match=text):
                producer.submit("t", b"x", headers=headers)
            with pytest.raises(kind, match=text):
                await producer.publish_many("t", [b"x", b"y"], headers=headers)
            if not isinstance(headers, str):
                with pytest.raises(kind, match=text):
                    await producer.publish_many("t", [b"x", b"y"], headers=[{}, headers])
            with pytest.raises(ValueError, match="headers for 1 messages, but there are 2"):
                await producer.publish_many("t", [b"x", b"y"], headers=[{}])
        assert producer.messages == []

    run(loop, main)


@on_both
def test_message_must_fit_with_its_headers(loop: Loop) -> None:
    async def main() -> None:
        async with FakeProducer(max_msg_size=1000, max_body_size=1000) as producer:
            await producer.publish("t", bytes(984), headers={"a": "123"})
            with pytest.raises(ValueError, match="with its headers; the limit is 996"):
                await producer.publish("t", bytes(985), headers={"a": "123"})
            with pytest.raises(ValueError, match="with its headers; the limit is 996"):
                await producer.publish_many("t", [bytes(985)], headers={"a": "123"})

    run(loop, main)


@on_both
def test_without_a_broker(loop: Loop) -> None:
    async def main() -> None:
        async with FakeProducer() as producer:
            await producer.publish("t", b"1", headers=TRACE)
            await producer.publish_many("t", [b"2", b"3"], headers=[OTHER, {}], defer_s=1.5)
        assert producer.messages == [
            FakeMessage("t", b"1", 0, TRACE),
            FakeMessage("t", b"2", 1.5, OTHER),
            FakeMessage("t", b"3", 1.5),
        ]
        seen = []

        async def handle(each: Message) -> None:
            seen.append((each.body, each.headers))

        await deliver(handle, b"1", b"2", headers=[TRACE, {}])
        assert seen == [(b"1", TRACE), (b"2", {})]

    run(loop, main)
