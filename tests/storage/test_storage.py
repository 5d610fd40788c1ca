"""Tests for the storage of exports: local folders, a file system of pyarrow, and object stores behave alike."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from soak import in_soak
from storage.stores import Store
from trio_nsq.protocol.errors import NSQError
from trio_nsq.spark.hadoop import HadoopStorage
from trio_nsq.spark.places import keep_secrets, storage_at
from trio_nsq.storage import (
    ChangedMeanwhile,
    LocalStorage,
    Storage,
    StorageError,
    StoredFile,
    absolute_place,
    canonical_place,
    local_path,
    shown_place,
    split_place,
)


@pytest.fixture(params=["local", "pyarrow", "s3", *in_soak("moto_s3"), "azure", "gcs"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "local":
        yield LocalStorage(tmp_path / "place")
    elif request.param == "pyarrow":
        yield HadoopStorage(f"file://{tmp_path / 'place'}")
    else:
        store: Store = request.getfixturevalue(request.param)
        with store.here():
            yield storage_at(store.new_place())


def contents(storage: Storage) -> list[str]:
    found = storage.files()
    return sorted(each.name for each in found) if isinstance(found, list) else []


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


def test_new_files_appear_complete_and_replace_nothing(storage: Storage) -> None:
    file = storage.create("d/e/c.parquet")
    file.write(b"three")
    assert contents(storage) == []
    file.close()
    assert (file.size, file.publish()) == (5, True)
    later = storage.create("d/e/c.parquet")
    later.write(b"other")
    assert not later.publish()
    given_up = storage.create("x.parquet")
    given_up.write(b"x")
    given_up.discard()
    given_up.discard()
    assert contents(storage) == ["d/e/c.parquet"]
    found = storage.read("d/e/c.parquet")
    assert found is not None
    assert found.data == b"three"
    with storage.open_input("d/e/c.parquet") as opened:
        assert (opened.size(), opened.read(2), opened.tell()) == (5, b"th", 2)
        opened.seek(-3, 2)
        assert (opened.read(10), opened.read(10)) == (b"ree", b"")
    with pytest.raises(FileNotFoundError):
        storage.open_input("d/e/missing")


def test_listing_of_folders_and_files(storage: Storage) -> None:
    for name in ("a/b/c", "a/d", "e"):
        storage.put_new(name, b"12")
    unfinished = storage.create("f")
    unfinished.close()
    found = storage.files()
    assert isinstance(found, list)
    assert sorted((each.name, each.size_bytes) for each in found) == [("a/b/c", 2), ("a/d", 2), ("e", 2)]
    assert storage.names("a") == ["a/d"]
    assert storage.file("e") in found
    if not isinstance(storage, HadoopStorage):
        ages = dict(storage.ages())
        assert ages.keys() == {"a/b/c", "a/d", "e"}
        if not storage.shown.startswith("gs:"):  # the clock of its emulator stands still
            assert all(abs(written_s - time.time()) < 3600 for written_s in ages.values())
    for file in found:
        with storage.open_file(file) as opened:
            assert opened.read() == b"12"
    storage.put("e", b"345")
    unfinished.discard()
    assert storage.file("e") not in found
    assert (storage.file("a"), storage.file("missing")) == (None, None)


def test_place_of_one_file(storage: Storage) -> None:
    storage.put_new("folder/x", b"12")
    folder, name = split_place(storage.url_of("folder/x"))
    assert (folder, name) == (storage.url_of("folder"), "x")
    if not isinstance(storage, HadoopStorage):
        single = storage_at(storage.url_of("folder/x")).files()
        assert isinstance(single, StoredFile)
        assert (single.name, single.size_bytes) == ("", 2)
        assert storage_at(storage.url_of("missing")).files() is None


@pytest.mark.parametrize("kind", ["s3", "moto_s3", "azure", "gcs"])
def test_long_lists_have_pages(kind: str, request: pytest.FixtureRequest) -> None:
    store: Store = request.getfixturevalue(kind)
    with store.here():
        storage = storage_at(store.new_place())
        names = [f"a/{number:04}" for number in range(1100 if kind == "s3" else 30)]
        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(lambda name: storage.put_new(name, b""), names))
        assert sorted(storage.names("a")) == names
        storage.remove([*names, "a/missing"])
        assert storage.names("a") == []


def test_uri_that_pyarrow_reads_as_another_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"pyarrow would use {tmp_path}/a instead. Write # as %23"):
        HadoopStorage(f"file://{tmp_path}/a#b")
    HadoopStorage(f"file://{tmp_path}/a%23b").put("x", b"")
    assert (tmp_path / "a#b" / "x").is_file()


@pytest.mark.parametrize("kind", [LocalStorage, lambda path: HadoopStorage(f"file://{path}")])
def test_leftovers_of_killed_runs(kind: Callable[[Path], Storage], tmp_path: Path) -> None:
    storage = kind(tmp_path)
    for name in ("clicks-a.parquet", "date=1/clicks-b.parquet", "other-a.parquet"):
        storage.create(name).close()
    folder = tmp_path / "_nsq" / "clicks"
    folder.mkdir(parents=True)
    (folder / ".manifest.json.tmp-1-2").write_bytes(b"")
    (folder / "manifest.json").write_bytes(b"")
    storage.remove_unfinished(["clicks-", "_nsq/clicks/", "_nsq/missing/"])
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert [name[:6] for name in left] == [".other", "_nsq/c"]
    assert left[1:] == ["_nsq/clicks/manifest.json"]


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
    from trio_nsq.storage import PRIVATE_MODE

    LocalStorage(tmp_path, PRIVATE_MODE).put("job.json", b"{}")
    assert (tmp_path / "job.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("scheme", ["file:", "FILE:", "File://", "file://localhost", "file://LocalHost"])
@pytest.mark.parametrize(
    ("path", "folder"), [("/a/b", "/a/b"), ("/a%20b", "/a b"), ("/a%2523", "/a%23"), ("/ü:b", "/ü:b")]
)
def test_urls_of_local_folders(scheme: str, path: str, folder: str) -> None:
    assert local_path(scheme + path) == Path(folder)
    assert absolute_place(scheme + path) == folder


@pytest.mark.parametrize("path", ["a:b", "c:/x", "x/s3:/y", "./dbfs:/x", "/s3:/y", "a%20b", "nsq_1:x", ":/x"])
def test_paths_with_colons_are_local_folders(path: str) -> None:
    assert local_path(path) == Path(path)


@pytest.mark.parametrize(
    "place",
    [
        "file:a",
        "file:",
        "file://",
        "file://host/a",
        "file://a",
        "FILE:a/b",
        "dbfs:/x",
        "s4:/x",
        "abc+d.e-f:/x",
    ],
)
def test_other_urls_are_no_local_folders(place: str) -> None:
    """Spark and Hadoop read some of them: the files would be in another folder than the user thinks."""
    for use in (local_path, absolute_place, storage_at, shown_place, keep_secrets):
        with pytest.raises(StorageError, match=r"write file:///FOLDER|is not supported"):
            use(place)


@pytest.mark.parametrize(
    ("place", "other"),
    [
        ("s3a://bucket/x", "s3://bucket/x/"),
        ("S3://key:secret@bucket/x", "s3://bucket/x"),
        ("gcs://bucket/x", "gs://bucket/x"),
        ("abfss://container@account/x", "abfs://container@account/x"),
        ("azure://container/x", "az://container/x"),
        ("file:///data/x/", "/data/x"),
    ],
)
def test_names_of_one_place_are_compared_as_one(place: str, other: str) -> None:
    assert canonical_place(place) == canonical_place(other)


@pytest.mark.parametrize(
    ("place", "other"),
    [
        ("s3://bucket/x", "gs://bucket/x"),
        ("s3://bucket/x", "s3://bucket/X"),
        ("abfss://container@account/x", "abfss://container@other/x"),
        ("s3://bucket/x?endpoint_override=a", "s3://bucket/x?endpoint_override=b"),
    ],
)
def test_different_places_are_compared_as_two(place: str, other: str) -> None:
    assert canonical_place(place) != canonical_place(other)


def test_places() -> None:
    assert isinstance(storage_at("file:///tmp/x"), LocalStorage)
    assert isinstance(storage_at("x/y"), LocalStorage)
    with pytest.raises(StorageError):
        storage_at("what://x/y")
    assert shown_place("x@y/z?key=1") == "x@y/z?key=1"
    assert shown_place("s3a://key:secret@bucket/x?region=eu&secret_key=abc") == ("s3a://bucket/x?region=eu")
