"""Compare this broker with nsqd in all workloads: ratios, processor time per message, and whether they reach the goals.

Rates on a shared machine drift, so for each workload of each round the brokers run directly after one another; compare
the ratios within a round. README.md in this folder explains the table. `quick.py` compares two versions of this broker.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import loads, record
from bench.contenders import EVERY_OK, IN_MEMORY, INTERVAL
from bench.verdicts import FEWEST_ROUNDS, MISSED, REACHED, TOO_NOISY, judge_goal
from bench.workloads import CONTENDERS, CPU, WORKLOADS, Figures, Goal, Row, Turn, Workload

QUICK_SECONDS, QUICK_SHARE = 0.4, 0.1
SHORT = {INTERVAL.name: "I", EVERY_OK.name: "F"}
OTHERS = "others"
"""The share of the processors that other processes took during a measurement, 0 to 1."""


@dataclass(frozen=True)
class Result:
    """The figures of one broker in one round. With one of the workload's `limits` as `broker`, those of the disk."""

    round: int
    workload: str
    broker: str
    flags: Sequence[str]
    figures: Figures


@dataclass(frozen=True)
class Comparison:
    """One line of the table.

    Attributes:
        workload, figure, unit: Of the row.
        ours, other: The names of the brokers.
        median_ours, median_other: Their medians.
        ratios: Our figure divided by the other one, by round.
        cpu_us: The medians of the processor time per message of both, in microseconds; None for the disk.
        cpu_ratios: Ours divided by the other one, by round; empty if one of them is None.
        others: The median share of the processors that other processes took, 0 to 1.
        goal: The required ratio; None: there is none.
        verdict: Of `judge_goal`; empty without a goal.
    """

    workload: str
    figure: str
    unit: str
    ours: str
    other: str
    median_ours: float
    median_other: float
    ratios: list[float]
    cpu_us: tuple[float | None, float | None]
    cpu_ratios: list[float]
    others: float
    goal: float | None
    verdict: str


# ------------------------------------------------------------------------------------------ measuring


def measure(workload: Workload, number: int, options: argparse.Namespace) -> list[Result]:
    """Measure one round of a workload. The order of the brokers changes from round to round."""
    results = []
    names = workload.names()
    first = (number - 1) % len(names)
    for name in names[first:] + names[:first]:
        os.sync()  # dirty pages of the previous broker must not delay this one
        before = record.processors()
        if name in workload.limits:
            flags: Sequence[str] = ()
            figures = workload.limits[name](options.data_path, options.seconds)
        else:
            contender = CONTENDERS[name]
            if contender == IN_MEMORY:
                contender = contender.with_flags(*workload.memory_flags)
            flags = contender.flags
            figures = workload.measure(Turn(contender, options.data_path, options.seconds, options.share))
        figures |= {OTHERS: record.share_of_others(before)}
        results.append(Result(number, workload.name, name, flags, figures))
        told = ", ".join(f"{figure} {shown(value)}" for figure, value in figures.items())
        print(f"round {number}: {workload.name}: {name}: {told}", flush=True)
    return results


# ------------------------------------------------------------------------------------------ comparing


def compared(row: Row, goal: Goal, results: Sequence[Result]) -> Comparison:
    """Compare two brokers in the results of one workload."""
    found = {(result.round, result.broker): result.figures for result in results}
    rounds = sorted({result.round for result in results})
    ours, other = ([found[number, name] for number in rounds] for name in (goal.ours, goal.other))
    ratios = _ratios(ours, other, row.figure)
    cpu_us = tuple(
        statistics.median(figures[CPU] for figures in side) if CPU in side[0] else None
        for side in (ours, other)
    )
    cpu_ratios = [] if None in cpu_us else _ratios(ours, other, CPU)
    others = statistics.median(figures[OTHERS] for figures in ours + other)
    verdict = ""
    if goal.ratio is not None:
        verdict = judge_goal(ratios, goal.ratio, less=row.less, cpu_ratios=cpu_ratios, others=others)
    return Comparison(
        results[0].workload,
        row.figure,
        row.unit,
        goal.ours,
        goal.other,
        statistics.median(figures[row.figure] for figures in ours),
        statistics.median(figures[row.figure] for figures in other),
        ratios,
        (cpu_us[0], cpu_us[1]),
        cpu_ratios,
        others,
        goal.ratio,
        verdict,
    )


def _ratios(ours: Sequence[Figures], other: Sequence[Figures], figure: str) -> list[float]:
    return [divided(one[figure], its[figure]) for one, its in zip(ours, other, strict=True)]


def divided(one: float, other: float) -> float:
    """Divide; `other` may be 0, such as the processor time of an idle broker."""
    if other:
        return one / other
    return math.inf if one else 1.0


def comparisons(
    workloads: Sequence[Workload], results: Sequence[Result]
) -> list[tuple[Row, list[Comparison]]]:
    """Return the rows of the table with their lines."""
    found = []
    for workload in workloads:
        if own := [result for result in results if result.workload == workload.name]:
            found += [(row, [compared(row, goal, own) for goal in row.goals]) for row in workload.rows]
    return found


# ------------------------------------------------------------------------------------------ output


def line_of(one: Comparison) -> str:
    """Format a comparison."""
    names = f"{SHORT.get(one.ours, one.ours)} : {one.other}"
    spread = f"({shown(min(one.ratios))} - {shown(max(one.ratios))})"
    cpu = " : ".join("-" if cpu_us is None else shown(cpu_us) for cpu_us in one.cpu_us)
    goal = "" if one.goal is None else f"{shown(one.goal):>6} {one.verdict}"
    ratio = shown(statistics.median(one.ratios))
    return (
        f"  {names:<30}{shown(one.median_ours):>10} : {shown(one.median_other):<10}{ratio:>6} {spread:<16}"
        f"{cpu if one.cpu_us != (None, None) else '':>15}{goal}"
    ).rstrip()


def shown(value: float) -> str:
    """Format a value with its significant digits."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def table(rows: Sequence[tuple[Row, list[Comparison]]], results: Sequence[Result]) -> str:
    """Format the table; README.md explains it."""
    legend = "   ".join(f"{short}: {name}" for name, short in SHORT.items())
    lines = [
        legend,
        f"{'':<32}{'ours':>10} : {'other':<10}{'ratio':>6} {'(min - max)':<16}{'CPU us/message':>15}{'goal':>6}",
    ]
    for row, own in rows:
        lines.append(f"{row.title}  [{row.unit}{', less is better' if row.less else ''}]")
        lines += [line_of(one) for one in own]
    for result in results:
        if result.figures.get("ran_dry"):
            about = f"{result.workload}, round {result.round}, {result.broker}"
            lines.append(f"{about}: too low, because consumers ran out of messages")
    others = statistics.median([result.figures[OTHERS] for result in results] or [0.0])
    return "\n".join(
        [*lines, "", f"other processes took {100 * others:.0f} % of the processors", summary(rows)]
    )


def summary(rows: Sequence[tuple[Row, list[Comparison]]]) -> str:
    """Count the verdicts on the goals."""
    verdicts = [one.verdict for _, own in rows for one in own if one.goal is not None]
    if not all(verdicts):
        return f"no verdicts on {len(verdicts)} goals: they need {FEWEST_ROUNDS} rounds"
    counts = (f"{verdicts.count(verdict)} {verdict}" for verdict in (REACHED, MISSED, TOO_NOISY))
    return f"{len(verdicts)} goals: {', '.join(counts)}"


# ------------------------------------------------------------------------------------------ the program


def parse() -> argparse.Namespace:
    """Parse the options."""
    parser = record.parser(
        __doc__,
        rounds=FEWEST_ROUNDS,
        only="only these workloads, separated by commas: " + ", ".join(one.name for one in WORKLOADS),
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="how long a load lasts (default: %(default)s)"
    )
    parser.add_argument(
        "--load-processors",
        type=_processors,
        default=set(),
        metavar="N,...",
        help="processors of the load generators, such as 1; brokers use all of them (default: all for both)",
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
    options.workloads = [workload for workload in WORKLOADS if not wanted or workload.name in wanted]
    return options


def _processors(words: str) -> set[int]:
    found = {int(word) for word in words.split(",")}
    if unknown := found - os.sched_getaffinity(0):
        raise argparse.ArgumentTypeError(f"there is no processor {min(unknown)}")
    return found


def main() -> None:
    """Measure, print, and write the requested results."""
    options = parse()
    loads.keep_to(options.load_processors)
    about = record.begin(options)
    results: list[Result] = []
    failed: list[str] = []
    began_s = time.monotonic()
    for number in range(1, options.rounds + 1):
        for workload in options.workloads:
            try:
                results += measure(workload, number, options)
            except record.FAILURES as reason:  # keep the earlier measurements
                failed.append(f"{workload.name} in round {number}")
                print(f"{failed[-1]} failed: {reason}", file=sys.stderr)
    rows = comparisons(options.workloads, results)
    print("", table(rows, results), f"took {time.monotonic() - began_s:.0f} s", sep="\n")
    kept: dict[str, Any] = {
        "machine": about,
        "settings": {
            "rounds": options.rounds,
            "seconds": options.seconds,
            "share": options.share,
            "load_processors": sorted(options.load_processors),
        },
        "comparisons": [asdict(one) | {"title": row.title} for row, own in rows for one in own],
        "results": [asdict(result) for result in results],
    }
    record.finish(kept, options, "compare")
    if failed:
        sys.exit(f"failed and skipped: {', '.join(failed)}")


if __name__ == "__main__":
    main()
