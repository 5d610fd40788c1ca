"""Order by key: a channel has at most one message of a key in flight, and delivers them by sequence.

The first message of a key that is delivered *holds* the key until it leaves the channel: it is finished, dropped, or
stored as a dead letter. While it is requeued, deferred by REQ or withdrawn it still holds the key. Messages of a key
that is held are *blocked*: the cursor passes them, and they wait here. When the key is released, the blocked message
with the lowest sequence holds it next, and joins the requeued messages of the channel.

So all requeued messages can be delivered, except those whose keys are not known yet: they were restored, or were
deferred by their producer. Such a message gets its place when the dispatcher reads it.

Blocked messages cost memory, so their number is limited. At the limit, the cursor stops until some are released.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from typing import Final

from .batch import MERGE_BYTES, Batch
from .deferred import BLOCK_MESSAGES, Block, Requeued
from .message_keys import Key, MessageKeys
from .version import Version

MAX_BLOCKED = 100_000  # not Final: tests set it
"""Maximum number of blocked messages of a channel; 60 bytes each. A checkpoint copies them in some milliseconds."""
MAX_HELD_BYTES = 64 * 1024 * 1024  # not Final: tests set it
"""Maximum memory of the batches that hold blocked messages of an ephemeral topic, about as much as its log has."""
_NO_KEY: Final = "no key"
"""Holds all blocked messages in a copy, whose keys do not matter."""


def _held_size(batch: Batch) -> int:
    """Return the size that a batch has now, or may grow to."""
    return max(batch.size_bytes, MERGE_BYTES)


class KeyOrder:
    """The keys that are held in one channel, and the blocked messages.

    Attributes:
        keys: Reads the keys.
        blocked_count: Number of blocked messages.
    """

    __slots__ = (
        "_attempts",
        "_batch",
        "_batch_keys",
        "_behind",
        "_held",
        "_held_bytes",
        "_held_counts",
        "_released",
        "_returned",
        "_unread",
        "_version",
        "blocked_count",
        "keys",
    )

    def __init__(self, keys: MessageKeys, version: Version) -> None:
        self.keys: MessageKeys = keys
        self.blocked_count: int = 0
        self._version = version
        # All keys that are held, with a heap of the blocked sequences; None: there are none.
        self._behind: dict[Key, list[int] | None] = {}
        # The messages that hold keys, besides those in flight: they were blocked, and are ready now; and the others.
        self._released: dict[int, Key] = {}
        self._returned: dict[int, Key] = {}
        # Requeued messages whose keys must be known before the cursor moves on: they may have the same keys.
        self._unread: set[int] = set()
        # Of blocked messages: attempts other than 0, and the batches that hold those that are only in memory.
        self._attempts: dict[int, int] = {}
        self._held: dict[int, Batch] = {}
        self._held_counts: Counter[Batch] = Counter()  # blocked messages by these batches
        self._held_bytes = 0
        self._batch: Batch | None = None  # the last one of `keys_of`
        self._batch_keys: list[Key | None] = []

    def copy(self) -> "KeyOrder":
        """Return a copy for `ChannelMessages.copy_from`: it has the blocked messages, but releases none."""
        other = KeyOrder(self.keys, Version())
        if self.blocked_count:
            other._behind = {_NO_KEY: list(self._sequences())}
            other._attempts, other._held = self._attempts.copy(), self._held.copy()
            other._held_counts, other._held_bytes = self._held_counts.copy(), self._held_bytes
            other.blocked_count = self.blocked_count
        return other

    # ------------------------------------------------------------------ what the dispatcher asks

    @property
    def is_full(self) -> bool:
        """Whether no further message may be blocked."""
        return self.blocked_count >= MAX_BLOCKED or self._held_bytes >= MAX_HELD_BYTES

    @property
    def has_unread(self) -> bool:
        """Whether no fresh message may be delivered, because older ones have unknown keys."""
        return len(self._unread) > 0

    @property
    def has_released(self) -> bool:
        """Whether messages that were blocked are ready. They go before fresh ones, so that few are blocked."""
        return len(self._released) > 0

    def keys_of(self, batch: Batch) -> list[Key | None]:
        """Return the keys of a batch, which may have grown."""
        if self._batch is not batch or len(self._batch_keys) != len(batch):
            self._batch_keys = self.keys.of_all(batch)
            self._batch = batch
        return self._batch_keys

    # ------------------------------------------------------------------ fresh messages

    def hold(
        self,
        keys: list[Key | None],
        start: int,
        end: int,
        count: int,
        batch: Batch,
        *,
        is_only_in_memory: bool,
    ) -> tuple[Sequence[int], int]:
        """Hold the keys of up to `count` messages of [start, end), and block those whose keys are held already.

        The caller changes the version.

        Returns:
            The messages that can be delivered, and up to where messages were held or blocked: `end`, or less after
            `count` messages, or if no further one may be blocked.
        """
        behind = self._behind
        most = min(end, start + count)
        wanted = keys[start:most]
        if behind.keys().isdisjoint(wanted):
            distinct = dict.fromkeys(wanted)
            if len(distinct) == len(wanted) and None not in distinct:
                behind.update(distinct)
                return range(start, most), most
        held = batch if is_only_in_memory else None
        base, left = batch.base_sequence, MAX_BLOCKED - self.blocked_count
        found: list[int] = []
        for index in range(start, end):
            key = keys[index]
            if len(found) == count and (key is None or key not in behind):
                return found, index
            if key is not None:
                number = len(behind)
                behind.setdefault(key, None)
                if len(behind) == number:
                    self.block(key, base + index, held=held)
                    left -= 1
                    if not left or (held is not None and self.is_full):
                        return found, index + 1
                    continue
            found.append(index)
        return found, end

    def give_back(self, key: Key | None) -> None:
        """Undo `hold` for a message that leaves instead."""
        if key is not None:
            del self._behind[key]

    def block(self, key: Key, sequence: int, attempts: int = 0, held: Batch | None = None) -> None:
        """Have a message wait for its key, which is held. The caller changes the version.

        Messages do not come by sequence: those behind the cursor may come after later ones, which were deferred.
        """
        behind = self._behind[key]
        if behind is None:
            self._behind[key] = [sequence]
        else:
            heappush(behind, sequence)
        if attempts:
            self._attempts[sequence] = attempts
        if held is not None:
            self._hold_batch(sequence, held)
        self.blocked_count += 1

    def _hold_batch(self, sequence: int, batch: Batch) -> None:
        self._held[sequence] = batch
        self._held_counts[batch] += 1
        if self._held_counts[batch] == 1:
            self._held_bytes += _held_size(batch)

    # ------------------------------------------------------------------ requeued messages

    def admit(self, entry: Requeued, batch: Batch) -> bool:
        """Return whether a requeued message can be delivered. Otherwise, it is blocked now."""
        sequence, attempts, held = entry
        if sequence in self._released or sequence in self._returned:
            return True
        self._unread.discard(sequence)
        key = self.keys.of(batch, sequence - batch.base_sequence)
        if key is None:
            return True
        if key in self._behind:
            self.block(key, sequence, attempts, held)
            return False
        self._behind[key] = None
        self._returned[sequence] = key
        return True

    def take_key(self, sequence: int) -> Key | None:
        """Return the key that a message holds which was not in flight until now: it gets in flight, or leaves."""
        key = self._released.pop(sequence, None)
        return key if key is not None else self._returned.pop(sequence, None)

    def first_released(self, entries: Iterable[Requeued], count: int) -> list[Requeued]:
        """Return up to `count` leading entries that were blocked before their first delivery, and are ready."""
        released = self._released
        found: list[Requeued] = []
        for entry in entries:
            if len(found) == count or entry[1] or entry[0] not in released:
                break
            found.append(entry)
        return found

    def send_released(self, sequences: list[int]) -> list[Key | None]:
        """As `take_key`, for messages that were blocked."""
        return list(map(self._released.pop, sequences))

    def keep_released(self, sequences: list[int], keys: list[Key | None]) -> None:
        """Undo `send_released` for messages that are not sent yet."""
        self._released.update(zip(sequences, keys, strict=True))

    def must_read(self, sequences: Iterable[int]) -> None:
        """Let no fresh message be delivered before the keys of these requeued messages are known."""
        self._unread.update(sequences)

    def skip_unreadable(self, sequence: int) -> None:
        """Let other messages be delivered although one cannot be read: it gets its place when it can."""
        self._unread.discard(sequence)

    # ------------------------------------------------------------------ released keys

    def finish(self, keys: Iterable[Key | None]) -> list[Requeued]:
        """Release the keys of messages that consumers finished; returns the messages that hold them now."""
        freed: list[Requeued] = []
        for key in keys:
            if key is not None:
                self._release(key, freed)
        return freed

    def drop(self, sequences: Iterable[int]) -> list[Requeued]:
        """Release the keys of messages that were not in flight and have left; returns as `finish`."""
        freed: list[Requeued] = []
        for sequence in sequences:
            self._unread.discard(sequence)
            key = self.take_key(sequence)
            if key is not None:
                self._release(key, freed)
        return freed

    def take_back(self, key: Key | None, sequence: int) -> None:
        """Record that a message with this key is not in flight any more, and not finished."""
        if key is not None:
            self._returned[sequence] = key

    def _release(self, key: Key, freed: list[Requeued]) -> None:
        behind = self._behind.pop(key)
        if behind is None:
            return
        if len(behind) == 1:
            self._behind[key] = None
            sequence = behind[0]
        else:
            self._behind[key] = behind
            sequence = heappop(behind)
        self.blocked_count -= 1
        self._released[sequence] = key
        freed.append(self._entry(sequence))

    def _entry(self, sequence: int) -> Requeued:
        attempts = self._attempts.pop(sequence, 0) if self._attempts else 0
        held = self._held.pop(sequence, None) if self._held else None
        if held is not None:
            self._held_counts[held] -= 1
            if not self._held_counts[held]:
                del self._held_counts[held]
                self._held_bytes -= _held_size(held)
        return sequence, attempts, held

    # ------------------------------------------------------------------ all blocked messages

    def _sequences(self) -> Iterator[int]:
        return chain.from_iterable(filter(None, self._behind.values()))

    def blocked(self) -> list[Requeued]:
        """Return all blocked messages, in no order."""
        attempts, held = self._attempts, self._held
        return [(each, attempts.get(each, 0), held.get(each)) for each in self._sequences()]

    def first_blocked(self, keys: int) -> list[int]:
        """Return the lowest blocked sequence of each of some keys, those that have been held longest."""
        return [behind[0] for behind in islice(filter(None, self._behind.values()), keys)]

    def blocks(self) -> list[Block]:
        """Return the blocked messages for a checkpoint, as deferred ones that are due at once."""
        if not self.blocked_count:
            return []
        sequences = array("Q", self._sequences())
        attempts = array(
            "H", [min(self._attempts.get(each, 0), 0xFFFF) for each in sequences] if self._attempts else []
        )
        found: list[Block] = []
        for start in range(0, len(sequences), BLOCK_MESSAGES):
            part = sequences[start : start + BLOCK_MESSAGES]
            count = len(part)
            some = attempts[start : start + count] if attempts else array("H", [0]) * count
            found.append(Block(array("Q", [0]) * count, part, some))
        return found

    def withdraw(self, sequences: Collection[int]) -> list[Requeued]:
        """Remove and return the blocked messages among these; no other one waits for those whose keys are not known."""
        wanted = set(sequences)
        self._unread -= wanted
        found: list[Requeued] = []
        for key, behind in self._behind.items():
            if behind is None or wanted.isdisjoint(behind):
                continue
            found += [self._entry(each) for each in behind if each in wanted]
            kept = [each for each in behind if each not in wanted]
            heapify(kept)
            self._behind[key] = kept or None
        self._removed(len(found))
        return found

    def released(self, sequences: Iterable[int]) -> list[int]:
        """Return the messages among these that were blocked, and now hold keys, but were not sent yet."""
        return [each for each in sequences if each in self._released]

    def drop_oldest(self, count: int) -> int:
        """Drop up to `count` blocked messages, of the keys that have been held longest; return their number."""
        dropped = 0
        for key, behind in self._behind.items():
            while behind and dropped < count:
                self._entry(heappop(behind))
                dropped += 1
            if not behind:
                self._behind[key] = None
            if dropped == count:
                break
        self._removed(dropped)
        return dropped

    def drop_through(self, sequence: int) -> None:
        """Drop the blocked messages up to this sequence."""
        self.withdraw([each for each in self._sequences() if each <= sequence])

    def _removed(self, count: int) -> None:
        self.blocked_count -= count
        if count:
            self._version.increment()

    def take_all(self, in_flight: Iterable[Key | None], deferred: Iterable[int]) -> list[Requeued]:
        """Forget the keys, except these in flight and those of these deferred messages; return the blocked messages."""
        blocked = self.blocked()
        returned = self._returned
        kept = {each: returned[each] for each in deferred if each in returned} if returned else {}
        self.clear()
        self._returned = kept
        sent = [key for key in in_flight if key is not None]
        self._behind = dict.fromkeys(chain(sent, kept.values()))
        return blocked

    def clear(self) -> None:
        """Forget all messages and keys."""
        self._version.increment()
        self._behind = {}
        self._released = {}
        self._returned = {}
        self._unread = set()
        self._attempts = {}
        self._held = {}
        self._held_counts = Counter()
        self._held_bytes = 0
        self._batch = None
        self._batch_keys = []
        self.blocked_count = 0
