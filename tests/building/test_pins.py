"""Check the exact versions for developers and CI, on every Python version that the project supports."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINES = [
    line.split(" --hash=")
    for line in (ROOT / "requirements-dev.txt").read_text().replace("\\\n", "").splitlines()
    if line and not line.startswith("#")
]
PINS = [Requirement(line[0]) for line in LINES]


def test_pin_is_one_version() -> None:
    assert [str(pin) for pin in PINS if [each.operator for each in pin.specifier] != ["=="]] == []


def test_pins_have_hashes() -> None:
    """pip then refuses a file that was changed at the index."""
    assert [
        line[0] for line in LINES if not all(each.startswith("sha256:") for each in line[1:] or [""])
    ] == []


def test_every_requirement_has_a_pin_that_satisfies_it() -> None:
    pinned = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in PINS}
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["dev"], *extras["server"], *extras["spark"]]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            continue
        version = pinned.get(canonicalize_name(requirement.name), "")
        assert requirement.specifier.contains(version), f"{text}, and the pin is {version}: run make pins"


def test_ci_runs_every_supported_python() -> None:
    prefix = "Programming Language :: Python :: 3."
    claimed = [name.removeprefix(prefix) for name in PROJECT["classifiers"] if name.startswith(prefix)]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    matrix = ", ".join(f'"3.{minor}"' for minor in claimed)
    assert f"python: [{matrix}]" in workflow
    assert PROJECT["requires-python"] == f">=3.{claimed[0]}"


def test_ci_runs_the_oldest_supported_spark() -> None:
    """`make oldest-spark` has the lower bound of the extra."""
    (spark,) = (
        each for each in map(Requirement, PROJECT["optional-dependencies"]["spark"]) if each.name == "pyspark"
    )
    (least,) = (each.version for each in spark.specifier if each.operator == ">=")
    assert f"OLDEST_SPARK := {least}.0\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("target", ["test", "pytest-pure", "oldest-spark"])
@pytest.mark.parametrize("steps", [".ci/run", ".github/workflows/ci.yml"])
def test_ci_runs_all_tests(steps: str, target: str) -> None:
    assert f"make {target}\n" in (ROOT / steps).read_text()
