"""Run pytest with the plugin in small projects, as the plugin's users do."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PATIENCE_S = 240


def run_pytest(
    folder: Path, *options: str, files: dict[str, str], before: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Write the files of a project and run pytest there, with no other plugins than those that the options name.

    Args:
        before: Options before the one that loads the plugin.
    """
    for name, text in files.items():
        (folder / name).write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *before,
        "-p",
        "pytest_trio_nsq",
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [*command, f"--basetemp={folder / 'temporary'}", *options],
        cwd=folder,
        env=env | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of the processes that work in a folder."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if (process / "cwd").readlink().is_relative_to(folder):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            pass  # it has ended
    return found
