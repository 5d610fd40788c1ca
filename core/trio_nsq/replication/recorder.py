"""The file layer of a leader: it does each operation, and records it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import RLock, get_ident
from time import monotonic

from ..log.files import Files
from .operations import MOST_DATA_BYTES, Kind, is_at_or_below, relative
from .stream import OperationStream


class _OpenFile:
    """A file that is open for writing, with all its descriptors.

    Attributes:
        path: As operations have it; None once it is removed.
        lock: Held while the file is changed and that is recorded: other members must see the same order.
    """

    __slots__ = ("descriptors", "lock", "path")

    def __init__(self, path: bytes) -> None:
        self.path: bytes | None = path
        self.lock = RLock()
        self.descriptors = 0


class RecordingFiles(Files):
    """The real file system; adds each successful change in the data folder to a stream.

    A failed operation is not recorded: the caller undoes what it left, or repeats it.

    Args:
        root: The data folder.
        operations: Gets the operations, in the order in which they are done.

    Attributes:
        root: The data folder.
        operations: See above.
        is_exact: No operation or sync has failed: the folder is what the operations make of it, byte for byte.
    """

    writes_zeros_ahead = False  # they would be sent to the other members

    def __init__(self, root: Path, operations: OperationStream) -> None:
        self.root = root
        self.is_exact: bool = True
        self._syncs_since_s: dict[int, float] = {}  # by thread
        self.operations = operations
        # Names are changed, and that is recorded, under this lock. It is taken before those of files.
        self._names = RLock()
        self._by_path: dict[bytes, _OpenFile] = {}
        self._by_descriptor: dict[int, _OpenFile] = {}

    def sync(self, fd: int) -> None:
        self._syncs_since_s[get_ident()] = monotonic()
        try:
            super().sync(fd)
        except OSError:
            self.is_exact = False
            raise
        finally:
            del self._syncs_since_s[get_ident()]

    @property
    def hung_s(self) -> float:
        """How long the oldest sync has run; 0: none runs."""
        now_s = monotonic()
        return max((now_s - since_s for since_s in list(self._syncs_since_s.values())), default=0.0)

    @contextmanager
    def _exact_if_done(self) -> Iterator[None]:
        """Note an operation that fails in the block; `write` and `sync`, which are frequent, do so themselves."""
        try:
            yield
        except OSError:
            self.is_exact = False
            raise

    def record_content(self, path: Path) -> None:
        """Record the content of a file, which was changed when nothing was recorded. Nothing has it open.

        Raises:
            OSError: It cannot be read.
        """
        below = relative(path, self.root)
        assert below is not None
        with self._names:
            content = self.content(path, MOST_DATA_BYTES)
            self.operations.append(Kind.CREATE, below)
            self.operations.append(Kind.WRITE, below, data=(content,))

    # ------------------------------------------------------------------ open files

    def _opened(self, fd: int, path: bytes) -> None:
        file = self._by_path.get(path)
        if file is None:
            file = self._by_path[path] = _OpenFile(path)
        file.descriptors += 1
        self._by_descriptor[fd] = file

    def create(self, path: Path) -> int:
        if (below := relative(path, self.root)) is None:
            return super().create(path)
        with self._names:
            fd = super().create(path)
            self.operations.append(Kind.CREATE, below)
            self._opened(fd, below)
        return fd

    def create_or_empty(self, path: Path) -> int:
        if (below := relative(path, self.root)) is None:
            return super().create_or_empty(path)
        with self._names:
            fd = super().create_or_empty(path)
            self.operations.append(Kind.CREATE, below)
            self._opened(fd, below)
        return fd

    def open(self, path: Path) -> int:
        if (below := relative(path, self.root)) is None:
            return super().open(path)
        with self._names:
            fd = super().open(path)
            self._opened(fd, below)
        return fd

    def close(self, fd: int) -> None:
        if fd in self._by_descriptor:
            with self._names:
                file = self._by_descriptor.pop(fd)
                file.descriptors -= 1
                if not file.descriptors and file.path is not None:
                    del self._by_path[file.path]
        super().close(fd)

    # ------------------------------------------------------------------ content

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        file = self._by_descriptor.get(fd)
        if file is None:
            super().write(fd, offset, parts)
            return
        with file.lock:
            try:
                super().write(fd, offset, parts)
            except OSError:
                self.is_exact = False
                raise
            if file.path is not None:
                for at, data in _pieces(offset, parts):
                    self.operations.append(Kind.WRITE, file.path, at, data=data)

    def truncate(self, fd: int, size: int) -> None:
        file = self._by_descriptor.get(fd)
        if file is None:
            super().truncate(fd, size)
            return
        with file.lock:
            with self._exact_if_done():
                super().truncate(fd, size)
            if file.path is not None:
                self.operations.append(Kind.TRUNCATE, file.path, size)

    def allocate(self, fd: int, size: int) -> None:
        file = self._by_descriptor.get(fd)
        if file is None:
            super().allocate(fd, size)
            return
        with file.lock:
            with self._exact_if_done():
                super().allocate(fd, size)
            if file.path is not None:
                self.operations.append(Kind.ALLOCATE, file.path, size)

    # ------------------------------------------------------------------ names

    def create_folder(self, path: Path) -> None:
        with self._names:
            super().create_folder(path)
            if (below := relative(path, self.root)) is not None:
                self.operations.append(Kind.CREATE_FOLDER, below)

    def rename(self, path: Path, to: Path) -> None:
        below, target = self._shared(path, to)
        with self._names, self._stopped(below, target):
            super().rename(path, to)
            if below is not None and target is not None:
                self.operations.append(Kind.RENAME, below, to=target)
                self._forget(target)
                for file in self._at_or_below(below):
                    assert file.path is not None
                    del self._by_path[file.path]
                    file.path = target + file.path[len(below) :]
                    self._by_path[file.path] = file

    def link(self, path: Path, to: Path) -> None:
        below, target = self._shared(path, to)
        with self._names, self._stopped(below):
            super().link(path, to)
            if below is not None and target is not None:
                self.operations.append(Kind.LINK, below, to=target)

    def unlink(self, path: Path) -> None:
        below = relative(path, self.root)
        with self._names, self._stopped(below):
            super().unlink(path)
            if below is not None:
                self.operations.append(Kind.UNLINK, below)
                self._forget(below)

    def remove_folder(self, path: Path) -> None:
        with self._exact_if_done():
            # Not under the locks: it can take long, and no other thread changes the folder.
            super().remove_folder(path)
        with self._names:
            if (below := relative(path, self.root)) is not None:
                self.operations.append(Kind.REMOVE_FOLDER, below)
                self._forget(below)

    @contextmanager
    def names_unchanged(self) -> Iterator[None]:
        """While the block runs, no name changes. It must be short: all changes of names wait."""
        with self._names:
            yield

    def _shared(self, path: Path, to: Path) -> tuple[bytes | None, bytes | None]:
        below, target = relative(path, self.root), relative(to, self.root)
        assert (below is None) == (target is None), "what members share keeps to itself"
        return below, target

    def _at_or_below(self, path: bytes) -> list[_OpenFile]:
        return [file for at, file in self._by_path.items() if is_at_or_below(at, path)]

    @contextmanager
    def _stopped(self, *paths: bytes | None) -> Iterator[None]:
        """Let nothing be written at or below these paths: it would be recorded with the wrong name, or for a name
        that members no longer have."""
        with ExitStack() as stack:
            for path in paths:
                for file in self._at_or_below(path) if path is not None else ():
                    stack.enter_context(file.lock)
            yield

    def _forget(self, path: bytes) -> None:
        """Record no longer what is written to files at or below a path, which have lost their names."""
        for file in self._at_or_below(path):
            assert file.path is not None
            del self._by_path[file.path]
            file.path = None


def _pieces(offset: int, parts: Sequence[bytes | memoryview]) -> list[tuple[int, list[bytes]]]:
    """Divide a write into those of at most `MOST_DATA_BYTES`: the offset, and the parts, of each."""
    if sum(map(len, parts)) <= MOST_DATA_BYTES:
        return [(offset, [bytes(part) for part in parts if part])] if any(parts) else []
    data = memoryview(b"".join(parts))
    return [
        (offset + at, [bytes(data[at : at + MOST_DATA_BYTES])]) for at in range(0, len(data), MOST_DATA_BYTES)
    ]
