"""A start of a broker whose sealed segments are archived: it reads little of them, and archives those that differ."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import trio

from broker.support import PATIENCE_S, connected, mpub, running_broker
from trio_nsq.archive.examination import verify
from trio_nsq.archive.restore import RestorePlan
from trio_nsq.archive.segments import ArchivedSegment
from trio_nsq.archive.writer import ArchiveWriter
from trio_nsq.storage import LocalStorage

SEGMENT_BYTES = 1_000_000
LARGE = 100_000
"""The body of the last message of a segment: its id is far from the segment's end."""


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data`, and its `archive`, which has all sealed segments."""
    folder = tmp_path_factory.mktemp("archived")
    trio.run(_publish, folder / "data")
    _run_writer(folder)
    return folder


async def _publish(data: Path) -> None:
    options: Any = {"max_bytes_per_file": SEGMENT_BYTES}
    async with running_broker(data, **options) as bound, connected(bound.tcp_address) as nsq:
        for number in range(60):
            await nsq.send(mpub("t", b"%06d" % number * (LARGE // 6)))
            await nsq.ok()


def _run_writer(folder: Path) -> int:
    """Run a writer until it has written a checkpoint; returns how many bytes it has read of the data folder."""
    writer = ArchiveWriter(LocalStorage(folder / "archive"), folder / "data")
    read = 0
    read_fully: Callable[[int, int, int], bytes] = writer.files.read_fully

    def counted(fd: int, size: int, offset: int) -> bytes:
        nonlocal read
        found = read_fully(fd, size, offset)
        read += len(found)
        return found

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            with trio.fail_after(PATIENCE_S):
                while writer.status().state != "archiving":
                    await trio.sleep(0.01)
            writer.finish()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer.files, "read_fully", counted)
        trio.run(run)
    return read


def _segments(folder: Path) -> dict[bytes, ArchivedSegment]:
    return dict(RestorePlan(LocalStorage(folder / "archive")).point.segments)


def test_archived_segments_are_not_read_again(archived: Path, tmp_path: Path) -> None:
    folder = Path(copytree(archived, tmp_path / "copy"))
    logs = sorted(folder.glob("data/topics/t.topic/*.log"))
    size = sum(log.stat().st_size for log in logs)
    open_size = logs[-1].stat().st_size
    before = _segments(folder)
    assert len(before) == len(logs) - 1 > 4
    read = _run_writer(folder)
    assert read - open_size < len(logs) * 3 * LARGE < (size - open_size) / 2
    assert _segments(folder) == before
    assert not list(verify(LocalStorage(folder / "archive"), lambda size: None, all_checkpoints=True))


@pytest.mark.parametrize("at", [-1, None], ids=["the last byte", "the head of the last batch"])
def test_another_segment_of_the_same_size_is_not_taken_for_the_archived_one(
    archived: Path, tmp_path: Path, at: int | None
) -> None:
    """A broker restored from an older state gives other ids; the bodies may be the same."""
    folder = Path(copytree(archived, tmp_path / "copy"))
    path, segment = sorted(_segments(folder).items())[2]
    assert segment.end is not None
    assert segment.size - segment.end > LARGE
    log = folder / "data" / path.decode()
    content = bytearray(log.read_bytes())
    content[segment.end + 8 if at is None else at] ^= 1
    log.write_bytes(content)
    _run_writer(folder)
    assert path not in _segments(folder)
    assert len(_segments(folder)) == len(_segments(archived)) - 1
