"""This broker beside nsqd, or another checkout, in every workload: ratios of one run, and whether they reach the goals.

Rates of a shared machine drift from minute to minute, so for each workload of each round the brokers take turns right
after one another, and what counts are the ratios within a round. README.md beside this file says how to read the table.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.contenders import EVERY_OK, IN_MEMORY, INTERVAL, Contender
from bench.workloads import CONTENDERS, CPU, DISK, WORKLOADS, Figures, Goal, Row, Turn, Workload

from interop.peers import qcli_serve

QUICK_SECONDS, QUICK_SHARE = 0.4, 0.1
SHORT = {INTERVAL.name: "I", EVERY_OK.name: "F"}
MOST_CPU = 1.03
"""What the processor time of a message may come to, as a ratio to that of another checkout."""


@dataclass(frozen=True)
class Result:
    """What one broker did in one round. `broker` is `DISK` for what would be possible."""

    round: int
    workload: str
    broker: str
    flags: Sequence[str]
    figures: Figures


# ------------------------------------------------------------------------------------------ measuring


def measure(workload: Workload, number: int, options: argparse.Namespace) -> list[Result]:
    """One round of a workload. Who begins changes from round to round."""
    results = []
    for name in in_turn(workload.names(), number, options):
        os.sync()  # what the one before has left to write is not to delay this one
        result = measure_disk if name == DISK else measure_broker
        results.append(result(workload, name, number, options))
        told = ", ".join(f"{figure} {shown(value)}" for figure, value in results[-1].figures.items())
        print(f"round {number}: {workload.name}: {name}: {told}", flush=True)
    return results


def in_turn(names: list[str], number: int, options: argparse.Namespace) -> list[str]:
    """Who is measured one after the other. Two checkouts follow each other at once, whichever begins."""
    if options.against:
        pairs = [names[at : at + 2] for at in range(0, len(names), 2)]
        return [name for pair in pairs for name in (pair if number % 2 else reversed(pair))]
    first = (number - 1) % len(names)
    return names[first:] + names[:first]


def measure_broker(workload: Workload, name: str, number: int, options: argparse.Namespace) -> Result:
    """One turn of a broker."""
    contender = options.contenders[name]
    if contender == IN_MEMORY:
        contender = contender.with_flags(*workload.memory_flags)
    turn = Turn(contender, options.data_path, options.seconds, options.share)
    return Result(number, workload.name, name, contender.flags, workload.measure(turn))


def measure_disk(workload: Workload, name: str, number: int, options: argparse.Namespace) -> Result:
    """What the disk allows at this time."""
    assert workload.limit is not None
    return Result(number, workload.name, name, (), workload.limit(options.data_path))


# ------------------------------------------------------------------------------------------ another checkout


def other_checkout(folder: Path) -> dict[str, Contender]:
    """The brokers of another checkout, which has its own `.venv`, under names of their own."""
    python = folder / ".venv" / "bin" / "python"
    if not python.exists():
        sys.exit(f"--against: there is no {python}: run 'make setup' in {folder}")
    start = partial(qcli_serve, python=python)
    return {one.name: replace(one, name=f"{one.name}, there", start=start) for one in (INTERVAL, EVERY_OK)}


def against(workload: Workload, others: dict[str, Contender]) -> Workload:
    """The same work, beside another checkout: each figure in both sync modes, and the processor time."""
    pairs = [(name, other.name) for name, other in others.items()]
    rows = [replace(row, goals=tuple(Goal(ours, other) for ours, other in pairs)) for row in workload.rows]
    if workload.counts_cpu:
        goals = tuple(Goal(ours, other, MOST_CPU) for ours, other in pairs)
        rows.append(Row("  processor time of the broker", CPU, "us/message", goals, less=True))
    return replace(workload, rows=tuple(rows), limit=None)


def with_cpu(workload: Workload) -> Workload:
    """The same with a row for the processor time, which has no goal, beside nsqd in memory."""
    if not workload.counts_cpu:
        return workload
    goals = tuple(Goal(one.name, IN_MEMORY.name) for one in (INTERVAL, EVERY_OK))
    row = Row("  processor time of the broker", CPU, "us/message", goals, less=True)
    return replace(workload, rows=(*workload.rows, row))


# ------------------------------------------------------------------------------------------ what is printed


def ratios(results: Sequence[Result], figure: str, goal: Goal) -> list[float]:
    """Of ours to the other one, for each round."""
    found = {(result.round, result.broker): result.figures[figure] for result in results}
    rounds = sorted({result.round for result in results})
    return [divided(found[number, goal.ours], found[number, goal.other]) for number in rounds]


def divided(one: float, other: float) -> float:
    """`other` may be nothing, as the processor time of a broker that is idle."""
    if other:
        return one / other
    return math.inf if one else 1.0


def reached(row: Row, goal: Goal, ratio: float) -> bool:
    """Whether a ratio is good enough."""
    assert goal.ratio is not None
    return ratio <= goal.ratio if row.less else ratio >= goal.ratio


def lines_of(row: Row, results: Sequence[Result]) -> list[str]:
    """One line for each comparison: who, the medians, the median of the ratios with the spread, and the goal."""
    lines = [f"{row.title}  [{row.unit}{', less is better' if row.less else ''}]"]
    for goal in row.goals:
        ours, other = (
            statistics.median(result.figures[row.figure] for result in results if result.broker == name)
            for name in (goal.ours, goal.other)
        )
        found = ratios(results, row.figure, goal)
        ratio = statistics.median(found)
        spread = f"({shown(min(found))} - {shown(max(found))})"
        verdict = ""
        if goal.ratio is not None:
            verdict = f"{shown(goal.ratio):>6} {'reached' if reached(row, goal, ratio) else 'MISSED'}"
        names = f"{SHORT.get(goal.ours, goal.ours)} : {goal.other}"
        line = f"  {names:<32}{shown(ours):>11} : {shown(other):<11}{shown(ratio):>7} {spread:<18}{verdict}"
        lines.append(line.rstrip())
    return lines


def shown(value: float) -> str:
    """With as many digits as mean something."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def table(workloads: Sequence[Workload], results: Sequence[Result]) -> str:
    """The table README.md explains."""
    legend = "   ".join(f"{short}: {name}" for name, short in SHORT.items())
    lines = [legend, f"{'':<34}{'ours':>11} : {'other':<11}{'ratio':>7} {'(min - max)':<18}{'goal':>6}"]
    goals: list[bool] = []
    for workload in workloads:
        own = [result for result in results if result.workload == workload.name]
        for row in workload.rows if own else ():
            lines += lines_of(row, own)
            goals += [
                reached(row, goal, statistics.median(ratios(own, row.figure, goal)))
                for goal in row.goals
                if goal.ratio is not None
            ]
        if dry := sorted({result.broker for result in own if result.figures.get("ran_dry")}):
            lines.append(f"  too low, for consumers ran out of messages: {', '.join(dry)}")
    return "\n".join([*lines, "", f"{sum(goals)} of {len(goals)} goals reached"])


# ------------------------------------------------------------------------------------------ the program


def parse() -> argparse.Namespace:
    """The options of this run."""
    parser = record.parser(
        __doc__,
        rounds=3,
        only="only these workloads, with commas: " + ", ".join(one.name for one in WORKLOADS),
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="how long a load lasts (default: %(default)s)"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="compare with this other checkout of the project, made ready by 'make setup', and not with nsqd",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round with a fraction of the load, to see that all works; the figures mean little",
    )
    options = parser.parse_args()
    options.share = 1.0
    if options.quick:
        options.rounds, options.seconds, options.share = 1, QUICK_SECONDS, QUICK_SHARE
    wanted = [name for name in options.only.split(",") if name]
    if unknown := set(wanted) - {workload.name for workload in WORKLOADS}:
        parser.error(f"--only: there is no workload {', '.join(sorted(unknown))}; see --help")
    workloads = [workload for workload in WORKLOADS if not wanted or workload.name in wanted]
    options.contenders = CONTENDERS
    if options.against:
        others = other_checkout(options.against.resolve())
        options.contenders = CONTENDERS | {other.name: other for other in others.values()}
        options.workloads = [against(workload, others) for workload in workloads]
    else:
        options.workloads = [with_cpu(workload) for workload in workloads]
    return options


def main() -> None:
    """Measure, print, and write what was asked for."""
    options = parse()
    about = record.begin(options, beside_nsqd=options.against is None)
    results: list[Result] = []
    failed: list[str] = []
    began_s = time.monotonic()
    for number in range(1, options.rounds + 1):
        for workload in options.workloads:
            if number <= workload.rounds:
                try:
                    results += measure(workload, number, options)
                except record.FAILURES as reason:  # what was measured before is not lost
                    failed.append(f"{workload.name} in round {number}")
                    print(f"{failed[-1]} failed: {reason}", file=sys.stderr)
    print("", table(options.workloads, results), f"took {time.monotonic() - began_s:.0f} s", sep="\n")
    settings = {"rounds": options.rounds, "seconds": options.seconds, "share": options.share}
    record.finish(
        {"machine": about, "settings": settings, "results": [asdict(result) for result in results]},
        options,
        "compare",
    )
    if failed:
        sys.exit(f"failed, and left out: {', '.join(failed)}")


if __name__ == "__main__":
    main()
