"""Writes `completions/`, `man/` and `docs/reference/json/` from the commands: `python -m qcli.generate [--check]`.

The text is laid out without click, so the files do not depend on the width of the terminal, the environment or the
version of click. A test checks that the files match the commands.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from .json_schemas import FOLDER as SCHEMAS
from .json_schemas import json_schemas
from .manpages import man_pages
from .scripts import completion_scripts

FOLDERS = ("completions", "man", SCHEMAS)


@cache
def generated_files() -> Mapping[str, str]:
    """The text of every generated file, by its path within the repository."""
    scripts = {f"completions/{name}": text for name, text in completion_scripts().items()}
    pages = {f"man/{name}": text for name, text in man_pages().items()}
    schemas = {f"{SCHEMAS}/{name}": text for name, text in json_schemas().items()}
    return scripts | pages | schemas


def stale_files(root: Path) -> list[str]:
    """The paths of files in the repository that are missing, differ, or should not be there."""
    wanted = generated_files()
    found = {str(path.relative_to(root)) for folder in FOLDERS for path in (root / folder).iterdir()}
    differing = {
        name
        for name, text in wanted.items()
        if name not in found or (root / name).read_bytes() != text.encode()
    }
    return sorted(differing | (found - wanted.keys()))


def write_files(root: Path) -> None:
    """Write missing and outdated files, and remove files without a command."""
    wanted = generated_files()
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in stale_files(root):
        if name in wanted:
            (root / name).write_bytes(wanted[name].encode())
        else:
            (root / name).unlink()
