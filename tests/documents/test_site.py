"""Build the documentation as a site. Sphinx checks links between pages, and references."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    # A copy, because the build writes the pages of commands into the folder of the other pages.
    for name in ("docs", "bench"):
        ignored = shutil.ignore_patterns("_build", "results")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for page in ROOT.glob("*.md"):
        shutil.copy(page, tmp_path / page.name)
    # The theme draws the tree of all pages on each page, which takes half of the build's time: a few pages show that it
    # works, after a build of all with a theme that comes with Sphinx.
    build(tmp_path, "--define", "html_theme=basic")
    assert "qcli serve" in (tmp_path / "site/reference/commands/serve.html").read_text()
    assert (tmp_path / "site/searchindex.js").stat().st_size > 100_000
    build(
        tmp_path,
        pages=("index.md", "how-to/index.md", "reference/commands/serve.md", "reference/python-api.md"),
    )
    assert 'class="sidebar-tree"' in (tmp_path / "site/reference/commands/serve.html").read_text()


def build(folder: Path, *options: str, pages: Sequence[str] = ()) -> None:
    """Build the site, or only some of its pages, and check that there are no warnings."""
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", *options]
    command += ["docs", "site", *(f"docs/{page}" for page in pages)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
