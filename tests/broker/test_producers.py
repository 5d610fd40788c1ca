"""Tests for a topic's table of idempotent producers."""

import json
from typing import Any

import pytest

from broker.letters import ORIGIN
from broker.state import SECOND, TIMESTAMP, Fixture, next_record
from trio_nsq.broker.state import producers as module
from trio_nsq.broker.state.producers import BatchNumber, LastBatch, Producers
from trio_nsq.broker.state.topic import StateError
from trio_nsq.broker.state.version import Version
from trio_nsq.log.record_metadata import (
    batch_number,
    is_about_messages,
    metadata_for_batch,
    metadata_for_channel,
    metadata_for_dead_letters,
)
from trio_nsq.protocol import pack_messages

NOW_NS = TIMESTAMP
HOUR_NS = 3600 * SECOND


def known(producers: Producers) -> list[str]:
    return [last.producer for last in producers.state()]


def rows(producers: Producers) -> list[tuple[str, int, int]]:
    return [(last.producer, last.number, last.sequence) for last in producers.state()]


def published(producers: Producers, name: str, number: int, now_ns: int) -> bool:
    return producers.has_published(BatchNumber(name, number), now_ns)


def test_highest_number_is_kept() -> None:
    producers = Producers(Version())
    for sequence, number in enumerate((3, 7, 5)):
        producers.record(LastBatch("p", number, sequence), NOW_NS)
    assert rows(producers) == [("p", 7, 1)]
    assert [published(producers, "p", number, NOW_NS) for number in (0, 6, 7, 8)] == [
        True,
        True,
        True,
        False,
    ]
    assert not published(producers, "q", 0, NOW_NS)
    assert (producers.number_of("p"), producers.number_of("q")) == (7, None)


def test_least_recently_used_producer_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PRODUCERS", 3)
    producers = Producers(Version())
    for sequence, name in enumerate("abc"):
        producers.record(LastBatch(name, 1, sequence), NOW_NS)
    assert producers.number_of("a") == 1  # a query is not a use
    later_ns = NOW_NS + HOUR_NS
    producers.record(LastBatch("b", 2, 3), later_ns - 2)
    assert not producers.has_room("d", later_ns - 1)
    assert producers.has_room("d", later_ns)
    producers.record(LastBatch("d", 1, 4), later_ns)
    assert known(producers) == ["c", "b", "d"]
    assert published(producers, "c", 1, later_ns)  # the batch is sent again
    assert not producers.has_room("e", later_ns)
    assert all(producers.has_room(name, later_ns) for name in "bcd")
    later_ns += HOUR_NS
    producers.record(LastBatch("e", 1, 5), later_ns)
    assert known(producers) == ["d", "c", "e"]
    assert list(producers.forgotten) == ["a", "b"]
    assert [producers.may_have_forgotten(name) for name in "abcdx"] == [True, True, False, False, True]
    producers.forget("e")
    assert not producers.may_have_forgotten("e")
    producers.record(LastBatch("e", 1, 5), later_ns)
    after = Producers(Version())
    after.restore(producers.state(), producers.used_s(), 6)
    assert after.state() == producers.state()
    assert not after.has_room("f", later_ns - 1)
    assert after.has_room("f", later_ns)


def test_recently_used_producers_are_never_forgotten() -> None:
    """Although there are slightly too many: they were admitted at the same time."""
    producers = Producers(Version())
    for number in range(10_005):
        producers.record(LastBatch(f"p{number}", 1, number), NOW_NS)
    assert known(producers) == [f"p{number}" for number in range(10_005)]
    assert not producers.has_room("new", NOW_NS + HOUR_NS - 1)
    producers.record(LastBatch("p7", 2, 10_005), NOW_NS + HOUR_NS)
    assert known(producers) == [*(f"p{number}" for number in range(5, 10_005) if number != 7), "p7"]


def test_state_without_times_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older version saved it, without the times of use."""
    monkeypatch.setattr(module, "MAX_PRODUCERS", 2)
    producers = Producers(Version())
    producers.restore([("a", 1, 0), ("b", 1, 1), ("c", 1, 2)], [], 3)
    assert known(producers) == ["a", "b", "c"]
    assert producers.has_room("d", NOW_NS)
    producers.record(LastBatch("d", 1, 3), NOW_NS)
    assert known(producers) == ["c", "d"]


def test_metadata_round_trip() -> None:
    metadata = metadata_for_batch("load:1", 2**63 - 1)
    assert batch_number(metadata) == ("load:1", 2**63 - 1)
    assert [batch_number(each) for each in (b"", metadata_for_channel("producer"))] == [None, None]
    assert [is_about_messages(each) for each in (metadata, b"", metadata_for_channel("c"))] == [
        False,
        False,
        True,
    ]


def publish(fixture: Fixture, producer: str, number: int) -> None:
    metadata = metadata_for_batch(producer, number)
    record = next_record(fixture.topic, pack_messages([b"a", b"b"]), fixture.ids.take(2), metadata=metadata)
    fixture.log.append([record], sync=False)
    fixture.topic.accept([record])


def saved(fixture: Fixture) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(fixture.topic.snapshot()))
    return state


def test_restart_uses_the_state_and_later_batches() -> None:
    fixture = Fixture()
    publish(fixture, "p", 1)
    publish(fixture, "q", 5)
    state = saved(fixture)
    assert state["producers"] == [["p", 1, 0], ["q", 5, 2]]
    assert state["producers_used"] == [TIMESTAMP // SECOND] * 2
    publish(fixture, "p", 2)
    assert rows(fixture.restarted(state).topic.producers) == [("q", 5, 2), ("p", 2, 4)]
    assert rows(fixture.restarted(None).topic.producers) == [("q", 5, 2), ("p", 2, 4)]
    # Saved by a version without batch numbers.
    del state["producers"]
    assert rows(fixture.restarted(state).topic.producers) == [("p", 2, 4)]


def test_restart_knows_which_run_gave_the_number() -> None:
    fixture = Fixture()
    for producer, instance in (("p", "i1"), ("q", "")):
        metadata = metadata_for_batch(producer, 0, instance)
        record = next_record(fixture.topic, pack_messages([b"a"]), fixture.ids.take(1), metadata=metadata)
        fixture.log.append([record], sync=False)
        fixture.topic.accept([record])
    state = saved(fixture)
    assert state["producer_instances"] == [["p", "i1", 0]]
    for after in (fixture.restarted(state), fixture.restarted(None)):
        found = {each.producer: each.instance for each in after.topic.producers.state()}
        assert found == {"p": "i1", "q": ""}


def test_restart_records_no_batch_that_the_state_has() -> None:
    """It reads the log from the first dead letter on that may also be in its channel."""
    fixture = Fixture()
    letter = metadata_for_dead_letters([ORIGIN])
    record = next_record(fixture.topic, pack_messages([b"a"]), fixture.ids.take(1), metadata=letter)
    fixture.log.append([record], sync=False)
    fixture.topic.accept([record])
    publish(fixture, "p", 1)
    fixture.topic.producers.forget("p")
    state = saved(fixture)
    assert state["settled"] < state["end"]
    assert fixture.restarted(state).topic.producers.state() == []


def test_producer_is_forgotten_in_the_state_as_in_the_topic() -> None:
    fixture = Fixture()
    for producer in "pqr":
        publish(fixture, producer, 1)
        assert published(fixture.topic.producers, producer, 1, TIMESTAMP + fixture.topic.end * SECOND)
    before, copy = saved(fixture), fixture.topic.copy(())
    assert copy.snapshot() == before
    copy.producers.forget("q")
    assert saved(fixture) == before
    fixture.topic.producers.forget("q")
    assert copy.snapshot() == saved(fixture) != before


def test_numbered_batches_are_not_dead_letters() -> None:
    fixture = Fixture()
    state = saved(fixture)
    publish(fixture, "p", 1)
    assert not fixture.topic.dead_letters.unconfirmed
    assert not fixture.restarted(state).topic.dead_letters.unconfirmed


@pytest.mark.parametrize(
    "wrong",
    [
        *({"producers": each} for each in (5, [["p"]], [["p", "one", 2]], [["p", 1, None]])),
        *({"producers_used": each} for each in (5, ["x"], [None])),
        *({"producer_instances": each} for each in (5, ["x"], [None])),
    ],
)
def test_invalid_state(wrong: dict[str, object]) -> None:
    fixture = Fixture()
    publish(fixture, "p", 1)
    with pytest.raises(StateError):
        fixture.restarted(saved(fixture) | wrong)


def test_each_change_of_the_saved_state_changes_the_version() -> None:
    version = Version()
    producers, seen = Producers(version), {version.number}
    producers.record(LastBatch("p", 1, 0), NOW_NS)
    seen.add(version.number)
    assert published(producers, "p", 1, NOW_NS + HOUR_NS)  # a use, whose time is saved
    seen.add(version.number)
    producers.forget("p")
    assert len({version.number, *seen}) == 4
