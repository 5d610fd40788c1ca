"""Publish and consume rates of this broker beside nsqd, measured with NSQ's own load generators.

Rates of a shared machine drift from minute to minute, so the brokers take turns within every round, and what counts is
the ratio to nsqd in memory in the same round. README.md says how to read the table.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import trio_nsq
from interop.build import PeerUnavailable, go_program
from interop.peers import Broker, nsqd, qcli_serve

TOPIC, CHANNEL = "sub_bench", "ch"
BODY_BYTES = 200
BATCH = 200
CONNECTIONS = 2
FILL_CONNECTIONS = (
    16  # for a backlog that is not measured: many, so that syncing every OK does not take all day
)
READY_COUNT = 2500  # the most nsqd allows, and bench_reader's default

PUBLISH, CONSUME = "publish", "consume"
WORKLOADS = (PUBLISH, CONSUME)


@dataclass
class Contender:
    """A broker with its settings."""

    name: str
    start: Callable[..., AbstractContextManager[Broker]]
    flags: Sequence[str]
    backlog: int = 0
    """Messages to be there before consuming begins; raised whenever a consumer ran dry."""


BASELINE = Contender("nsqd, in memory", nsqd, ["--mem-queue-size=100000000"])
ON_DISK = Contender("nsqd, on disk", nsqd, ["--mem-queue-size=0"])
OURS = [
    Contender("ours, --sync=interval", qcli_serve, ["--sync=interval"]),
    Contender("ours, every OK synced", qcli_serve, []),
]


@dataclass
class Result:
    """What one broker did in one round."""

    round: int
    broker: str
    flags: Sequence[str]
    rates: dict[str, float] = field(default_factory=dict)
    """Messages per second, by workload."""
    backlog: int = 0
    """Messages that were there when consuming began."""
    ran_dry: bool = False
    """The consumers emptied the channel before their time was up: their rate is too low."""


def load(program: str, broker: Broker, seconds: float, connections: int, *flags: str) -> float:
    """Run one of NSQ's load generators against ``broker`` and return the messages per second it reports.

    Raises:
        RuntimeError: it failed, or reported nothing.
    """
    command = [
        str(go_program(program)),
        f"--nsqd-tcp-address={broker.tcp_address}",
        f"--runfor={seconds}s",
        f"--topic={TOPIC}",
        f"--size={BODY_BYTES}",
        *flags,
    ]
    env = os.environ | {"GOMAXPROCS": str(connections)}  # it opens one connection per Go processor
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds + 60)
    rate = re.search(r"([\d.]+)ops/s", done.stderr)
    if done.returncode or rate is None:
        log = "\n".join(broker.log()[-20:])
        raise RuntimeError(f"{program} failed: {done.stderr[-2000:]}\nThe broker's log:\n{log}")
    return float(rate[1])


def publish(broker: Broker, seconds: float, connections: int = CONNECTIONS) -> float:
    """Publish for ``seconds``; return the rate."""
    return load("bench_writer", broker, seconds, connections, f"--batch-size={BATCH}")


def unfinished(broker: Broker) -> int:
    """Return how many messages the channel still has to deliver or to see finished."""
    stats = json.loads(broker.http("GET", "/stats", format="json", topic=TOPIC, include_mem="false"))
    topic = stats["topics"][0]
    channel = topic["channels"][0]
    return int(topic["depth"] + channel["depth"] + channel["in_flight_count"])


def consume(broker: Broker, seconds: float, contender: Contender, result: Result) -> None:
    """Consume a backlog for ``seconds``, and note in ``result`` how that went.

    How much is enough depends on the broker and the machine: when the consumers run dry, they get another go at three
    times as much, and the next round begins with that.
    """
    for _ in range(3):
        result.backlog = unfinished(broker)
        while result.backlog < max(contender.backlog, 1):
            publish(broker, 0.5, FILL_CONNECTIONS)
            result.backlog = unfinished(broker)
        flags = [f"--channel={CHANNEL}", f"--rdy={READY_COUNT}"]
        result.rates[CONSUME] = load("bench_reader", broker, seconds, CONNECTIONS, *flags)
        result.ran_dry = unfinished(broker) <= CONNECTIONS * READY_COUNT  # what they held when they left
        if not result.ran_dry:
            break
        contender.backlog = 3 * result.backlog


def measure(contender: Contender, round_number: int, options: argparse.Namespace) -> Result:
    """Run the workloads once against a new broker with an empty data folder."""
    result = Result(round_number, contender.name, contender.flags)
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=options.data_path) as folder,
        contender.start(Path(folder) / "data", *contender.flags) as broker,
    ):
        broker.create(TOPIC, CHANNEL)
        if PUBLISH in options.workload:
            result.rates[PUBLISH] = publish(broker, options.seconds)
        if CONSUME in options.workload:
            # Shorter, so that what was published lasts where consuming is not much faster than publishing.
            consume(broker, options.seconds / 2, contender, result)
        if contender.start is nsqd:
            broker.process.kill()  # in good order it would first write all that is in its memory to disk
            broker.process.wait()
    return result


def ratios(results: Sequence[Result], broker: str, workload: str) -> list[float]:
    """Return, for each round, the rate of ``broker`` over that of nsqd in memory."""
    rates = {(result.round, result.broker): result.rates[workload] for result in results}
    return [rate / rates[number, BASELINE.name] for (number, name), rate in rates.items() if name == broker]


def table(results: Sequence[Result], workloads: Sequence[str]) -> str:
    """Return the table README.md explains."""
    lines = [
        " " * 24 + "".join(f"{f'{workload} msg/s':>16}{'ratio (min - max)':>24}" for workload in workloads)
    ]
    dry = {result.broker for result in results if result.ran_dry}
    for broker in dict.fromkeys(result.broker for result in results):
        line = f"{broker:<24}"
        for workload in workloads:
            rate = statistics.median(result.rates[workload] for result in results if result.broker == broker)
            ratio = ratios(results, broker, workload)
            mark = "*" if workload == CONSUME and broker in dry else " "
            spread = f"{statistics.median(ratio):.2f} ({min(ratio):.2f} - {max(ratio):.2f})"
            line += f"{rate:>15,.0f}{mark}{spread:>24}"
        lines.append(line)
    if dry:
        lines.append("* in some round the consumers ran out of messages: the true rate is higher")
    return "\n".join(lines)


def machine(data_path: Path) -> dict[str, str | int | None]:
    """Return what a reader of kept results has to know of the machine."""
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    file_system = subprocess.run(
        ["stat", "-f", "-c", "%T", data_path], capture_output=True, text=True, check=True
    )
    nsqd_version = subprocess.run(
        [go_program("nsqd"), "--version"], capture_output=True, text=True, check=True
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": models[0] if models else platform.processor(),
        "cpu_count": os.cpu_count(),
        "system": platform.platform(),
        "data_file_system": file_system.stdout.strip(),
        "python": platform.python_version(),
        "nsqd": nsqd_version.stdout.strip(),
        "trio_nsq": trio_nsq.__version__,
    }


def write_results(record: dict[str, Any], options: argparse.Namespace, kind: str = "") -> None:
    """Write what was measured to where `--json` and `--keep` say; `kind` is in the name of the file that is kept."""
    files = [options.json] if options.json else []
    if options.keep:
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%SZ")
        name = "-".join(filter(None, (stamp, kind, f"{os.cpu_count()}cpu.json")))
        files.append(Path(__file__).parent / "results" / name)
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n")
        print(f"written to {file}")


def parse() -> argparse.Namespace:
    """Return the options of this run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns each broker gets (default: 3)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        help="length of publishing; consuming takes half of it (default: 3)",
    )
    parser.add_argument(
        "--workload",
        type=lambda names: [name for name in WORKLOADS if name in names.split(",")],
        default=WORKLOADS,
        help="publish, consume, or publish,consume (default)",
    )
    parser.add_argument("--all", action="store_true", help="also nsqd with everything on disk")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw results to FILE")
    parser.add_argument("--keep", action="store_true", help="write the raw results to bench/results/")
    parser.add_argument(
        "--data-path",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder for the brokers' data while they run; a disk, or syncing costs nothing (default: %(default)s)",
    )
    options = parser.parse_args()
    if not options.workload:
        parser.error(f"--workload knows {' and '.join(WORKLOADS)}")
    return options


def main() -> None:
    """Measure, print, and write what was asked for."""
    options = parse()
    try:
        go_program("nsqd")
    except PeerUnavailable as reason:
        sys.exit(f"There is nothing to compare with: {reason}")

    about = machine(options.data_path)
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
    results = []
    for number in range(1, options.rounds + 1):
        for contender in [BASELINE, *([ON_DISK] if options.all else []), *OURS]:
            result = measure(contender, number, options)
            results.append(result)
            rates = ", ".join(f"{workload} {rate:,.0f}/s" for workload, rate in result.rates.items())
            print(
                f"round {number}: {result.broker}: {rates}{' (ran dry)' if result.ran_dry else ''}",
                flush=True,
            )
    print("", table(results, options.workload), sep="\n")

    settings = {
        "seconds": options.seconds,
        "body_bytes": BODY_BYTES,
        "batch": BATCH,
        "connections": CONNECTIONS,
    }
    record = {"machine": about, "settings": settings, "results": [asdict(result) for result in results]}
    write_results(record, options)


if __name__ == "__main__":
    main()
