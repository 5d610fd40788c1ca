"""Compare to-file, to-http and to-nsq with nsq_to_file, nsq_to_http and nsq_to_nsq on the same backlog.

All run in turn, because rates on a shared machine drift; compare the ratios. README.md explains the table.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.contenders import EVERY_OK, IN_MEMORY, process_cpu_s
from bench.loads import PATIENCE_S, unfinished

from interop.connectors import COMMANDS, connector, publish
from interop.peers import Broker

TOPIC = "bench"
BODY_BYTES = 200
LEFT = 200
"""Programs of NSQ keep their last messages in flight until a sync: these are not waited for."""
NSQD, OURS = "nsqd", "our broker"
BROKERS = {NSQD: IN_MEMORY, OURS: EVERY_OK}
MANY = "--max-in-flight=2500"
"""nsqd's maximum. NSQ's programs are not faster with their default, 200."""


@dataclass(frozen=True)
class Contender:
    """A program on the backlog of a broker.

    Attributes:
        program: Such as `nsq_to_file` or `to-file`.
        source: The broker with the backlog.
        flags: `OUT` stands for a folder, `RECEIVER` for an address of HTTP, `TO` and `TO-HTTP` for those of the target.
        target: The broker that gets the messages.
        share: The part of the backlog, so that all take about the same time.
    """

    program: str
    source: str
    flags: tuple[str, ...] = ()
    target: str = ""
    share: float = 1.0

    @property
    def title(self) -> str:
        """The name in the table."""
        to = f" to {self.target}" if self.target and self.target != self.source else ""
        return f"{self.program}, {self.source}{to}"


def _three(original: str, *flags: str, share: float = 1.0, ours: Sequence[str] = ()) -> list[Contender]:
    """Return the original on both brokers, and the command that replaces it on ours."""
    return [
        Contender(original, NSQD, (*flags, MANY), share=share),
        Contender(original, OURS, (*flags, MANY), share=share),
        Contender(COMMANDS[original], NSQD, (*flags, *ours), share=share),
        Contender(COMMANDS[original], OURS, (*flags, *ours), share=share),
    ]


FILE = ("--output-dir=OUT", "--sync-interval=1s")
POST = "--post=RECEIVER"
TO = "--destination-nsqd-tcp-address=TO"
TO_BOTH = (TO, "--destination-nsqd-http-address=TO-HTTP")
WORKLOADS: dict[str, list[Contender]] = {
    # The first contender is the one that the others are compared with.
    "file": _three("nsq_to_file", *FILE),
    "file-gzip": _three("nsq_to_file", *FILE, "--gzip"),
    "http": _three("nsq_to_http", POST, share=0.03),
    "http-batch": [
        Contender("nsq_to_http", NSQD, (POST, MANY), share=0.03),
        Contender("to-http", NSQD, (POST, "--batch-size=100")),
        Contender("to-http", OURS, (POST, "--batch-size=100")),
    ],
    "nsq": [
        Contender("nsq_to_nsq", NSQD, (TO, MANY), target=NSQD),
        Contender("nsq_to_nsq", OURS, (TO, MANY), target=OURS),
        Contender("to-nsq", NSQD, TO_BOTH, target=NSQD),
        Contender("to-nsq", NSQD, TO_BOTH, target=OURS),
        Contender("to-nsq", OURS, TO_BOTH, target=NSQD),
        Contender("to-nsq", OURS, TO_BOTH, target=OURS),
    ],
}


@dataclass(frozen=True)
class Result:
    """One measurement: messages per second from the start of the program, and its processor time per message."""

    round: int
    workload: str
    contender: str
    rate: float
    cpu_us: float


def bodies(count: int) -> list[bytes]:
    """Return JSON bodies, which compress as log lines do."""
    found = []
    for number in range(count):
        line = {"time": 1795262400 + number // 50, "id": number, "user": f"user{number * 7919 % 10_007}"}
        found.append((json.dumps(line)[:-1] + ', "path": "/shop/items/').encode())
    return [body + b"%x" % (number * 2654435761) + b"x" * 200 for number, body in enumerate(found)]


def measure(workload: str, contender: Contender, number: int, options: argparse.Namespace) -> Result:
    """Measure a contender once."""
    os.sync()  # what was written before must not delay this
    count = round(options.messages * contender.share)
    channel = next(name for name, ours in COMMANDS.items() if contender.program in (name, ours))
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=options.data_path) as out,
        BROKERS[contender.source].running(options.data_path) as source,
        _target(contender, options.data_path) as target,
    ):
        source.create(TOPIC, channel)
        publish(source, TOPIC, options.bodies[:count])
        replaced = {
            "=OUT": f"={out}",
            "=RECEIVER": f"=http://{target.http_address}/pub?topic=sink%23ephemeral",
            "=TO": f"={target.tcp_address}",
            "=TO-HTTP": f"={target.http_address}",
        }
        flags = [f"--topic={TOPIC}", *contender.flags]
        for word, value in replaced.items():
            flags = [flag.replace(word, value) if flag.endswith(word) else flag for flag in flags]
        began_s = time.perf_counter()
        with connector(contender.program, source, *flags) as child:
            deadline_s = began_s + PATIENCE_S
            while unfinished(source, TOPIC) > LEFT:
                if child.process.poll() is not None:
                    child.fail("ended")
                if time.perf_counter() > deadline_s:
                    raise RuntimeError(f"{contender.title}: not finished within {PATIENCE_S} s")
                time.sleep(0.02)
            elapsed_s = time.perf_counter() - began_s
            cpu_us = 1e6 * process_cpu_s(child.process.pid) / count
    return Result(number, workload, contender.title, count / elapsed_s, cpu_us)


@contextmanager
def _target(contender: Contender, data_path: Path) -> Iterator[Broker]:
    """Run the broker that messages go to; an nsqd also takes HTTP requests, each of which it drops."""
    with BROKERS[contender.target or NSQD].running(data_path) as target:
        if contender.target:
            target.create(TOPIC)
        yield target


def table(results: Sequence[Result]) -> str:
    """Format the medians, and the ratios to the first contender within each round."""
    lines = [f"{'':<44}{'messages/s':>12}{'ratio':>8} {'(min - max)':<16}{'CPU us/message':>14}"]
    for workload, contenders in WORKLOADS.items():
        own = [result for result in results if result.workload == workload]
        if not own:
            continue
        lines.append(workload)
        first = {result.round: result.rate for result in own if result.contender == contenders[0].title}
        for contender in contenders:
            found = [result for result in own if result.contender == contender.title]
            ratios = [result.rate / first[result.round] for result in found if result.round in first]
            if not ratios:
                continue
            spread = f"({min(ratios):.2f} - {max(ratios):.2f})"
            rate = statistics.median(result.rate for result in found)
            cpu_us = statistics.median(result.cpu_us for result in found)
            ratio = statistics.median(ratios)
            lines.append(f"  {contender.title:<42}{rate:>12,.0f}{ratio:>8.2f} {spread:<16}{cpu_us:>14.2f}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the requested results."""
    parser = record.parser(
        __doc__, rounds=3, only="only these workloads, separated by commas: " + ", ".join(WORKLOADS)
    )
    parser.add_argument("--messages", type=int, default=1_000_000, help="the backlog (default: %(default)s)")
    options = parser.parse_args()
    wanted = [name for name in options.only.split(",") if name] or list(WORKLOADS)
    if unknown := set(wanted) - WORKLOADS.keys():
        parser.error(f"--only: there is no workload {', '.join(sorted(unknown))}")
    about = record.begin(options)
    options.bodies = [body[:BODY_BYTES] for body in bodies(options.messages)]
    results: list[Result] = []
    for number in range(1, options.rounds + 1):
        for workload in wanted:
            for contender in WORKLOADS[workload]:
                try:
                    results.append(measure(workload, contender, number, options))
                except record.FAILURES as reason:
                    print(f"round {number}: {workload}: {contender.title} failed: {reason}", file=sys.stderr)
                    continue
                told = (
                    f"{results[-1].rate:,.0f} messages/s, {results[-1].cpu_us:.2f} us of processor time each"
                )
                print(f"round {number}: {workload}: {contender.title}: {told}", flush=True)
    print("", table(results), sep="\n")
    settings = {"rounds": options.rounds, "messages": options.messages}
    found = [asdict(result) for result in results]
    record.finish({"machine": about, "settings": settings, "results": found}, options, "connectors")


if __name__ == "__main__":
    main()
