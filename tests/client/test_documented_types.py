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


def programs_of(document: Path) -> dict[str, str]:
    """Return the programs of a page by name: its blocks, and the modules that its shell blocks write.

    The names of modules, and imports of them, begin with that of the page: several pages have a `shop.py`.
    """
    text = document.read_text()
    page = document.stem.lower().replace("-", "_")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    modules = dict(re.findall(r"^cat > (\w+)\.py <<'END'\n(.*?)^END$", text, re.DOTALL | re.MULTILINE))
    # A block without imports is a part of a program.
    programs = {str(number): block for number, block in enumerate(blocks) if "import " in block}
    programs |= {
        name: module for name, module in modules.items() if "trio_nsq" in module and "test" not in name
    }
    return {
        f"{page}_{name}": re.sub(
            rf"^from ({'|'.join(modules)}) import", rf"from {page}_\1 import", each, flags=re.M
        )
        if modules
        else each
        for name, each in programs.items()
    }


def test_documented_programs_are_typed(tmp_path: Path) -> None:
    programs = []
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for name, program in programs_of(document).items():
            programs.append(tmp_path / f"{name}.py")
            programs[-1].write_text(program)
    assert len(programs) > 5
    # One run for all of them, with the options of `make types`: it uses the cache that this leaves.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *programs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    # Celery's decorators have no types.
    wrong = [line for line in done.stdout.splitlines() if "Untyped decorator makes function" not in line]
    assert (wrong, done.stderr) == ([], "")
    assert done.returncode in (0, 1)
