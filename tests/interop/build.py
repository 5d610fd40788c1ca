"""Build the peers that are not Python: NSQ's programs, ``gopeer``, ``goload``, ``gonsqload``, nsqjs, stores, and more.


The output goes to ``.build/`` in the folder of this file. Concurrent test runs wait for each other on a file lock. A
later run rebuilds only if an input file of the build has changed.
"""

import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

INTEROP = Path(__file__).parent
BUILD = INTEROP / ".build"
STORES = INTEROP / "stores"
"""The Go module and the npm project of servers for object stores; the first has too many dependencies for ours."""

REGISTRY = INTEROP / "registry"
"""The Maven project of a schema registry."""

SPARK_READERS = INTEROP / "spark_readers"
"""The Maven project of what Spark 4.0 reads Delta and Iceberg tables with."""

OIDC = INTEROP / "oidc"
"""The npm project of an OpenID Connect provider."""

DEADLINE_S = 10 * 60
"""Timeout of one download or build. The first Go build, with empty caches, takes about a minute on two cores."""

ETCDS = INTEROP / "etcd"
"""Has a Go module for each version of etcd, because a module has one version of another one."""
ETCD = "go.etcd.io/etcd/server/v3"
ACTIONLINT = "github.com/rhysd/actionlint"
VERSITYGW = "github.com/versity/versitygw"
NSQ = "github.com/nsqio/nsq"
NSQ_APPS = (
    "nsq_stat",
    "nsq_tail",
    "nsq_to_file",
    "nsq_to_http",
    "nsq_to_nsq",
    "nsqadmin",
    "nsqd",
    "nsqlookupd",
    "to_nsq",
)
GO_PACKAGES = [
    "./gopeer",
    "./goload",
    "./gonsqload",
    *(f"{NSQ}/apps/{name}" for name in NSQ_APPS),
    f"{NSQ}/bench/bench_reader",
    f"{NSQ}/bench/bench_writer",
]


class PeerUnavailable(Exception):
    """A peer is not available on this machine: a tool is missing, or a download failed. The text gives the reason."""


_unavailable: dict[Path, PeerUnavailable] = {}
"""Failed builds, by folder, so that a test run does not repeat a failed download in every test."""


@functools.cache
def go_program(name: str) -> Path:
    """Return the path of a program of `GO_PACKAGES`, such as ``nsqd`` or ``gopeer``. Build it if necessary.

    Raises:
        PeerUnavailable: ``go`` is missing, or the modules could not be downloaded.
        RuntimeError: the modules were downloaded, but the build failed.
    """
    go = _tool("go")
    programs = BUILD / "go"

    def build() -> None:
        if failure := _run([go, "mod", "download"]):
            raise PeerUnavailable(f"the Go modules of tests/interop could not be downloaded: {failure}")
        if failure := _run([go, "build", "-o", str(programs), *GO_PACKAGES]):
            raise RuntimeError(f"tests/interop does not build: {failure}")

    once(
        programs,
        [
            *(INTEROP / name for name in ("go.mod", "go.sum", "tools.go")),
            *(
                source
                for name in ("gopeer", "goload", "gonsqload")
                for source in INTEROP.glob(f"{name}/*.go")
            ),
        ],
        build,
    )
    return programs / name


@functools.cache
def versitygw() -> Path:
    """Return the path of an S3 server that enforces conditional requests. Build it if necessary.

    Raises:
        PeerUnavailable: ``go`` is missing, or the modules could not be downloaded.
        RuntimeError: the modules were downloaded, but the build failed.
    """
    return go_module(STORES, "stores", f"{VERSITYGW}/cmd/versitygw") / "versitygw"


@functools.cache
def actionlint() -> Path:
    """Return the path of the checker of GitHub's workflows. Build it if necessary.

    Raises:
        PeerUnavailable: ``go`` is missing, or the modules could not be downloaded.
        RuntimeError: the modules were downloaded, but the build failed.
    """
    return go_module(INTEROP / "actionlint", "actionlint", f"{ACTIONLINT}/cmd/actionlint") / "actionlint"


def go_module(source: Path, name: str, *packages: str) -> Path:
    """Build packages of a Go module into the folder ``name`` of `BUILD`, if necessary. Return that folder.

    Raises:
        PeerUnavailable: ``go`` is missing, or the modules could not be downloaded.
        RuntimeError: the modules were downloaded, but the build failed.
    """
    go = _tool("go")
    programs = BUILD / name

    def build() -> None:
        if failure := _run([go, "mod", "download"], source):
            raise PeerUnavailable(f"the Go modules of {source} could not be downloaded: {failure}")
        if failure := _run([go, "build", "-o", str(programs), *packages], source):
            raise RuntimeError(f"{source} does not build: {failure}")

    once(programs, [source / "go.mod", source / "go.sum", *source.glob("*.go")], build)
    return programs


@functools.cache
def go_source(module: str) -> Path:
    """Return the folder of a Go module's sources, such as ``example.com/module@v1.2.3``. Download it if necessary.

    Raises:
        PeerUnavailable: ``go`` is missing, or the module could not be downloaded.
    """
    command = [_tool("go"), "mod", "download", "-json", module]
    done = subprocess.run(
        command, cwd=INTEROP, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if done.returncode:
        raise PeerUnavailable(
            f"{module} could not be downloaded: {(done.stdout + done.stderr)[-2000:].strip()}"
        )
    return Path(json.loads(done.stdout)["Dir"])


@functools.cache
def etcd_of(version: str) -> Path:
    """Return the path of etcd, in a version such as ``3.6``. Build it if necessary.

    Raises:
        PeerUnavailable: ``go`` is missing, or the modules could not be downloaded, or do not build.
    """
    go = _tool("go")
    source, program = ETCDS / version, BUILD / f"etcd-{version}" / "etcd"

    def build() -> None:
        if failure := _run([go, "build", "-o", str(program), ETCD], source):
            raise PeerUnavailable(f"etcd {version} cannot be downloaded or built: {failure}")

    once(program.parent, [source / "go.mod", source / "go.sum"], build)
    return program


@functools.cache
def azurite() -> Path:
    """Return the path of an emulator of Azure Blob Storage. Install it if necessary.

    Raises:
        PeerUnavailable: ``node`` or ``npm`` is missing, or the packages could not be downloaded.
    """
    return _npm_project("azurite", STORES) / "node_modules" / ".bin" / "azurite-blob"


@functools.cache
def oidc_provider() -> Path:
    """Return the script of an OpenID Connect provider, for ``node``. Install its packages if necessary.

    Raises:
        PeerUnavailable: ``node`` or ``npm`` is missing, or the packages could not be downloaded.
    """
    return _npm_project("oidc", OIDC, OIDC / "provider.mjs") / "provider.mjs"


@functools.cache
def apicurio() -> Path:
    """Return the jar of a schema registry with Confluent's API. Download it if necessary: 150 MB.

    Raises:
        PeerUnavailable: ``mvn`` is missing, or the archive could not be downloaded.
    """
    maven, project = _tool("mvn"), REGISTRY / "pom.xml"
    folder = BUILD / "apicurio"

    def build() -> None:
        command = [maven, "-q", "-B", "-f", str(project), "dependency:unpack-dependencies"]
        flags = [f"-DoutputDirectory={folder}", f"-DmarkersDirectory={folder}/markers"]
        if failure := _run([*command, *flags]):
            raise PeerUnavailable(f"the schema registry of {REGISTRY} could not be downloaded: {failure}")

    once(folder, [project], build)
    return folder / "quarkus-run.jar"


@functools.cache
def spark_readers() -> list[Path]:
    """Return the jars with which Spark 4.0 reads Delta and Iceberg tables. Download them if necessary: 70 MB.

    Raises:
        PeerUnavailable: ``mvn`` is missing, or the jars could not be downloaded.
    """
    maven, project = _tool("mvn"), SPARK_READERS / "pom.xml"
    folder = BUILD / "spark-readers"

    def build() -> None:
        command = [maven, "-q", "-B", "-f", str(project), "dependency:copy-dependencies"]
        if failure := _run([*command, f"-DoutputDirectory={folder}"]):
            raise PeerUnavailable(f"the jars of {SPARK_READERS} could not be downloaded: {failure}")

    once(folder, [project], build)
    return sorted(folder.glob("*.jar"))


@functools.cache
def nsq_sources() -> Path:
    """Return the folder of NSQ's own sources, in the version that `go.mod` names.

    Raises:
        PeerUnavailable: ``go`` is missing, or the module could not be downloaded.
    """
    go = _tool("go")
    if failure := _run([go, "mod", "download", NSQ]):
        raise PeerUnavailable(f"{NSQ} could not be downloaded: {failure}")
    command = [go, "list", "-m", "-f", "{{.Dir}}", NSQ]
    return Path(subprocess.check_output(command, cwd=INTEROP, text=True, timeout=DEADLINE_S).strip())


@functools.cache
def node_modules() -> Path:
    """Return the folder for NODE_PATH. Install nsqjs into it if necessary.

    Raises:
        PeerUnavailable: ``node`` or ``npm`` is missing, or the packages could not be downloaded.
    """
    return _npm_project("node", INTEROP) / "node_modules"


def _npm_project(name: str, source: Path, *scripts: Path) -> Path:
    """Return the folder of an npm project, with some scripts. Install its packages if necessary.

    Raises PeerUnavailable.
    """
    _tool("node")
    npm = _tool("npm")
    project = BUILD / name
    copied = [source / "package.json", source / "package-lock.json", *scripts]

    def build() -> None:
        for file in copied:
            shutil.copy(file, project)
        command = [npm, "ci", "--prefix", str(project), "--ignore-scripts", "--no-audit", "--no-fund"]
        if failure := _run(command):
            raise PeerUnavailable(f"the npm packages of {source.name} could not be installed: {failure}")

    once(project, copied, build)
    return project


def installed_program(*names: str) -> Path:
    """Return the path of a program that `debian.sh` installs: the first of ``names`` that is installed.

    Raises:
        PeerUnavailable: none of them is installed.
    """
    for name in names:
        if path := shutil.which(name):
            return Path(path)
    raise PeerUnavailable(f"{names[0]} is not installed; as root: make peers")


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise PeerUnavailable(f"{name} is not installed")
    return path


def once(target: Path, inputs: Iterable[Path], build: Callable[[], None]) -> None:
    """Run ``build`` unless the last build into the folder ``target``, below `BUILD`, had the same inputs."""
    if target in _unavailable:
        raise PeerUnavailable(*_unavailable[target].args)
    digest = hashlib.sha256()
    for path in sorted(inputs):
        digest.update(f"{os.path.relpath(path, INTEROP)}\0{path.read_text()}\0".encode())
    stamp = target / ".inputs"
    target.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, even if this process is killed
        if not stamp.exists() or stamp.read_text() != digest.hexdigest():
            stamp.unlink(missing_ok=True)
            try:
                build()
            except PeerUnavailable as reason:
                _unavailable[target] = reason
                raise
            stamp.write_text(digest.hexdigest())


def _run(command: Sequence[str], folder: Path = INTEROP) -> str | None:
    """Run ``command`` in a folder; return None, or the end of its output if it failed."""
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} took longer than {DEADLINE_S} s"
    return None if done.returncode == 0 else (done.stderr or done.stdout)[-2000:].strip()
