"""A topic: one log, the channels over it, and the point up to which the channels may read.

The *distribution point* is the sequence up to which messages belong to the channels. It is the end of the log,
except while the topic is paused or has no channel: then it stays put, and what arrives waits behind it for the
first channel, or for the pause to end.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from ..log import Log, RecordBatch
from ..protocol import MessageSet, is_ephemeral
from .batch import Batch, make_batches
from .cache import BatchCache
from .channel import Channel

STATE_FORMAT = 1


class StateError(ValueError):
    """A topic's saved state is not one this program can read."""


class Topic:
    """One topic, synchronous and pure but for reading its log.

    Args:
        name: A valid topic name.
        log: Where its messages lie; the topic does not close it.
        cache: The broker's decoded batches.
        mem_queue_size: How many of the newest messages to keep decoded.

    Attributes:
        distribution_point: See above.
        paused: Nothing is distributed.
        message_count, message_bytes: Published since the broker started; bytes of bodies.
    """

    def __init__(self, name: str, log: Log, cache: BatchCache, mem_queue_size: int) -> None:
        self.name = name
        self.log = log
        self.channels: dict[str, Channel] = {}
        self.paused = False
        self.message_count = 0
        self.message_bytes = 0
        self.distribution_point = log.first_sequence
        self._cache = cache
        self._mem_queue_size = mem_queue_size
        self._recent: deque[Batch] = (
            deque()
        )  # as many as mem_queue_size allows; the cache may have dropped some
        self._recent_messages = 0
        self._last_held: Batch | None = None  # requeued messages tend to be neighbours
        # Deferred by their publisher and behind the distribution point: (first, after last, due_ns).
        self._waiting_deferred: list[tuple[int, int, int]] = []

    @property
    def ephemeral(self) -> bool:
        """Whether it lives in memory only."""
        return is_ephemeral(self.name)

    @property
    def depth(self) -> int:
        """Messages waiting for a channel, or for the pause to end."""
        deferred = sum(end - start for start, end, _ in self._waiting_deferred)
        return self.log.next_sequence - self.distribution_point - deferred

    @property
    def backend_depth(self) -> int:
        """The part of `depth` that would have to be read from disk."""
        return min(self.depth, max(0, self.cached_from - self.distribution_point))

    @property
    def cached_from(self) -> int:
        """The first sequence from which on messages are decoded in memory."""
        return self._recent[0].base_sequence if self._recent else self.log.next_sequence

    # ------------------------------------------------------------------ publishing

    def record(self, messages: MessageSet, first_id: int, timestamp_ns: int, due_ns: int = 0) -> RecordBatch:
        """A record batch that fits at the end of the log. It is not stored yet: append it, then `accept` it."""
        return RecordBatch(self.log.next_sequence, first_id, timestamp_ns, due_ns, messages)

    def accept(self, records: Sequence[RecordBatch]) -> None:
        """Take records that are now in the log: remember them decoded, and distribute them."""
        for record in records:
            self.message_count += record.count
            self.message_bytes += record.messages.body_bytes
            if record.due_ns:
                self._waiting_deferred.append((record.base_sequence, record.next_sequence, record.due_ns))
        self._remember(make_batches(records))
        self.distribute()

    def _remember(self, batches: list[Batch]) -> None:
        for batch in batches:
            if batch.due_ns:
                continue
            self._cache.put(self.name, batch)
            self._recent.append(batch)
            self._recent_messages += len(batch)
        # The newest batch stays even if it is larger, or the size 0: its consumers are about to ask for it.
        while self._recent_messages > self._mem_queue_size and len(self._recent) > 1:
            old = self._recent.popleft()
            self._recent_messages -= len(old)
            self._cache.discard((self.name, old.base_sequence))

    def distribute(self) -> None:
        """Let the channels have what is behind the distribution point, unless it is frozen."""
        end = self.log.next_sequence
        if self.paused or not self.channels or end == self.distribution_point:
            return
        count = end - self.distribution_point
        self.distribution_point = end
        for channel in self.channels.values():
            channel.arrived(count)
            for start, after, due_ns in self._waiting_deferred:
                channel.arrived_deferred(range(start, after), due_ns)
        if self._waiting_deferred:
            self._waiting_deferred.clear()

    # ------------------------------------------------------------------ reading

    def fetch(self, sequence: int) -> list[Batch]:
        """Batches from the one that holds `sequence` on; the first may begin later if messages are missing there.

        Empty at the end of the log. Raises LogReadError.
        """
        cached = self._cache.get((self.name, sequence))
        if cached is not None:
            return [cached]
        batches = make_batches(self.log.read(sequence))
        for batch in batches:
            self._cache.put(self.name, batch)
        return batches

    def batch_holding(self, sequence: int) -> Batch | None:
        """The batch with this very message, or None if the log no longer has it. Raises LogReadError."""
        held = self._last_held
        if held is not None and held.base_sequence <= sequence < held.next_sequence:
            return held
        for batch in make_batches(self.log.read(sequence, 0)):
            if batch.base_sequence <= sequence < batch.next_sequence:
                self._last_held = batch
                return batch
        return None

    # ------------------------------------------------------------------ operators

    def add_channel(self, name: str) -> Channel:
        """The channel of this name, made if need be: it begins at the distribution point."""
        channel = self.channels.get(name)
        if channel is None:
            channel = self.channels[name] = Channel(self, name, self.distribution_point)
            self.distribute()
        return channel

    def remove_channel(self, channel: Channel) -> None:
        """Delete a channel: its messages are dropped, its consumers' connections closed."""
        if self.channels.get(channel.name) is channel:
            del self.channels[channel.name]
            for consumer in list(channel.consumers):
                channel.remove(consumer)
                consumer.close()

    def pause(self) -> None:
        """Freeze the distribution point."""
        self.paused = True

    def unpause(self) -> None:
        """Let it move on."""
        self.paused = False
        self.distribute()

    def empty(self) -> None:
        """Drop what is behind the distribution point; channels keep what they have."""
        end = self.log.next_sequence
        for channel in self.channels.values():
            channel.skip(self.distribution_point, end)
        self._waiting_deferred.clear()
        self.distribution_point = end

    def close(self) -> None:
        """Let go of everything: the topic is being deleted, or the broker stops."""
        for channel in list(self.channels.values()):
            self.remove_channel(channel)
        self._recent.clear()
        self._cache.forget_topic(self.name)

    # ------------------------------------------------------------------ checkpoints

    @staticmethod
    def first_needed(state: dict[str, Any]) -> int:
        """The oldest sequence that a topic restored from this snapshot would read."""
        needed = [int(state["distribution_point"])]
        for channel in state["channels"]:
            needed.append(int(channel["cursor"]))
            needed += [sequence for sequence, _ in channel["unfinished"]]
            needed += [sequence for _, sequence, _ in channel["deferred"]]
        needed += [start for start, _, _ in state["waiting_deferred"]]
        return min(needed)

    def snapshot(self) -> dict[str, Any]:
        """The topic and its durable channels as JSON data.

        Keys: format, name, paused, distribution_point, end (of the log), waiting_deferred [[first, after last,
        due_ns]], channels (see `Channel.snapshot`).
        """
        return {
            "format": STATE_FORMAT,
            "name": self.name,
            "paused": self.paused,
            "distribution_point": self.distribution_point,
            "end": self.log.next_sequence,
            "waiting_deferred": list(self._waiting_deferred),
            "channels": [c.snapshot() for c in self.channels.values() if not c.ephemeral],
        }

    def restore(self, state: dict[str, Any] | None) -> None:
        """Take up a snapshot, and what came into the log after it.

        Args:
            state: None if none was ever written: the topic then has its log and no channel.

        Raises:
            StateError: It is not a snapshot of this topic.
            LogReadError: The operating system refused.
        """
        end = self.log.next_sequence
        scanned = self.log.first_sequence
        try:
            if state is not None:
                if state["format"] != STATE_FORMAT:
                    raise StateError(f"its format is {state['format']}, this program reads {STATE_FORMAT}")
                self.paused = bool(state["paused"])
                self.distribution_point = min(int(state["distribution_point"]), end)
                self._waiting_deferred = [
                    (int(a), int(b), int(due)) for a, b, due in state["waiting_deferred"] if a < end
                ]
                scanned = min(int(state["end"]), end)
                for channel_state in state["channels"]:
                    channel = Channel.restore(self, channel_state, end)
                    self.channels[channel.name] = channel
        except (KeyError, TypeError, ValueError) as exc:
            raise StateError(str(exc)) from exc
        for header in self.log.headers(scanned):
            if header.due_ns and header.base_sequence >= scanned:
                self._waiting_deferred.append((header.base_sequence, header.next_sequence, header.due_ns))
        self.distribute()
