"""What readers know of an archive's newest segments: what a restore of the same state would have of them."""

import itertools
import random
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast
from unittest.mock import patch
from zlib import crc32

import pytest
import trio

from archive.folders import PATIENCE_S, WatchedStorage, copy_archive, restore, until_archived, writer_of
from log.support import append_each, numbered
from replication.leader import RandomChanges
from soak import some
from trio_nsq.archive.content import read_contents
from trio_nsq.archive.examination import checkpoints_of
from trio_nsq.archive.manifest import ArchiveError, list_stream
from trio_nsq.archive.pruning import prune
from trio_nsq.archive.restore import find_restore_point
from trio_nsq.archive.segments import read_segments
from trio_nsq.archive.tail import ArchiveTail
from trio_nsq.archive.writer import ArchiveWriter
from trio_nsq.log import DiskLog, RecordBatch
from trio_nsq.log.files.scratch import ScratchFiles
from trio_nsq.log.gaps import Span
from trio_nsq.spark.segments.places import parse_places
from trio_nsq.storage import LocalStorage, Storage, Stored

SEGMENTS = ("00000000000000000000.log", "00000000000000000100.log")
Segments = dict[tuple[str, str], bytes]


def in_tail(tail: ArchiveTail) -> Segments:
    found: Segments = {}
    for topic in tail.topics():
        log = tail.log(topic)
        assert log is not None
        found |= {
            (topic, name): file.read(1 << 30, 0) for name, file in log.files.items() if name in SEGMENTS
        }
    return found


def in_folder(data: Path) -> Segments:
    paths = data.glob("topics/?.topic/*.log")
    return {(path.parent.name.removesuffix(".topic"), path.name): path.read_bytes() for path in paths}


@asynccontextmanager
async def changing(
    folder: Path, storage: LocalStorage, seed: int
) -> AsyncIterator[tuple[ArchiveWriter, RandomChanges]]:
    """Archive a data folder in the block, which changes it."""
    data = folder / "data"
    data.mkdir()
    writer = writer_of(storage, data)
    changes = RandomChanges(writer.files, data, seed, SEGMENTS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        yield writer, changes
        changes.close()
        writer.finish(PATIENCE_S)


async def make_states(folder: Path, seed: int) -> list[Path]:
    """Return copies of an archive as it was at some times, oldest first."""
    chance = random.Random(seed)
    archive = folder / "archive"
    copies: list[Path] = []

    def after_write(name: str) -> None:
        if chance.random() < 0.15 and len(copies) < 100:
            copies.append(copy_archive(archive, folder / f"copy-{len(copies)}"))

    async with changing(folder, WatchedStorage(archive, after_write), seed) as (writer, changes):
        while writer.status().checkpoints < 5 or len(copies) < 20:
            for _ in range(10):
                changes.step()
            await until_archived(writer)
    return [*copies, archive]


def complete(states: list[Path]) -> Iterator[Path]:
    """Yield those that have a complete checkpoint."""
    for state in states:
        try:
            find_restore_point(LocalStorage(state))
        except ArchiveError:
            continue
        yield state


def show(at: Path, state: Path) -> None:
    """Make a place show this state."""
    link = at.with_name("next")
    link.symlink_to(state)
    link.replace(at)


@pytest.mark.parametrize("seed", some(range(3)))
async def test_a_follower_and_a_new_reader_have_what_a_restore_has(tmp_path: Path, seed: int) -> None:
    """Also if old objects are removed before they are read."""
    states = await make_states(tmp_path, seed)
    place = tmp_path / "place"
    follower = ArchiveTail(LocalStorage(place))
    read = 0
    for index, state in enumerate(complete(states)):
        restore(state, tmp_path / f"restored-{index}")
        expected = in_folder(tmp_path / f"restored-{index}")
        if index % 3 == 2:
            prune(LocalStorage(state), 1 << 62)
        show(place, state)
        assert in_tail(ArchiveTail(LocalStorage(state))) == expected, index
        assert (in_tail(follower), follower.damage) == (expected, ""), index
        read += bool(expected)
    assert read > 5


async def test_pyarrow_reads_an_archive_where_snappy_is_not_installed(tmp_path: Path) -> None:
    """As in Spark's workers."""
    state = (await make_states(tmp_path, 3))[-1]
    storage = LocalStorage(state)
    expected = in_tail(ArchiveTail(storage))
    with patch.dict(sys.modules, {"snappy": None}):
        assert in_tail(ArchiveTail(storage)) == expected
        for name in [name for each in checkpoints_of(storage) for name in each.checkpoint.part_names]:
            content = (state / name).read_bytes()
            cut_off = content[16:-1]
            (state / name).write_bytes(content[:12] + crc32(cut_off).to_bytes(4, "big") + cut_off)
        tail = ArchiveTail(storage)
        tail.topics()
        assert "is damaged" in tail.damage


async def test_an_earlier_checkpoint_is_read_instead_of_a_damaged_one(tmp_path: Path) -> None:
    state = (await make_states(tmp_path, 7))[-1]
    restore(state, tmp_path / "restored")
    storage = LocalStorage(state)
    former, last = (each.checkpoint for each in checkpoints_of(storage)[-2:])
    storage.remove(last.part_names)
    tail = ArchiveTail(storage)
    assert (in_tail(tail), tail.damage) == (in_folder(tmp_path / "restored"), "")
    storage.remove([*former.part_names, *checkpoints_of(storage)[0].checkpoint.part_names])
    assert in_tail(tail) == in_folder(tmp_path / "restored"), "it continues"
    prune(storage, former.time_ms)
    tail = ArchiveTail(storage)
    assert (in_tail(tail), last.part_names[0] in tail.damage) == ({}, True)


async def test_a_damaged_object_hides_what_is_behind_it_until_the_next_checkpoint(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    names = (f"state-{number}" for number in itertools.count())
    async with changing(tmp_path, LocalStorage(archive), 5) as (writer, changes):

        async def next_state() -> Path:
            changes.step()
            await until_archived(writer)
            return copy_archive(archive, tmp_path / next(names))

        behind = await next_state()
        while True:
            before, behind = behind, await next_state()
            if newest(before) == newest(behind) and len(stream_of(before)) < len(stream_of(behind)):
                break
        healed = behind
        while newest(healed) == newest(behind):
            healed = await next_state()
    damaged = stream_of(behind)[len(stream_of(before))]
    (behind / damaged).unlink()  # its content is shared with the other states
    (behind / damaged).write_bytes(b"damaged")
    restore(before, tmp_path / "before")
    restore(healed, tmp_path / "healed")
    place = tmp_path / "place"
    for former in (before, behind):
        show(place, former)
        follower = ArchiveTail(LocalStorage(place))
        follower.topics()
        show(place, behind)
        assert in_tail(follower) == in_folder(tmp_path / "before")
        assert damaged in follower.damage
        show(place, healed)
        assert (in_tail(follower), follower.damage) == (in_folder(tmp_path / "healed"), "")


async def test_a_follower_drops_segments_that_are_archived_under_their_names(tmp_path: Path) -> None:
    """And has no message less meanwhile."""
    data, archive = tmp_path / "data", tmp_path / "archive"
    folder = data / "topics" / "t.topic"
    folder.mkdir(parents=True)
    storage = LocalStorage(archive)
    writer, follower = writer_of(storage, data), ArchiveTail(storage)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        log = DiskLog(folder, segment_bytes=500, files=writer.files)
        while writer.status().checkpoints < 2 or len(archived_in(storage)) < 6:
            append_each(log, numbered(log.next_sequence, 6))
            await until_archived(writer)
            follower.log("t")
            (place,) = parse_places([str(archive)], "t")
            bounds = place.open().bounds()
            found = list(place.open().read(Span(0, bounds.end)))
            assert (bounds.first, bounds.end) == (0, log.next_sequence)
            assert sum(each.count for each in found if isinstance(each, RecordBatch)) == bounds.end
        log.close()
        writer.finish(PATIENCE_S)
    left = follower.log("t")
    assert left is not None
    assert not left.files.keys() & archived_in(storage)
    assert follower.log("other") is None


def archived_in(storage: LocalStorage) -> set[str]:
    """Return the names of the segments that the newest checkpoint has only archived."""
    segments = read_segments(storage, checkpoints_of(storage)[-1].checkpoint)
    return {Path(path.decode()).name for path in segments}


def newest(state: Path) -> int:
    return checkpoints_of(LocalStorage(state))[-1].checkpoint.id


def stream_of(state: Path) -> list[str]:
    storage = LocalStorage(state)
    return [each.name for each in list_stream(storage, checkpoints_of(storage)[-1].checkpoint).objects]


def test_a_snapshot_does_not_change(tmp_path: Path) -> None:
    files, chance = ScratchFiles(tmp_path), random.Random(1)
    path = tmp_path / "file"
    fd = files.create_or_empty(path)
    expected = bytearray()
    taken = []
    for _ in range(200):
        offset, data = chance.randint(0, len(expected)), chance.randbytes(chance.randint(0, 100_000))
        match chance.randint(0, 3):
            case 0:
                files.truncate(fd, offset)
                del expected[offset:]
            case 1:
                files.write(fd, offset, [data, b"", data])
                expected[offset : offset + 2 * len(data)] = data + data
            case _:
                files.write(fd, len(expected), [data])
                expected += data
        assert files.read(fd, 1 << 30, 0) == expected
        if chance.random() < 0.2:
            taken.append((files.snapshots(tmp_path, lambda name: True)["file"], bytes(expected)))
    files.drop(path)
    files.unlink(path)
    files.write(files.create_or_empty(path), 0, [bytes(5_000_000)])
    assert all(snapshot.read(1 << 30, 0) == content for snapshot, content in taken)


def test_objects_of_a_bucket_are_read_ahead() -> None:
    """The first ones are not answered before others are requested, too; they are returned in order."""
    requested = [threading.Event() for _ in range(20)]

    class Bucket:
        def read(self, name: str) -> Stored:
            requested[int(name)].set()
            assert requested[min(int(name) + 3, 19)].wait(PATIENCE_S)
            return Stored(name.encode(), "")

    found = read_contents(cast(Storage, Bucket()), [str(number) for number in range(20)])
    assert next(found) == b"0"
    assert not requested[12].is_set(), "not all at once"
    assert list(found) == [b"%d" % number for number in range(1, 20)]
