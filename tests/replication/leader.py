"""A data folder that changes at random in the ways of a broker, and a model of what operations do."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from trio_nsq.log.files import Files
from trio_nsq.replication.operations import Kind, Operation, decode_all, is_shared
from trio_nsq.replication.stream import OperationStream

Tree = dict[bytes, bytes | None]
"""The content of each file, and None for each folder, by relative path."""


def tree_of(folder: Path) -> Tree:
    """Return what members share of a data folder."""
    found: Tree = {}
    for path in folder.rglob("*"):
        below = path.relative_to(folder).as_posix().encode()
        if is_shared(below):
            found[below] = None if path.is_dir() else path.read_bytes()
    return found


class NaiveFolder:
    """A folder in memory, changed by operations. Second names share the content, as on a disk."""

    def __init__(self) -> None:
        self._files: dict[bytes, bytearray | None] = {}

    @property
    def tree(self) -> Tree:
        return {path: None if data is None else bytes(data) for path, data in self._files.items()}

    def apply(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            self._apply(operation)

    def _apply(self, operation: Operation) -> None:
        files, path, position = self._files, operation.path, operation.position
        match operation.kind:
            case Kind.CREATE:
                files[path] = bytearray()
            case Kind.CREATE_FOLDER:
                files[path] = None
            case Kind.WRITE:
                content = self._content(path)
                content.extend(bytes(max(0, position - len(content))))
                content[position : position + len(operation.data)] = operation.data
            case Kind.TRUNCATE:
                content = self._content(path)
                del content[position:]
                content.extend(bytes(position - len(content)))
            case Kind.ALLOCATE:
                content = self._content(path)
                content.extend(bytes(max(0, position - len(content))))
            case Kind.LINK:
                assert operation.to not in files
                files[operation.to] = files[path]
            case Kind.RENAME:
                for each in self._below(path):
                    files[operation.to + each[len(path) :]] = files.pop(each)
            case Kind.UNLINK:
                del files[path]
            case Kind.REMOVE_FOLDER:
                for each in self._below(path):
                    del files[each]

    def _content(self, path: bytes) -> bytearray:
        content = self._files[path]
        assert content is not None
        return content

    def _below(self, path: bytes) -> list[bytes]:
        return [each for each in self._files if each == path or each.startswith(path + b"/")]


def trees_of(stream: OperationStream) -> list[Tree]:
    """Return the folder after each number of operations."""
    folder = NaiveFolder()
    trees = [folder.tree]
    for operation in decode_all(b"".join(stream.after(0, 1 << 40)[1])):
        folder.apply([operation])
        trees.append(folder.tree)
    return trees


class RandomChanges:
    """Changes a data folder as a broker does: appends and cuts of logs, saved states, deletions, files set aside."""

    def __init__(
        self, files: Files, root: Path, seed: int, log_names: Sequence[str] = ("0.log", "1.log")
    ) -> None:
        self._files = files
        self._root = root
        self._log_names = log_names
        self._chance = random.Random(seed)
        self._number = 0
        self._logs: dict[Path, int] = {}  # open descriptors
        files.make_folder(root / "topics")
        files.replace(root / "broker.json", b"{}")

    def step(self) -> None:
        """Change something."""
        changes = (self._append, self._append, self._append, self._cut, self._save, self._save)
        self._chance.choice((*changes, self._delete, self._set_aside, self._rotate, self._reserve))()

    def close(self) -> None:
        for fd in self._logs.values():
            self._files.close(fd)
        self._logs.clear()

    def _bytes(self, most: int = 300) -> bytes:
        self._number += 1
        return f"{self._number:06d}".encode() * self._chance.randint(1, most // 6)

    def _topic(self) -> Path:
        folder = self._root / "topics" / f"{self._chance.choice('abc')}.topic"
        self._files.make_folder(folder)
        return folder

    def _log(self) -> tuple[Path, int]:
        folder = self._topic()
        path = folder / self._log_names[self._chance.randint(0, 1)]
        if path not in self._logs:
            self._logs[path] = (self._files.open if path.exists() else self._files.create)(path)
        return path, self._logs[path]

    def _append(self) -> None:
        _, fd = self._log()
        self._files.write(fd, self._files.size(fd), [self._bytes(), b"", self._bytes()])

    def _cut(self) -> None:
        _, fd = self._log()
        self._files.truncate(fd, self._chance.randint(0, self._files.size(fd)))

    def _save(self) -> None:
        folder = self._topic()
        path, previous = folder / "state.json", folder / "state.json.previous"
        linked = previous.with_name(previous.name + ".tmp")
        is_kept = path.exists() and self._chance.random() < 0.8
        if linked.exists():
            self._files.unlink(linked)
        if is_kept:
            self._files.link(path, linked)
        self._files.replace(path, self._bytes())
        if is_kept and self._chance.random() < 0.9:
            self._files.rename(linked, previous)

    def _delete(self) -> None:
        folder = self._topic()
        self._number += 1
        retired = folder.with_name(f"{folder.name}-deleted-{self._number}")
        if retired.exists():
            return  # from a folder that this one is a copy of
        self._files.rename(folder, retired)
        for path in [path for path in self._logs if path.parent == folder]:
            self._files.close(self._logs.pop(path))
        if self._chance.random() < 0.9:
            self._files.remove_folder(retired)

    def _set_aside(self) -> None:
        path, fd = self._log()
        del self._logs[path]
        self._files.close(fd)
        self._files.set_aside(path, ".damaged")

    def _rotate(self) -> None:
        path, fd = self._log()
        del self._logs[path]
        self._files.close(fd)
        self._files.unlink(path)

    def _reserve(self) -> None:
        """Change what members do not share."""
        path = self._root / "spare-room"
        fd = self._files.create_or_empty(path)
        self._files.write(fd, 0, [self._bytes()])
        self._files.close(fd)
        if self._chance.random() < 0.5:
            self._files.unlink(path)
