"""Tests for the idempotent producer: with `qcli serve`, with nsqd, and with brokers that go down."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from broker.support import connected, running_broker
from client.support.scripted_http import NO_TOPIC, NSQD, OK, OURS, Answer, scripted
from interop.peers import nsqd, qcli_serve
from trio_nsq.broker import BoundAddresses
from trio_nsq.client.errors import BrokerUnreachable, PublishInDoubt, RequestRefused
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
    defer_ms: int = 0,
    **how: Any,
) -> PublishOutcome:
    with IdempotentProducer(address, topic, producer, first_retry_s=HASTY_S, **how) as publisher:
        return publisher.publish(bodies, number, defer_ms)


async def beside(bound: BoundAddresses, work: Callable[[str], _Answer]) -> _Answer:
    """Run a function in a thread while the broker runs here."""
    assert bound.http_address is not None
    return await trio.to_thread.run_sync(work, bound.http_address)


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


async def test_batch_that_is_published_in_part_is_refused(tmp_path: Path) -> None:
    def publish(address: str) -> None:
        with IdempotentProducer(address, "t", "p") as publisher:
            assert publisher.publish([b"a"], 19, first=10) is PUBLISHED
            with pytest.raises(RequestRefused, match="OVERLAP: numbers up to 19"):
                publisher.publish([b"b"], 25, first=15)
            assert publisher.publish([b"b"], 25, first=20) is PUBLISHED

    async with running_broker(tmp_path / "d") as bound:
        await beside(bound, publish)


async def test_deferred_batch(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        for number, defer_ms in ((0, 3_600_000), (1, 0), (2, 1)):
            publish = partial(_publish, number=number, defer_ms=defer_ms)
            assert await beside(bound, publish) is PUBLISHED
        bodies = {(await client.message()).body for _ in range(2)}
        assert bodies == {b"number 1", b"number 2"}
        await client.nothing_more()


def _publish(address: str, number: int, defer_ms: int) -> PublishOutcome:
    return publish_batch(address, "t", [b"number %d" % number], "p", number, defer_ms)


async def test_refused_batch_is_not_retried(tmp_path: Path) -> None:
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
