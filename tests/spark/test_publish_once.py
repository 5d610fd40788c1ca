"""Whoever publishes batches from a task: what it is told by brokers that remember, that do not, and that go away."""

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from broker.support import connected, running_broker
from interop.peers import nsqd
from trio_nsq.broker import BoundAddresses
from trio_nsq.protocol import Limits
from trio_nsq.spark import publish_once
from trio_nsq.spark.broker_log import RequestRefused
from trio_nsq.spark.publish_once import (
    BatchPublisher,
    BrokerAway,
    Outcome,
    PublishInDoubt,
)

PUBLISHED, REPEATED, UNKNOWN = Outcome
_Answer = TypeVar("_Answer")

Answer = tuple[int, str, bytes]
"""Status, what is said of the batch, and the body."""
OURS: Answer = (200, "", b'{"producer":"p","number":null}')
NO_TOPIC: Answer = (404, "", b'{"message":"TOPIC_NOT_FOUND"}')
NSQD: Answer = (404, "", b'{"message":"NOT_FOUND"}')
OK: Answer = (200, "", b"OK")


def publish_batch(
    address: str,
    topic: str,
    bodies: Sequence[bytes],
    producer: str,
    number: int,
    defer_ms: int = 0,
    **how: Any,
) -> Outcome:
    with BatchPublisher(address, topic, producer, **how) as publisher:
        return publisher.publish(bodies, number, defer_ms)


class Script:
    """A broker that answers what it is told to; None is to drop the connection once all is received.

    Attributes:
        address: Where it is.
        seen: The requests, and the number of the connection each came over.
    """

    def __init__(self, answers: Sequence[Answer | None]) -> None:
        self.seen: list[tuple[str, int]] = []
        self.connections = 0
        waiting = iter(answers)
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                script.connections += 1
                self.connection_number = script.connections

            def log_message(self, *_: Any) -> None:
                """Not a word."""

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                script.seen.append((f"{self.command} {self.path}", self.connection_number))
                answer = next(waiting)
                if answer is None:
                    self.close_connection = True
                    return
                status, told, body = answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if told:
                    self.send_header("NSQ-Batch", told)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"


@contextmanager
def scripted(*answers: Answer | None) -> Iterator[Script]:
    script = Script(answers)
    thread = threading.Thread(target=partial(script.server.serve_forever, 0.01))
    thread.start()
    try:
        yield script
    finally:
        script.server.shutdown()
        script.server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_once, "_FIRST_PAUSE_S", 0.001)


async def beside(bound: BoundAddresses, work: Callable[[str], _Answer]) -> _Answer:
    """Have a thread do something with the broker that runs here."""
    assert bound.http_address is not None
    return await trio.to_thread.run_sync(work, bound.http_address)


# ---------------------------------------------------------------------- our broker


async def test_batches_are_published_once_over_one_connection(tmp_path: Path) -> None:
    def publish(address: str) -> list[Outcome]:
        with BatchPublisher(address, "t", "load:1") as publisher:
            assert not publisher.remembers
            assert publisher.last_number() is None
            assert publisher.remembers
            told = [publisher.publish([b"a", b"bb"], number) for number in (0, 1, 1, 7)]
            assert publisher.last_number() == 7
        with BatchPublisher(address, "t", "load:1") as again:
            told += [again.publish([b"a", b"bb"], number) for number in (0, 1, 7, 8)]
        told.append(publish_batch(address, "t", [b"c"], "load:1", 8))
        return told

    async with running_broker(tmp_path / "d") as bound:
        assert await beside(bound, publish) == [
            *(PUBLISHED, PUBLISHED, REPEATED, PUBLISHED),
            *(REPEATED, REPEATED, REPEATED, PUBLISHED),
            REPEATED,
        ]
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c", ready_count=20)
            assert [(await client.message()).body for _ in range(8)] == [b"a", b"bb"] * 4
            await client.nothing_more()


async def test_what_another_has_published_meanwhile_is_found_repeated(tmp_path: Path) -> None:
    def publish(address: str) -> list[Outcome]:
        with BatchPublisher(address, "t", "p") as one, BatchPublisher(address, "t", "p") as other:
            return [each.publish([b"a"], number) for number in range(3) for each in (one, other)]

    async with running_broker(tmp_path / "d") as bound:
        assert await beside(bound, publish) == [PUBLISHED, REPEATED] * 3


async def test_a_batch_can_be_deferred(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        for number, defer_ms in ((0, 3_600_000), (1, 0), (2, 1)):
            publish = partial(_publish, number=number, defer_ms=defer_ms)
            assert await beside(bound, publish) is PUBLISHED
        bodies = {(await client.message()).body for _ in range(2)}
        assert bodies == {b"number 1", b"number 2"}
        await client.nothing_more()


def _publish(address: str, number: int, defer_ms: int) -> Outcome:
    return publish_batch(address, "t", [b"number %d" % number], "p", number, defer_ms)


async def test_what_the_broker_does_not_take_is_not_tried_again(tmp_path: Path) -> None:
    def refused(address: str) -> list[tuple[int, str]]:
        found = []
        for topic, body in (("no topic", b"x"), ("t", b"x" * 200), ("t", b"")):
            with pytest.raises(RequestRefused) as caught:
                publish_batch(address, topic, [b"a", body], "p", 1)
            found.append((caught.value.status, caught.value.text))
        return found

    async with running_broker(tmp_path / "d", limits=Limits(max_msg_size=100)) as bound:
        expected = [(400, "INVALID_TOPIC"), (413, "BAD_MESSAGE"), (413, "BAD_MESSAGE")]
        assert await beside(bound, refused) == expected


# ---------------------------------------------------------------------- brokers that go away


def test_a_batch_that_got_no_answer_is_sent_again() -> None:
    with scripted(NO_TOPIC, None, None, (200, "repeated", b"OK")) as broker:
        with BatchPublisher(broker.address, "t", "p") as publisher:
            assert publisher.publish([b"a"], 1) is REPEATED
        _, first, *others = (request for request, _ in broker.seen)
        assert first == "POST /mpub?topic=t&producer=p&binary=true&number=1"
        assert others == [first] * 2


def test_what_a_broker_cannot_store_now_is_sent_again() -> None:
    full: Answer = (503, "", b'{"message":"topic t is full"}')
    with scripted(OURS, full, full, (200, "published", b"OK")) as broker:
        with BatchPublisher(broker.address, "t", "p") as publisher:
            assert publisher.publish([b"a"], 1) is PUBLISHED
        assert {connection for _, connection in broker.seen} == {1}


def test_what_a_broker_cannot_store_for_long_is_refused() -> None:
    full: Answer = (503, "", b'{"message":"topic t is full"}')
    with scripted(OURS, *[full] * 1000) as broker:
        with BatchPublisher(broker.address, "t", "p", patience_s=0.01) as publisher:
            with pytest.raises(RequestRefused, match="topic t is full"):
                publisher.publish([b"a"], 1)


def test_a_broker_that_remembers_nothing_leaves_doubt() -> None:
    with scripted(NSQD, OK, None, OK) as broker:
        with BatchPublisher(broker.address, "t", "p") as publisher:
            assert publisher.publish([b"a"], 1) is UNKNOWN
            with pytest.raises(PublishInDoubt, match="may publish it twice"):
                publisher.publish([b"b"], 2)
            assert publisher.publish([b"b"], 2) is UNKNOWN


def test_a_broker_that_remembers_nothing_and_refuses_is_not_asked_again() -> None:
    with scripted(NSQD, (503, "", b'{"message":"EXITING"}')) as broker:
        with pytest.raises(RequestRefused, match="EXITING"):
            publish_batch(broker.address, "t", [b"a"], "p", 1)


def test_a_connection_that_has_rested_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(NSQD, OK, OK) as broker:
        with BatchPublisher(broker.address, "t", "p") as publisher:
            publisher.publish([b"a"], 1)
            monkeypatch.setattr(publish_once, "_RESTED_S", -1.0)
            publisher.publish([b"b"], 2)
        assert [connection for _, connection in broker.seen] == [1, 1, 2]


@pytest.mark.parametrize("body", [b"not JSON", b"[]", b'{"number":"x"}'])
def test_something_that_is_no_broker(body: bytes) -> None:
    with scripted(*[(200, "", body)] * 1000) as broker:
        with pytest.raises(BrokerAway, match="not an NSQ broker"):
            publish_batch(broker.address, "t", [b"a"], "p", 1, patience_s=0.01)


def test_nobody_is_there() -> None:
    with scripted() as gone:
        address = gone.address
    with pytest.raises(
        BrokerAway, match=f"the broker at {address} cannot be published to: Connection refused"
    ):
        publish_batch(address, "t", [b"a"], "p", 1, patience_s=0.01)


@pytest.mark.parametrize("error", [BrokerAway("a:1", "why"), PublishInDoubt("a:1", "why")])
def test_errors_reach_whoever_started_the_task(error: BrokerAway) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there), there.reason) == (type(error), str(error), "why")


@pytest.mark.interop
def test_an_nsqd_takes_batches_and_remembers_nothing(tmp_path: Path) -> None:
    with nsqd(tmp_path / "d") as broker:
        with BatchPublisher(broker.http_address, "t", "p") as publisher:
            assert publisher.last_number() is None
            assert [publisher.publish([b"a", b"b"], 1) for _ in range(2)] == [UNKNOWN, UNKNOWN]
            assert not publisher.remembers
