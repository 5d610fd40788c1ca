"""Build the documentation as a site. Sphinx checks links between pages, and references."""

import re
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
    check_markdown(tmp_path / "site")
    build(
        tmp_path,
        pages=("index.md", "how-to/index.md", "reference/commands/serve.md", "reference/python-api.md"),
    )
    assert 'class="sidebar-tree"' in (tmp_path / "site/reference/commands/serve.html").read_text()


def check_markdown(site: Path) -> None:
    """Check that each page is there as Markdown, with links that work, and that `llms.txt` leads to pages."""
    pages = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    generated = {Path("genindex"), Path("search")}
    assert pages - generated == {path.relative_to(site).with_suffix("") for path in site.rglob("*.md")}
    for path in (site / "llms.txt", *site.rglob("*.md")):
        for target in re.findall(r"\]\(([^)#\s:]+\.md)[)#]", path.read_text()):
            assert (path.parent / target).is_file(), f"{path.relative_to(site)} links to {target}"
    listed = (site / "llms.txt").read_text()
    assert listed.startswith("# trio-nsq\n\n> A message broker that speaks ")
    for line in (
        "- [Tutorial](tutorial.md)",
        "- [Back up, restore, upgrade](how-to/back-up-and-upgrade.md): Copy a data folder, move it, change versions",
        "- [qcli pub](reference/commands/pub.md): Publish ",
    ):
        assert line in listed


def build(folder: Path, *options: str, pages: Sequence[str] = ()) -> None:
    """Build the site, or only some of its pages, and check that there are no warnings."""
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", *options]
    command += ["docs", "site", *(f"docs/{page}" for page in pages)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
