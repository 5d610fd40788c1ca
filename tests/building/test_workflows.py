"""Check GitHub's workflows, which do not run here, and what the release workflow builds."""

import itertools
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from interop.peers import actionlint_program

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TIMEOUT_S = 60


@pytest.mark.interop
def test_workflows_have_no_mistakes_that_actionlint_finds() -> None:
    done = subprocess.run(
        [actionlint_program(), "-shellcheck=", "-pyflakes=", *WORKFLOWS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(workflow: Path) -> None:
    """A tag can be moved to other code. The comment tells people and Dependabot which release the commit is."""
    used = re.findall(r"^ *(?:- )?uses: (.*)$", workflow.read_text(), re.MULTILINE)
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)] == []


def test_an_action_has_the_same_commit_everywhere() -> None:
    used = re.findall(r"uses: (\S+)@(\S+)", "".join(path.read_text() for path in WORKFLOWS))
    assert len(set(used)) == len({action for action, _ in used})


def test_wheels_of_a_release_are_for_every_supported_python() -> None:
    prefix = "Programming Language :: Python :: 3."
    claimed = [name.removeprefix(prefix) for name in PYPROJECT["project"]["classifiers"]]
    assert PYPROJECT["tool"]["cibuildwheel"]["build"] == [
        f"cp3{minor}-*" for minor in claimed if minor.isdecimal()
    ]


def test_wheels_of_a_release_are_for_every_platform() -> None:
    matrix = RELEASE["wheels"]["strategy"]["matrix"]
    assert {*itertools.product(matrix["library"], matrix["machine"])} == {
        *itertools.product(("manylinux", "musllinux"), ("x86_64", "aarch64"))
    }
    assert {each["machine"]: each["runner"].endswith("-arm") for each in matrix["include"]} == {
        "x86_64": False,
        "aarch64": True,
    }


def test_only_tags_are_published_and_only_after_the_checks() -> None:
    needs = {name: job.get("needs", []) for name, job in RELEASE.items()}
    assert (needs["attest"], needs["pypi"], needs["github"]) == ("check", "attest", "pypi")
    assert RELEASE["attest"]["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"


def test_only_the_jobs_that_publish_may_write() -> None:
    """Code of packages that are downloaded for a build runs in the others."""
    writing = {
        name: {what for what, right in job["permissions"].items() if right == "write"}
        for name, job in RELEASE.items()
    }
    assert writing == {
        "source": set(),
        "wheels": set(),
        "check": set(),
        "attest": {"id-token", "attestations"},
        "pypi": {"id-token"},
        "github": {"contents"},
    }
