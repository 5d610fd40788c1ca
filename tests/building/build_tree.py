"""Copies of what is built, in which few modules are compiled."""

import re
from collections.abc import Sequence
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

PROJECT = Path(__file__).parents[2]
_FILES = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE")
_FOLDERS = ("core", "cli", "man", "completions")


def copy_project(tree: Path, modules: Sequence[str], *others: str) -> None:
    """Copy to a new folder what a build needs. Only `modules` are compiled there: all take minutes.

    The types that the package itself names are removed, too. They make mypy read 967 modules instead of 60.

    Args:
        others: Further files and folders of the project.
    """
    tree.mkdir()
    for name in (*_FILES, *_FOLDERS, *others):
        if (PROJECT / name).is_dir():
            copytree(
                PROJECT / name, tree / name, ignore=ignore_patterns("*.so", "__pycache__", ".mypy_cache")
            )
        else:
            copy(PROJECT / name, tree)
    _replace(tree / "hatch_build.py", r"\nMODULES = \((?:\n    .*)+\n\)\n", f"\nMODULES = {tuple(modules)}\n")
    _replace(tree / "core" / "trio_nsq" / "__init__.py", r"\nif TYPE_CHECKING:(?:\n    .*)+\n", "\n")


def _replace(path: Path, pattern: str, text: str) -> None:
    """Replace the one part of a file that has this pattern."""
    whole, replaced = re.subn(pattern, text, path.read_text())
    assert replaced == 1, path
    path.write_text(whole)
