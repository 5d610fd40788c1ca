"""Build the documentation as a site. Sphinx checks links between pages, references and docstrings."""

import shutil
import subprocess
import sys
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
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "docs", "site"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "qcli serve" in (tmp_path / "site/reference/commands/serve.html").read_text()
    assert (tmp_path / "site/searchindex.js").stat().st_size > 100_000
