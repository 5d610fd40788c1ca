"""Measure how rates, memory and processor time grow with channels, topics, connections, backlog and body size.

Each curve varies one size. No cost may grow faster than this size, and the publish rate must not depend on the backlog.
README.md in this folder explains the curves.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import backlog, readers, record, scale
from bench.contenders import EVERY_OK, IN_MEMORY, INTERVAL, Contender, cpu_s, memory_mib
from bench.loads import BATCH, CHANNEL, TOPIC, fill, goload, writing
from bench.verdicts import MISSED, REACHED, TOO_NOISY, judge_limit, spread

_PER_MESSAGE = "CPU us/msg"
CONTENDERS = {
    "I": INTERVAL,
    "F": EVERY_OK,
    "nsqd": IN_MEMORY.with_flags("--mem-queue-size=1000000"),  # for each of very many channels
}
TOLERATED = 1.15
"""The limit of an exponent: linear, plus measurement noise."""
_SMALL_QUEUES = ("--mem-queue-size=10000",)  # nsqd's default; it allocates this for each channel at once
LEAST_S = 0.05
"""Shorter times count as this, because their differences are noise."""


@dataclass(frozen=True)
class Curve:
    """A curve, with the size that it varies.

    Attributes:
        name: The name on the command line.
        title: The title of the size.
        sizes: The sizes, in ascending order.
        measure: Measures one broker at one size; returns figures.
        grow: Figures that must not grow faster than the size.
        stay: Figures that must not fall below half of their first value, or, of a cost, rise above twice of it.
    """

    name: str
    title: str
    sizes: Sequence[int]
    measure: Callable[["Turn", int], dict[str, float]]
    grow: Sequence[str] = ()
    stay: Sequence[str] = ()


@dataclass(frozen=True)
class Turn:
    """The broker, and its share of the load."""

    contender: Contender
    data_path: Path
    seconds: float
    share: float

    def count(self, messages: int) -> int:
        """Return the broker's share of this number of messages."""
        return max(1, round(messages * self.share))


@dataclass
class Point:
    """The figures at one size in one round."""

    round: int
    broker: str
    curve: str
    size: int
    figures: dict[str, float] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------ curves of a broker


def channels(turn: Turn, size: int) -> dict[str, float]:
    """Publish to one topic, with a consumer on every channel."""
    return _through(turn, 1, channels=size, batch=BATCH, count=turn.count(50_000))


def topics(turn: Turn, size: int) -> dict[str, float]:
    """Publish the same number of messages, spread over topics with one channel each."""
    return _through(turn, size, batch=20, connections=8, count=max(size, turn.count(50_000)))


def _through(turn: Turn, topics: int, **flags: object) -> dict[str, float]:
    with turn.contender.running(turn.data_path) as broker:
        # A first run without measuring, to create topics and channels.
        goload("through", broker.tcp_address, **flags | {"topics": topics, "count": topics})
        before_s = cpu_s(broker)
        told = goload("through", broker.tcp_address, topics=topics, **flags)
        used_s = cpu_s(broker) - before_s
        return {
            "published/s": told["messages"] / told["publish_seconds"],
            "through/s": told["messages"] / told["seconds"],
            "CPU us/msg": 1e6 * used_s / told["messages"],
            "MiB": memory_mib(broker),
        }


def connections(turn: Turn, size: int) -> dict[str, float]:
    """PUB from many connections, each waiting for its OK."""
    with turn.contender.running(turn.data_path) as broker:
        broker.create(TOPIC, CHANNEL)
        before_s = cpu_s(broker)
        told = goload("pub", broker.tcp_address, connections=size, runfor=f"{turn.seconds}s")
        return {
            "published/s": told["messages"] / told["seconds"],
            "CPU us/msg": 1e6 * (cpu_s(broker) - before_s) / told["messages"],
            "MiB": memory_mib(broker),
        }


def queued(turn: Turn, size: int) -> dict[str, float]:
    """Stop, start and publish with a backlog of 100-byte messages."""
    contender = turn.contender
    if contender.is_nsqd:
        contender = contender.with_flags("--mem-queue-size=100000000")
    with tempfile.TemporaryDirectory(prefix="growth-", dir=turn.data_path) as folder:
        data = Path(folder) / "data"
        with contender.start(data, *contender.flags) as broker:
            broker.create(TOPIC, CHANNEL)
            before_s = cpu_s(broker)
            filled = fill(broker, turn.count(size), backlog.BODY_BYTES, backlog.BATCH)
            filling_us = 1e6 * (cpu_s(broker) - before_s) / filled
            memory = memory_mib(broker)
            stopped_s = backlog.stop(broker)
        began_s = time.perf_counter()
        with contender.start(data, *contender.flags) as broker:
            started_s = time.perf_counter() - began_s
            first_s = backlog.first_message(broker)
            before_s = cpu_s(broker)
            published = writing(broker, turn.seconds, batch=backlog.BATCH, size=backlog.BODY_BYTES).finish()
            publishing_us = 1e6 * (cpu_s(broker) - before_s) / published.messages
            if contender.is_nsqd:
                broker.process.kill()
                broker.process.wait()
    return {
        "published/s": published.rate,
        "filling us/msg": filling_us,
        "CPU us/msg": publishing_us,
        "MiB": memory,
        "stop s": stopped_s,
        "start s": started_s,
        "1st message s": first_s,
    }


def bodies(turn: Turn, size: int) -> dict[str, float]:
    """Publish 1 MiB at a time, of at most 1,000 messages."""
    with turn.contender.running(turn.data_path) as broker:
        broker.create(TOPIC, CHANNEL)
        before_s = cpu_s(broker)
        batch = min(1000, 2**20 // size)
        flags = {"batch": batch, "size": size, "runfor": f"{turn.seconds}s"}
        told = goload("pub", broker.tcp_address, **flags)
        return {
            "published/s": told["messages"] / told["seconds"],
            "MiB/s": told["messages"] * size / told["seconds"] / 2**20,
            "CPU us/msg": 1e6 * (cpu_s(broker) - before_s) / told["messages"],
            "MiB": memory_mib(broker),
        }


def scaled(
    measure: Callable[[Contender, Path, int], dict[str, float]], turn: Turn, size: int
) -> dict[str, float]:
    """Measure many channels, clients, producers or topics: see `bench.scale`."""
    return measure(
        turn.contender.with_flags(*(_SMALL_QUEUES if turn.contender.is_nsqd else ())), turn.data_path, size
    )


CURVES = [
    Curve(
        "channels",
        "channels of one topic, each with a consumer",
        (1, 10, 100),
        channels,
        ("CPU us/msg", "MiB"),
    ),
    Curve(
        "topics",
        "topics with a channel and a consumer each",
        (1, 10, 100, 1000),
        topics,
        ("CPU us/msg", "MiB"),
    ),
    Curve(
        "connections",
        "connections that publish one message after the other",
        (1, 10, 100, 1000),
        connections,
        ("CPU us/msg", "MiB"),
    ),
    Curve(
        "backlog",
        "messages that wait",
        (100_000, 1_000_000, 10_000_000),
        queued,
        ("MiB", "stop s", "start s", "1st message s"),
        ("published/s", "CPU us/msg"),
    ),
    Curve(
        "many-channels",
        "channels that are created on one topic",
        (625, 2500, 10_000),
        partial(scaled, scale.channels),
        ("create CPU s", "stats CPU ms", "text CPU ms"),
    ),
    Curve(
        "many-clients",
        "clients of one channel",
        (312, 1250, 5000),
        partial(scaled, scale.clients),
        ("connect CPU s", "stats CPU ms", "text CPU ms", "stop CPU s"),
    ),
    Curve(
        "many-producers",
        "clients that publish to one topic",
        (312, 1250, 5000),
        partial(scaled, scale.producers),
        ("connect CPU s", "stats CPU ms", "text CPU ms", "stop CPU s"),
    ),
    Curve(
        "many-topics",
        "topics that are there at a start",
        (125, 500, 2000),
        partial(scaled, scale.topics),
        ("stop CPU s", "start CPU s", "stats CPU ms", "text CPU ms"),
    ),
    Curve(
        "bodies",
        "bytes of a body",
        (10, 100, 1000, 10_000, 100_000, 1024 * 1024),
        bodies,
        ("CPU us/msg", "MiB"),
    ),
]


def drawn(curve: Curve, turn: Turn, number: int) -> list[Point]:
    """Measure all points of a curve in one round."""
    name = turn.contender.name
    return [Point(number, name, curve.name, size, curve.measure(turn, size)) for size in curve.sizes]


# ------------------------------------------------------------------------------------------ output


def exponent(points: Sequence[Point], figure: str) -> float:
    """Return the steepest growth between two sizes, as a power of the size: 1 is linear, 0 is constant."""
    steepest = 0.0
    least = LEAST_S if figure.endswith(" s") else 1000 * LEAST_S if figure.endswith(" ms") else 0.0
    for smaller, larger in pairwise(points):
        one, other = (max(least, point.figures[figure]) for point in (smaller, larger))
        if one > 0 and other > 0:
            steepest = max(steepest, math.log(other / one) / math.log(larger.size / smaller.size))
    return steepest


def furthest(points: Sequence[Point], figure: str) -> float:
    """Return how far a figure gets from its first value for the worse, as a ratio: 1 is not at all."""
    values = [point.figures[figure] for point in points]
    return max(values) / values[0] if figure.startswith("CPU") else values[0] / min(values)


def verdicts(curve: Curve, rounds: Sequence[Sequence[Point]]) -> list[str]:
    """Return a line for each figure with its growth in all rounds, and whether that is allowed."""
    lines = []
    for figure in curve.grow:
        powers = [exponent(points, figure) for points in rounds]
        verdict = judge_limit(powers, TOLERATED)
        said = {REACHED: "ok", MISSED: "FASTER THAN LINEAR", TOO_NOISY: TOO_NOISY}[verdict]
        lines.append(f"  {figure}: at most as size ^ {shown(powers)}: {said}")
    for figure in curve.stay:
        ratios = [furthest(points, figure) for points in rounds]
        said = {REACHED: "ok", MISSED: "DEPENDS ON IT", TOO_NOISY: TOO_NOISY}[judge_limit(ratios, 2.0)]
        lines.append(f"  {figure}: at most {shown(ratios)} times worse than its first value: {said}")
    return lines


def shown(values: Sequence[float]) -> str:
    """Format the median of all rounds, and their range."""
    median = f"{statistics.median(values):.2f}"
    return f"{median} ({min(values):.2f} - {max(values):.2f})" if len(values) > 1 else median


def show(curve: Curve, rounds: Sequence[Sequence[Point]]) -> str:
    """Format a table of the medians, with the spread of the processor time, and the verdicts."""
    first = rounds[0]
    per_message = [_PER_MESSAGE] if _PER_MESSAGE in first[0].figures else []
    heads = [*first[0].figures, *["CPU spread" for _ in per_message]]
    lines = [f"\n{first[0].broker}: {curve.title}", f"{'':>12}" + "".join(f"{head:>15}" for head in heads)]
    for place, point in enumerate(first):
        all_rounds = [points[place].figures for points in rounds]
        cells = [statistics.median(figures[name] for figures in all_rounds) for name in point.figures]
        cells += [spread([figures[each] for figures in all_rounds]) for each in per_message]
        told = "".join(f"{value:>15,.{0 if value >= 1000 else 2}f}" for value in cells)
        lines.append(f"{point.size:>12,}{told}")
    return "\n".join(lines + verdicts(curve, rounds))


# ------------------------------------------------------------------------------------------ the protocol readers


def read_wire() -> dict[str, float]:
    """Print and return how much longer the protocol's readers take for eight times the data: 8 is linear."""
    factor = readers.LARGE / readers.SMALL
    print(f"\nprotocol readers: processor time for {factor:g} times as much\n{'':>30}{'times':>8}")
    found = {}
    for name, work in readers.READERS.items():
        times = readers.cpu_s(work, readers.LARGE) / readers.cpu_s(work, readers.SMALL)
        verdict = "ok" if times <= 2 * factor else "FASTER THAN LINEAR"  # quadratic would be factor ** 2
        print(f"{name:>30}{times:>8.1f}   {verdict}", flush=True)
        found[name] = times
    return found


# ------------------------------------------------------------------------------------------ the program


def parse() -> argparse.Namespace:
    """Parse the options."""
    names = [curve.name for curve in CURVES]
    parser = record.parser(
        __doc__, rounds=3, only=f"only these curves, separated by commas: {', '.join(names)}, readers"
    )
    parser.add_argument(
        "--brokers",
        default="I",
        help="separated by commas: I, ours with --sync=interval; F, every OK synced; nsqd, in memory (default: I)",
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of a load (default: %(default)s)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a fraction of the load, to check that everything works; the figures are not meaningful",
    )
    options = parser.parse_args()
    options.brokers = options.brokers.split(",")
    if unknown := set(options.brokers) - set(CONTENDERS):
        parser.error(f"--brokers: there is no {', '.join(sorted(unknown))}")
    options.only = [name for name in options.only.split(",") if name] or [*names, "readers"]
    if unknown := set(options.only) - {*names, "readers"}:
        parser.error(f"--only: there is no curve {', '.join(sorted(unknown))}")
    options.share = 1.0
    if options.quick:
        options.rounds, options.seconds, options.share = 1, 0.3, 0.02
    return options


def main() -> None:
    """Measure, print, and write the requested results."""
    options = parse()
    about = record.begin(options)
    began_s = time.monotonic()
    points: list[Point] = []
    failed: list[str] = []
    for curve in CURVES:
        if curve.name not in options.only:
            continue
        found: dict[str, list[list[Point]]] = {name: [] for name in options.brokers}
        for number in range(1, options.rounds + 1):
            for name in options.brokers if number % 2 else reversed(options.brokers):
                turn = Turn(CONTENDERS[name], options.data_path, options.seconds, options.share)
                try:
                    found[name].append(drawn(curve, turn, number))
                except record.FAILURES as reason:
                    failed.append(f"{curve.name} of {name} in round {number}")
                    print(f"{failed[-1]} failed: {reason}", file=sys.stderr)
        for rounds in found.values():
            if rounds:
                print(show(curve, rounds), flush=True)
                points += [point for each in rounds for point in each]
    wire = read_wire() if "readers" in options.only else {}
    print(f"took {time.monotonic() - began_s:.0f} s")
    settings = {"rounds": options.rounds, "seconds": options.seconds, "share": options.share}
    record.finish(
        {
            "machine": about,
            "settings": settings,
            "points": [asdict(point) for point in points],
            "readers": wire,
        },
        options,
        "growth",
    )
    if failed:
        sys.exit(f"failed and skipped: {', '.join(failed)}")


if __name__ == "__main__":
    main()
