"""Compare a cluster of two members with one broker, and with replicated servers of other projects.

Measures rates, latency of OK, and processor time. All members run on this machine, with folders on one disk. So they
share what two machines would have twice: the ratios are lower limits for the processors and the disk, and leave out the
network. Every OK is synced on each member.
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
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import peer_servers, record
from bench.contenders import cpu_s, process_cpu_s
from bench.loads import goload
from bench.peer_servers import Peer, Servers
from bench.verdicts import judge_goal

from interop.peers import Broker, qcli_serve

ONE, TWO = "one node", "two members"
IN_SYNC_S = 60.0
WARM_SECONDS = 0.5
"""A follower's journal grows until it is overwritten: this fills it."""
RATE = 5000
PEER_CONNECTIONS = [1, 16, 200]
PEER_GOAL = 1.0
"""The ratio of two members to a peer from which on they are as fast."""


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
        figures: Of the generator, with `rate`; `leader_us` and `follower_us`, or `servers_us` for a comparison with
            peers: the processor time per message.
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


@contextmanager
def _our_servers(folder: Path) -> Iterator[Servers]:
    with two_members(folder) as brokers:
        yield Servers([brokers[0].tcp_address], [broker.process.pid for broker in brokers])


OURS = Peer(TWO, "nsq", _our_servers, lambda: None, "a leader and a follower; both have synced")


def measure_peer(load: str, connections: int, peer: Peer, number: int, options: argparse.Namespace) -> Result:
    """Publish to new servers, one message at a time on each connection."""
    before = record.processors()
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=options.data_path) as folder,
        peer.start(Path(folder)) as servers,
    ):
        peer_servers.run_load(peer.command, servers, connections=16, runfor=f"{WARM_SECONDS}s")
        used_s = -sum(map(process_cpu_s, servers.pids))
        found = peer_servers.run_load(
            peer.command, servers, connections=connections, runfor=f"{options.seconds}s"
        )
        used_s += sum(map(process_cpu_s, servers.pids))
    rates = {"rate": found["messages"] / found["seconds"], "servers_us": used_s / found["messages"] * 1e6}
    return Result(number, load, peer.name, found | rates, record.share_of_others(before))


def peer_line(load: str, peer: Peer, results: Sequence[Result]) -> str:
    """Return the line of a load and a peer."""
    ours = {each.round: each for each in results if each.contender == TWO}
    others = {each.round: each for each in results if each.contender == peer.name}
    pairs = [(ours[number], others[number]) for number in ours.keys() & others.keys()]
    ratios, cpu_ratios = (
        [a.figures[name] / b.figures[name] for a, b in pairs] for name in ("rate", "servers_us")
    )
    busy = statistics.median(each.others for pair in pairs for each in pair)

    def medians(name: str) -> str:
        return " : ".join(
            f"{statistics.median(each.figures[name] for each in side):,.4g}"
            for side in zip(*pairs, strict=True)
        )

    cells = [
        load,
        peer.name,
        medians("rate"),
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
        f"at least {PEER_GOAL:g} {judge_goal(ratios, PEER_GOAL, cpu_ratios=cpu_ratios, others=busy)}".strip(),
        medians("p50_ms"),
        medians("p99_ms"),
        medians("servers_us"),
        f"{100 * busy:.0f} %",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = record.parser(__doc__, rounds=5, only="loads, separated by commas")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="duration of a load (default: %(default)s)"
    )
    options = parser.parse_args()
    peer_loads = {f"peers-{connections}": connections for connections in PEER_CONNECTIONS}
    names = [*(each.name for each in WORKLOADS), *peer_loads]
    wanted = options.only.split(",") if options.only else names
    if unknown := set(wanted) - set(names):
        sys.exit(f"--only: unknown: {', '.join(sorted(unknown))}")
    about = record.begin(options, beside_nsqd=False)
    workloads = [each for each in WORKLOADS if each.name in wanted]
    peers = peer_servers.available() if peer_loads.keys() & set(wanted) else []
    peer_loads = {load: connections for load, connections in peer_loads.items() if load in wanted and peers}

    loads: dict[str, dict[str, Callable[[int], Result]]] = {}
    for workload in workloads:
        loads[workload.name] = {
            name: partial(measure, workload, name, options=options) for name in CONTENDERS
        }
    for load, connections in peer_loads.items():
        loads[load] = {
            peer.name: partial(measure_peer, load, connections, peer, options=options)
            for peer in (OURS, *peers)
        }
    results: list[Result] = []
    failures = 0
    for number in range(options.rounds):
        for load, measurements in loads.items():
            for contender, run in list(measurements.items())[:: 1 if number % 2 else -1]:
                try:
                    results.append(run(number))
                except record.FAILURES as exc:
                    failures += 1
                    print(f"{load}, {contender}: {exc}", file=sys.stderr)
        print(f"round {number + 1} of {options.rounds} is over", file=sys.stderr, flush=True)
    of_load = {load: [each for each in results if each.workload == load] for load in loads}
    if workloads:
        print(
            "\n| load | two members : one node | ratio (range) | goal | leader's CPU per message, us | "
            "follower's / leader's CPU | other processes |"
        )
        print("|---" * 7 + "|")
        for workload in workloads:
            some = of_load[workload.name]
            if {each.contender for each in some} == set(CONTENDERS):
                print(table_line(workload, some))
    if peer_loads:
        print("\nWhat an acknowledgement means:")
        print(*(f"- {peer.name}: {peer.means}" for peer in (OURS, *peers)), sep="\n")
        print(
            "\n| load | peer | two members : peer, msg/s | ratio (range) | as fast | p50, ms | p99, ms | "
            "all servers' CPU per message, us | other processes |"
        )
        print("|---" * 9 + "|")
        for load in peer_loads:
            for peer in peers:
                rounds = (
                    {each.round for each in of_load[load] if each.contender == name}
                    for name in (TWO, peer.name)
                )
                if set.intersection(*rounds):
                    print(peer_line(load, peer, of_load[load]))
    record.finish({"about": about, "results": [asdict(each) for each in results]}, options, "cluster")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
