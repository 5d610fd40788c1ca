"""Check that the programs in the documents pass mypy in strict mode."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
"""Without mypy's cache it analyzes all imported packages."""


def test_documented_programs_are_typed(tmp_path: Path) -> None:
    programs = []
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks = re.findall(r"^```python\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
        for number, block in enumerate(blocks):
            # A block without imports is a part of a program.
            if "import " in block:
                path = tmp_path / f"{document.stem.lower().replace('-', '_')}_{number}.py"
                path.write_text(block)
                programs.append(path)
    assert len(programs) > 5
    # One run for all programs: no program imports another one.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *programs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
