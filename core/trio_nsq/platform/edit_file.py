"""Changes a text file that users also edit by hand: with a lock, and atomically."""

import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_MODE = 0o600


def read_text(path: Path, max_bytes: int) -> str:
    """Return the text of a file. Raises ValueError if it is longer, or not UTF-8; OSError."""
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"longer than {max_bytes} bytes")
    return data.decode()


def edit_file(
    path: Path,
    change: Callable[[str], str],
    max_bytes: int,
    *,
    is_private: bool = False,
    replace: Callable[[Path, Path], None] = os.replace,
) -> bool:
    """Change a file atomically: after a crash, it has the old or the new contents.

    Writers wait for each other. Mode and owner stay, as far as the user may set them.

    Args:
        path: The file. A missing one is created, with mode 0600. A symbolic link stays.
        change: Returns the new text for the old one, which is empty for a new file. If it raises an error, the file
            stays as it was.
        max_bytes: The maximum length of the old text.
        is_private: Whether the file gets mode 0600 also if it had another mode.
        replace: Renames a file over another one; tests may fail here.

    Returns:
        Whether the file was created.

    Raises:
        ValueError: The text is too long, or not UTF-8.
        OSError: The file cannot be read or written.
    """
    path = path.resolve()
    fd, created = _lock(path)
    try:
        changed = change(read_text(path, max_bytes))
        old = os.fstat(fd)
        mode = _MODE if is_private else stat.S_IMODE(old.st_mode)
        _write(path, changed.encode(), old, mode, replace)
    except BaseException:
        if created:
            path.unlink()
        raise
    finally:
        os.close(fd)  # releases the lock
    return created


def _lock(path: Path) -> tuple[int, bool]:
    """Open and lock a file. Returns its descriptor, and whether it was created."""
    created = False
    while True:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE))
                created = True
            continue
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Meanwhile another writer may have replaced the file: then this is the lock of the old one.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd, created
        os.close(fd)


def _write(
    path: Path, data: bytes, old: os.stat_result, mode: int, replace: Callable[[Path, Path], None]
) -> None:
    temporary = path.with_name(f".{path.name}.new")  # the lock allows only one writer
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            _take_over(fd, old, mode)
            file.flush()
            os.fsync(fd)
        replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _take_over(fd: int, old: os.stat_result, mode: int) -> None:
    """Give a new file the owner and group of the old one, and this mode."""
    try:
        os.fchown(fd, -1, old.st_gid)
    except PermissionError:
        mode &= ~stat.S_IRWXG  # not for another group
    with suppress(PermissionError):  # only root may give files away
        os.fchown(fd, old.st_uid, -1)
    os.fchmod(fd, mode)
