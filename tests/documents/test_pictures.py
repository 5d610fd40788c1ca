"""Check that `make pictures` draws the charts of the documentation from the newest results."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CHARTS = ("growth.svg", "kills.svg", "peers.svg", "ratios.svg")


def test_charts_are_current(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "docs/make_pictures.py"), "--charts", "--folder", str(tmp_path)]
    subprocess.run(command, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(CHARTS)
    for name in CHARTS:
        shown = (ROOT / "docs/pictures" / name).read_text()
        assert (tmp_path / name).read_text() == shown, f"{name}: run 'make pictures'"
