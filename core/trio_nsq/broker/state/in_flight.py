"""The messages that one consumer has in flight: sent and not answered.

If a consumer answers in the order of delivery, hundreds of messages cost one comparison of bytes: the FIN lines that it
sends equal the precomputed lines of `Batch.take`. So messages that were sent together form a *run* for as long as
they are answered in order from the start. After any other answer, the run is split: its messages are stored singly by
id, at about the cost of a dict. Messages sent singly are stored so from the start.

A message that is not the next one of the oldest run is found by bisection, and only the run that holds it is split.
Each message is split from a run at most once, so no order of answers is expensive. Unknown ids split no run.

The sequences of a run need not be consecutive: in a channel with an order by key, the messages of held keys are left
out. There, the ids of a later run may be lower than those of an earlier one, or lie between them. Then a message is not
found by bisection, so all runs are split once a message is not the next one.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from typing import Final

from ...protocol.bulk import FINISH_ID_AT, FINISH_LINE_BYTES
from ...protocol.commands import finish_line_ids
from .in_flight_batch import InFlightBatch, InFlightCopy
from .message_keys import Key
from .version import Version

OLDEST_SEARCH_LIMIT: Final = 1000
"""Deliveries, or messages at the head of a queue, examined to find the oldest; bounds the cost."""


_LEFT: Final = attrgetter("left")
_BEGINS_AT: Final = attrgetter("begins_at")
_LINES: Final = attrgetter("lines")


class InFlight:
    """A consumer's deliveries, in the order of their deadlines; messages of a delivery in the order of their ids.

    Attributes:
        version: The channel's version; set by the channel.
    """

    __slots__ = ("_ascends", "_by_id", "_deliveries", "_runs", "_split_count", "count", "version")

    def __init__(self) -> None:
        self.version: Version = Version()
        self.count: int = 0
        self._deliveries: dict[InFlightBatch, None] = {}  # all, in the order of their deadlines
        self._runs: deque[InFlightBatch] = deque()  # the runs among them, in the same order
        # Whether all ids of a run are higher than those of the one before. They are not if the node id was changed in
        # between, nor always in a channel with an order: messages that were blocked may lie between others.
        self._ascends = True
        self._by_id: dict[bytes, InFlightBatch] = {}  # messages of deliveries that are not runs
        self._split_count = 0  # number of deliveries that are split

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[int, InFlightBatch]]:
        """Yield (sequence, delivery) of each message."""
        left: dict[InFlightBatch, list[int]] = {}
        for message_id, delivery in self._by_id.items():
            left.setdefault(delivery, []).append(delivery.sequence_of(message_id))
        for delivery in self._deliveries:
            for sequence in left[delivery] if delivery in left else self._left_of(delivery):
                yield sequence, delivery

    def put(self, delivery: InFlightBatch) -> None:
        self.version.increment()
        self._deliveries[delivery] = None
        self.count += delivery.left
        if delivery.left > 1:
            runs = self._runs
            if not runs:
                self._ascends = True
            elif delivery.lines < runs[-1].lines[-FINISH_LINE_BYTES:]:  # also if it is within that one
                self._ascends = False
            runs.append(delivery)
        else:
            self._by_id[delivery.lines[FINISH_ID_AT : FINISH_LINE_BYTES - 1]] = delivery

    def clear(self) -> None:
        self.version.increment()
        self.count = self._split_count = 0
        self._deliveries.clear()
        self._runs.clear()
        self._by_id.clear()

    # ------------------------------------------------------------------ answers

    def expected_answers(self, data: bytes | bytearray, start: int) -> int:
        """Return the end of the FIN lines in `data` from `start` on that answer the oldest runs in order."""
        for run in self._runs:
            text, left_bytes = run.lines, run.left * FINISH_LINE_BYTES
            next_at = len(text) - left_bytes
            # The next line first: other lines cost no copy of the run.
            if not data.startswith(text[next_at : next_at + FINISH_LINE_BYTES], start):
                break
            whole_bytes = len(data) - start
            if whole_bytes >= left_bytes and data.startswith(text[next_at:], start):
                start += left_bytes
                continue
            # Part of the run: up to the end of the data, or to the first other command.
            whole_bytes = min(whole_bytes - whole_bytes % FINISH_LINE_BYTES, left_bytes)
            begins = data[start : start + whole_bytes : FINISH_LINE_BYTES]
            whole_bytes -= len(begins.lstrip(b"F")) * FINISH_LINE_BYTES
            if data.startswith(text[next_at : next_at + whole_bytes], start):
                start += whole_bytes
            break
        return start

    def finish(
        self,
        lines: bytes,
        finished: Counter[InFlightBatch] | None = None,
        keys: list[Key | None] | None = None,
    ) -> list[bytes]:
        """Remove the messages of these FIN lines. Returns the ids that are not in flight, in order.

        Adds the number of finished messages of each delivery to `finished`, and the keys that they hold to `keys`.
        """
        self.version.increment()
        failed: list[bytes] = []
        at, end = 0, len(lines)
        while at < end:
            if not self._runs:
                self._finish_by_id(lines[at:], finished, keys, failed)
                break
            run = self._runs[0]
            text, left_bytes = run.lines, run.left * FINISH_LINE_BYTES
            if end - at < left_bytes:
                matched_bytes = end - at
                matches = text.startswith(lines[at:], len(text) - left_bytes)
            else:
                matched_bytes = left_bytes
                matches = lines.startswith(text[-left_bytes:], at)
            if matches:
                at += matched_bytes
                count = matched_bytes // FINISH_LINE_BYTES
                if keys is not None:
                    keys += run.next_keys(count)
                self._finish_run(run, count, finished)
                continue
            # The lines before the next one of this run are about other messages.
            start = len(text) - left_bytes
            goes_on = lines.find(text[start : start + FINISH_LINE_BYTES], at)
            if goes_on == at:
                self._split_run(0)
            else:
                upto = end if goes_on < 0 else goes_on
                self._finish_by_id(lines[at:upto], finished, keys, failed)
                at = upto
        return failed

    def _finish_run(self, run: InFlightBatch, count: int, finished: Counter[InFlightBatch] | None) -> None:
        if finished is not None:
            finished[run] += count
        self.count -= count
        run.left -= count
        if not run.left:
            self._runs.popleft()
            del self._deliveries[run]

    def _finish_by_id(
        self,
        lines: bytes,
        finished: Counter[InFlightBatch] | None,
        keys: list[Key | None] | None,
        failed: list[bytes],
    ) -> None:
        if keys is not None:
            for message_id in finish_line_ids(lines):
                if (taken := self._take_by_id(message_id)) is None:
                    failed.append(message_id)
                    continue
                keys.append(taken.key_of(taken.sequence_of(message_id)))
                if finished is not None:
                    finished[taken] += 1
            return
        if len(lines) == FINISH_LINE_BYTES and finished is None:
            message_id = lines[FINISH_ID_AT : FINISH_LINE_BYTES - 1]
            if self._take_by_id(message_id) is None:
                failed.append(message_id)
            return
        ids = iter(finish_line_ids(lines))
        found: deque[InFlightBatch] = deque()
        while True:
            try:
                # One C loop over all ids; a KeyError consumes only the missing id.
                found.extend(map(self._by_id.pop, ids))
                break
            except KeyError as exc:
                if self._find_by_id(exc.args[0]) is None:
                    failed.append(exc.args[0])
                else:
                    found.append(self._by_id.pop(exc.args[0]))
        if finished is not None:
            finished.update(found)
        self.count -= len(found)
        if self._split_count:
            for delivery in found:
                delivery.left -= 1
                if not delivery.left:
                    self._remove(delivery)
        else:
            deque(map(self._deliveries.pop, found), maxlen=0)  # each delivery has one message

    def _remove(self, delivery: InFlightBatch) -> None:
        """Remove a delivery that is not a run and has no messages left."""
        del self._deliveries[delivery]
        self._split_count -= delivery.is_split

    def _split_run(self, index: int) -> None:
        run = self._runs[index]
        del self._runs[index]
        self._by_id.update(dict.fromkeys(run.split(), run))
        self._split_count += 1

    def _run_holding(self, message_id: bytes) -> int | None:
        """Return the index of the run that holds a message; None if no run does. Only if ids ascend."""
        runs = self._runs
        index = bisect_left(runs, b"FIN %s\xff" % message_id, key=_LINES) - 1
        return index if index >= 0 and runs[index].holds(message_id) else None

    def _find_by_id(self, message_id: bytes) -> InFlightBatch | None:
        delivery = self._by_id.get(message_id)
        if delivery is not None or not self._runs:
            return delivery
        if not self._ascends:
            while self._runs:
                self._split_run(0)
            return self._by_id.get(message_id)
        if (index := self._run_holding(message_id)) is None:
            return None
        delivery = self._runs[index]
        self._split_run(index)
        return delivery

    def find(self, message_id: bytes) -> InFlightBatch | None:
        """Return the delivery of a message; None if it is not in flight."""
        return self._runs[0] if self._comes_next(message_id) else self._find_by_id(message_id)

    def holds(self, message_id: bytes) -> bool:
        """Whether a message is in flight. Splits no run."""
        if message_id in self._by_id:
            return True
        if self._ascends:
            return self._run_holding(message_id) is not None
        line = b"FIN %s\n" % message_id
        return any(run.lines.find(line, -run.left * FINISH_LINE_BYTES) >= 0 for run in self._runs)

    def _comes_next(self, message_id: bytes) -> bool:
        """Whether this is the next message of the oldest run."""
        return bool(self._runs) and self._runs[0].id_of(self._runs[0].begins_at) == message_id

    def take(self, message_id: bytes) -> tuple[int, InFlightBatch] | None:
        """Remove one message, and return its sequence and delivery; None if it is not in flight."""
        self.version.increment()
        if self._comes_next(message_id):
            run = self._runs[0]
            sequence = run.begins_at
            self._finish_run(run, 1, None)
            return sequence, run
        delivery = self._take_by_id(message_id)
        return (delivery.sequence_of(message_id), delivery) if delivery is not None else None

    def _take_by_id(self, message_id: bytes) -> InFlightBatch | None:
        delivery = self._find_by_id(message_id)
        if delivery is not None:
            del self._by_id[message_id]
            self.count -= 1
            delivery.left -= 1
            if not delivery.left:
                self._remove(delivery)
        return delivery

    def touch(self, message_id: bytes, deadline_ns: int) -> None:
        """Give a message in flight a later deadline, and move it to the end of the deadline order."""
        taken = self.take(message_id)
        assert taken is not None
        sequence, delivery = taken
        self.put(delivery.touched(sequence, deadline_ns))

    def forget_keys(self) -> None:
        """Let the messages hold no keys: the order of the channel has changed."""
        for delivery in self._deliveries:
            delivery.forget_keys()

    # ------------------------------------------------------------------ time

    @property
    def next_deadline_ns(self) -> int | None:
        """The first delivery's deadline; None if nothing is in flight. Only touched messages can be due earlier."""
        for delivery in self._deliveries:
            return delivery.deadline_ns
        return None

    def extend(self, by_ns: int) -> None:
        """Move the deadlines of all messages, which keeps their order, and the times of delivery."""
        for delivery in self._deliveries:
            delivery.deadline_ns += by_ns
            delivery.delivered_ns += by_ns

    def time_out(self, now_ns: int, at_most: int) -> list[tuple[int, InFlightBatch]]:
        """Remove due messages up to the first delivery that is not due; returns (sequence, delivery) of each."""
        due: list[InFlightBatch] = []
        count = 0
        for delivery in self._deliveries:
            if delivery.deadline_ns > now_ns or count >= at_most:
                break
            due.append(delivery)
            count += delivery.left
        taken: list[tuple[int, InFlightBatch]] = []
        if due:
            self.version.increment()
        for delivery in due:
            sequences = list(islice(self._left_of(delivery), at_most - len(taken)))
            taken += [(sequence, delivery) for sequence in sequences]
            if self._runs and self._runs[0] is delivery:
                self._finish_run(delivery, len(sequences), None)
                continue
            for sequence in sequences:
                del self._by_id[delivery.id_of(sequence)]
            self.count -= len(sequences)
            delivery.left -= len(sequences)
            if not delivery.left:
                self._remove(delivery)
        return taken

    # ------------------------------------------------------------------ inspection

    def _left_of(self, delivery: InFlightBatch) -> Iterator[int]:
        """Yield the sequences of a delivery that are in flight, ascending."""
        if not delivery.is_split:
            yield from delivery.sequences
        else:
            for sequence in delivery.sequences:
                if self._by_id.get(delivery.id_of(sequence)) is delivery:
                    yield sequence

    @property
    def oldest(self) -> int | None:
        """The lowest sequence of the first 1000 deliveries; None if there is none."""
        oldest: int | None = None
        for delivery in sorted(islice(self._deliveries, OLDEST_SEARCH_LIMIT), key=_BEGINS_AT):
            # Sorted by lower bound, so later deliveries cannot have a lower sequence.
            if oldest is not None and oldest <= delivery.begins_at:
                break
            lowest = next(self._left_of(delivery))
            oldest = lowest if oldest is None else min(oldest, lowest)
        return oldest

    def begun(self, msg_timeout_ns: int) -> list[tuple[int, InFlightBatch]]:
        """Return the messages that the client most likely works on: those it touched, or else the one it got first.

        The client has received the others too; whether it has begun them is not known.
        """
        touched: list[tuple[int, InFlightBatch]] = []
        first: tuple[int, InFlightBatch] | None = None
        for each in self:
            delivery = each[1]
            if delivery.deadline_ns > delivery.delivered_ns + msg_timeout_ns:
                touched.append(each)
            elif first is None:
                first = each
        return touched or ([first] if first is not None else [])

    def copy(self) -> "InFlightCopy":
        return InFlightCopy(tuple(self._runs), tuple(map(_LEFT, self._runs)), self._by_id.copy())
