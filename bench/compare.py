"""Compare this broker with nsqd, or with another checkout, in all workloads: ratios, and whether they reach the goals.

Rates on a shared machine drift, so for each workload of each round the brokers run directly after one another; compare
the ratios within a round. README.md in this folder explains the table.
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
"""The limit of the processor time per message, as a ratio to the other checkout."""


@dataclass(frozen=True)
class Result:
    """The figures of one broker in one round. If `broker` is `DISK`, the limit of the disk."""

    round: int
    workload: str
    broker: str
    flags: Sequence[str]
    figures: Figures


# ------------------------------------------------------------------------------------------ measuring


def measure(workload: Workload, number: int, options: argparse.Namespace) -> list[Result]:
    """Measure one round of a workload. The order of the brokers changes from round to round."""
    results = []
    for name in in_turn(workload.names(), number, options):
        os.sync()  # dirty pages of the previous broker must not delay this one
        result = measure_disk if name == DISK else measure_broker
        results.append(result(workload, name, number, options))
        told = ", ".join(f"{figure} {shown(value)}" for figure, value in results[-1].figures.items())
        print(f"round {number}: {workload.name}: {name}: {told}", flush=True)
    return results


def in_turn(names: list[str], number: int, options: argparse.Namespace) -> list[str]:
    """Return the order of the brokers. Two checkouts always run directly after one another."""
    if options.against:
        pairs = [names[at : at + 2] for at in range(0, len(names), 2)]
        return [name for pair in pairs for name in (pair if number % 2 else reversed(pair))]
    first = (number - 1) % len(names)
    return names[first:] + names[:first]


def measure_broker(workload: Workload, name: str, number: int, options: argparse.Namespace) -> Result:
    """Measure one broker once."""
    contender = options.contenders[name]
    if contender == IN_MEMORY:
        contender = contender.with_flags(*workload.memory_flags)
    turn = Turn(contender, options.data_path, options.seconds, options.share)
    return Result(number, workload.name, name, contender.flags, workload.measure(turn))


def measure_disk(workload: Workload, name: str, number: int, options: argparse.Namespace) -> Result:
    """Measure the current limit of the disk."""
    assert workload.limit is not None
    return Result(number, workload.name, name, (), workload.limit(options.data_path))


# ------------------------------------------------------------------------------------------ another checkout


def other_checkout(folder: Path) -> dict[str, Contender]:
    """Return the brokers of another checkout with its own `.venv`, under separate names."""
    python = folder / ".venv" / "bin" / "python"
    if not python.exists():
        sys.exit(f"--against: there is no {python}: run 'make setup' in {folder}")
    start = partial(qcli_serve, python=python)
    return {one.name: replace(one, name=f"{one.name}, there", start=start) for one in (INTERVAL, EVERY_OK)}


def against(workload: Workload, others: dict[str, Contender]) -> Workload:
    """Return the workload for another checkout: each figure in both sync modes, and the processor time."""
    pairs = [(name, other.name) for name, other in others.items()]
    rows = [replace(row, goals=tuple(Goal(ours, other) for ours, other in pairs)) for row in workload.rows]
    if workload.counts_cpu:
        goals = tuple(Goal(ours, other, MOST_CPU) for ours, other in pairs)
        rows.append(Row("  processor time of the broker", CPU, "us/message", goals, less=True))
    return replace(workload, rows=tuple(rows), limit=None)


def with_cpu(workload: Workload) -> Workload:
    """Add a row for the processor time compared with nsqd in memory, without a goal."""
    if not workload.counts_cpu:
        return workload
    goals = tuple(Goal(one.name, IN_MEMORY.name) for one in (INTERVAL, EVERY_OK))
    row = Row("  processor time of the broker", CPU, "us/message", goals, less=True)
    return replace(workload, rows=(*workload.rows, row))


# ------------------------------------------------------------------------------------------ output


def ratios(results: Sequence[Result], figure: str, goal: Goal) -> list[float]:
    """Return the ratio of our figure to the other broker's, for each round."""
    found = {(result.round, result.broker): result.figures[figure] for result in results}
    rounds = sorted({result.round for result in results})
    return [divided(found[number, goal.ours], found[number, goal.other]) for number in rounds]


def divided(one: float, other: float) -> float:
    """Divide; `other` may be 0, such as the processor time of an idle broker."""
    if other:
        return one / other
    return math.inf if one else 1.0


def reached(row: Row, goal: Goal, ratio: float) -> bool:
    """Whether a ratio reaches the goal."""
    assert goal.ratio is not None
    return ratio <= goal.ratio if row.less else ratio >= goal.ratio


def lines_of(row: Row, results: Sequence[Result]) -> list[str]:
    """Format a line for each comparison: brokers, medians, the median ratio with its spread, and the goal."""
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
    """Format a value with its significant digits."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def table(workloads: Sequence[Workload], results: Sequence[Result]) -> str:
    """Format the table; README.md explains it."""
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
            lines.append(f"  too low, because consumers ran out of messages: {', '.join(dry)}")
    return "\n".join([*lines, "", f"{sum(goals)} of {len(goals)} goals reached"])


# ------------------------------------------------------------------------------------------ the program


def parse() -> argparse.Namespace:
    """Parse the options."""
    parser = record.parser(
        __doc__,
        rounds=3,
        only="only these workloads, separated by commas: " + ", ".join(one.name for one in WORKLOADS),
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="how long a load lasts (default: %(default)s)"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="compare with this other checkout of the project, prepared with 'make setup', instead of nsqd",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round with a fraction of the load, to check that everything works; the figures are not meaningful",
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
    """Measure, print, and write the requested results."""
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
                except record.FAILURES as reason:  # keep the earlier measurements
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
        sys.exit(f"failed and skipped: {', '.join(failed)}")


if __name__ == "__main__":
    main()
