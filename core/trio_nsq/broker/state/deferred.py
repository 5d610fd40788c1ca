"""Deferred messages: 18 bytes each, plus a small overhead for each block of them.

A channel may have millions of them, for months. So they are numbers in arrays, not objects. The arrays are short, so
that an insert in the middle is cheap, and checkpoints save them unchanged.
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Final

from ...log.record_metadata import due_by_other_clock
from .batch import Batch
from .version import Version

BLOCK_MESSAGES = 1024  # not Final: tests set it
_MAX_ATTEMPTS: Final = 0xFFFF
"""The largest number that a message frame can hold."""
_ROW_BYTES: Final = 8 + 8 + 2


Requeued = tuple[int, int, Batch | None]
"""(sequence, attempts so far, the batch that holds the message if it is only in memory)."""


@dataclass(slots=True, eq=False)
class Block:
    """A run of deferred messages: parallel arrays with one entry for each message. `due_ns` ascends.

    Attributes:
        lowest, highest: Bounds of the sequences in the block, not necessarily tight.
        shared: Another `DeferredMessages` or a checkpoint also uses this block, so it must not change.
    """

    due_ns: array[int]
    sequence: array[int]
    attempts: array[int]
    lowest: int = sys.maxsize
    highest: int = 0
    shared: bool = False

    def __len__(self) -> int:
        return len(self.due_ns)

    def __getitem__(self, part: slice) -> Block:
        return Block(self.due_ns[part], self.sequence[part], self.attempts[part], self.lowest, self.highest)

    def __delitem__(self, part: slice | int) -> None:
        del self.due_ns[part]
        del self.sequence[part]
        del self.attempts[part]

    def insert(self, at: int, due_ns: int, sequences: range, attempts: int) -> None:
        count = len(sequences)
        if sequences.start < self.lowest:
            self.lowest = sequences.start
        if sequences.stop > self.highest:
            self.highest = sequences.stop - 1
        if count == 1:
            self.due_ns.insert(at, due_ns)
            self.sequence.insert(at, sequences.start)
            self.attempts.insert(at, attempts)
            return
        self.due_ns[at:at] = array("Q", [due_ns]) * count
        self.sequence[at:at] = array("Q", sequences)
        self.attempts[at:at] = array("H", [attempts]) * count

    def select(self, wanted: list[bool]) -> Block:
        return Block(
            array("Q", compress(self.due_ns, wanted)),
            array("Q", compress(self.sequence, wanted)),
            array("H", compress(self.attempts, wanted)),
            self.lowest,
            self.highest,
        )

    def text(self) -> str:
        """Encode the block for a checkpoint: the three arrays in a row, little-endian, in Base64."""
        parts = [_little_endian(numbers).tobytes() for numbers in (self.due_ns, self.sequence, self.attempts)]
        return b64encode(b"".join(parts)).decode()

    @classmethod
    def from_text(cls, text: str) -> Block:
        """Decode the result of `text`. Raises ValueError, TypeError."""
        data = b64decode(text, validate=True)
        count, rest = divmod(len(data), _ROW_BYTES)
        if rest or not count:
            raise ValueError(f"{len(data)} bytes do not hold deferred messages")
        block = cls(array("Q"), array("Q"), array("H"))
        block.due_ns.frombytes(data[: 8 * count])
        block.sequence.frombytes(data[8 * count : 16 * count])
        block.attempts.frombytes(data[16 * count :])
        due_ns, sequence, attempts = map(_little_endian, (block.due_ns, block.sequence, block.attempts))
        return cls(due_ns, sequence, attempts, min(sequence), max(sequence))


def _little_endian(numbers: array[int]) -> array[int]:
    """Convert from the machine's byte order to little-endian, or back."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers


def _first_due_ns(block: Block) -> int:
    return block.due_ns[0]


class DeferredMessages:
    """The deferred messages of a channel, ordered by due time, then by arrival.

    Iterating yields (due_ns, sequence, attempts) in this order.

    Args:
        version: The channel's version; None for a copy, which is not saved.
        watch: Called with each new earliest due time; None for a copy.
    """

    def __init__(self, version: Version | None = None, watch: Callable[[int], None] | None = None) -> None:
        self._version = version or Version()
        self._watch = watch
        self._blocks: list[Block] = []  # none is empty
        self._count = 0
        self._held: dict[int, Batch] = {}  # by sequence, for messages that are only in memory

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        for block in self._blocks:
            yield from zip(block.due_ns, block.sequence, block.attempts, strict=True)

    @property
    def first_due_ns(self) -> int | None:
        """The earliest due time, Unix nanoseconds; None if there are no messages."""
        return self._blocks[0].due_ns[0] if self._blocks else None

    @property
    def last_due_ns(self) -> int | None:
        """The latest due time, Unix nanoseconds; None if there are no messages."""
        return self._blocks[-1].due_ns[-1] if self._blocks else None

    def counts_before(self, times_ns: Sequence[int]) -> list[int]:
        """Return for each of some times how many messages are due before it. Fast for any number of messages."""
        sums = [0, *accumulate(map(len, self._blocks))]
        counts = []
        for time_ns in times_ns:
            index = bisect_left(self._blocks, time_ns, key=_first_due_ns) - 1
            counts.append(sums[index] + bisect_left(self._blocks[index].due_ns, time_ns) if index >= 0 else 0)
        return counts

    def held(self, sequence: int) -> Batch | None:
        """Return the batch that holds a message, or None if the message is in the log."""
        return self._held.get(sequence)

    def sequences(self) -> Iterator[int]:
        for block in self._blocks:
            yield from block.sequence

    def sequences_before(self, sequence: int) -> list[int]:
        blocks = [block for block in self._blocks if block.lowest < sequence]
        return [each for block in blocks for each in block.sequence if each < sequence]

    def blocks(self) -> list[Block]:
        """Return all blocks, for reading in steps. Later changes may or may not be visible in them."""
        return self._blocks.copy()

    def selected(self, block: Block, wanted: list[bool]) -> tuple[Block, dict[int, Batch]]:
        """Return the wanted messages of a block, and the batches of those that are only in memory."""
        part = block[:] if all(wanted) else block.select(wanted)
        held = {each: self._held[each] for each in part.sequence if each in self._held} if self._held else {}
        return part, held

    def append(self, part: Block, held: dict[int, Batch]) -> None:
        """Append a block whose messages are due after all messages here. The caller must not change it afterwards."""
        if part:
            self._version.increment()
            self._blocks.append(part)
            self._count += len(part)
            self._held.update(held)

    def before(self, sequence: int) -> DeferredMessages:
        """Return a copy of the messages whose sequences are lower than this one."""
        messages = DeferredMessages()
        for block in self._blocks:
            if block.lowest < sequence:
                messages.append(*self.selected(block, list(map(sequence.__gt__, block.sequence))))
        return messages

    def merge(self, others: DeferredMessages) -> None:
        """Add all messages of `others`, which must not be used afterwards; fast if one of the two is small."""
        self._version.increment()
        if len(others) > len(self):
            self._blocks, others._blocks = others._blocks, self._blocks
            self._held, others._held = others._held, self._held
            self._count, others._count = others._count, self._count
        if self._watch is not None and self._blocks:
            self._watch(self._blocks[0].due_ns[0])
        for due_ns, sequence, attempts in others:
            self.add(due_ns, range(sequence, sequence + 1), attempts, others.held(sequence))

    def add(self, due_ns: int, sequences: range, attempts: int, held: Batch | None) -> None:
        """Defer messages, at least one, until `due_ns`.

        Args:
            sequences: Sequences of messages that are not deferred yet.
            attempts: How often each message was delivered; stored as at most 65535.
            held: The batch that holds them, if they are only in memory.
        """
        self._version.increment()
        self._count += len(sequences)
        if held is not None:
            self._held.update(dict.fromkeys(sequences, held))
        blocks, attempts = self._blocks, min(attempts, _MAX_ATTEMPTS)
        if not blocks or due_ns >= blocks[-1].due_ns[-1]:  # the usual case: most delays are equal
            if not blocks or len(blocks[-1].due_ns) >= BLOCK_MESSAGES:
                blocks.append(Block(array("Q"), array("Q"), array("H")))
            index = len(blocks) - 1
            at = len(blocks[index].due_ns)
        else:
            index = max(0, bisect_right(blocks, due_ns, key=_first_due_ns) - 1)
            at = bisect_right(blocks[index].due_ns, due_ns)
        block = self._changeable(index)
        block.insert(at, due_ns, sequences, attempts)
        if not (at or index) and self._watch is not None:
            self._watch(due_ns)
        if len(block.due_ns) > BLOCK_MESSAGES:
            half = BLOCK_MESSAGES // 2
            blocks[index : index + 1] = [block[at : at + half] for at in range(0, len(block), half)]

    def release(self, now_ns: int, at_most: int) -> list[Requeued]:
        """Remove and return the messages due by `now_ns`, the earliest first, at most `at_most` of them."""
        released: list[Requeued] = []
        whole = 0
        for block in self._blocks:
            count = bisect_right(block.due_ns, now_ns, hi=min(len(block), at_most - len(released)))
            released += self._take(block[:count])
            if count < len(block):
                if count:
                    del self._changeable(whole)[:count]
                break
            whole += 1
        del self._blocks[:whole]
        return released

    def withdraw(self, sequences: Collection[int]) -> list[Requeued]:
        """Remove and return the deferred messages among these, regardless of their due time."""
        wanted, ascending = set(sequences), sorted(sequences)
        released: list[Requeued] = []
        for number, block in enumerate(self._blocks):
            first = bisect_left(ascending, block.lowest)
            if (
                first == len(ascending)
                or ascending[first] > block.highest
                or wanted.isdisjoint(block.sequence)
            ):
                continue
            block = self._changeable(number)
            for index in reversed(range(len(block))):
                if block.sequence[index] in wanted:
                    wanted.discard(block.sequence[index])
                    released += self._take(block[index : index + 1])
                    del block[index]
        self._blocks = [block for block in self._blocks if len(block)]
        return released

    def returned(self) -> list[int]:
        """Return the sequences of the messages that have been delivered, or that are due at once."""
        return [sequence for due_ns, sequence, attempts in self if attempts or not due_ns]

    def drop_through(self, sequence: int) -> None:
        """Remove the messages up to this sequence, regardless of their due time."""
        kept: list[Block] = []
        for block in self._blocks:
            if block.lowest <= sequence:
                block = block.select(list(map(sequence.__lt__, block.sequence)))
                block.lowest = sequence + 1
            if len(block):
                kept.append(block)
        self._blocks = kept
        self._count = sum(map(len, kept))
        if self._held:
            self._held = {each: batch for each, batch in self._held.items() if each > sequence}
        self._version.increment()

    def _take(self, part: Block) -> Iterator[Requeued]:
        if part:
            self._version.increment()
        self._count -= len(part)
        for sequence, attempts in zip(part.sequence, part.attempts, strict=True):
            yield sequence, attempts, self._held.pop(sequence, None) if self._held else None

    def clear(self) -> None:
        self._version.increment()
        self._blocks.clear()
        self._held.clear()
        self._count = 0

    def copy(self) -> list[Block]:
        """Return a snapshot of all blocks. Its cost is proportional to the number of blocks, not messages."""
        for block in self._blocks:
            block.shared = True
        return self._blocks.copy()

    def _changeable(self, index: int) -> Block:
        """Return a block that may be changed; replaces a shared block by a copy."""
        block = self._blocks[index]
        if block.shared:
            block = self._blocks[index] = block[:]
        return block

    def clone(self) -> DeferredMessages:
        other = DeferredMessages()
        other._blocks, other._count, other._held = self.copy(), self._count, self._held.copy()
        return other

    @classmethod
    def restore(
        cls, texts: Iterable[str], log_end: int = sys.maxsize, behind_ns: int = 0
    ) -> DeferredMessages:
        """Restore the messages of a saved state.

        Args:
            texts: `Block.text` of each block.
            log_end: The end of the log. Messages from this sequence on are lost and are left out.
            behind_ns: How far the clock of the due times was behind today's clock of the broker.

        Raises:
            TypeError, ValueError: A text is damaged.
        """
        messages = cls()
        last_ns = 0
        for block in map(Block.from_text, texts):
            numbers = block.due_ns.tolist()
            if numbers[0] < last_ns or numbers != sorted(numbers):
                raise ValueError("deferred messages are not sorted by due time")
            last_ns = numbers[-1]
            if behind_ns:
                block.due_ns = array("Q", [due_by_other_clock(each, behind_ns) for each in numbers])
            for index in reversed(range(len(block))):
                if block.sequence[index] >= log_end:
                    del block[index]
            if len(block):
                messages._blocks.append(block)
                messages._count += len(block)
        return messages
