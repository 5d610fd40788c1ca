"""Small file systems for data folders: they can be full, and hang. Only root can mount them."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_BLOCK = 1 << 20


class Disk:
    """A mounted file system.

    Attributes:
        path: Where it is mounted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def freeze(self) -> None:
        """Let all writes wait, until `thaw`."""
        _run("fsfreeze", "--freeze", self.path)

    def thaw(self) -> None:
        _run("fsfreeze", "--unfreeze", self.path)

    def fill(self) -> None:
        """Leave no free block, until `make_room`."""
        with open(self._ballast, "ab") as file:
            for size in (_BLOCK, 4096):
                with suppress(OSError):
                    while True:
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)

    def make_room(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextmanager
def disks(folder: Path, count: int, size_bytes: int) -> Iterator[list[Disk]]:
    """Mount so many file systems below a folder, until the end of the block; skips the test if this cannot be done."""
    mounted: list[Disk] = []
    try:
        for number in range(count):
            image, path = folder / f"disk{number}.img", folder / f"disk{number}"
            with open(image, "wb") as file:
                file.truncate(size_bytes)
            path.mkdir()
            try:
                _run("mkfs.ext4", "-q", "-m", "0", image)
                _run("mount", "-o", "loop", image, path)
            except (OSError, subprocess.CalledProcessError) as exc:
                pytest.skip(f"file systems cannot be mounted here: {exc}")
            mounted.append(Disk(path))
        yield mounted
    finally:
        for disk in mounted:
            with suppress(subprocess.CalledProcessError):
                disk.thaw()
            _run("umount", disk.path)


def _run(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, timeout=120)
