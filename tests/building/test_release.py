"""Tests for what `make release` refuses, and for its hashes. test_wheels.py makes all of its files."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tools.release import write_sums

from trio_nsq import __version__

ROOT = Path(__file__).parents[2]
SOURCE = f"trio_nsq-{__version__}.tar.gz"
TIMEOUT_S = 60


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project whose changelog has a section of the version."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "tools", tree / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "core/trio_nsq").mkdir(parents=True)
    shutil.copy(ROOT / "core/trio_nsq/_version.py", tree / "core/trio_nsq")
    shutil.copy(ROOT / "pyproject.toml", tree)
    (tree / "docs/changes").mkdir(parents=True)
    (tree / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## Unreleased\n\n### Fixed\n\n## {__version__}, 2026-11-30\n\n### Added\n\n- All.\n"
    )
    (tree / "dist").mkdir()
    return tree


def refusal(tree: Path, *arguments: str) -> str:
    """Run `make release`, which must fail; return what it says on stderr."""
    command = [sys.executable, "-m", "tools.release", *arguments]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert done.stderr.startswith("release: ")
    return done.stderr


def test_tag_of_another_version(tree: Path) -> None:
    said = refusal(tree, "--tag=v9.9.9")
    assert said == f"release: the tag is v9.9.9, and core/trio_nsq/_version.py has {__version__}\n"


def test_tag_without_a_section_in_the_changelog(tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    said = refusal(tree, f"--tag=v{__version__}")
    assert said == f"release: CHANGELOG.md has no section of {__version__}\n"


def test_tag_with_changes_that_are_not_in_the_changelog(tree: Path) -> None:
    (tree / "docs/changes/more.added.md").write_text("More.")
    assert "run make changelog" in refusal(tree, f"--tag=v{__version__}")


def test_file_of_a_change_that_cannot_be_used(tree: Path) -> None:
    (tree / "docs/changes/more.md").write_text("More.")
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    assert "the name is not NAME.KIND.md" in refusal(tree, "--built")


def test_missing_source_distribution(tree: Path) -> None:
    assert refusal(tree, "--built") == f"release: {tree / 'dist' / SOURCE} is missing\n"


def test_file_of_another_version(tree: Path) -> None:
    (tree / "dist" / SOURCE).touch()
    other = tree / "dist" / "trio_nsq-9.9.9-cp311-cp311-manylinux_2_17_x86_64.whl"
    other.touch()
    assert refusal(tree, "--built").startswith(f"release: {other} is not of version {__version__}")


def test_missing_wheels(tree: Path) -> None:
    (tree / "dist" / SOURCE).touch()
    for platform in ("manylinux2014_aarch64.manylinux_2_17_aarch64", "musllinux_1_2_aarch64"):
        (tree / "dist" / f"trio_nsq-{__version__}-cp313-cp313-{platform}.whl").touch()
    said = subprocess.run(
        [sys.executable, "-m", "tools.release", "--built", f"--tag=v{__version__}"],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert said.returncode == 1
    assert "cp313-manylinux_x86_64, cp313-musllinux_x86_64, cp314" in said.stdout
    assert "cp313-manylinux_aarch64" not in said.stdout
    assert said.stderr == "release: a release has all wheels; the release workflow builds them\n"


def test_distribution_without_the_links_of_the_project(tree: Path) -> None:
    """The source distribution has them, and one wheel has not."""
    metadata = tree / f"trio_nsq-{__version__}" / "PKG-INFO"
    metadata.parent.mkdir()
    metadata.write_text("Name: trio-nsq\nProject-URL: Repository, https://example.com\n\n")
    with tarfile.open(tree / "dist" / SOURCE, "w:gz") as source:
        source.add(metadata, metadata.relative_to(tree))
    for python in ("cp311", "cp312", "cp313", "cp314"):
        for platform in ("manylinux_2_17", "musllinux_1_2"):
            for machine in ("x86_64", "aarch64"):
                name = f"trio_nsq-{__version__}-{python}-{python}-{platform}_{machine}.whl"
                with zipfile.ZipFile(tree / "dist" / name, "w") as wheel:
                    text = metadata.read_text() if machine == "x86_64" else "Name: trio-nsq\n\n"
                    wheel.writestr(f"trio_nsq-{__version__}.dist-info/METADATA", text)
    said = refusal(tree, "--built", f"--tag=v{__version__}")
    name = f"trio_nsq-{__version__}-cp311-cp311-manylinux_2_17_aarch64.whl"
    assert said.startswith(f"release: {name}: PyPI would show links that lead nowhere")


def test_sums_are_those_that_sha256sum_checks(tmp_path: Path) -> None:
    files = [tmp_path / "a.whl", tmp_path / "b.tar.gz"]
    for path in files:
        path.write_text(path.name)
    write_sums(tmp_path / "SHA256SUMS", files)
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "a.whl: OK\nb.tar.gz: OK\n"), done.stderr
    files[0].write_text("changed")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, timeout=TIMEOUT_S).returncode == 1
