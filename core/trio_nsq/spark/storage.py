"""The files of exports and replay jobs, in a local folder or in a file system that pyarrow supports.

A file gets its final name only when its content is complete. In a local folder this survives a power cut: every method
syncs its changes before it returns.
"""

import fcntl
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import ENOTDIR
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ..log import Files
from ..protocol.errors import NSQError

TEMPORARY = ".tmp-"
"""Part of the names of unfinished files. They start with a dot and do not end in `.parquet`, so readers skip them."""
_FILES = Files()


class StorageError(NSQError):
    """Files cannot be written or read in a folder; the text has the reason."""


class Storage(ABC):
    """A folder. Names are relative to it, with slashes. Every method may raise OSError."""

    @abstractmethod
    def create(self, name: str) -> tuple[str, Any]:
        """Create a file in the folder of its final name; return its temporary name and the open binary file."""

    @abstractmethod
    def complete(self, temporary: str, file: Any) -> int:
        """Close a file and make its content durable; return its size in bytes."""

    @abstractmethod
    def publish(self, names: Iterable[tuple[str, str]]) -> None:
        """Rename files, given as `(temporary, name)`. Existing files are replaced."""

    @abstractmethod
    def discard(self, temporary: str) -> None:
        """Remove a file, if it exists."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether a file exists."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the files in a folder, in arbitrary order; empty if it does not exist."""

    @abstractmethod
    def temporary_names(self) -> list[str]:
        """Return the unfinished files of all folders."""

    @abstractmethod
    def path_of(self, name: str) -> str:
        """Return the full path of a file, for error messages."""

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, replacing an existing one."""
        temporary, file = self.create(name)
        try:
            with naming_file(self.path_of(name)):
                file.write(data)
                self.complete(temporary, file)
                self.publish([(temporary, name)])
        except BaseException:
            with suppress(OSError):  # flushing the buffer would fail again
                file.close()
            self.discard(temporary)
            raise


def storage_at(place: str) -> Storage:
    """Return the storage of a folder, which need not exist.

    Args:
        place: A path, or a URI that pyarrow supports: `s3://`, `gs://`, `hdfs://`, and `s3a://` for `s3://`.

    Raises:
        StorageError: pyarrow does not support the URI, or cannot use it.
    """
    if (local := local_path(place)) is not None:
        return LocalStorage(local)
    return ArrowStorage(*arrow_system(place))


def local_path(place: str) -> Path | None:
    """Return the path of a local folder; None if the place is a URI of another file system."""
    place = place.removeprefix("file://")
    return None if "://" in place else Path(place)


def arrow_system(place: str) -> tuple[Any, str]:
    """Return the pyarrow file system of a place.

    Returns:
        The file system, and the path in it.

    Raises:
        StorageError: pyarrow does not support the URI, or cannot use it.
    """
    import pyarrow as pa
    import pyarrow.fs

    if (local := local_path(place)) is not None:
        path = os.fsencode(local.absolute())
        try:
            return pyarrow.fs.LocalFileSystem(), path.decode()
        except UnicodeDecodeError:
            raise not_utf8(path) from None
    try:
        system, path = pyarrow.fs.FileSystem.from_uri(place.replace("s3a://", "s3://", 1))
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise StorageError(f"the folder {place} cannot be used: {exc}") from exc
    return system, path


def not_utf8(path: bytes) -> StorageError:
    """Return the error for a local file name that pyarrow cannot handle."""
    return StorageError(
        f"{path.decode(errors='replace')} cannot be read: pyarrow supports only UTF-8 file names"
    )


def temporary_name(name: str) -> str:
    """Return a unique temporary name in the folder of `name`."""
    path = PurePosixPath(name)
    return str(path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"))


@contextmanager
def naming_file(path: Path | str) -> Iterator[None]:
    """Add a file name to an OSError without one, such as an error of an open file."""
    try:
        yield
    except OSError as exc:
        if exc.filename is None and exc.errno is not None:
            exc.filename = os.fspath(path)
        raise


@contextmanager
def lock_file(path: Path, if_held: NSQError) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if missing.

    Args:
        path: The file; its folder must exist.
        if_held: The error to raise if another process has the lock.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise if_held from None
        yield
    finally:
        os.close(fd)


class LocalStorage(Storage):
    """A local folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path_of(self, name: str) -> str:
        return str(self._folder / name)

    def create(self, name: str) -> tuple[str, IO[bytes]]:
        temporary = temporary_name(name)
        path = self._folder / temporary
        make_folder(path.parent)
        return temporary, open(path, "xb")

    def complete(self, temporary: str, file: IO[bytes]) -> int:
        with file:
            file.flush()
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size

    def publish(self, names: Iterable[tuple[str, str]]) -> None:
        folders = set()
        for temporary, name in names:
            path = self._folder / name
            make_folder(path.parent)
            (self._folder / temporary).rename(path)
            folders.add(path.parent)
        for folder in folders:
            _FILES.sync_folder(folder)

    def discard(self, temporary: str) -> None:
        (self._folder / temporary).unlink(missing_ok=True)

    def read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        return (self._folder / name).exists()

    def names(self, folder: str) -> list[str]:
        try:
            return [f"{folder}/{path.name}" for path in (self._folder / folder).iterdir() if path.is_file()]
        except FileNotFoundError:
            return []

    def temporary_names(self) -> list[str]:
        found = self._folder.rglob(f".*{TEMPORARY}*")
        return [path.relative_to(self._folder).as_posix() for path in found]


def make_folder(folder: Path) -> None:
    """Create a folder and its parents if missing, and sync each new name."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), os.fspath(folder)) from None
    _FILES.sync_folder(folder.parent)


class ArrowStorage(Storage):
    """A folder in a pyarrow file system. The durability of a completed file depends on that file system."""

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        self._path = path.rstrip("/")

    def path_of(self, name: str) -> str:
        return f"{self._path}/{name}"

    def create(self, name: str) -> tuple[str, Any]:
        temporary = temporary_name(name)
        path = self.path_of(temporary)
        self._system.create_dir(path.rpartition("/")[0], recursive=True)
        return temporary, self._system.open_output_stream(path)

    def complete(self, temporary: str, file: Any) -> int:
        file.close()
        return int(self._system.get_file_info(self.path_of(temporary)).size)

    def publish(self, names: Iterable[tuple[str, str]]) -> None:
        for temporary, name in names:
            self._system.create_dir(self.path_of(name).rpartition("/")[0], recursive=True)
            self._system.move(self.path_of(temporary), self.path_of(name))

    def discard(self, temporary: str) -> None:
        with suppress(FileNotFoundError):
            self._system.delete_file(self.path_of(temporary))

    def read(self, name: str) -> bytes | None:
        try:
            with self._system.open_input_stream(self.path_of(name)) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        return bool(self._system.get_file_info(self.path_of(name)).is_file)

    def names(self, folder: str) -> list[str]:
        return [name for name in self._files(folder, recursive=False) if TEMPORARY not in name]

    def temporary_names(self) -> list[str]:
        return [name for name in self._files("", recursive=True) if TEMPORARY in name]

    def _files(self, folder: str, *, recursive: bool) -> list[str]:
        import pyarrow.fs

        base = self.path_of(folder).rstrip("/")
        selector = pyarrow.fs.FileSelector(base, recursive=recursive, allow_not_found=True)
        found = self._system.get_file_info(selector)
        return [info.path.removeprefix(f"{self._path}/") for info in found if info.is_file]
