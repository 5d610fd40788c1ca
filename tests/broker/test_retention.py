"""Tests for retention: which files are kept after all channels have passed them, and when that is checked."""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from log.support import FailingFiles, HastyFiles
from trio_nsq.broker.state.cache import BatchCache
from trio_nsq.broker.state.checkpoint import Checkpoint
from trio_nsq.broker.state.deadline_heap import DeadlineHeap
from trio_nsq.broker.state.settings import TopicSettings
from trio_nsq.broker.state.topic import Topic
from trio_nsq.broker.storage import retention
from trio_nsq.broker.storage.data_folder import SavedCheckpoint
from trio_nsq.broker.storage.retention import (
    RetentionManager,
    kept_from,
    next_check_ns,
    wants_new_file,
)
from trio_nsq.log import DiskLog, RecordBatch
from trio_nsq.protocol import pack_messages

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
    created_ns: int = 0
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
def test_kept_files(time_ms: int, max_bytes: int, kept: int) -> None:
    assert kept_from(FILES, TopicSettings(time_ms, max_bytes), NOW) == kept


def test_only_the_first_kept_file_is_read() -> None:
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
def test_start_of_a_new_file(settings: TopicSettings, begun_ago_ms: int, size: int, wanted: bool) -> None:
    last = File(30, 0, size, NOW - begun_ago_ms * MS)
    assert wants_new_file([*FILES[:3], last], settings, NOW) is wanted
    assert not wants_new_file([*FILES[:3], File(30, 0, 32)], settings, NOW)  # it is empty


def test_next_check() -> None:
    """When the first kept file becomes too old, or the last one must be replaced by a new one."""
    settings = TopicSettings(retention_time_ms=32 * MINUTE)
    begun = File(30, 0, first_ns=NOW - MINUTE * MS)
    assert next_check_ns(FILES, settings, NOW) == NOW + 2 * MINUTE * MS
    assert next_check_ns(FILES[:1], settings, NOW) is None
    assert next_check_ns(FILES[3:], settings, NOW) is None
    assert next_check_ns(FILES[:2], TopicSettings(retention_time_ms=40 * MINUTE), NOW) == NOW
    assert next_check_ns([*FILES[:1], begun], settings, NOW) == NOW + 3 * MINUTE * MS
    assert next_check_ns([*FILES[:3], begun], settings, NOW) == NOW + 2 * MINUTE * MS
    for nothing_to_come in (TopicSettings(), TopicSettings(-1), TopicSettings(0, 5)):
        assert next_check_ns([*FILES, begun], nothing_to_come, NOW) is None


def test_schedule_returns_each_topic_when_it_is_due() -> None:
    schedule: DeadlineHeap[str] = DeadlineHeap()
    schedule.watch("a", 30)
    schedule.watch("b", 10)
    schedule.watch("a", 20)
    schedule.watch("c", None)
    assert schedule.take_all_due(9) == []
    assert schedule.take_all_due(10) == ["b"]
    assert schedule.take_all_due(20) == ["a"]
    assert schedule.take_all_due(29) == []
    assert schedule.take_all_due(30) == ["a"]
    assert schedule.take_all_due(10**20) == []


def test_schedule_does_not_grow_with_repeated_checks() -> None:
    schedule: DeadlineHeap[str] = DeadlineHeap()
    for now in range(1000):
        schedule.watch("a", 10_000)
        schedule.watch("a", now + 1)
        assert schedule.take_all_due(now + 1) == ["a"]
    assert len(pickle.dumps(schedule)) < 500


# ---------------------------------------------------------------------- checks of topics


class Kept:
    """A topic with a log of two files, the second of them empty, and its retention manager.

    The first file begins at NOW and has a message of this time, and another from five minutes later.
    """

    def __init__(self, folder: Path, settings: TopicSettings, files: HastyFiles) -> None:
        self.now_ns = NOW
        self.files = files
        self.log = DiskLog(folder, files=files, now_ns=lambda: self.now_ns)
        for sequence in (0, 1):
            self.now_ns = NOW + 5 * sequence * MINUTE * MS
            batch = RecordBatch(sequence, 1 + sequence, self.now_ns, 0, pack_messages([b"x" * 1000]))
            self.log.append([batch], sync=True)
        self.log.rotate_unless_empty()
        self.log.close()
        self.log = DiskLog(folder, files=files, now_ns=lambda: self.now_ns)
        self.topic = Topic("t", self.log, BatchCache(0), 0, 0, settings)
        self.topic.add_channel("c")
        self.retention = RetentionManager(lambda: self.now_ns, self.rotate)

    async def rotate(self, topic: Topic) -> bool:
        raise AssertionError

    def set_clock(self, minutes: float) -> None:
        self.now_ns = NOW + int(minutes * MINUTE) * MS

    def is_due(self) -> bool:
        """Whether the topic is due for a check."""
        return self.retention.schedule.take_all_due(self.now_ns) == ["t"]

    def checkpoint(self) -> Checkpoint:
        checkpoint = self.topic.checkpoint()
        for _ in checkpoint.encode():
            pass
        return checkpoint

    async def save(self) -> int | None:
        return await self.retention.discard(self.topic, SavedCheckpoint(self.checkpoint()), self.now_ns)


@pytest.fixture
def kept(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Kept]:
    kept = Kept(tmp_path / "t", request.param, FailingFiles())
    yield kept
    kept.log.close()


FORTY = TopicSettings(retention_time_ms=40 * MINUTE)


@pytest.mark.parametrize("kept", [FORTY], indirect=True)
async def test_loaded_topic_is_checked_when_its_first_file_may_be_too_old(kept: Kept) -> None:
    kept.topic.channels["c"].empty()
    kept.retention.schedule_loaded(kept.topic)
    kept.set_clock(39.9)
    assert not kept.is_due()
    kept.set_clock(40)
    assert kept.is_due()
    assert not await kept.retention.has_work(kept.topic)  # the last message is not that old
    kept.set_clock(44.9)
    assert not kept.is_due()
    kept.set_clock(45.1)
    assert kept.is_due()
    assert await kept.retention.has_work(kept.topic)
    assert await kept.save() is None
    assert kept.log.first_sequence == 2


@pytest.mark.parametrize("kept", [FORTY, TopicSettings()], indirect=True)
async def test_files_that_a_channel_needs_are_not_checked(kept: Kept) -> None:
    kept.retention.schedule_loaded(kept.topic)
    kept.set_clock(100)
    assert not kept.is_due()
    assert not await kept.retention.has_work(kept.topic)
    assert await kept.save() is None
    assert kept.log.first_sequence == 0


@pytest.mark.parametrize("kept", [TopicSettings()], indirect=True)
async def test_files_are_kept_until_the_state_that_does_not_need_them_is_saved(kept: Kept) -> None:
    saved = SavedCheckpoint(kept.checkpoint())
    kept.topic.channels["c"].empty()
    await kept.retention.discard(kept.topic, saved, kept.now_ns)
    assert kept.log.first_sequence == 0  # a crash now brings the channel back to them
    await kept.save()
    assert kept.log.first_sequence == 2


@pytest.mark.parametrize("kept", [TopicSettings(), TopicSettings(retention_bytes=1000)], indirect=True)
async def test_expired_files_of_a_loaded_topic_are_deleted_at_once(kept: Kept) -> None:
    kept.topic.channels["c"].empty()
    kept.retention.schedule_loaded(kept.topic)
    assert kept.is_due()
    assert await kept.retention.has_work(kept.topic)


@pytest.mark.parametrize("kept", [TopicSettings(-1), TopicSettings(retention_bytes=9000)], indirect=True)
async def test_loaded_topic_that_keeps_everything_is_not_checked(kept: Kept) -> None:
    kept.topic.channels["c"].empty()
    kept.retention.schedule_loaded(kept.topic)
    kept.set_clock(10**6)
    assert not kept.is_due()


@pytest.mark.parametrize("kept", [TopicSettings(ttl_ms=60 * MINUTE)], indirect=True)
async def test_waiting_messages_are_checked_and_saved_when_too_old(kept: Kept) -> None:
    kept.retention.schedule_loaded(kept.topic)
    kept.set_clock(5 + 60 / 16)
    assert kept.is_due()
    assert not await kept.retention.has_work(kept.topic)
    assert not kept.is_due()
    kept.set_clock(60.1)
    assert kept.is_due()
    assert await kept.retention.has_work(kept.topic)
    assert kept.topic.channels["c"].messages.expired_count == 1
    kept.set_clock(65.1)
    assert kept.is_due()
    assert await kept.retention.has_work(kept.topic)
    assert kept.topic.channels["c"].messages.expired_count == 2
    await kept.save()
    kept.set_clock(10**6)
    assert kept.is_due()
    assert not await kept.retention.has_work(kept.topic)
    assert not kept.is_due()  # nothing waits


@pytest.mark.parametrize("kept", [TopicSettings()], indirect=True)
async def test_failed_carry_forward_is_retried(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Although nothing else happens in the topic."""
    monkeypatch.setattr(retention, "PINNED_BYTES", 1000)
    monkeypatch.setattr(retention, "CARRIED_MESSAGES_SHARE", 1.0)
    monkeypatch.setattr(retention, "CARRIED_BYTES_SHARE", 1.0)
    channel = kept.topic.channels["c"]
    channel.empty()
    channel.messages.requeued.add([(1, 1, None)])
    files = kept.files
    assert isinstance(files, FailingFiles)
    files.failing["sync"] = 28
    again_ns = await kept.save()
    assert again_ns == kept.now_ns + 30_000 * MS
    assert kept.log.first_sequence == 0
    assert "No space left" in caplog.text
    files.heal()
    assert await kept.save() == again_ns  # not yet
    assert not kept.log.has_carried_forward
    assert await kept.retention.has_work(kept.topic)  # the file was passed
    kept.now_ns = again_ns
    assert await kept.save() is None
    assert kept.log.first_sequence == 2
    assert kept.log.read_carried_forward(1)
    channel.empty()
    assert await kept.save() is None
    assert not kept.log.has_carried_forward


@pytest.mark.parametrize("kept", [TopicSettings()], indirect=True)
@pytest.mark.parametrize(
    ("rule", "limit"),
    [
        ("CARRIED_MESSAGES_SHARE", 0.4),
        ("CARRIED_BYTES_SHARE", 0.4),
        ("MAX_CARRIED_MESSAGES", 0),
        ("MAX_CARRIED_BYTES", 1000),
        ("PINNED_BYTES", 3000),
    ],
)
async def test_each_rule_alone_prevents_carrying_forward(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, rule: str, limit: float
) -> None:
    """One of two messages is unfinished."""
    for name, value in {
        "PINNED_BYTES": 1000,
        "CARRIED_MESSAGES_SHARE": 0.5,
        "CARRIED_BYTES_SHARE": 0.5,
    }.items():
        monkeypatch.setattr(retention, name, value)
    kept.topic.channels["c"].empty()
    kept.topic.channels["c"].messages.requeued.add([(1, 1, None)])
    with monkeypatch.context() as stricter:
        stricter.setattr(retention, rule, limit)
        await kept.save()
        assert (kept.log.first_sequence, kept.log.has_carried_forward) == (0, False)
    kept.set_clock(10)
    await kept.save()
    assert (kept.log.first_sequence, kept.log.has_carried_forward) == (2, True)
