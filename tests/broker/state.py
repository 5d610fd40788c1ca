"""The broker's state without a broker: a topic, its log and its consumers, driven by a test."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trio_nsq.broker.state.broker import MessageIds
from trio_nsq.broker.state.cache import BatchCache
from trio_nsq.broker.state.channel import Channel
from trio_nsq.broker.state.checkpoint import ChannelState
from trio_nsq.broker.state.consumer import ELSEWHERE, Consumer
from trio_nsq.broker.state.deferred import DeferredMessages
from trio_nsq.broker.state.seek import Seek, SeekResult
from trio_nsq.broker.state.topic import Topic
from trio_nsq.log import DiskLog, Log, LogReadError, MemoryLog, RecordBatch
from trio_nsq.log.interface import READ_BYTES
from trio_nsq.log.record_metadata import metadata_for_channel
from trio_nsq.protocol import MessageSet, pack_messages
from trio_nsq.protocol.encode import encode_finish
from trio_nsq.protocol.frames import FrameReader, MessageRun

MS = 1_000_000
SECOND = 1000 * MS
MIB = 1024 * 1024
TIMESTAMP = 1_700_000_000 * SECOND
FIRST_ID = 7 << 54 | 1000
"""Node 7, as encoded by `MessageIds`."""
BUFFERED = (16_384, 250)
"""The defaults of output_buffer_size and output_buffer_timeout, in ms."""
UNBUFFERED = (1, 0)


def records(
    bodies: Sequence[bytes], *, base: int = 0, first_id: int = FIRST_ID, due_ns: int = 0
) -> RecordBatch:
    """Return one record of these messages."""
    return RecordBatch(base, first_id, TIMESTAMP, due_ns, pack_messages(bodies))


@dataclass(frozen=True)
class Received:
    """A message as a client gets it."""

    id: bytes
    body: bytes
    attempts: int
    timestamp_ns: int


def decode(data: bytes | memoryview) -> list[Received]:
    """Decode message frames; there must be no other data."""
    reader = FrameReader()
    reader.receive_data(bytes(data))
    run = reader.next_event()
    assert isinstance(run, MessageRun)
    assert reader.take_buffered() == b""
    return [
        Received(*each) for each in zip(run.ids, run.bodies, run.attempts, run.timestamps_ns, strict=True)
    ]


class CountingLog(MemoryLog):
    """A log that counts its reads."""

    reads = 0

    def read(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        self.reads += 1
        return super().read(sequence, max_bytes)


class UnreadableLog(MemoryLog):
    """A log whose reads can be made to fail."""

    fails = False

    def read(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        if self.fails:
            raise LogReadError(Path("segment"), OSError(5, "Input/output error"))
        return super().read(sequence, max_bytes)


class ChannelClient:
    """A client of a channel, and the messages sent to it."""

    def __init__(self, channel: Channel, buffer: tuple[int, int], ready: int) -> None:
        self.bodies: list[bytes] = []
        self.channel = channel
        self._delivered: list[bytes] = []
        self._unfinished: list[bytes] = []  # ids
        self._consumer = consumer = Consumer(60_000, self, None, *buffer)
        channel.add(consumer)
        consumer.ready_count = ready
        channel.dispatcher.refresh(consumer)

    def finish(self, count: int) -> None:
        """Finish this many messages, oldest first."""
        ids, self._unfinished = self._unfinished[:count], self._unfinished[count:]
        assert len(ids) == count
        assert self.channel.finish(self._consumer, encode_finish(ids), 0) == []

    def deliver(self, frames: bytes | memoryview) -> None:
        messages = decode(frames)
        self._delivered += [message.body for message in messages]
        self._unfinished += [message.id for message in messages]

    def send_delivered(self) -> None:
        self.bodies += self._delivered
        self._delivered = []

    def close(self) -> None: ...


class Fixture:
    """A topic and a clock, with one method for each operation over TCP or HTTP.

    Args:
        log: By default a MemoryLog without limits.
        cache_bytes, mem_queue_size: As in BrokerOptions.
        e2e_window_ns: As in Topic.
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
        self.watched: dict[Channel, int] = {}

    def watch_deadlines(self) -> None:
        """Note in `watched` when each channel has to be called next, as the broker's deadlines do."""

        def watch(channel: Channel, at_ns: int) -> None:
            self.watched[channel] = min(at_ns, self.watched.get(channel, at_ns))

        self.topic.watch(watch, lambda topic, channel: None)

    # ------------------------------------------------------------------ publishing

    def store(self, *bodies: bytes, defer_ms: int = 0, only: str | None = None) -> list[RecordBatch]:
        """Append one record to the log only, as before the topic accepts it. With `only` it is for that
        channel alone.
        """
        due_ns = self.now_ns + defer_ms * MS if defer_ms or only is not None else 0
        metadata = metadata_for_channel(only) if only is not None else b""
        first_id = self.ids.take(len(bodies))
        record = next_record(self.topic, pack_messages(bodies), first_id, due_ns, metadata)
        self.log.append([record], sync=False)
        return [record]

    def publish(self, *bodies: bytes, defer_ms: int = 0, only: str | None = None) -> None:
        """Publish like PUB, MPUB or DPUB, or for a single channel."""
        self.topic.accept(self.store(*bodies, defer_ms=defer_ms, only=only))

    def publish_many(self, count: int, *, each: int = 1, prefix: str = "m") -> list[bytes]:
        """Publish `count` messages, `each` per record; return their bodies."""
        bodies = [f"{prefix}{index}".encode() for index in range(count)]
        for start in range(0, count, each):
            self.publish(*bodies[start : start + each])
        return bodies

    # ------------------------------------------------------------------ consuming

    def channel(self, name: str = "channel") -> Channel:
        """Return the channel with this name, created if missing."""
        return self.topic.add_channel(name)

    def subscriber(self, name: str = "channel", **options: Any) -> "Subscriber":
        """Add a consumer to a channel, which is created if missing."""
        return Subscriber(self, self.channel(name), **options)

    def pump(self, channel: Channel) -> list[tuple[Consumer, list[Received]]]:
        """Deliver everything that can be delivered; return the messages of each grant, in order."""
        delivered: list[tuple[Consumer, list[Received]]] = []
        while (grants := channel.dispatcher.dispatch(self.now_ns)) or channel.dispatcher.budget_exhausted:
            delivered += [(consumer, decode(payload)) for consumer, payload in grants]
        return delivered

    def drain(self, name: str = "channel") -> list[bytes]:
        """Return the bodies of all messages that the channel can deliver now, and finish them."""
        subscriber = self.subscriber(name, ready=2500)
        bodies: list[bytes] = []
        while received := subscriber.receive():
            bodies += [message.body for message in received]
            assert subscriber.finish(received) == []
        subscriber.leave()
        return bodies

    def counts(self, name: str = "channel") -> tuple[int, int, int]:
        """Return the depth, in-flight and deferred counts of a channel."""
        channel = self.topic.channels[name]
        return channel.depth, channel.in_flight_count, channel.deferred_count

    def pass_ms(self, milliseconds: int) -> None:
        """Let time pass, and process due messages of every channel."""
        self.now_ns += milliseconds * MS
        for channel in self.topic.channels.values():
            channel.tick(self.now_ns)
            self.watched.pop(channel, None)
            if (next_ns := channel.next_deadline_ns) is not None:
                self.watched[channel] = next_ns

    # ------------------------------------------------------------------ seeking

    def seek(self, sequence: int, name: str = "channel") -> SeekResult:
        """Move a channel, and check that the preview had the same effect, and that the saved state is the new one."""
        channel = self.topic.channels[name]
        foretold = effect_of_seek(channel, sequence)
        seek = Seek(channel, sequence, self.now_ns)
        for _ in seek.prepare():
            pass
        assert seek.effect() == foretold
        copy = channel.copy(channel.topic)
        seek.move(copy)
        planned = kept(copy.make_state())
        seek.move(channel)
        assert kept(channel.make_state()) == planned
        seek.close()
        return foretold

    # ------------------------------------------------------------------ restarting

    def restarted(self, state: dict[str, Any] | None, log: Log | None = None) -> "Fixture":
        """Restart from a snapshot and the log, as a new process does; `was_ahead` is the result of
        `Topic.restore`.
        """
        other = Fixture(log or self.log, name=self.topic.name)
        other.now_ns, other.ids = self.now_ns, self.ids
        other.was_ahead = other.topic.restore(state)
        return other


class Subscriber:
    """One client of a channel.

    Args:
        fixture: The topic and the clock.
        channel: The channel.
        ready: The RDY count.
        msg_timeout_ms: As negotiated.
        buffer: output_buffer_size and output_buffer_timeout, in ms; by default output does not wait.
        nearness: How near the client is to the broker.
    """

    def __init__(
        self,
        fixture: Fixture,
        channel: Channel,
        *,
        ready: int = 1,
        msg_timeout_ms: int = 60_000,
        buffer: tuple[int, int] = (1, 0),
        nearness: int = ELSEWHERE,
    ) -> None:
        self.closed = False
        self.channel = channel
        self.consumer = Consumer(msg_timeout_ms, self, None, *buffer, nearness=nearness)
        self.fixture = fixture
        channel.add(self.consumer)
        self.ready(ready)

    def deliver(self, frames: bytes | memoryview) -> None:
        """Do nothing: deliveries are taken from the result of `Channel.dispatch`."""

    def send_delivered(self) -> None:
        """Do nothing: nothing is sent on."""

    def close(self) -> None:
        """Record that the channel was deleted."""
        self.closed = True

    def ready(self, count: int) -> None:
        """Set RDY."""
        self.consumer.ready_count = count
        self.channel.dispatcher.refresh(self.consumer)

    def block(self, blocked: bool) -> None:
        """Set whether the socket is full."""
        self.consumer.blocked = blocked
        self.channel.dispatcher.refresh(self.consumer)

    def receive(self) -> list[Received]:
        """Deliver; return the messages of this consumer."""
        delivered = self.fixture.pump(self.channel)
        return [message for to, received in delivered if to is self.consumer for message in received]

    def receive_bodies(self) -> list[bytes]:
        """Deliver; return the bodies of this consumer."""
        return [message.body for message in self.receive()]

    def finish(self, messages: Sequence[Received]) -> list[tuple[bytes, str]]:
        """FIN several messages, see `Channel.finish`."""
        lines = encode_finish([message.id for message in messages])
        return self.channel.finish(self.consumer, lines, self.fixture.now_ns)

    def requeue(self, message: Received, delay_ms: int = 0, *, counts_attempt: bool = True) -> str | None:
        """REQ, see `Channel.requeue`."""
        now_ns = self.fixture.now_ns
        return self.channel.requeue(
            self.consumer, message.id, delay_ms, now_ns, counts_attempt=counts_attempt
        )

    def touch(self, message: Received, max_msg_timeout_ms: int = 900_000) -> str | None:
        """TOUCH, see `Channel.touch`."""
        return self.channel.touch(self.consumer, message.id, self.fixture.now_ns, max_msg_timeout_ms)

    def leave(self) -> None:
        """Disconnect."""
        self.channel.remove(self.consumer)


def effect_of_seek(channel: Channel, sequence: int) -> SeekResult:
    """Return the effect of moving a channel, without moving it."""
    seek = Seek(channel, sequence, 0)
    for _ in seek.prepare():
        pass
    seek.close()
    return seek.effect()


def kept(state: ChannelState) -> tuple[dict[str, Any], int]:
    """Return a channel's encoded state, and the first sequence that it needs."""
    for _ in state.encode():
        pass
    data = json.loads(b"".join(state.parts))
    return data | {key: sorted(data[key]) for key in ("unfinished", "deferred")}, state.first_needed


def ids_in_flight(consumer: Consumer) -> list[bytes]:
    """Return the ids that a consumer has in flight, in the order of their deadlines."""
    return [delivery.id_of(sequence) for sequence, delivery in consumer.in_flight]


def disk_log(folder: Path, *, segment_bytes: int = 4096) -> DiskLog:
    """Return a log on disk with small segments."""
    return DiskLog(folder, segment_bytes=segment_bytes, now_ns=lambda: TIMESTAMP)


def damage(folder: Path, body: bytes) -> None:
    """Flip a bit in the record with this body."""
    sized = len(body).to_bytes(4, "big") + body  # a short body alone may also be in a random checksum
    for path in folder.glob("*.log"):
        data = bytearray(path.read_bytes())
        place = data.find(sized)
        if place >= 0:
            data[place + 4] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError(f"{body!r} is not in {folder}")


def packed(rows: Iterable[tuple[int, int, int]]) -> list[str]:
    """Encode deferred messages, each (due_ns, sequence, attempts), as in a channel's saved state."""
    messages = DeferredMessages()
    for due_ns, sequence, attempts in rows:
        messages.add(due_ns, range(sequence, sequence + 1), attempts, None)
    return [block.text() for block in messages.copy()]


def next_record(
    topic: Topic, messages: MessageSet, first_id: int, due_ns: int = 0, metadata: bytes = b""
) -> RecordBatch:
    """Return a record batch for the end of the topic's log; it is not stored."""
    return RecordBatch(topic.log.next_sequence, first_id, TIMESTAMP, due_ns, messages, metadata)
