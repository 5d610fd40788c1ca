"""Move the files of docs/changes into the section *Unreleased* of CHANGELOG.md: `make changelog`."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap

KINDS = {"upgrading": "### Upgrading", "added": "### Added", "fixed": "### Fixed"}
"""The headings of the sections, in the order of the changelog."""
WIDTH = 132


class ChangeError(Exception):
    """A file of a change cannot be used; the text has the reason."""


def changes_in(folder: Path) -> dict[str, list[Path]]:
    """Return the files of changes by kind, in the order of their names. Raises ChangeError."""
    found: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for path in sorted(folder.glob("*")):
        if path.name == "README.md":
            continue
        parts = path.name.split(".")
        if len(parts) != 3 or not parts[0] or parts[1] not in KINDS or parts[2] != "md":
            raise ChangeError(f"{path}: the name is not NAME.KIND.md with a KIND of {', '.join(KINDS)}")
        if not path.read_text().strip():
            raise ChangeError(f"{path} is empty")
        found[parts[1]].append(path)
    return found


def with_changes(changelog: str, changes: Mapping[str, Sequence[str]]) -> str:
    """Return the changelog with texts, by kind, in their sections of *Unreleased*. Raises ChangeError."""
    before, unreleased, rest = changelog.partition("## Unreleased\n")
    if not unreleased:
        raise ChangeError("CHANGELOG.md has no section Unreleased")
    section, following, older = rest.partition("\n## ")
    for kind, texts in changes.items():
        if not texts:
            continue
        heading = f"{KINDS[kind]}\n\n"
        if heading not in section:
            raise ChangeError(f"CHANGELOG.md has no '{KINDS[kind]}' below Unreleased")
        entries = "".join(_entry(text) for text in texts)
        section = section.replace(heading, heading + entries, 1)
    return before + unreleased + section + following + older


def changelog_with_changes(changelog: Path, folder: Path) -> str:
    """Return the text of a changelog with the files of changes in *Unreleased*. Raises ChangeError."""
    texts = {kind: [path.read_text() for path in paths] for kind, paths in changes_in(folder).items()}
    return with_changes(changelog.read_text(), texts)


def section(changelog: str, version: str) -> str | None:
    """Return the text below the heading of a version, such as `## 1.2.3, 2026-01-31`; None if there is none."""
    found = re.search(
        rf"^## {re.escape(version)}(?:[ ,].*)?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    return f"{found[1].strip()}\n" if found else None


def _entry(text: str) -> str:
    lines = wrap(" ".join(text.split()), WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return "- " + "\n  ".join(lines) + "\n"


def main(root: Path) -> None:
    """Move the changes. Raises ChangeError."""
    changelog = root / "CHANGELOG.md"
    folder = root / "docs/changes"
    found = changes_in(folder)
    changelog.write_text(changelog_with_changes(changelog, folder))
    for path in (path for paths in found.values() for path in paths):
        path.unlink()


if __name__ == "__main__":
    try:
        main(Path(__file__).parents[1])
    except ChangeError as exc:
        sys.exit(str(exc))
