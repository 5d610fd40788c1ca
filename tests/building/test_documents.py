"""Check links to files, and paths of the project, in the documents."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = {"how-to", "reference", "explanation", "project", "decisions", "dev"}
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
