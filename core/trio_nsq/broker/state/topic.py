"""A topic: one log, its channels, and the high watermark.

The *high watermark* is the sequence up to which messages belong to the channels. It is the end of the topic,
except while the topic is paused or has no channel: then it does not move, and new messages wait beyond it for the
first channel or the end of the pause.

A *private channel* (see `Channel.private`) ignores the high watermark. It starts at the end of the topic and gets each
message when it is published, even while the topic is paused. It does not affect other channels, or messages that wait
for the first channel. It never makes a topic full; it loses its oldest messages instead.

The end of the topic is the end of the last records passed to `accept`.
"""

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Final

from ...log import Log, RecordBatch
from ...log.record_metadata import (
    batch_instance,
    batch_number,
    due_by_other_clock,
    is_of_dead_letters,
    only_channel,
)
from ...log.records import RecordHeader
from ...protocol import is_ephemeral
from .batch import make_batches
from .cache import BatchCache
from .channel import Channel
from .checkpoint import STATE_FORMAT, Addition, ChannelState, Checkpoint, additions_of, known_end
from .dead_letter_ledger import DeadLetterLedger
from .idleness import IN_USE, idle_since, idle_since_by_other_clock
from .message_store import MessageStore
from .producers import LastBatch, Producers
from .settings import ChannelSettings, SettingsError, TopicSettings, change
from .topic_limits import TopicLimits
from .topic_move import TopicMove
from .topic_view import TopicView
from .undistributed import UndistributedMessages, distribute_to
from .version import Version
from .waiting_messages import PendingRange

_NS_PER_MS: Final = 1_000_000
_SOON_NS: Final = 10_000_000_000
"""Messages deferred for at most this long stay in memory while there is room: reading one costs more than the rest of
its delivery. Later ones would take room from others."""


class StateError(ValueError):
    """A topic's saved state is damaged or has an unknown format."""


class Topic:
    """One topic: synchronous state, with no IO except reading its log.

    Args:
        log: Stores the messages; the topic does not close it.
        defaults: Settings that apply unless `configure` changes them; `expire_idle_ms` also to channels.

    Attributes:
        view: The part of its state that its channels use.
        moving: The move of its messages to another broker.
        paused: The topic does not distribute messages to its channels.
        ephemeral: The topic is only in memory.
        message_count: Messages published since the broker started.
        held_back: Why publishes are refused until the state is saved; empty: they are allowed.
        may_refuse: The topic can refuse publishes: it rejects when full, or is held back.
        producers: The last batch of each idempotent producer.
        carry_again_ns: When `Retention` may carry messages forward again, Unix nanoseconds, after this failed or freed
            too little; None: at once.
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
        self.ephemeral: bool = is_ephemeral(name)
        self._first = log.first_sequence
        self.version: Version = Version()
        self.view: TopicView = TopicView(
            name,
            self.ephemeral,
            e2e_window_ns,
            self._first,
            log.next_sequence,
            channel_defaults=ChannelSettings(expire_idle_ms=defaults.expire_idle_ms),
        )
        self.channels: dict[str, Channel] = {}
        self.store: MessageStore = MessageStore(name, log, cache, mem_queue_size, self.channels)
        self._defaults = defaults
        self.settings: TopicSettings = defaults
        self._own_settings: dict[str, Any] = {}  # by name
        self._private: dict[str, Channel] = {}  # subset of `channels`
        self._others: list[ChannelState] = []  # in a copy: of the channels that are not copied
        self._undistributed = UndistributedMessages(self.view, self.version)
        self.limits: TopicLimits = TopicLimits(
            self.view, log, self._undistributed, self.channels, self._private
        )
        self.moving: TopicMove = TopicMove(self.view, self._undistributed, self.channels, self.version)
        self.refuses_because: str = ""
        self.configure({})
        self.paused: bool = False
        self.message_count: int = 0
        self._on_deadline: Callable[[Channel, int], object] | None = None
        self._on_channels_changed: Callable[[Topic, Channel], object] | None = None
        self.carry_again_ns: int | None = None
        self._idle_since_ns = IN_USE  # as `examine_use` last found
        self.producers: Producers = Producers(self.version)
        self.dead_letters: DeadLetterLedger = DeadLetterLedger(self.version)

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Change settings by name; None restores the default. Raises SettingsError without changing any."""
        self.settings, self._own_settings = change(self._defaults, self._own_settings, changes)
        self.version.increment()
        self.view.ttl_ns = self.settings.ttl_ms * _NS_PER_MS
        self.view.is_limited = self.settings.is_limited
        self.limits.settings = self.settings
        self._update_may_refuse()

    def refuse_publishes(self, reason: str) -> None:
        """Refuse publishes with this reason until the state is saved; an empty reason allows them."""
        self.refuses_because = reason
        self._update_may_refuse()

    def _update_may_refuse(self) -> None:
        self.may_refuse: bool = bool(self.refuses_because) or (
            self.settings.is_limited and not self.settings.drops
        )

    @property
    def depth(self) -> int:
        """Number of messages that wait for a channel, or for the end of a pause."""
        return self._undistributed.depth

    @property
    def deferred_count(self) -> int:
        """Number of deferred messages that wait for a channel, or for the end of a pause. `depth` excludes them."""
        return self._undistributed.deferred_count

    @property
    def is_finished(self) -> bool:
        """Whether the log is no longer needed: no channel has a waiting, deferred or in-flight message."""
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

    def accept(self, records: Sequence[RecordBatch], ahead_ns: int = 0) -> None:
        """Add records that are now in the log: cache them decoded, and distribute them.

        Args:
            ahead_ns: How far the system clock, by which due times are in records, is ahead of the broker's.
        """
        view = self.view
        start, view.end = view.end, records[-1].next_sequence
        self._idle_since_ns = IN_USE
        self.version.increment()
        for record in records:
            self.message_count += record.count
            view.message_bytes += record.messages.body_bytes
            if record.metadata:
                self._record_metadata(record.metadata, record)
        if not (len(records) == 1 and self.store.extend_newest(records[0])):
            self._remember_all(records, ahead_ns)
        if self._private:
            self._distribute_to_private(start)
        self.distribute()
        self._follow_log()

    def _remember_all(self, records: Sequence[RecordBatch], ahead_ns: int) -> None:
        for batch in make_batches(records):
            if batch.due_ns:
                held = batch if self.ephemeral else None
                sequences = range(batch.base_sequence, batch.next_sequence)
                due_ns = due_by_other_clock(batch.due_ns, -ahead_ns)
                self._undistributed.defer(PendingRange(sequences, due_ns, batch.channel, held))
                if batch.due_ns - batch.timestamp_ns(0) <= _SOON_NS:
                    self.store.remember_deferred(batch)
            else:
                self.store.remember(batch)

    def _record_metadata(self, metadata: bytes, record: RecordBatch | RecordHeader) -> None:
        if batch := batch_number(metadata):
            last = LastBatch(*batch, record.base_sequence, batch_instance(metadata))
            self.producers.record(last, record.timestamp_ns)
        elif is_of_dead_letters(metadata):
            self.dead_letters.record_here(metadata, record.base_sequence)

    def _follow_log(self) -> None:
        """Follow the beginning of a bounded log, which drops its oldest messages."""
        if self.log.first_sequence > self._first:
            self._first = self.log.first_sequence
            self.view.high_watermark = max(self.view.high_watermark, self._first)
            for channel in self.channels.values():
                channel.messages.cursor.move_to(self._first)

    def distribute(self, until: int | None = None) -> None:
        """Give the channels the messages beyond the high watermark, or only those before a sequence.

        Does nothing if the topic is paused, is moved to another broker, or has no channel.
        """
        channels = self.limits.shared if self._private else self.channels.values()
        if self.paused or not channels or self.moving.current is not None:
            return
        count, deferred = self._undistributed.take(until)
        if deferred:
            distribute_to(channels, count, deferred)
        elif count:
            for channel in channels:
                channel.arrived(count)

    def _distribute_to_private(self, start: int) -> None:
        """Give the private channels the messages accepted from `start` on."""
        new = list(self._undistributed.waiting.since(start))
        count = self.view.end - start - sum(len(waiting.sequences) for waiting in new)
        distribute_to(self._private.values(), count, new)

    # ------------------------------------------------------------------ limits

    @property
    def oldest_waiting(self) -> int:
        """The oldest sequence that a channel has not delivered, or that waits for one; the end if there is none."""
        return self.limits.oldest_of(self.channels.values())

    @property
    def own_settings(self) -> Mapping[str, Any]:
        """The settings that are set, by name; the others have the broker's defaults."""
        return self._own_settings

    def settings_with(self, changes: Mapping[str, Any]) -> TopicSettings:
        """Return the settings that `configure` would apply. Raises SettingsError."""
        return change(self._defaults, self._own_settings, changes)[0]

    # ------------------------------------------------------------------ idle time

    @property
    def _is_in_use(self) -> bool:
        """Whether messages wait, or only the archive has some, or an operator holds the topic; without its channels."""
        return bool(
            self.paused
            or self.moving.current is not None
            or self.depth
            or self.deferred_count
            or self.log.archived_files
        )

    def examine_use(self, now_ns: int) -> None:
        """As `Channel.examine_use`, for the topic and its channels."""
        for channel in self.channels.values():
            channel.examine_use(now_ns)
        since_ns = idle_since(self._idle_since_ns, now_ns, in_use=self._is_in_use)
        if since_ns != self._idle_since_ns:
            self._idle_since_ns = since_ns
            self.version.increment()

    @property
    def idle_since_ns(self) -> int:
        """Since when the topic and all its channels have been idle, as `Channel.idle_since_ns`."""
        since_ns = [IN_USE if self._is_in_use else self._idle_since_ns]
        since_ns += [channel.idle_since_ns for channel in self.channels.values()]
        return max(since_ns) if all(since_ns) else IN_USE

    # ------------------------------------------------------------------ operators

    def add_channel(self, name: str, *, private: bool = False) -> Channel:
        """Return the channel of this name, creating it if it does not exist.

        A new channel starts at the high watermark; a new private channel, at the end of the topic. `private` does not
        change an existing channel.
        """
        channel = self.channels.get(name)
        if channel is not None:
            return channel
        if private:
            channel = self._make_channel(name, self.view.end, private=True)
            self.channels[name] = self._private[name] = channel
        else:
            channel = self.channels[name] = self._make_channel(name, self.view.high_watermark)
            self.moving.hold(channel)
            if not channel.ephemeral:
                self.version.increment()
            self.distribute()
        self._report(channel)
        return channel

    def _report(self, channel: Channel) -> None:
        if self._on_channels_changed is not None:
            self._on_channels_changed(self, channel)

    def _make_channel(self, name: str, cursor: int, *, private: bool = False) -> Channel:
        channel = Channel(self.view, self.store, name, cursor, Version(self.version), private=private)
        channel.on_deadline = self._on_deadline
        return channel

    def watch(
        self,
        on_deadline: Callable[[Channel, int], object],
        on_channels_changed: Callable[["Topic", Channel], object],
    ) -> None:
        """From now on, report changes; a copy of the topic reports none.

        Args:
            on_deadline: Called with all deadlines that may be the next one of a channel, also those that there are.
            on_channels_changed: Called with each channel that is added or removed, until the topic is closed.
        """
        self._on_deadline, self._on_channels_changed = on_deadline, on_channels_changed
        for channel in self.channels.values():
            channel.on_deadline = on_deadline
            if (deadline_ns := channel.next_deadline_ns) is not None:
                on_deadline(channel, deadline_ns)

    def remove_channel(self, channel: Channel) -> None:
        """Delete a channel: its messages are dropped, its consumers' connections closed."""
        if self.channels.get(channel.name) is channel:
            del self.channels[channel.name]
            channel.on_deadline = None
            self._private.pop(channel.name, None)
            for consumer in list(channel.consumers):
                channel.remove(consumer)
                consumer.subscriber.close()
            channel.empty()  # frees the messages now: a deadline may keep the channel in memory for a while
            self.version.increment()
            self._report(channel)

    def pause(self) -> None:
        self.paused = True
        self.version.increment()

    def unpause(self) -> None:
        self.paused = False
        self.version.increment()
        self.distribute()

    def empty(self) -> None:
        """Drop the messages beyond the high watermark; channels keep their messages."""
        for channel in self.limits.shared:
            channel.skip(self.view.high_watermark, self.view.end)
        self._undistributed.clear()
        self.moving.stream.plan = None

    def close(self) -> None:
        """Remove all channels and cached messages: the topic is being deleted, or the broker stops."""
        self._on_channels_changed = None
        self.dead_letters.confirm_moved(
            self.dead_letters.moved_count
        )  # no saved state contains them any more
        for channel in list(self.channels.values()):
            self.remove_channel(channel)
        self.store.clear()

    # ------------------------------------------------------------------ checkpoints

    def copy(self, names: Container[str]) -> "Topic":
        """Return a copy of the state that is saved: a change is made in it and saved, and then made in the topic.

        Args:
            names: The channels that the change may touch. The copy has only these, because there may be thousands; its
                checkpoint has the others as they are.
        """
        copy = Topic(self.name, self.log, self.store.cache, 0, defaults=self._defaults)
        copy._own_settings = self._own_settings
        copy.configure({})
        copy.paused = self.paused
        view = copy.view
        view.high_watermark, view.end = self.view.high_watermark, self.view.end
        view.waiting = self.view.waiting.copy()
        copy.moving.copy_from(self.moving)
        copy.producers.copy_from(self.producers)
        copy._idle_since_ns = self._idle_since_ns
        copy.dead_letters = self.dead_letters  # of letters in the log: no change touches it
        for name, channel in self.channels.items():
            if name not in names:
                copy._others.append(channel.state())
                continue
            copy.channels[name] = channel.copy(view)
            if channel.private:
                copy._private[name] = copy.channels[name]
        return copy

    def counterpart(self, channel: Channel) -> Channel:
        """Return a channel of this topic, or in a copy of the topic the copy of the channel."""
        return channel if channel.topic is self.view else self.channels[channel.name]

    def checkpoint(self, ahead_ns: int = 0) -> Checkpoint:
        """Return a snapshot. Arguments as `accept`."""
        channels = [*self._others, *[channel.state() for channel in self.channels.values()]]
        return Checkpoint(
            {
                "format": STATE_FORMAT,
                "name": self.name,
                "paused": self.paused,
                "settings": self._own_settings,
                **({"ahead_ns": ahead_ns} if ahead_ns else {}),
                **({"idle_since": self._idle_since_ns} if self._idle_since_ns else {}),
                **self.moving.state(),
                "distribution_point": self.view.high_watermark,
                "end": self.view.end,
                "settled": self.dead_letters.confirmed_before(self.view.end),
                "producers_used": self.producers.used_s(),
            },
            self._undistributed.waiting.copy(),
            self.producers.state(),
            [state for state in channels if not state.ephemeral],
            [state for state in channels if state.ephemeral],
            self.dead_letters.moved_count,
            self.settings,
        )

    def addition(self, names: Iterable[str]) -> Addition:
        """Return what is saved when channels are added, and nothing else changes.

        Args:
            names: The new channels. Those that are ephemeral, or that exist, are left out.
        """
        new = [name for name in dict.fromkeys(names) if name not in self.channels and not is_ephemeral(name)]
        return Addition(new, self.view.high_watermark)

    @property
    def can_save_additions(self) -> bool:
        """Whether an `addition` after the last checkpoint suffices to save new channels.

        It does not tell whether messages below the high watermark that still wait, see `TopicView.waiting`, are kept
        for the first channel, or only an ephemeral channel had them.
        """
        return self.moving.current is None and not self.refuses_because and not self.view.waiting

    def saved(self, checkpoint: Checkpoint) -> None:
        """Handle a checkpoint that is on disk: allow publishes, and confirm the dead letters it no longer has."""
        if self.refuses_because:
            self.refuse_publishes("")
        self.dead_letters.confirm_moved(checkpoint.moved_letters)

    def snapshot(self, ahead_ns: int = 0) -> dict[str, Any]:
        """Return a checkpoint as JSON data, encoded in one step. Blocks the event loop if the topic is large."""
        checkpoint = self.checkpoint(ahead_ns)
        for _ in checkpoint.encode():
            pass
        data: dict[str, Any] = json.loads(checkpoint.content)
        return data

    def restore(self, state: dict[str, Any] | None, ahead_ns: int = 0) -> bool:
        """Load a snapshot, and add the messages that the log received after it.

        Args:
            state: The snapshot; None if none was ever written: the topic has no channels then.
            ahead_ns: As in `accept`. Times in the snapshot become those of today's clock of the broker.

        Returns:
            Whether the snapshot is ahead of the log, after a power cut with `--sync=interval`. Then the caller must
            save a new one before any publish: sequences that the old one counts as finished will be used again.

        Raises:
            StateError: `state` is not a snapshot of this topic.
            LogReadError: The operating system failed to read.
        """
        end, scanned, ahead = self.view.end, self._first, False
        unconfirmed = scanned
        additions: list[Addition] = []
        if state is not None:
            try:
                additions = additions_of(state)
                ahead = known_end(state) > end
                scanned = min(int(state["end"]), end)
                unconfirmed = min(int(state.get("settled", scanned)), scanned)
                self._load(state, int(state.get("ahead_ns", 0)) - ahead_ns)
            except (KeyError, TypeError, ValueError, OverflowError, SettingsError) as exc:
                raise StateError(
                    f"the field {exc} is missing" if isinstance(exc, KeyError) else str(exc)
                ) from exc
        self._scan(scanned, unconfirmed, ahead_ns)
        if end > scanned:  # messages were published after the state was saved
            self._idle_since_ns = IN_USE
        for addition in additions:
            self._add_again(addition)
        self.distribute()
        return ahead

    def _add_again(self, addition: Addition) -> None:
        """Add channels that were created after the checkpoint. They do not get the messages from before."""
        sequence = min(addition.high_watermark, self.view.end)
        if self.channels:
            self.distribute(sequence)
            self.limits.pass_over(sequence)  # of a paused topic, these messages were dropped
        else:  # ephemeral channels, which are not saved, had those messages
            self._undistributed.drop_before(sequence)
        for name in addition.names:
            if name not in self.channels:
                self.channels[name] = self._make_channel(name, max(self._first, sequence))
                self.moving.hold(self.channels[name])

    def _scan(self, new: int, unconfirmed: int, ahead_ns: int) -> None:
        """Read the log after the saved state.

        Args:
            new: Finds deferred messages and batch numbers from this sequence on.
            unconfirmed: Finds dead letters from this sequence on.
            ahead_ns: As in `accept`.
        """
        for header in self.log.headers(min(new, unconfirmed)):
            metadata = b""
            if header.metadata_bytes:
                read = self.log.read(header.base_sequence, 1)
                metadata = next((r.metadata for r in read if r.base_sequence == header.base_sequence), b"")
            if header.due_ns and header.base_sequence >= new:
                sequences = range(header.base_sequence, header.next_sequence)
                due_ns = due_by_other_clock(header.due_ns, -ahead_ns)
                self._undistributed.defer(PendingRange(sequences, due_ns, only_channel(metadata)))
            if metadata and header.base_sequence >= (new if batch_number(metadata) else unconfirmed):
                self._record_metadata(metadata, header)

    def _load(self, state: dict[str, Any], behind_ns: int) -> None:
        """Load a snapshot. `behind_ns`: how far its clock was behind today's clock of the broker."""
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
                due_ns = due_by_other_clock(int(due_ns), behind_ns)
                self._undistributed.defer(PendingRange(sequences, due_ns, str(*only) if only else None))
        self.producers.restore(
            state.get("producers", []),
            state.get("producers_used", []),
            end,
            state.get("producer_instances", []),
        )
        for channel_state in state["channels"]:
            channel = self._make_channel(str(channel_state["name"]), min(int(channel_state["cursor"]), end))
            channel.restore(channel_state, end, behind_ns)
            channel.messages.cursor.move_to(self._first)
            self.channels[channel.name] = channel
        self.moving.restore(state.get("move"))
        self._idle_since_ns = idle_since_by_other_clock(int(state.get("idle_since", IN_USE)), behind_ns)
