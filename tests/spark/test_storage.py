"""Tests for the storage of exports: a local folder, and file systems of pyarrow."""

from pathlib import Path

import pyarrow.fs
import pytest

from trio_nsq.spark.storage import ArrowStorage, LocalStorage, Storage, StorageError, storage_at


def storages(tmp_path: Path) -> list[Storage]:
    system = pyarrow.fs.LocalFileSystem()
    return [LocalStorage(tmp_path / "local"), ArrowStorage(system, str(tmp_path / "arrow"))]


@pytest.mark.parametrize("index", [0, 1])
def test_storages(tmp_path: Path, index: int) -> None:
    storage = storages(tmp_path)[index]
    assert (storage.read("a/b"), storage.names("a"), storage.exists("a/b")) == (None, [], False)
    storage.write("a/b", b"one")
    storage.write("a/b", b"two")
    assert (storage.read("a/b"), storage.names("a"), storage.exists("a/b")) == (b"two", ["a/b"], True)
    temporary, file = storage.create("c.parquet")
    file.write(b"three")
    assert storage.complete(temporary, file) == 5
    assert (storage.temporary_names(), storage.exists("d/c.parquet")) == ([temporary], False)
    storage.publish([(temporary, "d/e/c.parquet")])
    assert (storage.temporary_names(), storage.read("d/e/c.parquet")) == ([], b"three")
    storage.discard("d/e/c.parquet")
    storage.discard("d/e/c.parquet")
    assert not storage.exists("d/e/c.parquet")


def test_places() -> None:
    assert isinstance(storage_at("file:///tmp/x"), LocalStorage)
    assert isinstance(storage_at("x/y"), LocalStorage)
    assert isinstance(storage_at("s3a://key:secret@bucket/x?region=eu-west-1"), ArrowStorage)
    with pytest.raises(StorageError):
        storage_at("what://x/y")
