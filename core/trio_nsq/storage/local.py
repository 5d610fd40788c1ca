"""Files in a local folder. A file survives a power cut as soon as readers can see it."""

import fcntl
import os
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EMLINK, ENOSYS, ENOTDIR, ENOTSUP, EPERM
from hashlib import blake2b
from io import BufferedWriter, FileIO
from pathlib import Path, PurePosixPath
from typing import Any

from ..log import Files
from ..protocol.errors import NSQError
from .interface import ChangedMeanwhile, Lease, LeaseLost, NewFile, Storage, StorageError, Stored, StoredFile

TEMPORARY = ".tmp-"
"""Part of the names of unfinished files. They start with a dot and do not end in `.parquet`, so readers skip them."""
PUBLIC_MODE, PRIVATE_MODE = 0o666, 0o600
"""Permissions of new files, before the umask."""
_NO_LINKS = frozenset({EPERM, ENOSYS, ENOTSUP, EMLINK})
_HOLDER_BYTES = 200
_FILES = Files()


class RenamedFile(NewFile):
    """A file with a temporary name until it is published."""

    def publish_over(self) -> None:
        """Publish the file; replace one that has its name."""
        raise NotImplementedError


class RenamingStorage(Storage):
    """A place whose files have a temporary name first, and whose versions are hashes of the content."""

    @abstractmethod
    def _create(self, temporary: str, name: str) -> RenamedFile:
        """Create a file with a temporary name."""

    @abstractmethod
    def _named(self, name: str) -> str:
        """Return the path of a file, for messages."""

    def create(self, name: str) -> NewFile:
        # At the top, so that `remove_unfinished` need not search all folders.
        return self._create(temporary_name(PurePosixPath(name).name), name)

    def put_new(self, name: str, data: bytes) -> bool:
        file = self._write(name, data)
        try:
            return file.publish()
        except BaseException:
            file.discard()
            raise

    def replace(self, name: str, data: bytes, version: str | None) -> str:
        """See `Storage.replace`. Another process must not write meanwhile: see `hold`."""
        found = self.read(name)
        if (None if found is None else found.version) != version:
            raise ChangedMeanwhile(f"{self._named(name)} was changed by another process")
        self.put(name, data)
        return version_of(data)

    def put(self, name: str, data: bytes) -> None:
        file = self._write(name, data)
        try:
            file.publish_over()
        except BaseException:
            file.discard()
            raise

    def _write(self, name: str, data: bytes) -> RenamedFile:
        """Create a file with some content, next to its final name."""
        file = self._create(temporary_name(name), name)
        try:
            with naming_file(self._named(name)):
                file.write(data)
                file.close()
        except BaseException:
            file.discard()
            raise
        return file


class LocalStorage(RenamingStorage):
    """A local folder, which need not exist.

    Args:
        folder: The folder.
        mode: The permissions of new files.
    """

    def __init__(self, folder: Path, mode: int = PUBLIC_MODE) -> None:
        self.folder = folder
        self.shown: str = os.fspath(folder)
        self._mode = mode

    def _create(self, temporary: str, name: str) -> RenamedFile:
        return _LocalFile(self.folder / temporary, self.folder, name, self._mode)

    def _named(self, name: str) -> str:
        return os.fspath(self.folder / name)

    def read(self, name: str) -> Stored | None:
        try:
            data = (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None
        return Stored(data, version_of(data))

    def names(self, folder: str) -> list[str]:
        try:
            found = [path.name for path in (self.folder / folder).iterdir() if path.is_file()]
        except FileNotFoundError:
            return []
        return [f"{folder}/{name}" for name in found if TEMPORARY not in name]

    def files(self) -> list[StoredFile] | StoredFile | None:
        if self.folder.is_file():
            return _stored_file("", self.folder)
        if not self.folder.is_dir():
            return None
        return [_stored_file(self._name_of(path), path) for path in self._paths()]

    def ages(self) -> Iterator[tuple[str, float]]:
        for path in self._paths():
            with suppress(FileNotFoundError):
                yield self._name_of(path), path.stat().st_mtime

    def _paths(self) -> Iterator[Path]:
        for parent, _, names in os.walk(self.folder, onerror=_raise, followlinks=True):
            for name in names:
                path = Path(parent, name)
                if TEMPORARY not in name and path.is_file():
                    yield path

    def _name_of(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def file(self, name: str) -> StoredFile | None:
        path = self.folder / name
        return _stored_file(name, path) if path.is_file() else None

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def remove_unfinished(self, prefixes: Sequence[str]) -> None:
        folders = {self.folder: tuple(f".{prefix}" for prefix in prefixes if not prefix.endswith("/"))}
        folders |= {self.folder / prefix: (".",) for prefix in prefixes if prefix.endswith("/")}
        for folder, beginnings in folders.items():
            with suppress(FileNotFoundError):
                for path in folder.iterdir():
                    if TEMPORARY in path.name and path.name.startswith(beginnings):
                        path.unlink(missing_ok=True)

    @contextmanager
    def hold(self, name: str, if_held: Callable[[str], NSQError]) -> Iterator[Lease]:
        path = self.folder / name
        make_folder(path.parent)
        with lock_file(path, if_held) as fd:
            yield _Lock(self.folder, path, fd)

    def url_of(self, name: str) -> str:
        return os.fspath(self.folder.absolute() / name)

    def open_input(self, name: str) -> Any:
        import pyarrow as pa

        path = self.url_of(name).rstrip("/")
        try:
            return pa.OSFile(os.fsencode(path).decode())
        except UnicodeDecodeError:
            raise not_utf8(os.fsencode(path)) from None


class _LocalFile(BufferedWriter, RenamedFile):
    """A file with a temporary name."""

    def __init__(self, temporary: Path, folder: Path, name: str, mode: int) -> None:
        make_folder(temporary.parent)
        super().__init__(
            FileIO(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb")
        )
        self._temporary = temporary
        self._path = folder / name
        self._published = False

    def close(self) -> None:
        """Make the content durable."""
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
                self.size = os.fstat(self.fileno()).st_size
            finally:
                super().close()

    def publish(self) -> bool:
        self.close()
        make_folder(self._path.parent)
        try:
            self._path.hardlink_to(self._temporary)
        except FileExistsError:
            self.discard()
            return False
        except OSError as exc:
            if exc.errno not in _NO_LINKS:
                raise
            # A file system without hard links. The lock of `hold` excludes other writers.
            if self._path.exists():
                self.discard()
                return False
            self._temporary.rename(self._path)
        else:
            self._temporary.unlink()
        self._published = True
        _FILES.sync_folder(self._path.parent)
        return True

    def publish_over(self) -> None:
        """Publish the file; replace one that has its name."""
        self.close()
        make_folder(self._path.parent)
        self._temporary.rename(self._path)
        self._published = True
        _FILES.sync_folder(self._path.parent)

    def discard(self) -> None:
        with suppress(OSError, ValueError):  # flushing the buffer would fail again
            if not self.closed:
                super().close()
        if not self._published:
            self._temporary.unlink(missing_ok=True)


class _Lock(Lease):
    """A locked file: it is lost if its folder is moved, emptied or unmounted."""

    def __init__(self, folder: Path, path: Path, fd: int) -> None:
        self._folder = folder
        self._path = path
        self._fd = fd

    def check(self) -> None:
        try:
            if os.path.samestat(self._path.stat(), os.fstat(self._fd)):
                return
        except FileNotFoundError:
            pass
        raise LeaseLost(
            f"the folder {self._folder} was moved, emptied, or is not mounted any more, while this process wrote to it"
        )


def _stored_file(name: str, path: Path) -> StoredFile:
    info = path.stat()
    return StoredFile(name, info.st_size, str(info.st_mtime_ns))


def _raise(error: OSError) -> None:
    raise error


def version_of(data: bytes) -> str:
    """Return the version of a file with this content, where the file system has no versions."""
    return blake2b(data, digest_size=16).hexdigest()


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
def lock_file(path: Path, if_held: Callable[[str], NSQError]) -> Iterator[int]:
    """Hold an exclusive lock on a file, which is created if missing, and yield it. The file names the process.

    Args:
        path: The file; its folder must exist.
        if_held: See `Storage.hold`.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, _HOLDER_BYTES, 0).decode(errors="replace").strip()
            raise if_held(holder if holder.isprintable() and holder else "another process") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{this_process()}\n".encode(), 0)
        yield fd
    finally:
        os.close(fd)


def this_process() -> str:
    """Describe this process, for messages of other processes."""
    return f"process {os.getpid()} on {os.uname().nodename}"


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
