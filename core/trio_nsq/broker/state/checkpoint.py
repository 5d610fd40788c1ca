"""Checkpoints: the saved state of a topic and its channels. They can be large, so they are encoded in steps."""

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from ...log import ALL_STABLE
from .batch import Batch
from .deferred import Block, DeferredMessages
from .in_flight_batch import InFlightCopy
from .producers import LastBatch
from .settings import TopicSettings
from .waiting_messages import PendingRange, WaitingMessages
from .withdrawn import WithdrawnMessage

STATE_FORMAT = 1
_CHANNEL_COST = 10
_STEP_COST = 1000
"""Cost of one step, in messages; a step takes about 0.5 ms."""


_ROWS_PER_STEP = 500
_PACKED_PER_ROW = 20
"""Encoding this many messages in a block costs as much as one row of JSON."""

Row = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class ChannelState:
    """A snapshot of a channel.

    Creating one costs only copies made in C; `encode` does the Python work for each message.

    Args:
        name, paused, settings, cursor: The channel's.
        holes, requeued, in_flight, deferred, withdrawn: Copies of the channel's; `in_flight` has one for each consumer.
            `encode` removes them.
        moved: How far the channel's stream of a move is stored at the target, see `MoveStream`; None if there is none,
            or if it has not begun.
        prefetched: The items of `ChannelMessages.prefetched`. `encode` removes them.
        ephemeral: The channel is not saved.
        idle_since_ns: Since when it has been idle, see `idleness.py`.

    Attributes:
        parts: The JSON object, in pieces: name, paused, settings (see `change`), cursor, moved, idle_since, holes
            [[start, end]], prefetched [[sequence, deliveries]] if there are any, unfinished [[sequence, attempts]],
            followed by a `Reason` if the attempts are exhausted, deferred [`Block.text`]. Empty until `encode` is
            complete.
        first_needed: The oldest sequence that the channel, or one restored from this, needs to read. Set by `encode`.
    """

    name: str
    paused: bool
    settings: dict[str, Any]
    cursor: int
    holes: Sequence[tuple[int, int]] = ()
    requeued: Sequence[tuple[int, int, Batch | None]] = ()
    in_flight: Sequence[InFlightCopy] = ()
    deferred: Sequence[Block] = ()
    withdrawn: Sequence[WithdrawnMessage] = ()
    moved: int | None = None
    prefetched: Sequence[tuple[int, int]] = ()
    ephemeral: bool = False
    idle_since_ns: int = 0
    parts: list[bytes] = field(init=False, default_factory=list)
    first_needed: int = field(init=False, default=0)

    def encode(self) -> Iterator[int]:
        """Set `parts` and `first_needed`, in steps; yields the number of messages of each step."""
        if self.parts:
            return
        holes = unfinished = "[]"
        needed = [self.cursor]
        if self.holes:
            holes, _ = yield from _encode_rows(iter(self.holes), 0)
        if self.requeued or self.in_flight or self.withdrawn:
            unfinished, lowest = yield from _encode_rows(self._unfinished(), 0)
            needed.append(lowest)
        prefetched = ""
        if self.prefetched:
            rows, _ = yield from _encode_rows(iter(self.prefetched), 0)
            prefetched = f'"prefetched":{rows},'
        blocks: list[bytes] = []
        for block in self.deferred:
            needed.append(min(block.sequence))
            blocks.append(f'{"," if blocks else ""}"{block.text()}"'.encode())
            yield len(block) // _PACKED_PER_ROW
        values = {"name": self.name, "paused": self.paused, "settings": self.settings, "cursor": self.cursor}
        values |= {"moved": self.moved} if self.moved is not None else {}
        values |= {"idle_since": self.idle_since_ns} if self.idle_since_ns else {}
        head = json.dumps(values, separators=(",", ":"))[:-1]
        before = f'{head},"holes":{holes},{prefetched}"unfinished":{unfinished},"deferred":['
        self.parts = [before.encode(), *blocks, b"]}"]
        self.first_needed = min(needed)
        self.holes = self.requeued = self.in_flight = self.deferred = self.withdrawn = self.prefetched = ()

    def sequences(self) -> Iterator[int]:
        """Yield the sequences of all unfinished and deferred messages, after `encode` has finished."""
        return unfinished_in(json.loads(b"".join(self.parts)))

    def _unfinished(self) -> Iterator[Row]:
        for sequence, attempts, _ in self.requeued:
            yield sequence, attempts
        for in_flight in self.in_flight:
            yield from in_flight
        for message in self.withdrawn:
            reason = () if message.reason is None else (message.reason.value,)
            yield message.sequence, message.attempts, *reason


def _encode_rows(rows: Iterator[Row], sequence_at: int) -> Generator[int, None, tuple[str, int]]:
    """Encode at least one row as a JSON array; yields the number of rows of each step.

    Returns:
        The array, and the lowest sequence in it.
    """
    texts: list[str] = []
    lowest: list[int] = []
    while step := list(islice(rows, _ROWS_PER_STEP)):
        lowest.append(min(row[sequence_at] for row in step))
        texts.append(json.dumps(step, separators=(",", ":"))[1:-1])
        yield len(step)
    return f"[{','.join(texts)}]", min(lowest)


@dataclass(eq=False)
class Checkpoint:
    """A snapshot of a topic, to be written to disk.

    It is a JSON object with these fields: format, name, paused, settings (see `change`), idle_since (see `idleness.py`;
    absent while in use), ahead_ns (how far the system clock is ahead of the clock of all other times here; absent if it
    is not), move (see `Move.state`; absent without one), distribution_point (the high watermark), end (of
    the topic), settled (a restart need not check dead letters before this sequence), producers_used (see
    `Producers.used_s`), ephemeral_needed (the oldest sequence that the ephemeral channels, which are not saved, may
    still read), waiting_deferred [[first, after last, due_ns]], followed by the channel if only one gets the messages,
    producers [[producer, number, sequence]] if there are any, producer_instances [[producer, instance, 0]] for those
    that have one, channels (see `ChannelState`).

    `Addition`s may follow, one a line.

    Args:
        head: The fields from format to producers_used.
        durable, ephemeral: The channels. Channels without changes since an earlier checkpoint are already encoded.
        moved_letters: Number of groups of dead letters that left the channels since the last checkpoint.
        settings: The settings in force after the checkpoint is saved.

    Attributes:
        parts: The object, in UTF-8, in pieces. Empty until `encode` is complete.
        first_needed: The oldest sequence that the topic, or one restored from this, needs to read. Set by `encode`.
        all_needed: The topic needs all messages from this sequence on, and only the channels' unfinished messages
            before it. Set by `encode`.
    """

    head: dict[str, Any]
    waiting: WaitingMessages
    producers: list[LastBatch]
    durable: list[ChannelState]
    ephemeral: list[ChannelState]
    moved_letters: int
    settings: TopicSettings
    parts: list[bytes] = field(init=False, default_factory=list)
    first_needed: int = field(init=False, default=0)
    all_needed: int = field(init=False, default=0)

    @property
    def names_batches(self) -> bool:
        """Whether this has producers' batch numbers. Then the log must be synced before this is on disk."""
        return bool(self.producers)

    def encode(self) -> Iterator[int]:
        """Set `parts`, `first_needed` and `all_needed`, in steps; yields the cost of each step.

        The event loop may serve other tasks between steps.
        """
        self.all_needed = min(int(self.head["distribution_point"]), int(self.head["settled"]))
        channels = self.durable + self.ephemeral
        waiting = "[]"
        if self.waiting:
            waiting, lowest = yield from _encode_rows(map(_row, self.waiting), 0)
            self.all_needed = min(self.all_needed, lowest)
        producers = ""
        if self.producers:
            rows, _ = yield from _encode_rows((each[:3] for each in self.producers), 2)
            producers = f',"producers":{rows}'
        if instances := [(each.producer, each.instance, 0) for each in self.producers if each.instance]:
            rows, _ = yield from _encode_rows(iter(instances), 2)
            producers += f',"producer_instances":{rows}'
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
        durable = min((channel.first_needed for channel in self.durable), default=self.all_needed)
        self.first_needed = min(self.all_needed, durable, ephemeral)
        head = json.dumps({**self.head, "ephemeral_needed": ephemeral}, separators=(",", ":"))
        self.parts = [f'{head[:-1]},"waiting_deferred":{waiting}{producers},"channels":['.encode()]
        for number, channel in enumerate(self.durable):
            if number:
                self.parts.append(b",")
            self.parts += channel.parts
        self.parts.append(b"]}")

    @property
    def content(self) -> bytes:
        return b"".join(self.parts)

    def unfinished_before(self, sequence: int) -> list[int]:
        """Return the unfinished messages of the channels before this sequence, ascending."""
        found: set[int] = set()
        for channel in chain(self.durable, self.ephemeral):
            if channel.first_needed < sequence:
                found.update(each for each in channel.sequences() if each < sequence)
        return sorted(found)


@dataclass(frozen=True, slots=True)
class Addition:
    """Channels that were created after a checkpoint, with nothing else that a restart needs to know.

    It is saved behind the checkpoint. A checkpoint for each new channel would write all others as well.

    Attributes:
        names: The channels.
        high_watermark: That of the topic when they were created, where they begin.
    """

    names: Sequence[str]
    high_watermark: int

    def encode(self) -> bytes:
        """Return a JSON object, in UTF-8."""
        data = {"created": self.names, "distribution_point": self.high_watermark}
        return json.dumps(data, separators=(",", ":")).encode()


ADDITIONS = "additions"
"""The field of a decoded state that has the additions behind the checkpoint; absent without one."""


def additions_of(state: dict[str, Any] | None) -> list[Addition]:
    """Return the additions behind a checkpoint. Raises KeyError, TypeError or ValueError if they are not valid."""
    found = state.get(ADDITIONS, ()) if state is not None else ()
    return [
        Addition([str(name) for name in each["created"]], int(each["distribution_point"])) for each in found
    ]


def without_messages(states: Sequence[dict[str, Any]]) -> bytes:
    """Return the state of a new topic that has what these states of topics with its name have, but no message.

    That is all channels, paused if one of them is, and the settings in the first state that has them.

    Raises:
        KeyError, TypeError, ValueError: One is not valid.
    """
    channels: dict[str, dict[str, Any]] = {}
    for state in states:
        created = ({"name": name} for each in additions_of(state) for name in each.names)
        for each in chain(state["channels"], created):
            channel = channels.setdefault(
                str(each["name"]), {"paused": False, "settings": dict(each.get("settings", {}))}
            )
            channel["paused"] |= bool(each.get("paused", False))
    topic = {
        "format": STATE_FORMAT,
        "name": states[0]["name"],
        "paused": any(bool(state["paused"]) for state in states),
        "settings": states[0].get("settings", {}),
        **dict.fromkeys(("distribution_point", "end", "settled", "ephemeral_needed"), 0),
        "waiting_deferred": [],
        "channels": [
            {"name": name, **channel, "cursor": 0, "holes": [], "unfinished": [], "deferred": []}
            for name, channel in channels.items()
        ],
    }
    return json.dumps(topic, separators=(",", ":")).encode()


def known_end(state: dict[str, Any]) -> int:
    """Return the sequence up to which a saved state knows of messages. Raises as `additions_of`."""
    return max(int(state["end"]), *(each.high_watermark for each in additions_of(state)), 0)


def _row(waiting: PendingRange) -> tuple[Any, ...]:
    only = () if waiting.channel is None else (waiting.channel,)
    return waiting.sequences.start, waiting.sequences.stop, waiting.due_ns, *only


def stable_end(state: dict[str, Any] | None) -> int:
    """Return the sequence up to which a saved state says that the log is on stable storage; 0 if there is no state."""
    end = state.get("end", 0) if state is not None else 0
    return end if isinstance(end, int) else ALL_STABLE


def unfinished_in(channel: dict[str, Any]) -> Iterator[int]:
    """Yield the sequences of all unfinished and deferred messages of a channel's saved state."""
    yield from (sequence for sequence, *_ in channel["unfinished"])
    yield from DeferredMessages.restore(channel["deferred"]).sequences()


def first_needed(state: dict[str, Any], is_carried: Callable[[int], bool] = lambda _: False) -> int:
    """Return the oldest sequence that a topic restored from this snapshot reads, except carried-forward ones."""
    needed = [int(state["distribution_point"]), int(state.get("settled", state["end"]))]
    needed += [int(start) for start, *_ in state["waiting_deferred"]]
    unfinished = [int(state["ephemeral_needed"])]
    for channel in state["channels"]:
        needed.append(int(channel["cursor"]))
        unfinished += unfinished_in(channel)
    return min(chain(needed, (sequence for sequence in unfinished if not is_carried(sequence))))
