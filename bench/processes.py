"""Measure the processor time per message, and the rates, of `qcli serve --processes` beside one broker.

Each round publishes with PUB on the shared port, 50 commands at a time, and then consumes: on the addresses of the
processes, as consumers with discovery do, and on the shared port. The clients are threads of this program, so rates say
little unless there are more cores than processes; the processor time is that of the brokers alone.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from struct import pack, unpack_from
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record

BODY_BYTES = 100
AT_ONCE = 50
OK_BYTES = 10
READY = 500
SILENCE_S = 10.0
"""A consumer that has received nothing for so long gives up: the messages are lost."""


@dataclass(frozen=True)
class Figures:
    """The figures of a round, for one way to publish or to consume."""

    us: float
    """Processor time of the brokers per message, microseconds."""
    per_s: float
    """Messages per second."""


@contextmanager
def serving(processes: int, folder: Path, sync: str) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Run one broker, or with `processes` above 0 a node. Yields the PIDs of the brokers and the addresses."""
    file = folder / "addresses.json"
    command = [sys.executable, "-m", "qcli", "serve", "--data-path", str(folder / "data"), "--sync", sync]
    command += ["--tcp-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--log-level", "error"]
    command += ["--address-file", str(file), *(("--processes", str(processes)) if processes else ())]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            while not file.exists():
                assert process.poll() is None, "the broker has ended"
                time.sleep(0.01)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield (
                [int(each) for each in children] if processes else [process.pid],
                json.loads(file.read_text()),
            )
        finally:
            process.terminate()


def cpu_s(pids: Sequence[int]) -> float:
    """Return the processor time that processes have used."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def connect(address: str) -> socket.socket:
    """Connect, and begin to speak NSQ's protocol."""
    host, _, port = address.rpartition(":")
    client = socket.create_connection((host, int(port)), timeout=SILENCE_S)
    client.sendall(b"  V2")
    return client


def publish(address: str, batches: int) -> None:
    """Publish batches of PUBs, each after the answers to the one before."""
    batch = (b"PUB t\n" + pack(">i", BODY_BYTES) + b"x" * BODY_BYTES) * AT_ONCE
    with connect(address) as client:
        for _ in range(batches):
            client.sendall(batch)
            left = AT_ONCE * OK_BYTES
            while left:
                left -= len(client.recv(left))


class Consumers:
    """Consumers of one channel that end when they have received `wanted` messages together."""

    def __init__(self, wanted: int) -> None:
        self._left = wanted
        self._lock = threading.Lock()

    def consume(self, address: str) -> None:
        """Consume until all messages were received. Raises TimeoutError: messages are lost."""
        with connect(address) as client:
            client.sendall(b"SUB t c\nRDY %d\n" % READY)
            client.settimeout(0.2)
            received = bytearray()
            silent_since = time.monotonic()
            while self._left > 0:
                try:
                    received += client.recv(1 << 18)
                except TimeoutError:
                    if time.monotonic() - silent_since > SILENCE_S:
                        raise
                    continue
                silent_since = time.monotonic()
                lines = [b"FIN %s\n" % each for each in take_ids(received)]
                with self._lock:
                    self._left -= len(lines)
                client.sendall(b"".join(lines))


def take_ids(received: bytearray) -> list[bytes]:
    """Remove the complete frames, and return the ids of the messages."""
    ids, start = [], 0
    while len(received) - start >= 8:
        size, kind = unpack_from(">ii", received, start)
        if len(received) - start < 4 + size:
            break
        if kind == 2:
            ids.append(bytes(received[start + 18 : start + 34]))
        start += 4 + size
    del received[:start]
    return ids


def in_threads(work: Any, arguments: Sequence[tuple[Any, ...]]) -> None:
    threads = [threading.Thread(target=work, args=each) for each in arguments]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def measure(
    processes: int, *, shared: bool, messages: int, clients: int, sync: str, data_path: Path
) -> tuple[Figures, Figures]:
    """Return the figures of publishing and of consuming."""
    batches = messages // clients // AT_ONCE
    total = batches * clients * AT_ONCE
    figures = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=data_path) as folder,
        serving(processes, Path(folder), sync) as (pids, bound),
    ):
        places = [bound["tcp_address"]]
        if processes and not shared:
            places = [each["tcp_address"] for each in bound["processes"]]
        consumers = Consumers(total)
        for work, arguments in (
            (publish, [(bound["tcp_address"], batches)] * clients),
            (consumers.consume, [(places[number % len(places)],) for number in range(max(4, len(places)))]),
        ):
            before_s, began_s = cpu_s(pids), time.monotonic()
            in_threads(work, arguments)
            took_s = time.monotonic() - began_s
            figures.append(Figures((cpu_s(pids) - before_s) / total * 1e6, total / took_s))
    return figures[0], figures[1]


def main() -> None:
    """Print the medians of all rounds, and write the requested results."""
    parser = record.parser(__doc__, rounds=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=16, help="publishers")
    parser.add_argument("--sync", default="interval", choices=["always", "interval"])
    options = parser.parse_args()
    about = record.begin(options, beside_nsqd=False)
    ways = {
        "one broker": (0, False),
        "processes": (options.processes, False),
        "shared port": (options.processes, True),
    }
    found: dict[str, list[tuple[Figures, Figures]]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, (processes, shared) in ways.items():
            figures = measure(
                processes,
                shared=shared,
                messages=options.messages,
                clients=options.clients,
                sync=options.sync,
                data_path=options.data_path,
            )
            found[name].append(figures)
            print(name, *figures, file=sys.stderr)
    print(f"{'':14} {'publish':>20} {'consume':>20}")
    for name, rounds in found.items():
        cells = [
            f"{statistics.median(each[step].us for each in rounds):.2f} us "
            f"{statistics.median(each[step].per_s for each in rounds):9,.0f}/s"
            for step in (0, 1)
        ]
        print(f"{name:14} {cells[0]:>20} {cells[1]:>20}")
    results = {
        name: [{"publish": asdict(published), "consume": asdict(consumed)} for published, consumed in rounds]
        for name, rounds in found.items()
    }
    settings = {
        name: getattr(options, name) for name in ("processes", "rounds", "messages", "clients", "sync")
    }
    record.finish({"machine": about, "settings": settings, "results": results}, options, "processes")


if __name__ == "__main__":
    main()
