"""Measure memory, stop time and start time with a backlog of ten million messages, compared with nsqd.

One topic with one channel, without consumers while it is filled. The brokers run in turn, each on an empty data folder.
"""

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.contenders import EVERY_OK, IN_MEMORY, NSQD, Contender, cpu_s, memory_mib
from bench.loads import CHANNEL, TOPIC, children_cpu_s, fill, reading, unfinished

from interop.peers import Broker

BODY_BYTES = 100
BATCH = 1000
MIB = 1024 * 1024
STOP_DEADLINE_S = 600
CONSUME_S = 3.0


CONTENDERS = [
    NSQD,
    IN_MEMORY.with_flags("--mem-queue-size=1000000000"),
    EVERY_OK,
    replace(EVERY_OK.with_flags("--mem-queue-size=1000000"), name="ours, --mem-queue-size=1000000"),
]


@dataclass
class Result:
    """The figures of one broker. Times in seconds, resident memory in MiB.

    Attributes:
        messages: The number of queued messages.
        fill_s: The time to queue them.
        memory_empty, memory_tenth, memory_full: Memory without messages, with a tenth of them, and with all.
        stop_s: From SIGTERM until the process ends.
        start_s: From the start of the process until clients can connect.
        memory_started: Memory after the start.
        left: The number of messages after the start.
        first_message_s: From SUB until the first message arrives.
        memory_consumed: Memory after consuming for a while.
        stop_again_s: Like `stop_s`, after consuming.
        consumed: The number of consumed messages.
        cpu_s: The processor time of the broker from its first start until clients can connect again.
    """

    broker: str
    flags: Sequence[str]
    messages: int = 0
    fill_s: float = 0
    memory_empty: float = 0
    memory_tenth: float = 0
    memory_full: float = 0
    stop_s: float = 0
    start_s: float = 0
    memory_started: float = 0
    left: int = 0
    first_message_s: float = 0
    memory_consumed: float = 0
    stop_again_s: float = 0
    consumed: int = 0
    cpu_s: float = 0


def stop(broker: Broker) -> float:
    """Stop a broker with SIGTERM; return how long it took."""
    began_s = time.perf_counter()
    broker.process.terminate()
    broker.process.wait(STOP_DEADLINE_S)
    return time.perf_counter() - began_s


def first_message(broker: Broker) -> float:
    """Subscribe and return the time until the first message arrives. The message is not finished."""
    host, _, port = broker.tcp_address.rpartition(":")
    began_s = time.perf_counter()
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"  V2SUB {TOPIC} {CHANNEL}\nRDY 1\n".encode())
        received = b""
        while len(received) < 10 + 4 + 4 + 26:  # the frame of OK, and the beginning of the next
            received += connection.recv(4096)
    return time.perf_counter() - began_s


def measure(
    contender: Contender,
    messages: int,
    data_path: Path,
    body_bytes: int = BODY_BYTES,
    consume_s: float = CONSUME_S,
) -> Result:
    """Fill one broker, stop it, start it again, and optionally consume some messages."""
    result = Result(contender.name, contender.flags)
    with tempfile.TemporaryDirectory(prefix="backlog-", dir=data_path) as folder:
        data = Path(folder) / "data"
        with contender.start(data, *contender.flags) as broker:
            broker.create(TOPIC, CHANNEL)
            result.memory_empty = memory_mib(broker)
            began_s = time.perf_counter()
            fill(broker, messages // 10, body_bytes, BATCH)
            result.memory_tenth = memory_mib(broker)
            result.messages = fill(broker, messages, body_bytes, BATCH)
            result.fill_s = time.perf_counter() - began_s
            result.memory_full = memory_mib(broker)
            generators_s = children_cpu_s()
            result.stop_s = stop(broker)
            result.cpu_s = children_cpu_s() - generators_s  # the kernel adds it when the process has ended
        began_s = time.perf_counter()
        with contender.start(data, *contender.flags) as broker:
            result.start_s = time.perf_counter() - began_s
            result.cpu_s += cpu_s(broker)
            result.memory_started = memory_mib(broker)
            result.left = unfinished(broker)
            result.first_message_s = first_message(broker)
            if consume_s:
                reading(broker, consume_s).finish()
            result.memory_consumed = memory_mib(broker)
            result.consumed = result.left - unfinished(broker)
            result.stop_again_s = stop(broker)
    return result


COLUMNS: list[tuple[str, Callable[[Result], str]]] = [
    ("queued", lambda r: f"{r.messages:,}"),
    ("fill", lambda r: f"{r.fill_s:.0f} s"),
    ("MiB empty", lambda r: f"{r.memory_empty:,.0f}"),
    ("a tenth", lambda r: f"{r.memory_tenth:,.0f}"),
    ("full", lambda r: f"{r.memory_full:,.0f}"),
    ("stop", lambda r: f"{r.stop_s:.2f} s"),
    ("start", lambda r: f"{r.start_s:.2f} s"),
    ("MiB then", lambda r: f"{r.memory_started:,.0f}"),
    ("still there", lambda r: f"{r.left:,}"),
    ("1st message", lambda r: f"{r.first_message_s:.3f} s"),
    ("consumed", lambda r: f"{r.consumed:,}"),
    ("MiB then", lambda r: f"{r.memory_consumed:,.0f}"),
    ("stop", lambda r: f"{r.stop_again_s:.2f} s"),
]


def table(results: Sequence[Result]) -> str:
    """Format a line for each figure and a column for each broker, with the median of the rounds."""
    brokers = list(dict.fromkeys(result.broker for result in results))
    lines = [" " * 14 + "".join(f"{name:>34}" for name in brokers)]
    medians = [median([result for result in results if result.broker == name]) for name in brokers]
    for title, show in COLUMNS:
        lines.append(f"{title:<14}" + "".join(f"{show(result):>34}" for result in medians))
    return "\n".join(lines)


def median(results: Sequence[Result]) -> Result:
    """Return the median of each figure."""
    first = results[0]
    figures: dict[str, Any] = {
        name: type(value)(statistics.median(getattr(result, name) for result in results))
        for name, value in asdict(first).items()
        if isinstance(value, int | float)
    }
    return Result(first.broker, first.flags, **figures)


def parse() -> argparse.Namespace:
    """Return the options of this run."""
    parser = record.parser(__doc__, rounds=1, only="the brokers whose names contain this")
    parser.add_argument(
        "--messages", type=int, default=10_000_000, help="how many are queued (default: ten million)"
    )
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the requested results."""
    options = parse()
    room = os.statvfs(options.data_path)
    # nsqd has each message in the topic's file and the channel's
    needed = options.messages * (BODY_BYTES + 60) * 2
    if room.f_bavail * room.f_frsize < needed:
        sys.exit(
            f"{options.data_path} has less than the required {needed // MIB:,} MiB: choose another --data-path"
        )
    about = record.begin(options)
    results = []
    for number in range(1, options.rounds + 1):
        for contender in CONTENDERS:
            if options.only in contender.name:
                results.append(measure(contender, options.messages, options.data_path))
                print(f"round {number}: {results[-1]}", flush=True)
    print("", table(results), sep="\n")
    record.finish(
        {"machine": about, "body_bytes": BODY_BYTES, "results": [asdict(result) for result in results]},
        options,
        "backlog",
    )


if __name__ == "__main__":
    main()
