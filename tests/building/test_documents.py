"""Check links to files, and paths and names of the project, in the documents."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = {"how-to", "cookbook", "reference", "explanation", "project", "decisions", "dev"}
"""The folders of `docs`."""
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for folder in (
        ROOT,
        ROOT / ".github",
        *(folder for folder in (ROOT / "docs").rglob("*") if folder.name in KINDS),
        ROOT / "docs",
        ROOT / "bench",
        ROOT / "tests",
    )
    for path in [*folder.glob("*.md"), *folder.glob("*/README.md")]
    if ".build" not in path.parts
)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
MADE = "docs/reference/commands"
"""Not in the repository: `make docs` writes it."""
_PATH = re.compile(r"`((?:core|cli|tests|bench|docs|examples|\.github)/[\w./-]+)`")

_SHORT_PATH = re.compile(r"`([\w./-]*\w\.py)`")
"""A file, perhaps without the folders that the text is about."""
_NAME = re.compile(r"`([A-Z]+[a-z]\w*)(?:\.(\w+))?`")
"""A class or an alias of a type, perhaps with an attribute."""
FOREIGN = {"Final", "LoopExit"}
OF_CODE = [
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs/dev/patterns.md",
    *sorted((ROOT / "docs/decisions").glob("[0-9]*.md")),
]
"""Documents that name modules and classes."""


def targets(document: Path) -> list[str]:
    """Return the targets of a document's links and paths, from the project's root."""
    text = (ROOT / document).read_text()
    links = [link for link in _LINK.findall(text) if "://" not in link and not link.startswith("mailto:")]
    return [*(os.path.normpath(document.parent / link) for link in links), *_PATH.findall(text)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_and_paths_exist(document: Path) -> None:
    assert [
        target for target in targets(document) if not target.startswith(MADE) and not (ROOT / target).exists()
    ] == []


def test_each_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    records = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert re.findall(r"\((\d{4}-[\w-]+\.md)\)", (folder / "README.md").read_text()) == records


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The contents of the project's Python files, by path."""
    folders = ("core", "cli", "tests", "bench", "tools", "docs", "examples")
    files = [
        *ROOT.glob("*.py"),
        *(file for folder in folders for file in (ROOT / folder).rglob("*.py") if ".build" not in file.parts),
    ]
    return {f"/{file.relative_to(ROOT)}": file.read_text() for file in files}


@pytest.mark.parametrize("document", OF_CODE, ids=lambda path: path.name)
def test_modules_and_classes_exist(document: Path, sources: dict[str, str]) -> None:
    text = document.read_text()
    if "\nStatus: replaced" in text:  # it says what was
        return
    missing = [
        short
        for short in _SHORT_PATH.findall(text)
        if short.strip("/") != "NAME.py" and not any(path.endswith(f"/{short}") for path in sources)
    ]
    for name, attribute in set(_NAME.findall(text)):
        defines = re.compile(rf"^(?:class {name}\b|{name}(?:: TypeAlias)? = )", re.MULTILINE)
        has = re.compile(rf"\b{attribute}\b")
        if name not in FOREIGN and not any(
            defines.search(source) and has.search(source) for source in sources.values()
        ):
            missing.append(f"{name}.{attribute}" if attribute else name)
    assert missing == []


def test_a_replaced_decision_names_its_successor() -> None:
    folder = ROOT / "docs" / "decisions"
    for record in folder.glob("[0-9]*.md"):
        status = record.read_text().split("\n")[2]
        assert status.startswith("Status: "), record.name
        if successor := re.search(r"replaced by \[\d{4}\]\(([\w-]+\.md)\)", status):
            assert f"replaces [{record.name[:4]}]({record.name})" in (folder / successor[1]).read_text()
        else:
            assert status.startswith("Status: accepted"), f"{record.name}: {status}"
