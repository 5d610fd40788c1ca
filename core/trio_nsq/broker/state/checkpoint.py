"""What has to be kept of a topic and its channels, on its way to disk: as JSON, made in steps, for it may be large."""

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from .batch import Batch
from .deferred import Block, DeferredMessages, Waiting, WaitingMessages
from .in_flight import InFlightCopy
from .producers import LastBatch
from .settings import TopicSettings
from .withdrawn import Withdrawn

STATE_FORMAT = 1
_CHANNEL_COST = 10
_STEP_COST = 1000
"""A message counts 1: a step takes about half a millisecond."""


_ROWS_PER_STEP = 500
_PACKED_PER_ROW = 20
"""So many messages in a block cost as much as one in a row of JSON."""

Row = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class ChannelState:
    """A channel at one moment.

    Making one costs no more than the copies that C makes; what costs Python work for each message is left to `encode`.

    Args:
        name, paused, settings, cursor: The channel's.
        holes, requeued, in_flight, deferred, withdrawn: Copies of the channel's; `in_flight` is that of each consumer.
            None of them is here any more after `encode`.

    Attributes:
        parts: The JSON object, in pieces: name, paused, settings (see `change`), cursor, holes [[start, end]],
            unfinished [[sequence, attempts]], with a `Reason` behind them where the message was given up, deferred
            [`Block.text`]. Empty until `encode` has come to its end.
        first_needed: The oldest sequence that the channel, or one restored from this, would read; likewise.
    """

    name: str
    paused: bool
    settings: dict[str, Any]
    cursor: int
    holes: Sequence[tuple[int, int]] = ()
    requeued: Sequence[tuple[int, int, Batch | None]] = ()
    in_flight: Sequence[InFlightCopy] = ()
    deferred: Sequence[Block] = ()
    withdrawn: Sequence[Withdrawn] = ()
    parts: list[bytes] = field(init=False, default_factory=list)
    first_needed: int = field(init=False, default=0)

    def encode(self) -> Iterator[int]:
        """Set `parts` and `first_needed`, in steps; yields after each how many messages it was about."""
        if self.parts:
            return
        holes = unfinished = "[]"
        needed = [self.cursor]
        if self.holes:
            holes, _ = yield from _encode_rows(iter(self.holes), 0)
        if self.requeued or self.in_flight or self.withdrawn:
            unfinished, lowest = yield from _encode_rows(self._unfinished(), 0)
            needed.append(lowest)
        blocks: list[bytes] = []
        for block in self.deferred:
            needed.append(min(block.sequence))
            blocks.append(f'{"," if blocks else ""}"{block.text()}"'.encode())
            yield len(block) // _PACKED_PER_ROW
        values = {"name": self.name, "paused": self.paused, "settings": self.settings, "cursor": self.cursor}
        head = json.dumps(values, separators=(",", ":"))[:-1]
        before = f'{head},"holes":{holes},"unfinished":{unfinished},"deferred":['
        self.parts = [before.encode(), *blocks, b"]}"]
        self.first_needed = min(needed)
        self.holes = self.requeued = self.in_flight = self.deferred = self.withdrawn = ()

    def sequences(self) -> Iterator[int]:
        """Of all that is unfinished or deferred, once `encode` has come to its end."""
        state = json.loads(b"".join(self.parts))
        yield from (sequence for sequence, *_ in state["unfinished"])
        yield from DeferredMessages.restore(state["deferred"]).sequences()

    def _unfinished(self) -> Iterator[Row]:
        for sequence, attempts, _ in self.requeued:
            yield sequence, attempts
        for in_flight in self.in_flight:
            yield from in_flight
        for message in self.withdrawn:
            reason = () if message.reason is None else (message.reason.value,)
            yield message.sequence, message.attempts, *reason


def _encode_rows(rows: Iterator[Row], sequence_at: int) -> Generator[int, None, tuple[str, int]]:
    """Rows, at least one, as a JSON array, and the lowest sequence in them; yields after each step how many it was."""
    texts: list[str] = []
    lowest: list[int] = []
    while step := list(islice(rows, _ROWS_PER_STEP)):
        lowest.append(min(row[sequence_at] for row in step))
        texts.append(json.dumps(step, separators=(",", ":"))[1:-1])
        yield len(step)
    return f"[{','.join(texts)}]", min(lowest)


@dataclass(eq=False)
class Checkpoint:
    """A topic at one moment, on its way to disk.

    It is a JSON object: format, name, paused, settings (see `change`), distribution_point, end (of the topic), settled
    (no dead letter before this sequence has to be looked at at a restart), producers_used (see `Producers.used_s`),
    ephemeral_needed (the oldest sequence that the ephemeral channels, which are not kept, may yet have to read),
    waiting_deferred [[first, after last, due_ns]], with the channel behind them if only one is to get the messages,
    producers [`LastBatch`] if there are any, channels (see `ChannelState`).

    Args:
        head: The first seven of these.
        durable, ephemeral: The channels. Those that have not changed since an earlier checkpoint are encoded already.
        moved_letters: How many dead letters have left the channels since the last checkpoint.
        settings: Those that are in force once it is saved.

    Attributes:
        parts: The object, in UTF-8, in pieces. Empty until `encode` has come to its end.
        first_needed: The oldest sequence that the topic, or one restored from this, would read; likewise.
        all_needed: The sequence from which on it would read all that comes; before it only those messages of its
            channels that are unfinished; likewise.
    """

    head: dict[str, Any]
    waiting: WaitingMessages
    producers: list[LastBatch]
    durable: dict[str, ChannelState]
    ephemeral: list[ChannelState]
    moved_letters: int
    settings: TopicSettings
    parts: list[bytes] = field(init=False, default_factory=list)
    first_needed: int = field(init=False, default=0)
    all_needed: int = field(init=False, default=0)

    @property
    def names_batches(self) -> bool:
        """It tells what producers have published, so the log has to have that before this is on disk."""
        return bool(self.producers)

    def change_topic(self, **fields: Any) -> None:
        """Save other values of the topic's own fields, named as above."""
        self.head.update(fields)

    def change_channel(self, state: ChannelState) -> None:
        self.durable[state.name] = state

    def add_channel(self, name: str) -> None:
        """Save a new channel, as `Topic.add_channel` makes it."""
        self.change_channel(ChannelState(name, False, {}, int(self.head["distribution_point"])))

    def remove_channel(self, name: str) -> None:
        self.durable.pop(name, None)

    def forget_producer(self, producer: str) -> None:
        known = [last.producer for last in self.producers]
        if producer in known:
            at = known.index(producer)
            del self.producers[at], self.head["producers_used"][at]

    def forget_waiting(self) -> None:
        """Save no message that waits for its time behind the high watermark."""
        self.waiting = WaitingMessages()

    def encode(self) -> Iterator[int]:
        """Set `parts` and `first_needed`, in steps between which others may have their turn; yields their sizes."""
        self.all_needed = min(int(self.head["distribution_point"]), int(self.head["settled"]))
        durable_channels = list(self.durable.values())
        channels = durable_channels + self.ephemeral
        waiting = "[]"
        if self.waiting:
            waiting, lowest = yield from _encode_rows(map(_row, self.waiting), 0)
            self.all_needed = min(self.all_needed, lowest)
        producers = ""
        if self.producers:
            rows, _ = yield from _encode_rows(iter(self.producers), 2)
            producers = f',"producers":{rows}'
        self.all_needed = min([self.all_needed, *(channel.cursor for channel in channels)])
        cost = 0
        for channel in channels:
            if channel.parts:
                continue
            for messages in channel.encode():
                cost += messages
                if cost >= _STEP_COST:
                    yield cost
                    cost = 0
            cost += _CHANNEL_COST
        ephemeral = min((channel.first_needed for channel in self.ephemeral), default=self.head["end"])
        durable = min((channel.first_needed for channel in durable_channels), default=self.all_needed)
        self.first_needed = min(self.all_needed, durable, ephemeral)
        head = json.dumps({**self.head, "ephemeral_needed": ephemeral}, separators=(",", ":"))
        self.parts = [f'{head[:-1]},"waiting_deferred":{waiting}{producers},"channels":['.encode()]
        for number, channel in enumerate(durable_channels):
            if number:
                self.parts.append(b",")
            self.parts += channel.parts
        self.parts.append(b"]}")

    @property
    def content(self) -> bytes:
        return b"".join(self.parts)

    def unfinished_before(self, sequence: int) -> list[int]:
        """The messages before `all_needed`, and before this, that it would read; ascending."""
        found: set[int] = set()
        for channel in chain(self.durable.values(), self.ephemeral):
            if channel.first_needed < sequence:
                found.update(each for each in channel.sequences() if each < sequence)
        return sorted(found)


def _row(waiting: Waiting) -> tuple[Any, ...]:
    only = () if waiting.channel is None else (waiting.channel,)
    return waiting.sequences.start, waiting.sequences.stop, waiting.due_ns, *only


def first_needed(state: dict[str, Any], is_carried: Callable[[int], bool] = lambda _: False) -> int:
    """The oldest sequence that a topic restored from this snapshot would read, but for those carried forward."""
    needed = [int(state["distribution_point"]), int(state.get("settled", state["end"]))]
    needed += [int(start) for start, *_ in state["waiting_deferred"]]
    unfinished = [int(state["ephemeral_needed"])]
    for channel in state["channels"]:
        needed.append(int(channel["cursor"]))
        unfinished += [sequence for sequence, *_ in channel["unfinished"]]
        unfinished += DeferredMessages.restore(channel["deferred"]).sequences()
    return min(chain(needed, (sequence for sequence in unfinished if not is_carried(sequence))))
