"""The programs in the documents pass mypy in strict mode, as a user's own programs may have to."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
"""Without mypy's cache it reads all that the programs import."""


def test_documented_programs_are_typed(tmp_path: Path) -> None:
    programs = []
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks = re.findall(r"^```python\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
        for number, block in enumerate(blocks):
            # One without imports is a part of a program.
            if "import " in block:
                path = tmp_path / f"{document.stem.lower().replace('-', '_')}_{number}.py"
                path.write_text(block)
                programs.append(path)
    assert len(programs) > 5
    # One run for all. Each is a module of its own, as none imports another.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *programs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
