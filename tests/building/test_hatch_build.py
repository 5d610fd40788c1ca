"""Tests for the build hook: with and without a C compiler, and after an earlier installation."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest

from trio_nsq.protocol import bulk

PROJECT = Path(__file__).parents[2]
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
PLACE = "trio_nsq/protocol"
FILES = {f"{PLACE}/bulk{SUFFIX}", f"{PLACE}/bulk__mypyc{SUFFIX}"}
NO_COMPILER = {"CC": "/nonexistent/cc"}
BUILD = "import sys, hatchling.build as it; print(getattr(it, sys.argv[1])(*sys.argv[2:]))"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files of a build, with the extension of an earlier installation."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        copy(PROJECT / name, tree)
    for name in ("core", "cli", "man", "completions"):
        copytree(PROJECT / name, tree / name, ignore=ignore_patterns("*.so", "__pycache__", ".mypy_cache"))
    for name in FILES:
        (tree / "core" / name).write_bytes(b"old")
    return tree


def build(tree: Path, what: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call a function of hatchling, as pip does; the result is the last line of the output."""
    temporary = tree.parent / "tmp"
    temporary.mkdir(exist_ok=True)
    inherited = {k: v for k, v in os.environ.items() if k not in ("CC", "TRIO_NSQ_COMPILE")}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, *arguments],
        cwd=tree,
        env=inherited | {"TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        capture_output=True,
        text=True,
    )
    assert list(temporary.iterdir()) == []
    return done


def extensions(tree: Path) -> set[str]:
    """Return the extension files beside the sources."""
    return {path.relative_to(tree / "core").as_posix() for path in (tree / "core").rglob("*.so*")}


def test_wheel_has_the_compiled_extension(tree: Path, tmp_path: Path) -> None:
    if not bulk.COMPILED and os.environ.get("CI") != "true":
        pytest.skip("the installed package is not compiled: there may be no C compiler")
    before = sorted(tree.rglob("*"))
    done = build(tree, "build_wheel", str(tmp_path), TRIO_NSQ_COMPILE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(tree.rglob("*")) == before
    wheel = tmp_path / done.stdout.split()[-1]
    assert not wheel.name.endswith("-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.endswith(".so")} == FILES
        archive.extractall(tmp_path / "installed")
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]; import trio_nsq.protocol.bulk as it; print(it.__file__)"
    )
    said = subprocess.check_output(
        [sys.executable, "-c", program, str(tmp_path / "installed")], cwd=tmp_path, text=True
    )
    assert said.strip() == str(tmp_path / "installed" / PLACE / f"bulk{SUFFIX}")


@pytest.mark.parametrize("why", [{"TRIO_NSQ_COMPILE": "0"}, NO_COMPILER], ids=str)
def test_without_compiling_there_is_no_extension(why: dict[str, str], tree: Path, tmp_path: Path) -> None:
    for kind in ("wheel", "editable"):
        done = build(tree, f"build_{kind}", str(tmp_path), **why)
        assert done.returncode == 0, done.stdout + done.stderr
        wheel = tmp_path / done.stdout.split()[-1]
        assert wheel.name.endswith("-py3-none-any.whl")
        with zipfile.ZipFile(wheel) as archive:
            assert not [name for name in archive.namelist() if ".so" in name]
        reasons = [line for line in done.stderr.splitlines() if "not compiled" in line]
        expected = "trio-nsq is not compiled, which makes it slower: there is no C compiler /nonexistent/cc"
        assert reasons == ([expected] if why is NO_COMPILER else [])
    assert extensions(tree) == set()  # the editable installation removed them
    needed = build(tree, "get_requires_for_build_wheel", **why)
    assert needed.stdout.split()[-1] == "[]"


def test_required_extension_that_cannot_be_compiled_is_an_error(tree: Path, tmp_path: Path) -> None:
    done = build(tree, "build_editable", str(tmp_path), TRIO_NSQ_COMPILE="1", **NO_COMPILER)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "TRIO_NSQ_COMPILE is set, and trio-nsq cannot be compiled: there is no C compiler /nonexistent/cc"
    ]
    assert extensions(tree) == set()


def test_invalid_setting_is_an_error(tree: Path, tmp_path: Path) -> None:
    done = build(tree, "build_wheel", str(tmp_path), TRIO_NSQ_COMPILE="no")
    assert (done.returncode, done.stderr) == (1, "TRIO_NSQ_COMPILE is 0 or 1, not no\n")


def test_source_distribution_can_be_compiled(tree: Path, tmp_path: Path) -> None:
    done = build(tree, "build_sdist", str(tmp_path), **NO_COMPILER)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"hatch_build.py", "pyproject.toml", f"core/{PLACE}/bulk.py"} <= names
    assert not [name for name in names if ".so" in name]
