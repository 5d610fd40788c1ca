"""Check the list of mutants, so that it stays true while the sources change, and the tool that tries them."""

import ast
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from tools.mutants import LIST, SOURCES, Mutant, read_list

ROOT = Path(__file__).parents[2]
INVARIANTS, MUTANTS = read_list(ROOT / LIST)
LEAST = 40
SOURCE = "def double(number):\n    return 2 * number\n"
TEST = "from pack.numbers import double\n\ndef test_double():\n    assert double({number}) == {doubled}\n"


@cache
def names_in(path: Path) -> set[str]:
    """Return the names of the tests in a file: functions, classes, and state machines."""
    body = ast.parse(path.read_text()).body
    names = {
        each.name for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    return names | {each.targets[0].id for each in body if isinstance(each, ast.Assign)
                    and isinstance(each.targets[0], ast.Name)}  # fmt: skip


def test_every_invariant_has_a_mutant() -> None:
    assert len(MUTANTS) >= LEAST
    assert {mutant.invariant for mutant in MUTANTS} - {""} == INVARIANTS.keys()
    assert max(Counter(mutant.bug for mutant in MUTANTS).values()) == 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_applies_and_its_tests_exist(mutant: Mutant) -> None:
    assert mutant.file.startswith(tuple(f"{source}/" for source in SOURCES))
    content = (ROOT / mutant.file).read_text()
    changed = mutant.applied_to(content)
    assert changed is not None, "its text does not occur exactly once: change the list with the source"
    assert changed != content
    compile(changed, mutant.file, "exec")
    assert mutant.tests
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), path
        assert not name or name.partition("::")[0] in names_in(ROOT / path), test


def tried(folder: Path, number: int, *mutants: tuple[str, str]) -> tuple[int, list[str]]:
    """Try mutants of a small project. Returns the exit code, and what happened to each."""
    (folder / "core" / "pack").mkdir(parents=True)
    (folder / "core" / "pack" / "numbers.py").write_text(SOURCE)
    (folder / "test_double.py").write_text(TEST.format(number=number, doubled=4))
    entries = ["[invariants]"]
    for text, replacement in mutants:
        entries += [
            "[[mutant]]",
            'bug = "a bug"',
            'file = "core/pack/numbers.py"',
            'tests = ["test_double.py"]',
        ]
        entries += [f'text = "{text}"', f'replacement = "{replacement}"']
    (folder / "list.toml").write_text("\n".join(entries))
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    command = [sys.executable, str(ROOT / "tools" / "mutants.py"), "--list", "list.toml"]
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout",
    }
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment)
    assert (folder / "core" / "pack" / "numbers.py").read_text() == SOURCE, "only the copy changes"
    return done.returncode, [line[:14].strip() for line in done.stdout.splitlines() if "a bug" in line]


def test_killed_mutants_are_told(tmp_path: Path) -> None:
    assert tried(tmp_path, 2, ("2 * number", "3 * number"), ("2 * number", "number")) == (
        0,
        ["killed", "killed"],
    )


def test_survivors_and_stale_entries_fail(tmp_path: Path) -> None:
    mutants = ("2 * number", "number + 2"), ("4 * number", "number"), ("2 * number", "1 * number")
    assert tried(tmp_path, 2, *mutants) == (1, ["SURVIVED", "text not found", "killed"])


def test_tests_that_fail_without_a_mutant_end_the_run(tmp_path: Path) -> None:
    assert tried(tmp_path, 3, ("2 * number", "number")) == (1, [])
