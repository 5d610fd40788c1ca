"""`InFlight`, which stores runs, against a dict of single messages."""

import gc
import os
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from soak import examples
from trio_nsq.broker.state.in_flight import InFlight
from trio_nsq.broker.state.in_flight_batch import InFlightBatch, InFlightCopy
from trio_nsq.protocol.encode import encode_finish

TIMEOUT_NS = 20
LATER_NS = st.sampled_from([0, 5, 10, 20])


class Sent(NamedTuple):
    """A message in flight, in the dict; messages sent together have the same number `delivery`."""

    sequence: int
    delivery: int
    deadline_ns: int
    key: object = None


def sent_as(sequence: int, delivery: InFlightBatch) -> Sent:
    """Return what is in flight, as the dict has it."""
    return Sent(sequence, delivery.attempts, delivery.deadline_ns, delivery.key_of(sequence))


def kept(in_flight: InFlight) -> set[InFlightBatch]:
    """Return the deliveries that messages in flight keep in memory."""
    found: set[InFlightBatch] = set()
    unseen: list[object] = [in_flight]
    while unseen:
        for each in gc.get_referents(unseen.pop()):
            if isinstance(each, InFlightBatch):
                found.add(each)
            elif isinstance(each, dict | deque | list | tuple):
                unseen.append(each)
    return found


class InFlightMachine(RuleBasedStateMachine):
    """All operations on messages in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.real = InFlight()
        self.naive: dict[bytes, Sent] = {}
        self.copies: list[tuple[InFlightCopy, list[tuple[int, int]]]] = []
        self.now_ns = 0
        self.next_id = 1 << 40
        self.last_id = self.next_id  # the first one of the last delivery
        self.sequence = 0
        self.deliveries = 0
        self.gone: list[bytes] = [b"0" * 16]

    @initialize(first=st.integers(0, 1))
    def begin(self, first: int) -> None:
        self.sequence = first

    # ------------------------------------------------------------------ operations

    @rule(sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5))
    def put_many(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            self.put([1] * size, "after", 0, 0, True)

    @rule(
        gaps=st.lists(st.sampled_from([1, 1, 1, 7]), min_size=1, max_size=6),
        where=st.sampled_from(["after", "after", "before", "between"]),
        missing=st.sampled_from([0, 0, 0, 3]),
        left_out=st.sampled_from([0, 0, 2]),
        with_keys=st.booleans(),
    )
    def put(self, gaps: Sequence[int], where: str, missing: int, left_out: int, with_keys: bool) -> None:
        """Send this many messages; the ids need not ascend from one delivery to the next.

        Args:
            where: Where their ids are: after all others, before them, or between those of the delivery before.
            missing: So many sequences are missing before them.
            left_out: After the first message, so many sequences are left out, as their keys are held.
        """
        first_id = self.next_id - 1_000_000 * (where == "before") * (self.deliveries + 1)
        if where == "between":
            first_id = self.last_id + 1  # the others are even
        self.last_id = self.next_id if where == "between" else first_id
        self.sequence += missing
        ids = [b"%016x" % (first_id + 2 * sum(gaps[:index])) for index in range(len(gaps))]
        self.next_id += 100
        self.deliveries += 1
        lines, deadline_ns = encode_finish(ids), self.now_ns + TIMEOUT_NS
        sequences = [self.sequence + index + left_out * (index > 0) for index in range(len(ids))]
        keys: list[object] = [message_id if with_keys else None for message_id in ids]
        self.real.put(
            InFlightBatch(
                lines,
                sequences[0],
                self.deliveries,
                0,
                deadline_ns,
                sequences=sequences if left_out and len(ids) > 1 else None,
                keys=keys if with_keys else None,
            )
        )
        for message_id, sequence, key in zip(ids, sequences, keys, strict=True):
            self.naive[message_id] = Sent(sequence, self.deliveries, deadline_ns, key)
        self.sequence = sequences[-1] + 1

    def picked(self, data: st.DataObject) -> list[bytes]:
        """Return ids, mostly of messages in flight."""
        there = list(self.naive)
        start = data.draw(st.sampled_from([0, 0, 0, 1, 5]))
        ids = there[start : start + data.draw(st.integers(0, 15))]
        match data.draw(
            st.sampled_from(["in order", "but one", "shuffled", "doubled", "other deliveries", "gone"])
        ):
            case "but one" if ids:
                del ids[data.draw(st.integers(0, len(ids) - 1))]
            case "shuffled":
                ids = data.draw(st.permutations(ids))
            case "doubled":
                ids += ids[: data.draw(st.integers(0, 3))]
            case "other deliveries":
                ids.sort(key=lambda message_id: self.naive[message_id].delivery % 3)
            case "gone":
                where = data.draw(st.integers(0, len(ids)))
                ids[where:where] = data.draw(st.lists(st.sampled_from(self.gone), max_size=3))
            case "one":
                ids = [data.draw(st.sampled_from([*there[:10], *self.gone[-5:]]))]
            case _:
                pass
        return ids

    @rule(data=st.data(), counted=st.booleans(), with_keys=st.booleans())
    def finish(self, data: st.DataObject, counted: bool, with_keys: bool) -> None:
        ids = self.picked(data)
        finished: Counter[InFlightBatch] = Counter()
        keys: list[object] = []
        failed = self.real.finish(
            encode_finish(ids), finished if counted else None, keys if with_keys else None
        )
        gone = [self.naive.pop(message_id, None) for message_id in ids]
        assert failed == [message_id for message_id, sent in zip(ids, gone, strict=True) if sent is None]
        if with_keys:
            released = [sent.key for sent in gone if sent is not None and sent.key is not None]
            assert [key for key in keys if key is not None] == released
        if counted:
            expected = Counter((sent.delivery, sent.deadline_ns) for sent in gone if sent is not None)
            told: Counter[tuple[int, int]] = Counter()
            for delivery, count in finished.items():
                told[delivery.attempts, delivery.deadline_ns] += count
            assert told == expected
        self.gone += ids

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        for message_id in self.picked(data)[:2]:
            sent = self.naive.pop(message_id, None)
            taken = self.real.take(message_id)
            assert (taken is None) is (sent is None)
            if taken is not None and sent is not None:
                assert sent == sent_as(*taken)
            self.gone.append(message_id)

    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        for message_id in self.picked(data)[:2]:
            delivery, sent = self.real.find(message_id), self.naive.get(message_id)
            assert (delivery is None) is (sent is None)
            if delivery is not None and sent is not None:
                assert (delivery.attempts, delivery.deadline_ns) == (sent.delivery, sent.deadline_ns)

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), passed_ns=LATER_NS)
    def touch(self, data: st.DataObject, passed_ns: int) -> None:
        self.now_ns += passed_ns
        message_id = data.draw(st.sampled_from(list(self.naive)))
        sent = self.naive.pop(message_id)
        deadline_ns = self.now_ns + TIMEOUT_NS
        self.real.touch(message_id, deadline_ns)
        self.naive[message_id] = sent._replace(deadline_ns=deadline_ns)

    @rule(passed_ns=LATER_NS, at_most=st.sampled_from([1, 2, 4, 1000]))
    def time_out(self, passed_ns: int, at_most: int) -> None:
        self.now_ns += passed_ns
        due = [each for each, sent in self.naive.items() if sent.deadline_ns <= self.now_ns][:at_most]
        timed_out = [sent_as(*each) for each in self.real.time_out(self.now_ns, at_most)]
        assert timed_out == [self.naive.pop(message_id) for message_id in due]
        self.gone += due

    @rule(really=st.integers(0, 5))
    def forget_keys(self, really: int) -> None:
        """Change the order of the channel."""
        if not really:
            self.real.forget_keys()
            self.naive = {message_id: sent._replace(key=None) for message_id, sent in self.naive.items()}

    @rule()
    def copy(self) -> None:
        """Start to write a checkpoint."""
        rows = [(sent.sequence, sent.delivery) for sent in self.naive.values()]
        self.copies.append((self.real.copy(), sorted(rows)))

    @rule(really=st.integers(0, 5))
    def clear(self, really: int) -> None:
        if really:
            return  # usually many
        self.real.clear()
        self.gone += self.naive
        self.naive.clear()

    # ------------------------------------------------------------------ invariants

    @invariant()
    def they_agree(self) -> None:
        assert [sent_as(*each) for each in self.real] == list(self.naive.values())
        assert [delivery.id_of(sequence) for sequence, delivery in self.real] == list(self.naive)
        assert len(self.real) == self.real.count == len(self.naive)
        deadlines_ns = [sent.deadline_ns for sent in self.naive.values()]
        assert self.real.next_deadline_ns == min(deadlines_ns, default=None)
        assert self.real.oldest == min((sent.sequence for sent in self.naive.values()), default=None)

    @invariant()
    def copies_stay_as_they_were(self) -> None:
        for copy, rows in self.copies:
            assert sorted(copy) == rows

    @rule()
    def write_copies(self) -> None:
        """Drop the copies, as after a checkpoint is written."""
        self.copies.clear()

    @invariant()
    def nothing_is_kept_of_what_is_gone(self) -> None:
        assert kept(self.real) == {delivery for _, delivery in self.real}


InFlightMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("MODEL_EXAMPLES", examples())), stateful_step_count=40
)
TestInFlight = InFlightMachine.TestCase


def in_flight_of(ids: Sequence[bytes], each: int) -> tuple[InFlight, list[InFlightBatch]]:
    """Put messages in flight, `each` per delivery; also returns the deliveries."""
    in_flight = InFlight()
    deliveries = [
        InFlightBatch(encode_finish(ids[start : start + each]), start, 1, 0, 10)
        for start in range(0, len(ids), each)
    ]
    for delivery in deliveries:
        in_flight.put(delivery)
    return in_flight, deliveries


def splits(deliveries: Sequence[InFlightBatch]) -> int:
    """Return how many of these runs were split, which costs only time."""
    return sum(delivery.is_split for delivery in deliveries)


@pytest.mark.parametrize("piece", [1, 2, 7, 195, 1000])
def test_answers_in_order_split_no_run(piece: int) -> None:
    ids = [b"%016x" % number for number in range(500)]
    in_flight, sent = in_flight_of(ids, 50)
    for start in range(0, 500, piece):
        assert in_flight.finish(encode_finish(ids[start : start + piece])) == []
    assert (in_flight.count, splits(sent)) == (0, 0)


@pytest.mark.parametrize("piece", [1, 2, 7, 195, 1000])
def test_late_answer_costs_only_its_own_run(piece: int) -> None:
    """Both when it is skipped, and when its answer arrives among the others."""
    ids = [b"%016x" % number for number in range(500)]
    answers = [*ids[:30], *ids[31:300], ids[30], *ids[300:]]
    in_flight, sent = in_flight_of(ids, 50)
    for start in range(0, 500, piece):
        assert in_flight.finish(encode_finish(answers[start : start + piece])) == []
    assert (in_flight.count, splits(sent)) == (0, 1)


def test_unknown_ids_split_no_run() -> None:
    ids = [b"%016x" % number for number in range(0, 1000, 2)]
    others = [b"%016x" % number for number in range(1, 1001, 2)]
    in_flight, sent = in_flight_of(ids, 50)
    assert in_flight.finish(encode_finish(others)) == others
    assert not any(map(in_flight.find, [*others, b"f" * 16, b" " * 16, b"0" * 16 + b"0"]))
    assert splits(sent) == 0
    assert in_flight.find(ids[333]) is not None
    assert splits(sent) == 1


def test_requeues_in_order_split_no_run() -> None:
    ids = [b"%016x" % number for number in range(10)]
    in_flight, sent = in_flight_of(ids, 10)
    ((_, delivery), *_) = in_flight
    assert in_flight.finish(encode_finish(ids[:3])) == []
    assert in_flight.take(ids[3]) == (3, delivery)
    assert in_flight.finish(encode_finish(ids[4:9])) == []
    assert in_flight.find(ids[9]) is delivery
    assert in_flight.take(ids[9]) == (9, delivery)
    assert (in_flight.count, splits(sent)) == (0, 0)
