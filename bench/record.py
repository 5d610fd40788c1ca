"""Shared by the programs of this folder: options, the description of the machine, and saving of results."""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import trio_nsq
from interop.build import PeerUnavailable, go_program
from trio_nsq.protocol import bulk

FAILURES = (RuntimeError, OSError, subprocess.SubprocessError, pytest.fail.Exception)
"""Failures of the load or a broker, the last one of starting or stopping a broker. Earlier measurements are kept."""


def parser(doc: str | None, *, rounds: int | None = None, only: str = "") -> argparse.ArgumentParser:
    """Make a parser with the common options.

    Args:
        doc: The docstring of the program; its first line is the description.
        rounds: The default of `--rounds`; None: no such option.
        only: The help of `--only`; empty: no such option.
    """
    options = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if rounds is not None:
        options.add_argument(
            "--rounds", type=int, default=rounds, help="measurements of each (default: %(default)s)"
        )
    if only:
        options.add_argument("--only", default="", help=only)
    options.add_argument("--json", type=Path, metavar="FILE", help="write the raw results to FILE")
    options.add_argument("--keep", action="store_true", help="write the raw results to bench/results/")
    options.add_argument(
        "--data-path",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder for the brokers' data; use a disk, because syncing in memory is free (default: %(default)s)",
    )
    return options


def begin(options: argparse.Namespace, beside_nsqd: bool = True) -> dict[str, Any]:
    """Print the description of the machine, and return it.

    Exits if the program needs nsqd and there is none.
    """
    if not options.data_path.is_dir():
        sys.exit(f"--data-path: there is no folder {options.data_path}")
    about = _machine(options.data_path)
    if beside_nsqd:
        try:
            about["nsqd"] = _said(str(go_program("nsqd")), "--version")
        except PeerUnavailable as reason:
            sys.exit(f"nsqd is not available for comparison: {reason}")
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n", flush=True)
    return about


def _machine(data_path: Path) -> dict[str, Any]:
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": models[0] if models else platform.processor(),
        "cpu_count": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "data_file_system": _said("stat", "-f", "-c", "%T", str(data_path)),
        "python": platform.python_version(),
        "trio_nsq": trio_nsq.__version__,
        "compiled": bulk.COMPILED,
    }


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def finish(record: dict[str, Any], options: argparse.Namespace, kind: str) -> None:
    """Write the results as `--json` and `--keep` request; `kind` is part of the file name for `--keep`."""
    files = [options.json] if options.json else []
    if options.keep:
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%SZ")
        files.append(Path(__file__).parent / "results" / f"{stamp}-{kind}-{os.cpu_count()}cpu.json")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n")
        print(f"written to {file}")
