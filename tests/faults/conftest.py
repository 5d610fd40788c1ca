"""Shared fixtures of the fault tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """Use a folder in memory if the machine has one: the tests write thousands of files that need not be durable."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)
