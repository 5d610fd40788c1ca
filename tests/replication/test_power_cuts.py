"""A power cut while a folder catches up, after attempts that were not finished, and while it becomes a leader's.

With `FAULT_COMPLETE=1` (`make soak`) at each moment, and again at a moment of the start that follows.
"""

import os
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from faults.disk import Disk, Image, read_image, write_image
from faults.disk import RecordingFiles as RecordedDisk
from log.support import HastyFiles
from replication.leader import Tree, tree_of
from trio_nsq.log.files import Files
from trio_nsq.replication import catch_up, inventory
from trio_nsq.replication.catch_up import CatchUp, Piece
from trio_nsq.replication.inventory import Inventory
from trio_nsq.replication.journal import Position
from trio_nsq.replication.operations import Kind, encode
from trio_nsq.replication.recorder import RecordingFiles
from trio_nsq.replication.replica import Replica
from trio_nsq.replication.stream import OperationStream

EPOCH = 7
IS_COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"

SAME, ALONE = bytes(range(150)), b"x" * 70 + b"alone" * 10
ALL = {
    "t/1.log": SAME,
    "t/2.log": ALONE,
    "t/state": b"old",
    "u/1.log": b"only here",
    "broker.json": b"old",
    "f/g": b"is a file there",
    "write-ahead.1": b"of a former leader",
}
"""The folder before, a former leader's."""
KEPT = {name: data for name, data in ALL.items() if name not in ("t/1.log", "broker.json")}


class LeaderFiles(RecordingFiles, HastyFiles):
    """Syncs nothing."""


class Leader:
    """A folder that changes while it is copied."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        (root / "t").mkdir()
        for name, content in {"1.log": SAME, "2.log": b"x" * 70 + b"y" * 130, "state": b"new"}.items():
            (root / "t" / name).write_bytes(content)
        (root / "f").write_bytes(b"a file")
        (root / "broker.json").write_bytes(b"new")
        self.root = root
        self.stream = OperationStream(1 << 30)
        self.files = LeaderFiles(root, self.stream)

    def change(self, number: int) -> None:
        """Append, save a state, and begin or remove a topic."""
        fd = self.files.open(self.root / "t" / "2.log")
        self.files.write(fd, self.files.size(fd), [b"%03d" % number * 10])
        self.files.close(fd)
        self.files.replace(self.root / "t" / "state", b"%d" % number)
        folder = self.root / f"topic-{number // 2}"
        if number % 2:
            self.files.remove_folder(folder)
        else:
            self.files.make_folder(folder)
            self.files.replace(folder / "1.log", b"%d" % number)

    def pieces(self, replica: Replica, *, changes: bool = False) -> Iterator[Piece]:
        """Yield the pieces for a follower; the folder may change after each third one."""
        with Inventory(self.root.parent) as inventory:
            inventory.add(replica.inventory())
            replica.catch_up(EPOCH)
            for index, piece in enumerate(CatchUp(self.files, self.stream, inventory).pieces()):
                yield piece
                if changes and index % 3 == 2 and index < 20:
                    self.change(index)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (inventory, catch_up):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    monkeypatch.setattr(inventory, "END_BYTES", 1)


def catch_up_with(leader: Leader, replica: Replica, count: int | None) -> None:
    """Take this many pieces; None: all."""
    for piece in islice(leader.pieces(replica, changes=True), count):
        replica.add(piece)
    replica.close()


def follow(leader: Leader, replica: Replica) -> None:
    """Have the operations after those that a folder has."""
    assert replica.position is not None
    _, pieces = leader.stream.after(replica.position.number, 1 << 30)
    if pieces:
        replica.store(b"".join(pieces))
        replica.apply()


class Recorded:
    """Follows with a folder on a disk, and the power is cut at any of its moments.

    Attributes:
        complete: From which position on the disk the folder has a position, durably.
        ended: From where on it is a leader's.
    """

    def __init__(self, tmp_path: Path, attempts: list[int], *, has_followed: bool) -> None:
        self.leader = Leader(tmp_path / "leader")
        for name, content in ALL.items():
            path = tmp_path / "disk" / "data" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self.before = read_image(tmp_path / "disk")
        self.files = RecordedDisk(tmp_path / "disk", sync_takes_s=0)
        folder = tmp_path / "disk" / "data"
        if has_followed:
            replica = Replica.open(self.files, folder)
            replica.begin(Position(EPOCH - 1, 10))
            replica.store(b"".join(encode(11, Kind.TRUNCATE, b"t/state", len(ALL["t/state"]))))
            replica.close()
        for count in attempts:
            catch_up_with(self.leader, Replica.open(self.files, folder), count)
        catch_up_with(self.leader, Replica.open(self.files, folder), None)
        self.complete = self.files.position
        self.leader.change(100)
        replica = Replica.open(self.files, folder, journal_bytes=100)
        follow(self.leader, replica)
        self.tree = tree_of(self.leader.root)
        self.followed = self.files.position
        replica.end(lambda: self.files.replace(folder / "broker.json", b"a leader's"))
        self.ended = self.files.position

    def images(self, chance: random.Random, moments: range) -> Iterator[tuple[int, str, Image]]:
        """Yield what is left after power cuts, with the moment and a name."""
        disk = Disk(self.before)
        for moment in range(self.files.position + 1):
            if moment in moments:
                for name, image in disk.power_cuts(chance):
                    yield moment, f"{name} at {moment} of {self.files.position}", image
            if moment < self.files.position:
                disk.apply(self.files.journal[moment])


def check(
    recorded: Recorded, image: Image, at: int, folder: Path, where: str, chance: random.Random | None
) -> None:
    """Start after a power cut, catch up if that is necessary, and lead; perhaps with another power cut meanwhile."""
    write_image(image, folder.parent)
    files = HastyFiles() if chance is None else RecordedDisk(folder.parent, sync_takes_s=0)
    replica, leader = Replica.open(files, folder), recorded.leader
    trees = [recorded.tree]
    if at >= recorded.followed:
        trees.append(recorded.tree | {b"broker.json": b"a leader's"})
    if replica.position is not None and replica.position.epoch == EPOCH:
        if at >= recorded.followed:
            assert replica.position == Position(EPOCH, leader.stream.last_number), where
        follow(leader, replica)
        replica.end()
    elif tree_of_finished(folder) not in trees or list(folder.glob("replica-*")):
        assert at < recorded.complete, where
        for piece in leader.pieces(replica):
            replica.add(piece)
        replica.end()
    replica.close()
    assert tree_of_finished(folder) in trees, where
    kept = kept_in(folder).items()
    assert KEPT.items() <= kept <= ALL.items(), where  # a removal that was not synced may be undone
    assert sorted(path.name for path in folder.glob("replica-*")) == [], where
    Files().remove_folder(folder.parent)
    if isinstance(files, RecordedDisk):
        disk = Disk(image)
        for operation in files.journal[: chance.randrange(files.position + 1) if chance is not None else 0]:
            disk.apply(operation)
        for name, after in disk.power_cuts(random.Random(at)):
            check(recorded, after, at, folder, f"{where}, then {name}", None)


def tree_of_finished(folder: Path) -> Tree:
    """As `tree_of`, without what a `Files.replace` that was not finished has left."""
    return {path: data for path, data in tree_of(folder).items() if not path.endswith(b".tmp")}


def kept_in(folder: Path) -> dict[str, bytes]:
    """Return the files in `diverged-7`."""
    return files_in(folder / f"diverged-{EPOCH}")


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("has_followed", [False, True])
@pytest.mark.parametrize("attempts", [[], [9], [5, 12]], ids=str)
def test_a_power_cut_at_each_moment(tmp_path: Path, attempts: list[int], *, has_followed: bool) -> None:
    """Of a former leader's folder, or of one that has followed another leader."""
    chance = random.Random(f"{attempts} {has_followed}")
    recorded = Recorded(tmp_path, attempts, has_followed=has_followed)
    apart = 4 if IS_COMPLETE else 80
    moments = range(recorded.files.position + 1)[chance.randrange(apart) :: apart]
    for at, where, image in recorded.images(chance, moments):
        check(
            recorded, image, at, tmp_path / "cut" / "data", where, chance if chance.random() < 0.04 else None
        )
