"""A producer with a name: each message is stored once, in order, whatever happens to the connection and the broker."""

import json
from itertools import count
from typing import Any

import anyio
import httpx
import pytest
import trio
import trio.testing

from client.support.fake_broker import FakeBroker, Peer, bounded, error, identify_reply, mpub, pub
from client.support.lookupds import fake_lookupd
from client.support.loops import Loop, on_both, run
from client.support.producers import Outcome
from interop.peers import Broker
from trio_nsq import ConnectionFailed, Producer, PublishFailed, sync
from trio_nsq.client import MessagesLost, ProducerFenced
from trio_nsq.client.publishing import numbered_queue
from trio_nsq.client.publishing.broker_link import BrokerLink
from trio_nsq.protocol import pack_messages
from trio_nsq.protocol.frames import OK_FRAME, encode_response

_topics = map("topic{}".format, count())


def claim(topic: str) -> bytes:
    return b"PRODUCER %s\n" % topic.encode()


def numbered(command: bytes, first: int) -> bytes:
    line, _, rest = command.partition(b"\n")
    return b"%s %d\n%s" % (line, first, rest)


def last(number: int | None, instance: str = "", **more: object) -> bytes:
    found: dict[str, object] = {"number": number} | ({"instance": instance} if instance else {}) | more
    return encode_response(json.dumps(found).encode())


async def accept(broker: FakeBroker) -> tuple[Peer, str]:
    """Accept a connection; return the broker's end, and the instance of the producer."""
    peer = await broker.accept()
    fields = await peer.expect_identify()
    assert fields["producer"] == "writer"
    await peer.send(identify_reply(producer="writer", survive_refusals=True))
    return peer, fields["producer_instance"]


class Opened:
    """A producer named `writer` that is connected to a fake broker."""

    def __init__(self, broker: FakeBroker, nursery: trio.Nursery, **options: Any) -> None:
        fixed: dict[str, Any] = {"reconnect_min_s": 0.001, "reconnect_max_s": 0.001, "name": "writer"}
        self.producer = Producer(broker.address, **(fixed | options))
        self._nursery = nursery

    def publish(self, topic: str, *bodies: bytes) -> Outcome:
        if len(bodies) > 1:
            return Outcome(self._nursery, self.producer.publish_set, topic, pack_messages(bodies))
        return Outcome(self._nursery, self.producer.publish, topic, *bodies)


async def start(opened: Opened, broker: FakeBroker, nursery: trio.Nursery) -> tuple[Peer, str]:
    done = trio.Event()

    async def enter() -> None:
        async with opened.producer:
            done.set()
            await trio.sleep_forever()

    nursery.start_soon(enter)
    found = await accept(broker)
    await done.wait()
    return found


@bounded
async def test_messages_are_numbered_per_topic(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        opened = Opened(broker, nursery)
        peer, _ = await start(opened, broker, nursery)
        first = opened.publish("t", b"a", b"b")
        await peer.expect(claim("t"))
        await peer.send(last(None))
        await peer.expect(numbered(mpub("t", b"a", b"b"), 0))
        await peer.send(OK_FRAME)
        await first.success()
        second = opened.publish("u", b"x")
        await peer.expect(claim("u"))
        await peer.send(last(6, "other"))
        await peer.expect(numbered(pub("u", b"x"), 7))
        third = opened.publish("t", b"c")
        await peer.expect(numbered(pub("t", b"c"), 2))
        await peer.send(OK_FRAME * 2)
        await second.success()
        await third.success()
        nursery.cancel_scope.cancel()


@bounded
@pytest.mark.parametrize("stored", [1, 3])
async def test_what_is_not_stored_is_sent_again_after_a_lost_connection(
    broker: FakeBroker, stored: int
) -> None:
    async with trio.open_nursery() as nursery:
        opened = Opened(broker, nursery)
        peer, instance = await start(opened, broker, nursery)
        outcomes = [opened.publish("t", b"0", b"1")]
        await peer.expect(claim("t"))
        await peer.send(last(None))
        await peer.expect(numbered(mpub("t", b"0", b"1"), 0))
        outcomes.append(opened.publish("t", b"2", b"3"))
        await peer.expect(numbered(mpub("t", b"2", b"3"), 2))
        peer.hang_up()
        peer, again = await accept(broker)
        assert again == instance
        await peer.expect(claim("t"))
        await peer.send(last(stored, instance))
        if stored == 1:
            await outcomes[0].success()
            await peer.expect(numbered(mpub("t", b"2", b"3"), 2))
            await peer.send(OK_FRAME)
        await outcomes[1].success()
        outcomes.append(opened.publish("t", b"4"))
        await peer.expect(numbered(pub("t", b"4"), 4))
        await peer.send(OK_FRAME)
        await outcomes[2].success()
        nursery.cancel_scope.cancel()


@bounded
async def test_program_learns_that_acknowledged_messages_are_lost(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        opened = Opened(broker, nursery)
        peer, instance = await start(opened, broker, nursery)
        outcome = opened.publish("t", b"0", b"1", b"2")
        await peer.expect(claim("t"))
        await peer.send(last(None))
        await peer.receive()
        await peer.send(OK_FRAME)
        await outcome.success()
        outcome = opened.publish("t", b"3")
        await peer.expect(numbered(pub("t", b"3"), 3))
        peer.hang_up()
        peer, _ = await accept(broker)
        await peer.expect(claim("t"))
        await peer.send(last(0, instance))
        failure = await outcome.failure()
        assert isinstance(failure.__cause__, MessagesLost)
        assert (failure.__cause__.first, failure.__cause__.last, failure.maybe_stored) == (1, 2, False)
        assert await opened.producer.last_number("t") == 0
        outcome = opened.publish("t", b"1")
        await peer.expect(numbered(pub("t", b"1"), 1))
        await peer.send(OK_FRAME)
        await outcome.success()
        nursery.cancel_scope.cancel()


@bounded
@pytest.mark.parametrize("how", ["claim refused", "publish refused", "seen in the answer"])
async def test_older_run_learns_that_another_one_publishes(broker: FakeBroker, how: str) -> None:
    async with trio.open_nursery() as nursery:
        opened = Opened(broker, nursery)
        peer, _ = await start(opened, broker, nursery)
        outcome = opened.publish("t", b"0")
        await peer.expect(claim("t"))
        await peer.send(last(5, "before"))
        await peer.expect(numbered(pub("t", b"0"), 6))
        if how == "publish refused":
            await peer.send(error("E_PRODUCER_FENCED PUB failed FENCED: another"))
        else:
            peer.hang_up()
            peer, _ = await accept(broker)
            await peer.expect(claim("t"))
            refused = error("E_PRODUCER_FENCED PRODUCER failed FENCED: another")
            await peer.send(refused if how == "claim refused" else last(6, "other"))
        failure = await outcome.failure()
        assert isinstance(failure.__cause__, ProducerFenced)
        assert failure.maybe_stored
        again = await opened.publish("t", b"1").failure()
        assert not again.maybe_stored
        assert isinstance(again.__cause__, ProducerFenced)
        nursery.cancel_scope.cancel()


@bounded
async def test_full_topic_is_tried_again_and_the_order_is_kept(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        opened = Opened(broker, nursery)
        peer, _ = await start(opened, broker, nursery)
        outcomes = [opened.publish("t", b"0")]
        await peer.expect(claim("t"))
        await peer.send(last(None))
        await peer.expect(numbered(pub("t", b"0"), 0))
        outcomes.append(opened.publish("t", b"1"))
        await peer.expect(numbered(pub("t", b"1"), 1))
        await peer.send(
            error("E_TOPIC_FULL PUB failed it is full") + error("E_PRODUCER_GAP PUB failed GAP: 0")
        )
        peer, _ = await accept(broker)
        await peer.expect(claim("t"))
        await peer.send(last(None))
        await peer.expect(numbered(pub("t", b"0"), 0), numbered(pub("t", b"1"), 1))
        await peer.send(OK_FRAME * 2)
        for outcome in outcomes:
            await outcome.success()
        nursery.cancel_scope.cancel()


@bounded
async def test_refused_message_fails_and_the_others_take_its_number(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        opened = Opened(broker, nursery)
        peer, _ = await start(opened, broker, nursery)
        outcome = opened.publish("t", b"0")
        await peer.expect(claim("t"))
        await peer.send(last(None))
        await peer.expect(numbered(pub("t", b"0"), 0))
        other = opened.publish("t", b"1")
        await peer.expect(numbered(pub("t", b"1"), 1))
        await peer.send(error("E_BAD_MESSAGE PUB message too big"))
        assert not (await outcome.failure()).maybe_stored
        peer.hang_up()
        peer, _ = await accept(broker)
        await peer.expect(claim("t"))
        await peer.send(last(None))
        await peer.expect(numbered(pub("t", b"1"), 0))
        await peer.send(OK_FRAME)
        await other.success()
        nursery.cancel_scope.cancel()


@bounded
async def test_claim_that_is_not_permitted_fails_only_its_topic(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        opened = Opened(broker, nursery)
        peer, _ = await start(opened, broker, nursery)
        outcomes = [opened.publish("secret", b"x")]
        await peer.expect(claim("secret"))
        outcomes.append(opened.publish("t", b"y"))
        await peer.send(error('E_UNAUTHORIZED AUTH failed for PRODUCER on "secret" ""'))
        assert not (await outcomes[0].failure()).maybe_stored
        peer.hang_up()
        peer, _ = await accept(broker)
        await peer.expect(claim("t"))
        await peer.send(last(None))
        await peer.expect(numbered(pub("t", b"y"), 0))
        await peer.send(OK_FRAME)
        await outcomes[1].success()
        nursery.cancel_scope.cancel()


@bounded
async def test_more_topics_than_a_connection_may_claim(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numbered_queue, "MAX_PRODUCER_TOPICS", 2)
    async with trio.open_nursery() as nursery:
        opened = Opened(broker, nursery)
        peer, _ = await start(opened, broker, nursery)
        await trio.testing.wait_all_tasks_blocked()
        receipts = [opened.producer.submit(topic, b"1") for topic in "abc"]  # tasks would start in any order
        await peer.expect(claim("a"), claim("b"))
        await peer.send(last(None), last(None))
        await peer.expect(numbered(pub("a", b"1"), 0), numbered(pub("b", b"1"), 0))
        receipts += [opened.producer.submit(topic, b"2") for topic in "ca"]
        await peer.expect_nothing()
        await peer.send(OK_FRAME * 2)
        await peer.expect_end()
        peer, instance = await accept(broker)
        await peer.expect(claim("c"), claim("a"))
        await peer.send(last(None), last(0, instance))
        await peer.expect(numbered(mpub("c", b"1", b"2"), 0), numbered(pub("a", b"2"), 1))
        await peer.send(OK_FRAME * 2)
        for receipt in receipts:
            await receipt.wait()
        assert caplog.text == ""
        nursery.cancel_scope.cancel()


@bounded
async def test_patience_ends(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        opened = Opened(broker, nursery, patience_s=0)
        peer, _ = await start(opened, broker, nursery)
        outcome = opened.publish("t", b"0")
        await peer.expect(claim("t"))
        await peer.send(last(None))
        await peer.expect(numbered(pub("t", b"0"), 0))
        peer.hang_up()
        assert (await outcome.failure()).maybe_stored
        nursery.cancel_scope.cancel()


@bounded
async def test_forgotten_numbers_leave_what_was_sent_in_doubt(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        opened = Opened(broker, nursery)
        peer, _ = await start(opened, broker, nursery)
        outcome = opened.publish("t", b"0")
        await peer.expect(claim("t"))
        await peer.send(last(None))
        await peer.expect(numbered(pub("t", b"0"), 0))
        peer.hang_up()
        peer, _ = await accept(broker)
        await peer.expect(claim("t"))
        await peer.send(last(None, may_be_forgotten=True))
        assert (await outcome.failure()).maybe_stored
        nursery.cancel_scope.cancel()


@bounded
@pytest.mark.parametrize("answer", [b"{}x", b'{"number":"1"}', b'{"number":-2}', b"[1]", b'{"number":true}'])
async def test_garbage_instead_of_a_number_ends_the_connection(broker: FakeBroker, answer: bytes) -> None:
    async with trio.open_nursery() as nursery:
        opened = Opened(broker, nursery)
        peer, _ = await start(opened, broker, nursery)
        outcome = opened.publish("t", b"0")
        await peer.expect(claim("t"))
        await peer.send(encode_response(answer))
        peer, _ = await accept(broker)
        await peer.expect(claim("t"))
        await peer.send(last(None))
        await peer.expect(numbered(pub("t", b"0"), 0))
        await peer.send(OK_FRAME)
        await outcome.success()
        nursery.cancel_scope.cancel()


@bounded
async def test_nsqd_is_refused(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_greet, broker)
        with pytest.raises(ConnectionFailed, match="it does not support producers with a name, as nsqd"):
            async with Producer(broker.address, name="writer"):
                pass


async def _greet(broker: FakeBroker) -> None:
    peer = await broker.accept()
    await peer.greet()


@bounded
async def test_what_was_sent_waits_for_its_broker_and_the_rest_goes_to_another(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    fixed: dict[str, Any] = {"reconnect_min_s": 0.001, "reconnect_max_s": 0.001, "random": lambda: 0.0}
    async with trio.open_nursery() as nursery:
        found: dict[FakeBroker, tuple[Peer, str]] = {}
        greeted = trio.Event()

        async def greet(each: FakeBroker) -> None:
            found[each] = await accept(each)
            if len(found) == 2:
                greeted.set()

        for each in (broker, other_broker):
            nursery.start_soon(greet, each)
        addresses = [broker.address, other_broker.address]
        async with Producer(addresses, name="writer", max_in_flight_bytes=1, **fixed) as producer:
            await greeted.wait()
            await trio.testing.wait_all_tasks_blocked(0.01)
            with pytest.raises(RuntimeError, match="one broker"):
                await producer.last_number("t")
            sent = Outcome(nursery, producer.publish_set, "t", pack_messages([b"a", b"b"]))
            await trio.testing.wait_all_tasks_blocked(0.01)
            ((lost, (peer, instance)),) = [each for each in found.items() if each[1][0].receive_nowait()]
            used = other_broker if lost is broker else broker
            assert instance != found[used][1]  # for the case that both are the same broker
            await peer.send(last(None))
            await peer.expect(numbered(mpub("t", b"a", b"b"), 0))
            # These wait behind it, or go to the other broker at once.
            waiting = [Outcome(nursery, producer.publish, "t", body) for body in (b"c", b"d")]
            await trio.testing.wait_all_tasks_blocked(0.01)
            peer.hang_up()
            other, _ = found[used]
            await other.expect(claim("t"))
            await other.send(last(None))
            for number in range(2):
                command = await other.receive_line()
                assert command == b"PUB t %d\n" % number
                assert (await other.receive())[:4] == b"\0\0\0\1"
                await other.send(OK_FRAME)
            for outcome in waiting:
                await outcome.success()
            peer, _ = await accept(lost)
            await peer.expect(claim("t"))
            await peer.send(last(None))
            await peer.expect(numbered(mpub("t", b"a", b"b"), 0))
            await peer.send(OK_FRAME)
            await sent.success()
        nursery.cancel_scope.cancel()


@bounded
async def test_broker_that_leaves_the_services_and_returns_is_used_by_the_same_run(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    """A message that it may have is settled there, and is not taken for one of another run."""
    options: dict[str, Any] = {"reconnect_min_s": 0.001, "reconnect_max_s": 0.001, "random": lambda: 0.0}
    async with trio.open_nursery() as nursery, fake_lookupd(broker.address) as lookupd:
        producer = Producer(
            lookupd_http_addresses=lookupd.address, name="writer", lookupd_poll_interval_s=0.02, **options
        )
        opened = trio.Event()

        async def enter() -> None:
            async with producer:
                opened.set()
                await trio.sleep_forever()

        nursery.start_soon(enter)
        peer, instance = await accept(broker)
        await opened.wait()
        outcome = Outcome(nursery, producer.publish, "t", b"a")
        await peer.expect(claim("t"))
        await peer.send(last(None))
        await peer.expect(numbered(pub("t", b"a"), 0))
        lookupd.brokers = [other_broker.address]
        await accept(other_broker)
        lookupd.brokers = [broker.address]
        await lookupd.asked(len(lookupd.asked_at) + 2)
        await trio.testing.wait_all_tasks_blocked(0.01)
        peer.hang_up()
        peer, again = await accept(broker)
        assert again == instance
        await peer.expect(claim("t"))
        await peer.send(last(0, instance))
        await outcome.success()
        nursery.cancel_scope.cancel()


@bounded
async def test_broker_that_returns_while_its_connection_is_being_closed_is_connected_again(
    broker: FakeBroker, other_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_link = BrokerLink.run

    async def run_and_close_slowly(link: BrokerLink) -> None:
        await run_link(link)
        await trio.sleep_forever()

    monkeypatch.setattr(BrokerLink, "run", run_and_close_slowly)
    async with trio.open_nursery() as nursery, fake_lookupd(broker.address) as lookupd:
        producer = Producer(
            lookupd_http_addresses=lookupd.address, name="writer", lookupd_poll_interval_s=0.02
        )
        opened = trio.Event()

        async def enter() -> None:
            async with producer:
                opened.set()
                await trio.sleep_forever()

        nursery.start_soon(enter)
        peer, _ = await accept(broker)
        await opened.wait()
        lookupd.brokers = [other_broker.address]
        await accept(other_broker)
        await peer.expect_end()
        lookupd.brokers = [broker.address]
        peer, _ = await accept(broker)
        await lookupd.asked(len(lookupd.asked_at) + 2)  # the other one is not chosen any more
        outcome = Outcome(nursery, producer.publish, "t", b"a")
        await peer.expect(claim("t"))
        await peer.send(last(None))
        await peer.expect(numbered(pub("t", b"a"), 0))
        await peer.send(OK_FRAME)
        await outcome.success()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "options", [{"name": "a b"}, {"name": ""}, {"name": "a", "retry": True}, {"name": "a", "ordered": True}]
)
def test_invalid_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"name"):
        Producer("127.0.0.1:1", **options)
    with pytest.raises(ValueError, match="patience_s"):
        Producer("127.0.0.1:1", name="a", patience_s=-1)


# ---------------------------------------------------------------------- with a real broker


def stored(broker: Broker, topic: str) -> list[bytes]:
    """Return the bodies in a topic's log."""
    answer = httpx.get(f"http://{broker.http_address}/topic/read", params={"topic": topic})
    return [json.loads(line)["body"].encode() for line in answer.text.splitlines()]


@pytest.mark.slow
@on_both
def test_continues_after_a_restart_of_the_program(loop: Loop, real_broker: Broker) -> None:
    topic = next(_topics)

    async def main() -> None:
        async with Producer(real_broker.tcp_address, name="writer") as producer:
            assert await producer.last_number(topic) is None
            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(producer.publish, topic, b"%d" % number)
            await producer.publish_many(topic, [b"%d" % number for number in range(20, 40)])
            await producer.publish(topic, b"40", defer_s=0.001)
            assert await producer.last_number(topic) == 40
        async with Producer(real_broker.tcp_address, name="writer") as producer:
            assert await producer.last_number(topic) == 40
            await producer.publish_set(topic, pack_messages([b"41", b"42"]))
            assert await producer.last_number(topic) == 42

    run(loop, main)
    assert sorted(map(int, stored(real_broker, topic))) == list(range(43))


@pytest.mark.slow
@on_both
def test_messages_that_wait_together_keep_their_order(loop: Loop, real_broker: Broker) -> None:
    topic = next(_topics)
    kinds: list[dict[str, Any]] = [
        {},
        {"headers": {"a": "b"}},
        {},
        {"defer_s": 0.001},
        {},
        {"headers": {"c": "d"}},
    ]

    async def main() -> None:
        async with Producer(real_broker.tcp_address, name="writer") as producer:
            receipts = [
                producer.submit(topic, b"%d" % number, **kind) for number, kind in enumerate(kinds * 2)
            ]
            assert [(await receipt.wait()).number for receipt in receipts] == list(range(len(receipts)))

    run(loop, main)
    assert stored(real_broker, topic) == [b"%d" % number for number in range(len(kinds) * 2)]


@pytest.mark.slow
@on_both
def test_concurrent_calls_are_ordered_by_their_start(loop: Loop, real_broker: Broker) -> None:
    topic = next(_topics)
    started: list[bytes] = []

    async def main() -> None:
        async with Producer(real_broker.tcp_address, name="writer") as producer:

            async def publish(number: int) -> None:
                bodies = [b"%d.%d" % (number, part) for part in range(3)]
                match number % 3:
                    case 0:
                        started.extend(bodies)
                        await producer.publish_many(topic, bodies)
                    case 1:
                        started.extend(bodies)
                        await producer.publish_set(topic, pack_messages(bodies))
                    case _:
                        started.append(bodies[0])
                        await producer.publish(topic, bodies[0])

            async with anyio.create_task_group() as tasks:
                for number in range(60):
                    tasks.start_soon(publish, number)

    run(loop, main)
    assert stored(real_broker, topic) == started


@pytest.mark.slow
@on_both
def test_newer_producer_takes_over(loop: Loop, real_broker: Broker) -> None:
    topic = next(_topics)

    async def main() -> None:
        async with Producer(real_broker.tcp_address, name="writer") as old:
            await old.publish(topic, b"0")
            async with Producer(real_broker.tcp_address, name="writer") as new:
                assert await new.last_number(topic) == 0
                with pytest.raises(PublishFailed) as caught:
                    await old.publish(topic, b"old")
                assert isinstance(caught.value.__cause__, ProducerFenced)
                await new.publish(topic, b"1")

    run(loop, main)
    assert stored(real_broker, topic) == [b"0", b"1"]


@pytest.mark.slow
def test_synchronous_producer(real_broker: Broker) -> None:
    topic = next(_topics)
    for expected in (None, 1):
        with sync.Producer(real_broker.tcp_address, name="writer") as producer:
            assert producer.last_number(topic) == expected
            producer.publish_many(topic, [b"a", b"b"])
    assert stored(real_broker, topic) == [b"a", b"b"] * 2


@pytest.mark.slow
def test_last_number_needs_a_name(real_broker: Broker) -> None:
    with sync.Producer(real_broker.tcp_address) as producer:
        with pytest.raises(RuntimeError, match="a producer with a name and one broker"):
            producer.last_number("t")
