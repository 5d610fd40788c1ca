"""Where the files of an export go: a folder of this machine, or what pyarrow has a file system for.

A name is there with all of its content, or not at all. On a local disk that also holds for a power cut: what was
returned from is stable.
"""

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import ENOTDIR
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

from ..protocol.errors import NSQError

TEMPORARY = ".tmp-"
"""In names of files that are being written; they begin with a dot, and do not end like those with messages."""


class StorageError(NSQError):
    """Files cannot be written or read there; the text says why."""


class Storage(Protocol):
    """A folder; names are relative to it, with slashes."""

    def create(self, name: str) -> tuple[str, Any]:
        """Begin a file under a temporary name beside the one it is to have; returns that name, and a binary file."""
        ...

    def complete(self, temporary: str, file: Any) -> int:
        """Close it; its content is stable then. Returns its bytes."""
        ...

    def publish(self, names: Iterable[tuple[str, str]]) -> None:
        """Give files `(temporary, name)` their names, in place of what may have them."""
        ...

    def discard(self, temporary: str) -> None:
        """Remove a file; nothing happens if it is not there."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Put a small file there, in place of one of this name."""
        ...

    def read(self, name: str) -> bytes | None:
        """What is in a file; None if there is none."""
        ...

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        ...

    def names(self, folder: str) -> list[str]:
        """The files in a folder, in no order; none if there is no such folder."""
        ...

    def temporary_names(self) -> list[str]:
        """What was begun and never came to its end, all over."""
        ...


def storage_at(place: str) -> Storage:
    """A folder, which need not exist.

    Args:
        place: A path, or a URI that pyarrow understands: `s3://`, `gs://`, `hdfs://`, and `s3a://` for `s3://`.

    Raises:
        StorageError: There is no such kind of place, or it cannot be used.
    """
    if (local := local_path(place)) is not None:
        return LocalStorage(local)
    return ArrowStorage(*arrow_system(place))


def local_path(place: str) -> Path | None:
    """The path of a folder on this machine; None if it is elsewhere."""
    place = place.removeprefix("file://")
    return None if "://" in place else Path(place)


def arrow_system(place: str) -> tuple[Any, str]:
    """What pyarrow has for a place.

    Args:
        place: As of `storage_at`.

    Returns:
        The file system, and the path on it.

    Raises:
        StorageError: There is no such kind of place, or it cannot be used.
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
    """What to raise if pyarrow is to read what has such a name."""
    return StorageError(
        f"{path.decode(errors='replace')} cannot be read, as pyarrow knows no names that are not UTF-8"
    )


def temporary_name(name: str) -> str:
    """A name for a file that is to be called `name`."""
    path = PurePosixPath(name)
    return str(path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"))


@contextmanager
def writing_to(path: Path | str) -> Iterator[None]:
    """Have an OSError that comes inside name a file, if it names none, as those of files that are open do."""
    try:
        yield
    except OSError as exc:
        if exc.filename is None and exc.errno is not None:
            exc.filename = os.fspath(path)
        raise


class LocalStorage:
    """A folder of this machine; see `Storage`. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def folder(self) -> Path:
        """The folder."""
        return self._folder

    def create(self, name: str) -> tuple[str, IO[bytes]]:
        """See `Storage`."""
        temporary = temporary_name(name)
        path = self._folder / temporary
        make_folder(path.parent)
        return temporary, open(path, "xb")

    def complete(self, temporary: str, file: IO[bytes]) -> int:
        """See `Storage`."""
        with file:
            file.flush()
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size

    def publish(self, names: Iterable[tuple[str, str]]) -> None:
        """See `Storage`."""
        folders = set()
        for temporary, name in names:
            path = self._folder / name
            make_folder(path.parent)
            (self._folder / temporary).rename(path)
            folders.add(path.parent)
        for folder in folders:
            _sync_folder(folder)

    def discard(self, temporary: str) -> None:
        """See `Storage`."""
        (self._folder / temporary).unlink(missing_ok=True)

    def write(self, name: str, data: bytes) -> None:
        """See `Storage`."""
        temporary, file = self.create(name)
        try:
            with writing_to(self._folder / name):
                file.write(data)
                self.complete(temporary, file)
                self.publish([(temporary, name)])
        except BaseException:
            with suppress(OSError):  # what could not be written cannot be now
                file.close()
            self.discard(temporary)
            raise

    def read(self, name: str) -> bytes | None:
        """See `Storage`."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        """See `Storage`."""
        return (self._folder / name).exists()

    def names(self, folder: str) -> list[str]:
        """See `Storage`."""
        try:
            return [f"{folder}/{path.name}" for path in (self._folder / folder).iterdir() if path.is_file()]
        except FileNotFoundError:
            return []

    def temporary_names(self) -> list[str]:
        """See `Storage`."""
        found = self._folder.rglob(f".*{TEMPORARY}*")
        return [path.relative_to(self._folder).as_posix() for path in found]


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, if they are not there; they stay, also after a power cut."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), os.fspath(folder)) from None
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class ArrowStorage:
    """A folder on one of pyarrow's file systems; see `Storage`. Raises OSError.

    Args:
        system: The file system.
        path: The folder, without what names the file system.
    """

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        self._path = path.rstrip("/")

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def create(self, name: str) -> tuple[str, Any]:
        """See `Storage`."""
        temporary = temporary_name(name)
        path = self._at(temporary)
        self._system.create_dir(path.rpartition("/")[0], recursive=True)
        return temporary, self._system.open_output_stream(path)

    def complete(self, temporary: str, file: Any) -> int:
        """See `Storage`. Whether it is stable is for the file system to say."""
        file.close()
        return int(self._system.get_file_info(self._at(temporary)).size)

    def publish(self, names: Iterable[tuple[str, str]]) -> None:
        """See `Storage`."""
        for temporary, name in names:
            self._system.create_dir(self._at(name).rpartition("/")[0], recursive=True)
            self._system.move(self._at(temporary), self._at(name))

    def discard(self, temporary: str) -> None:
        """See `Storage`."""
        with suppress(FileNotFoundError):
            self._system.delete_file(self._at(temporary))

    def write(self, name: str, data: bytes) -> None:
        """See `Storage`."""
        temporary, file = self.create(name)
        try:
            file.write(data)
            self.complete(temporary, file)
            self.publish([(temporary, name)])
        except BaseException:
            self.discard(temporary)
            raise

    def read(self, name: str) -> bytes | None:
        """See `Storage`."""
        try:
            with self._system.open_input_stream(self._at(name)) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        """See `Storage`."""
        return bool(self._system.get_file_info(self._at(name)).is_file)

    def names(self, folder: str) -> list[str]:
        """See `Storage`."""
        return [name for name in self._files(folder, recursive=False) if TEMPORARY not in name]

    def temporary_names(self) -> list[str]:
        """See `Storage`."""
        return [name for name in self._files("", recursive=True) if TEMPORARY in name]

    def _files(self, folder: str, *, recursive: bool) -> list[str]:
        import pyarrow.fs

        base = self._at(folder).rstrip("/")
        selector = pyarrow.fs.FileSelector(base, recursive=recursive, allow_not_found=True)
        found = self._system.get_file_info(selector)
        return [info.path.removeprefix(f"{self._path}/") for info in found if info.is_file]
