"""A topic: one log, the channels over it, and the point up to which the channels may read.

The *high watermark* is the sequence up to which messages belong to the channels. It is the end of the topic,
except while the topic is paused or has no channel: then it stays put, and what arrives waits behind it for the
first channel, or for the pause to end.

A *private channel* (see `Channel.private`) is no part of this. It begins at the end of the topic, gets each message
when it is published, also while the topic is paused, and moves nothing: to all other channels, and to what waits for
a first one, the topic is the same as without it. It never makes a topic full, but loses its oldest messages instead.

The end of the topic is the end of the log as far as `accept` was told of it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...log import Log, RecordBatch
from ...log.records import RecordHeader
from ...protocol import is_ephemeral
from .batch import make_batches
from .cache import BatchCache
from .channel import Channel
from .checkpoint import STATE_FORMAT, Checkpoint
from .dead_letter_ledger import DeadLetterLedger
from .deferred import Waiting
from .message_store import MessageStore
from .producers import LastBatch, Producers
from .record_metadata import batch_number, only_channel
from .settings import SettingsError, TopicSettings, change
from .topic_limits import TopicLimits
from .topic_view import TopicView
from .undistributed import UndistributedMessages
from .version import Version

_NS_PER_MS = 1_000_000


class StateError(ValueError):
    """A topic's saved state is not one this program can read."""


def _give(channels: Iterable[Channel], count: int, deferred: Sequence[Waiting]) -> None:
    """Let channels have `count` messages that can be read in their turn, and those that cannot."""
    for channel in channels:
        channel.arrived(count)
        for waiting in deferred:
            sequences = waiting.sequences
            if waiting.channel is None or waiting.channel == channel.name:
                channel.arrived_deferred(sequences, waiting.due_ns, waiting.held)
            else:
                channel.skip(sequences.start, sequences.stop)


class Topic:
    """One topic, synchronous and pure but for reading its log.

    Args:
        log: Where its messages lie; the topic does not close it.
        defaults: Its settings, but for those that `configure` changes.

    Attributes:
        view: What its channels know of it.
        paused: Nothing is distributed.
        ephemeral: It lives in memory only.
        message_count: Messages published since the broker started.
        held_back: Why nothing may be published until its state is saved; empty: it may.
        may_refuse: Whether `limits.why_full` ever says anything, or it is held back.
        producers: What those that number their batches have published.
        has_distributed_deferred: The channels have got deferred messages; who then looks out for these clears it.
    """

    def __init__(
        self,
        name: str,
        log: Log,
        cache: BatchCache,
        mem_queue_size: int,
        e2e_window_ns: int = 0,
        defaults: TopicSettings = TopicSettings(),  # noqa: B008 - it cannot be changed
    ) -> None:
        self.name = name
        self.log = log
        self.ephemeral = is_ephemeral(name)
        self._first = log.first_sequence
        self.version = Version()
        self.view = TopicView(name, self.ephemeral, e2e_window_ns, self._first, log.next_sequence)
        self.store = MessageStore(name, log, cache, mem_queue_size)
        self._defaults = defaults
        self._own_settings: dict[str, Any] = {}  # by name
        self.channels: dict[str, Channel] = {}
        self._private: dict[str, Channel] = {}  # those of them that are
        self._undistributed = UndistributedMessages(self.view, self.version)
        self.limits = TopicLimits(self.view, log, self._undistributed, self.channels, self._private)
        self.held_back = ""
        self.configure({})
        self.paused = False
        self.message_count = 0
        self.has_distributed_deferred = False
        self.producers = Producers(self.version)
        self.dead_letters = DeadLetterLedger(self.version)

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Change settings, by name; None goes back to the default. Raises SettingsError, and nothing is changed."""
        self.settings, self._own_settings = change(self._defaults, self._own_settings, changes)
        self.version.increment()
        self.view.ttl_ns = self.settings.ttl_ms * _NS_PER_MS
        self.view.is_limited = self.settings.is_limited
        self.limits.settings = self.settings
        self._find_may_refuse()

    def hold_back(self, reason: str) -> None:
        """Let nothing be published until its state is saved; an empty reason: let it be."""
        self.held_back = reason
        self._find_may_refuse()

    def _find_may_refuse(self) -> None:
        self.may_refuse = bool(self.held_back) or (self.settings.is_limited and not self.settings.drops)

    @property
    def depth(self) -> int:
        """Messages waiting for a channel, or for the pause to end."""
        return self._undistributed.depth

    @property
    def is_finished(self) -> bool:
        """Nothing of its log will be read again: no message waits, is deferred or in flight, in any channel."""
        return self.oldest_waiting == self.dead_letters.confirmed_before(
            self.view.end
        ) == self.view.end and not any(
            channel.depth or channel.deferred_count or channel.in_flight_count
            for channel in self.channels.values()
        )

    @property
    def high_watermark(self) -> int:
        return self.view.high_watermark

    @property
    def end(self) -> int:
        return self.view.end

    @property
    def message_bytes(self) -> int:
        """Bytes of the bodies published since the broker started."""
        return self.view.message_bytes

    @property
    def backend_depth(self) -> int:
        """The part of `depth` that would have to be read from disk."""
        return min(self.depth, max(0, self.store.cached_from - self.view.high_watermark))

    # ------------------------------------------------------------------ publishing

    def accept(self, records: Sequence[RecordBatch]) -> None:
        """Take records that are now in the log: remember them decoded, and distribute them."""
        view = self.view
        start, view.end = view.end, records[-1].next_sequence
        self.version.increment()
        for record in records:
            self.message_count += record.count
            view.message_bytes += record.messages.body_bytes
            if record.metadata:
                self._record_metadata(record.metadata, record)
        if not (len(records) == 1 and self.store.extend_newest(records[0])):
            self._remember_all(records)
        if self._private:
            self._show(start)
        self.distribute()
        self._follow_log()

    def _remember_all(self, records: Sequence[RecordBatch]) -> None:
        for batch in make_batches(records):
            if batch.due_ns:
                held = batch if self.ephemeral else None
                sequences = range(batch.base_sequence, batch.next_sequence)
                self._undistributed.defer(Waiting(sequences, batch.due_ns, batch.channel, held))
            else:
                self.store.remember(batch)

    def _record_metadata(self, metadata: bytes, record: RecordBatch | RecordHeader) -> None:
        if batch := batch_number(metadata):
            self.producers.record(LastBatch(*batch, record.base_sequence), record.timestamp_ns)
        elif not record.due_ns:
            self.dead_letters.record_here(metadata, record.base_sequence)

    def _follow_log(self) -> None:
        """Take note of what a log that is bounded has dropped at its beginning."""
        if self.log.first_sequence > self._first:
            self._first = self.log.first_sequence
            self.view.high_watermark = max(self.view.high_watermark, self._first)
            for channel in self.channels.values():
                channel.messages.cursor.move_to(self._first)

    def distribute(self) -> None:
        """Let the channels have what is behind the high watermark, unless it is frozen."""
        channels = self.limits.shared if self._private else self.channels.values()
        if self.paused or not channels:
            return
        count, deferred = self._undistributed.take()
        if deferred:
            self.has_distributed_deferred = True
            _give(channels, count, deferred)
        else:
            for channel in channels:
                channel.arrived(count)

    def _show(self, start: int) -> None:
        """Let the private channels have what was accepted from `start` on."""
        new = list(self._undistributed.waiting.since(start))
        self.has_distributed_deferred |= bool(new)
        count = self.view.end - start - sum(len(waiting.sequences) for waiting in new)
        _give(self._private.values(), count, new)

    # ------------------------------------------------------------------ limits

    @property
    def oldest_waiting(self) -> int:
        """The oldest sequence that some channel has yet to deliver, or that waits for one; the end if there is none."""
        return self.limits.oldest_of(self.channels.values())

    def settings_with(self, changes: Mapping[str, Any]) -> TopicSettings:
        """The settings that `configure` would put in force. Raises SettingsError."""
        return change(self._defaults, self._own_settings, changes)[0]

    # ------------------------------------------------------------------ operators

    def add_channel(self, name: str, *, private: bool = False) -> Channel:
        """Return the channel of this name.

        If there is none it is made: at the high watermark, or, a private one, at the end of the topic. One that is
        there stays as it is, private or not.
        """
        channel = self.channels.get(name)
        if channel is not None:
            return channel
        if private:
            channel = self._make_channel(name, self.view.end, private=True)
            self.channels[name] = self._private[name] = channel
        else:
            channel = self.channels[name] = self._make_channel(name, self.view.high_watermark)
            if not channel.ephemeral:
                self.version.increment()
            self.distribute()
        return channel

    def _make_channel(self, name: str, cursor: int, *, private: bool = False) -> Channel:
        return Channel(self.view, self.store, name, cursor, Version(self.version), private=private)

    def remove_channel(self, channel: Channel) -> None:
        """Delete a channel: its messages are dropped, its consumers' connections closed."""
        if self.channels.get(channel.name) is channel:
            del self.channels[channel.name]
            self._private.pop(channel.name, None)
            for consumer in list(channel.consumers):
                channel.remove(consumer)
                consumer.subscriber.close()
            channel.empty()  # an alarm may yet keep it in memory for a while
            self.version.increment()

    def pause(self) -> None:
        self.paused = True
        self.version.increment()

    def unpause(self) -> None:
        self.paused = False
        self.version.increment()
        self.distribute()

    def plan_configure(self, checkpoint: Checkpoint, changes: Mapping[str, Any]) -> None:
        """Have a checkpoint save what `configure` would do. Raises SettingsError."""
        checkpoint.settings, own = change(self._defaults, self._own_settings, changes)
        checkpoint.change_topic(settings=own)

    def plan_empty(self, checkpoint: Checkpoint) -> None:
        """Have a checkpoint save what `empty` would do."""
        for channel in self.channels.values():
            if not channel.ephemeral:
                checkpoint.change_channel(channel.state_if_skipped(self.view.high_watermark, self.view.end))
        checkpoint.forget_waiting()
        checkpoint.change_topic(distribution_point=self.view.end)

    def empty(self) -> None:
        """Drop what is behind the high watermark; channels keep what they have."""
        for channel in self.limits.shared:
            channel.skip(self.view.high_watermark, self.view.end)
        self._undistributed.clear()

    def close(self) -> None:
        """Let go of everything: the topic is being deleted, or the broker stops."""
        self.dead_letters.confirm_moved(self.dead_letters.moved_count)  # no saved state has them any more
        for channel in list(self.channels.values()):
            self.remove_channel(channel)
        self.store.clear()

    # ------------------------------------------------------------------ checkpoints

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(
            {
                "format": STATE_FORMAT,
                "name": self.name,
                "paused": self.paused,
                "settings": self._own_settings,
                "distribution_point": self.view.high_watermark,
                "end": self.view.end,
                "settled": self.dead_letters.confirmed_before(self.view.end),
                "producers_used": self.producers.used_s(),
            },
            self._undistributed.waiting.copy(),
            self.producers.state(),
            {name: c.state() for name, c in self.channels.items() if not c.ephemeral},
            [c.state() for c in self.channels.values() if c.ephemeral],
            self.dead_letters.moved_count,
            self.settings,
        )

    def saved(self, checkpoint: Checkpoint) -> None:
        """Act on a checkpoint that is on disk: publishing may go on, and dead letters that it lacks are confirmed."""
        if self.held_back:
            self.hold_back("")
        self.dead_letters.confirm_moved(checkpoint.moved_letters)

    def snapshot(self) -> dict[str, Any]:
        """The same at once, as JSON data: for a topic that nobody waits for."""
        checkpoint = self.checkpoint()
        for _ in checkpoint.encode():
            pass
        data: dict[str, Any] = json.loads(checkpoint.content)
        return data

    def restore(self, state: dict[str, Any] | None) -> bool:
        """Take up a snapshot, and what came into the log after it.

        Args:
            state: None if none was ever written: the topic then has its log and no channel.

        Returns:
            Whether the snapshot was ahead of the log, after a power cut with `--sync=interval`. Then save a new one
            before anything is published: sequences that the old one takes for finished are going to be used again.

        Raises:
            StateError: It is not a snapshot of this topic.
            LogReadError: The operating system refused.
        """
        end, scanned, ahead = self.view.end, self._first, False
        unconfirmed = scanned
        if state is not None:
            try:
                ahead = int(state["end"]) > end
                scanned = min(int(state["end"]), end)
                unconfirmed = min(int(state.get("settled", scanned)), scanned)
                self._take_up(state)
            except (KeyError, TypeError, ValueError, OverflowError, SettingsError) as exc:
                raise StateError(f"it lacks {exc}" if isinstance(exc, KeyError) else str(exc)) from exc
        self._scan(scanned, unconfirmed)
        self.distribute()
        return ahead

    def _scan(self, new: int, unconfirmed: int) -> None:
        """Look for what is not in the saved state, from one sequence on, and for dead letters, from another on."""
        for header in self.log.headers(min(new, unconfirmed)):
            metadata = b""
            if header.metadata_bytes:
                read = self.log.read(header.base_sequence, 1)
                metadata = next((r.metadata for r in read if r.base_sequence == header.base_sequence), b"")
            if header.due_ns and header.base_sequence >= new:
                sequences = range(header.base_sequence, header.next_sequence)
                self._undistributed.defer(Waiting(sequences, header.due_ns, only_channel(metadata)))
            if metadata and header.base_sequence >= (new if batch_number(metadata) else unconfirmed):
                self._record_metadata(metadata, header)

    def _take_up(self, state: dict[str, Any]) -> None:
        if state["format"] != STATE_FORMAT:
            raise StateError(f"its format is {state['format']}, this program reads {STATE_FORMAT}")
        if state["name"] != self.name:
            raise StateError(f"it is the state of topic {state['name']}")
        end = self.view.end
        self.paused = bool(state["paused"])
        self.configure(state.get("settings", {}))
        self.view.high_watermark = max(self._first, min(int(state["distribution_point"]), end))
        for first, after, due_ns, *only in state["waiting_deferred"]:
            if first < end:
                sequences = range(int(first), min(int(after), end))
                self._undistributed.defer(Waiting(sequences, int(due_ns), str(*only) if only else None))
        self.producers.restore(state.get("producers", []), state.get("producers_used", []), end)
        for channel_state in state["channels"]:
            channel = self._make_channel(str(channel_state["name"]), min(int(channel_state["cursor"]), end))
            channel.restore(channel_state, end)
            channel.messages.cursor.move_to(self._first)
            self.channels[channel.name] = channel
