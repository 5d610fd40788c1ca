"""What has to be kept of a channel, as JSON, made in steps: it may have a million messages in flight."""

import json
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from typing import Any

from .batch import Batch
from .deferred import Block, DeferredMessages
from .in_flight import InFlightCopy
from .withdrawn import Withdrawn

_ROWS_PER_STEP = 500
_PACKED_PER_ROW = 20
"""So many messages in a block cost as much as one in a row of JSON."""

Row = tuple[Any, ...]


class ChannelState:
    """A channel at one moment.

    Making one costs no more than the copies that C makes; what costs Python work for each message is left to `encode`.

    Args:
        name, paused, settings, cursor: The channel's.
        holes, requeued, in_flight, deferred, withdrawn: Copies of the channel's, which become this object's own;
            `in_flight` is that of each consumer.

    Attributes:
        parts: The JSON object, in pieces: name, paused, settings (see `change`), cursor, holes [[start, end]],
            unfinished [[sequence, attempts]], with a `Reason` behind them where the message was given up, deferred
            [`Block.text`]. None until `encode` has come to its end.
        first_needed: The oldest sequence that the channel, or one restored from this, would read; likewise.
        name, cursor: The channel's.
    """

    __slots__ = (
        "_deferred",
        "_head",
        "_holes",
        "_in_flight",
        "_requeued",
        "_withdrawn",
        "cursor",
        "first_needed",
        "name",
        "parts",
    )

    def __init__(
        self,
        name: str,
        paused: bool,
        settings: dict[str, Any],
        cursor: int,
        holes: Sequence[tuple[int, int]] = (),
        requeued: Sequence[tuple[int, int, Batch | None]] = (),
        in_flight: Sequence[InFlightCopy] = (),
        deferred: Sequence[Block] = (),
        withdrawn: Sequence[Withdrawn] = (),
    ) -> None:
        self.parts: list[bytes] = []
        self.name = name
        self.first_needed = self.cursor = cursor
        self._head = name, paused, settings
        self._holes = holes
        self._requeued = requeued
        self._in_flight = in_flight
        self._deferred = deferred
        self._withdrawn = withdrawn

    def encode(self) -> Iterator[int]:
        """Set `parts` and `first_needed`, in steps; yields after each how many messages it was about."""
        if self.parts:
            return
        holes = unfinished = "[]"
        if self._holes:
            holes, _ = yield from encode_rows(iter(self._holes), 0)
        if self._requeued or self._in_flight or self._withdrawn:
            unfinished, lowest = yield from encode_rows(self._unfinished(), 0)
            self.first_needed = min(self.first_needed, lowest)
        blocks: list[bytes] = []
        for block in self._deferred:
            self.first_needed = min(self.first_needed, min(block.sequence))
            blocks.append(f'{"," if blocks else ""}"{block.text()}"'.encode())
            yield len(block) // _PACKED_PER_ROW
        name, paused, settings = self._head
        values = {"name": name, "paused": paused, "settings": settings, "cursor": self.cursor}
        head = json.dumps(values, separators=(",", ":"))[:-1]
        before = f'{head},"holes":{holes},"unfinished":{unfinished},"deferred":['
        self.parts = [before.encode(), *blocks, b"]}"]
        self._holes = self._requeued = self._in_flight = self._deferred = self._withdrawn = ()

    def sequences(self) -> Iterator[int]:
        """Of all that is unfinished or deferred, once `encode` has come to its end."""
        state = json.loads(b"".join(self.parts))
        yield from (sequence for sequence, *_ in state["unfinished"])
        yield from DeferredMessages.restore(state["deferred"]).sequences()

    def _unfinished(self) -> Iterator[Row]:
        for sequence, attempts, _ in self._requeued:
            yield sequence, attempts
        for in_flight in self._in_flight:
            yield from in_flight
        for message in self._withdrawn:
            reason = () if message.reason is None else (message.reason.value,)
            yield message.sequence, message.attempts, *reason


def encode_rows(rows: Iterator[Row], sequence_at: int) -> Generator[int, None, tuple[str, int]]:
    """Rows, at least one, as a JSON array, and the lowest sequence in them; yields after each step how many it was."""
    texts: list[str] = []
    lowest: list[int] = []
    while step := list(islice(rows, _ROWS_PER_STEP)):
        lowest.append(min(row[sequence_at] for row in step))
        texts.append(json.dumps(step, separators=(",", ":"))[1:-1])
        yield len(step)
    return f"[{','.join(texts)}]", min(lowest)
