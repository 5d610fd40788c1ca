"""Tests for the files of a release, and for installing the source distribution without a C compiler.

CI makes all files of a release in a job of its own. Here, `make soak` does, because each new environment with the
packages of a server takes seconds.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

import pytest

from building.build_tree import copy_project
from soak import in_soak
from trio_nsq import __version__
from trio_nsq.protocol.bulk import COMPILED

pytestmark = pytest.mark.slow

NO_COMPILER = {"CC": "/nonexistent/cc"}
TIMEOUT_S = 480


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built, in which one module is compiled."""
    tree = tmp_path_factory.mktemp("project") / "tree"
    pins = ("requirements-dev.txt", "requirements-server.txt")
    copy_project(tree, ["trio_nsq.protocol.bulk"], *pins, "tools", "examples", "CHANGELOG.md")
    (tree / "docs/changes").mkdir(parents=True)
    (tree / "docs/changes/more.added.md").write_text("A new feature.")
    return tree


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command outside the checkout. Skip the test if the package index cannot be reached, except in CI."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("CC", "TRIO_NSQ_COMPILE")}
    done = subprocess.run(
        command,
        cwd=tempfile.gettempdir(),
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    unreached = re.search(r".*(Failed to fetch|NewConnectionError).*", done.stdout + done.stderr)
    if done.returncode and unreached and os.environ.get("CI") != "true":
        pytest.skip(f"the package index cannot be reached: {unreached[0].strip()}")
    return done


def wheels(tree: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `make wheels` in a copy of the project."""
    return run(sys.executable, tree / "tools" / "wheels.py", *arguments, **environment)


def version(form: str) -> str:
    """Return what `qcli --version` says in a form."""
    return f"qcli {__version__} (Python {platform.python_version()}, {form})"


@pytest.mark.soak
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_files_of_a_release(tree: Path, tmp_path: Path) -> None:
    if not COMPILED and os.environ.get("CI") != "true":
        pytest.skip("the installed package is not compiled: there may be no C compiler")
    options = ("--python", sys.executable, "--out", tmp_path)
    done = run(sys.executable, "-m", "tools.release", *options, PYTHONPATH=str(tree))
    assert done.returncode == 0, done.stdout + done.stderr
    source = tmp_path / f"trio_nsq-{__version__}.tar.gz"
    (wheel,) = tmp_path.glob("*.whl")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    name = rf"trio_nsq-{re.escape(__version__)}-{python}-{python}-(many|musl)linux\S+\.whl"
    assert re.fullmatch(name, wheel.name)

    said = done.stdout.splitlines()
    assert said[:2] == [f"{wheel.name}: {version('compiled')}", f"{source.name}: {version('not compiled')}"]
    assert [line.partition(":")[0] for line in said if line.startswith("pip install")] == [
        "pip install trio-nsq",
        "pip install trio-nsq[server]",
        "pip install trio-nsq[admin]",
    ]

    bill = tmp_path / f"trio_nsq-{__version__}.cdx.json"
    content = json.loads(bill.read_text())
    assert content["metadata"]["component"]["purl"] == f"pkg:pypi/trio-nsq@{__version__}"
    assert {"trio", "click", "google-re2"} <= {each["name"] for each in content["components"]}

    assert "- A new feature.\n" in (tmp_path / "release-notes.md").read_text()
    sums = tmp_path / "SHA256SUMS"
    assert sums.read_text() == "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in (wheel, source, bill)
    )
    assert set(tmp_path.iterdir()) == {wheel, source, bill, sums, tmp_path / "release-notes.md"}


def test_wheel_that_cannot_be_compiled_is_not_made(tree: Path, tmp_path: Path) -> None:
    done = wheels(tree, "--python", sys.executable, "--out", tmp_path, **NO_COMPILER)
    assert done.returncode == 1
    assert "trio-nsq cannot be compiled: there is no C compiler /nonexistent/cc" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_interpreter_that_does_not_exist(tree: Path, tmp_path: Path) -> None:
    done = wheels(tree, "--python", "/nonexistent/python", "--out", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("wheels: ")
    assert "/nonexistent/python" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("isolation", [False, *in_soak(True)])
def test_source_distribution_installs_without_a_compiler(isolation: bool, tree: Path, tmp_path: Path) -> None:
    """It runs as Python, and says so; mypy is not downloaded."""
    program = "import sys, os, hatchling.build as it; os.chdir(sys.argv[1]); it.build_sdist(sys.argv[2])"
    made = run(sys.executable, "-c", program, tree, tmp_path)
    assert made.returncode == 0, made.stderr
    (source,) = tmp_path.iterdir()

    environment = tmp_path / "environment"
    venv.create(environment)
    python = environment / "bin" / "python"
    # hatchling and the dependencies come from the environment of the tests, but not its editable installation.
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    Path(packages, "tools.pth").write_text(sysconfig.get_path("purelib"))
    install: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--verbose",
        "--no-deps",
    ]
    how = [] if isolation else ["--no-build-isolation"]
    done = run(*install, *how, source, **NO_COMPILER)
    assert done.returncode == 0, done.stdout + done.stderr
    collected = set(re.findall(r"Collecting ([\w-]+)", done.stdout + done.stderr))
    assert ("hatchling" in collected) == isolation
    assert not {"mypy", "setuptools"} & collected
    said = run(environment / "bin" / "qcli", "--version")
    assert (said.stdout, said.stderr) == (f"{version('not compiled')}\n", "")
