"""The broker's state without the broker: a topic, its log and its consumers, in the hands of a test."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trio_nsq.broker.state.broker import MessageIds
from trio_nsq.broker.state.cache import BatchCache
from trio_nsq.broker.state.channel import Channel
from trio_nsq.broker.state.consumer import Consumer
from trio_nsq.broker.state.deferred import DeferredMessages
from trio_nsq.broker.state.record_metadata import metadata_for_channel
from trio_nsq.broker.state.seek import Move, Seek
from trio_nsq.broker.state.topic import Topic
from trio_nsq.log import DiskLog, Log, LogReadError, MemoryLog, RecordBatch
from trio_nsq.log.interface import READ_BYTES
from trio_nsq.protocol import MessageSet, pack_messages
from trio_nsq.protocol.encode import encode_finish
from trio_nsq.protocol.frames import FrameReader, MessageRun

MS = 1_000_000
SECOND = 1000 * MS
MIB = 1024 * 1024
TIMESTAMP = 1_700_000_000 * SECOND
FIRST_ID = 7 << 54 | 1000
"""Node 7, as `MessageIds` would give it."""


def records(
    bodies: Sequence[bytes], *, base: int = 0, first_id: int = FIRST_ID, due_ns: int = 0
) -> RecordBatch:
    """One record of these messages."""
    return RecordBatch(base, first_id, TIMESTAMP, due_ns, pack_messages(bodies))


@dataclass(frozen=True)
class Received:
    """A message as a client sees it."""

    id: bytes
    body: bytes
    attempts: int
    timestamp_ns: int


def decode(data: bytes | memoryview) -> list[Received]:
    """Message frames, nothing before or after them."""
    reader = FrameReader()
    reader.receive_data(bytes(data))
    run = reader.next_event()
    assert isinstance(run, MessageRun)
    assert reader.take_buffered() == b""
    return [
        Received(*each) for each in zip(run.ids, run.bodies, run.attempts, run.timestamps_ns, strict=True)
    ]


class CountingLog(MemoryLog):
    """A log that says how often it was read."""

    reads = 0

    def read(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        self.reads += 1
        return super().read(sequence, max_bytes)


class UnreadableLog(MemoryLog):
    """A log whose reads fail when told to."""

    fails = False

    def read(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        if self.fails:
            raise LogReadError(Path("segment"), OSError(5, "Input/output error"))
        return super().read(sequence, max_bytes)


class Fixture:
    """A topic, and the time. What one would do over TCP and HTTP, in one call each.

    Args:
        log: A MemoryLog without bounds by default.
        cache_bytes, mem_queue_size: As in BrokerOptions.
        e2e_window_ns: As of Topic.
    """

    def __init__(
        self,
        log: Log | None = None,
        *,
        name: str = "topic",
        cache_bytes: int = 64 * MIB,
        mem_queue_size: int = 10_000,
        e2e_window_ns: int = 0,
    ) -> None:
        self.log = log if log is not None else MemoryLog(max_messages=1_000_000)
        self.cache = BatchCache(cache_bytes)
        self.topic = Topic(name, self.log, self.cache, mem_queue_size, e2e_window_ns)
        self.ids = MessageIds(7, 1000)
        self.now_ns = 5 * SECOND
        self.was_ahead = False

    # ------------------------------------------------------------------ publishing

    def store(self, *bodies: bytes, defer_ms: int = 0, only: str | None = None) -> list[RecordBatch]:
        """Append one record to the log and no more, as while the topic does not know of it yet.

        With `only` it is for that channel alone.
        """
        due_ns = self.now_ns + defer_ms * MS if defer_ms or only is not None else 0
        metadata = metadata_for_channel(only) if only is not None else b""
        first_id = self.ids.take(len(bodies))
        record = next_record(self.topic, pack_messages(bodies), first_id, due_ns, metadata)
        self.log.append([record], sync=False)
        return [record]

    def publish(self, *bodies: bytes, defer_ms: int = 0, only: str | None = None) -> None:
        """One PUB, MPUB or DPUB, or one for a single channel."""
        self.topic.accept(self.store(*bodies, defer_ms=defer_ms, only=only))

    def publish_many(self, count: int, *, each: int = 1, prefix: str = "m") -> list[bytes]:
        """`count` messages, `each` to a record; returns their bodies."""
        bodies = [f"{prefix}{index}".encode() for index in range(count)]
        for start in range(0, count, each):
            self.publish(*bodies[start : start + each])
        return bodies

    # ------------------------------------------------------------------ consuming

    def channel(self, name: str = "channel") -> Channel:
        """The channel of this name."""
        return self.topic.add_channel(name)

    def subscriber(self, name: str = "channel", **options: Any) -> "Subscriber":
        """A consumer of a channel, which is made if need be."""
        return Subscriber(self, self.channel(name), **options)

    def pump(self, channel: Channel) -> list[tuple[Consumer, list[Received]]]:
        """Deliver what can be delivered; what each grant held, in order."""
        delivered: list[tuple[Consumer, list[Received]]] = []
        while (grants := channel.dispatcher.dispatch(self.now_ns)) or channel.dispatcher.budget_exhausted:
            delivered += [(consumer, decode(payload)) for consumer, payload in grants]
        return delivered

    def drain(self, name: str = "channel") -> list[bytes]:
        """The bodies of all that the channel can deliver now, finished as they come."""
        subscriber = self.subscriber(name, ready=2500)
        bodies: list[bytes] = []
        while received := subscriber.receive():
            bodies += [message.body for message in received]
            assert subscriber.finish(received) == []
        subscriber.leave()
        return bodies

    def counts(self, name: str = "channel") -> tuple[int, int, int]:
        """Depth, in flight and deferred of a channel."""
        channel = self.topic.channels[name]
        return channel.depth, channel.in_flight_count, channel.deferred_count

    def pass_ms(self, milliseconds: int) -> None:
        """Let time pass, and every channel look what is due."""
        self.now_ns += milliseconds * MS
        for channel in self.topic.channels.values():
            channel.tick(self.now_ns)

    # ------------------------------------------------------------------ seeking

    def seek(self, sequence: int, name: str = "channel") -> Move:
        """Move a channel; what that would do was said before."""
        channel = self.topic.channels[name]
        foretold = effect_of_seek(channel, sequence)
        seek = Seek(channel, sequence, self.now_ns)
        for _ in seek.prepare():
            pass
        assert seek.effect() == foretold
        for _ in seek.apply():
            pass
        seek.close()
        return foretold

    # ------------------------------------------------------------------ restarting

    def restarted(self, state: dict[str, Any] | None, log: Log | None = None) -> "Fixture":
        """What a new process makes of a snapshot and the log; `was_ahead` is what `Topic.restore` said."""
        other = Fixture(log or self.log, name=self.topic.name)
        other.now_ns, other.ids = self.now_ns, self.ids
        other.was_ahead = other.topic.restore(state)
        return other


class Subscriber:
    """One client of a channel.

    Args:
        fixture: The channel's broker.
        channel: Whose messages it gets.
        ready: RDY.
        msg_timeout_ms: As negotiated.
        buffer: output_buffer_size and output_buffer_timeout, in ms; the default is not to wait.
    """

    def __init__(
        self,
        fixture: Fixture,
        channel: Channel,
        *,
        ready: int = 1,
        msg_timeout_ms: int = 60_000,
        buffer: tuple[int, int] = (1, 0),
    ) -> None:
        self.closed = False
        self.channel = channel
        self.consumer = Consumer(msg_timeout_ms, self, None, *buffer)
        self.fixture = fixture
        channel.add(self.consumer)
        self.ready(ready)

    def deliver(self, frames: bytes | memoryview) -> None:
        """What is delivered is taken from what `Channel.dispatch` returns."""

    def send_delivered(self) -> None:
        """Nothing is sent on."""

    def close(self) -> None:
        """The channel is deleted."""
        self.closed = True

    def ready(self, count: int) -> None:
        """RDY."""
        self.consumer.ready_count = count
        self.channel.dispatcher.refresh(self.consumer)

    def block(self, blocked: bool) -> None:
        """The socket is full, or is not any more."""
        self.consumer.blocked = blocked
        self.channel.dispatcher.refresh(self.consumer)

    def receive(self) -> list[Received]:
        """Deliver what can be delivered; what came to this consumer."""
        delivered = self.fixture.pump(self.channel)
        return [message for to, received in delivered if to is self.consumer for message in received]

    def receive_bodies(self) -> list[bytes]:
        """As `receive`, the bodies alone."""
        return [message.body for message in self.receive()]

    def finish(self, messages: Sequence[Received]) -> list[tuple[bytes, str]]:
        """FIN, in bulk. As `Channel.finish`."""
        lines = encode_finish([message.id for message in messages])
        return self.channel.finish(self.consumer, lines, self.fixture.now_ns)

    def requeue(self, message: Received, delay_ms: int = 0) -> str | None:
        """REQ. As `Channel.requeue`."""
        return self.channel.requeue(self.consumer, message.id, delay_ms, self.fixture.now_ns)

    def touch(self, message: Received, max_msg_timeout_ms: int = 900_000) -> str | None:
        """TOUCH. As `Channel.touch`."""
        return self.channel.touch(self.consumer, message.id, self.fixture.now_ns, max_msg_timeout_ms)

    def leave(self) -> None:
        """Disconnect."""
        self.channel.remove(self.consumer)


def effect_of_seek(channel: Channel, sequence: int) -> Move:
    """What moving a channel would do; it is not moved."""
    seek = Seek(channel, sequence, 0)
    for _ in seek.prepare():
        pass
    seek.close()
    return seek.effect()


def ids_in_flight(consumer: Consumer) -> list[bytes]:
    """The ids of what a consumer has, in the order of their deadlines."""
    return [delivery.id_of(sequence) for sequence, delivery in consumer.in_flight]


def disk_log(folder: Path, *, segment_bytes: int = 4096) -> DiskLog:
    """A log on disk with small segments."""
    return DiskLog(folder, segment_bytes=segment_bytes, now_ns=lambda: TIMESTAMP)


def damage(folder: Path, body: bytes) -> None:
    """Flip a bit in the record that holds this body."""
    for path in folder.glob("*.log"):
        data = bytearray(path.read_bytes())
        place = data.find(body)
        if place >= 0:
            data[place] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError(f"{body!r} is not in {folder}")


def packed(rows: Iterable[tuple[int, int, int]]) -> list[str]:
    """Deferred messages, (due_ns, sequence, attempts) each, as a channel's saved state has them."""
    messages = DeferredMessages()
    for due_ns, sequence, attempts in rows:
        messages.add(due_ns, range(sequence, sequence + 1), attempts, None)
    return [block.text() for block in messages.copy()]


def next_record(
    topic: Topic, messages: MessageSet, first_id: int, due_ns: int = 0, metadata: bytes = b""
) -> RecordBatch:
    """A record batch that fits at the end of the topic's log; it is not stored yet."""
    return RecordBatch(topic.log.next_sequence, first_id, TIMESTAMP, due_ns, messages, metadata)
