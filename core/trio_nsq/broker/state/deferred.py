"""Messages that wait for their time: 18 bytes each, and little more for what they lie in.

There may be millions of them, for months. So they are numbers in arrays, and not objects; the arrays are short enough
that putting a number into the middle of one costs next to nothing, and are saved as they are.
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from itertools import compress
from typing import NamedTuple

from .batch import Batch

_BLOCK_MESSAGES = 1024
_MAX_ATTEMPTS = 0xFFFF
"""All that a message frame has room for, too."""
_ROW_BYTES = 8 + 8 + 2


class Released(NamedTuple):
    """A message that waits no longer: its sequence, its attempts so far, and its batch if only memory has it."""

    sequence: int
    attempts: int
    held: Batch | None


class Block:
    """Messages next to each other, a number of each in every array; `due_ns` ascends.

    Attributes:
        lowest, highest: No sequence is lower or higher.
        shared: More than one `DeferredMessages`, or a checkpoint, has this block. It does not change any more.
    """

    __slots__ = ("attempts", "due_ns", "highest", "lowest", "sequence", "shared")

    def __init__(
        self,
        due_ns: array[int],
        sequence: array[int],
        attempts: array[int],
        lowest: int = sys.maxsize,
        highest: int = 0,
    ) -> None:
        self.due_ns = due_ns
        self.sequence = sequence
        self.attempts = attempts
        self.lowest = lowest
        self.highest = highest
        self.shared = False

    def __len__(self) -> int:
        return len(self.due_ns)

    def __getitem__(self, part: slice) -> Block:
        return Block(self.due_ns[part], self.sequence[part], self.attempts[part], self.lowest, self.highest)

    def __delitem__(self, part: slice | int) -> None:
        del self.due_ns[part]
        del self.sequence[part]
        del self.attempts[part]

    def insert(self, at: int, due_ns: int, sequences: range, attempts: int) -> None:
        """Put messages that are due together before the one at a place."""
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
        """Those of its messages for which that is true."""
        return Block(
            array("Q", compress(self.due_ns, wanted)),
            array("Q", compress(self.sequence, wanted)),
            array("H", compress(self.attempts, wanted)),
            self.lowest,
            self.highest,
        )

    def text(self) -> str:
        """As it is saved: the arrays one behind the other, little-endian, in Base64."""
        parts = [_little_endian(numbers).tobytes() for numbers in (self.due_ns, self.sequence, self.attempts)]
        return b64encode(b"".join(parts)).decode()

    @classmethod
    def from_text(cls, text: str) -> Block:
        """What `text` gave. Raises ValueError, TypeError."""
        data = b64decode(text, validate=True)
        count, rest = divmod(len(data), _ROW_BYTES)
        if rest or not count:
            raise ValueError(f"{len(data)} bytes are no deferred messages")
        block = cls(array("Q"), array("Q"), array("H"))
        block.due_ns.frombytes(data[: 8 * count])
        block.sequence.frombytes(data[8 * count : 16 * count])
        block.attempts.frombytes(data[16 * count :])
        due_ns, sequence, attempts = map(_little_endian, (block.due_ns, block.sequence, block.attempts))
        return cls(due_ns, sequence, attempts, min(sequence), max(sequence))


def _little_endian(numbers: array[int]) -> array[int]:
    """From the machine's order of bytes to this one, or back."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers


def _first_due_ns(block: Block) -> int:
    return block.due_ns[0]


class DeferredMessages:
    """The deferred messages of a channel, by their time; those of the same time in the order in which they came.

    Iterating gives (due_ns, sequence, attempts) of each, in this order.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []  # none is empty
        self._count = 0
        self._held: dict[int, Batch] = {}  # by sequence, where nothing but memory has the message

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        for block in self._blocks:
            yield from zip(block.due_ns, block.sequence, block.attempts, strict=True)

    @property
    def first_due_ns(self) -> int | None:
        """When the first is due; None if there is none."""
        return self._blocks[0].due_ns[0] if self._blocks else None

    def held(self, sequence: int) -> Batch | None:
        """The batch that a message is in, if nothing but memory has it."""
        return self._held.get(sequence)

    def sequences(self) -> Iterator[int]:
        """The sequence of each, in the same order."""
        for block in self._blocks:
            yield from block.sequence

    def sequences_before(self, sequence: int) -> list[int]:
        """Those that are lower than this one."""
        blocks = [block for block in self._blocks if block.lowest < sequence]
        return [each for block in blocks for each in block.sequence if each < sequence]

    def blocks(self) -> list[Block]:
        """Return all of them, to be looked at in steps. Later changes may show or not; new messages may be missing."""
        return self._blocks.copy()

    def selected(self, block: Block, wanted: list[bool]) -> tuple[Block, dict[int, Batch]]:
        """Some of a block's messages, and the batches of those that nothing but memory has."""
        part = block[:] if all(wanted) else block.select(wanted)
        held = {each: self._held[each] for each in part.sequence if each in self._held} if self._held else {}
        return part, held

    def append(self, part: Block, held: dict[int, Batch]) -> None:
        """Take over messages, in order: what is here was due before them. Nobody else changes the block any more."""
        if part:
            self._blocks.append(part)
            self._count += len(part)
            self._held.update(held)

    def before(self, sequence: int) -> DeferredMessages:
        """Those whose sequences are lower than this one, as they are now."""
        messages = DeferredMessages()
        for block in self._blocks:
            if block.lowest < sequence:
                messages.append(*self.selected(block, list(map(sequence.__gt__, block.sequence))))
        return messages

    def merge(self, others: DeferredMessages) -> None:
        """Add all of the others'; they are few, or these are."""
        if len(others) > len(self):
            self._blocks, others._blocks = others._blocks, self._blocks
            self._held, others._held = others._held, self._held
            self._count, others._count = others._count, self._count
        for due_ns, sequence, attempts in others:
            self.add(due_ns, range(sequence, sequence + 1), attempts, others.held(sequence))

    def add(self, due_ns: int, sequences: range, attempts: int, held: Batch | None) -> None:
        """Let messages, at least one, wait until `due_ns`.

        Args:
            due_ns: Unix nanoseconds.
            sequences: Of messages that do not wait yet.
            attempts: How often each of them was delivered; from 65535 on nobody counts any more.
            held: The batch they are in, if nothing but memory has it.
        """
        self._count += len(sequences)
        if held is not None:
            self._held.update(dict.fromkeys(sequences, held))
        blocks, attempts = self._blocks, min(attempts, _MAX_ATTEMPTS)
        if not blocks or due_ns >= blocks[-1].due_ns[-1]:  # most often, for most delays are the same
            if not blocks or len(blocks[-1].due_ns) >= _BLOCK_MESSAGES:
                blocks.append(Block(array("Q"), array("Q"), array("H")))
            index = len(blocks) - 1
            at = len(blocks[index].due_ns)
        else:
            index = max(0, bisect_right(blocks, due_ns, key=_first_due_ns) - 1)
            at = bisect_right(blocks[index].due_ns, due_ns)
        block = self._changeable(index)
        block.insert(at, due_ns, sequences, attempts)
        if len(block.due_ns) > _BLOCK_MESSAGES:
            half = _BLOCK_MESSAGES // 2
            blocks[index : index + 1] = [block[at : at + half] for at in range(0, len(block), half)]

    def release(self, now_ns: int, at_most: int) -> list[Released]:
        """Let go of those that are due, the earliest first."""
        released: list[Released] = []
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

    def withdraw(self, sequences: Collection[int]) -> list[Released]:
        """Let go of those of these messages that are here, whenever they are due."""
        wanted, ascending = set(sequences), sorted(sequences)
        released: list[Released] = []
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

    def _take(self, part: Block) -> Iterator[Released]:
        self._count -= len(part)
        for sequence, attempts in zip(part.sequence, part.attempts, strict=True):
            yield Released(sequence, attempts, self._held.pop(sequence, None) if self._held else None)

    def clear(self) -> None:
        """Forget all."""
        self._blocks.clear()
        self._held.clear()
        self._count = 0

    # ------------------------------------------------------------------ checkpoints

    def copy(self) -> list[Block]:
        """Return all of them as they are now; later changes do not show. What it costs depends on the blocks alone."""
        for block in self._blocks:
            block.shared = True
        return self._blocks.copy()

    def _changeable(self, index: int) -> Block:
        """Return a block that nobody else has; it takes the place of one that is shared."""
        block = self._blocks[index]
        if block.shared:
            block = self._blocks[index] = block[:]
        return block

    def clone(self) -> DeferredMessages:
        """The same; later changes of this one do not show in it."""
        other = DeferredMessages()
        other._blocks, other._count, other._held = self.copy(), self._count, self._held.copy()
        return other

    @classmethod
    def restore(cls, texts: Iterable[str], log_end: int = sys.maxsize) -> DeferredMessages:
        """Those of a saved state.

        Args:
            texts: `Block.text` of each block.
            log_end: Messages from this sequence on are lost.

        Raises:
            TypeError, ValueError: That is none.
        """
        messages = cls()
        last_ns = 0
        for block in map(Block.from_text, texts):
            numbers = block.due_ns.tolist()
            if numbers[0] < last_ns or numbers != sorted(numbers):
                raise ValueError("deferred messages that are not in the order of their times")
            last_ns = numbers[-1]
            for index in reversed(range(len(block))):
                if block.sequence[index] >= log_end:
                    del block[index]
            if len(block):
                messages._blocks.append(block)
                messages._count += len(block)
        return messages


class Waiting(NamedTuple):
    """Messages of a topic that its channels have not got yet, and that are not to be read from the log in their turn.

    Attributes:
        sequences: Next to each other.
        due_ns: When they may be delivered, Unix nanoseconds.
        channel: The only channel that gets them; None: all do.
        held: The batch that holds them, if nothing but memory has it.
    """

    sequences: range
    due_ns: int
    channel: str | None = None
    held: Batch | None = None


class WaitingMessages:
    """All of these, in the order of their sequences."""

    def __init__(self) -> None:
        self._start = array("Q")
        self._count = array("Q")
        self._due_ns = array("Q")
        # By the first sequence, of those that have it.
        self._channel: dict[int, str] = {}
        self._held: dict[int, Batch] = {}
        self._messages = 0

    def __len__(self) -> int:
        return len(self._start)

    def __iter__(self) -> Iterator[Waiting]:
        return self.since(0)

    def since(self, sequence: int) -> Iterator[Waiting]:
        """Those that begin at `sequence` or later."""
        for index in range(bisect_left(self._start, sequence), len(self._start)):
            start, count, due_ns = self._start[index], self._count[index], self._due_ns[index]
            yield Waiting(
                range(start, start + count), due_ns, self._channel.get(start), self._held.get(start)
            )

    def add(self, waiting: Waiting) -> None:
        """Remember messages; their sequences are larger than all before."""
        start = waiting.sequences.start
        self._start.append(start)
        self._count.append(len(waiting.sequences))
        self._due_ns.append(waiting.due_ns)
        self._messages += len(waiting.sequences)
        if waiting.channel is not None:
            self._channel[start] = waiting.channel
        if waiting.held is not None:
            self._held[start] = waiting.held

    def messages_from(self, sequence: int) -> int:
        """How many messages there are whose sequence is not below this one."""
        before = bisect_left(self._start, sequence)
        return self._messages - sum(self._count[:before])

    def copy(self) -> WaitingMessages:
        """The same; what becomes of them later does not show."""
        other = WaitingMessages()
        other._start, other._count, other._due_ns = self._start[:], self._count[:], self._due_ns[:]
        other._channel, other._held, other._messages = self._channel.copy(), {}, self._messages
        return other
