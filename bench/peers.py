"""Compare this broker with NATS JetStream, Redis and RabbitMQ, for two promises of an OK: synced, and not synced yet.

All servers of a promise run at the same time and get short loads in turn, so that one works and the others are idle.
`--keep` also writes the tables of docs/explanation/peers.md and its chart.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import peer_servers, record
from bench.contenders import process_cpu_s, process_memory_mib
from bench.peer_servers import Peer, Servers, run_load
from bench.verdicts import FEWEST_ROUNDS, MISSED, MOST_OTHERS, REACHED, TOO_NOISY, judge_goal

from interop.build import PeerUnavailable
from interop.peers import qcli_serve

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/explanation/peers.md"
BEGIN, END = (
    "<!-- Written by bench/peers.py; do not edit. -->",
    "<!-- The end of what bench/peers.py writes. -->",
)
BATCH = 200
WARM_S = 0.3
QUICK_S, QUICK_BACKLOG = 0.2, 1000
NAMES = {REACHED: "ours", MISSED: "theirs", TOO_NOISY: TOO_NOISY, "": ""}


@dataclass(frozen=True)
class Promise:
    """What an OK means.

    Attributes:
        name: The name in the results.
        title: The heading of its tables.
        contenders: The servers with their settings; ours is the first.
    """

    name: str
    title: str
    contenders: Sequence[Peer]


@contextmanager
def _ours(folder: Path, *flags: str) -> Iterator[Servers]:
    with qcli_serve(folder / "data", *flags) as broker:
        yield Servers([broker.tcp_address], [broker.process.pid])


def _nats(jetstream: Mapping[str, str]) -> Callable[[Path], AbstractContextManager[Servers]]:
    return partial(peer_servers.nats, members=1, jetstream=jetstream)


def _redis(fsync: str) -> Callable[[Path], AbstractContextManager[Servers]]:
    return partial(peer_servers.redis, copies=1, fsync=fsync)


OURS, NATS, REDIS, RABBITMQ = "trio-nsq", "NATS JetStream", "Redis", "RabbitMQ"
PROMISES = [
    Promise(
        "synced",
        "Every OK synced",
        [
            Peer(OURS, "nsq", _ours, lambda: None, "the default, `--sync=always`"),
            Peer(
                NATS,
                "nats",
                _nats(peer_servers.SYNC_ALWAYS),
                peer_servers.nats_server,
                "a stream in files, `sync_interval: always`, atomic batches",
            ),
            Peer(
                REDIS,
                "redis",
                _redis("always"),
                peer_servers.redis_server,
                "a stream, `appendonly yes`, `appendfsync always`",
            ),
            Peer(
                RABBITMQ,
                "rabbit",
                peer_servers.rabbitmq,
                peer_servers.rabbitmq_server,
                "a quorum queue with one member, publisher confirms",
            ),
        ],
    ),
    Promise(
        "unsynced",
        "Synced later",
        [
            Peer(
                OURS,
                "nsq",
                lambda folder: _ours(folder, "--sync=interval"),
                lambda: None,
                "`--sync=interval`: every 2500 messages or 2 s",
            ),
            Peer(
                NATS,
                "nats-async",
                _nats({}),
                peer_servers.nats_server,
                "a stream in files, `sync_interval` of 2 minutes, the default; batches by PublishAsync",
            ),
            Peer(
                REDIS,
                "redis",
                _redis("everysec"),
                peer_servers.redis_server,
                "a stream, `appendonly yes`, `appendfsync everysec`, the default",
            ),
            Peer(
                RABBITMQ,
                "stream",
                partial(peer_servers.rabbitmq, streams=True),
                peer_servers.rabbitmq_server,
                "a stream with one replica; when it is written to disk is left to the kernel",
            ),
        ],
    ),
]


@dataclass(frozen=True)
class Load:
    """A load.

    Attributes:
        name: The name on the command line, and of the topic.
        title: The name in the tables.
        flags: Of the Go program.
    """

    name: str
    title: str
    flags: Mapping[str, object] = field(default_factory=dict)


def _single(connections: int) -> Load:
    title = f"one message at a time, {connections} connection{'s'[: connections - 1]}"
    return Load(f"pub-{connections}", title, {"connections": connections})


LOADS = [
    *map(_single, (1, 2, 16, 200)),
    Load("batch", f"batches of {BATCH}, 2 connections", {"connections": 2, "batch": BATCH}),
    Load("consume", "consume a backlog, 1 connection", {"job": "consume"}),
    Load("through", "publish while consuming", {"job": "through", "connections": 2, "batch": BATCH}),
]
FILL = {"job": "fill", "connections": 4, "batch": BATCH}


@dataclass(frozen=True)
class Result:
    """The figures of a server under a load in one round.

    Attributes:
        figures: `rate` and `delivered` are messages per second, `p50_ms` and `p99_ms` the time until an OK, `server_us`
            and `client_us` the processor time per message. `consume` also has `memory_mib` and `disk_bytes`, per
            message, both with the whole backlog.
        others: The share of the processors that other processes took, 0 to 1.
    """

    round: int
    promise: str
    load: str
    contender: str
    figures: dict[str, float]
    others: float


# ------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Running:
    """A running server with the folder of its data."""

    peer: Peer
    servers: Servers
    folder: Path

    def cpu_s(self) -> float:
        return sum(map(process_cpu_s, self.servers.pids))

    def disk_bytes(self) -> int:
        """Return the space that its files take on the disk."""
        found = 0
        for path in self.folder.rglob("*"):
            try:
                found += path.lstat().st_blocks * 512
            except FileNotFoundError:
                pass  # removed meanwhile
        return found


def measure(
    load: Load, running: Running, all_running: Sequence[Running], options: argparse.Namespace
) -> tuple[dict[str, float], float]:
    """Run a load; return its figures, and the share of the processors that other processes took."""
    command, servers = running.peer.command, running.servers
    figures: dict[str, float] = {}
    flags: dict[str, object] = {"topic": load.name, "runfor": f"{options.seconds}s", **load.flags}
    if load.name == "consume":
        empty_bytes = running.disk_bytes()
        filled = run_load(command, servers, topic=load.name, count=options.backlog, **FILL)
        flags["count"] = int(filled["messages"])  # whole batches
        figures["disk_bytes"] = (running.disk_bytes() - empty_bytes) / filled["messages"]
        figures["memory_mib"] = sum(map(process_memory_mib, servers.pids))
    os.sync()  # dirty pages of the previous load must not delay this one
    before, all_before_s = record.processors(), sum(each.cpu_s() for each in all_running)
    used_s = -running.cpu_s()
    found = run_load(command, servers, **flags)
    used_s += running.cpu_s()
    others = record.share_of_others(before, sum(each.cpu_s() for each in all_running) - all_before_s)
    figures["rate"] = found["messages"] / found["seconds"]
    figures["server_us"] = used_s / found["messages"] * 1e6
    figures["client_us"] = found["cpu_seconds"] / found["messages"] * 1e6
    if load.name == "through":
        figures["delivered"] = found["delivered"] / found["seconds"]
    if load.name != "consume":
        figures |= {name: found[name] for name in ("p50_ms", "p99_ms")}
    return figures, others


def measure_round(
    number: int, promise: Promise, contenders: Sequence[Peer], options: argparse.Namespace
) -> Iterator[Result]:
    """Start the servers of a promise, and run all loads on each. Says what failed, and goes on with the others."""
    with ExitStack() as stack:
        all_running = []
        for peer in contenders:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=options.data_path))
            )
            try:
                running = Running(peer, stack.enter_context(peer.start(folder)), folder)
                run_load(peer.command, running.servers, topic="warm", connections=4, runfor=f"{WARM_S}s")
            except record.FAILURES as exc:
                options.failed.append(f"round {number}: {promise.name}: {peer.name} does not start: {exc}")
            else:
                all_running.append(running)
        for place, load in enumerate(options.loads):
            for running in all_running[:: 1 if (number + place) % 2 else -1]:
                try:
                    figures, others = measure(load, running, all_running, options)
                except record.FAILURES as exc:
                    options.failed.append(
                        f"round {number}: {promise.name}: {load.name}: {running.peer.name}: {exc}"
                    )
                else:
                    yield Result(number, promise.name, load.name, running.peer.name, figures, others)


def _told(result: Result) -> str:
    figures = ", ".join(f"{name} {value:,.5g}" for name, value in result.figures.items())
    return f"round {result.round}: {result.promise}: {result.load}: {result.contender}: {figures}"


# ------------------------------------------------------------------------------------------ tables


def tables(kept: Mapping[str, Any]) -> str:
    """Return the tables of kept results, in Markdown."""
    results = [Result(**each) for each in kept["results"]]
    machine, settings = kept["machine"], kept["settings"]
    others = statistics.median(each.others for each in results)
    lines = [
        f"Measured on {machine['date'][:10]}, {machine['cpu_count']} cores of {machine['cpu']}, {machine['system']}, "
        f"data on {machine['data_file_system']}; commit {machine['commit']}, compiled: {machine['compiled']}. "
        f"{settings['rounds']} rounds with loads of {settings['seconds']:g} s and a backlog of {settings['backlog']:,} "
        f"messages. Other processes took {100 * others:.0f} % of the processors (median), and up to "
        f"{100 * max(each.others for each in results):.0f} %.",
    ]
    if others > MOST_OTHERS:
        lines += [
            "",
            "The machine was busy: compare the processor times. Rates and times of OKs say little.",
        ]
    for promise in kept["promises"]:
        own = [each for each in results if each.promise == promise["name"]]
        names = [name for name in promise["contenders"] if any(each.contender == name for each in own)]
        if OURS in names:
            lines += ["", f"### {promise['title']}", "", *_settings(promise, names, kept["versions"])]
            lines += ["", *_table(own, names)]
    return "\n".join(lines)


def _settings(promise: Mapping[str, Any], names: Sequence[str], versions: Mapping[str, str]) -> Iterator[str]:
    for name in names:
        yield f"- {name} {versions[name]}: {promise['contenders'][name]}"


def _table(results: Sequence[Result], names: Sequence[str]) -> Iterator[str]:
    by_key = {(each.load, each.contender, each.round): each for each in results}

    def values(load: Load, name: str, figure: str) -> dict[int, float]:
        found = {
            number: each for (one, whose, number), each in by_key.items() if (one, whose) == (load.name, name)
        }
        return {number: each.figures[figure] for number, each in found.items() if figure in each.figures}

    def cell(load: Load, name: str, figure: str, digits: str, less: bool) -> str:
        own, theirs = values(load, OURS, figure), values(load, name, figure)
        if not theirs:
            return "-"
        shown = format(statistics.median(theirs.values()), digits)
        rounds = sorted(own.keys() & theirs.keys())
        if name == OURS or not rounds:
            return shown
        ratios = [own[number] / theirs[number] for number in rounds]
        cpu, others = [], 0.0
        if figure != "server_us":  # which other processes hardly change
            ours_us, theirs_us = (values(load, whose, "server_us") for whose in (OURS, name))
            cpu = [ours_us[number] / theirs_us[number] for number in rounds]
            others = statistics.median(
                by_key[load.name, whose, number].others for whose in (OURS, name) for number in rounds
            )
        verdict = NAMES[judge_goal(ratios, 1.0, less=less, cpu_ratios=cpu, others=others)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        return f"{shown}: {', '.join(filter(None, (ratio, verdict)))}"

    def plain(load: Load, name: str, figures: Sequence[str], digits: str) -> str:
        found = [values(load, name, figure) for figure in figures]
        return (
            " / ".join(format(statistics.median(each.values()), digits) for each in found)
            if all(found)
            else "-"
        )

    def rows(title: str, cells: Callable[[Load, str], str]) -> Iterator[str]:
        yield f"| **{title}** |" + " |" * len(names)
        for load in LOADS:
            found = [cells(load, name) for name in names]
            if set(found) != {"-"}:
                yield f"| {load.title} | {' | '.join(found)} |"

    yield f"| | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    yield from rows("messages per second", lambda load, name: cell(load, name, "rate", ",.0f", False))
    yield from rows("delivered per second", lambda load, name: cell(load, name, "delivered", ",.0f", False))
    yield from rows("p50 / p99 of OK, ms", lambda load, name: plain(load, name, ("p50_ms", "p99_ms"), ".2f"))
    yield from rows(
        "processor time of the server per message, us",
        lambda load, name: cell(load, name, "server_us", ".1f", True),
    )
    yield from rows(
        "processor time of the load generator per message, us",
        lambda load, name: plain(load, name, ("client_us",), ".1f"),
    )
    yield from rows(
        "memory with the backlog, MiB", lambda load, name: plain(load, name, ("memory_mib",), ",.0f")
    )
    yield from rows(
        "bytes on disk per message", lambda load, name: plain(load, name, ("disk_bytes",), ",.0f")
    )


def write_page(page: Path) -> None:
    """Write the tables of the newest kept results into a page, between its marks."""
    newest = max((ROOT / "bench/results").glob("*-peers-*.json"), default=None)
    if newest is None:
        sys.exit("there are no kept results: run this with --keep first")
    before, _, rest = page.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        sys.exit(f"{page} does not have the lines {BEGIN} and {END}")
    text = tables(json.loads(newest.read_text()))
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\nResults: `bench/results/{newest.name}`.\n\n{END}{after}")
    print(f"the tables of {newest.name} are in {page}")


# ------------------------------------------------------------------------------------------ the program


def parse() -> argparse.Namespace:
    """Parse the options."""
    parser = record.parser(
        __doc__,
        rounds=FEWEST_ROUNDS,
        only="only these loads, separated by commas: " + ", ".join(load.name for load in LOADS),
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="duration of a load (default: %(default)s)"
    )
    parser.add_argument(
        "--backlog", type=int, default=200_000, help="messages of the load consume (default: %(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round with short loads, to check that everything works"
    )
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help=f"measure nothing; write the newest kept results into FILE, such as {PAGE.relative_to(ROOT)}",
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.backlog = 1, QUICK_S, QUICK_BACKLOG
    wanted = [name for name in options.only.split(",") if name]
    if unknown := set(wanted) - {load.name for load in LOADS}:
        parser.error(f"--only: there is no load {', '.join(sorted(unknown))}; see --help")
    options.loads = [load for load in LOADS if not wanted or load.name in wanted]
    options.failed = []
    return options


def main() -> None:
    """Measure, print, and write the requested results."""
    options = parse()
    if options.page:
        write_page(options.page)
        return
    about = record.begin(options, beside_nsqd=False)
    try:
        peer_servers.programs()
    except PeerUnavailable as reason:
        sys.exit(f"the load generator is not available: {reason}")
    ours, *others = PROMISES[0].contenders
    available = {peer.name for peer in (ours, *peer_servers.available(others))}
    versions = {OURS: about["trio_nsq"]} | {
        peer.name: peer_servers.version(peer.command) for peer in others if peer.name in available
    }
    print(*(f"{name}: {version}" for name, version in versions.items()), sep="\n", flush=True)
    results: list[Result] = []
    for number in range(1, options.rounds + 1):
        for promise in PROMISES:
            contenders = [peer for peer in promise.contenders if peer.name in available]
            try:
                for result in measure_round(number, promise, contenders, options):
                    results.append(result)
                    print(_told(result), flush=True)
            except record.FAILURES as exc:
                options.failed.append(f"round {number}: {promise.name}: a server did not stop: {exc}")
    kept = {
        "machine": about,
        "versions": versions,
        "settings": {"rounds": options.rounds, "seconds": options.seconds, "backlog": options.backlog},
        "promises": [
            {
                "name": promise.name,
                "title": promise.title,
                "contenders": {peer.name: peer.means for peer in promise.contenders},
            }
            for promise in PROMISES
        ],
        "loads": {load.name: load.title for load in LOADS},
        "results": [asdict(result) for result in results],
    }
    if results:
        print("", tables(kept), sep="\n")
    record.finish(kept, options, "peers")
    if options.keep:
        write_page(PAGE)
        subprocess.run([sys.executable, str(ROOT / "docs/make_pictures.py"), "--charts"], check=True)
    if options.failed:
        sys.exit("\n".join(("failed and skipped:", *options.failed)))


if __name__ == "__main__":
    main()
