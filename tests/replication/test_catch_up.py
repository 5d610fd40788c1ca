"""A follower gets a copy of a folder that changes meanwhile.

With `FAULT_COMPLETE=1` (`make soak`) thousands of times; `FAULT_SEED` sets what changes.
"""

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from log.support import HastyFiles
from replication.leader import RandomChanges, Tree, tree_of
from trio_nsq.replication import catch_up, inventory
from trio_nsq.replication.catch_up import Block, CatchUp
from trio_nsq.replication.inventory import decode_entry, take_inventory
from trio_nsq.replication.operations import InvalidOperation
from trio_nsq.replication.recorder import RecordingFiles
from trio_nsq.replication.replica import Replica
from trio_nsq.replication.stream import OperationStream

EPOCH = 7
_FIRST_SEED = int(os.environ.get("FAULT_SEED", "0"))
SEEDS = range(_FIRST_SEED, _FIRST_SEED + (1000 if os.environ.get("FAULT_COMPLETE") == "1" else 10))


class BusyFiles(RecordingFiles, HastyFiles):
    """Files that change at random whenever the catch-up looks at them."""

    def __init__(self, root: Path, stream: OperationStream, seed: int) -> None:
        super().__init__(root, stream)
        self.changes: RandomChanges | None = None
        self.chance = random.Random(seed)
        self.is_quiet = False

    def _change(self) -> None:
        if self.changes is not None and not self.is_quiet and self.chance.random() < 0.3:
            self.is_quiet = True
            for _ in range(self.chance.randint(1, 3)):
                self.changes.step()
            self.is_quiet = False

    @contextmanager
    def names_unchanged(self) -> Iterator[None]:
        before, self.is_quiet = self.is_quiet, True
        with super().names_unchanged():
            yield
        self.is_quiet = before

    def names(self, path: Path) -> list[str]:
        self._change()
        found = super().names(path)
        self._change()
        return found

    def open_read_only(self, path: Path) -> int:
        self._change()
        fd = super().open_read_only(path)
        self._change()
        return fd

    def read_fully(self, fd: int, size: int, offset: int) -> bytes:
        self._change()
        data = super().read_fully(fd, size, offset)
        self._change()
        return data


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (inventory, catch_up):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)


def entries_of(folder: Path) -> dict[bytes, inventory.FileDigest]:
    """Return the inventory of a folder, as the leader gets it."""
    return dict(decode_entry(digest.encode(path)) for path, digest in take_inventory(HastyFiles(), folder))


def copy_all(catching: CatchUp, folder: Path) -> tuple[Replica, int]:
    """Let a folder catch up; returns the number that it has then."""
    replica = Replica.open(HastyFiles(), folder)
    replica.catch_up(EPOCH)
    for piece in catching.pieces():
        assert replica.position is None
        replica.add(piece)
    assert replica.position is not None
    assert replica.position.epoch == EPOCH
    return replica, replica.position.number


@pytest.mark.parametrize("before", ["an empty folder", "an older copy", "a diverged copy"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_folder_that_changes_meanwhile(tmp_path: Path, before: str, seed: int) -> None:
    root, folder = tmp_path / "leader", tmp_path / "follower"
    root.mkdir()
    stream = OperationStream(1 << 30)
    files = BusyFiles(root, stream, seed)
    changes = RandomChanges(files, root, seed)
    for _ in range(40):
        changes.step()
    if before == "an empty folder":
        folder.mkdir()
    else:
        shutil.copytree(root, folder)
    if before == "a diverged copy":
        other = RandomChanges(HastyFiles(), folder, seed + 1000)
        for _ in range(15):
            other.step()
        other.close()
    for _ in range(20):
        changes.step()
    catching = CatchUp(files, stream, entries_of(folder))
    files.changes = changes
    replica, number = copy_all(catching, folder)
    files.changes = None
    for _ in range(10):
        changes.step()
    changes.close()
    while number < stream.last_number:
        number, pieces = stream.after(number, 500)
        replica.store(b"".join(pieces))
        replica.apply()
    replica.close()
    assert tree_of(folder) == tree_of(root)


def test_what_the_leader_lacks_is_kept(tmp_path: Path) -> None:
    root, folder = tmp_path / "leader", tmp_path / "follower"
    stream = OperationStream(1 << 30)
    root.mkdir()
    files = BusyFiles(root, stream, 0)
    written(files, root, {"a/1.log": b"x" * 200, "a/2.log": b"y" * 100, "state.json": b"new"})
    folder.mkdir()
    more: Tree = {
        b"a/1.log": b"x" * 200,
        b"a/2.log": b"y" * 50 + b"z" * 70,
        b"a/3.log": b"only here",
        b"b/1.log": b"deleted there",
        b"state.json": b"old",
        b"state.json.tmp": b"unfinished",
        b"write-ahead.3": b"of a former leader",
    }
    written(HastyFiles(), folder, {path.decode(): data for path, data in more.items() if data is not None})
    copy_all(CatchUp(files, stream, entries_of(folder)), folder)[0].close()
    assert tree_of(folder) == tree_of(root)
    kept = {
        path.relative_to(folder / "diverged-7").as_posix(): path.read_bytes()
        for path in (folder / "diverged-7").rglob("*")
        if path.is_file()
    }
    assert kept == {
        "a/2.log": b"y" * 50 + b"z" * 70,
        "a/3.log": b"only here",
        "b/1.log": b"deleted there",
        "write-ahead.3": b"of a former leader",
    }


def written(files: HastyFiles | BusyFiles, root: Path, contents: dict[str, bytes]) -> None:
    """Create these files."""
    for name, content in contents.items():
        path = root / name
        if not path.parent.is_dir():
            files.create_folder(path.parent)
        fd = files.create(path)
        files.write(fd, 0, [content])
        files.close(fd)


def test_only_what_is_missing_is_sent(tmp_path: Path) -> None:
    root, folder = tmp_path / "leader", tmp_path / "follower"
    stream = OperationStream(1 << 30)
    root.mkdir()
    files = BusyFiles(root, stream, 0)
    contents = {f"a/{number}.log": bytes([number]) * 1000 for number in range(5)}
    written(files, root, contents)
    shutil.copytree(root, folder)
    fd = files.open(root / "a" / "4.log")
    files.write(fd, 990, [b"new" * 10])
    files.close(fd)
    pieces = list(CatchUp(files, stream, entries_of(folder)).pieces())
    assert [(each.path, each.offset) for each in pieces if isinstance(each, Block)] == [(b"a/4.log", 960)]


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"\0" * 13,
        inventory.FileDigest(10, 0, b"").encode(b"f"),
        inventory.FileDigest(0, 0, b"").encode(b"../f"),
    ],
    ids=["empty", "cut off", "without digests", "above"],
)
def test_an_entry_that_is_wrong(entry: bytes) -> None:
    with pytest.raises(InvalidOperation):
        decode_entry(entry)
