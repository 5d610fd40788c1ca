"""Compare a broker that archives with one that does not, and a restore with a download; count requests to the store.

The archive is in a bucket of versitygw, an S3 server on this machine, which shares its processors and its disk. So the
processor time is that of the broker's process alone; rates and latencies are lower limits.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.contenders import cpu_s
from bench.loads import goload
from bench.peer_servers import Servers, run_load
from bench.verdicts import judge_goal

from interop.peers import Broker, qcli_serve
from storage.stores import Store, proxy, versitygw
from trio_nsq.archive.restore import RestorePlan
from trio_nsq.broker.restoring import restore_folder
from trio_nsq.storage import Storage, storage_at

PLAIN, ARCHIVES, BEFORE_OK = "without an archive", "--archive", "--archive-before-ok"
RATE = 5000
CPU_GOAL, P99_GOAL, RESTORE_GOAL = 1.10, 1.2, 0.7
WARM_SECONDS = 0.5
PATIENCE_S = 120.0
DAY_S = 86_400
SMALL_SEGMENTS = "--max-bytes-per-file=16000000"
COPY_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Workload:
    """A load.

    Attributes:
        name: The name on the command line.
        command, flags: Of goload; `publish` is the generator for clusters, which measures latencies.
        figure, unit: What is compared; less is better.
        goal: The most that the ratio may be; None: there is no goal, and only the archive's wait is measured.
    """

    name: str
    command: str
    flags: Mapping[str, object]
    figure: str = "broker_us"
    unit: str = "us"
    goal: float | None = CPU_GOAL


def _publishing(name: str, connections: int, batch: int = 1) -> Workload:
    return Workload(name, "pub", {"connections": connections, "batch": batch})


COMPARED = [
    _publishing("pub-1", 1),
    _publishing("pub-16", 16),
    _publishing("pub-200", 200),
    _publishing("mpub-100", 4, 100),
    Workload("oks", "oks", {"connections": 50, "rate": RATE}, "p99_ms", "ms", P99_GOAL),
]
WAITING = [
    Workload(f"before-ok-{connections}", "publish", {"connections": connections}, goal=None)
    for connections in (1, 16, 200)
]
RESTORE, COSTS = "restore", "costs"


@dataclass(frozen=True)
class Result:
    """One measurement.

    Attributes:
        figures: Of the generator, with `rate`, and `broker_us`: the broker's processor time per message; or `ratio`
            of a restore, and the rates.
        others: The share of the processors that other processes took, 0 to 1; also the S3 server.
    """

    round: int
    load: str
    contender: str
    figures: dict[str, float]
    others: float


@contextmanager
def broker_of(contender: str, folder: Path, place: str, store: Store, *more: str) -> Iterator[Broker]:
    """Run a broker; one with an archive has written its first checkpoint."""
    flags = {PLAIN: (), ARCHIVES: (f"--archive={place}",)}.get(
        contender, (f"--archive={place}", "--archive-before-ok")
    )
    with qcli_serve(folder / "data", *flags, *more, env=store.env) as broker:
        if flags:
            until_archived(broker)
        yield broker


def until_archived(broker: Broker) -> None:
    """Wait until everything is archived."""
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        found = json.loads(broker.http("GET", "/stats", format="json"))["archive"]
        if found["state"] == "archiving" and not found["lag_operations"]:
            return
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"the archive is late: {found}")
        time.sleep(0.05)


def measure(
    workload: Workload, contender: str, number: int, *, store: Store, options: argparse.Namespace
) -> Result:
    """Run a load on a new broker with a new archive."""
    before = record.processors()
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=options.data_path) as folder,
        broker_of(contender, Path(folder), store.new_place(), store) as broker,
    ):
        address = broker.tcp_address
        goload("pub", address, connections=4, batch=100, runfor=f"{WARM_SECONDS}s", topic="warm")
        used_s = -cpu_s(broker)
        if workload.command == "publish":
            servers = Servers([address], [broker.process.pid])
            found = run_load("nsq", servers, runfor=f"{options.seconds}s", **workload.flags)
        else:
            found = goload(workload.command, address, runfor=f"{options.seconds}s", **workload.flags)
        if contender != PLAIN:
            until_archived(broker)
        used_s += cpu_s(broker)
    figures = found | {
        "rate": found["messages"] / found["seconds"],
        "broker_us": used_s / found["messages"] * 1e6,
    }
    return Result(number, workload.name, contender, figures, record.share_of_others(before))


def compared_line(workload: Workload, results: Sequence[Result]) -> str:
    """Return the line of a workload with a goal."""
    assert workload.goal is not None
    pairs = [
        (a, b)
        for a in results
        for b in results
        if (a.contender, b.contender) == (ARCHIVES, PLAIN) and a.round == b.round
    ]
    figure = workload.figure
    ratios = [a.figures[figure] / b.figures[figure] for a, b in pairs]
    others = statistics.median(each.others for each in results)
    # Processor time does not depend on what others take, up to what caches and clocks do.
    busy = others if figure != "broker_us" else 0.0

    def medians(name: str) -> str:
        return " : ".join(
            f"{statistics.median(each.figures[name] for each in side):,.4g}"
            for side in zip(*pairs, strict=True)
        )

    cells = [
        workload.name,
        f"{medians(figure)} {workload.unit}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
        f"at most {workload.goal:g} {judge_goal(ratios, workload.goal, less=True, others=busy)}".strip(),
        medians("rate"),
        f"{100 * others:.0f} %",
    ]
    return "| " + " | ".join(cells) + " |"


def waiting_line(workload: Workload, results: Sequence[Result]) -> str:
    """Return the line of a workload whose OKs wait for the archive."""
    names = ("rate", "p50_ms", "p99_ms", "broker_us")
    medians = [f"{statistics.median(each.figures[name] for each in results):,.4g}" for name in names]
    return "| " + " | ".join([workload.name.rpartition("-")[2], *medians]) + " |"


# ---------------------------------------------------------------------- restore


def measure_restore(number: int, *, store: Store, options: argparse.Namespace) -> Result:
    """Restore an archive, and download the objects that a restore reads, in turn."""
    before = record.processors()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.data_path) as name, store.here():
        folder, place = Path(name), store.new_place()
        with broker_of(ARCHIVES, folder, place, store, SMALL_SEGMENTS) as broker:
            for _ in range(max(1, options.restore_mb // 4)):
                bodies = (os.urandom(1000) for _ in range(4000))
                framed = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
                broker.post("/mpub", (4000).to_bytes(4, "big") + framed, topic="t", binary="true")
            until_archived(broker)
        with broker_of(ARCHIVES, folder, place, store, SMALL_SEGMENTS):
            pass  # a start archives the closed segments
        storage = storage_at(place)
        steps: dict[str, Callable[[], int]] = {
            "restore": partial(_restore, place, folder / "restored"),
            "download": partial(_download, storage, folder / "downloaded"),
        }
        figures: dict[str, float] = {}
        for step, run in list(steps.items())[:: 1 if number % 2 else -1]:
            began_s = time.monotonic()
            size = run()
            figures[step] = size / (time.monotonic() - began_s) / 1e6
    figures["ratio"] = figures["restore"] / figures["download"]
    figures["size"] = size / 1e6
    return Result(number, RESTORE, ARCHIVES, figures, record.share_of_others(before))


def _restore(place: str, folder: Path) -> int:
    size = 0

    def count(more: int) -> None:
        nonlocal size
        size += more

    restore_folder(place, folder, on_read=count)
    return size


def _download(storage: Storage, folder: Path) -> int:
    """Download what a restore reads, durably."""
    folder.mkdir()
    point = RestorePlan(storage).point
    names = [
        *point.checkpoint.part_names,
        *(each.name for each in point.segments.values()),
        *(each.name for each in point.stream),
    ]
    size = 0
    for count, name in enumerate(names):
        with storage.open_input(name) as file, (folder / str(count)).open("wb") as copy:
            while data := file.read(COPY_BYTES):
                size += copy.write(data)
            copy.flush()
            os.fsync(copy.fileno())
    return size


# ---------------------------------------------------------------------- costs


def measure_costs(name: str, interval: str, rate: float, *, store: Store, options: argparse.Namespace) -> str:
    """Return a line with the requests and bytes of a day, extrapolated."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=options.data_path) as folder,
        proxy(store) as counted,
    ):
        behind = store.behind(counted.endpoint)
        with broker_of(
            ARCHIVES, Path(folder), store.new_place(), behind, f"--archive-interval={interval}"
        ) as broker:
            broker.http("POST", "/topic/create", topic="t")
            until_archived(broker)
            first, first_bytes = len(counted.requests), counted.received_bytes
            end_s = time.monotonic() + options.cost_seconds
            while (left_s := end_s - time.monotonic()) > 0:
                if rate:
                    broker.post("/pub", b"x" * 200, topic="t")
                time.sleep(min(left_s, 1 / rate if rate else left_s))
            requests, size = counted.requests[first:], counted.received_bytes - first_bytes
    kinds = Counter(map(_kind, requests))
    per_day = DAY_S / options.cost_seconds
    shown = [f"{kinds[kind] * per_day:,.0f}" for kind in ("stream", "lease", "other writes", "reads")]
    return "| " + " | ".join([name, interval, *shown, f"{size * per_day / 1e6:,.1f}"]) + " |"


def _kind(request: str) -> str:
    method, _, path = request.partition(" ")
    path = urllib.parse.unquote(path)
    if method != "PUT":
        return "reads"
    return "stream" if "/@stream/" in path else "lease" if path.endswith("/@lease") else "other writes"


COST_ROWS = [
    ("1 message a second", "1s", 1.0),
    ("1 message a second", "10s", 1.0),
    ("idle", "1s", 0.0),
]


# ---------------------------------------------------------------------- the program


def _runs(store: Store, options: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[int], Result]]]:
    for workload in COMPARED:
        for contender in (PLAIN, ARCHIVES):
            run = partial(measure, workload, contender, store=store, options=options)
            yield workload.name, contender, run
    for workload in WAITING:
        yield (
            *(workload.name, BEFORE_OK),
            partial(measure, workload, BEFORE_OK, store=store, options=options),
        )
    yield RESTORE, ARCHIVES, partial(measure_restore, store=store, options=options)


def main() -> None:
    parser = record.parser(__doc__, rounds=5, only="loads, separated by commas")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="duration of a load (default: %(default)s)"
    )
    parser.add_argument(
        "--cost-seconds", type=float, default=60.0, help="duration of a count (default: %(default)s)"
    )
    parser.add_argument(
        "--restore-mb", type=int, default=400, help="size of the restored log (default: %(default)s)"
    )
    options = parser.parse_args()
    names = [*(each.name for each in (*COMPARED, *WAITING)), RESTORE, COSTS]
    wanted = options.only.split(",") if options.only else names
    if unknown := set(wanted) - set(names):
        sys.exit(f"--only: unknown: {', '.join(sorted(unknown))}")
    about = record.begin(options, beside_nsqd=False)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.data_path) as bucket:
        gateway: AbstractContextManager[Store] = versitygw(Path(bucket))
        with gateway as store:
            results, failures = _measure(store, wanted, options)
            _print_tables(results)
            if COSTS in wanted:
                print(
                    "\nRequests and megabytes of a day:\n\n| publishing | --archive-interval | operations | "
                    "renewals of the lease | other writes | reads | MB written |"
                )
                print("|---" * 7 + "|")
                for row in COST_ROWS:
                    print(measure_costs(*row, store=store, options=options), flush=True)
    record.finish({"about": about, "results": [asdict(each) for each in results]}, options, "archive")
    sys.exit(bool(failures))


def _measure(store: Store, wanted: Sequence[str], options: argparse.Namespace) -> tuple[list[Result], int]:
    """Return the results, and how many measurements failed."""
    results: list[Result] = []
    failures = 0
    for number in range(options.rounds):
        runs = [each for each in _runs(store, options) if each[0] in wanted]
        for load, contender, run in runs[:: 1 if number % 2 else -1]:
            try:
                results.append(run(number))
            except record.FAILURES as exc:
                failures += 1
                print(f"{load}, {contender}: {exc}", file=sys.stderr)
        if runs:
            print(f"round {number + 1} of {options.rounds} is over", file=sys.stderr, flush=True)
    return results, failures


def _print_tables(results: Sequence[Result]) -> None:
    of_load = {
        name: [each for each in results if each.load == name] for name in {each.load for each in results}
    }
    compared = [
        each
        for each in COMPARED
        if {result.contender for result in of_load.get(each.name, [])} == {ARCHIVES, PLAIN}
    ]
    if compared:
        print(
            "\n| load | --archive : none | ratio (range) | goal | rates, msg/s | other processes |\n"
            + "|---" * 6
            + "|"
        )
        print(*(compared_line(each, of_load[each.name]) for each in compared), sep="\n")
    if waiting := [each for each in WAITING if each.name in of_load]:
        print(
            "\n--archive-before-ok:\n\n| clients | msg/s | p50, ms | p99, ms | broker's CPU per message, us |\n"
            + "|---" * 5
            + "|"
        )
        print(*(waiting_line(each, of_load[each.name]) for each in waiting), sep="\n")
    if restores := of_load.get(RESTORE):
        ratios = [each.figures["ratio"] for each in restores]
        others = statistics.median(each.others for each in restores)
        restore, download, size = (
            statistics.median(each.figures[name] for each in restores)
            for name in ("restore", "download", "size")
        )
        print("\n| restore : download, MB/s | ratio (range) | goal | MB |\n" + "|---" * 4 + "|")
        print(
            f"| {restore:,.0f} : {download:,.0f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f}) | at least {RESTORE_GOAL:g} "
            f"{judge_goal(ratios, RESTORE_GOAL, others=others)} | {size:,.0f} |"
        )


if __name__ == "__main__":
    main()
