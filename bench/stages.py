"""Measure the broker's processor time per message, stage by stage: the table names the stage that became slower.

Each stage runs in a process without a broker or clients, through the interfaces that the broker uses. README.md in this
folder explains the stages and the table.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.stage_worker import STAGES

NAMES = [f"{name} x {batch}" for name, (_, batches) in STAGES.items() for batch in batches]
BLOCKS = 3
"""Measurements of a stage in one process with `--against`; both processes take turns."""
LEAST = 0.05
"""A smaller difference is none: between two runs of the same checkout, one of 46 stages differed by 3 %."""
PATIENCE_S = 60


class Worker:
    """A process that measures stages of one checkout.

    Attributes:
        about: Its `folder`, its `python`, its `compiled` modules, and the number of its `modules`.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.about: dict[str, Any] = self._answer()

    def measure(self, name: str, repeats: int) -> list[float] | None:
        """Return the nanoseconds per message of each repeat; None if the checkout does not have this stage.

        Raises:
            RuntimeError: The process ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{repeats} {name}\n")
        self._process.stdin.flush()
        found = self._answer()
        if isinstance(found, dict):
            print(f"{name}: not in {self.about['folder']}: {found['error']}", file=sys.stderr)
            return None
        return [float(each) for each in found]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self._process.args!r} ended with code {self._process.wait(PATIENCE_S)}")
        return json.loads(line)


@contextmanager
def working(python: Path | str, data_path: Path) -> Iterator[Worker]:
    """Run a worker with a Python, which imports its own checkout's library."""
    command = [str(python), str(Path(__file__).with_name("stage_worker.py")), str(data_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONHASHSEED": "0"}, text=True
    ) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


# ------------------------------------------------------------------------------------------ one checkout


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Measure all stages of this checkout, and print a line for each: median, and the middle 80 % of the repeats."""
    print(f"\n{'':<38}{'ns/message':>12}{'from':>10}{'to':>10}")
    found = {}
    with working(sys.executable, options.data_path) as worker:
        tell(worker)
        for name in options.stages:
            figures = worker.measure(name, options.repeats)
            assert figures is not None
            found[name] = figures
            low, high = middle(figures)
            print(f"{name:<38}{statistics.median(figures):>12,.0f}{low:>10,.0f}{high:>10,.0f}", flush=True)
    return found


def tell(worker: Worker) -> None:
    """Print which form of the library is measured."""
    about = worker.about
    form = f"{len(about['compiled'])} of {about['modules']} modules compiled" if about["compiled"] else "pure"
    print(f"{about['folder']}: {form}, Python {about['python']}", flush=True)


def middle(figures: Sequence[float]) -> tuple[float, float]:
    """Return the limits of the middle 80 %."""
    ordered = sorted(figures)
    apart = len(ordered) // 10
    return ordered[apart], ordered[-1 - apart]


# ------------------------------------------------------------------------------------------ two checkouts


def compare(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Measure both checkouts in turn, in several pairs of processes; print a line for each stage with a verdict."""
    python = options.against.resolve() / ".venv" / "bin" / "python"
    if not python.exists():
        sys.exit(f"--against: there is no {python}: run 'make setup' in {options.against}")
    ours: dict[str, list[float]] = {name: [] for name in options.stages}
    theirs: dict[str, list[float]] = {name: [] for name in options.stages}
    repeats = max(1, options.repeats // (2 * BLOCKS))
    for number in range(options.processes):
        with ExitStack() as stack:
            here, there = (
                stack.enter_context(working(each, options.data_path)) for each in (sys.executable, python)
            )
            if not number:
                tell(here)
                tell(there)
            for name in options.stages:
                for block in range(BLOCKS):
                    pair = [(here, ours), (there, theirs)]
                    for worker, found in reversed(pair) if (number + block) % 2 else pair:
                        if (figures := worker.measure(name, repeats)) is not None:
                            found[name].append(statistics.median(figures))
    print(f"\n{'':<38}{'ours':>8} : {'theirs':<8}{'ratio':>6} {'(range)':<16}verdict")
    for name in options.stages:
        if len(ours[name]) == len(theirs[name]):
            print(line_of(name, ours[name], theirs[name]))
    return {"ours": ours, "theirs": theirs}


def line_of(name: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Format the comparison of a stage: medians, and the median ratio of neighbouring blocks with its range."""
    ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    low, high = inner(ratios)
    sides = f"{statistics.median(ours):>8,.0f} : {statistics.median(theirs):<8,.0f}"
    return f"{name:<38}{sides}{statistics.median(ratios):>6.2f} {f'({low:.2f} - {high:.2f})':<16}{verdict(ratios)}"


def inner(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the least and the greatest of the sorted ratios without one outlier on each side.

    Of nine ratios, this range has the true median in 96 of 100 cases.
    """
    return (ratios[1], ratios[-2]) if len(ratios) > 4 else (ratios[0], ratios[-1])


def verdict(ratios: Sequence[float]) -> str:
    """Return what sorted ratios of our time to theirs say."""
    low, high = inner(ratios)
    if low > 1 and statistics.median(ratios) > 1 + LEAST:
        return "SLOWER"
    if high < 1 and statistics.median(ratios) < 1 - LEAST:
        return "faster"
    return "no difference found"


# ------------------------------------------------------------------------------------------ the program


def parse() -> argparse.Namespace:
    """Parse the options."""
    parser = record.parser(
        __doc__,
        only="only stages whose name has one of these texts, separated by commas: " + ", ".join(STAGES),
    )
    parser.add_argument("--repeats", type=int, default=30, help="measurements of each (default: %(default)s)")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="compare with this other checkout of the project, prepared with 'make setup'",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=3,
        help="pairs of processes with --against, each with three measurements of a stage (default: %(default)s)",
    )
    options = parser.parse_args()
    wanted = [text.strip() for text in options.only.split(",") if text.strip()]
    options.stages = [name for name in NAMES if not wanted or any(text in name for text in wanted)]
    if unknown := [text for text in wanted if not any(text in name for name in NAMES)]:
        parser.error(f"--only: there is no stage {', '.join(unknown)}; see --help")
    return options


def main() -> None:
    """Measure, print, and write the requested results."""
    options = parse()
    about = record.begin(options, beside_nsqd=False)
    began_s = time.monotonic()
    found = compare(options) if options.against else {"ours": measure(options)}
    print(f"took {time.monotonic() - began_s:.0f} s")
    record.finish({"machine": about, "repeats": options.repeats, "ns_per_message": found}, options, "stages")


if __name__ == "__main__":
    main()
