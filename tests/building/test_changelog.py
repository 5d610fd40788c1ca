"""Tests for the files of changes, and how they become the changelog."""

from pathlib import Path

import pytest
from tools.changelog import ChangeError, changes_in, main

ROOT = Path(__file__).parents[2]


def project(folder: Path, **changes: str) -> Path:
    (folder / "docs/changes").mkdir(parents=True)
    (folder / "docs/changes/README.md").write_text("how")
    (folder / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n### Upgrading\n\n- u\n\n### Added\n\n- a\n\n### Fixed\n\n- f\n\n"
        "## 0.1.0\n\n### Fixed\n\n- old\n"
    )
    for name, text in changes.items():
        (folder / "docs/changes" / name.replace("__", ".")).write_text(text)
    return folder


def test_files_of_the_project_are_valid() -> None:
    changes_in(ROOT / "docs/changes")


def test_changes_get_into_their_sections(tmp_path: Path) -> None:
    long = "word " * 40
    folder = project(tmp_path, b__fixed__md="Second.\n", a__fixed__md="First.", c__added__md=long)
    main(folder)
    text = (folder / "CHANGELOG.md").read_text()
    assert "### Fixed\n\n- First.\n- Second.\n- f\n\n## 0.1.0\n\n### Fixed\n\n- old\n" in text
    assert "### Upgrading\n\n- u\n\n### Added\n\n- word word" in text
    assert "\n  word" in text
    assert max(map(len, text.splitlines())) <= 132
    assert [path.name for path in (folder / "docs/changes").iterdir()] == ["README.md"]


@pytest.mark.parametrize("name", ["a.md", "a.changed.md", "a.fixed.txt", ".fixed.md", "a.b.fixed.md"])
def test_wrong_names_are_refused(tmp_path: Path, name: str) -> None:
    folder = project(tmp_path)
    (folder / "docs/changes" / name).write_text("x")
    before = (folder / "CHANGELOG.md").read_text()
    with pytest.raises(ChangeError, match=r"NAME\.KIND\.md"):
        main(folder)
    assert (folder / "CHANGELOG.md").read_text() == before


def test_an_empty_change_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ChangeError, match="is empty"):
        main(project(tmp_path, a__fixed__md=" \n"))
