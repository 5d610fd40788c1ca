"""Tests for the sync stage: a write is committed when every barrier has it, and not before."""

from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.broker.ingest.publication import Group, Write
from trio_nsq.broker.ingest.sync_stage import SyncStage
from trio_nsq.broker.state.cache import BatchCache
from trio_nsq.broker.state.topic import Topic
from trio_nsq.log import MemoryLog


def topic() -> Topic:
    return Topic("t", MemoryLog(), BatchCache(0), 0)


def writes(stage: SyncStage, of: Topic, *numbers: int) -> None:
    for number in numbers:
        stage.add(of, Write(number, Group(), [], 0, 0))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=40))
def test_the_slowest_barrier_decides(reports: list[tuple[int, int]]) -> None:
    stage, of = SyncStage(3), topic()
    writes(stage, of, *range(1, 10))
    came_to = [0, 0, 0]
    committed: list[int] = []
    for barrier, number in reports:
        came_to[barrier] = max(came_to[barrier], number)
        committed += [write.number for write in stage.reach(barrier, of, came_to[barrier])]
        assert committed == list(range(1, min(came_to) + 1)), "in order, each once"
        assert [write.number for write in stage.waiting(of)] == list(range(min(came_to) + 1, 10))
        assert (of in stage.topics) == (min(came_to) < 9)


def test_writes_of_a_failed_barrier_are_taken_back_in_order() -> None:
    stage, of = SyncStage(2), topic()
    writes(stage, of, 4, 5, 7)
    assert [write.number for write in stage.reach(0, of, 5)] == []
    assert [write.number for write in stage.reach(1, of, 4)] == [4]
    assert [write.number for write in stage.rollback(of)] == [5, 7]
    assert stage.reach(1, of, 7) == ()
    assert not stage.topics
