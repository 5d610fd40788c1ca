"""Build versions of this project for comparisons: each from its sources, so that none is stale, and in the same way."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILDS = ROOT / "bench" / ".builds"
KEPT = 8
"""The number of builds that are kept, the newest ones."""
_SOURCES = ("core", "cli", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE")


@dataclass(frozen=True)
class Version:
    """A built version.

    Attributes:
        name: The revision or folder that it was built from.
        digest: A digest of its sources, of Python's version, and of whether it is compiled.
        packages: The folder to import it from.
        says: What `qcli --version` prints, with `compiled` or `not compiled`.
        python: The Python that runs it.
    """

    name: str
    digest: str
    packages: Path
    says: str
    python: Path | str

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of the environment that make Python import this version."""
        return {"PYTHONPATH": str(self.packages)}


def build(name: str, *, pure: bool = False, python: Path | str = sys.executable) -> Version:
    """Build a version of this project, unless the same sources are built already.

    Args:
        name: A folder with a checkout, whose uncommitted changes count, or a revision of this repository.
        pure: Do not compile.
        python: Of an environment with the requirements of this project, such as one that `make setup` has made.

    Raises:
        RuntimeError: There is no such revision, or it cannot be built.
    """
    if (folder := Path(name)).is_dir():
        return _built(folder.resolve(), name, pure, python)
    with tempfile.TemporaryDirectory(prefix="bench-version-") as scratch:
        archive = Path(scratch) / "archive.tar"
        _run("git", "-C", str(ROOT), "archive", f"--output={archive}", name)
        shutil.unpack_archive(archive, Path(scratch) / "sources", filter="data")
        return _built(Path(scratch) / "sources", name, pure, python)


def _built(sources: Path, name: str, pure: bool, python: Path | str) -> Version:
    python_says = _run(str(python), "-c", "import sys; print(sys.version)")
    digest = _digest(sources, f"{python_says} {pure}")
    target = BUILDS / digest
    if not target.exists():
        print(f"building {name}; the same sources are built once", flush=True)
        BUILDS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="new-", dir=BUILDS) as scratch:
            pip = (str(python), "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check")
            flags = ("--no-build-isolation", "--no-deps", f"--wheel-dir={scratch}")
            _run(*pip, *flags, str(sources), TRIO_NSQ_COMPILE="0" if pure else "")
            (wheel,) = Path(scratch).glob("*.whl")
            zipfile.ZipFile(wheel).extractall(Path(scratch) / "packages")
            (Path(scratch) / "packages").rename(target)
        for old in sorted(BUILDS.iterdir(), key=lambda each: each.stat().st_mtime)[:-KEPT]:
            shutil.rmtree(old)
    os.utime(target)
    version = Version(name, digest, target, "", python)
    says = _run(str(python), "-m", "qcli", "--version", **version.environment)
    return replace(version, says=says)


def _digest(sources: Path, form: str) -> str:
    whole = hashlib.sha256(form.encode())
    for top in _SOURCES:
        path = sources / top
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if file.is_file():
                whole.update(f"{file.relative_to(sources)}\0".encode() + file.read_bytes() + b"\0")
    return whole.hexdigest()[:16]


def _run(*command: str, **environment: str) -> str:
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout.strip()
