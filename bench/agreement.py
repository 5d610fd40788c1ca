"""Compare `qcli bench` with NSQ's load generators, bench_writer and bench_reader, on the same brokers.

Both do the same: 2 connections, messages of 200 bytes, MPUBs of 200 with one under way, RDY 2500.
"""

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.contenders import EVERY_OK, IN_MEMORY, INTERVAL
from bench.loads import CHANNEL, CONNECTIONS, READY_COUNT, fill, reading, writing

from interop.peers import Broker

BROKERS = {"nsqd": IN_MEMORY, "I": INTERVAL, "F": EVERY_OK}
PUBLISH, CONSUME = "bench pub : bench_writer", "bench sub : bench_reader"
GOAL = 0.10


@dataclass(frozen=True)
class Rates:
    """Messages per second of elapsed time, and microseconds of the generator's processor time per message.

    The processor time is 0 if it is not known.
    """

    rate: float
    cpu_us: float


@dataclass(frozen=True)
class Pair:
    """Both measurements of a round."""

    round: int
    broker: str
    workload: str
    qcli: Rates
    nsq: Rates

    @property
    def ratio(self) -> float:
        """The rate of qcli divided by the one of NSQ's program."""
        return self.qcli.rate / self.nsq.rate


def qcli_bench(command: str, broker: Broker, topic: str, seconds: float) -> Rates:
    """Run `qcli bench`."""
    place, *flags = {
        "pub": (topic,),
        "sub": (f"{topic}/{CHANNEL}", "--yes", f"--max-in-flight={READY_COUNT}"),
    }[command]
    words = [sys.executable, "-m", "qcli", "bench", command, place, *flags]
    words += [f"--nsqd-tcp-address={broker.tcp_address}", f"--connections={CONNECTIONS}"]
    words += [f"--duration={round(1000 * seconds)}ms", "--format=json"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed: {done.stderr}")
    told = json.loads(done.stdout)
    return Rates(told["messages_per_second"], 1e6 * told["client_cpu_seconds"] / told["messages"])


def nsq_bench(command: str, broker: Broker, topic: str, seconds: float) -> Rates:
    """Run bench_writer or bench_reader."""
    rates = (writing if command == "pub" else reading)(broker, seconds, topic=topic).finish()
    return Rates(rates.rate, 1e6 / rates.cpu_rate)


PROGRAMS = {"qcli": qcli_bench, "nsq": nsq_bench}


def measure(number: int, name: str, workload: str, broker: Broker, options: argparse.Namespace) -> Pair:
    """Measure one directly after the other, in an order that changes from round to round, or both at the same time.

    Each has its own topic.
    """
    command = "pub" if workload == PUBLISH else "sub"
    for program in PROGRAMS:
        broker.create(program, CHANNEL)
        if command == "sub":
            fill(broker, round(options.backlog * options.seconds), topic=program)

    def run(program: str) -> Rates:
        return PROGRAMS[program](command, broker, program, options.seconds)

    order = list(PROGRAMS) if number % 2 else list(reversed(PROGRAMS))
    with ThreadPoolExecutor(len(order) if options.together else 1) as threads:
        found = dict(zip(order, threads.map(run, order), strict=True))
    for program in PROGRAMS:
        broker.http("POST", "/topic/delete", topic=program)
    if options.together:  # the kernel counts the processor time of both
        found["nsq"] = replace(found["nsq"], cpu_us=0.0)
    return Pair(number, name, workload, found["qcli"], found["nsq"])


def table(pairs: list[Pair]) -> str:
    """Return a line for each broker and workload: medians, and the median, minimum and maximum of the ratios."""
    lines = [f"{'broker':<8}{'':<28}{'msg/s':>24}{'ratio':>25}{'CPU us/msg':>18}"]
    for broker, workload in dict.fromkeys((pair.broker, pair.workload) for pair in pairs):
        mine = [pair for pair in pairs if (pair.broker, pair.workload) == (broker, workload)]
        ratios = [pair.ratio for pair in mine]
        qcli, nsq = (
            [statistics.median(getattr(rates, name) for rates in each) for name in ("rate", "cpu_us")]
            for each in ([pair.qcli for pair in mine], [pair.nsq for pair in mine])
        )
        ratio = statistics.median(ratios)
        rates = f"{qcli[0]:,.0f} : {nsq[0]:,.0f}"
        range_ = f"{ratio:.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
        verdict = "" if abs(ratio - 1) <= GOAL else "  MISSED"
        cpu = f"{qcli[1]:.2f} : {nsq[1]:.2f}"
        lines.append(f"{broker:<8}{workload:<28}{rates:>24}{range_:>25}{cpu:>18}{verdict}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the requested results."""
    parser = record.parser(__doc__, rounds=20, only="workloads whose name has this text, such as pub")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="length of one measurement (default: %(default)s)"
    )
    parser.add_argument("--brokers", default="nsqd,I,F", help="which ones (default: %(default)s)")
    parser.add_argument(
        "--backlog",
        type=int,
        default=1_500_000,
        help="messages to consume per second; must not run out (default: %(default)s)",
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="run both at the same time, against the effect of other work on the machine; use longer measurements",
    )
    options = parser.parse_args()
    about = record.begin(options)
    pairs: list[Pair] = []
    for name in options.brokers.split(","):
        with BROKERS[name].running(options.data_path) as broker:
            for number in range(1, options.rounds + 1):
                for workload in (PUBLISH, CONSUME):
                    if options.only in workload:
                        pair = measure(number, name, workload, broker, options)
                        pairs.append(pair)
                        print(f"round {number}: {name}: {workload}: {pair.ratio:.2f}", flush=True)
    print("", table(pairs), sep="\n")
    settings = {name: getattr(options, name) for name in ("seconds", "backlog", "together")}
    results = [asdict(pair) | {"ratio": round(pair.ratio, 3)} for pair in pairs]
    record.finish({"machine": about, "settings": settings, "results": results}, options, "agreement")


if __name__ == "__main__":
    main()
