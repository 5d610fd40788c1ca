"""A follower gets a copy of a folder that changes meanwhile.

With `FAULT_COMPLETE=1` (`make soak`) thousands of times; `FAULT_SEED` sets what changes.
"""

import os
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from log.support import HastyFiles
from replication.leader import RandomChanges, Tree, tree_of, trees_of
from soak import some
from trio_nsq.log.files import Files
from trio_nsq.replication import catch_up, fuzzy_copy
from trio_nsq.replication import inventory as inventories
from trio_nsq.replication.catch_up import Block, CatchUp, CaughtUp, FileBegin, FileEnd
from trio_nsq.replication.earlier import diverged_folders
from trio_nsq.replication.inventory import FileDigest, Inventory, Source, decode_entry, take_inventory
from trio_nsq.replication.journal import Position
from trio_nsq.replication.operations import InvalidOperation, Kind
from trio_nsq.replication.pace import Pace
from trio_nsq.replication.recorder import RecordingFiles
from trio_nsq.replication.replica import Diverged, Replica, ReplicaError
from trio_nsq.replication.stream import OperationStream

EPOCH = 7
_FIRST_SEED = int(os.environ.get("FAULT_SEED", "0"))
SEEDS = range(_FIRST_SEED, _FIRST_SEED + (1000 if os.environ.get("FAULT_COMPLETE") == "1" else 3))


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


_inventories: list[Inventory] = []


@pytest.fixture(autouse=True)
def _close_inventories() -> Iterator[None]:
    yield
    while _inventories:
        _inventories.pop().__exit__()


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (inventories, catch_up):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    monkeypatch.setattr(inventories, "END_BYTES", 1)


def entries_of(folder: Path, record_bytes: int = 0) -> Inventory:
    """Return the inventory of a folder, as the leader gets it."""
    replica = Replica.open(HastyFiles(), folder)
    replica.record_bytes = record_bytes
    inventory = Inventory(folder.parent)
    _inventories.append(inventory)
    inventory.add(replica.inventory())
    replica.close()
    return inventory


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


@pytest.mark.parametrize(
    "before", ["an empty folder", "an older copy", "a diverged copy", "a follower of another leader"]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_folder_that_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, seed: int
) -> None:
    """Some catch-ups are not finished. What only the follower had is kept as it was."""
    monkeypatch.setattr(inventories, "END_BYTES", 12)  # has the number of the last change, whole
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
    if before == "a follower of another leader":
        follow_another(root, tmp_path / "another", folder, seed)
    earlier = tree_of(folder)
    for _ in range(20):
        changes.step()
    compared_from = stream.last_number
    for _ in range(chance_of(seed).choice((0, 0, 1, 2))):
        catching = CatchUp(files, stream, entries_of(folder))
        files.changes = changes
        abort(catching, folder, EPOCH - 1, files.chance.choice((1, 5, 20, 60)))
        files.changes = None
    catching = CatchUp(files, stream, entries_of(folder))
    files.changes = changes
    replica, number = copy_all(catching, folder)
    files.changes = None
    compared_to = stream.last_number
    for _ in range(10):
        changes.step()
    changes.close()
    while number < stream.last_number:
        number, pieces = stream.after(number, 500)
        replica.store(b"".join(pieces))
        replica.apply()
    replica.close()
    assert tree_of(folder) == tree_of(root)
    kept = {path: data for path, data in kept_in(folder).items() if data is not None}
    assert kept == {path: earlier[path] for path in kept}
    history = trees_of(stream)[compared_from : compared_to + 1]
    for path, data in earlier.items():
        if path.endswith(b".log") and path not in kept and b"-deleted-" not in path:
            assert data is not None
            assert any((tree.get(path) or b"").startswith(data) for tree in history), path


def follow_another(root: Path, other: Path, folder: Path, seed: int) -> None:
    """Let a folder have the operations of a leader that has gone another way."""
    shutil.copytree(root, other)
    stream = OperationStream(1 << 30)
    changes = RandomChanges(ScriptedFiles(other, stream), other, seed + 1000)
    for _ in range(15):
        changes.step()
    changes.close()
    replica = Replica.open(HastyFiles(), folder)
    replica.begin(Position(EPOCH - 2, 0))
    replica.store(b"".join(stream.after(0, 1 << 30)[1]))
    replica.apply()
    replica.close()
    assert tree_of(folder) == tree_of(other)


def chance_of(seed: int) -> random.Random:
    """Return a source of chance that nothing else uses."""
    return random.Random(seed)


def abort(catching: CatchUp, folder: Path, epoch: int, count: int) -> None:
    """Begin to catch up, and take this many pieces, or all but the last one."""
    replica = Replica.open(HastyFiles(), folder)
    replica.catch_up(epoch)
    for index, piece in enumerate(catching.pieces()):
        if index == count or isinstance(piece, CaughtUp):
            break
        replica.add(piece)
    replica.close()


def kept_in(folder: Path) -> Tree:
    """Return what a folder has kept in `diverged-7`."""
    return tree_of(kept) if (kept := folder / f"diverged-{EPOCH}").is_dir() else {}


class ScriptedFiles(RecordingFiles, HastyFiles):
    """Files that change before names are held still, and after a block is read, as a test says.

    Attributes:
        before_hold: What to do before each time that names are held still.
        before_names: What to do before a folder with this name is listed.
        before_open: What to do before a file with this name is opened for reading.
        after_read: What to do after the read at an offset.
    """

    def __init__(self, root: Path, stream: OperationStream) -> None:
        super().__init__(root, stream)
        self.before_hold: list[Callable[[], None]] = []
        self.before_names: dict[str, Callable[[], None]] = {}
        self.before_open: dict[str, Callable[[], None]] = {}
        self.after_read: dict[int, Callable[[], None]] = {}

    @contextmanager
    def names_unchanged(self) -> Iterator[None]:
        if self.before_hold:
            self.before_hold.pop(0)()
        with super().names_unchanged():
            yield

    def names(self, path: Path) -> list[str]:
        if path.name in self.before_names:
            self.before_names.pop(path.name)()
        return super().names(path)

    def open_read_only(self, path: Path) -> int:
        if path.name in self.before_open:
            self.before_open.pop(path.name)()
        return super().open_read_only(path)

    def read_fully(self, fd: int, size: int, offset: int) -> bytes:
        data = super().read_fully(fd, size, offset)
        if offset in self.after_read:
            self.after_read.pop(offset)()
        return data


@pytest.fixture
def scripted(tmp_path: Path) -> tuple[ScriptedFiles, OperationStream, Path]:
    """Return files that change as a test says, what they record, and the folder of a follower."""
    stream = OperationStream(1 << 30)
    for name in ("leader", "follower"):
        (tmp_path / name).mkdir()
    return ScriptedFiles(tmp_path / "leader", stream), stream, tmp_path / "follower"


def finish(files: ScriptedFiles, stream: OperationStream, folder: Path, *, record_bytes: int = 0) -> None:
    """Catch up, do what comes after it, and compare."""
    replica, number = copy_all(CatchUp(files, stream, entries_of(folder, record_bytes)), folder)
    assert not files.before_hold
    assert not files.before_names
    assert not files.before_open
    assert not files.after_read
    if number < stream.last_number:
        replica.store(b"".join(stream.after(number, 1 << 30)[1]))
        replica.apply()
    replica.close()
    assert tree_of(folder) == tree_of(files.root)


def test_a_name_that_changes_just_before_its_folder_is_listed(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    files, _, _ = scripted

    def create() -> None:
        files.create_folder(files.root / "t")
        written(files, files.root, {"t/a": b"content"})

    files.before_hold = [create, lambda: files.rename(files.root / "t" / "a", files.root / "t" / "b")]
    finish(*scripted)


def test_a_name_that_changes_again_just_before_the_end(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    """Its file was renamed while it was copied."""
    files, _, _ = scripted
    names = [files.root / name for name in ("f", "g", "h")]
    written(files, files.root, {"f": b"x" * 200})
    files.after_read[64] = lambda: files.rename(names[0], names[1])
    files.before_hold = [lambda: None, lambda: files.rename(names[1], names[2])]
    finish(*scripted)


def test_a_name_that_is_changed_and_not_recorded_at_the_end(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    """Another thread, which holds the names, has removed the file and will record that."""
    files, stream, _ = scripted
    written(files, files.root, {"f": b"content"})
    files.before_open["f"] = (files.root / "f").unlink
    files.before_hold = [lambda: None, lambda: stream.append(Kind.UNLINK, b"f")]
    finish(*scripted)


def test_a_folder_that_is_removed_while_it_is_listed_again(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    """It was renamed while it was copied. Folders are removed without holding the names: that can take long."""
    files, _, _ = scripted
    old, new = files.root / "old", files.root / "new"
    files.create_folder(old)
    written(files, files.root, {"old/f": b"x" * 200})
    files.after_read[64] = lambda: files.rename(old, new)
    files.before_names["new"] = lambda: files.remove_folder(new)
    finish(*scripted)


def test_a_file_that_becomes_shorter_while_it_is_copied(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    files, _, _ = scripted
    written(files, files.root, {"f": b"x" * 200})
    fd = files.open(files.root / "f")
    files.after_read[64] = lambda: files.truncate(fd, 0)
    files.after_read[128] = lambda: files.write(fd, 0, [b"new"])
    finish(*scripted)
    files.close(fd)


def test_a_file_that_is_removed_while_it_is_copied(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    files, _, _ = scripted
    written(files, files.root, {"f": b"x" * 200})
    files.after_read[64] = lambda: files.unlink(files.root / "f")
    finish(*scripted)


def test_a_state_that_is_saved_while_it_is_copied(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    """Its previous content gets a second name, of which the follower has a part."""
    files, _, _ = scripted
    path, linked, previous = (files.root / name for name in ("state", "linked", "previous"))
    written(files, files.root, {"state": b"x" * 200})

    def save() -> None:
        files.link(path, linked)
        files.replace(path, b"new")
        files.rename(linked, previous)

    files.after_read[64] = save
    finish(*scripted)


def test_a_file_that_is_longer_at_the_follower(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    files, _, folder = scripted
    written(files, files.root, {"f": b"x" * 200})
    written(HastyFiles(), folder, {"f": b"x" * 200 + b"y" * 100})
    finish(*scripted)


def test_a_sealed_segment_with_another_last_block_is_sent(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    files, _, folder = scripted
    written(files, files.root, {"1.log": b"x" * 200, "2.log": b"y"})
    written(HastyFiles(), folder, {"1.log": b"x" * 199 + b"z", "2.log": b"y"})
    finish(*scripted)
    assert (folder / "diverged-7" / "1.log").read_bytes() == b"x" * 199 + b"z"


def test_a_catch_up_that_was_not_finished_leaves_nothing_to_trust(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    """A sealed segment can have its size and its last block, and a hole before."""
    files, _, folder = scripted
    written(files, files.root, {"1.log": bytes(range(200)), "2.log": b"y"})
    replica = Replica.open(HastyFiles(), folder)
    replica.catch_up(EPOCH)
    for name, offset, data in ((b"1.log", 128, bytes(range(128, 200))), (b"2.log", 0, b"y")):
        replica.add(FileBegin(name, is_whole=True))
        replica.add(Block(name, offset, data))
        replica.add(FileEnd(name, offset + len(data)))
    replica.close()
    again = Replica.open(HastyFiles(), folder)
    with pytest.raises(ReplicaError, match="has not caught up"):
        again.end()
    again.close()
    finish(*scripted)


def test_what_a_former_leader_had_is_kept_as_it_was(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    """The leader changes it, under each name, before its turn."""
    files, _, folder = scripted
    names = ("written", "cut", "unlinked", "renamed", "replaced")
    written(files, files.root, {f"t/{name}.log": b"x" * 100 for name in names} | {"t/new": b"new"})
    alone = {f"t/{name}.log": b"x" * 80 + name.encode() for name in names}
    written(HastyFiles(), folder, alone)
    root = files.root / "t"

    def change() -> None:
        for name, offset in (("written", 100), ("cut", 0)):
            fd = files.open(root / f"{name}.log")
            files.truncate(fd, offset)
            files.write(fd, offset, [b"of the leader"])
            files.close(fd)
        files.unlink(root / "unlinked.log")
        files.rename(root / "renamed.log", root / "elsewhere.log")
        files.rename(root / "new", root / "replaced.log")

    files.before_hold = [change]
    finish(*scripted)
    assert kept_in(folder) == {b"t": None} | {path.encode(): data for path, data in alone.items()}


@pytest.mark.parametrize("count", some(range(12), 1, 11))
def test_what_catch_ups_have_copied_is_not_kept(
    scripted: tuple[ScriptedFiles, OperationStream, Path], count: int
) -> None:
    """Only what was there before the first one counts, whoever leads."""
    files, stream, folder = scripted
    written(files, files.root, {"t/1.log": b"x" * 200, "t/2.log": b"y" * 100})
    written(HastyFiles(), folder, {"t/1.log": b"x" * 200, "t/2.log": b"alone"})
    for epoch in (EPOCH - 2, EPOCH - 1):
        abort(CatchUp(files, stream, entries_of(folder)), folder, epoch, count)
        fd = files.open(files.root / "t" / "2.log")
        files.truncate(fd, epoch)  # what was copied is no beginning of it any more
        files.write(fd, epoch, [b"z" * 150])
        files.close(fd)
    finish(*scripted)
    assert kept_in(folder) == {b"t": None, b"t/2.log": b"alone"}
    assert sorted(each.name for each in folder.glob("*-*")) == ["diverged-7", "replica-journal.1"]


def test_nothing_is_kept_of_a_folder_that_followed_the_same_leader(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    """What it has and the leader has not, the leader has removed."""
    files, stream, folder = scripted
    written(files, files.root, {"t/1.log": b"x" * 200, "t/2.log": b"y"})
    finish(*scripted)
    files.unlink(files.root / "t" / "1.log")
    abort(CatchUp(files, stream, entries_of(folder)), folder, EPOCH, 2)
    finish(*scripted)
    assert not list(folder.glob("diverged-*"))


def test_what_is_kept_gets_a_name_of_its_own_and_is_measured(
    scripted: tuple[ScriptedFiles, OperationStream, Path], caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        replica = Replica.open(HastyFiles(), scripted[2])
        if replica.position is not None:
            replica.end()
        replica.close()
        written(HastyFiles(), scripted[2], {f"{number}.log": b"x" * number})
        finish(*scripted)
    assert diverged_folders(scripted[2]) == [
        ("diverged-7", 1, 0),
        ("diverged-7-2", 1, 1),
        ("diverged-7-3", 1, 2),
    ]
    assert caplog.text.count("that the leader has not") == 3
    assert "diverged-7-3 has 1 files, 2 bytes" in caplog.text


def test_segments_beside_a_damaged_journal_are_compared_whole(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    """A power cut can leave a hole before the last block, which the journal was to fill."""
    files, _, folder = scripted
    written(files, files.root, {"1.log": bytes(range(200)), "2.log": b"y"})
    written(HastyFiles(), folder, {"1.log": bytes(128) + bytes(range(128, 200)), "2.log": b"y"})
    (folder / "replica-journal.1").write_bytes(b"damaged" * 20)
    finish(*scripted)


@pytest.mark.parametrize("has_followed", [False, True])
def test_the_end_of_a_segment_says_what_is_before_if_it_was_synced(
    scripted: tuple[ScriptedFiles, OperationStream, Path], *, has_followed: bool
) -> None:
    """A follower's are; the last one of a former leader can have a hole. A sealed one goes on if the leader's does."""
    files, stream, folder = scripted
    written(files, files.root, {"t/1.log": bytes(range(200)), "t/2.log": bytes(range(256))})
    hole = b"" if has_followed else bytes(64)
    written(
        HastyFiles(), folder, {"t/1.log": bytes(range(150)), "t/2.log": hole + bytes(range(len(hole), 200))}
    )
    if has_followed:
        replica = Replica.open(HastyFiles(), folder)
        replica.begin(Position(EPOCH - 1, 0))
        replica.close()
    read: list[int] = []
    pieces = list(CatchUp(files, stream, entries_of(folder), read.append).pieces())
    begun = [(piece.path, piece.is_whole) for piece in pieces if isinstance(piece, FileBegin)]
    assert begun == [(b"t/1.log", False), (b"t/2.log", not has_followed)]
    assert [piece.offset for piece in pieces if isinstance(piece, Block)] == [
        *(128, 192),
        *((192,) if has_followed else (0, 64, 128, 192)),
    ]
    assert sum(read) == (150 - 128) + (200 - 128) + ((200 - 192) + (256 - 192) if has_followed else 64 + 256)
    finish(*scripted)


def test_a_record_that_the_new_leader_has_with_another_id(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    """A producer without an OK sends the same body again: the end of the segments is the same, the record is not."""
    files, _, folder = scripted
    body = bytes(range(200))
    written(files, files.root, {"t/1.log": b"new id" + body, "t/2.log": b"new id" + body})
    written(HastyFiles(), folder, {"t/1.log": b"old id" + body, "t/2.log": b"old id" + body})
    replica = Replica.open(HastyFiles(), folder)
    replica.begin(Position(EPOCH - 1, 0))
    replica.close()
    finish(*scripted, record_bytes=206)


def test_a_sealed_segment_that_changes_after_it_is_compared(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    files, _, folder = scripted
    for root, layer in ((files.root, files), (folder, HastyFiles())):
        written(layer, root, {"1.log": b"x" * 200, "2.log": b"y"})

    def change() -> None:
        fd = files.open(files.root / "1.log")
        files.write(fd, 0, [b"changed"])
        files.close(fd)

    files.after_read[192] = change
    finish(*scripted)


BETWEEN = {
    "a file": lambda root: (root / "t").write_bytes(b"x"),
    "a link to a file": lambda root: (root / "t").symlink_to(root.parent / "outside" / "f"),
    "a link to a folder": lambda root: (root / "t").symlink_to(root.parent / "outside"),
    "a link to nothing": lambda root: (root / "t").symlink_to(root.parent / "outside" / "g"),
    "a pipe": lambda root: os.mkfifo(root / "t"),
    "folders": lambda root: (root / "t" / "f" / "g").mkdir(parents=True),
    "a link to a file below": lambda root: linked_below(root, "f"),
    "a link to a folder below": lambda root: linked_below(root, ""),
}
"""Makes what is in the way of a folder `t` with a file `f`."""


def linked_below(root: Path, name: str) -> None:
    (root / "t").mkdir()
    (root / "t" / "f").symlink_to(root.parent / "outside" / name)


@pytest.mark.parametrize("moment", ["before", "while it catches up", "after"])
@pytest.mark.parametrize("make", BETWEEN.values(), ids=BETWEEN)
def test_what_is_in_the_way(
    scripted: tuple[ScriptedFiles, OperationStream, Path], make: Callable[[Path], object], moment: str
) -> None:
    """It is set aside, and nothing outside of the folder is changed, also if the leader writes all the time."""
    files, stream, folder = scripted
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"outside")
    written(files, files.root, {"t/f": b"content"})

    def change() -> None:
        fd = files.open(files.root / "t" / "f")
        files.write(fd, 0, [b"changed"])
        files.close(fd)
        files.replace(files.root / "t" / "g", b"new")

    if moment == "before":
        make(folder)
    elif moment == "after":
        finish(*scripted)
        shutil.rmtree(folder / "t")
        make(folder)
        replica = Replica.open(HastyFiles(), folder)
        assert replica.position is not None
        number = stream.last_number
        change()
        replica.store(b"".join(stream.after(number, 1 << 30)[1]))
        with pytest.raises(Diverged):
            replica.apply()
        replica.close()
    else:
        abort(CatchUp(files, stream, entries_of(folder)), folder, EPOCH, 1)
        shutil.rmtree(folder / "t", ignore_errors=True)
        make(folder)
    files.before_hold = [change, change]
    finish(*scripted)
    assert [(path.name, path.read_bytes()) for path in outside.iterdir()] == [("f", b"outside")]
    assert not (folder / "t").is_symlink()


def change_kind(how: str, files: Files, root: Path) -> None:
    """Give a file's name to a folder, or a folder's to a file."""
    match how:
        case "create a folder" | "rename a folder":
            files.unlink(root / "f")
        case _:
            files.remove_folder(root / "d")
    match how:
        case "create":
            written(files, root, {"d": b"x"})
        case "create a folder":
            written(files, root, {"f/x": b"x"})
        case "rename a folder":
            files.rename(root / "d", root / "f")
        case "rename":
            files.rename(root / "f", root / "d")
        case "link":
            files.link(root / "f", root / "d")


@pytest.mark.parametrize("how", ["create", "create a folder", "rename a folder", "rename", "link"])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_name_that_changes_its_kind_after_an_aborted_catch_up(
    scripted: tuple[ScriptedFiles, OperationStream, Path], how: str, *, is_recorded: bool
) -> None:
    """What was copied is in the way, of the copy or of operations."""
    files, stream, folder = scripted
    written(files, files.root, {"a": b"a", "f": b"content", "d/1": b"1", "d/2": b"2"})
    abort(CatchUp(files, stream, entries_of(folder)), folder, EPOCH, 1000)
    if not is_recorded:
        change_kind(how, HastyFiles(), files.root)
        finish(*scripted)
        return
    catching = CatchUp(files, stream, entries_of(folder))
    change_kind(how, files, files.root)
    fd = files.open(files.root / "a")
    files.write(fd, 0, [b"b"])
    files.close(fd)
    copy_all(catching, folder)[0].close()
    assert tree_of(folder) == tree_of(files.root)


def test_the_data_folder_may_be_a_link(scripted: tuple[ScriptedFiles, OperationStream, Path]) -> None:
    files, stream, folder = scripted
    linked = folder.parent / "linked"
    linked.symlink_to(folder)
    written(files, files.root, {"t/f": b"content"})
    finish(files, stream, linked)
    assert tree_of(folder) == tree_of(files.root)


def test_a_leader_may_have_links(scripted: tuple[ScriptedFiles, OperationStream, Path]) -> None:
    """A part of its folder is on another disk."""
    files, stream, folder = scripted
    other = folder.parent / "other"
    written(files, folder.parent, {"other/f": b"content"})
    (files.root / "t").symlink_to(other)
    copy_all(CatchUp(files, stream, entries_of(folder)), folder)[0].close()
    assert (folder / "t" / "f").read_bytes() == b"content"


def test_many_names_are_sent_once_more(
    scripted: tuple[ScriptedFiles, OperationStream, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some at a time, and more change meanwhile."""
    files, _, _ = scripted
    monkeypatch.setattr(catch_up, "ONCE_MORE", 3)
    written(files, files.root, {"a": b"x" * 200} | {f"b{number}": b"%d" % number for number in range(20)})

    def rename(start: int, old: str, new: str) -> None:
        for number in range(start, 20, 2):
            files.rename(files.root / f"{old}{number}", files.root / f"{new}{number}")

    files.after_read[64] = lambda: rename(0, "b", "c")
    files.before_hold = [lambda: None, lambda: None, lambda: rename(1, "b", "c"), lambda: rename(0, "c", "d")]
    finish(*scripted)


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


def written(files: Files, root: Path, contents: dict[str, bytes]) -> None:
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
    files.write(fd, 1000, [b"new" * 10])
    files.close(fd)
    pieces = list(CatchUp(files, stream, entries_of(folder)).pieces())
    assert [(each.path, each.offset) for each in pieces if isinstance(each, Block)] == [
        (b"a/4.log", 960),
        (b"a/4.log", 1024),
    ]


def test_things_that_are_no_files_are_set_aside(
    scripted: tuple[ScriptedFiles, OperationStream, Path],
) -> None:
    files, stream, folder = scripted
    written(files, files.root, {"f": b"x"})
    for root in (files.root, folder):
        os.mkfifo(root / "pipe")
        (root / "link").symlink_to("nowhere")
    copy_all(CatchUp(files, stream, entries_of(folder)), folder)[0].close()
    assert sorted(path.name for path in folder.iterdir()) == ["diverged-7", "f", "replica-journal.1"]
    assert sorted(path.name for path in (folder / "diverged-7").iterdir()) == ["link", "pipe"]


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"\0" * 13,
        FileDigest(10, 0, b"").encode(b"f"),
        FileDigest(0, 0, b"").encode(b"../f"),
    ],
    ids=["empty", "cut off", "without digests", "above"],
)
def test_an_entry_that_is_wrong(entry: bytes) -> None:
    with pytest.raises(InvalidOperation):
        decode_entry(entry)


NAMES = [b"a", b"a.b", b"a-b", b"b", b"b.log", b"\xff", "\uffff".encode(), "\U00010000".encode()]


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
@pytest.mark.parametrize("seed", some(range(10)))
def test_an_inventory_is_in_the_order_of_a_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, memory_bytes: int
) -> None:
    """Whatever the other side has, each file is found, from memory or from a file."""
    monkeypatch.setattr(inventories, "MEMORY_BYTES", memory_bytes)
    chance = random.Random(seed)
    root, kept = tmp_path / "root", tmp_path / "kept"
    kept.mkdir()
    for _ in range(30):
        *folders, name = (os.fsdecode(chance.choice(NAMES)) for _ in range(chance.randint(1, 4)))
        folder = root.joinpath(*folders)
        with suppress(FileExistsError, NotADirectoryError, IsADirectoryError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(chance.randbytes(3))
    entries = list(take_inventory(Files(), [Source(root, trusts_sealed=True, trusts_last=True)]))
    assert len(entries) > 5
    with Inventory(kept) as found:
        found.add(digest.encode(path) for path, digest in entries)
        assert not list(kept.iterdir()), "the file has no name"
        for path, digest in entries:
            if chance.random() < 0.7:
                assert found.find(path) == digest
            assert found.find(path + b"\0") is None


def test_a_large_inventory_needs_little_memory(tmp_path: Path) -> None:
    digest = FileDigest(100 * 64, 0, bytes(16) * 100)
    tracemalloc.start()
    with Inventory(tmp_path) as inventory:
        inventory.add(digest.encode(b"topics/%05d.topic/0.log" % number) for number in range(10_000))
        assert inventory.find(b"topics/09999.topic/0.log") == digest
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    tracemalloc.stop()


def test_an_inventory_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventories, "MOST_INVENTORY_BYTES", 100)
    with Inventory(tmp_path) as inventory, pytest.raises(InvalidOperation, match="too large"):
        inventory.add([FileDigest(0, 0, b"").encode(b"f" * 50)] * 2)


def test_the_copy_waits_after_each_block_that_is_read(tmp_path: Path) -> None:
    stream = OperationStream(1 << 30)
    root, folder = tmp_path / "leader", tmp_path / "follower"
    for path in (root, folder):
        path.mkdir()
    files = BusyFiles(root, stream, 0)
    for layer, path in ((files, root), (HastyFiles(), folder)):
        written(layer, path, {"1.log": b"x" * 200, "2.log": b"y"})
    read: list[int] = []
    for _ in CatchUp(files, stream, entries_of(folder), read.append).pieces():
        pass
    assert read == [8, 8, 1, 1]  # the end of the sealed segment; each is read again after it was begun


def test_what_is_copied_is_written_back_at_once(
    scripted: tuple[ScriptedFiles, OperationStream, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the disk would do nothing before the sync at the end. What is written leaves the memory later."""
    monkeypatch.setattr(fuzzy_copy, "WRITE_BACK_BYTES", 128)
    monkeypatch.setattr(fuzzy_copy, "KEPT_BYTES", 128)
    files, stream, folder = scripted
    written(files, files.root, {"1.log": bytes(range(200)) * 2})
    asked: list[tuple[int, int]] = []
    follower = HastyFiles()
    monkeypatch.setattr(follower, "write_back", lambda fd, size, offset: asked.append((offset, size)))
    replica = Replica.open(follower, folder)
    replica.catch_up(EPOCH)
    for piece in CatchUp(files, stream, entries_of(folder)).pieces():
        replica.add(piece)
    replica.close()
    assert asked == [(0, 128), (0, 256), (128, 256)]
    assert tree_of(folder) == tree_of(files.root)


def test_a_pace() -> None:
    pace = Pace(100)
    assert pace.wait_s(50.0, 200) == 2.0
    assert pace.wait_s(52.0, 50) == 0.5
    assert pace.wait_s(52.0, 50) == 1.0
    assert pace.wait_s(99.0, 50) == 0.5
    assert Pace(0).wait_s(99.0, 1 << 40) == 0.0
