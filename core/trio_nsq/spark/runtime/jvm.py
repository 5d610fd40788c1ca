"""A JVM for Spark within this process, started without Spark's own scripts.

They start a JVM only to find out how to start the one that is wanted, and they have Python workers import pyspark out
of a zip file; without them an export begins in half the time. What is relied on are pyspark's internals: whoever calls
this goes back to the scripts if it fails.
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
"""Packages of java.base that Spark looks into."""
_UNSAFE_SINCE = 24
"""From this version on Java wants to be told that this is meant."""
_FLAGS = (
    # It starts sooner so, and has little to do: the work is done in Python.
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-Djdk.reflect.useDirectMethodHandle=false",
    "-Dio.netty.tryReflectionSetAccessible=true",
)


class NotStarted(Exception):
    """The JVM ended, or did not say where it listens."""


class LocalJvm(NamedTuple):
    """A JVM that runs; it ends when its standard input is closed, and so when this process ends, however it does.

    Attributes:
        process: It.
        port: Where it listens, on loopback.
        secret: What it wants to be told first.
    """

    process: subprocess.Popen[bytes]
    port: int
    secret: str


def start_jvm(java_home: Path, pyspark_folder: Path, conf: Mapping[str, str], log: IO[bytes]) -> LocalJvm:
    """Start it, and wait until it listens.

    Args:
        java_home: Of Java 17 or newer.
        pyspark_folder: Where pyspark is installed.
        conf: Of Spark.
        log: A file for what it says.

    Raises:
        NotStarted, OSError: It does not start.
    """
    folder = Path(tempfile.mkdtemp(prefix="trio-nsq-jvm-"))
    try:
        info = folder / "info"
        env = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
        env |= {"_PYSPARK_DRIVER_CONN_INFO_PATH": str(info), "PYTHONHASHSEED": "0", "SPARK_CONNECT_MODE": "0"}
        # In a session of its own: an interrupt from the terminal is for us.
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
            process.communicate()  # closes its standard input, too
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
    """Port and secret, which it writes to a file that it then gives this name."""
    given_up_at_s = time.monotonic() + START_TIMEOUT_S
    while not info.exists():
        if process.poll() is not None or time.monotonic() > given_up_at_s:
            raise NotStarted
        time.sleep(_POLL_S)
    data = info.read_bytes()
    port, length = struct.unpack_from(">ii", data)
    return port, data[8 : 8 + length].decode()
