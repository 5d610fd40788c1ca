"""Check that the tests find bugs: put one bug at a time into a copy of the project, and run the tests named for it.

`tests/mutants.toml` lists the bugs, which are called mutants. The tests of a mutant must fail. If they pass, the mutant
has survived: a test is missing. The copy is not compiled, and the checkout does not change.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, NamedTuple

LIST = Path("tests/mutants.toml")
SOURCES = ("core", "cli")
TEST_S = 120
"""A test that takes longer has failed: a bug can make it wait for ever."""
_PASSED, _FAILED = 0, 1
_SHOWN_LINES = 30


class Mutant(NamedTuple):
    """A bug to put into the sources.

    Attributes:
        bug: What is wrong then, in one sentence.
        file: The path of the source.
        text: Occurs in the file exactly once.
        replacement: Takes its place.
        tests: Files, or names of tests as pytest has them, of which at least one must fail.
        invariant: The invariant that it breaks, of those in the list; empty: none of them.
    """

    bug: str
    file: str
    text: str
    replacement: str
    tests: list[str]
    invariant: str = ""

    def applied_to(self, content: str) -> str | None:
        """Return the content of the file with the bug; None if the text does not occur exactly once."""
        return content.replace(self.text, self.replacement) if content.count(self.text) == 1 else None


def read_list(path: Path) -> tuple[Mapping[str, str], list[Mutant]]:
    """Return the invariants by name, and the mutants."""
    content: dict[str, Any] = tomllib.loads(path.read_text())
    return content["invariants"], [Mutant(**each) for each in content["mutant"]]


def copy_project(to: Path) -> None:
    """Copy the files of the project in this folder, also those that are not committed yet."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    for name in filter(None, os.fsdecode(listed).split("\0")):
        if Path(name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, to / name)


def run_tests(project: Path, tests: Iterable[str]) -> tuple[int, str]:
    """Run tests of a copy of the project up to the first failure. Returns pytest's exit code, and its output."""
    sources = os.pathsep.join(str(project / name) for name in SOURCES)  # before those of the environment
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", f"--timeout={TEST_S}"]
    command += [f"--basetemp={project.parent / 'tests'}", *tests]
    environment = {**os.environ, "PYTHONPATH": sources, "TRIO_NSQ_COMPILE": "0"}
    done = subprocess.run(
        command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, "\n".join(done.stdout.splitlines()[-_SHOWN_LINES:])


@contextmanager
def changed(path: Path, content: str) -> Iterator[None]:
    """Change a source, and restore it at the end."""
    before = path.read_text()
    try:
        _write(path, content)
        yield
    finally:
        _write(path, before)


def _write(path: Path, content: str) -> None:
    path.write_text(content)
    # Python compares size and time in seconds, and a mutant may have the same ones.
    Path(cache_from_source(path)).unlink(missing_ok=True)


def try_mutant(project: Path, mutant: Mutant) -> tuple[str, str]:
    """Return `killed`, or what happened instead, and the tests' output."""
    path = project / mutant.file
    content = mutant.applied_to(path.read_text()) if path.is_file() else None
    if content is None:
        return "text not found", ""
    with changed(path, content):
        code, output = run_tests(project, mutant.tests)
    if code == _FAILED:
        return "killed", output
    return ("SURVIVED" if code == _PASSED else "cannot run"), output


def main(arguments: list[str]) -> int:
    """Try mutants; returns 1 if one was not killed, or if the tests fail without any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="Try only mutants with this text in their bug or file.")
    parser.add_argument("--list", type=Path, default=LIST, help="Read the mutants from this file.")
    parser.add_argument("--verbose", action="store_true", help="Show the end of the tests' output.")
    options = parser.parse_args(arguments)
    mutants = [each for each in read_list(options.list)[1] if options.only in f"{each.bug}\n{each.file}"]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        project = Path(folder) / "project"
        copy_project(project)
        code, output = run_tests(project, dict.fromkeys(test for each in mutants for test in each.tests))
        if code != _PASSED:
            print(f"{output}\n\nThe tests fail without a mutant.")
            return 1
        print("The tests pass without a mutant.", flush=True)
        failures = 0
        for mutant in mutants:
            began_s = time.monotonic()
            result, output = try_mutant(project, mutant)
            failures += result != "killed"
            print(f"{result:14} {time.monotonic() - began_s:4.0f} s  {mutant.file}: {mutant.bug}", flush=True)
            if options.verbose:
                print(output, flush=True)
    print(f"{len(mutants) - failures} of {len(mutants)} mutants were killed.")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
