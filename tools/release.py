"""Build and check the files of a release, without publishing anything: `make release`.

To the source distribution and the wheels that `make wheels` builds in dist/, this adds:

    trio_nsq-X.Y.Z.cdx.json    bill of materials in CycloneDX: the broker's packages with their versions and licences
    release-notes.md           the section of the version in CHANGELOG.md; before the release, what it would contain
    SHA256SUMS                 the hashes of the files above

Each wheel for a Python on this machine is installed from a local folder, with no compiler and no package index: the
client, what the server needs besides, and another extra. All of it may take 15 s of processor time.

`--tag vX.Y.Z` also checks that everything agrees for a release: version, tag and changelog, that there is a wheel for
each Python and platform, and that each has the project's links. The release workflow builds the wheels on several
machines, and calls this with `--built`.
"""

import hashlib
import json
import platform
import re
import resource
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple

from packaging.utils import parse_wheel_filename
from tools.changelog import ChangeError, changelog_with_changes, changes_in, section
from tools.wheels import (
    NO_COMPILER,
    PROGRAMS,
    ROOT,
    Failure,
    build,
    build_parser,
    find_python,
    found_pythons,
    run,
    supported,
)

MACHINES = ("aarch64", "x86_64")
LIBRARIES = ("manylinux", "musllinux")
"""The kinds of the C library that pip tells apart."""
MAX_INSTALL_CPU_S = 15.0
SUMS = "SHA256SUMS"
NOTES = "release-notes.md"
TESTED_EXTRA = "admin"
"""Installed in addition to `server`."""


class Install(NamedTuple):
    """What one `pip install` took."""

    what: str
    wall_s: float
    cpu_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and check; return the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument(
        "--built", action="store_true", help="check the source distribution and wheels that are in the folder"
    )
    parser.add_argument("--tag", metavar="vX.Y.Z", help="check that this version can be released")
    options = parser.parse_args(arguments)
    out: Path = options.out.absolute()
    try:
        version = project_version()
        notes = release_notes(version, options.tag)
        if not options.built:
            for path, says in build(options.python or found_pythons(), out):
                print(f"{path.name}: {says}", flush=True)
        packages = distributions(out, version)
        if missing := missing_wheels(packages):
            print(f"Not in {out}: wheels for {', '.join(missing)}.")
            if options.tag:
                raise Failure("a release has all wheels; the release workflow builds them")
        if options.tag:
            for package in packages:
                check_description(package)
        run(sys.executable, "-m", "twine", "check", "--strict", *packages)
        wheels = usable_here(packages)
        if not wheels:
            raise Failure(f"{out} has no wheel for this machine and a Python on it")
        for wheel, python in wheels:
            for each in check_installs(wheel, python):
                print(
                    f"pip install {each.what}: {each.wall_s:.1f} s, processor {each.cpu_s:.1f} s ({wheel.name})"
                )
        bill = out / f"trio_nsq-{version}.cdx.json"
        write_bill_of_materials(bill, version, *wheels[0])
        (out / NOTES).write_text(notes)
        write_sums(out / SUMS, [*packages, bill])
    except (Failure, ChangeError) as exc:
        print(f"release: {exc}", file=sys.stderr)
        return 1
    print(f"{out}: the files of {version}, with {bill.name}, {NOTES} and {SUMS}")
    return 0


def project_version() -> str:
    """Return the version of the project from its only place."""
    text = (ROOT / "core" / "trio_nsq" / "_version.py").read_text()
    found = re.search(r'^__version__ = "(\d+\.\d+\.\d+)"$', text, re.MULTILINE)
    if not found:
        raise Failure("core/trio_nsq/_version.py has no version of the form X.Y.Z")
    return found[1]


def release_notes(version: str, tag: str | None) -> str:
    """Return the section of CHANGELOG.md about a version, or what it would contain.

    Args:
        tag: The tag of the release; None if this is none.

    Raises:
        Failure: the tag is not of this version, the changelog has no section of it, or docs/changes is not empty.
        ChangeError: the changelog or a file of docs/changes cannot be used.
    """
    changelog, changes = ROOT / "CHANGELOG.md", ROOT / "docs" / "changes"
    released = section(changelog.read_text(), version)
    if tag is not None:
        if tag != f"v{version}":
            raise Failure(f"the tag is {tag}, and core/trio_nsq/_version.py has {version}")
        if released is None:
            raise Failure(f"CHANGELOG.md has no section of {version}")
        if any(changes_in(changes).values()):
            raise Failure("docs/changes has changes that are not in CHANGELOG.md: run make changelog")
    if released is None:
        released = section(changelog_with_changes(changelog, changes), "Unreleased") or ""
    return released


def distributions(folder: Path, version: str) -> list[Path]:
    """Return the source distribution and the wheels in a folder, in the order of their names.

    Raises:
        Failure: the source distribution is missing, or a file is of another version.
    """
    source = folder / f"trio_nsq-{version}.tar.gz"
    found = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])
    if source not in found:
        raise Failure(f"{source} is missing")
    for path in found:
        if path != source and not path.name.startswith(f"trio_nsq-{version}-"):
            raise Failure(f"{path} is not of version {version}: run make clean, or remove it")
    return found


def missing_wheels(packages: Sequence[Path]) -> list[str]:
    """Return the wheels that a release has and that are not among these, as `cp311-manylinux_x86_64`."""
    there = set()
    for wheel in packages:
        if wheel.suffix == ".whl":
            for tag in parse_wheel_filename(wheel.name)[3]:
                library = next((name for name in LIBRARIES if tag.platform.startswith(name)), "")
                machine = next((name for name in MACHINES if tag.platform.endswith(name)), "")
                there.add(f"{tag.interpreter}-{library}_{machine}")
    return [
        name
        for version in supported()
        for library in LIBRARIES
        for machine in MACHINES
        if (name := f"cp{version.replace('.', '')}-{library}_{machine}") not in there
    ]


def check_description(package: Path) -> None:
    """Read what PyPI would show of a distribution. Raises Failure: links of the description are relative."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            text = wheel.read(name)
    else:
        with tarfile.open(package) as source:
            member = source.extractfile(f"{package.name.removesuffix('.tar.gz')}/PKG-INFO")
            assert member is not None  # a file
            text = member.read()
    if "Project-URL" not in message_from_bytes(text):
        raise Failure(
            f"{package.name}: PyPI would show links that lead nowhere: build the source distribution with "
            "TRIO_NSQ_REPOSITORY, the address of the repository"
        )


def usable_here(packages: Sequence[Path]) -> list[tuple[Path, Path]]:
    """Return the wheels for this machine whose Python is on it, each with its interpreter."""
    library = "manylinux" if platform.libc_ver()[0] == "glibc" else "musllinux"
    usable = []
    for version in supported():
        name = f"cp{version.replace('.', '')}"
        pattern = re.compile(rf"trio_nsq-[^-]+-{name}-{name}-{library}\S*_{platform.machine()}\.whl")
        wheels = [path for path in packages if pattern.fullmatch(path.name)]
        if wheels and (python := find_python(version)):
            usable.append((wheels[0], python))
    return usable


def check_installs(wheel: Path, python: Path) -> list[Install]:
    """Install a wheel from a local folder: the client, then what the server needs, then another extra.

    Returns:
        What each installation took.

    Raises:
        Failure: a package would have to be compiled, an extra installs the wheel again, or it takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="trio-nsq-index-") as name:
        index, environment = Path(name, "index"), Path(name, "environment")
        run(python, "-m", "venv", environment)
        pip = (environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet")
        run(*pip, "download", "--only-binary=:all:", "--dest", index, f"{wheel}[server,{TESTED_EXTRA}]")
        installs, identity = [], None
        for what in ("trio-nsq", "trio-nsq[server]", f"trio-nsq[{TESTED_EXTRA}]"):
            started_s, used_s = time.monotonic(), children_cpu_s()
            run(*pip, "install", "--no-index", "--find-links", index, what, **NO_COMPILER)
            installs.append(Install(what, time.monotonic() - started_s, children_cpu_s() - used_s))
            record = next(environment.glob("lib/python*/site-packages/trio_nsq-*.dist-info/RECORD")).stat()
            if identity not in (None, (record.st_ino, record.st_mtime_ns)):
                raise Failure(f"{wheel.name}: pip install {what} installs trio-nsq again")
            identity = (record.st_ino, record.st_mtime_ns)
        says = run(environment / "bin" / "qcli", "--version").strip()
        if not says.endswith(", compiled)"):
            raise Failure(f"{wheel.name} has to be compiled, but qcli --version says {says}")
    if (cpu_s := sum(each.cpu_s for each in installs)) > MAX_INSTALL_CPU_S:
        raise Failure(
            f"{wheel.name}: the installation takes {cpu_s:.1f} s of processor time, more than {MAX_INSTALL_CPU_S:.0f} s"
        )
    return installs


def children_cpu_s() -> float:
    """Return the processor time of all processes that ended and that this one has started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_bill_of_materials(bill: Path, version: str, wheel: Path, python: Path) -> None:
    """Write what an installation of the broker consists of, with the pinned versions. Raises Failure."""
    uv = PROGRAMS / "uv"
    with tempfile.TemporaryDirectory(prefix="trio-nsq-bill-") as name:
        environment = Path(name, "environment")
        run(uv, "venv", "--no-project", "--python", python, environment)
        into = ("--python", environment / "bin" / "python")
        run(uv, "pip", "install", *into, "--require-hashes", "-r", ROOT / "requirements-server.txt")
        run(uv, "pip", "install", *into, "--no-deps", wheel)
        # The project is the subject of the bill; its packages are the components.
        project = ("--pyproject", ROOT / "pyproject.toml", "--mc-type", "application")
        form = ("--output-format", "JSON", "--spec-version", "1.6", "--output-reproducible")
        generate = (sys.executable, "-m", "cyclonedx_py", "environment")
        run(*generate, *project, *form, "--output-file", bill, environment / "bin" / "python")
    content = json.loads(bill.read_text())
    subject = content["metadata"]["component"]  # without a version: pyproject.toml does not have it
    content["metadata"]["component"] = subject | {"version": version, "purl": f"pkg:pypi/trio-nsq@{version}"}
    bill.write_text(json.dumps(content, indent=2) + "\n")


def write_sums(sums: Path, files: Sequence[Path]) -> None:
    """Write SHA-256 hashes in the format of `sha256sum --check`."""
    sums.write_text(
        "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    )


if __name__ == "__main__":
    sys.exit(main())
