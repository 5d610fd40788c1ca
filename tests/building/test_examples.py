"""Check that property tests draw the same examples each time, unless a seed is given."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DRAWS = """
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

@settings(max_examples=20)
@given(st.integers(0, 2**60))
def test_function(number):
    print("drawn", number)

class Machine(RuleBasedStateMachine):
    @rule(number=st.integers(0, 2**60))
    def draw(self, number):
        print("drawn", number)

Machine.TestCase.settings = settings(max_examples=5)
TestMachine = Machine.TestCase
"""


def drawn(folder: Path, *options: str) -> list[str]:
    """Return the examples that a run of these tests draws."""
    path = folder / "test_draws.py"
    path.write_text(DRAWS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "-q",
        "-s",
        *options,
    ]
    ran = subprocess.run(
        [*command, str(path)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    lines = [line for line in ran.stdout.splitlines() if "drawn" in line]
    assert len(lines) > 40
    return lines


@pytest.mark.slow
def test_examples_are_fixed_unless_random_ones_are_requested(tmp_path: Path) -> None:
    fixed = drawn(tmp_path)
    assert drawn(tmp_path) == fixed
    assert not (tmp_path / ".hypothesis" / "examples").exists()
    assert drawn(tmp_path, "--hypothesis-profile=random", "--hypothesis-seed=1") != fixed
