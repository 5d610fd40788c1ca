"""Tests for the build hook: with and without a C compiler, and after an earlier installation."""

import ast
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_bytes
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from building.build_tree import PROJECT, copy_project
from soak import in_soak
from trio_nsq.protocol import bulk

SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
COMPILED = ("trio_nsq.event_loop.pacing", "trio_nsq.protocol.bulk")
"""Instead of all modules, whose compilation takes minutes: the installation of the checkout has done that."""
FILES = {f"trio_nsq/{name}{SUFFIX}" for name in ("event_loop/pacing", "protocol/bulk", "hot_path__mypyc")}
NO_COMPILER = {"CC": "/nonexistent/cc"}
BUILD = "import sys, hatchling.build as it; print(getattr(it, sys.argv[1])(*sys.argv[2:]))"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files of a build, with the extension of an earlier installation."""
    tree = tmp_path / "tree"
    copy_project(tree, COMPILED)
    for name in FILES:
        (tree / "core" / name).write_bytes(b"old")
    return tree


def hook_of(folder: Path) -> ModuleType:
    """Import the build hook of a folder."""
    spec = spec_from_file_location("hatch_build", folder / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


def need_compiler() -> None:
    """Skip a test if nothing can be compiled; in CI it can."""
    if not bulk.COMPILED and os.environ.get("CI") != "true":
        pytest.skip("the installed package is not compiled: there may be no C compiler")


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


def imported(folder: Path) -> list[str]:
    """Return the files that the compiled modules are imported from, with this folder first on the path."""
    program = "import sys, importlib\nsys.path.insert(0, sys.argv[1])\n" + "".join(
        f"print(importlib.import_module({module!r}).__file__)\n" for module in COMPILED
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_all_modules_of_the_checkout_are_compiled() -> None:
    hook = hook_of(PROJECT)
    if not bulk.COMPILED:
        if os.environ.get("CI") == "true" and os.environ.get("TRIO_NSQ_COMPILE") != "0":
            pytest.fail("the hot path is not compiled: see hatch_build.py")
        pytest.skip("the hot path is not compiled, for want of a C compiler or by TRIO_NSQ_COMPILE=0")
    core = PROJECT / "core"
    assert {f"core/{name}" for name in hook.extension_files()} == {
        path.relative_to(PROJECT).as_posix() for path in core.rglob(f"*{SUFFIX}")
    }
    assert hook.digest(core) == bulk.COMPILED_FROM
    assert all((core / module.replace(".", "/")).with_suffix(".py").exists() for module in hook.MODULES)


def test_wheel_has_the_compiled_modules_and_their_sources(tree: Path, tmp_path: Path) -> None:
    need_compiler()
    before = sorted(tree.rglob("*"))
    done = build(tree, "build_wheel", str(tmp_path), TRIO_NSQ_COMPILE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(tree.rglob("*")) == before
    wheel = tmp_path / done.stdout.split()[-1]
    assert not wheel.name.endswith("-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert {name for name in names if name.endswith(".so")} == FILES
        assert {f"{module.replace('.', '/')}.py" for module in COMPILED} <= names
        archive.extractall(tmp_path / "installed")
    assert imported(tmp_path / "installed") == [
        str(tmp_path / "installed" / f"{module.replace('.', '/')}{SUFFIX}") for module in COMPILED
    ]


@pytest.mark.parametrize("how", ["make compile", *in_soak("pip install --editable")])
def test_changed_source_makes_the_compiled_modules_stale(how: str, tree: Path, tmp_path: Path) -> None:
    """The long form compiles again after the change."""
    need_compiler()
    core, hook = tree / "core", hook_of(tree)
    command = [sys.executable, str(tree / "hatch_build.py")]
    assert "run `make compile`" in hook.stale(core)  # these are not extensions at all
    if how == "make compile":
        subprocess.run([*command, "compile"], check=True, capture_output=True)
    else:
        done = build(tree, "build_editable", str(tmp_path), TRIO_NSQ_COMPILE="1")
        assert done.returncode == 0, done.stdout + done.stderr
    assert extensions(tree) == FILES
    assert imported(core)[0] == str(core / f"trio_nsq/event_loop/pacing{SUFFIX}")
    assert hook.stale(core) == ""
    # Another Python must not find these object files.
    assert [path.name for path in (tree / ".compiled").iterdir()] == [sys.implementation.cache_tag]

    (core / "trio_nsq/access/policy.py").write_text("# not compiled")
    assert hook.stale(core) == ""
    source = core / "trio_nsq/event_loop/pacing.py"
    source.write_text(source.read_text() + "changed = True\n")
    said = hook.stale(core)
    assert said.startswith(f"the compiled modules in {core} are not of the sources beside them")
    assert "run `make compile`, or `make pure` to go without" in said

    if how != "make compile":
        subprocess.run([*command, "compile"], check=True, capture_output=True)
        assert hook.stale(core) == ""
        program = (
            "import sys; sys.path.insert(0, sys.argv[1]); from trio_nsq.event_loop.pacing import changed"
        )
        subprocess.run([sys.executable, "-c", program, str(core)], check=True)

    program = "import sys; sys.path.insert(0, sys.argv[1]); from trio_nsq.platform.compiled import form; print(form())"
    forms = [subprocess.check_output([sys.executable, "-c", program, str(core)], text=True)]
    (core / f"trio_nsq/event_loop/pacing{SUFFIX}").unlink()
    forms.append(subprocess.check_output([sys.executable, "-c", program, str(core)], text=True))
    assert "run `make compile`" in hook.stale(core)
    subprocess.run([*command, "pure"], check=True)
    assert (extensions(tree), hook.stale(core)) == (set(), "")
    forms.append(subprocess.check_output([sys.executable, "-c", program, str(core)], text=True))
    assert forms == ["compiled\n", "partly compiled\n", "not compiled\n"]


@pytest.mark.parametrize(
    ("why", "kinds"),
    [
        (NO_COMPILER, ["wheel", "editable"]),
        ({"TRIO_NSQ_COMPILE": "0"}, ["editable"]),  # test_links_of_a_source_distribution... builds a wheel so
    ],
    ids=str,
)
def test_without_compiling_there_is_no_extension(
    why: dict[str, str], kinds: list[str], tree: Path, tmp_path: Path
) -> None:
    for kind in kinds:
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


def test_source_distribution_without_a_compiler_or_a_repository(tree: Path, tmp_path: Path) -> None:
    """It can be compiled elsewhere; its description has the links that README.md has."""
    done = build(tree, "build_sdist", str(tmp_path), **NO_COMPILER, TRIO_NSQ_REPOSITORY="")
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"hatch_build.py", "pyproject.toml", "core/trio_nsq/protocol/bulk.py"} <= names
    assert not [name for name in names if ".so" in name]
    assert metadata_of(tmp_path / done.stdout.split()[-1]) == ({}, (tree / "README.md").read_text())


def test_attributes_that_close_files_are_replaced_with_their_old_value_kept() -> None:
    """Compiled code drops an old value before it sets the new one: see "Compiled modules" in CONTRIBUTING.md.

    A method `_replace_NAME` keeps it, so nothing else sets `self._NAME`.
    """
    replacers = 0
    for module in hook_of(PROJECT).MODULES:
        tree = ast.parse((PROJECT / "core" / module.replace(".", "/")).with_suffix(".py").read_text())
        for found in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            methods = [node for node in found.body if isinstance(node, ast.FunctionDef)]
            kept = {f"_{method.name[9:]}" for method in methods if method.name.startswith("_replace_")}
            replacers += len(kept)
            for method in methods:
                sets = {
                    node.attr
                    for node in ast.walk(method)
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                }
                if method.name != "__init__":
                    assert not (sets & kept - {method.name[8:]}), f"{module}: {method.name}"
    assert replacers >= 3


def metadata_of(source: Path) -> tuple[dict[str, str], str]:
    """Return the links and the description of a source distribution."""
    with tarfile.open(source) as archive:
        file = archive.extractfile(f"{source.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert file is not None
        content = message_from_bytes(file.read())
    links = dict(each.split(", ", 1) for each in content.get_all("Project-URL", []))
    return links, str(content.get_payload())


def test_links_of_a_source_distribution_that_is_published(tree: Path, tmp_path: Path) -> None:
    """PyPI shows README.md, where links into the repository need its address. A wheel has those of its source."""
    (tree / "README.md").write_text(
        "[Guide](docs/a.md#b), [here](#c), [NSQ](https://nsq.io), ![A\n picture](docs/p.svg)"
    )
    repository = "https://example.com/us/trio-nsq"
    done = build(tree, "build_sdist", str(tmp_path), TRIO_NSQ_REPOSITORY=repository)
    source = tmp_path / done.stdout.split()[-1]
    links, text = metadata_of(source)
    tag = f"v{source.name.removeprefix('trio_nsq-').removesuffix('.tar.gz')}"
    assert text.strip() == (
        f"[Guide]({repository}/blob/{tag}/docs/a.md#b), [here](#c), [NSQ](https://nsq.io), "
        f"![A\n picture]({repository}/raw/{tag}/docs/p.svg)"
    )
    assert links["Repository"] == repository

    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / source.name.removesuffix(".tar.gz")
    made = build(unpacked, "build_wheel", str(tmp_path), TRIO_NSQ_COMPILE="0")
    with zipfile.ZipFile(tmp_path / made.stdout.split()[-1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        content = message_from_bytes(wheel.read(name))
    assert (
        dict(each.split(", ", 1) for each in content.get_all("Project-URL", [])),
        content.get_payload(),
    ) == (
        links,
        text,
    )
