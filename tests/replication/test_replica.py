"""A replica has what its leader had, also after power cuts."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from faults.disk import Disk, Image, disk_at, write_image
from faults.disk import RecordingFiles as RecordedDisk
from log.support import HastyFiles
from replication.leader import NaiveFolder, RandomChanges, Tree, tree_of, trees_of
from soak import in_soak, some
from trio_nsq.log.files import Files
from trio_nsq.platform.checksum import crc32
from trio_nsq.replication import changed_files
from trio_nsq.replication.journal import Journal, JournalDamaged, Position, read_journal, remove_journals
from trio_nsq.replication.operations import InvalidOperation, Kind, Operation, decode_all, encode
from trio_nsq.replication.recorder import RecordingFiles
from trio_nsq.replication.replica import Diverged, Replica
from trio_nsq.replication.stream import OperationStream

EPOCH = 7


class HastyRecordingFiles(RecordingFiles, HastyFiles):
    """Records, and syncs nothing."""


def random_stream(root: Path, seed: int, steps: int) -> OperationStream:
    """Return the operations of a folder that changed at random."""
    root.mkdir()
    stream = OperationStream(1 << 30)
    changes = RandomChanges(HastyRecordingFiles(root, stream), root, seed)
    for _ in range(steps):
        changes.step()
    changes.close()
    return stream


@pytest.mark.parametrize("seed", some(range(10)))
def test_a_replica_has_the_same_files(tmp_path: Path, seed: int) -> None:
    stream = random_stream(tmp_path / "leader", seed, 200)
    chance = random.Random(seed)
    folder = tmp_path / "follower"
    folder.mkdir()
    replica = Replica.open(HastyFiles(), folder)
    assert replica.position is None
    replica.begin(Position(EPOCH, 0))
    number = 0
    while number < stream.last_number:
        number, pieces = stream.after(number, chance.choice((1, 500, 5000)))
        assert replica.store(b"".join(pieces)) == Position(EPOCH, number)
        if chance.random() < 0.8:
            replica.apply()
        if chance.random() < 0.1:
            replica.close()
            replica = Replica.open(HastyFiles(), folder)
            assert replica.position == Position(EPOCH, number)
    replica.apply()
    assert tree_of(folder) == tree_of(tmp_path / "leader")
    replica.end()
    assert tree_of(folder) == tree_of(tmp_path / "leader")
    assert not list(folder.glob("replica-journal*"))


@pytest.mark.parametrize("seed", some(range(8)))
def test_a_power_cut_loses_nothing_acknowledged(tmp_path: Path, seed: int) -> None:
    """After a power cut at any moment, also of the start that follows, the replica has a state that its leader had."""
    trees = trees_of(stream := random_stream(tmp_path / "leader", seed, 50))
    chance = random.Random(seed)
    root = tmp_path / "disk"
    root.mkdir()
    disk = RecordedDisk(root, sync_takes_s=0)
    disk.create_folder(root / "data")
    disk.sync_folder(root)
    replica = Replica.open(disk, root / "data", journal_bytes=chance.choice((400, 3000, 10**6)))
    replica.begin(Position(EPOCH, 0))
    begun = disk.position
    acknowledged = [(begun, 0)]  # the position on the disk, and the number
    number = 0
    while number < stream.last_number:
        number, pieces = stream.after(number, chance.choice((1, 300, 2000)))
        replica.store(b"".join(pieces))
        acknowledged.append((disk.position, number))
        replica.apply()
    replica.close()
    for moment, now in disk_at(disk.journal, sorted(chance.sample(range(begun, disk.position), 6))):
        least = max(number for at, number in acknowledged if at <= moment)
        for name, image in now.power_cuts(chance):
            where = f"seed {seed}, {name} at {moment} of {disk.position}"
            check(image, tmp_path / "cut", trees, least, where)
            if chance.random() < 0.2:
                check_second_cuts(image, tmp_path / "cut", trees, least, where, chance, all_=False)


_Made = tuple[Kind, bytes, int, bytes, bytes]
_APPEND: _Made = (Kind.WRITE, b"old", 3, b"", b"er")
_NEW: tuple[_Made, ...] = ((Kind.CREATE, b"old", 0, b"", b""), (Kind.WRITE, b"old", 0, b"", b"new"))
SCRIPTS: dict[str, tuple[_Made, ...]] = {
    "write, rename": (_APPEND, (Kind.RENAME, b"old", 0, b"kept", b"")),
    "write, rename, create": (_APPEND, (Kind.RENAME, b"old", 0, b"kept", b""), *_NEW),
    "write, unlink, create": (_APPEND, (Kind.UNLINK, b"old", 0, b"", b""), *_NEW),
    "save twice": (
        (Kind.LINK, b"old", 0, b"p.tmp", b""),
        (Kind.CREATE, b"old.tmp", 0, b"", b""),
        (Kind.WRITE, b"old.tmp", 0, b"", b"second"),
        (Kind.RENAME, b"old.tmp", 0, b"old", b""),
        (Kind.RENAME, b"p.tmp", 0, b"p", b""),
        (Kind.LINK, b"old", 0, b"p.tmp", b""),
        (Kind.CREATE, b"old.tmp", 0, b"", b""),
        (Kind.WRITE, b"old.tmp", 0, b"", b"third"),
        (Kind.RENAME, b"old.tmp", 0, b"old", b""),
        (Kind.RENAME, b"p.tmp", 0, b"p", b""),
    ),
    "write in a folder, rename, create": (
        (Kind.WRITE, b"folder/f", 1, b"", b"x"),
        (Kind.CREATE, b"folder/g", 0, b"", b""),
        (Kind.RENAME, b"folder", 0, b"kept", b""),
        (Kind.CREATE_FOLDER, b"folder", 0, b"", b""),
        (Kind.CREATE, b"folder/f", 0, b"", b""),
        (Kind.WRITE, b"folder/f", 0, b"", b"y"),
    ),
    "create, rename, create again": (
        (Kind.CREATE_FOLDER, b"new", 0, b"", b""),
        (Kind.CREATE, b"new/f", 0, b"", b""),
        (Kind.RENAME, b"new", 0, b"new-1", b""),
        (Kind.CREATE_FOLDER, b"new", 0, b"", b""),
        (Kind.CREATE, b"new/g", 0, b"", b""),
        (Kind.RENAME, b"new", 0, b"new-2", b""),
    ),
    "cut, write, cut": (
        (Kind.TRUNCATE, b"old", 1, b"", b""),
        (Kind.WRITE, b"old", 1, b"", b"abcdef"),
        (Kind.TRUNCATE, b"old", 4, b"", b""),
        (Kind.WRITE, b"old", 6, b"", b"g"),
    ),
}


@pytest.mark.parametrize("apart", [1, 100, *in_soak(2)], ids=["one by one", "at once", "in pairs"])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_power_cut_at_each_moment(tmp_path: Path, script: Sequence[_Made], apart: int) -> None:
    root = tmp_path / "disk"
    older = NaiveFolder()
    older.apply(
        Operation(0, *each)
        for each in (
            (Kind.CREATE, b"old"),
            (Kind.WRITE, b"old", 0, b"", b"old"),
            (Kind.CREATE_FOLDER, b"folder"),
            (Kind.CREATE, b"folder/f"),
            (Kind.WRITE, b"folder/f", 0, b"", b"f"),
        )
    )
    trees = [older.tree]
    for each in decode_all(operations(*script)):
        older.apply([each])
        trees.append(older.tree)
    first: Image = {"data": {"old": b"old", "folder": {"f": b"f"}}}
    write_image(first, root)
    files = RecordedDisk(root, sync_takes_s=0)
    replica = Replica.open(files, root / "data")
    replica.begin(Position(EPOCH, 0))
    acknowledged = [(files.position, 0)]
    encoded = [
        b"".join(encode(at, *each[:4], [each[4]] if each[4] else ())) for at, each in enumerate(script, 1)
    ]
    for at in range(0, len(script), apart):
        replica.store(b"".join(encoded[at : at + apart]))
        acknowledged.append((files.position, min(at + apart, len(script))))
        replica.apply()
    replica.close()
    disk, chance = Disk(first), random.Random(apart)
    for moment in range(files.position + 1):
        if moment >= acknowledged[0][0]:
            least = max(number for position, number in acknowledged if position <= moment)
            for name, image in disk.power_cuts(chance):
                where = f"{name} at {moment} of {files.position}"
                check(image, tmp_path / "cut", trees, least, where)
                if apart > 2 and moment == files.position and name.startswith("nothing"):
                    check_second_cuts(image, tmp_path / "cut", trees, least, where, chance, all_=True)
        if moment < files.position:
            disk.apply(files.journal[moment])


def check_second_cuts(
    image: Image, root: Path, trees: list[Tree], least: int, where: str, chance: random.Random, *, all_: bool
) -> None:
    """Check also after another power cut, during the start: at each moment, or at a random one."""
    write_image(image, root)
    files = RecordedDisk(root, sync_takes_s=0)
    Replica.open(files, root / "data").close()
    count = files.position
    files.remove_folder(root)
    moments = range(count) if all_ else [chance.randrange(count)]
    disk = Disk(image)
    for moment in range(moments[-1] + 1):
        if moment in moments:
            for name, after in disk.power_cuts(chance):
                check(after, root, trees, least, f"{where}, then {name} at {moment} of the start")
        disk.apply(files.journal[moment])


def check(image: Image, root: Path, trees: list[Tree], least: int, where: str) -> None:
    """Open a folder, and check that it has at least this many operations, and nothing else."""
    write_image(image, root)
    replica = Replica.open(HastyFiles(), root / "data")
    assert replica.position is not None, where
    assert replica.position.epoch == EPOCH
    assert replica.position.number >= least, where
    assert tree_of(root / "data") == trees[replica.position.number], where
    replica.close()
    Files().remove_folder(root)


def operations(*made: "_Made") -> bytes:
    """Return operations, numbered from 1 on."""
    pieces: list[bytes] = []
    for number, (kind, path, position, to, data) in enumerate(made, 1):
        pieces += encode(number, kind, path, position, to, [data] if data else ())
    return b"".join(pieces)


def test_something_older_moves_into_a_new_folder(tmp_path: Path) -> None:
    """Creating the folder again after a crash must not remove it."""
    (tmp_path / "old").write_bytes(b"old")
    replica = Replica.open(Files(), tmp_path)
    replica.begin(Position(EPOCH, 0))
    replica.store(
        operations(
            (Kind.CREATE_FOLDER, b"new", 0, b"", b""),
            (Kind.RENAME, b"old", 0, b"new/old", b""),
            (Kind.WRITE, b"new/old", 3, b"", b"er"),
        )
    )
    replica.apply()
    replica.close()
    again = Replica.open(Files(), tmp_path)
    assert tree_of(tmp_path) == {b"new": None, b"new/old": b"older"}
    again.close()


INVALID = {
    "cut off": operations((Kind.CREATE, b"f", 0, b"", b""))[:-1],
    "size": b"\xff" + operations((Kind.CREATE, b"f", 0, b"", b""))[1:],
    "a flipped bit": operations((Kind.CREATE, b"f", 0, b"", b""))[:-1] + b"g",
    "number": operations((Kind.CREATE, b"f", 0, b"", b"")) * 2,
    "above": operations((Kind.CREATE, b"../f", 0, b"", b"")),
    "absolute": operations((Kind.CREATE, b"/f", 0, b"", b"")),
    "here": operations((Kind.CREATE, b"./f", 0, b"", b"")),
    "empty": operations((Kind.CREATE, b"", 0, b"", b"")),
    "zero byte": operations((Kind.CREATE, b"f\0g", 0, b"", b"")),
    "long": operations((Kind.CREATE, b"f" * 256, 0, b"", b"")),
    "to above": operations((Kind.RENAME, b"f", 0, b"g/../../h", b"")),
    "without to": operations((Kind.RENAME, b"f", 0, b"", b"")),
    "second path": operations((Kind.UNLINK, b"f", 0, b"g", b"")),
    "data": operations((Kind.UNLINK, b"f", 0, b"", b"x")),
    "the journal": operations((Kind.UNLINK, b"replica-journal.1", 0, b"", b"")),
    "spare room": operations((Kind.CREATE, b"spare-room", 0, b"", b"")),
    "own identity": operations((Kind.RENAME, b"f", 0, b"cluster.json", b"")),
    "far": operations((Kind.WRITE, b"f", (1 << 63) - 1, b"", b"x")),
    "nothing": b"",
}


@pytest.mark.parametrize("content", INVALID.values(), ids=INVALID)
def test_operations_that_may_not_be_done(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(b"")
    replica = Replica.open(Files(), tmp_path)
    replica.begin(Position(EPOCH, 0))
    with pytest.raises(InvalidOperation):
        replica.store(bytes(content))
    replica.close()
    assert tree_of(tmp_path) == {b"f": b""}
    assert Replica.open(Files(), tmp_path).position == Position(EPOCH, 0)


def test_an_unknown_kind(tmp_path: Path) -> None:
    content = bytearray(operations((Kind.CREATE, b"f", 0, b"", b"")))
    content[24] = 99
    content[4:8] = crc32(bytes(content[8:])).to_bytes(4, "big")
    replica = Replica.open(Files(), tmp_path)
    replica.begin(Position(EPOCH, 0))
    with pytest.raises(InvalidOperation, match="kind 99"):
        replica.store(bytes(content))
    replica.close()


def test_a_folder_that_lacks_a_file_has_diverged(tmp_path: Path) -> None:
    replica = Replica.open(Files(), tmp_path)
    with pytest.raises(Diverged):
        replica.store(operations((Kind.CREATE, b"f", 0, b"", b"")))
    replica.begin(Position(EPOCH, 0))
    replica.store(operations((Kind.WRITE, b"f", 0, b"", b"x")))
    with pytest.raises(Diverged):
        replica.apply()
    replica.close()
    assert Replica.open(Files(), tmp_path).position is None, "the operation would be left out"


@pytest.mark.parametrize(
    "made",
    [
        (Kind.WRITE, b"folder", 0, b"", b"x"),
        (Kind.CREATE, b"folder", 0, b"", b""),
        (Kind.RENAME, b"f", 0, b"folder", b""),
        (Kind.CREATE_FOLDER, b"f", 0, b"", b""),
        (Kind.TRUNCATE, b"f", (1 << 63) - 1, b"", b""),
        (Kind.UNLINK, b"missing", 0, b"", b""),
    ],
    ids=lambda made: f"{made[0].name} {made[1].decode()}",
)
def test_an_operation_that_does_not_fit_gives_up_the_position(tmp_path: Path, made: _Made) -> None:
    """Its journal would fail at each start."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "g").write_bytes(b"x")
    (tmp_path / "f").write_bytes(b"x")
    replica = Replica.open(Files(), tmp_path)
    replica.begin(Position(EPOCH, 0))
    replica.store(operations(made))
    replica.close()  # as a crash: a start does it first
    again = Replica.open(Files(), tmp_path)
    if again.position is not None:
        again.close()
        replica = Replica.open(Files(), tmp_path)
        replica.store(b"".join(encode(2, *made[:4], [made[4]] if made[4] else ())))
        with pytest.raises(Diverged):
            replica.apply()
        replica.close()
        again = Replica.open(Files(), tmp_path)
    assert again.position is None
    again.close()


class FewDescriptors(HastyFiles):
    """Counts open files."""

    def __init__(self) -> None:
        self.most = 0
        self._open = 0

    def _opened(self, fd: int) -> int:
        self._open += 1
        self.most = max(self.most, self._open)
        return fd

    def open(self, path: Path) -> int:
        return self._opened(super().open(path))

    def create_or_empty(self, path: Path) -> int:
        return self._opened(super().create_or_empty(path))

    def close(self, fd: int) -> None:
        self._open -= 1
        super().close(fd)


def test_a_round_that_changes_many_files_opens_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_files, "MOST_CHANGED", 10)
    many = operations(*((Kind.CREATE, b"%d" % number, 0, b"", b"") for number in range(200)))
    for is_done in (True, False):
        files = FewDescriptors()
        replica = Replica.open(files, tmp_path)
        replica.begin(Position(EPOCH, 0))
        replica.store(many)
        if is_done:
            replica.apply()
        replica.close()
        again = Replica.open(files, tmp_path)
        assert again.position == Position(EPOCH, 200)
        again.close()
        assert len(tree_of(tmp_path)) == 200
        assert files.most < 20


def test_a_journal_whose_acknowledged_part_is_damaged(tmp_path: Path) -> None:
    """Each byte is flipped: then the position is unknown, or not below what was acknowledged before the last round."""
    replica = Replica.open(Files(), tmp_path)
    replica.begin(Position(EPOCH, 0))
    replica.store(b"".join(encode(1, Kind.CREATE, b"f")))
    for number in (2, 3, 4):
        replica.store(b"".join(encode(number, Kind.WRITE, b"f", number, data=[b"x"])))
    replica.apply()
    replica.close()
    journal = next(tmp_path.glob("replica-journal.*"))
    whole = journal.read_bytes()
    for at in range(len(whole)):
        journal.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            stored = read_journal(Files(), tmp_path)
        except JournalDamaged:
            continue
        assert stored is not None
        assert stored.rounds, at
        assert stored.rounds[-1].last_number == 3, at  # the last round may be an unfinished write
    journal.write_bytes(whole)
    assert Replica.open(Files(), tmp_path).position == Position(EPOCH, 4)


def test_a_journal_overwrites_the_last_but_one(tmp_path: Path) -> None:
    """The sync of a file that does not grow takes less. What is behind the new rounds does not count."""
    replica = Replica.open(Files(), tmp_path, journal_bytes=1000)
    replica.begin(Position(EPOCH, 0))
    replica.store(b"".join(encode(1, Kind.CREATE, b"f")))
    inodes: list[list[int]] = []
    for number in range(2, 8):
        replica.store(b"".join(encode(number, Kind.WRITE, b"f", data=[b"%d" % number * 1000])))
        replica.apply()
        inodes.append(sorted(each.stat().st_ino for each in tmp_path.glob("replica-journal.*")))
    replica.store(b"".join(encode(8, Kind.WRITE, b"f", data=[b"last"])))
    replica.close()
    assert inodes[1:] == [inodes[1]] * 5
    assert len(inodes[1]) == 2
    again = Replica.open(Files(), tmp_path)
    assert again.position == Position(EPOCH, 8)
    assert (tmp_path / "f").read_bytes() == b"last" + b"7" * 996
    again.close()


def test_a_power_cut_while_journals_are_removed(tmp_path: Path) -> None:
    """An earlier one must not be taken for the last one."""
    disk = RecordedDisk(root := tmp_path / "disk", sync_takes_s=0)
    root.mkdir()
    disk.create_folder(root / "data")
    disk.sync_folder(root)
    for number in (1, 2, 3):
        Journal.begin(disk, root / "data", Position(EPOCH, number)).close()
    begun = disk.position
    remove_journals(disk, root / "data")
    for _, now in disk_at(disk.journal, range(begun, disk.position + 1)):
        for _, image in now.power_cuts(random.Random(0)):
            write_image(image, tmp_path / "cut")
            stored = read_journal(Files(), tmp_path / "cut" / "data")
            assert stored is None or stored.base.number == 3
            Files().remove_folder(tmp_path / "cut")


def test_writes_that_continue_each_other(tmp_path: Path) -> None:
    """They are one write. Those that overlap, leave a gap, or belong to another file are not."""
    (tmp_path / "f").write_bytes(b"")
    (tmp_path / "g").write_bytes(b"")
    made: list[_Made] = [
        (Kind.WRITE, path, position, b"", data)
        for path, position, data in (
            *((b"f", 0, b"aaaa"), (b"f", 4, b"bbbb"), (b"f", 8, b"cc"), (b"f", 6, b"dd"), (b"f", 9, b"e")),
            *((b"f", 20, b"f"), (b"g", 21, b"g"), (b"g", 22, b"hh"), (b"f", 24, b"i")),
        )
    ]
    made[3:3] = [(Kind.TRUNCATE, b"f", 9, b"", b"")]
    files = CountedWrites()
    replica = Replica.open(files, tmp_path)
    replica.begin(Position(EPOCH, 0))
    replica.store(operations(*made))
    files.offsets.clear()
    replica.apply()
    replica.close()
    assert files.offsets == [0, 6, 9, 20, 21, 24]
    assert (tmp_path / "f").read_bytes() == b"aaaabbddce" + bytes(10) + b"f\0\0\0i"
    assert (tmp_path / "g").read_bytes() == bytes(21) + b"ghh"


class CountedWrites(Files):
    """Notes where is written."""

    def __init__(self) -> None:
        self.offsets: list[int] = []

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        super().write(fd, offset, parts)
        self.offsets.append(offset)


def test_saved_states_of_many_topics_are_stored_with_few_syncs(tmp_path: Path) -> None:
    """A leader that stops saves all its topics; a follower that syncs for each of them seems to hang."""

    class Counting(HastyFiles):
        syncs = 0

        def sync(self, fd: int) -> None:
            self.syncs += 1

    root, stream = tmp_path / "leader", OperationStream(1 << 30)
    root.mkdir()
    leader = HastyRecordingFiles(root, stream)
    states = [root / "topics" / f"{number}.topic" / "state.json" for number in range(50)]
    leader.make_folder(root / "topics")
    for state in states:
        leader.make_folder(state.parent)
        leader.replace(state, b"before")
    folder = tmp_path / "follower"
    folder.mkdir()
    files = Counting()
    replica = Replica.open(files, folder)
    replica.begin(Position(EPOCH, 0))
    last, pieces = stream.after(0, 1 << 30)
    replica.store(b"".join(pieces))
    replica.apply()
    for state in states:
        leader.link(state, state.with_name("previous.tmp"))
        leader.replace(state, b"after")
        leader.rename(state.with_name("previous.tmp"), state.with_name("previous"))
    files.syncs = 0
    replica.store(b"".join(stream.after(last, 1 << 30)[1]))
    assert files.syncs == 1
    replica.apply()
    replica.close()
    assert tree_of(folder) == tree_of(root)
