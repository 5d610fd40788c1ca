"""Shared by the programs of this folder: options, the description of the machine, and saving of results."""

import argparse
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import trio_nsq
from interop.build import PeerUnavailable, go_program
from trio_nsq.protocol import bulk

_ROOT = Path(__file__).parents[1]
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


def begin(
    options: argparse.Namespace, beside_nsqd: bool = True, runs_checkout: bool = True
) -> dict[str, Any]:
    """Print the description of the machine, and return it. SIGTERM ends the program in order from now on.

    Brokers start as those of users do. The copies of a warm Python that tests start have imported everything already:
    they start sooner, and have more memory.

    Exits with `beside_nsqd` if there is no nsqd, with `runs_checkout` if the compiled modules of this checkout are of
    other sources.
    """
    if not options.data_path.is_dir():
        sys.exit(f"--data-path: there is no folder {options.data_path}")
    if runs_checkout and (reason := import_module("hatch_build").stale(_ROOT / "core")):
        sys.exit(reason)
    os.environ["TEST_PROCESSES"] = "new"  # for `processes` of the tests
    # As Ctrl-C: blocks that have started brokers end them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
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
        "python_program": os.path.realpath(sys.executable),
        "trio": version("trio"),
        "trio_nsq": trio_nsq.__version__,
        "commit": _said("git", "-C", str(_ROOT), "describe", "--always", "--dirty"),
        "compiled": _compiled(),
    }


def _compiled() -> str:
    """Return how many modules of the package are compiled."""
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    files = [path for path in (_ROOT / "core").rglob(f"*{suffix}") if f"__mypyc{suffix}" not in path.name]
    return f"{len(files)} modules" if bulk.COMPILED else "no"


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Processors(NamedTuple):
    """Processor time so far, in seconds.

    Attributes:
        all: What there was, idle or not.
        used: What processes, the kernel and other guests of the machine used.
        own: What this program and its ended children used.
    """

    all: float
    used: float
    own: float


def processors() -> Processors:
    """Return the processor time until now."""
    words = Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]  # user to steal
    times_s = [int(word) / os.sysconf("SC_CLK_TCK") for word in words]
    idle_s = times_s[3] + times_s[4]
    ours = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Processors(
        sum(times_s), sum(times_s) - idle_s, sum(usage.ru_utime + usage.ru_stime for usage in ours)
    )


def share_of_others(since: Processors, running_s: float = 0.0) -> float:
    """Return the share of the processors, 0 to 1, that others used: also the kernel's own threads.

    Args:
        since: The processor time at the beginning.
        running_s: What measured processes used that ran at the beginning and still run. The others began and have ended
            meanwhile.
    """
    now = processors()
    others_s = now.used - since.used - (now.own - since.own) - running_s
    return min(max(0.0, others_s / max(now.all - since.all, 1e-9)), 0.99)


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
