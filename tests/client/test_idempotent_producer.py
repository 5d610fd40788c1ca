"""Tests for the idempotent producer: with `qcli serve`, with nsqd, and with brokers that go down."""

import contextlib
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs

import pytest
import trio

from broker.support import connected, running_broker
from client.support.scripted_http import NO_TOPIC, NSQD, OK, OURS, Answer, scripted
from interop.peers import nsqd, qcli_serve
from trio_nsq.broker import BoundAddresses
from trio_nsq.client.errors import (
    BrokerUnreachable,
    NotABroker,
    ProducerFenced,
    PublishInDoubt,
    RequestRefused,
)
from trio_nsq.client.http.idempotent_producer import IdempotentProducer, PublishOutcome
from trio_nsq.protocol import Limits

HASTY_S = 0.001
PUBLISHED, REPEATED, UNKNOWN = PublishOutcome
_Answer = TypeVar("_Answer")


def publish_batch(
    address: str,
    topic: str,
    bodies: Sequence[bytes],
    producer: str,
    number: int,
    defer_s: float = 0,
    **how: Any,
) -> PublishOutcome:
    with IdempotentProducer(address, topic, producer, first_retry_s=HASTY_S, **how) as publisher:
        return publisher.publish(bodies, number, defer_s=defer_s)


async def beside(bound: BoundAddresses, work: Callable[[str], _Answer]) -> _Answer:
    """Run a function in a thread while the broker runs here."""
    assert bound.http_address is not None
    return await trio.to_thread.run_sync(work, bound.http_address)


# ---------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([b"x"], -1), ValueError, "number is -1"),
        (([b"x"], 2**63), ValueError, "number is 9223372036854775808"),
        (([b"x"], "0"), TypeError, "number is '0'; it must be an integer"),
        (([b"x"], True), TypeError, "number is True"),
        (([b"x"], 1.5), TypeError, "number is 1.5"),
        (([b"x"], 0, -1), ValueError, "defer_ms is -1"),
        (([b"x"], 0, "5"), TypeError, "defer_ms is '5'"),
        (([], 0), ValueError, "the batch is empty"),
        ((b"xyz", 0), TypeError, "must be a list, or another iterable, not bytes"),
        (("xyz", 0), TypeError, "must be a list, or another iterable, not str"),
        ((["xyz"], 0), TypeError, "a message must be bytes, not str"),
    ],
)
def test_wrong_argument_is_refused_before_anything_is_sent(
    arguments: Any, error: type[Exception], text: str
) -> None:
    with scripted() as script, IdempotentProducer(script.address, "t", "p") as publisher:
        with pytest.raises(error, match=text):
            publisher.publish(*arguments)
        with pytest.raises(ValueError, match=r"first is 2; it must be within 0\.\.1"):
            publisher.publish([b"x"], 1, first=2)
        assert script.seen == []


def test_iterator_of_messages_is_a_batch() -> None:
    with scripted(OURS, (200, "published", b"OK")) as script:
        assert publish_batch(script.address, "t", (each for each in (b"a", b"b")), "p", 0) is PUBLISHED  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [(200, "", b"Welcome"), (404, "", b"no such page"), (302, "", b"")])
def test_server_that_is_no_broker_is_not_asked_again(answer: Answer) -> None:
    with (
        scripted(answer) as script,
        IdempotentProducer(script.address, "t", "p") as publisher,
        pytest.raises(NotABroker),
    ):
        publisher.publish([b"x"], 0)
    assert len(script.seen) == 1


# ---------------------------------------------------------------------- our broker


async def test_batches_are_published_once_over_one_connection(tmp_path: Path) -> None:
    def publish(address: str) -> list[PublishOutcome]:
        with IdempotentProducer(address, "t", "load:1") as publisher:
            assert not publisher.remembers
            assert publisher.last_number() is None
            assert publisher.remembers
            told = [publisher.publish([b"a", b"bb"], number) for number in (0, 1, 1, 7)]
            assert publisher.last_number() == 7
        with IdempotentProducer(address, "t", "load:1") as again:
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


async def test_batch_published_by_another_process_is_a_repeat(tmp_path: Path) -> None:
    def publish(address: str) -> list[PublishOutcome]:
        with IdempotentProducer(address, "t", "p") as one, IdempotentProducer(address, "t", "p") as other:
            return [each.publish([b"a"], number) for number in range(3) for each in (one, other)]

    async with running_broker(tmp_path / "d") as bound:
        assert await beside(bound, publish) == [PUBLISHED, REPEATED] * 3


async def test_threads_that_share_a_producer_lose_no_batch(tmp_path: Path) -> None:
    """A batch whose number comes too late raises; every other batch is in the log, exactly once."""

    def publish(address: str) -> set[bytes]:
        numbers = itertools.count()
        stored: set[bytes] = set()
        ready = threading.Barrier(4)
        with IdempotentProducer(address, "t", "shared") as producer:

            def work(thread: int) -> None:
                ready.wait()
                for index in range(25):
                    body, done = b"%d-%d" % (thread, index), False
                    while not done:
                        with contextlib.suppress(ValueError):
                            assert producer.publish([body], next(numbers)) is PUBLISHED
                            done = True
                    stored.add(body)

            with ThreadPoolExecutor(4) as threads:
                list(threads.map(work, range(4)))
        return stored

    async with running_broker(tmp_path / "d") as bound:
        stored = await beside(bound, publish)
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c", ready_count=200)
            assert sorted([(await client.message()).body for _ in range(100)]) == sorted(stored)
            await client.nothing_more()


async def test_number_that_goes_back_is_refused(tmp_path: Path) -> None:
    def publish(address: str) -> list[PublishOutcome]:
        with IdempotentProducer(address, "t", "p") as producer:
            told = [producer.publish([b"a"], 5), producer.publish([b"a"], 5)]
            with pytest.raises(ValueError, match="number is 4, but this producer has sent 5"):
                producer.publish([b"b"], 4)
            with pytest.raises(ValueError, match="number is 5, with which this producer has sent another"):
                producer.publish([b"b"], 5)
            assert producer.last_number() == 5  # the program begins anew, from what the broker has
            return [*told, producer.publish([b"a"], 4), producer.publish([b"b"], 6)]

    async with running_broker(tmp_path / "d") as bound:
        assert await beside(bound, publish) == [PUBLISHED, REPEATED, REPEATED, PUBLISHED]


async def test_producer_is_refused_in_a_forked_child(tmp_path: Path) -> None:
    """Both processes would send over one connection, and under one name."""

    def publish(address: str) -> str:
        program = (
            "import os, sys\n"
            "from trio_nsq.client import IdempotentProducer\n"
            f"producer = IdempotentProducer({address!r}, 't', 'p')\n"
            "print(producer.publish([b'a'], 0), flush=True)\n"
            "if os.fork() == 0:\n"
            "    try:\n"
            "        producer.publish([b'b'], 1)\n"
            "    except RuntimeError as error:\n"
            "        print(error, flush=True)\n"
            "    producer.close()\n"
            "    os._exit(0)\n"
            "os.wait()\n"
            "print(producer.publish([b'c'], 1), flush=True)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return done.stdout

    async with running_broker(tmp_path / "d") as bound:
        said = await beside(bound, publish)
        first, refused, last = said.splitlines()
        assert (first, last) == ("published", "published")
        assert refused.startswith("this IdempotentProducer was made before the process forked")
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c", ready_count=20)
            assert [(await client.message()).body for _ in range(2)] == [b"a", b"c"]


async def test_batch_that_is_published_in_part_is_refused(tmp_path: Path) -> None:
    def publish(address: str) -> None:
        with IdempotentProducer(address, "t", "p") as publisher:
            assert publisher.publish([b"a"], 19, first=10) is PUBLISHED
            with pytest.raises(RequestRefused, match="OVERLAP: numbers up to 19"):
                publisher.publish([b"b"], 25, first=15)
            assert publisher.publish([b"b"], 25, first=20) is PUBLISHED

    async with running_broker(tmp_path / "d") as bound:
        await beside(bound, publish)


async def test_producer_numbers_batches_itself(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound:

        def work(address: str) -> list[object]:
            found: list[object] = []
            with IdempotentProducer(address, "t", "p") as producer:
                found += [producer.sent_number, producer.publish([b"a"]), producer.publish([b"a"])]
                found += [producer.sent_number, producer.publish([b"a"], 1)]
            with IdempotentProducer(address, "t", "p") as producer:
                found += [producer.publish([b"b"]), producer.sent_number, producer.last_number()]
            return found

        found = await beside(bound, work)
        assert found == [None, PUBLISHED, PUBLISHED, 1, REPEATED, PUBLISHED, 2, 2]


async def test_of_two_that_number_their_batches_the_later_one_is_told(tmp_path: Path) -> None:
    """A batch of one is never taken for a repetition of a batch of the other."""
    async with running_broker(tmp_path / "d") as bound:

        def work(address: str) -> None:
            with (
                IdempotentProducer(address, "t", "p") as first,
                IdempotentProducer(address, "t", "p") as second,
            ):
                assert second.last_number() is None
                assert first.publish([b"a"]) is PUBLISHED
                assert (
                    second.publish([b"b"]) is PUBLISHED
                )  # it had nothing in doubt, so it took the next number
                with pytest.raises(ProducerFenced):
                    first.publish([b"c"])
                assert second.publish([b"d"]) is PUBLISHED
                assert second.sent_number == 2

        await beside(bound, work)


def test_number_of_a_batch_in_doubt_is_not_used_for_another() -> None:
    with scripted(OURS, None, None, (200, "published", b"OK"), (200, "repeated", b"OK")) as script:
        with IdempotentProducer(script.address, "t", "p", first_retry_s=HASTY_S, patience_s=0) as producer:
            with pytest.raises(BrokerUnreachable):
                producer.publish([b"a"])
            with pytest.raises(BrokerUnreachable):
                producer.publish([b"a"], producer.sent_number)
            assert producer.publish([b"b"]) is PUBLISHED
    queries = [parse_qs(request.partition("?")[2]) for request, _ in script.seen[1:]]
    assert [query["number"] for query in queries] == [["0"], ["0"], ["1"]]
    assert len({query["instance"][0] for query in queries}) == 1


async def test_deferred_batch(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        for number, defer_s in ((0, 3600), (1, 0), (2, 0.001)):
            publish = partial(_publish, number=number, defer_s=defer_s)
            assert await beside(bound, publish) is PUBLISHED
        bodies = {(await client.message()).body for _ in range(2)}
        assert bodies == {b"number 1", b"number 2"}
        await client.nothing_more()


def _publish(address: str, number: int, defer_s: float) -> PublishOutcome:
    return publish_batch(address, "t", [b"number %d" % number], "p", number, defer_s)


async def test_refused_batch_is_not_retried(tmp_path: Path) -> None:
    def refused(address: str) -> list[tuple[int, str]]:
        found = []
        for body in (b"x" * 200, b""):
            with pytest.raises(RequestRefused) as caught:
                publish_batch(address, "t", [b"a", body], "p", 1)
            found.append((caught.value.status, caught.value.text))
        return found

    async with running_broker(tmp_path / "d", limits=Limits(max_msg_size=100)) as bound:
        expected = [(413, "BAD_MESSAGE"), (413, "BAD_MESSAGE")]
        assert await beside(bound, refused) == expected


@pytest.mark.parametrize("kept_s", [0.0, 30.0])
async def test_forgetting_needs_no_earlier_request(tmp_path: Path, kept_s: float) -> None:
    def publish(address: str) -> list[PublishOutcome]:
        told = [publish_batch(address, "t", [b"a"], "p", 0)]
        with IdempotentProducer(address, "t", "p", keep_alive_s=kept_s) as producer:
            producer.forget()
        return [*told, publish_batch(address, "t", [b"a"], "p", 0)]

    async with running_broker(tmp_path / "d") as bound:
        assert await beside(bound, publish) == [PUBLISHED, PUBLISHED]


# ---------------------------------------------------------------------- brokers that go away


def test_another_batch_with_the_number_of_one_that_may_be_stored_is_refused() -> None:
    with scripted(OURS, *[None] * 1000) as broker:
        with IdempotentProducer(broker.address, "t", "p", first_retry_s=HASTY_S, patience_s=0.01) as producer:
            with pytest.raises(BrokerUnreachable):
                producer.publish([b"a"], 1)
            with pytest.raises(BrokerUnreachable):
                producer.publish([b"a"], 1)
            for bodies, number in (([b"b"], 1), ([b"a"], 0)):
                with pytest.raises(ValueError, match="this producer has sent"):
                    producer.publish(bodies, number)


def test_error_of_a_proxy_before_a_broker_without_idempotence_leaves_the_batch_in_doubt() -> None:
    """The broker may have stored it: 504 means that it was too slow for the proxy."""
    with scripted(NSQD, (504, "", b"<html>Gateway Time-out</html>"), OK) as broker:
        with IdempotentProducer(broker.address, "t", "p", first_retry_s=HASTY_S) as producer:
            with pytest.raises(PublishInDoubt):
                producer.publish([b"a"], 1)
            assert producer.publish([b"a"], 1) is UNKNOWN
        assert [request.partition("?")[0] for request, _ in broker.seen] == [
            "GET /topic/producer", "POST /mpub", "POST /mpub",
        ]  # fmt: skip


def test_number_of_a_refused_batch_can_be_used_for_another() -> None:
    with scripted(OURS, (413, "", b'{"message":"BAD_MESSAGE"}'), (200, "published", b"OK")) as broker:
        with IdempotentProducer(broker.address, "t", "p", first_retry_s=HASTY_S) as producer:
            with pytest.raises(RequestRefused):
                producer.publish([b"too large"], 1)
            assert producer.publish([b"b"], 1) is PUBLISHED


def test_batch_without_an_answer_is_sent_again() -> None:
    with scripted(NO_TOPIC, None, None, (200, "repeated", b"OK")) as broker:
        with IdempotentProducer(broker.address, "t", "p", first_retry_s=HASTY_S) as publisher:
            assert publisher.publish([b"a"], 1) is REPEATED
        _, first, *others = (request for request, _ in broker.seen)
        assert first == "POST /mpub?topic=t&producer=p&binary=true&number=1"
        assert others == [first] * 2


def test_temporary_refusal_is_retried() -> None:
    full: Answer = (503, "", b'{"message":"topic t is full"}')
    with scripted(OURS, full, full, (200, "published", b"OK")) as broker:
        with IdempotentProducer(broker.address, "t", "p", first_retry_s=HASTY_S) as publisher:
            assert publisher.publish([b"a"], 1) is PUBLISHED
        assert {connection for _, connection in broker.seen} == {1}


def test_long_refusal_is_an_error() -> None:
    full: Answer = (503, "", b'{"message":"topic t is full"}')
    with scripted(OURS, *[full] * 1000) as broker:
        with IdempotentProducer(
            broker.address, "t", "p", first_retry_s=HASTY_S, patience_s=0.01
        ) as publisher:
            with pytest.raises(RequestRefused, match="topic t is full"):
                publisher.publish([b"a"], 1)


def test_broker_without_idempotence_may_have_stored_the_batch() -> None:
    with scripted(NSQD, OK, None, OK) as broker:
        with IdempotentProducer(broker.address, "t", "p", first_retry_s=HASTY_S) as publisher:
            assert publisher.publish([b"a"], 1) is UNKNOWN
            with pytest.raises(PublishInDoubt, match="may publish it twice"):
                publisher.publish([b"b"], 2)
            assert publisher.publish([b"b"], 2) is UNKNOWN


def test_resending_to_a_broker_without_idempotence_can_be_allowed() -> None:
    with scripted(NSQD, None, OK, None, None, None) as broker:
        with IdempotentProducer(broker.address, "t", "p", first_retry_s=HASTY_S, max_resends=2) as publisher:
            assert publisher.publish([b"a", b"b"], 1) is UNKNOWN
            assert publisher.messages_resent == 2
            with pytest.raises(PublishInDoubt):
                publisher.publish([b"c"], 2)
            assert publisher.messages_resent == 4
        assert [each.split("?")[0] for each, _ in broker.seen].count("POST /mpub") == 5


def test_refusal_by_a_broker_without_idempotence_is_final() -> None:
    with scripted(NSQD, (503, "", b'{"message":"EXITING"}')) as broker:
        with pytest.raises(RequestRefused, match="EXITING"):
            publish_batch(broker.address, "t", [b"a"], "p", 1)


@pytest.mark.parametrize(
    ("keep_alive_s", "connections"), [(1e-9, [1, 2, 3]), (30, [1, 1, 1])], ids=["idle too long", "in use"]
)
def test_connection_that_was_idle_for_long_is_not_reused(keep_alive_s: float, connections: list[int]) -> None:
    with scripted(NSQD, OK, OK) as broker:
        with IdempotentProducer(broker.address, "t", "p", keep_alive_s=keep_alive_s) as publisher:
            publisher.publish([b"a"], 1)
            publisher.publish([b"b"], 2)
        assert [connection for _, connection in broker.seen] == connections


@pytest.mark.parametrize("body", [b"not JSON", b"[]", b'{"number":"x"}'])
def test_server_that_is_not_a_broker(body: bytes) -> None:
    with scripted(*[(200, "", body)] * 1000) as broker:
        with pytest.raises(BrokerUnreachable, match="not an NSQ broker"):
            publish_batch(broker.address, "t", [b"a"], "p", 1, patience_s=0.01)


def test_tcp_port_instead_of_http(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "d") as broker:
        with pytest.raises(
            BrokerUnreachable, match=r"Is this the port of the TCP protocol\? The HTTP API has"
        ):
            publish_batch(broker.tcp_address, "t", [b"a"], "p", 1, patience_s=0.01)


def test_unreachable_broker() -> None:
    with scripted() as gone:
        address = gone.address
    with pytest.raises(
        BrokerUnreachable, match=f"the broker at {address} cannot be reached: Connection refused"
    ):
        publish_batch(address, "t", [b"a"], "p", 1, patience_s=0.01)


@pytest.mark.interop
def test_nsqd_stores_batches_without_idempotence(tmp_path: Path) -> None:
    with nsqd(tmp_path / "d") as broker:
        with IdempotentProducer(broker.http_address, "t", "p") as publisher:
            assert publisher.last_number() is None
            assert [publisher.publish([b"a", b"b"], 1) for _ in range(2)] == [UNKNOWN, UNKNOWN]
            assert not publisher.remembers
