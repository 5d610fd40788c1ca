"""Compare a version of this broker with another one, main by default, in two minutes: processor time per message.

Both versions run at the same time and get short loads in turn. README.md in this folder explains the table.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.compare import shown
from bench.contenders import EVERY_OK, INTERVAL, cpu_s
from bench.verdicts import (
    CHANGE_COVERAGE,
    FEWEST_CHANGE_ROUNDS,
    SLOWER,
    judge_change,
    median_interval,
)
from bench.versions import ROOT, build
from bench.workloads import CPU, WORKLOADS, Turn, Workload

from interop.peers import Broker, qcli_serve

MODES = {"I": INTERVAL, "F": EVERY_OK}
QUICK = {
    "I": ("publish-batch-2", "publish-one-2", "publish-one-200", "consume", "fan-out", "topics", "http-pub"),
    "F": ("publish-batch-32", "publish-one-200"),
}
"""The workloads without `--only`, by the setting for syncs."""
NEEDS_OWN_BROKER = ("queued", "idle")
SHARE = 0.2
"""The fraction of the load, for workloads with a number of messages."""
ENOUGH, LONGEST = 0.5, 10
"""A load lasts longer if the broker does not get this share of a processor meanwhile: up to so many times."""
HERE = str(ROOT)
ROUNDS_OF_A_PROCESS = 3
"""Two processes of the same version differ by some percent, so there are several of each."""


@dataclass(frozen=True, eq=False)
class Case:
    """A workload with a setting for syncs."""

    mode: str
    workload: Workload

    @property
    def name(self) -> str:
        return f"{self.mode}: {self.workload.name}"


@dataclass(frozen=True)
class RunningTurn(Turn):
    """A turn on a broker that keeps running. It is empty again at the end."""

    running: Broker

    @contextmanager
    def broker(self, prepare: Callable[[Broker], None] | None = None) -> Iterator[Broker]:
        """Yield the broker, and delete its topics at the end."""
        if prepare is not None:
            prepare(self.running)
        yield self.running
        stats = json.loads(self.running.http("GET", "/stats", format="json", include_mem="false"))
        for topic in stats["topics"]:
            self.running.http("POST", "/topic/delete", topic=topic["topic_name"])


@dataclass(frozen=True)
class Result:
    """The processor time per message of both versions in one round, in microseconds."""

    round: int
    case: str
    new_us: float
    base_us: float


# ------------------------------------------------------------------------------------------ measuring


def measure(numbers: Sequence[int], cases: Sequence[Case], options: argparse.Namespace) -> Iterator[Result]:
    """Measure some rounds with the same processes."""
    with ExitStack() as stack:
        brokers: dict[tuple[str, str], Broker] = {}
        for mode in sorted({case.mode for case in cases}):
            for side, version in options.versions.items():
                start = partial(qcli_serve, python=version.python, env=version.environment)
                contender = replace(MODES[mode], start=start)
                brokers[mode, side] = stack.enter_context(contender.running(options.data_path))

        def load(case: Case, side: str, seconds: float) -> float:
            contender = replace(MODES[case.mode], name=f"{case.mode}, {side}")
            turn = RunningTurn(contender, options.data_path, seconds, SHARE, brokers[case.mode, side])
            return case.workload.measure(turn)[CPU]

        # On a busy machine a load of a fixed time is a few messages, and the connections are most of its cost.
        seconds = dict.fromkeys(cases, options.seconds)
        for case in cases:
            for side in ("new", "base"):
                before_s = cpu_s(brokers[case.mode, side])
                load(case, side, options.seconds)
                factor = ENOUGH * options.seconds / (cpu_s(brokers[case.mode, side]) - before_s)
                seconds[case] = max(seconds[case], options.seconds * min(factor, LONGEST))
        for number in numbers:
            first, second = ("new", "base") if number % 2 else ("base", "new")
            for case in cases:
                found: dict[str, list[float]] = {"new": [], "base": []}
                for side in (first, second, second, first):  # a steady drift is the same for both
                    found[side].append(load(case, side, seconds[case]))
                new_us, base_us = (statistics.fmean(found[side]) for side in ("new", "base"))
                yield Result(number, case.name, new_us, base_us)


# ------------------------------------------------------------------------------------------ output


def table(results: Sequence[Result]) -> tuple[str, list[dict[str, Any]]]:
    """Return the table, and its lines as they are kept."""
    lines = [f"{'CPU us/message':<24}{'new':>9} : {'base':<9}{'ratio':>6} (interval)        verdict"]
    kept: list[dict[str, Any]] = []
    for name in dict.fromkeys(result.case for result in results):
        own = [result for result in results if result.case == name]
        ratios = [result.new_us / result.base_us for result in own]
        low, high = median_interval(ratios, CHANGE_COVERAGE)
        new_us, base_us = (
            statistics.median(getattr(each, side) for each in own) for side in ("new_us", "base_us")
        )
        ratio, verdict = statistics.median(ratios), judge_change(ratios)
        interval = f"({low:.2f} - {high:.2f})"
        lines.append(
            f"{name:<24}{shown(new_us):>9} : {shown(base_us):<9}{ratio:>6.2f} {interval:<18}{verdict}".rstrip()
        )
        kept.append(
            {"case": name, "new_us": new_us, "base_us": base_us, "ratio": ratio, "low": low, "high": high}
            | {"verdict": verdict}
        )
    return "\n".join(lines), kept


# ------------------------------------------------------------------------------------------ the program


def parse() -> argparse.Namespace:
    """Parse the options."""
    names = [one.name for one in WORKLOADS if one.name not in NEEDS_OWN_BROKER]
    parser = record.parser(
        __doc__, rounds=12, only="only these workloads, in both settings for syncs: " + ", ".join(names)
    )
    parser.add_argument(
        "--base", default="main", help="the version to compare with: a revision or a checkout (default: main)"
    )
    parser.add_argument(
        "--new", default=HERE, help="the compared version, also a revision or a checkout (default: this one)"
    )
    for side in ("base", "new"):
        parser.add_argument(
            f"--{side}-python",
            default=sys.executable,
            metavar="PATH",
            help=f"the Python of --{side}, of an environment that make setup has made (default: this one)",
        )
    parser.add_argument("--pure", action="store_true", help="compile neither of them")
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="how long a load lasts (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.rounds < FEWEST_CHANGE_ROUNDS:
        parser.error(f"--rounds: a verdict needs {FEWEST_CHANGE_ROUNDS} rounds")
    wanted = [name for name in options.only.split(",") if name]
    if unknown := set(wanted) - set(names):
        parser.error(f"--only: there is no workload {', '.join(sorted(unknown))}; see --help")
    options.cases = [
        Case(mode, workload)
        for mode, usual in QUICK.items()
        for workload in WORKLOADS
        if workload.name in (wanted or usual)
    ]
    try:
        options.versions = {
            "new": build(options.new, pure=options.pure, python=options.new_python),
            "base": build(options.base, pure=options.pure, python=options.base_python),
        }
    except RuntimeError as reason:
        parser.error(str(reason))
    return options


def main() -> None:
    """Measure, print, and write the requested results. Exit with 1 if a workload is slower."""
    options = parse()
    about = record.begin(options, beside_nsqd=False, runs_checkout=False)
    for side, version in options.versions.items():
        print(f"{side}: {version.name}: {version.says}")
    new, base = options.versions.values()
    if new.digest == base.digest:
        print("Both have the same sources: a difference would be an error of the measurement.")
    if ("not compiled" in new.says) != ("not compiled" in base.says):
        print("Only one of them is compiled: the ratios show that difference, too.")
    results: list[Result] = []
    began_s = time.monotonic()
    numbers = range(1, options.rounds + 1)
    for start in range(0, options.rounds, ROUNDS_OF_A_PROCESS):
        results += measure(numbers[start : start + ROUNDS_OF_A_PROCESS], options.cases, options)
        print(
            f"round {results[-1].round} of {options.rounds}: {time.monotonic() - began_s:.0f} s",
            file=sys.stderr,
        )
    text, lines = table(results)
    print(text, f"took {time.monotonic() - began_s:.0f} s", sep="\n")
    kept = {
        "machine": about,
        "versions": {
            side: {"name": version.name, "digest": version.digest, "says": version.says}
            for side, version in options.versions.items()
        },
        "settings": {"rounds": options.rounds, "seconds": options.seconds, "share": SHARE},
        "comparisons": lines,
        "results": [asdict(result) for result in results],
    }
    record.finish(kept, options, "quick")
    if slower := [line["case"] for line in lines if line["verdict"] == SLOWER]:
        sys.exit(f"slower: {', '.join(slower)}. make stages names the stage.")


if __name__ == "__main__":
    main()
