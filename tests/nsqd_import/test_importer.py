"""Tests for imports: atomicity, refusals, and files that must not change."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest

from log.support import FailingFiles, HastyFiles
from nsqd_import.nsqd_files import Queued, write_metadata, write_queue
from trio_nsq.broker import StartupError
from trio_nsq.broker.storage.data_folder import DataFolder
from trio_nsq.broker.storage.verify import topic_folders, verify_topic
from trio_nsq.log import DiskLog, Files, LogWriteError
from trio_nsq.nsqd_import.importer import IfExists, Outcome, TopicReport, import_topics, queue_bytes
from trio_nsq.nsqd_import.nsqd_folder import NsqdFolder
from trio_nsq.nsqd_import.nsqd_metadata import ImportRefused

TESTS = Path(__file__).parents[1]
NAMES = ["clicks", "orders", "quiet"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The data folder of an nsqd with three topics."""
    source = tmp_path / "nsqd"
    write_metadata(
        source, {"orders": ["only"], "clicks": ["a", "b"], "quiet": []}, paused=["orders", "clicks/b"]
    )
    write_queue(source, "clicks", [Queued(7), Queued(8)])
    write_queue(source, "clicks:a", [Queued(3), Queued(4), Queued(1, attempts=2)])
    write_queue(source, "clicks:b", [Queued(number) for number in range(1, 7)])
    write_queue(source, "orders:only", [Queued(1, body=b"an order")])
    return source


@contextmanager
def opened(source: Path) -> Iterator[NsqdFolder]:
    with closing(NsqdFolder(source)) as folder:
        yield folder


def run(source: Path, data_path: Path, **options: Any) -> list[TopicReport]:
    """Import everything."""
    options = {"files": HastyFiles()} | options
    with opened(source) as folder:
        return list(import_topics(folder, data_path, **options))


def state(data_path: Path, topic: str) -> dict[str, Any]:
    """Return a topic's saved state."""
    found: dict[str, Any] = json.loads((data_path / "topics" / f"{topic}.topic" / "state.json").read_bytes())
    return found


def bodies(data_path: Path, topic: str) -> list[bytes]:
    """Return all messages in a topic's log."""
    log = DiskLog(data_path / "topics" / f"{topic}.topic", files=HastyFiles())
    found = [body for batch in log.read(0) for body in batch.messages.bodies()]
    log.close()
    return found


def everything(folder: Path) -> dict[str, bytes]:
    """Return every file in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_complete(data_path: Path) -> None:
    """Check that all of `source` was imported, and nothing else."""
    assert sorted(path.name for path in (data_path / "topics").iterdir()) == [
        f"{name}.topic" for name in NAMES
    ]
    for folder in topic_folders(data_path):
        assert verify_topic(folder).findings == []
    assert bodies(data_path, "clicks") == [b"message %d" % number for number in range(1, 9)]
    assert bodies(data_path, "orders") == [b"an order"]


def test_import_of_everything(tmp_path: Path, source: Path) -> None:
    before = everything(source)
    done = 0

    def progress(more_bytes: int) -> None:
        nonlocal done
        done += more_bytes

    with opened(source) as folder:
        total = queue_bytes(folder)
    clicks, orders, quiet = run(source, tmp_path / "ours", progress=progress)
    assert 0 < done <= total
    assert everything(source) == before
    check_complete(tmp_path / "ours")
    assert [report.outcome for report in (clicks, orders, quiet)] == [Outcome.IMPORTED] * 3
    assert (clicks.messages, clicks.waiting, clicks.paused, orders.paused) == (8, 2, False, True)
    assert [(each.name, each.paused, each.messages, each.attempted) for each in clicks.channels] == [
        ("a", False, 3, 1),
        ("b", True, 6, 0),
    ]
    found = state(tmp_path / "ours", "clicks")
    assert (found["paused"], found["distribution_point"], found["end"]) == (False, 6, 8)
    assert [
        (each["name"], each["paused"], each["cursor"], each["holes"], each["unfinished"])
        for each in found["channels"]
    ] == [("a", False, 2, [[4, 6]], [[0, 2]]), ("b", True, 0, [], [])]
    assert state(tmp_path / "ours", "orders")["paused"]


def test_dry_run_creates_nothing(tmp_path: Path, source: Path) -> None:
    planned = run(source, tmp_path / "ours", dry_run=True)
    assert not (tmp_path / "ours").exists()
    assert {report.outcome for report in planned} == {Outcome.PLANNED}
    done = run(source, tmp_path / "ours")
    for report in planned:
        report.outcome = Outcome.IMPORTED
    assert planned == done
    before = everything(tmp_path / "ours")
    again = run(source, tmp_path / "ours", dry_run=True)
    assert {report.outcome for report in again} == {Outcome.EARLIER}
    assert everything(tmp_path / "ours") == before


# ---------------------------------------------------------------------- atomicity


def test_killed_import_can_be_repeated(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "nsqd_import.dying", source, folder],
        cwd=TESTS,
        capture_output=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    kills = int(done.stdout)
    assert kills > 20
    earlier: set[int] = set()
    for number in range(kills):
        data_path = folder / str(number)
        there = topic_folders(data_path) if (data_path / "topics").exists() else []
        for topic in there:
            assert verify_topic(topic).findings == []
        reports = run(source, data_path)
        earlier.add(sum(report.outcome is Outcome.EARLIER for report in reports))
        assert sum(report.outcome is Outcome.EARLIER for report in reports) == len(there)
        check_complete(data_path)
    assert earlier == {0, 1, 2, 3}


class NotingFiles(Files):
    """Records which files are written and not synced, also at the time when a state is saved."""

    def __init__(self) -> None:
        self.unsynced: set[int] = set()
        self.saved_with: list[set[int]] = []

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        super().write(fd, offset, parts)
        self.unsynced.add(fd)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.unsynced.discard(fd)

    def replace(self, path: Path, content: bytes) -> None:
        if path.name == "state.json":
            self.saved_with.append(set(self.unsynced))
        super().replace(path, content)


def test_messages_are_synced_before_their_topic_is_visible(tmp_path: Path, source: Path) -> None:
    files = NotingFiles()
    run(source, tmp_path / "ours", files=files)
    assert files.saved_with == [set(), set(), set()]


def test_broker_removes_the_leftovers_of_a_killed_import(tmp_path: Path, source: Path) -> None:
    run(source, tmp_path / "ours")
    topics = tmp_path / "ours" / "topics"
    (topics / "clicks.topic").rename(topics / "clicks.topic-importing")
    with closing(DataFolder(tmp_path / "ours", HastyFiles())) as folder:
        assert list(folder.topic_names()) == ["orders", "quiet"]
    assert sorted(path.name for path in topics.iterdir()) == ["orders.topic", "quiet.topic"]


@pytest.mark.parametrize("method", ["write", "sync", "make_folder", "create", "sync_folder"])
def test_disk_error_leaves_nothing_of_a_topic(tmp_path: Path, source: Path, method: str) -> None:
    (tmp_path / "ours").mkdir()
    files = FailingFiles()
    with opened(source) as nsqd:
        reports = import_topics(nsqd, tmp_path / "ours", files=files)
        assert next(reports).name == "clicks"
        files.failing[method] = ENOSPC
        files.room = 0
        with pytest.raises((LogWriteError, OSError)) as refused:
            list(reports)
    assert os.strerror(ENOSPC) in str(refused.value)
    assert [path.name for path in (tmp_path / "ours" / "topics").iterdir()] == ["clicks.topic"]
    assert [report.outcome for report in run(source, tmp_path / "ours")] == [
        Outcome.EARLIER,
        Outcome.IMPORTED,
        Outcome.IMPORTED,
    ]
    check_complete(tmp_path / "ours")


# ---------------------------------------------------------------------- existing topics


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A data folder with a topic `orders` that was not imported."""
    with closing(DataFolder(tmp_path / "ours", HastyFiles())) as folder:
        folder.write_state("orders", b'{"ours":1}')
    return tmp_path / "ours"


@pytest.mark.parametrize("dry_run", [False, True])
def test_existing_topics_stop_the_import_unchanged(source: Path, ours: Path, dry_run: bool) -> None:
    before = everything(ours)
    with pytest.raises(ImportRefused, match="has a topic orders already: nothing was imported"):
        run(source, ours, dry_run=dry_run)
    assert everything(ours) == before


def test_existing_topics_can_be_skipped(source: Path, ours: Path) -> None:
    reports = run(source, ours, if_exists=IfExists.SKIP)
    assert [report.outcome for report in reports] == [Outcome.IMPORTED, Outcome.SKIPPED, Outcome.IMPORTED]
    assert state(ours, "orders")["ours"] == 1


def test_existing_topics_can_be_replaced(source: Path, ours: Path) -> None:
    assert {report.outcome for report in run(source, ours, if_exists=IfExists.REPLACE)} == {Outcome.IMPORTED}
    check_complete(ours)


def test_topics_that_nsqd_has_consumed_since_are_not_up_to_date(tmp_path: Path, source: Path) -> None:
    run(source, tmp_path / "ours")
    write_queue(source, "clicks:b", [Queued(number) for number in range(1, 7)], read=(0, 1))
    with pytest.raises(ImportRefused, match="has a topic clicks already"):
        run(source, tmp_path / "ours")


def test_topics_that_nsqd_has_published_since_are_not_up_to_date(tmp_path: Path, source: Path) -> None:
    run(source, tmp_path / "ours")
    write_queue(source, "clicks:a", [Queued(3), Queued(4), Queued(1, attempts=2), Queued(9)])
    with pytest.raises(ImportRefused, match="has a topic clicks already"):
        run(source, tmp_path / "ours")
    reports = run(source, tmp_path / "ours", if_exists=IfExists.REPLACE)
    assert [report.messages for report in reports] == [9, 1, 0]


def test_moved_folder_is_the_same_nsqd(tmp_path: Path, source: Path) -> None:
    run(source, tmp_path / "ours")
    reports = run(source.rename(tmp_path / "moved"), tmp_path / "ours")
    assert {report.outcome for report in reports} == {Outcome.EARLIER}


# ---------------------------------------------------------------------- unusable folders


@pytest.mark.parametrize("dry_run", [False, True])
def test_folder_in_use_by_a_broker(tmp_path: Path, source: Path, dry_run: bool) -> None:
    with closing(DataFolder(tmp_path / "ours", HastyFiles())):
        with pytest.raises((ImportRefused, StartupError), match="in use by"):
            run(source, tmp_path / "ours", dry_run=dry_run)


def test_running_nsqd(tmp_path: Path, source: Path) -> None:
    fd = os.open(source, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(ImportRefused, match="in use by a running nsqd"):
        run(source, tmp_path / "ours")
    os.close(fd)
    with opened(source):
        other = os.open(source, os.O_RDONLY)
        with pytest.raises(BlockingIOError):  # nor can an nsqd start meanwhile
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)


@pytest.mark.parametrize("inside", [".", "ours", "a/b"])
def test_folder_of_nsqd_is_refused_as_destination(source: Path, inside: str) -> None:
    before = everything(source)
    with pytest.raises(ImportRefused, match="is inside nsqd's data folder"):
        run(source, source / inside)
    assert everything(source) == before
    assert [path for path in source.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is not the data folder of an nsqd"),
        ("", "is damaged"),
        ("[]", "is damaged"),
        ('{"topics": [{}]}', "is damaged"),
        ('{"topics": [{"name": 5, "paused": false, "channels": null}]}', "is damaged"),
    ],
)
def test_folder_that_is_not_of_nsqd(tmp_path: Path, content: str | None, says: str) -> None:
    (tmp_path / "nsqd").mkdir()
    if content is not None:
        (tmp_path / "nsqd" / "nsqd.dat").write_text(content)
    with pytest.raises(ImportRefused, match=says):
        run(tmp_path / "nsqd", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_invalid_names_and_unknown_queues(tmp_path: Path) -> None:
    source = tmp_path / "nsqd"
    write_metadata(source, {"good": ["fine", "not fine", "x#ephemeral"], "b/ad": [], "e#ephemeral": ["c"]})
    write_queue(source, "good:gone", [Queued(1)])
    write_queue(source, "good:drained")
    write_queue(source, "other", [Queued(1)])
    with opened(source) as folder:
        told = [(finding.path.name, finding.what) for finding in folder.findings]
    assert [name for name, _ in told] == ["nsqd.dat"] * 4 + [
        "good:gone.diskqueue.000000.dat",
        "other.diskqueue.000000.dat",
    ]
    (report,) = run(source, tmp_path / "ours")
    assert (report.name, [channel.name for channel in report.channels]) == ("good", ["fine"])


def test_queues_written_on_windows(tmp_path: Path) -> None:
    write_metadata(tmp_path / "nsqd", {"topic": ["channel"]})
    write_queue(tmp_path / "nsqd", "topic;channel", [Queued(1), Queued(2)])
    (report,) = run(tmp_path / "nsqd", tmp_path / "ours")
    assert report.channels[0].messages == 2
