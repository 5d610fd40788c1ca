"""What a topic knows of its producers."""

import json
from typing import Any

import pytest

from broker.state import Fixture, next_record
from trio_nsq.broker.state import producers as module
from trio_nsq.broker.state.note import batch_number, is_about_messages, note_of_batch, note_of_channel
from trio_nsq.broker.state.producers import LastBatch, Producers
from trio_nsq.broker.state.topic import StateError
from trio_nsq.protocol import pack_messages


def known(producers: Producers) -> list[str]:
    return [last.producer for last in producers.state()]


def test_the_greatest_number_counts() -> None:
    producers = Producers()
    for sequence, number in enumerate((3, 7, 5)):
        producers.note(LastBatch("p", number, sequence))
    assert producers.state() == [("p", 7, 1)]
    assert [producers.has_published("p", number) for number in (0, 6, 7, 8)] == [True, True, True, False]
    assert not producers.has_published("q", 0)
    assert (producers.number_of("p"), producers.number_of("q")) == (7, None)


def test_the_one_that_is_unused_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PRODUCERS", 3)
    producers = Producers()
    for sequence, name in enumerate("abc"):
        producers.note(LastBatch(name, 1, sequence))
    assert producers.number_of("a") == 1  # to ask is not to use
    producers.note(LastBatch("b", 2, 3))
    producers.note(LastBatch("d", 1, 4))
    assert known(producers) == ["c", "b", "d"]
    assert producers.has_published("c", 1)  # somebody sends it again
    producers.note(LastBatch("e", 1, 5))
    assert known(producers) == ["d", "c", "e"]
    after = Producers()
    after.restore(producers.state(), 6)
    assert after.state() == producers.state()


def test_there_are_10_000() -> None:
    producers = Producers()
    for number in range(10_005):
        producers.note(LastBatch(f"p{number}", 1, number))
    assert known(producers) == [f"p{number}" for number in range(5, 10_005)]


def test_a_note_is_read_as_what_it_was_written() -> None:
    note = note_of_batch("load:1", 2**63 - 1)
    assert batch_number(note) == ("load:1", 2**63 - 1)
    assert [batch_number(each) for each in (b"", note_of_channel("producer"))] == [None, None]
    assert [is_about_messages(each) for each in (note, b"", note_of_channel("c"))] == [False, False, True]


def publish(fixture: Fixture, producer: str, number: int) -> None:
    note = note_of_batch(producer, number)
    record = next_record(fixture.topic, pack_messages([b"a", b"b"]), fixture.ids.take(2), note=note)
    fixture.log.append([record], sync=False)
    fixture.topic.accept([record])


def saved(fixture: Fixture) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(fixture.topic.snapshot()))
    return state


def test_a_restart_goes_on_from_the_state_and_what_came_after_it() -> None:
    fixture = Fixture()
    publish(fixture, "p", 1)
    publish(fixture, "q", 5)
    state = saved(fixture)
    assert state["producers"] == [["p", 1, 0], ["q", 5, 2]]
    publish(fixture, "p", 2)
    assert fixture.restarted(state).topic.producers.state() == [("q", 5, 2), ("p", 2, 4)]
    assert fixture.restarted(None).topic.producers.state() == [("q", 5, 2), ("p", 2, 4)]
    # One that was saved by a program that knew nothing of numbers.
    del state["producers"]
    assert fixture.restarted(state).topic.producers.state() == [("p", 2, 4)]


def test_numbered_batches_are_no_dead_letters() -> None:
    fixture = Fixture()
    state = saved(fixture)
    publish(fixture, "p", 1)
    assert not fixture.topic.unsettled
    assert not fixture.restarted(state).topic.unsettled


@pytest.mark.parametrize("producers", [5, [["p"]], [["p", "one", 2]], [["p", 1, None]]])
def test_a_state_that_is_none(producers: object) -> None:
    fixture = Fixture()
    publish(fixture, "p", 1)
    with pytest.raises(StateError):
        fixture.restarted(saved(fixture) | {"producers": producers})
