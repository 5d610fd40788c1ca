"""Check the run of tests in which what failed runs once more, alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "tools" / "failed_again.py"
UNSTABLE = """
from pathlib import Path

def test_unstable():
    seen = Path("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("beside others")
"""
BROKEN = """
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_broken(number):
    assert number < 0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_whole.py").write_text("def test_whole():\n    pass\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit code of a run of these tests, and what it prints."""
    command = [sys.executable, str(PROGRAM), *arguments]
    plugins = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "xdist.plugin",
    }  # the others start slowly
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=60, env=os.environ | plugins
    )
    return done.returncode, done.stdout


def test_whole_tests_run_once(folder: Path) -> None:
    code, printed = run(folder)
    assert code == 0
    assert "Once more" not in printed


@pytest.mark.parametrize("arguments", [[], ["--numprocesses=2"]])
def test_unstable_test_is_named(folder: Path, arguments: list[str]) -> None:
    (folder / "test_unstable.py").write_text(UNSTABLE)
    code, printed = run(folder, *arguments)
    assert code == 0
    assert printed.endswith("Mend them:\n  test_unstable.py::test_unstable\n")
    assert "beside others" in printed  # its failure can be read


def test_broken_test_fails_the_run(folder: Path) -> None:
    (folder / "test_unstable.py").write_text(UNSTABLE)
    (folder / "test_broken.py").write_text(BROKEN.format(count=1))
    code, printed = run(folder)
    assert code == 1
    assert "Once more, alone: 2" in printed


def test_many_failures_do_not_run_again(folder: Path) -> None:
    (folder / "test_broken.py").write_text(BROKEN.format(count=6))
    code, printed = run(folder)
    assert code == 1
    assert "Once more" not in printed


def test_module_that_cannot_be_imported_fails_the_run(folder: Path) -> None:
    (folder / "test_unimportable.py").write_text("import no_such_module\n")
    code, printed = run(folder)
    assert code == 2
    assert "Once more" not in printed


def test_failures_of_an_earlier_run_do_not_count(folder: Path) -> None:
    (folder / "test_broken.py").write_text(BROKEN.format(count=1))
    assert run(folder)[0] == 1
    (folder / "test_unstable.py").write_text(UNSTABLE)
    assert run(folder, "test_unstable.py")[0] == 0


def test_selection_without_tests_is_no_success(folder: Path) -> None:
    assert run(folder, "-k", "nothing")[0] == 5
