"""Check that five journeys take the routes through the project that ARCHITECTURE.md describes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

import qcli
import trio_nsq
from broker.support import PATIENCE_S
from soak import in_soak

DOCUMENT = Path(__file__).parents[2] / "ARCHITECTURE.md"
SYNCS = range(9, 16)
"""The steps of a PUB that do not happen with `--sync=interval`."""
TITLES = {
    "HTTP /pub": "Life of a POST /pub",
    "to-parquet": "From a message to Parquet",
    "console": "A page of the console",
}
"""The sections of the journeys whose steps are the same with all options."""


def steps(title: str) -> list[tuple[str, str]]:
    """Return the file and the function of each step of a route."""
    section = DOCUMENT.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", section, re.MULTILINE)


def most_modules() -> dict[str, int]:
    """Return the number of modules that each journey executes at most, as the document says."""
    section = DOCUMENT.read_text().partition("## Five journeys\n")[2].partition("\n## ")[0]
    return {
        name: int(number)
        for name, number in re.findall(r"^\| (.+) \| \S+ \| (\d+) \|$", section, re.MULTILINE)
    }


def files_and_returns(route: list[tuple[str, str]]) -> tuple[int, int]:
    """Return the number of files that a route enters, and how often it returns to an earlier one."""
    files = [file for file, _ in route]
    entered = [file for before, file in zip([None, *files], files, strict=False) if file != before]
    return len(set(entered)), len(entered) - len(set(entered))


def assert_taken(route: list[tuple[str, str]], calls: list[list[str]]) -> None:
    at = iter(map(tuple, calls))
    for step in route:
        assert step in at, f"{step} is not called, or not behind the steps before it"


def assert_few_modules(calls: dict[str, list[list[str]]]) -> None:
    most = most_modules()
    executed = {name: len({file for file, _ in route}) for name, route in calls.items()}
    assert {name: number for name, number in executed.items() if number > most[name]} == {}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library as Python: calls between compiled functions cannot be seen."""
    folder = tmp_path_factory.mktemp("sources")
    package = Path(trio_nsq.__file__).parent
    copytree(package, folder / package.name, ignore=ignore_patterns("*.so", "__pycache__"))
    return folder


def traced(sources: Path, sync: str, *names: str) -> dict[str, list[list[str]]]:
    """Return the calls of journeys, made in a new process: calls in threads are only recorded in new threads."""
    process = subprocess.run(
        [sys.executable, "-m", "routes", *names, "--sync", sync, "--json"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(sources), str(Path(qcli.__file__).parents[1])])},
        stdout=subprocess.PIPE,
        check=True,
        timeout=2 * PATIENCE_S,
    )
    calls: dict[str, list[list[str]]] = json.loads(process.stdout)
    return calls


@pytest.mark.parametrize(("sync", "limit"), [("always", (11, 10)), *in_soak(("interval", (9, 6)))])
def test_pub_and_fin(sync: str, limit: tuple[int, int], sources: Path) -> None:
    route = [
        step
        for number, step in enumerate(steps("Life of a PUB"), start=1)
        if sync == "always" or number not in SYNCS
    ]
    fin = steps("Life of a FIN")
    assert files_and_returns(route) == limit
    assert files_and_returns(fin) == (5, 1)
    calls = traced(sources, sync, "PUB", "FIN")
    assert_taken(route, calls["PUB"])
    assert_taken(fin, calls["FIN"])
    assert_few_modules(calls)


def test_http_exports_and_console(sources: Path) -> None:
    calls = traced(sources, "always", *TITLES)
    for name, title in TITLES.items():
        route = steps(title)
        assert route
        assert_taken(route, calls[name])
    assert_few_modules(calls)
