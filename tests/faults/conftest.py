"""Fixtures that several fault tests share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory, if this machine has such a folder: thousands of files are written there, and none has to last."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)
