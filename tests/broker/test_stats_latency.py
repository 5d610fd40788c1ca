"""Tests for latencies of a channel: the time from publish to FIN, and the age of the oldest unfinished
message.
"""

from collections.abc import Sequence

import pytest

from broker.state import MS, SECOND, Fixture, Received, ids_in_flight
from trio_nsq.broker.state.batch import make_batches
from trio_nsq.broker.state.quantiles import RELATIVE_ERROR, Sketch
from trio_nsq.log import RecordBatch
from trio_nsq.protocol import pack_messages
from trio_nsq.protocol.encode import encode_finish

WINDOW_NS = 600 * SECOND
START_NS = 1_700_000_000 * SECOND


class Measured(Fixture):
    """A topic that measures, and messages with given publish times."""

    def __init__(self, *, name: str = "topic", cache_bytes: int = 64 * 1024 * 1024) -> None:
        super().__init__(name=name, cache_bytes=cache_bytes, e2e_window_ns=WINDOW_NS)
        self.now_ns = START_NS

    def publish_at(self, timestamp_ns: int, *bodies: bytes, known: bool = True) -> None:
        """Publish one record; `known=False`: it is only in the log, as after a restart."""
        first_id = self.ids.take(len(bodies))
        base = self.log.next_sequence
        record = RecordBatch(base, first_id, timestamp_ns, 0, pack_messages(bodies))
        self.log.append([record], sync=False)
        if known:
            self.topic.accept([record])

    def latencies_ms(self, *fractions: float) -> list[float]:
        return [value / MS for value in self._recent().quantiles(fractions)]

    def count(self) -> int:
        return self._recent().count

    def _recent(self) -> Sketch:
        latency = self.channel().e2e_latency
        assert latency is not None
        return latency.recent(self.now_ns)


def near(*values: float) -> object:
    return pytest.approx(list(values), rel=RELATIVE_ERROR)


def test_time_from_publish_to_fin_is_measured() -> None:
    fixture = Measured()
    subscriber = fixture.subscriber(ready=100)
    fixture.publish_at(START_NS - 70 * MS, b"a", b"b", b"c")
    received = subscriber.receive()
    assert fixture.count() == 0
    fixture.now_ns += 30 * MS
    subscriber.finish(received[:2])
    assert fixture.count() == 2
    fixture.now_ns += 900 * MS
    subscriber.finish(received[2:])
    assert fixture.latencies_ms(0.5, 1.0) == near(100, 1000)


def test_nothing_is_measured_by_default() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=100)
    fixture.publish(b"a")
    subscriber.finish(subscriber.receive())
    assert fixture.channel().e2e_latency is None
    assert fixture.channel().finish_count == 1


def test_records_that_were_read_together_keep_their_times() -> None:
    fixture = Measured()
    for number in range(4):
        fixture.publish_at(START_NS - (1 + number) * SECOND, b"x", b"y", known=False)
    restarted = Measured()
    restarted.log, restarted.topic = fixture.log, fixture.topic
    restarted.topic.view.end = 8
    subscriber = restarted.subscriber(ready=100)
    received = subscriber.receive()
    assert [message.timestamp_ns for message in received] == [
        START_NS - (1 + number) * SECOND for number in range(4) for _ in "xy"
    ]
    subscriber.finish(received[1:])
    assert restarted.count() == 7
    # 1 s once, and twice each 2, 3 and 4 s.
    assert restarted.latencies_ms(1 / 7, 2 / 7, 3 / 7, 5 / 7, 1.0) == near(1000, 2000, 2000, 3000, 4000)


def test_requeued_messages_of_a_batch_keep_their_times() -> None:
    fixture = Measured()
    fixture.publish_at(START_NS - 2 * SECOND, b"a", b"b", known=False)
    fixture.publish_at(START_NS - 1 * SECOND, b"c", b"d", known=False)
    fixture.topic.view.end = 4
    subscriber = fixture.subscriber(ready=4)
    received = subscriber.receive()
    for message in reversed(received):
        subscriber.requeue(message)
        (again,) = subscriber.receive()
        assert (again.id, again.body, again.timestamp_ns) == (message.id, message.body, message.timestamp_ns)
    assert fixture.channel().messages.oldest == 0


@pytest.mark.parametrize("name", ["topic", "topic#ephemeral"])
def test_redelivered_message_counts_from_its_publish(name: str) -> None:
    fixture = Measured(name=name)
    subscriber = fixture.subscriber(ready=100, msg_timeout_ms=1000)
    fixture.publish_at(START_NS, b"again", b"later", b"timed out", b"touched")
    again, later, _, touched = subscriber.receive()
    subscriber.requeue(again)
    subscriber.requeue(later, delay_ms=500)
    fixture.pass_ms(999)
    assert subscriber.touch(touched) is None
    fixture.pass_ms(1)
    received = {message.body: message for message in subscriber.receive()}
    fixture.now_ns = START_NS + 5 * SECOND
    subscriber.finish([received[b"again"], received[b"later"], touched])
    assert fixture.count() == 3
    fixture.now_ns = START_NS + 10 * SECOND
    subscriber.finish([received[b"timed out"]])
    assert fixture.latencies_ms(0.25, 0.75, 1.0) == near(5000, 5000, 10_000)


def test_only_messages_in_flight_count() -> None:
    fixture = Measured()
    subscriber = fixture.subscriber(ready=100)
    fixture.publish_at(START_NS, b"a", b"b")
    first, second = subscriber.receive()
    stranger = Received(b"f" * 16, b"", 1, 0)
    failed = subscriber.finish([first, stranger, first, second])
    assert [message_id for message_id, _ in failed] == [stranger.id, first.id]
    assert fixture.count() == fixture.channel().finish_count == subscriber.consumer.finish_count == 2


# ---------------------------------------------------------------------- the oldest message


def oldest(fixture: Fixture) -> int | None:
    return fixture.channel().messages.oldest


def test_oldest_is_ready_then_in_flight_then_the_next() -> None:
    fixture = Fixture()
    assert oldest(fixture) is None
    fixture.publish(b"0", b"1", b"2", b"3")
    assert oldest(fixture) == 0
    subscriber = fixture.subscriber(ready=3)
    received = subscriber.receive()
    assert oldest(fixture) == 0
    subscriber.finish([received[1]])
    assert oldest(fixture) == 0
    subscriber.finish([received[0]])
    assert oldest(fixture) == 2
    subscriber.finish([received[2]])
    subscriber.finish(subscriber.receive())
    assert oldest(fixture) is None


def test_oldest_may_be_in_flight_behind_younger_ones() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=3)
    fixture.publish_many(5)
    received = subscriber.receive()
    subscriber.requeue(received[0])
    assert oldest(fixture) == 0
    subscriber.ready(5)
    received = received[1:] + subscriber.receive()
    assert ids_in_flight(subscriber.consumer)[0] != received[-1].id
    assert fixture.counts() == (0, 5, 0)
    assert oldest(fixture) == 0
    subscriber.finish([message for message in received if message.body != b"m3"])
    assert oldest(fixture) == 3


def test_oldest_may_be_in_a_later_delivery() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=10)
    fixture.publish_many(10, each=10)
    received = subscriber.receive()
    subscriber.finish(received[:5])
    subscriber.requeue(received[5])
    assert len(subscriber.receive()) == 1
    subscriber.finish(received[6:9])
    assert oldest(fixture) == 5  # only the last message of the first delivery is left


def test_oldest_of_all_consumers() -> None:
    fixture = Fixture()
    subscribers = [fixture.subscriber(ready=1) for _ in range(3)]
    bodies = fixture.publish_many(3)
    held = {message.body: consumer for consumer, [message] in fixture.pump(fixture.channel())}
    for sequence, body in enumerate(bodies):
        assert oldest(fixture) == sequence
        (subscriber,) = [s for s in subscribers if s.consumer is held[body]]
        fixture.channel().finish(subscriber.consumer, encode_finish(ids_in_flight(subscriber.consumer)), 0)
    assert oldest(fixture) is None


def test_touched_messages_are_found() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=10, msg_timeout_ms=1000)
    fixture.publish_many(4, each=4)
    received = subscriber.receive()
    fixture.pass_ms(500)
    assert subscriber.touch(received[0]) is None
    assert oldest(fixture) == 0
    subscriber.finish(received[1:3])
    assert oldest(fixture) == 0
    subscriber.finish(received[:1])
    assert oldest(fixture) == 3


def test_deferred_messages_do_not_count() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=10)
    fixture.publish(b"later", defer_ms=1000)
    assert oldest(fixture) is None
    fixture.publish(b"now")
    assert oldest(fixture) == 1
    (message,) = subscriber.receive()
    subscriber.requeue(message, delay_ms=5000)
    assert oldest(fixture) is None
    subscriber.ready(0)
    fixture.pass_ms(1000)
    assert oldest(fixture) == 0


def test_late_message_among_many() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=2500)
    fixture.publish_many(900, each=900)
    received = subscriber.receive()
    subscriber.ready(0)
    for message in reversed(received):
        subscriber.requeue(message)
    assert oldest(fixture) == 0


def timestamps(fixture: Fixture, sequences: Sequence[int]) -> list[int | None]:
    return [fixture.channel().read_ahead.timestamp_in_memory(sequence) for sequence in sequences]


def test_timestamp_in_memory_needs_no_read() -> None:
    fixture = Measured()
    fixture.publish_at(START_NS + 1, b"a", b"b")
    fixture.publish_at(START_NS + 2, b"c")
    expected = [START_NS + 1, START_NS + 1, START_NS + 2]
    assert timestamps(fixture, range(3)) == expected  # records
    fixture.subscriber(ready=10).receive()
    assert timestamps(fixture, range(3)) == expected  # frames


def test_timestamp_that_is_not_in_memory_is_unknown() -> None:
    fixture = Measured(cache_bytes=0)
    fixture.publish_at(START_NS + 1, b"a")
    fixture.publish_at(START_NS + 2, b"b")
    assert timestamps(fixture, range(2)) == [None, START_NS + 2]  # the newest is always kept


def test_each_record_of_a_batch_has_its_timestamp() -> None:
    fixture = Measured()
    for number in (5, 7, 7, 9):
        fixture.publish_at(START_NS + number, b"x", b"y", known=False)
    (batch,) = make_batches(fixture.log.read(0))
    expected = [START_NS + number for number in (5, 5, 7, 7, 7, 7, 9, 9)]
    assert [batch.timestamp_ns(index) for index in range(8)] == expected  # records
    assert batch.id(7)
    assert [batch.timestamp_ns(index) for index in range(8)] == expected  # frames
    assert batch.timestamps_ns(1, 6) == [(START_NS + 5, 1), (START_NS + 7, 4), (START_NS + 9, 1)]
    assert batch.timestamps_ns(2, 4) == [(START_NS + 7, 4)]
