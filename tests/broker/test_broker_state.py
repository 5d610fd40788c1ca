"""Tests for the topics of a broker, message ids, and deadlines."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.state import MS, SECOND, ids_in_flight, next_record
from trio_nsq.broker.errors import PublishRefused
from trio_nsq.broker.options import BrokerOptions
from trio_nsq.broker.state import deadline_heap as deadlines_module
from trio_nsq.broker.state.broker import Broker, MessageIds
from trio_nsq.broker.state.channel import Channel
from trio_nsq.broker.state.consumer import Consumer
from trio_nsq.log import Log, LogReadError, MemoryLog
from trio_nsq.protocol import pack_messages
from trio_nsq.protocol.encode import encode_finish

IDS = MessageIds(1, 1)


def make_broker(make_log: Callable[[str], Log] = lambda name: MemoryLog()) -> Broker:
    return Broker(BrokerOptions(data_path=Path("unused")), make_log)


def publish(broker: Broker, topic_name: str, *, due_ns: int = 0, count: int = 1) -> None:
    """Publish as the server does: accept, then watch each channel."""
    topic = broker.topic(topic_name)
    record = next_record(topic, pack_messages([b"x"] * count), IDS.take(count), due_ns)
    topic.log.append([record], sync=True)
    topic.accept([record])
    for channel in topic.channels.values():
        broker.deadlines.watch(channel, channel.next_due_ns)


def delete(broker: Broker, channel: Channel) -> None:
    broker.existing_topic_of(channel).remove_channel(channel)


class Connection:
    """A consumer's connection, as the channel sees it."""

    def __init__(self, on_close: Callable[[], None] = lambda: None) -> None:
        self.close = on_close

    def deliver(self, frames: bytes | memoryview) -> None:
        pass

    def send_delivered(self) -> None:
        pass


def deliver(
    broker: Broker, channel: Channel, now_ns: int, *, ready: int = 1, timeout_ms: int = 1000
) -> Consumer:
    """Deliver ready messages to a new consumer, and watch the channel as the server does."""
    consumer = Consumer(timeout_ms, Connection())
    consumer.ready_count = ready
    channel.add(consumer)
    if grants := channel.dispatcher.dispatch(now_ns):
        broker.deadlines.watch(channel, now_ns + min(to.msg_timeout_ns for to, _ in grants))
    return consumer


# ---------------------------------------------------------------------- message ids


def test_ids_have_the_node_and_are_unique() -> None:
    ids = MessageIds(1023, 77)
    assert [ids.take(1), ids.take(200), ids.take(1)] == [1023 << 54 | number for number in (77, 78, 278)]
    assert ids.next == 279


def test_only_reserved_ids_are_used() -> None:
    """A restart begins after the reserved ones."""
    ids = MessageIds(0, 77, reserved=80)
    with pytest.raises(PublishRefused, match="no message ids are left"):
        ids.take(4)
    assert ids.take(3) == 77
    with pytest.raises(PublishRefused):
        ids.take(1)
    ids.reserved = 81
    assert ids.take(1) == 80


@given(st.lists(st.integers(1, 500), max_size=20), st.integers(0, 1023), st.integers(0, 1 << 53))
def test_ids_reserved_in_runs_are_unique_and_ascending(counts: list[int], node: int, start: int) -> None:
    ids = MessageIds(node, start)
    taken: list[int] = []
    for count in counts:
        first = ids.take(count)
        taken += range(first, first + count)
    assert taken == sorted(set(taken))
    assert {number >> 54 for number in taken} <= {node}


# ---------------------------------------------------------------------- topics and channels


def test_topic_and_channel_are_created_once() -> None:
    made = []

    def make_log(name: str) -> Log:
        made.append(name)
        return MemoryLog()

    broker = make_broker(make_log)
    channel = broker.topic("t").add_channel("c")
    assert broker.topic("t").add_channel("c") is channel
    assert broker.topic("t") is broker.topic_of(channel)
    assert made == ["t"]


def test_topic_whose_log_cannot_be_opened_is_not_created() -> None:
    def refuse(name: str) -> Log:
        raise LogReadError(Path(name), OSError(13, "Permission denied"))

    broker = make_broker(refuse)
    with pytest.raises(LogReadError):
        broker.topic("t").add_channel("c")
    assert broker.topics == {}
    assert (broker.changed, broker.never_saved) == (set(), set())


def test_new_topics_and_channels_must_be_saved_and_existing_ones_not() -> None:
    broker = make_broker()
    topic = broker.topic("t")
    assert (broker.changed, broker.never_saved) == ({"t"}, {topic})
    broker.changed.clear()
    broker.never_saved.clear()
    broker.topic("t")
    broker.topic("t").add_channel("tail#ephemeral")
    assert (broker.changed, broker.never_saved) == (set(), set())
    broker.topic("t").add_channel("c")
    assert broker.changed == {"t"}
    broker.changed.clear()
    broker.topic("t").add_channel("c")
    assert broker.changed == set()
    delete(broker, broker.topic("t").add_channel("c"))
    assert broker.changed == {"t"}


def test_ephemeral_topic_is_deleted_with_its_last_channel() -> None:
    broker = make_broker()
    broker.topic("t#ephemeral")
    one, other = (
        broker.topic("t#ephemeral").add_channel("one"),
        broker.topic("t#ephemeral").add_channel("other"),
    )
    delete(broker, one)
    assert list(broker.topics) == ["t#ephemeral"]
    delete(broker, other)
    assert broker.topics == {}
    assert (broker.changed, broker.never_saved) == (set(), set())


def test_durable_topic_stays_without_channels() -> None:
    broker = make_broker()
    delete(broker, broker.topic("t").add_channel("c#ephemeral"))
    assert list(broker.topics) == ["t"]


def test_deleting_a_topic_closes_its_clients_and_its_log() -> None:
    closed = []

    class ClosingLog(MemoryLog):
        def close(self) -> None:
            closed.append("log")

    broker = make_broker(lambda name: ClosingLog())
    channel = broker.topic("t").add_channel("c")
    channel.add(Consumer(1000, Connection(lambda: closed.append("client"))))
    publish(broker, "t", due_ns=5 * SECOND)
    topic = broker.topic("t")
    broker.changed.add("t")
    broker.delete_topic(topic)
    assert closed == ["client", "log"]
    assert (broker.topics, broker.changed, broker.never_saved) == ({}, set(), set())
    again = broker.topic("t")
    broker.delete_topic(topic)  # the old one: the new one stays
    assert broker.topics == {"t": again}
    assert broker.tick(10 * SECOND) == []


def test_recreated_topic_has_nothing_of_the_old_one() -> None:
    broker = make_broker()
    publish(broker, "t", count=3)
    broker.delete_topic(broker.topic("t"))
    channel = broker.topic("t").add_channel("c")
    assert channel.depth == 0
    topic = broker.topic("t")
    record = next_record(topic, pack_messages([b"new"]), IDS.take(1))
    topic.log.append([record], sync=True)
    topic.accept([record])
    consumer = deliver(broker, channel, 0, ready=10)
    assert ids_in_flight(consumer) == [b"%016x" % record.first_id]


# ---------------------------------------------------------------------- deadlines


@pytest.mark.uncompiled
def test_idle_channels_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = make_broker()
    for topic in range(100):
        for channel in range(100):
            broker.topic(f"t{topic}").add_channel(f"c{channel}")
    assert broker.deadlines.next_ns is None
    looked: list[Channel] = []
    tick = Channel.tick

    def noting(channel: Channel, now_ns: int, at_most: int) -> int:
        looked.append(channel)
        return tick(channel, now_ns, at_most)

    monkeypatch.setattr(Channel, "tick", noting)
    assert broker.tick(1000 * SECOND) == []
    publish(broker, "t7", due_ns=2000 * SECOND)
    assert broker.tick(2000 * SECOND - 1) == []
    assert looked == []
    woken: list[Channel] = []
    while some := broker.tick(2000 * SECOND):
        woken += some
    assert woken == looked == list(broker.topics["t7"].channels.values())


def test_channel_is_processed_when_something_is_due() -> None:
    broker = make_broker()
    channel = broker.topic("t").add_channel("c")
    publish(broker, "t")
    consumer = deliver(broker, channel, 0)
    assert broker.deadlines.next_ns == SECOND
    assert broker.tick(SECOND - 1) == []
    assert len(consumer.in_flight) == 1
    assert broker.tick(SECOND) == [channel]
    assert (len(consumer.in_flight), channel.depth) == (0, 1)
    assert broker.deadlines.next_ns is None


def test_earlier_alarm_rings_first_and_the_later_one_still_rings() -> None:
    broker = make_broker()
    channel = broker.topic("t").add_channel("c")
    publish(broker, "t")
    deliver(broker, channel, 0, timeout_ms=60_000)
    publish(broker, "t", due_ns=SECOND)
    publish(broker, "t", due_ns=3 * SECOND)
    assert broker.deadlines.next_ns == SECOND
    assert broker.tick(SECOND) == [channel]
    assert (channel.deferred_count, broker.deadlines.next_ns) == (1, 3 * SECOND)
    assert broker.tick(3 * SECOND) == [channel]
    assert (channel.deferred_count, broker.deadlines.next_ns) == (0, 60 * SECOND)
    assert broker.tick(60 * SECOND) == [channel]
    assert channel.timeout_count == 1
    assert broker.deadlines.next_ns is None


def test_channel_with_two_due_deadlines_is_processed_once() -> None:
    broker = make_broker()
    channel = broker.topic("t").add_channel("c")
    publish(broker, "t", due_ns=2 * SECOND)
    publish(broker, "t", due_ns=SECOND)
    assert broker.tick(10 * SECOND) == [channel]
    assert channel.depth == 2


def test_first_channel_is_watched_for_earlier_deferred_messages() -> None:
    broker = make_broker()
    publish(broker, "t", due_ns=SECOND)
    assert broker.deadlines.next_ns is None
    channel = broker.topic("t").add_channel("c")
    assert broker.deadlines.next_ns == SECOND
    assert broker.tick(SECOND) == [channel]


def test_deleted_channel_is_not_processed() -> None:
    broker = make_broker()
    gone, kept = broker.topic("t").add_channel("gone"), broker.topic("t").add_channel("kept")
    publish(broker, "t", due_ns=SECOND)
    delete(broker, gone)
    assert broker.tick(SECOND) == [kept]
    assert gone.depth == gone.deferred_count == 0


def test_recreated_channel_has_its_own_deadlines() -> None:
    broker = make_broker()
    old = broker.topic("t").add_channel("c")
    publish(broker, "t", due_ns=SECOND)
    delete(broker, old)
    new = broker.topic("t").add_channel("c")
    publish(broker, "t", due_ns=2 * SECOND)
    assert broker.tick(SECOND) == []
    assert broker.tick(2 * SECOND) == [new]
    assert new.depth == 1


@pytest.fixture
def deadline_bytes() -> Iterator[Callable[[], int]]:
    """Return the memory that was allocated in the module of deadlines."""
    only = [tracemalloc.Filter(inclusive=True, filename_pattern=deadlines_module.__file__)]

    def measure() -> int:
        return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(only).traces)

    tracemalloc.start()
    yield measure
    tracemalloc.stop()


def test_short_deadlines_do_not_accumulate_behind_a_long_one(deadline_bytes: Callable[[], int]) -> None:
    broker = make_broker()
    channel = broker.topic("t").add_channel("c")
    publish(broker, "t", due_ns=3600 * SECOND)
    for second in range(1, 1000):
        publish(broker, "t", due_ns=second * SECOND)
        if second == 10:
            before = deadline_bytes()
        assert broker.tick(second * SECOND) == [channel]
    assert deadline_bytes() < before + 10_000
    assert broker.deadlines.next_ns == 3600 * SECOND


@given(st.data())
def test_channel_is_never_processed_later_than_its_next_deadline(data: st.DataObject) -> None:
    broker = make_broker()
    channels = [broker.topic("t").add_channel(name) for name in ("a", "b")] + [
        broker.topic("u").add_channel("a")
    ]
    consumers: list[tuple[Channel, Consumer]] = []
    now_ns = 0
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(
            st.sampled_from(["publish", "defer", "deliver", "requeue", "touch", "finish", "pass"])
        )
        channel = data.draw(st.sampled_from(channels))
        if what == "publish":
            publish(broker, channel.topic.name, count=data.draw(st.integers(1, 3)))
        elif what == "defer":
            publish(broker, channel.topic.name, due_ns=now_ns + data.draw(st.integers(1, 300)) * MS)
        elif what == "deliver":
            timeout_ms = data.draw(st.sampled_from([50, 100, 200]))
            consumers.append((channel, deliver(broker, channel, now_ns, ready=2, timeout_ms=timeout_ms)))
        elif what == "pass":
            now_ns += data.draw(st.integers(1, 200)) * MS
            due = [each for each in channels if (at := each.next_deadline_ns) is not None and at <= now_ns]
            assert set(due) <= set(broker.tick(now_ns))
        elif consumers:
            channel, consumer = data.draw(st.sampled_from(consumers))
            for message_id in ids_in_flight(consumer)[:1]:
                if what == "requeue":
                    delay_ms = data.draw(st.integers(1, 300))
                    channel.requeue(consumer, message_id, delay_ms, now_ns)
                    broker.deadlines.watch(channel, now_ns + delay_ms * MS)
                elif what == "touch":
                    channel.touch(consumer, message_id, now_ns, 250)
                else:
                    channel.finish(consumer, encode_finish([message_id]), 0)
        for channel in channels:
            at_ns = channel.next_deadline_ns
            assert at_ns is None or at_ns > now_ns
            assert at_ns is None or (broker.deadlines.next_ns or 0) <= at_ns
            deadlines = [d.deadline_ns for c in channel.consumers for _, d in c.in_flight]
            assert not deadlines or (at_ns is not None and at_ns <= min(deadlines))
    broker.tick(now_ns + 1000 * SECOND)
    assert broker.deadlines.next_ns is None
    assert all(channel.in_flight_count == channel.deferred_count == 0 for channel in channels)


# ---------------------------------------------------------------------- much work at once


def test_many_due_channels_are_processed_in_steps() -> None:
    """Between the steps, the broker's clients are served."""
    broker = make_broker()
    channels = [broker.topic("t").add_channel(f"c{number}") for number in range(1000)]
    publish(broker, "t", due_ns=SECOND)
    steps = 0
    while due := broker.tick(SECOND):
        steps += 1
        assert len(due) <= 200
        moved = sum(channel.depth for channel in channels)
        assert (broker.deadlines.next_ns == SECOND) is (moved < 1000)
    assert steps == 5
    assert all(channel.depth == 1 for channel in channels)
    assert broker.deadlines.next_ns is None


@pytest.mark.parametrize("what", ["deferred", "timeouts"])
def test_many_due_messages_of_one_channel_are_processed_in_steps(what: str) -> None:
    broker = make_broker()
    channel = broker.topic("t").add_channel("c")
    publish(broker, "t", count=5500, due_ns=SECOND if what == "deferred" else 0)
    if what == "timeouts":
        consumers = [deliver(broker, channel, 0, ready=1000) for _ in range(5)]
        assert channel.in_flight_count == 5000
        publish(broker, "t", count=500, due_ns=SECOND)
    ready = channel.depth
    while broker.tick(SECOND) == [channel]:
        assert 0 < channel.depth - ready <= 1000
        ready = channel.depth
    assert channel.depth == (5500 if what == "deferred" else 500 + 5000 + 500)
    assert channel.in_flight_count == channel.deferred_count == 0
    assert broker.deadlines.next_ns is None
    if what == "timeouts":
        assert channel.timeout_count == 5000
        assert all(consumer.window == 1000 for consumer in consumers)


def test_deadlines_of_deleted_channels_do_not_accumulate() -> None:
    broker = make_broker()
    kept = broker.topic("t").add_channel("kept")
    gc.collect()
    channels_before = sum(isinstance(each, Channel) for each in gc.get_objects())
    publish(broker, "t", due_ns=3600 * SECOND)
    for begin_s in (3601, 10_001):  # rung deadlines are not counted as pending
        for second in range(begin_s, begin_s + 2000):
            channel = broker.topic("t").add_channel("c#ephemeral")
            publish(broker, "t", due_ns=second * SECOND)
            delete(broker, channel)
        del channel
        gc.collect()
        # Those without an deadline are gone.
        assert sum(isinstance(each, Channel) for each in gc.get_objects()) - channels_before < 500
        while broker.deadlines.next_ns is not None:
            assert broker.tick(broker.deadlines.next_ns) in ([kept], [])
    assert kept.depth == 4001
