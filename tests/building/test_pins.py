"""Check the exact versions for developers and CI, on every Python version that the project supports."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEV, SERVER = "requirements-dev.txt", "requirements-server.txt"
EXTRAS = {DEV: ("dev", "server", "spark"), SERVER: ("server",)}


def lines(name: str) -> list[list[str]]:
    """Return the requirement and the hashes of each line of a file of pins."""
    return [
        line.split(" --hash=")
        for line in (ROOT / name).read_text().replace("\\\n", "").splitlines()
        if line and not line.startswith("#")
    ]


def pinned(name: str) -> dict[str, str]:
    """Return the versions of a file of pins by package."""
    pins = [Requirement(line[0]) for line in lines(name)]
    return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}


@pytest.mark.parametrize("name", EXTRAS)
def test_pin_is_one_version(name: str) -> None:
    pins = [Requirement(line[0]) for line in lines(name)]
    assert [str(pin) for pin in pins if [each.operator for each in pin.specifier] != ["=="]] == []


@pytest.mark.parametrize("name", EXTRAS)
def test_pins_have_hashes(name: str) -> None:
    """pip then refuses a file that was changed at the index."""
    assert [
        line[0] for line in lines(name) if not all(each.startswith("sha256:") for each in line[1:] or [""])
    ] == []


@pytest.mark.parametrize("name", EXTRAS)
def test_every_requirement_has_a_pin_that_satisfies_it(name: str) -> None:
    pins = pinned(name)
    required = [text for extra in EXTRAS[name] for text in PROJECT["optional-dependencies"][extra]]
    for text in [*PROJECT["dependencies"], *required]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            continue
        version = pins.get(canonicalize_name(requirement.name), "")
        assert requirement.specifier.contains(version), f"{text}, and the pin is {version}: run make pins"


def test_broker_is_tested_with_the_versions_that_the_demo_installs() -> None:
    assert pinned(SERVER).items() <= pinned(DEV).items()


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
