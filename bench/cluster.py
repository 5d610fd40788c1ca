"""Compare a cluster of two members with one broker: rates, latency of OK, and processor time of leader and follower.

Both members run on this machine, with folders on one disk. So they share what two machines would have twice: the ratios
are lower limits for the processors and the disk, and leave out the network. Every OK is synced on each member.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.contenders import cpu_s
from bench.loads import goload
from bench.verdicts import judge_goal

from interop.peers import Broker, qcli_serve

ONE, TWO = "one node", "two members"
IN_SYNC_S = 60.0
WARM_SECONDS = 0.5
"""A follower's journal grows until it is overwritten: this fills it."""
RATE = 5000


@dataclass(frozen=True)
class Workload:
    """A load.

    Attributes:
        name: The name on the command line.
        command, flags: Of goload.
        figure, unit: What is compared.
        goal: The required ratio of two members to one node.
        most_follower: The limit of the follower's processor time divided by the leader's; 0: none.
    """

    name: str
    command: str
    flags: Mapping[str, object]
    figure: str
    unit: str
    goal: float
    most_follower: float = 0.0

    @property
    def less(self) -> bool:
        """Whether less is better."""
        return self.unit == "ms"


def _publishing(name: str, connections: int, batch: int, goal: float, most_follower: float = 0.0) -> Workload:
    flags = {"connections": connections, "batch": batch}
    return Workload(name, "pub", flags, "rate", "msg/s", goal, most_follower)


WORKLOADS = [
    _publishing("pub-1", 1, 1, 0.4),
    _publishing("pub-16", 16, 1, 0.5),
    _publishing("pub-200", 200, 1, 0.7),
    _publishing("mpub-100", 4, 100, 0.7, 0.3),
    Workload("oks", "oks", {"connections": 50, "rate": RATE}, "p99_ms", "ms", 1.5),
]


@dataclass(frozen=True)
class Result:
    """One measurement.

    Attributes:
        figures: Of goload, with `rate`; `leader_us` and `follower_us`, the processor time per message.
        others: The share of the processors that other processes took, 0 to 1.
    """

    round: int
    workload: str
    contender: str
    figures: dict[str, float]
    others: float


@contextmanager
def one_node(folder: Path) -> Iterator[list[Broker]]:
    """Run a broker."""
    with qcli_serve(folder / "one") as broker:
        yield [broker]


@contextmanager
def two_members(folder: Path) -> Iterator[list[Broker]]:
    """Run a leader and a follower that is in sync."""
    flags = ("--cluster=bench", "--coordinator=static:")
    with qcli_serve(folder / "one", *flags) as leader:
        leader.post("/cluster/promote", b"")
        peer = f"--coordinator=static:{leader.http_address}"
        with qcli_serve(folder / "two", "--cluster=bench", peer) as follower:
            give_up_s = time.monotonic() + IN_SYNC_S
            while not _is_in_sync(leader):
                if time.monotonic() > give_up_s:
                    raise RuntimeError(f"the follower is not in sync after {IN_SYNC_S:g} s")
                time.sleep(0.05)
            yield [leader, follower]


def _is_in_sync(leader: Broker) -> bool:
    try:
        members = json.loads(leader.http("GET", "/cluster"))["members"]
    except RuntimeError:  # it does not lead yet
        return False
    return [each["in_sync"] for each in members] == [True, True]


CONTENDERS: dict[str, Callable[[Path], AbstractContextManager[list[Broker]]]] = {
    ONE: one_node,
    TWO: two_members,
}


def measure(workload: Workload, contender: str, number: int, options: argparse.Namespace) -> Result:
    """Run a load on a new broker, or cluster."""
    before = record.processors()
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=options.data_path) as folder,
        CONTENDERS[contender](Path(folder)) as brokers,
    ):
        address = brokers[0].tcp_address
        goload("pub", address, connections=4, batch=100, runfor=f"{WARM_SECONDS}s", topic="warm")
        used_s = [cpu_s(broker) for broker in brokers]
        found = goload(workload.command, address, runfor=f"{options.seconds}s", **workload.flags)
        used_s = [cpu_s(broker) - s for broker, s in zip(brokers, used_s, strict=True)]
    figures = found | {"rate": found["messages"] / found["seconds"]}
    for name, used in zip(("leader_us", "follower_us"), used_s, strict=False):
        figures[name] = used / found["messages"] * 1e6
    return Result(number, workload.name, contender, figures, record.share_of_others(before))


def table_line(workload: Workload, results: Sequence[Result]) -> str:
    """Return the line of a workload."""
    ours = [each for each in results if each.contender == TWO]
    other = [each for each in results if each.contender == ONE]
    pairs = [(a, b) for a in ours for b in other if a.round == b.round]
    figure = workload.figure
    ratios = [a.figures[figure] / b.figures[figure] for a, b in pairs]
    cpu_ratios = [a.figures["leader_us"] / b.figures["leader_us"] for a, b in pairs]
    shares = [each.figures["follower_us"] / each.figures["leader_us"] for each in ours]
    others = statistics.median(each.others for each in results)
    verdict = judge_goal(ratios, workload.goal, less=workload.less, cpu_ratios=cpu_ratios, others=others)
    share_verdict = ""
    if workload.most_follower:
        share_verdict = judge_goal(shares, workload.most_follower, less=True, others=others)

    def medians(name: str) -> str:
        found = [
            f"{statistics.median(each.figures[name] for each in some if name in each.figures):,.4g}"
            for some in (ours, other)
            if any(name in each.figures for each in some)
        ]
        return " : ".join(found)

    cells = [
        workload.name,
        f"{medians(figure)} {workload.unit}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
        f"{'at most' if workload.less else 'at least'} {workload.goal:g} {verdict}".strip(),
        medians("leader_us"),
        f"{statistics.median(shares):.2f} {share_verdict}".strip(),
        f"{100 * others:.0f} %",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = record.parser(__doc__, rounds=5, only="workloads, separated by commas")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="duration of a load (default: %(default)s)"
    )
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else [each.name for each in WORKLOADS]
    workloads = [each for each in WORKLOADS if each.name in wanted]
    if unknown := set(wanted) - {each.name for each in workloads}:
        sys.exit(f"--only: unknown: {', '.join(sorted(unknown))}")
    about = record.begin(options, beside_nsqd=False)
    results: list[Result] = []
    failures = 0
    for number in range(options.rounds):
        for workload in workloads:
            for contender in list(CONTENDERS)[:: 1 if number % 2 else -1]:
                try:
                    results.append(measure(workload, contender, number, options))
                except record.FAILURES as exc:
                    failures += 1
                    print(f"{workload.name}, {contender}: {exc}", file=sys.stderr)
        print(f"round {number + 1} of {options.rounds} is over", file=sys.stderr, flush=True)
    print(
        "\n| load | two members : one node | ratio (range) | goal | leader's CPU per message, us | "
        "follower's / leader's CPU | other processes |"
    )
    print("|---" * 7 + "|")
    for workload in workloads:
        some = [each for each in results if each.workload == workload.name]
        if {each.contender for each in some} == set(CONTENDERS):
            print(table_line(workload, some))
    record.finish({"about": about, "results": [asdict(each) for each in results]}, options, "cluster")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
