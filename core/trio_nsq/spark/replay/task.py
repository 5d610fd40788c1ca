"""The task of a replay: publish one piece, in this process or in a Spark worker.

A piece is an idempotent producer: its batches depend only on its rows, and are numbered from 0. Another attempt, after
a crash or while the first still runs, sends the same batches with the same numbers, and `qcli serve` publishes each
once (docs/how-to/idempotent-publishing.md). nsqd does not deduplicate: publishing to it is at least once.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ...client.http.idempotent_producer import PublishOutcome
from ...event_loop.retries import PATIENCE_S
from ...protocol.batcher import Batcher, HeadersBatcher
from ...protocol.headers import Headers, decode_headers, prefix_of, split_prefix
from ...protocol.limits import MIB
from ..options import BrokerAccess
from ..places import storage_at
from ..runtime.engine import Advance
from .files import ReplayColumns
from .request import MAX_EXAMPLES, PieceResult, ReplayRequest
from .rows import CHUNK_BYTES, RowGroupRange, RowReader, Rows

_MAX_BATCH_MESSAGES = 10_000
_MAX_BATCH_BYTES = 2 * MIB
_BATCH_S = 0.05
"""With a rate limit, a batch has the messages for this time."""
_SAVE_INTERVAL_S = 2.0
_MAX_RESENDS = 3
"""With a broker that does not deduplicate, publishing a batch twice is better than losing it."""
_SLOT_NS = 10_000_000
"""With the original pace, messages published within this time are published together."""
_NS_PER_S = 10**9


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """A piece to publish. Can be pickled. Its batches depend only on `request`, the rows and `max_batch_bytes`.

    Attributes:
        producer: The name of the piece as a producer.
        rate: The maximum messages per second of this task; None: no limit.
        results_folder: The folder for the result, see `storage_at`; None: the result is not saved.
        dry_run: Only count messages.
        access: How to connect to the broker. A secret in a file is read where the task runs.
        patience_s: How long to wait for an unreachable broker.
        max_batch_bytes: The limit of a batch; a longer message is a batch by itself.
    """

    request: ReplayRequest
    piece: int
    producer: str
    place: str
    columns: ReplayColumns
    row_groups: tuple[RowGroupRange, ...]
    rate: float | None = None
    results_folder: str | None = None
    dry_run: bool = False
    access: BrokerAccess = field(default_factory=BrokerAccess)
    patience_s: float = PATIENCE_S
    max_batch_bytes: int = _MAX_BATCH_BYTES
    chunk_bytes: int = CHUNK_BYTES

    @property
    def messages(self) -> int:
        return sum(group.wanted for group in self.row_groups)

    def run(self, advance: Advance | None = None) -> PieceResult:
        """Publish the batches that are not known to be published.

        Args:
            advance: Called with the number of messages and bytes of each batch, including those published before.

        Raises:
            ReplayFileError: A file cannot be read, or has changed.
            BrokerUnreachable, RequestRefused: A batch cannot be published.
            OSError: The result cannot be saved.
        """
        storage = storage_at(self.results_folder) if self.results_folder is not None else None
        saved = PieceResult.load(storage, self.piece) if storage is not None else None
        if saved is not None and saved.complete:
            return saved
        result = PieceResult(piece=self.piece, remembered=saved.remembered if saved is not None else None)
        if self.dry_run:
            for messages, _ in _Batches(self, result):
                batch, _headers = self._split(messages)
                _count(result, batch, PublishOutcome.PUBLISHED, advance)
            result.complete = True
            return result
        request = self.request
        with self.access.producer(
            request.address, request.topic, self.producer, self.patience_s, _MAX_RESENDS
        ) as producer:
            last = producer.last_number()
            next_number = max(saved.batches if saved is not None else 0, 0 if last is None else last + 1)
            save_at_s = 0.0
            pacer = _Pacer(self)
            try:
                for messages, time_ns in _Batches(self, result):
                    batch, headers = self._split(messages)
                    if result.batches < next_number:
                        outcome = PublishOutcome.REPEATED
                    else:
                        pacer.wait(len(batch), time_ns)
                        outcome = producer.publish(batch, result.batches, headers=headers or None)
                        if result.remembered is None or outcome is not PublishOutcome.REPEATED:
                            result.remembered = outcome is not PublishOutcome.UNKNOWN
                    result.maybe_twice = producer.messages_resent
                    _count(result, batch, outcome, advance)
                    if storage is not None and time.monotonic() >= save_at_s:
                        result.save(storage)
                        save_at_s = time.monotonic() + _SAVE_INTERVAL_S
                result.complete = True
            finally:
                result.maybe_twice = producer.messages_resent
                if storage is not None and result.batches:
                    # An earlier error is more important; `qcli serve` knows the published batches anyway.
                    with suppress(OSError):
                        result.save(storage)
        return result

    def _split(self, messages: list[bytes]) -> tuple[list[bytes], list[Headers]]:
        """Return bodies, and the headers of each; without headers if no message has some."""
        if self.columns.headers is None:
            return messages, []
        bodies: list[bytes] = []
        headers: list[Headers] = []
        for message in messages:
            text, start = split_prefix(message, 0, len(message))
            bodies.append(message[start:])
            headers.append(decode_headers(text.decode()))
        return bodies, headers if any(headers) else []


def _count(result: PieceResult, batch: list[bytes], outcome: PublishOutcome, advance: Advance | None) -> None:
    size = sum(map(len, batch))
    if outcome is PublishOutcome.REPEATED:
        result.before += len(batch)
        result.before_bytes += size
    else:
        result.published += len(batch)
        result.published_bytes += size
    result.batches += 1
    if advance is not None:
        advance(len(batch), size)


class _Pacer:
    """Delays batches to keep the rate, or the pace of the original messages."""

    def __init__(self, task: ReplayTask) -> None:
        self._rate = task.rate
        self._speed = task.request.speed
        self._due_s = time.monotonic()
        self._first: tuple[int, float] | None = None  # publish time and send time of the first batch

    def wait(self, messages: int, time_ns: int | None) -> None:
        """Sleep until a batch is due.

        Args:
            time_ns: When the messages were published; None: the original pace is not kept.
        """
        now_s = time.monotonic()
        if self._rate is not None:
            self._due_s = max(self._due_s, now_s - 0.1)
            _sleep_until(self._due_s)
            self._due_s += messages / self._rate
        if self._speed is not None and time_ns is not None:
            if self._first is None:
                self._first = time_ns, now_s
            first_ns, started_s = self._first
            _sleep_until(started_s + (time_ns - first_ns) / _NS_PER_S / self._speed)


def _sleep_until(due_s: float) -> None:
    left_s = due_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


class _Batches:
    """Iterates over the batches of a piece, in order, each with the time of its messages if the pace is kept.

    Args:
        result: Counts the messages that are skipped.
    """

    def __init__(self, task: ReplayTask, result: PieceResult) -> None:
        self._task = task
        self._result = result
        self._speed = None if task.dry_run else task.request.speed
        match, rate = task.request.match, task.request.rate
        self._pattern = None if match is None else re.compile(os.fsencode(match))
        max_messages = _MAX_BATCH_MESSAGES
        if rate is not None:
            max_messages = max(1, min(max_messages, int(rate * _BATCH_S)))
        self._has_headers = task.columns.headers is not None
        kind = HeadersBatcher if self._has_headers else Batcher
        self._batcher: Batcher | HeadersBatcher = kind(max_messages, task.max_batch_bytes)

    def __iter__(self) -> Iterator[tuple[list[bytes], int | None]]:
        task, request = self._task, self._task.request
        reader = RowReader(
            task.place,
            task.columns,
            request.first_ns,
            request.end_ns,
            ordered=request.ordered,
            chunk_bytes=task.chunk_bytes,
        )
        rows = reader.read_in_order(task.row_groups) if request.ordered else reader.read(task.row_groups)
        if self._speed is None:
            for each in rows:
                bodies, _ = self._filter(each)
                for batch in self._batcher.add(bodies):
                    yield batch, None
            if self._batcher:
                yield self._batcher.rest(), None
        else:
            yield from self._by_slot(rows, max(1, int(_SLOT_NS * self._speed)))

    def _by_slot(self, rows: Iterator[Rows], slot_ns: int) -> Iterator[tuple[list[bytes], int | None]]:
        """Yield batches with messages of one time slot each, due at the start of the slot."""
        current: int | None = None
        for each in rows:
            bodies, times = self._filter(each)
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

    def _filter(self, rows: Rows) -> tuple[list[bytes], list[int] | None]:
        """Return the messages to publish, and their times: bodies, after headers if there is a column of these."""
        indexes, times = self._wanted(rows)
        bodies: list[Any] = rows.bodies if indexes is None else [rows.bodies[index] for index in indexes]
        if not self._has_headers:
            return bodies, times
        headers = rows.headers or [""] * len(rows.bodies)
        texts = headers if indexes is None else [headers[index] for index in indexes]
        return [prefix_of(text) + body for text, body in zip(texts, bodies, strict=True)], times

    def _wanted(self, rows: Rows) -> tuple[list[int] | None, list[int] | None]:
        """Return the indexes of the rows to publish, None for all, and their times."""
        bodies: list[Any] = rows.bodies
        # Fast path: nearly always all rows are published.
        try:
            longest, shortest = max(map(len, bodies), default=0), min(map(len, bodies), default=1)
        except TypeError:
            longest = shortest = 0
        if self._pattern is None and shortest and longest <= self._task.request.max_msg_bytes:
            return None, rows.times_ns
        indexes = [index for index, body in enumerate(bodies) if self._accepts(body, rows.locate, index)]
        times = None if rows.times_ns is None else [rows.times_ns[index] for index in indexes]
        return indexes, times

    def _accepts(self, body: bytes | None, locate: Callable[[int], tuple[str, int]], index: int) -> bool:
        result = self._result
        if not body:
            result.without_body += 1
            return False
        if self._pattern is not None and self._pattern.search(body) is None:
            result.unmatched += 1
            return False
        if len(body) > self._task.request.max_msg_bytes:
            result.too_long += 1
            if len(result.examples) < MAX_EXAMPLES:
                name, row = locate(index)
                result.examples.append(f"row {row} of {name} ({len(body)} bytes)")
            return False
        return True
