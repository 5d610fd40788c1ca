"""Check that a name of a class has one meaning in a package."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITH_FOLDERS = (
    *("access", "broker", "client", "connectors", "filters", "fleet", "http", "log", "lookup", "protocol"),
    *("spark", "tls"),
)
"""Packages of `trio_nsq` in which a public name of a class has one meaning, in all folders of the package."""

ALLOWED = {
    "NotABroker": "two bases: an error of a request, and of a TopicReader, whose errors are RequestFailed"
}


def classes_in(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name


def named_twice(paths: Iterator[Path], *, private: bool) -> dict[str, list[str]]:
    """Return the names of classes that several of these files have, with the files."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(paths):
        for name in classes_in(path):
            if (private or not name.startswith("_")) and name not in ALLOWED:
                found[name].append(path.relative_to(ROOT).as_posix())
    return {name: files for name, files in found.items() if len(files) > 1}


def test_no_folder_has_two_classes_of_one_name() -> None:
    folders = {path.parent for source in ("core", "cli") for path in (ROOT / source).rglob("*.py")}
    assert not [named for folder in folders if (named := named_twice(folder.glob("*.py"), private=True))]


@pytest.mark.parametrize("package", WITH_FOLDERS)
def test_no_package_has_two_public_classes_of_one_name(package: str) -> None:
    assert not named_twice((ROOT / "core" / "trio_nsq" / package).rglob("*.py"), private=False)
