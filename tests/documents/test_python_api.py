"""The reference of the Python API has all public names, as their sources describe them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trio_nsq
import trio_nsq.sync
import trio_nsq.testing

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/python-api.md"


def test_page_is_up_to_date(tmp_path: Path) -> None:
    """If not: python docs/_ext/python_api.py."""
    shutil.copytree(ROOT / "docs/_ext", tmp_path / "docs/_ext")
    (tmp_path / "docs/reference").mkdir()
    (tmp_path / "core").symlink_to(ROOT / "core")
    subprocess.run([sys.executable, tmp_path / "docs/_ext/python_api.py"], check=True)
    assert (tmp_path / "docs/reference/python-api.md").read_text() == PAGE.read_text()


@pytest.mark.parametrize(
    ("module", "prefix"), [(trio_nsq, ""), (trio_nsq.sync, "sync."), (trio_nsq.testing, "testing.")]
)
def test_page_has_all_public_names(module: object, prefix: str) -> None:
    names = vars(module)["__all__"]
    headings = {line.lstrip("# ") for line in PAGE.read_text().splitlines() if line.startswith("###")}
    assert {f"{prefix}{name}" for name in names} - headings <= {"sync", "__version__"}
