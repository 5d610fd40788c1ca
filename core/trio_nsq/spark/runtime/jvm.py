"""Start a JVM for Spark in this process, without Spark's own scripts.

The scripts start another JVM only to build a command line, and make Python workers import pyspark from a zip file;
without them an export starts in half the time. This relies on internals of pyspark, so callers use the scripts if it
fails.
"""

import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

from .java import java_version

START_TIMEOUT_S = 120.0
_POLL_S = 0.02
_OPENED = (
    *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio", "java.util"),
    *("java.util.concurrent", "java.util.concurrent.atomic", "jdk.internal.ref", "sun.nio.ch", "sun.nio.cs"),
    *("sun.security.action", "sun.util.calendar"),
)
"""Packages of java.base that Spark accesses by reflection."""
_UNSAFE_SINCE = 24
"""The first version of Java that needs flags for this."""
_FLAGS = (
    # A faster start; the JVM has little to do, as tasks run in Python.
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-Djdk.reflect.useDirectMethodHandle=false",
    "-Dio.netty.tryReflectionSetAccessible=true",
)


class NotStarted(Exception):
    """The JVM ended, or did not report its port."""


class LocalJvm(NamedTuple):
    """A running JVM. It exits when its stdin is closed, and so also when this process is killed.

    Attributes:
        process: The process.
        port: Its port on the loopback address.
        secret: The secret that authenticates clients.
    """

    process: subprocess.Popen[bytes]
    port: int
    secret: str


def start_jvm(java_home: Path, pyspark_folder: Path, conf: Mapping[str, str], log: IO[bytes]) -> LocalJvm:
    """Start a JVM, and wait until it listens.

    Args:
        java_home: The home of Java 17 or newer.
        pyspark_folder: The folder of pyspark.
        conf: The configuration of Spark.
        log: A file for stdout and stderr.

    Raises:
        NotStarted, OSError: It does not start.
    """
    folder = Path(tempfile.mkdtemp(prefix="trio-nsq-jvm-"))
    try:
        info = folder / "info"
        env = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
        env |= {"_PYSPARK_DRIVER_CONN_INFO_PATH": str(info), "PYTHONHASHSEED": "0", "SPARK_CONNECT_MODE": "0"}
        # In its own session, so that Ctrl-C in the terminal reaches only this process.
        process = subprocess.Popen(
            _command(java_home, pyspark_folder, conf),
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
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _command(java_home: Path, pyspark_folder: Path, conf: Mapping[str, str]) -> list[str]:
    words = [str(java_home / "bin" / "java"), "-cp", f"{pyspark_folder}/jars/*"]
    words += [f"-Xmx{conf['spark.driver.memory']}", *_FLAGS]
    words += [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
    if java_version(java_home) >= _UNSAFE_SINCE:
        words += ["--sun-misc-unsafe-memory-access=allow", "--enable-native-access=ALL-UNNAMED"]
    words.append("org.apache.spark.deploy.SparkSubmit")
    for name, value in conf.items():
        words += ["--conf", f"{name}={value}"]
    return [*words, "pyspark-shell"]


def _connection_info(process: subprocess.Popen[bytes], info: Path) -> tuple[int, str]:
    """The port and the secret, which the JVM writes to a file and then renames to this name."""
    given_up_at_s = time.monotonic() + START_TIMEOUT_S
    while not info.exists():
        if process.poll() is not None or time.monotonic() > given_up_at_s:
            raise NotStarted
        time.sleep(_POLL_S)
    data = info.read_bytes()
    port, length = struct.unpack_from(">ii", data)
    return port, data[8 : 8 + length].decode()
