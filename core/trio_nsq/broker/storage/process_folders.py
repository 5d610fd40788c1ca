"""The data folders of the processes of a node."""

from pathlib import Path
from typing import Final

from ...protocol.errors import StartupError

FOLDER: Final = "process-"
"""The data folder of a process is this and its number, in the folder of the node."""


def folder_of(data_path: Path, index: int) -> Path:
    """Return the data folder of a process."""
    return data_path / f"{FOLDER}{index}"


def unusable(path: Path, error: OSError) -> StartupError:
    """Return the error for a data folder that this process may not use, whatever file it looked for."""
    return StartupError(f"--data-path: cannot use {path}: {error.strerror}")


def folders_in(data_path: Path) -> list[int]:
    """Return the numbers of the processes that have a folder in that of the node, sorted. Raises StartupError."""
    try:
        if not data_path.is_dir():
            return []
        numbers = [number_of(each.name) for each in data_path.iterdir()]
    except OSError as exc:
        raise unusable(data_path, exc) from exc
    return sorted(number for number in numbers if number is not None)


def number_of(name: str) -> int | None:
    """Return the number of a process from the name of its folder; None: it is another name."""
    digits = name.removeprefix(FOLDER)
    return int(digits) if digits != name and digits.isascii() and digits.isdigit() else None
