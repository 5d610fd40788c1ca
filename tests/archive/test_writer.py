"""Archives of random changes: each state of the archive, as a crash of the writer would leave it, is restored."""

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import trio

from archive.folders import (
    PATIENCE_S,
    Remembered,
    WatchedStorage,
    copy_archive,
    number_of,
    restore,
    until_archived,
    writer_of,
)
from log.support import append_each, numbered
from replication.leader import RandomChanges, Tree, tree_of, trees_of
from soak import some
from trio_nsq.archive.examination import checkpoints_of, verify
from trio_nsq.archive.manifest import ArchiveError, complete_checkpoints
from trio_nsq.archive.pruning import prune
from trio_nsq.archive.segments import read_segments
from trio_nsq.log import DiskLog
from trio_nsq.storage import LocalStorage, NewFile


def _without_remains(tree: Tree) -> Tree:
    """Leave out deleted topics: their removal is not one moment, and a start of the broker removes them."""
    return {path: content for path, content in tree.items() if b"-deleted-" not in path}


def _nothing(size: int) -> None:
    pass


async def test_prune_keeps_what_later_states_need(tmp_path: Path) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    data.mkdir()
    writer = writer_of(LocalStorage(archive), data, checkpoint_bytes=1000)
    remembered = Remembered(writer)
    changes = RandomChanges(writer.files, data, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        with trio.fail_after(PATIENCE_S):
            while writer.status().checkpoints < 5:
                changes.step()
                await trio.sleep(0.001)
        changes.close()
        writer.finish(PATIENCE_S)
    trees, storage = trees_of(remembered.stream()), LocalStorage(archive)
    extents = checkpoints_of(storage)
    from_ms = extents[2].checkpoint.time_ms
    expected = prune(storage, from_ms, dry_run=True)
    assert (len(checkpoints_of(storage)), expected.from_ms) == (len(extents), from_ms)
    assert prune(storage, from_ms) == expected
    assert expected.objects > 2 * expected.checkpoints > 0
    assert checkpoints_of(storage) == extents[2:]
    assert not list(verify(storage, _nothing, all_checkpoints=True))
    for index, extent in enumerate(extents[2:]):
        for until_ms in (extent.checkpoint.time_ms, extent.until_ms):
            to = tmp_path / f"restored-{index}-{until_ms}"
            if not to.exists():
                point = restore(archive, to, until_ms)
                assert _without_remains(tree_of(to)) == _without_remains(trees[number_of(point)])
    left = list(archive.glob("@checkpoints/*/*"))
    assert {int(path.parent.name) for path in left} == {each.checkpoint.id for each in extents[2:]}
    assert prune(storage, from_ms).objects == 0
    assert len(checkpoints_of(storage)) == len(extents) - 2
    assert prune(storage, extents[-1].until_ms + 1).from_ms == extents[-1].checkpoint.time_ms, "one stays"


class _SlowStorage(LocalStorage):
    """A folder; while a segment is written, a broker closes others."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.meanwhile: Callable[[], None] = lambda: None
        self.sent: list[str] = []

    def create(self, name: str) -> NewFile:
        self.sent.append(name)
        self.meanwhile()
        return super().create(name)


@pytest.mark.parametrize("batches", [5, 60], ids=["slower than the store", "faster than the store"])
async def test_segments_that_are_closed_before_a_copy_are_not_copied(tmp_path: Path, batches: int) -> None:
    """A segment has some 16 batches. If the store is too slow, the copy begins all the same."""
    data, archive = tmp_path / "data", _SlowStorage(tmp_path / "archive")
    folder = data / "topics" / "t.topic"
    folder.parent.mkdir(parents=True)
    writer = writer_of(archive, data)
    with closing(DiskLog(folder, segment_bytes=2000, files=writer.files)) as log:
        append_each(log, numbered(0, 1000))
        began = len(log.files)

        def publish() -> None:
            if len(archive.sent) < 300:
                append_each(log, numbered(log.next_sequence, batches))

        archive.meanwhile = publish
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            with trio.fail_after(PATIENCE_S):
                while not writer.status().checkpoints:
                    await trio.sleep(0.01)
            writer.finish(PATIENCE_S)
        assert writer.status().error == ""
    (checkpoint,) = complete_checkpoints(archive)
    listed, files = len(read_segments(archive, checkpoint)), len(list(folder.glob("*.log")))
    if batches == 5:
        assert began < files
        assert files - listed < 5, "the copy has few segments"
        assert checkpoint.size_bytes < 10_000
    assert archive.sent[:listed] == sorted(set(archive.sent[:listed])), "none was sent twice"


@pytest.mark.parametrize("seed", some(range(4)))
async def test_every_state_of_the_archive_is_a_state_of_the_folder(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    data, archive = tmp_path / "data", tmp_path / "archive"
    data.mkdir()
    copies: list[Path] = []

    def after_write(name: str) -> None:
        if chance.random() < 0.3 and len(copies) < 60:
            copies.append(copy_archive(archive, tmp_path / f"copy-{len(copies)}"))

    writer = writer_of(WatchedStorage(archive, after_write), data)
    remembered = Remembered(writer)
    changes = RandomChanges(writer.files, data, seed)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        for step in range(300):
            changes.step()
            if step % 20 == 0:
                await until_archived(writer)
        changes.close()
        writer.finish(PATIENCE_S)
    trees = trees_of(remembered.stream())
    assert not writer.operations.kept_bytes
    assert writer.status().checkpoints > 1, "checkpoints were written while operations were archived"
    restored = 0
    for index, copy in enumerate([*copies, archive]):
        to = tmp_path / f"restored-{index}"
        try:
            point = restore(copy, to)
        except ArchiveError:
            continue  # there was no complete checkpoint yet
        restored += 1
        assert _without_remains(tree_of(to)) == _without_remains(trees[number_of(point)]), index
        assert not list(verify(LocalStorage(copy), _nothing, all_checkpoints=True)), index
    assert restored > len(copies) / 2
    last = tree_of(tmp_path / f"restored-{len(copies)}")
    assert _without_remains(last) == _without_remains(tree_of(data))
