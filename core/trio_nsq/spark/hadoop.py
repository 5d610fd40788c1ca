"""Files in Hadoop's file system, through pyarrow.

This is the only place where files are written through a file system of pyarrow: object stores have no rename, and
pyarrow has no conditional writes. The durability of a file depends on the file system.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote

from ..protocol.errors import NSQError
from ..storage.interface import Lease, StorageError, Stored, StoredFile
from ..storage.local import TEMPORARY, RenamedFile, RenamingStorage, version_of
from ..storage.storage_uri import parse_place, shown_place


class HadoopStorage(RenamingStorage):
    """A folder in a file system of pyarrow. Only one process may write to it at a time, which is not checked.

    Args:
        place: A URI, such as `hdfs://host/folder`.

    Raises:
        StorageError: pyarrow does not support the URI, or cannot use it.
    """

    def __init__(self, place: str) -> None:
        import pyarrow as pa
        import pyarrow.fs

        self.shown: str = shown_place(place)
        try:
            self._system, path = pyarrow.fs.FileSystem.from_uri(place)
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise StorageError(f"the folder {self.shown} cannot be used: {str(exc).splitlines()[0]}") from exc
        if path.strip("/") != unquote(parse_place(place).path):
            raise StorageError(
                f"the folder {self.shown} cannot be used: pyarrow would use {path} instead. Write # as %23, or choose "
                "another folder"
            )
        self._path = path.rstrip("/")

    def path_of(self, name: str) -> str:
        """Return the path of a file in the file system."""
        return f"{self._path}/{name}".rstrip("/") or "/"

    def _create(self, temporary: str, name: str) -> RenamedFile:
        return _HadoopFile(self._system, self.path_of(temporary), self.path_of(name))

    def _named(self, name: str) -> str:
        return self.url_of(name)

    def read(self, name: str) -> Stored | None:
        try:
            with self._system.open_input_stream(self.path_of(name)) as file:
                data = bytes(file.read())
        except FileNotFoundError:
            return None
        return Stored(data, version_of(data))

    def names(self, folder: str) -> list[str]:
        return [found.name for found in self._list(folder, recursive=False) if TEMPORARY not in found.name]

    def files(self) -> list[StoredFile] | StoredFile | None:
        import pyarrow.fs

        found = self.file("")
        if found is not None:
            return found
        if self._system.get_file_info(self.path_of("")).type == pyarrow.fs.FileType.NotFound:
            return None
        return [each for each in self._list("", recursive=True) if TEMPORARY not in each.name]

    def file(self, name: str) -> StoredFile | None:
        info = self._system.get_file_info(self.path_of(name))
        return StoredFile(name, info.size or 0, str(info.mtime_ns or 0)) if info.is_file else None

    def _list(self, folder: str, *, recursive: bool) -> list[StoredFile]:
        import pyarrow.fs

        selector = pyarrow.fs.FileSelector(self.path_of(folder), recursive=recursive, allow_not_found=True)
        return [
            StoredFile(info.path.removeprefix(f"{self._path}/"), info.size or 0, str(info.mtime_ns or 0))
            for info in self._system.get_file_info(selector)
            if info.is_file
        ]

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._system.delete_file(self.path_of(name))

    def remove_unfinished(self, prefixes: Sequence[str]) -> None:
        at_top = tuple(f".{prefix}" for prefix in prefixes if not prefix.endswith("/"))
        found = [each.name for each in self._list("", recursive=False) if each.name.startswith(at_top)]
        for prefix in prefixes:
            if prefix.endswith("/"):
                found += [each.name for each in self._list(prefix, recursive=False)]
        self.remove(name for name in found if TEMPORARY in name)

    @contextmanager
    def hold(self, name: str, if_held: Callable[[str], NSQError]) -> Iterator[Lease]:
        yield _Unchecked()

    def url_of(self, name: str) -> str:
        return f"{self.shown.rstrip('/')}/{name}".rstrip("/")

    def open_input(self, name: str) -> Any:
        return self._system.open_input_file(self.path_of(name))


class _Unchecked(Lease):
    def check(self) -> None:
        pass


class _HadoopFile(RenamedFile):
    """A file with a temporary name."""

    def __init__(self, system: Any, temporary: str, path: str) -> None:
        self._system = system
        self._temporary, self._path = temporary, path
        system.create_dir(temporary.rpartition("/")[0], recursive=True)
        self._file = system.open_output_stream(temporary)

    def write(self, data: Any, /) -> int:
        return int(self._file.write(data))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            try:
                self._file.close()
                self.size = int(self._system.get_file_info(self._temporary).size or 0)
            finally:
                super().close()

    def publish(self) -> bool:
        self.close()
        if self._system.get_file_info(self._path).is_file:
            self.discard()
            return False
        self.publish_over()
        return True

    def publish_over(self) -> None:
        """Publish the file; replace one that has its name."""
        self.close()
        self._system.create_dir(self._path.rpartition("/")[0], recursive=True)
        self._system.move(self._temporary, self._path)

    def discard(self) -> None:
        with suppress(Exception):  # writing the rest would fail again
            self._file.close()
        with suppress(OSError):
            self._system.delete_file(self._temporary)
