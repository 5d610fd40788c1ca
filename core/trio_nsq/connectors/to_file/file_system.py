"""File operations of outputs: files and folders with the permissions of nsq_to_file, as the umask permits."""

import errno
import os
from pathlib import Path

from ...log import Files

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""Errors of `link` on file systems without hard links, such as FAT and some network file systems."""
_PIECE_BYTES = 1024 * 1024


class OutputFiles(Files):
    """The real file system; see `Files`."""

    def create(self, path: Path) -> int:
        """Create a file for reading and writing; it must not exist."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def create_folder(self, path: Path) -> None:
        """Create a folder; it must not exist."""
        path.mkdir(0o770)


def make_folders(files: Files, path: Path) -> None:
    """Create a folder and its parents durably, unless they exist."""
    if not path.is_dir():
        make_folders(files, path.parent)
        files.make_folder(path)


def copy_end(files: Files, fd: int, start: int, to: Path) -> None:
    """Write the bytes of a file after `start` to another one, durably. Raises OSError; then there is no other file."""
    copy = files.create(to)
    try:
        for offset in range(start, files.size(fd), _PIECE_BYTES):
            size = min(_PIECE_BYTES, files.size(fd) - offset)
            files.write(copy, offset - start, [files.read_fully(fd, size, offset)])
        files.sync(copy)
        files.sync_folder(to.parent)
    except OSError:
        files.unlink(to)
        raise
    finally:
        files.close(copy)


def is_same_file(path: Path, other: Path) -> bool:
    """Return whether both names exist and belong to the same file."""
    try:
        return path.samefile(other)
    except FileNotFoundError:
        return False


def move(files: Files, path: Path, to: Path) -> None:
    """Rename a file durably, and never replace another one. Repeat it after a crash or an error to complete it.

    There is no moment at which the file has no name on stable storage.

    Raises:
        FileExistsError: Another file has the new name.
        OSError: The file cannot be renamed.
    """
    try:
        files.link(path, to)
    except FileExistsError:
        if not is_same_file(path, to):
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        files.close(files.create(to))  # reserves the name
        try:
            files.rename(path, to)
        except OSError:
            files.unlink(to)
            raise
        files.sync_folder(to.parent)
        return
    files.sync_folder(to.parent)
    files.unlink(path)
    files.sync_folder(path.parent)
