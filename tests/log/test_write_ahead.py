"""Tests for write-ahead files and their replay, without a broker."""

import random
from collections.abc import Sequence
from errno import ENOSPC
from pathlib import Path

import pytest

from log.support import FIRST, HastyFiles, SimulatedDisk, batch, contents, segment_files, sync_now
from trio_nsq.log import DiskLog, Files, LogWriteError, RecordBatch
from trio_nsq.log.write_ahead.file import WriteAheadFile
from trio_nsq.log.write_ahead.replay import Replay


class Ahead:
    """Topics whose logs are not synced, and their write-ahead files.

    Attributes:
        folder: The data folder.
        written: What each topic's log must have.
    """

    def __init__(self, tmp_path: Path, files: Files | None = None, segment_bytes: int = 10**6) -> None:
        self.folder = tmp_path
        self.files = files or HastyFiles()
        self.logs: dict[str, DiskLog] = {}
        self.written: dict[str, list[RecordBatch]] = {}
        self._segment_bytes = segment_bytes
        self.file = WriteAheadFile.create(self.files, tmp_path, 1)

    def folder_of(self, topic: str) -> Path:
        return self.folder / f"{topic}.topic"

    def write(self, *topics: str, sync: bool = True) -> None:
        """Write a message to each topic, and log them ahead with one sync."""
        parts = []
        for topic in topics:
            log = self.logs.get(topic)
            if log is None:
                log = self.logs[topic] = self.open(topic)
                log.rotate()
            one = batch(log.written_sequence, b"%d of %s" % (log.written_sequence, topic.encode()))
            if log.needs_rotation(one.record_bytes):
                log.rotate()
            log.write([one])
            part = log.pending_wal()
            assert part is not None
            parts.append((topic.encode(), part))
            self.written.setdefault(topic, []).append(one)
        self.file.append(parts)
        for topic in topics:
            self.logs[topic].mark_in_wal()
        if sync:
            sync_now(self.file)
            for topic in topics:
                self.logs[topic].commit(self.logs[topic].written_sequence)

    def next_file(self) -> None:
        """Continue with another write-ahead file."""
        number = int(self.file.path.suffix[1:])
        self.file = WriteAheadFile.create(self.files, self.folder, number + 1)

    def open(self, topic: str) -> DiskLog:
        return DiskLog(self.folder_of(topic), files=self.files, segment_bytes=self._segment_bytes)

    def last_segment(self, topic: str) -> Path:
        return segment_files(self.folder_of(topic))[-1]

    def cut_segments(self, keep: int = 52) -> None:
        """Lose what was not synced: keep only this many bytes of each topic's last segment."""
        for topic in self.logs:
            path = self.last_segment(topic)
            path.write_bytes(path.read_bytes()[:keep])

    def replayed(self, topic: str) -> Sequence[RecordBatch]:
        """Replay, and return what the topic's log has."""
        replay = Replay(self.files, self.folder)
        replay.apply(topic, self.folder_of(topic))
        log = self.open(topic)
        found = contents(log)
        log.close()
        return found


@pytest.fixture
def ahead(tmp_path: Path) -> Ahead:
    """Three topics with two messages each, in two write-ahead files."""
    ahead = Ahead(tmp_path)
    ahead.write("a", "b", "c")
    ahead.next_file()
    ahead.write("c", "a", "b")
    return ahead


@pytest.mark.parametrize("keep", [52, 53, 100, 130, 150])
def test_lost_ends_of_segments_are_written_again(ahead: Ahead, keep: int) -> None:
    ahead.cut_segments(keep)
    for _ in range(2):
        for topic in "abc":
            assert ahead.replayed(topic) == ahead.written[topic]


def test_lost_pages_in_the_middle_are_written_again(ahead: Ahead) -> None:
    path = ahead.last_segment("a")
    data = path.read_bytes()
    path.write_bytes(data[:60] + bytes(40) + data[100:])
    assert ahead.replayed("a") == ahead.written["a"]


def test_nothing_is_written_if_the_segments_are_whole(ahead: Ahead) -> None:
    before = ahead.last_segment("a").stat().st_mtime_ns
    assert ahead.replayed("a") == ahead.written["a"]
    assert ahead.last_segment("a").stat().st_mtime_ns == before


def test_numbers_order_the_files(tmp_path: Path) -> None:
    ahead = Ahead(tmp_path)
    for _ in range(11):  # 10 sorts after 9
        ahead.write("a", "b")
        ahead.next_file()
    ahead.cut_segments()
    assert ahead.replayed("a") == ahead.written["a"]
    assert Replay(ahead.files, tmp_path).next_number == 13


def test_deleted_and_recreated_topic_gets_nothing(ahead: Ahead) -> None:
    for path in ahead.folder_of("a").iterdir():
        path.unlink()
    log = ahead.open("a")
    log.rotate()
    log.close()
    assert ahead.replayed("a") == []


def test_deleted_segment_stays_deleted(ahead: Ahead) -> None:
    ahead.last_segment("a").unlink()
    assert ahead.replayed("a") == []
    assert not segment_files(ahead.folder_of("a"))


@pytest.fixture
def old_backup(tmp_path: Path) -> Ahead:
    """As of a backup: the segments have no messages, and the write-ahead file lacks the first ones."""
    ahead = Ahead(tmp_path)
    ahead.write("a", "b")
    ahead.file.path.unlink()
    ahead.next_file()
    ahead.write("a", "b")
    ahead.cut_segments()
    return ahead


def test_backup_that_lacks_earlier_messages_gets_no_gap(old_backup: Ahead) -> None:
    ahead = old_backup
    assert ahead.replayed("a") == []
    assert ahead.last_segment("a").stat().st_size == 52


def test_zeros_of_a_backup_are_no_earlier_messages(old_backup: Ahead) -> None:
    ahead = old_backup
    for topic in ahead.logs:
        with ahead.last_segment(topic).open("ab") as file:
            file.write(bytes(1000))
    assert ahead.replayed("a") == []
    assert ahead.last_segment("a").stat().st_size == 52


def test_backup_that_lacks_messages_between_gets_no_gap(tmp_path: Path) -> None:
    """Zeros follow the last message that it has."""
    ahead = Ahead(tmp_path)
    ahead.write("a", "b")
    ahead.write("a", "b")
    ahead.file.path.unlink()
    ahead.next_file()
    ahead.write("a", "b")
    path, first = ahead.last_segment("a"), ahead.written["a"][:1]
    path.write_bytes(path.read_bytes()[: 52 + first[0].record_bytes] + bytes(1000))
    assert ahead.replayed("a") == first


@pytest.mark.parametrize("body", [b"x", bytes(300)])
def test_entries_behind_a_message_are_written_into_the_zeros(tmp_path: Path, body: bytes) -> None:
    """The message may end in zeros, too."""
    ahead = Ahead(tmp_path)
    log = ahead.logs["a"] = ahead.open("a")
    first = batch(0, body)
    log.append([first], sync=True)
    ahead.written["a"] = [first]
    ahead.write("a", "b")
    kept = 52 + first.record_bytes
    data = ahead.last_segment("a").read_bytes()
    ahead.last_segment("a").write_bytes(data[:kept] + bytes(1000))
    assert len(ahead.replayed("a")) == 2


def test_zeros_ahead_are_no_unfinished_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    ahead = Ahead(tmp_path)
    for _ in range(20):
        ahead.write("a", "b")
    assert ahead.file.path.stat().st_size > ahead.file.size
    assert ahead.replayed("a") == ahead.written["a"]
    assert "unfinished" not in caplog.text


def test_few_syncs_make_the_file_longer(tmp_path: Path) -> None:
    ahead = Ahead(tmp_path)
    sizes = set()
    for _ in range(300):
        ahead.write("a", "b")
        sizes.add(ahead.file.path.stat().st_size)
    assert len(sizes) == 1


class NoZeros(HastyFiles):
    """A disk that has no space for zeros, but for a part of them."""

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        if any(part and not bytes(part).strip(b"\0") for part in parts):
            super().write(fd, offset, [parts[0][:100]])
            raise OSError(ENOSPC, "No space left on device")
        super().write(fd, offset, parts)


def test_write_ahead_log_goes_on_without_space_for_zeros(tmp_path: Path) -> None:
    ahead = Ahead(tmp_path, NoZeros())
    for _ in range(5):
        ahead.write("a", "b")
    assert ahead.file.error is None
    ahead.cut_segments()
    assert ahead.replayed("a") == ahead.written["a"]


def test_old_entry_does_not_replace_part_of_a_later_record(old_backup: Ahead) -> None:
    """The write-ahead file stays after the first start, for another topic."""
    ahead = old_backup
    assert ahead.replayed("a") == []
    log = ahead.open("a")
    later = [batch(0, b"x" * 300), batch(1, b"y" * 300)]
    log.append(later, sync=True)
    log.close()
    assert ahead.replayed("a") == later


def test_refused_messages_do_not_replace_later_ones(tmp_path: Path) -> None:
    ahead = Ahead(tmp_path)
    ahead.write("a", "b")
    ahead.write("a", "b", sync=False)  # their sync fails, and the write-ahead file cannot be cut
    log = ahead.logs["a"]
    log.rollback()
    assert log.pending_wal() is None, "after a cut, the log needs a sync of its own"
    ahead.written["a"][-1] = later = batch(log.next_sequence, b"something else, and longer than before")
    log.write([later])
    log.sync()
    log.commit(later.next_sequence)
    assert ahead.replayed("a") == ahead.written["a"]
    assert log.pending_wal() is not None


def test_write_that_was_cut_needs_a_sync_of_the_log(tmp_path: Path) -> None:
    ahead = Ahead(tmp_path)
    ahead.write("a", "b")
    log = ahead.logs["a"]
    log.write([batch(log.written_sequence, b"refused")])
    log.rollback()
    assert log.pending_wal() is None
    log.sync()
    part = log.pending_wal()
    assert part is not None
    assert part.size == 0


def test_unfinished_write_is_ignored(ahead: Ahead) -> None:
    size = ahead.file.synced_size
    ahead.write("a", "b", sync=False)
    path = ahead.file.path
    data = path.read_bytes()
    for end in range(size, ahead.file.size):
        path.write_bytes(data[:size] + bytes(end - size) + data[end:])
        replay = Replay(ahead.files, ahead.folder)
        assert not replay.damage


def test_damaged_entry_is_reported_and_costs_nothing_else(tmp_path: Path) -> None:
    ahead = Ahead(tmp_path)
    at = ahead.file.size
    ahead.write("a")
    end = ahead.file.size
    ahead.write("b")
    ahead.write("a")
    data = ahead.file.path.read_bytes()
    chance = random.Random(1)
    for position in range(at, end):
        damaged = bytearray(data)
        damaged[position] ^= 1 << chance.randrange(8)
        ahead.file.path.write_bytes(damaged)
        ahead.cut_segments()
        found = ahead.replayed("a")
        assert len(Replay(ahead.files, tmp_path).damage) == 1, position
        assert found == ahead.written["a"][1:], position
        assert ahead.replayed("b") == ahead.written["b"]


@pytest.mark.parametrize("at", range(32))
def test_damaged_bit_of_a_header_loses_nothing(ahead: Ahead, at: int) -> None:
    data = bytearray(ahead.file.path.read_bytes())
    data[at] ^= 1 << at % 8
    ahead.file.path.write_bytes(data)
    ahead.cut_segments()
    replay = Replay(ahead.files, ahead.folder)
    assert replay.damage == [
        (ahead.file.path, "the file's header is damaged; its entries are still readable")
    ]
    for topic in ("a", "b", "c"):
        assert ahead.replayed(topic) == ahead.written[topic]


def test_file_with_a_lost_header_is_reported(ahead: Ahead) -> None:
    data = bytearray(ahead.file.path.read_bytes())
    data[14] ^= 1
    data[20] ^= 1
    ahead.file.path.write_bytes(data)
    ((path, what),) = Replay(ahead.files, ahead.folder).damage
    assert path == ahead.file.path
    assert "messages are lost" in what


@pytest.mark.parametrize("size", [0, 1, 31, 32])
def test_file_whose_creation_was_interrupted_is_removed(ahead: Ahead, size: int) -> None:
    path = ahead.file.path
    path.write_bytes(path.read_bytes()[:size])
    replay = Replay(ahead.files, ahead.folder)
    assert not replay.damage
    replay.remove_files()
    assert not list(ahead.folder.glob("write-ahead*"))


def test_file_of_a_later_format_is_refused(ahead: Ahead) -> None:
    data = bytearray(ahead.file.path.read_bytes())
    data[11] = 2
    ahead.file.path.write_bytes(data[:32] + b"entries of a later format")
    with pytest.raises(ValueError, match="format 2"):
        Replay(ahead.files, ahead.folder)


def test_message_with_the_bytes_of_an_entry_is_not_an_entry(tmp_path: Path) -> None:
    ahead = Ahead(tmp_path)
    ahead.write("victim", "b")
    entry = ahead.file.path.read_bytes()[32 : ahead.file.size]
    ahead.next_file()
    log = ahead.logs["b"]
    log.write([batch(log.written_sequence, entry)])
    part = log.pending_wal()
    assert part is not None
    ahead.file.append([(b"b", part)])
    sync_now(ahead.file)
    data = bytearray(ahead.file.path.read_bytes())
    data[33] ^= 1  # so that replay searches for the next entry
    ahead.file.path.write_bytes(data)
    assert set(Replay(ahead.files, tmp_path).topics) == {"victim", "b"}
    (tmp_path / "write-ahead.1").unlink()
    assert Replay(ahead.files, tmp_path).topics == []


def test_failed_sync_leaves_nothing_to_replay(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    ahead = Ahead(tmp_path, disk)
    ahead.write("a", "b")
    ahead.write("a", "b", sync=False)
    disk.sync_fails = True
    with pytest.raises(LogWriteError):
        sync_now(ahead.file)
    disk.sync_fails = False
    with pytest.raises(LogWriteError):  # the kernel would report success now
        sync_now(ahead.file)
    ahead.file.discard_unsynced()
    ahead.cut_segments()
    assert ahead.replayed("a") == ahead.written["a"][:1]


class FullFiles(HastyFiles):
    """A disk that may have no room for a write-ahead file."""

    is_full = False

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        if self.is_full and "write-ahead" in Path(f"/proc/self/fd/{fd}").readlink().name:
            raise OSError(ENOSPC, "full")
        super().write(fd, offset, parts)


def test_a_sync_during_which_an_append_fails_is_not_reported_as_stored(tmp_path: Path) -> None:
    """The file is given up, and what no sync has reported is discarded."""
    files = FullFiles()
    ahead = Ahead(tmp_path, files)
    ahead.write("a", "b")
    ahead.write("a", "b", sync=False)
    point = ahead.file.sync_point()
    files.is_full = True
    with pytest.raises(LogWriteError):
        ahead.write("a", "b", sync=False)
    point.sync()
    assert ahead.file.end_sync(point, None) is not None
    ahead.file.discard_unsynced()
    ahead.cut_segments()
    files.is_full = False
    assert ahead.replayed("a") == ahead.written["a"][:1]


@pytest.mark.parametrize("segment_bytes", [200, 10**6])
def test_power_cuts_lose_nothing_synced(tmp_path: Path, segment_bytes: int) -> None:
    disk = SimulatedDisk()
    (tmp_path / "d").mkdir()
    ahead = Ahead(tmp_path / "d", disk, segment_bytes)
    chance = random.Random(3)
    cuts = 0
    for number in range(25):
        ahead.write("a")
        if number % 7 == 3:
            ahead.logs["a"].sync()
        if number % 9 == 5:
            ahead.logs["a"].sync()
            ahead.file.remove()
            ahead.next_file()
        for left in disk.power_cuts():
            cuts += 1
            folder = tmp_path / f"after{cuts}"
            (folder / "a.topic").mkdir(parents=True)
            for name, content in left.items():
                to = folder if name.startswith("write-ahead") else folder / "a.topic"
                (to / name).write_bytes(content)
            for _ in range(chance.randint(1, 2)):
                replay = Replay(HastyFiles(), folder)
                replay.apply("a", folder / "a.topic")
            log = DiskLog(folder / "a.topic", files=HastyFiles(), segment_bytes=segment_bytes)
            assert contents(log) == ahead.written["a"], (number, cuts)
            log.close()
    assert FIRST in {path.name for path in ahead.folder_of("a").iterdir()}
