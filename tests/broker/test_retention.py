"""What is kept of a topic's log when every channel has passed it, and when that is looked at."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from trio_nsq.broker.retention import RetentionSchedule, kept_from, look_again_ns, wants_new_file
from trio_nsq.broker.settings import TopicSettings

MS = 1_000_000
MINUTE = 60_000
NOW = 1_700_000_000_000 * MS


@dataclass(frozen=True)
class File:
    """A file of ten messages."""

    base_sequence: int
    newest_age_ms: int
    size: int = 1000
    first_ns: int = 0
    reads: Sequence[int] = ()

    @property
    def next_sequence(self) -> int:
        return self.base_sequence + 10

    def last_ns(self) -> int:
        return NOW - self.newest_age_ms * MS


FILES = [File(0, 40 * MINUTE), File(10, 30 * MINUTE), File(20, 20 * MINUTE), File(30, 10 * MINUTE)]


@pytest.mark.parametrize(
    ("time_ms", "max_bytes", "kept"),
    [
        (0, 0, 40),
        (-1, 0, 0),
        (0, -1, 0),
        (-1, -1, 0),
        (30 * MINUTE, 0, 10),
        (30 * MINUTE, -1, 10),
        (30 * MINUTE - 1, 0, 20),
        (9 * MINUTE, 0, 40),
        (90 * MINUTE, 0, 0),
        (0, 2500, 20),
        (-1, 2500, 20),
        (0, 4001, 0),
        (0, 900, 40),
        (30 * MINUTE, 2500, 20),
        (15 * MINUTE, 2500, 30),
        (15 * MINUTE, 100, 40),
    ],
)
def test_what_is_kept(time_ms: int, max_bytes: int, kept: int) -> None:
    assert kept_from(FILES, TopicSettings(time_ms, max_bytes), NOW) == kept


def test_files_that_are_kept_are_not_read_but_for_the_first() -> None:
    class Unread(File):
        def last_ns(self) -> int:
            raise AssertionError("read")

    files = [*FILES[:2], Unread(20, 0), Unread(30, 0)]
    assert kept_from(files, TopicSettings(30 * MINUTE), NOW) == 10
    assert kept_from([Unread(0, 0), *FILES[1:]], TopicSettings(-1, 2500), NOW) == 20


@pytest.mark.parametrize(
    ("settings", "begun_ago_ms", "size", "wanted"),
    [
        (TopicSettings(), 10**9, 10**9, False),
        (TopicSettings(retention_time_ms=-1, retention_bytes=-1), 10**9, 10**9, False),
        (TopicSettings(retention_time_ms=80 * MINUTE), 10 * MINUTE - 1, 10**9, False),
        (TopicSettings(retention_time_ms=80 * MINUTE), 10 * MINUTE, 100, True),
        (TopicSettings(retention_bytes=8 * 10**6), 10**9, 10**6, False),
        (TopicSettings(retention_bytes=8 * 10**6), 10**9, 10**6 + 1, True),
        (TopicSettings(retention_bytes=8), 10**9, 65_000, False),
        (TopicSettings(retention_bytes=8), 10**9, 66_000, True),
    ],
)
def test_when_a_new_file_is_begun(
    settings: TopicSettings, begun_ago_ms: int, size: int, wanted: bool
) -> None:
    last = File(30, 0, size, NOW - begun_ago_ms * MS)
    assert wants_new_file([*FILES[:3], last], settings, NOW) is wanted
    assert not wants_new_file([*FILES[:3], File(30, 0, 32)], settings, NOW)  # it is empty


def test_when_to_look_again() -> None:
    """When the first of the files that is kept has had its time, or the last one has to make way."""
    settings = TopicSettings(retention_time_ms=32 * MINUTE)
    begun = File(30, 0, first_ns=NOW - MINUTE * MS)
    assert look_again_ns(FILES, settings, NOW) == NOW + 2 * MINUTE * MS
    assert look_again_ns(FILES[:1], settings, NOW) is None
    assert look_again_ns([*FILES[:1], begun], settings, NOW) == NOW + 3 * MINUTE * MS
    assert look_again_ns([*FILES[:3], begun], settings, NOW) == NOW + 2 * MINUTE * MS
    for nothing_to_come in (TopicSettings(), TopicSettings(-1), TopicSettings(0, 5)):
        assert look_again_ns([*FILES, begun], nothing_to_come, NOW) is None


def test_the_schedule_tells_each_topic_when_its_time_comes() -> None:
    schedule = RetentionSchedule()
    schedule.look_at("a", 30)
    schedule.look_at("b", 10)
    schedule.look_at("a", 20)
    schedule.look_at("c", None)
    assert schedule.take_due(9) == []
    assert schedule.take_due(10) == ["b"]
    assert schedule.take_due(20) == ["a"]
    assert schedule.take_due(29) == []
    assert schedule.take_due(30) == ["a"]
    assert schedule.take_due(10**20) == []


def test_the_schedule_does_not_grow_with_every_look() -> None:
    schedule = RetentionSchedule()
    for now in range(1000):
        schedule.look_at("a", 10_000)
        schedule.look_at("a", now + 1)
        assert schedule.take_due(now + 1) == ["a"]
    assert len(schedule._heap) == 1
