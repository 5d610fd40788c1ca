"""Tests for the storage of exports in a local folder and in a file system of pyarrow."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trio_nsq.protocol.errors import NSQError
from trio_nsq.spark.storage import (
    ChangedMeanwhile,
    LocalStorage,
    Storage,
    StorageError,
    StoredFile,
    shown_place,
    split_place,
    storage_at,
)
from trio_nsq.spark.storage.hadoop import HadoopStorage

KINDS: list[Callable[[Path], Storage]] = [LocalStorage, lambda path: HadoopStorage(f"file://{path}")]


@pytest.fixture(params=KINDS, ids=["local", "pyarrow"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    found = request.param(tmp_path / "place")
    assert isinstance(found, Storage)
    return found


def contents(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_whole_files(storage: Storage) -> None:
    assert (storage.read("a/b"), storage.names("a"), storage.size("a/b"), storage.files()) == (
        None,
        [],
        None,
        None,
    )
    assert storage.put_new("a/b", b"one")
    assert not storage.put_new("a/b", b"two")
    found = storage.read("a/b")
    assert found is not None
    assert (found.data, storage.names("a"), storage.size("a/b")) == (b"one", ["a/b"], 3)
    version = storage.replace("a/b", b"three", found.version)
    for wrong in (found.version, None):
        with pytest.raises(ChangedMeanwhile):
            storage.replace("a/b", b"four", wrong)
    assert storage.read("a/b") == (b"three", version)
    storage.replace("a/new", b"", None)
    with pytest.raises(ChangedMeanwhile):
        storage.replace("a/missing", b"", version)
    storage.put("a/b", b"five")
    storage.remove(["a/new", "a/missing"])
    assert storage.names("a") == ["a/b"]


def test_new_files_appear_complete_and_replace_nothing(storage: Storage, tmp_path: Path) -> None:
    file = storage.create("d/e/c.parquet")
    file.write(b"three")
    assert storage.files() == []
    file.close()
    assert (file.size, file.publish()) == (5, True)
    later = storage.create("d/e/c.parquet")
    later.write(b"other")
    assert not later.publish()
    given_up = storage.create("x.parquet")
    given_up.write(b"x")
    given_up.discard()
    given_up.discard()
    assert contents(tmp_path / "place") == ["d/e/c.parquet"]
    found = storage.read("d/e/c.parquet")
    assert found is not None
    assert found.data == b"three"
    with storage.open_input("d/e/c.parquet") as opened:
        opened.seek(2)
        assert opened.read(10) == b"ree"
    with pytest.raises(FileNotFoundError):
        storage.open_input("d/e/missing")


def test_listing_of_folders_and_files(storage: Storage, tmp_path: Path) -> None:
    for name in ("a/b/c", "a/d", "e"):
        storage.put_new(name, b"12")
    unfinished = storage.create("f")
    unfinished.close()
    found = storage.files()
    assert isinstance(found, list)
    assert sorted((each.name, each.size_bytes) for each in found) == [("a/b/c", 2), ("a/d", 2), ("e", 2)]
    assert storage.file("e") in found
    os.utime(tmp_path / "place" / "e", ns=(1, 1))
    assert storage.file("e") not in found
    folder, name = split_place(str(tmp_path / "place" / "e"))
    assert (folder, name) == (str(tmp_path / "place"), "e")
    single = LocalStorage(tmp_path / "place" / "e").files()
    assert isinstance(single, StoredFile)
    assert (single.name, single.size_bytes) == ("", 2)


def test_leftovers_of_killed_runs(storage: Storage, tmp_path: Path) -> None:
    names = ["clicks-a.parquet", "date=1/clicks-b.parquet", "other-a.parquet"]
    for name in names:
        storage.create(name).close()
    folder = tmp_path / "place" / "_nsq" / "clicks"
    folder.mkdir(parents=True)
    (folder / ".manifest.json.tmp-1-2").write_bytes(b"")
    (folder / "manifest.json").write_bytes(b"")
    storage.remove_unfinished(["clicks-", "_nsq/clicks/", "_nsq/missing/"])
    left = contents(tmp_path / "place")
    assert left[-1] == "_nsq/clicks/manifest.json"
    assert [name[:6] for name in left[:-1]] == [".other"]


def test_a_local_folder_is_held_by_one_process(tmp_path: Path) -> None:
    class Held(NSQError):
        pass

    storage = LocalStorage(tmp_path / "place")
    with storage.hold("a/lock", Held) as lease:
        lease.check()
        with pytest.raises(Held, match=f"process {os.getpid()} on "), storage.hold("a/lock", Held):
            pass
    with storage.hold("a/lock", Held):
        pass


def test_private_files(tmp_path: Path) -> None:
    from trio_nsq.spark.storage import PRIVATE_MODE

    LocalStorage(tmp_path, PRIVATE_MODE).put("job.json", b"{}")
    assert (tmp_path / "job.json").stat().st_mode & 0o777 == 0o600


def test_places() -> None:
    assert isinstance(storage_at("file:///tmp/x"), LocalStorage)
    assert isinstance(storage_at("x/y"), LocalStorage)
    with pytest.raises(StorageError):
        storage_at("what://x/y")
    assert shown_place("x@y/z?key=1") == "x@y/z?key=1"
    assert shown_place("s3a://key:secret@bucket/x?region=eu&secret_key=abc") == ("s3a://bucket/x?region=eu")
