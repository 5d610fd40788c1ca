"""Publishing one piece of a replay: what a task does, wherever it runs.

A piece's batches are cut by its rows alone and numbered from 0, and the piece is the producer of them. So whoever does
it again, after a crash or beside one that was thought to be dead, sends the same batches under the same numbers, and
our broker publishes each of them once (docs/publishing-once.md). A stock nsqd does not know; there it is at least once.
"""

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from ...client.connection.tls import TLSFiles
from ...client.errors import PublishInDoubt
from ...client.http.idempotent_producer import IdempotentProducer, PublishOutcome
from ...client.http.retry import PATIENCE_S
from ...protocol.batcher import Batcher
from ..runtime.engine import Advance
from ..storage import Storage, storage_at
from .files import ReplayColumns
from .rows import Places, RowGroupRange, RowReader, Rows, TimeRange

MIB = 1024 * 1024
MAX_BATCH_MESSAGES = 10_000
MAX_EXAMPLES = 5
_NOTE_S = 2.0
"""So often is it noted how far a piece has come."""
_MOST_DOUBTS = 3
"""So often is a batch sent again to a broker that loses connections and remembers nothing."""
_SLOT_NS = 10_000_000
"""What was published within this time is published together, if the times between messages are kept."""
_NS_PER_S = 10**9


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How messages become batches; the same for all attempts at a piece.

    Attributes:
        max_messages, max_bytes: Of a batch; a message that is longer is one of its own.
        max_msg_bytes: Longer ones are not sent.
        speed: The times between messages are kept, so many times shorter; None: they are not.
        pattern: Only bodies in which this regular expression is found; None: all.
    """

    max_messages: int = MAX_BATCH_MESSAGES
    max_bytes: int = 2 * MIB
    max_msg_bytes: int = MIB
    speed: float | None = None
    pattern: bytes | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where to.

    Attributes:
        address: Of a broker's HTTP, see `IdempotentProducer`.
        topic: Its name.
        tls: For https.
        patience_s: How long a broker that went away is waited for.
    """

    address: str
    topic: str
    tls: TLSFiles = field(default_factory=TLSFiles)
    patience_s: float = PATIENCE_S


@dataclass(slots=True)
class PieceResult:
    """What became of a piece. Counts are of messages, of all that was done for it, but for those that say otherwise.

    Attributes:
        piece: Its number.
        published: Published by this attempt.
        published_bytes: Of their bodies.
        repeated: Published by an attempt before this one, and not again.
        repeated_bytes: Of their bodies.
        maybe_twice: Of `published`: sent a second time, as it was not known what had become of the first.
        unmatched: Left out by the pattern.
        without_body: Rows whose body is null, or empty: NSQ has no empty messages.
        too_long: Longer than allowed, and not published.
        examples: Where the first of these are.
        batches: Batches that are dealt with: all with a lesser number.
        remembered: Whether the broker remembers what it has published; None: it was not asked.
        complete: Whether all of it is dealt with.
    """

    piece: int
    published: int = 0
    published_bytes: int = 0
    repeated: int = 0
    repeated_bytes: int = 0
    maybe_twice: int = 0
    unmatched: int = 0
    without_body: int = 0
    too_long: int = 0
    examples: list[str] = field(default_factory=list)
    batches: int = 0
    remembered: bool | None = None
    complete: bool = False

    def to_bytes(self) -> bytes:
        """As a file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "PieceResult":
        """From there. Raises ValueError, TypeError."""
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """A piece to be published, with all that there is to know; can be pickled.

    Attributes:
        piece: Its number.
        producer: Its name as a producer.
        place: The folder of the files.
        columns, choice, row_groups: Which rows, and what of them.
        ordered: In the order of time, and not in that of the files.
        batching: See there.
        target: Where to; None: nothing is published, only counted.
        rate: Messages per second, at most; None: as fast as it goes.
        results_folder: The folder where it is noted how far it has come, see `storage_at`; None: it is not.
    """

    piece: int
    producer: str
    place: str
    columns: ReplayColumns
    choice: TimeRange
    row_groups: tuple[RowGroupRange, ...]
    ordered: bool
    batching: BatchOptions
    target: Target | None
    rate: float | None = None
    results_folder: str | None = None

    @property
    def messages(self) -> int:
        """How many rows there are to choose from."""
        return sum(row_group_range.wanted for row_group_range in self.row_groups)

    def run(self, advance: Advance | None = None) -> PieceResult:
        """See `replay_piece`."""
        return replay_piece(self, advance)


def result_path(piece: int) -> str:
    """Where it is noted what became of a piece, below the folder for that."""
    return f"done/{piece:06d}.json"


def read_result(storage: Storage, piece: int) -> PieceResult | None:
    """What was noted of a piece; None: nothing, or it cannot be read, and then it is dealt with from its beginning."""
    data = storage.read(result_path(piece))
    if data is None:
        return None
    try:
        return PieceResult.from_bytes(data)
    except (ValueError, TypeError):
        return None


def replay_piece(task: ReplayTask, advance: Advance | None = None) -> PieceResult:
    """Publish a piece, but for what is known to be published.

    Args:
        task: The piece.
        advance: Is told of messages as they are dealt with, also of those that had been before.

    Raises:
        ReplayFileError: It cannot be read, or is not what was planned for.
        BrokerUnreachable, RequestRefused: It cannot be published.
        OSError: How far it came cannot be noted.
    """
    storage = storage_at(task.results_folder) if task.results_folder is not None else None
    noted = read_result(storage, task.piece) if storage is not None else None
    if noted is not None and noted.complete:
        return noted
    done = PieceResult(task.piece, remembered=noted.remembered if noted is not None else None)
    known = noted.batches if noted is not None else 0
    if task.target is None:
        for batch, _ in _Batches(task, done):
            _count(done, batch, PublishOutcome.PUBLISHED, advance)
        done.complete = True
        return done
    target = task.target
    with IdempotentProducer(
        target.address, target.topic, task.producer, target.tls, target.patience_s
    ) as publisher:
        last = publisher.last_number()
        known = max(known, 0 if last is None else last + 1)
        note_at_s = 0.0
        pace = _Pace(task)
        try:
            for batch, time_ns in _Batches(task, done):
                if done.batches < known:
                    outcome = PublishOutcome.REPEATED
                else:
                    pace.wait(len(batch), time_ns)
                    outcome = _publish(publisher, batch, done)
                _count(done, batch, outcome, advance)
                if storage is not None and time.monotonic() >= note_at_s:
                    storage.write(result_path(task.piece), done.to_bytes())
                    note_at_s = time.monotonic() + _NOTE_S
            done.complete = True
        finally:
            if storage is not None and done.batches:
                # What went wrong is worth more than that this cannot be noted; without it our broker still knows.
                with suppress(OSError):
                    storage.write(result_path(task.piece), done.to_bytes())
    return done


def _publish(publisher: IdempotentProducer, batch: list[bytes], done: PieceResult) -> PublishOutcome:
    """Publish a batch; where nobody remembers, twice is better than not at all."""
    doubts = 0
    while True:
        try:
            outcome = publisher.publish(batch, done.batches)
        except PublishInDoubt:
            doubts += 1
            if doubts > _MOST_DOUBTS:
                raise
            done.maybe_twice += len(batch)
        else:
            if done.remembered is None or outcome is not PublishOutcome.REPEATED:
                done.remembered = outcome is not PublishOutcome.UNKNOWN
            return outcome


def _count(done: PieceResult, batch: list[bytes], outcome: PublishOutcome, advance: Advance | None) -> None:
    size = sum(map(len, batch))
    if outcome is PublishOutcome.REPEATED:
        done.repeated += len(batch)
        done.repeated_bytes += size
    else:
        done.published += len(batch)
        done.published_bytes += size
    done.batches += 1
    if advance is not None:
        advance(len(batch), size)


class _Pace:
    """Holds batches back, as the task says."""

    def __init__(self, task: ReplayTask) -> None:
        self._rate = task.rate
        self._speed = task.batching.speed
        self._due_s = time.monotonic()
        self._first: tuple[int, float] | None = None

    def wait(self, messages: int, time_ns: int | None) -> None:
        """Wait until a batch may leave.

        Args:
            messages: How many it has.
            time_ns: When it was published; None: that does not matter.
        """
        now_s = time.monotonic()
        if self._rate is not None:
            self._due_s = max(self._due_s, now_s - 0.1)
            _sleep_until(self._due_s)
            self._due_s += messages / self._rate
        if self._speed is not None and time_ns is not None:
            if self._first is None:
                self._first = time_ns, now_s
            first_ns, begun_s = self._first
            _sleep_until(begun_s + (time_ns - first_ns) / _NS_PER_S / self._speed)


def _sleep_until(due_s: float) -> None:
    left_s = due_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


class _Batches:
    """The batches of a piece, in order, each with the time it was published at if that matters.

    Args:
        task: The piece.
        done: Here is counted what is in no batch.
    """

    def __init__(self, task: ReplayTask, done: PieceResult) -> None:
        self._task = task
        self._done = done
        self._pattern = None if task.batching.pattern is None else re.compile(task.batching.pattern)
        self._batcher = Batcher(task.batching.max_messages, task.batching.max_bytes)

    def __iter__(self) -> Iterator[tuple[list[bytes], int | None]]:
        task = self._task
        reader = RowReader(task.place, task.columns, task.choice, ordered=task.ordered)
        rows = reader.read_in_order(task.row_groups) if task.ordered else reader.read(task.row_groups)
        if task.batching.speed is None:
            for each in rows:
                bodies, _ = self._good(each)
                for batch in self._batcher.add(bodies):
                    yield batch, None
            if self._batcher:
                yield self._batcher.rest(), None
        else:
            yield from self._by_time(rows, max(1, int(_SLOT_NS * task.batching.speed)))

    def _by_time(self, rows: Iterator[Rows], slot_ns: int) -> Iterator[tuple[list[bytes], int | None]]:
        """No batch has messages of two slots, and it is due when its slot begins."""
        current: int | None = None
        for each in rows:
            bodies, times = self._good(each)
            assert times is not None
            for slot, members in groupby(
                zip(bodies, times, strict=True), lambda member: member[1] // slot_ns
            ):
                if slot != current and self._batcher and current is not None:
                    yield self._batcher.rest(), current * slot_ns
                current = slot
                for batch in self._batcher.add([body for body, _ in members]):
                    yield batch, slot * slot_ns
        if self._batcher and current is not None:
            yield self._batcher.rest(), current * slot_ns

    def _good(self, rows: Rows) -> tuple[list[bytes], list[int] | None]:
        """The bodies that are to be published, and their times."""
        bodies: list[Any] = rows.bodies
        # Nearly always all of them are: that is found out by two calls.
        try:
            longest, shortest = max(map(len, bodies), default=0), min(map(len, bodies), default=1)
        except TypeError:
            longest = shortest = 0
        if self._pattern is None and shortest and longest <= self._task.batching.max_msg_bytes:
            return bodies, rows.times_ns
        indexes = [index for index, body in enumerate(bodies) if self._is_good(body, rows.places, index)]
        times = None if rows.times_ns is None else [rows.times_ns[index] for index in indexes]
        return [bodies[index] for index in indexes], times

    def _is_good(self, body: bytes | None, places: Places, index: int) -> bool:
        done = self._done
        if not body:
            done.without_body += 1
            return False
        if self._pattern is not None and self._pattern.search(body) is None:
            done.unmatched += 1
            return False
        if len(body) > self._task.batching.max_msg_bytes:
            done.too_long += 1
            if len(done.examples) < MAX_EXAMPLES:
                name, row = places[index]
                done.examples.append(f"row {row} of {name} ({len(body)} bytes)")
            return False
        return True
