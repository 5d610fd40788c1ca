"""File operations of a data folder as bytes, for the link between members and for the journal.

     0      4     8        16         24     28   29         31       33
    +------+-----+--------+----------+------+----+----------+--------+------+------+------+
    | size | crc | number | position | kind | 0  | path_len | to_len | path | to   | data |
    +------+-----+--------+----------+------+----+----------+--------+------+------+------+

All integers are big-endian. `size` counts the bytes after the crc, which covers them. Numbers ascend by one. Paths are
relative to the data folder, with slashes, in the bytes of the file system.
"""

import os
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from ..platform.checksum import crc32
from ..protocol.errors import NSQError

_HEAD = Struct(">II")
_CHECKED = Struct(">QQBxHH")
HEADER_BYTES = _HEAD.size + _CHECKED.size
MOST_DATA_BYTES = 16 * 1024 * 1024
"""Maximum data of one operation; longer writes are several."""
_MOST_PATH_BYTES = 4096
_MOST_NAME_BYTES = 255
MOST_OPERATION_BYTES = HEADER_BYTES + 2 * _MOST_PATH_BYTES + MOST_DATA_BYTES

OWN_FILES = frozenset(
    (
        b"cluster.json",
        b"cluster-state.json",
        b"restore-incomplete",
        b"spare-room",
        b"spare-room.probe",
        b"lost+found",
    )
)
"""Files in the data folder that each member has for itself, besides those with a prefix below."""
_OWN_PREFIXES = (b"write-ahead.", b"replica-", b"diverged-")


class InvalidOperation(NSQError):
    """Bytes are no operation that may be applied to a data folder."""


class Kind(IntEnum):
    """What an operation does. `position` and `to` have the meaning given here; otherwise they are 0 and empty.

    CREATE: Create an empty file, or empty the existing one.
    WRITE: Write the data at `position`.
    TRUNCATE: Give the file `position` bytes.
    ALLOCATE: Give the file at least `position` bytes; new ones are zeros.
    RENAME: Give a file or folder the name `to`, instead of the file that has it.
    LINK: Give a file the second name `to`.
    UNLINK: Remove a file.
    CREATE_FOLDER: Create a folder.
    REMOVE_FOLDER: Remove a folder and its content.
    """

    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    ALLOCATE = 4
    RENAME = 5
    LINK = 6
    UNLINK = 7
    CREATE_FOLDER = 8
    REMOVE_FOLDER = 9


_KINDS = {int(kind): kind for kind in Kind}
_WITH_TO = frozenset((Kind.RENAME, Kind.LINK))
CONTENT_KINDS = frozenset((Kind.WRITE, Kind.TRUNCATE, Kind.ALLOCATE))
"""What changes a file, and no names."""


class Operation(NamedTuple):
    """One operation.

    Attributes:
        number: Its place in the order of all operations of an epoch, from 1 on.
        position, to: See `Kind`.
        data: What is written; otherwise empty.
    """

    number: int
    kind: Kind
    path: bytes
    position: int = 0
    to: bytes = b""
    data: bytes | memoryview = b""


def relative(path: Path, root: Path) -> bytes | None:
    """Return a path below the data folder as operations have it; None if members do not share the file."""
    try:
        below = os.fsencode(path.relative_to(root).as_posix())
    except ValueError:
        return None
    return below if is_shared(below) else None


def parent_of(path: bytes) -> bytes:
    """Return the folder that a file or folder is in; empty for the data folder itself."""
    return path.rpartition(b"/")[0]


def joined(folder: bytes, name: bytes) -> bytes:
    """Return the path of what has this name in a folder; an empty folder is the data folder itself."""
    return folder + b"/" + name if folder else name


def is_at_or_below(path: bytes, folder: bytes) -> bool:
    """Whether a path is this folder, or in it."""
    return path == folder or path.startswith(folder + b"/")


def is_shared(path: bytes) -> bool:
    """Whether the file or folder of this relative path is the same on all members."""
    first = path.partition(b"/")[0].removesuffix(b".tmp")
    return first not in OWN_FILES and not first.startswith(_OWN_PREFIXES) and first != b"."


def encode(
    number: int, kind: Kind, path: bytes, position: int = 0, to: bytes = b"", data: Sequence[bytes] = ()
) -> list[bytes]:
    """Return an operation as pieces of bytes; the data's pieces are not copied."""
    checked = _CHECKED.pack(number, position, kind, len(path), len(to)) + path + to
    crc, size = crc32(checked), len(checked)
    for piece in data:
        crc = crc32(piece, crc)
        size += len(piece)
    return [_HEAD.pack(size, crc) + checked, *data]


def split(content: bytes) -> Iterator[bytes]:
    """Yield each of the operations that these bytes consist of, as bytes. They must be valid."""
    at = 0
    while at < len(content):
        end = at + _HEAD.size + int(_HEAD.unpack_from(content, at)[0])
        yield content[at:end]
        at = end


def decode_all(content: bytes | memoryview) -> list[Operation]:
    """Return the operations that these bytes consist of; their data are views of it.

    Raises:
        InvalidOperation: There is something else, or an operation that would leave the shared part of the folder.
    """
    view = memoryview(content)
    operations: list[Operation] = []
    at = 0
    while at < len(view):
        operation, at = _decode(view, at)
        operations.append(operation)
    return operations


def _decode(view: memoryview, at: int) -> tuple[Operation, int]:
    """Return the operation at an offset, and the offset of its end."""
    if len(view) - at < HEADER_BYTES:
        raise InvalidOperation("an operation is cut off")
    size, crc = _HEAD.unpack_from(view, at)
    begin = at + _HEAD.size
    end = begin + size
    if not _CHECKED.size <= size <= MOST_OPERATION_BYTES or end > len(view):
        raise InvalidOperation("an operation is cut off, or its size is wrong")
    if crc32(view[begin:end]) != crc:
        raise InvalidOperation("the checksum of an operation does not match")
    number, position, code, path_bytes, to_bytes = _CHECKED.unpack_from(view, begin)
    path_at = begin + _CHECKED.size
    to_at = path_at + path_bytes
    data_at = to_at + to_bytes
    if data_at > end:
        raise InvalidOperation("the paths of an operation are longer than the operation")
    kind = _KINDS.get(code)
    if kind is None:
        raise InvalidOperation(f"there is no operation of kind {code}")
    operation = Operation(
        number, kind, bytes(view[path_at:to_at]), position, bytes(view[to_at:data_at]), view[data_at:end]
    )
    _check(operation)
    return operation, end


def _check(operation: Operation) -> None:
    kind = operation.kind
    check_path(operation.path)
    if kind in _WITH_TO:
        check_path(operation.to)
    elif operation.to:
        raise InvalidOperation(f"an operation {kind.name} has a second path")
    if (operation.position and kind not in CONTENT_KINDS) or (operation.data and kind is not Kind.WRITE):
        raise InvalidOperation(f"an operation {kind.name} has a position or data")
    if operation.position + len(operation.data) >= 1 << 63:
        raise InvalidOperation("a position is larger than any file")


@lru_cache(maxsize=1024)  # most operations are writes to few files
def check_path(path: bytes) -> None:
    """Raise InvalidOperation unless this is the relative path of something that members share."""
    names = path.split(b"/")
    is_path = len(path) <= _MOST_PATH_BYTES and b"\0" not in path
    is_path = is_path and all(
        name not in (b"", b".", b"..") and len(name) <= _MOST_NAME_BYTES for name in names
    )
    if not is_path:
        raise InvalidOperation(f"{path[:200]!r} is no path below the data folder")
    if not is_shared(path):
        raise InvalidOperation(f"{path[:200]!r} belongs to each member alone")
