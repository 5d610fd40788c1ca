"""The interface of places for files."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from io import BufferedIOBase
from typing import Any, NamedTuple

from ..protocol.errors import NSQError


class StorageError(NSQError):
    """Files cannot be written or read in a place; the text has the reason."""


def not_shared(folder: str, reason: str) -> StorageError:
    """Return the error for workers that write to a folder that only they have."""
    return StorageError(
        f"the folder {folder} is not the same one on this machine and on all workers: {reason}. Give a folder that all "
        "of them have mounted at this path, or one in a bucket"
    )


class ChangedMeanwhile(StorageError):
    """A file was not replaced, because it has another version than expected: another process changed it."""


class LeaseLost(StorageError):
    """Another process has taken over a lease; this process must not write any longer."""


class Stored(NamedTuple):
    """The content of a file, and its version: opaque, and different after each change of the content."""

    data: bytes
    version: str


class StoredFile(NamedTuple):
    """A file in a listing.

    Attributes:
        name: The name, relative to the place.
        version: Changes with the content; opaque, and of another kind than that of `Stored`.
    """

    name: str
    size_bytes: int
    version: str


class NewFile(BufferedIOBase):
    """A new binary file, for example for pyarrow. Readers do not see it before `publish`.

    Attributes:
        size: The size in bytes, after `close`.
    """

    size: int = 0

    def publish(self) -> bool:
        """Close the file if it is open, make it durable, and give it its final name, unless a file has that name.

        Returns:
            False: A complete file has the name already, and stays as it is; this one is discarded.
        """
        raise NotImplementedError

    def discard(self) -> None:
        """Remove the file, unless it is published. Also called after an error of another method."""
        raise NotImplementedError

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        raise NotImplementedError


class Lease(ABC):
    """The right to write in a part of a place; see `Storage.hold`."""

    @abstractmethod
    def check(self) -> None:
        """Check that this process still has the lease. Raises LeaseLost."""


class Storage(ABC):
    """A folder, a bucket, or a part of a bucket. Names are relative to it, with slashes.

    Every method may raise StorageError, or OSError for a local folder. A file that readers see is complete, and was
    durable before they saw it. Methods may be called from several threads.

    Attributes:
        shown: The place without secrets, for messages and reports.
    """

    shown: str

    @abstractmethod
    def create(self, name: str) -> NewFile:
        """Create a file. Readers do not see it before it is published under this name."""

    @abstractmethod
    def put_new(self, name: str, data: bytes) -> bool:
        """Write a whole file, unless it exists.

        Returns:
            False: The file exists already, and stays as it is.
        """

    @abstractmethod
    def read(self, name: str) -> Stored | None:
        """Return the content of a file; None if it does not exist."""

    @abstractmethod
    def replace(self, name: str, data: bytes, version: str | None) -> str:
        """Write a whole file if its current version is the expected one.

        Args:
            version: The version from `read` or from an earlier `replace`; None: the file must not exist.

        Returns:
            The new version.

        Raises:
            ChangedMeanwhile: The file has another version. It stays as it is.
        """

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a whole file, whatever it had before: for files that only one process writes."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the files in a folder, not those in its subfolders, in arbitrary order; empty if it does not exist."""

    @abstractmethod
    def files(self) -> list[StoredFile] | StoredFile | None:
        """List the files of the place and of its subfolders, in arbitrary order, without unfinished ones.

        Returns:
            The files; the only file if the place itself is a file, with an empty name; None if the place does not
            exist.
        """

    def ages(self) -> Iterator[tuple[str, float]]:
        """Yield the name of each file of `files`, and when it was written by the clock of the place, Unix seconds.

        For folders and buckets.
        """
        raise NotImplementedError

    @abstractmethod
    def file(self, name: str) -> StoredFile | None:
        """Return a file as in `files`; None if it does not exist."""

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""
        found = self.file(name)
        return None if found is None else found.size_bytes

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""

    @abstractmethod
    def remove_unfinished(self, prefixes: Sequence[str]) -> None:
        """Remove files that were created but not published, for example because the process was killed.

        Args:
            prefixes: Beginnings of the last part of their names, or folders, which end in a slash.
        """

    @abstractmethod
    def hold(self, name: str, if_held: Callable[[str], NSQError]) -> AbstractContextManager[Lease]:
        """Hold a lease until the end of the block. It ends with the process, too.

        Args:
            name: The file of the lease.
            if_held: Returns the error to raise if another process has the lease; called with a description of that
                process, such as `process 7 on host a`, or `another process`.
        """

    @abstractmethod
    def url_of(self, name: str) -> str:
        """Return the absolute path or the URI of a file, without secrets; of the place itself if the name is empty."""

    @abstractmethod
    def open_input(self, name: str) -> Any:
        """Open a file as a seekable binary file that pyarrow reads efficiently.

        Raises:
            FileNotFoundError: The file does not exist.
        """

    def open_file(self, file: StoredFile) -> Any:
        """Open a file as `open_input`, from what a listing said about it.

        An object store gets no request for that. Reading raises StorageError if the object has another version.
        """
        return self.open_input(file.name)
