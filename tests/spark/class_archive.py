"""The archive of Spark's classes that `qcli spark prepare` writes. With it, a JVM starts in half the processor time.

To write it takes as long as ten starts. A test does so if the sources of the command, Java or Spark have changed, and
keeps it with the peers in `tests/interop/.build`. The other tests use it if it is there.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyspark
import pytest

import qcli
import trio_nsq
from interop.build import BUILD, once
from trio_nsq.spark.runtime import java

_SOURCES = (
    Path(qcli.__path__[0]) / "commands" / "spark.py",
    *(Path(trio_nsq.__path__[0]) / "spark" / "runtime").glob("*.py"),
)
_TIMEOUT_S = 250


class ClassArchive(NamedTuple):
    """An archive that a run of `qcli spark prepare` has written.

    Attributes:
        cache: The folder for XDG_CACHE_HOME.
        diagnostics: What the run wrote to stderr.
    """

    cache: Path
    diagnostics: str


def _cache() -> Path:
    """Return the folder for XDG_CACHE_HOME. Raises NoJava."""
    home, _ = java.find_java_home()
    return BUILD / java.class_archive(home, Path(pyspark.__path__[0])).stem


def class_archive() -> ClassArchive:
    """Return the archive for the Java and Spark of the tests. Write it if it is of other sources, or missing.

    Raises:
        NoJava: There is no Java.
        SubprocessError: `qcli spark prepare` failed.
    """
    cache = _cache()
    diagnostics = cache / "diagnostics"

    def build() -> None:
        shutil.rmtree(cache / "trio-nsq", ignore_errors=True)
        command = [sys.executable, "-m", "qcli", "spark", "prepare"]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        with diagnostics.open("w") as stderr:
            subprocess.run(command, env=environment, stderr=stderr, timeout=_TIMEOUT_S, check=True)

    once(cache, _SOURCES, build)
    return ClassArchive(cache, diagnostics.read_text())


@contextmanager
def fast_starts() -> Iterator[None]:
    """Let each JVM that starts in the block use the archive, if it has been written."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            patch.setenv("XDG_CACHE_HOME", str(_cache()))
        except java.NoJava:
            pass
        yield
