"""Measure the lateness of timers and the cost of an idle broker, with 1 and 10,000 channels, compared with nsqd.

Lateness is measured by the client: from the due time of a message, by the client's clock, to its arrival. It includes
the round trip. README.md explains the tables.
"""

import argparse
import http.client
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Thread

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.connections import (
    MSG_TIMEOUT_MS,
    Client,
    Clients,
    Message,
    prepare_nsqd,
    prepare_ours,
    topics_of,
)
from bench.contenders import EVERY_OK, NSQD, Contender, cpu_s

from interop.peers import Broker

CONSUMERS = 1000
FIRST_DELAY_MS = 1000
APART_MS = 5  # between the due times of two messages
PAUSE_S = 0.0005
"""The pause between two commands; without it, the load of the broker would be measured, not its timers."""
PATIENCE_S = 15.0
"""How long to wait after the last due time; messages that have not arrived count as this late."""
# nsqd keeps its log level: its log has the addresses on which it listens.
CONTENDERS = [NSQD, EVERY_OK.with_flags("--log-level=error")]


@dataclass
class Result:
    """The figures of one broker with one number of channels."""

    broker: str
    flags: Sequence[str]
    channels: int
    late_ms: dict[str, list[float]] = field(default_factory=dict)
    """The lateness of every message, by kind of timer."""
    missing: dict[str, int] = field(default_factory=dict)
    """Messages that did not arrive in time, by kind."""
    idle_cpu_percent: float = 0.0
    """Of one core, with all channels created and all consumers connected."""
    probe_ms: list[float] = field(default_factory=list)
    """The response times of another client while all channels are due at the same time."""
    machine_ms: list[float] = field(default_factory=list)
    """How late an otherwise idle process wakes up from a sleep of 5 ms: the lower limit of lateness."""


# ------------------------------------------------------------------------------------------------ one broker


class Run:
    """The measurements of one broker with one number of channels.

    With one channel, one consumer has all messages; with more, each consumer has its own channel and one message.
    """

    def __init__(self, broker: Broker, result: Result, samples: int) -> None:
        self.broker = broker
        self.result = result
        self.samples = samples
        self.single = result.channels == 1
        self.topics = topics_of(result.channels)
        self.clients = Clients()
        self._publisher = http.client.HTTPConnection(broker.http_address, timeout=60)

    def connect(self) -> None:
        """Connect the consumers."""
        consumers = 1 if self.single else CONSUMERS
        for n in range(consumers):
            topic = self.topics[n % len(self.topics)]
            ready_count = self.samples if self.single else 1
            channel = f"c{n // len(self.topics)}"
            timeout_ms = MSG_TIMEOUT_MS + n * APART_MS
            self.clients.add(Client(self.broker.tcp_address, topic, channel, ready_count, timeout_ms))

    def publish(self, topic: str, body: str, defer_ms: int = 0) -> None:
        """Publish one message and wait for its OK."""
        defer = f"&defer={defer_ms}" if defer_ms else ""
        self._publisher.request("POST", f"/pub?topic={topic}{defer}", body=body)
        reply = self._publisher.getresponse()
        assert (reply.status, reply.read()) == (200, b"OK")

    # -------------------------------------------------------------------- measurements

    def idle(self, seconds: float) -> None:
        """Measure the CPU time while only heartbeats are sent."""
        for _ in self.clients.messages(time.monotonic() + 3):
            pass
        before_s, began_s = cpu_s(self.broker), time.monotonic()
        for _ in self.clients.messages(began_s + seconds):
            pass
        took_s = time.monotonic() - began_s
        self.result.idle_cpu_percent = 100 * (cpu_s(self.broker) - before_s) / took_s

    def deferred(self) -> None:
        """Measure deferred publishes, due one after the other, in a topic with one channel."""
        topic = "t0" if self.single else "single"
        if not self.single:
            self.clients.add(Client(self.broker.tcp_address, topic, "c0", self.samples))
        due_s: dict[tuple[Client, bytes], float] = {}
        client = self.clients.all[-1]
        for n in range(self.samples):
            delay_ms = FIRST_DELAY_MS + self.samples + n * APART_MS
            due_s[client, b"deferred %d" % n] = time.monotonic() + delay_ms / 1000
            self.publish(topic, f"deferred {n}", delay_ms)
        self._collect("deferred", due_s)

    def requeued(self) -> None:
        """Measure REQ with delays, due one after the other."""
        due_s: dict[tuple[Client, bytes], float] = {}
        for n, message in enumerate(self._hold("requeued")):
            delay_ms = FIRST_DELAY_MS + self.samples + n * APART_MS
            due_s[message.client, message.body] = time.monotonic() + delay_ms / 1000
            message.client.sock.sendall(b"REQ %s %d\n" % (message.id, delay_ms))
            time.sleep(PAUSE_S)
        self._collect("requeued", due_s)

    def timed_out(self) -> None:
        """Measure the timeouts of unanswered messages."""
        held = self._hold("timeout")
        due_s = {
            (message.client, message.body): message.at_s + message.client.msg_timeout_s for message in held
        }
        self._collect("timeout", due_s)

    def touched(self) -> None:
        """Measure the timeouts of messages that are touched one after the other."""
        due_s: dict[tuple[Client, bytes], float] = {}
        for message in self._hold("touched"):
            due_s[message.client, message.body] = time.monotonic() + message.client.msg_timeout_s
            message.client.sock.sendall(b"TOUCH %s\n" % message.id)
            time.sleep(PAUSE_S)
        self._collect("touched", due_s)

    def at_once(self) -> None:
        """Measure one message per channel, all due at the same time."""
        at_s = time.monotonic() + 3
        for topic in self.topics:
            self.publish(topic, "at once", round(1000 * (at_s - time.monotonic())))
        due_s = {(client, b"at once"): at_s for client in self.clients.all[:CONSUMERS]}
        probe = Thread(target=self._probe, args=(at_s - 0.5, at_s + 2.5))
        probe.start()
        self._collect("at once", due_s)
        probe.join()

    def _probe(self, from_s: float, to_s: float) -> None:
        """Record the response times of another client."""
        client = Client(self.broker.tcp_address, "probe", "c#ephemeral", 0)
        time.sleep(max(0.0, from_s - time.monotonic()))
        while (sent_s := time.monotonic()) < to_s:
            client.sock.sendall(b"FIN 0123456789abcdef\n")  # answered with an error that keeps the connection
            while not client.receive():
                pass
            self.result.probe_ms.append(1000 * (time.monotonic() - sent_s))
            time.sleep(0.001)
        client.sock.close()

    def _hold(self, kind: str) -> list[Message]:
        """Have every consumer receive messages that it does not finish."""
        held: dict[tuple[Client, bytes], Message] = {}
        for n in range(self.samples if self.single else len(self.topics)):
            self.publish(self.topics[0 if self.single else n], f"{kind} {n}")
            wanted = n + 1 if self.single else (n + 1) * CONSUMERS // len(self.topics)
            for message in self.clients.messages(time.monotonic() + PATIENCE_S):
                if message.body.startswith(kind.encode()):
                    held.setdefault((message.client, message.body), message)
                else:
                    # A late message of an earlier measurement.
                    message.client.sock.sendall(b"FIN %s\n" % message.id)
                if len(held) == wanted:
                    break
        return list(held.values())

    def _collect(self, kind: str, due_s: dict[tuple[Client, bytes], float]) -> None:
        """Receive the due messages and record their lateness."""
        late_ms = []
        until_s = max(due_s.values()) + PATIENCE_S
        waiting = dict(due_s)
        for message in self.clients.messages(until_s):
            message.client.sock.sendall(b"FIN %s\n" % message.id)
            due = waiting.pop((message.client, message.body), None)
            if due is not None:
                late_ms.append(1000 * (message.at_s - due))
            if not waiting:
                break
        self.result.missing[kind] = len(waiting)
        self.result.late_ms[kind] = late_ms + [1000 * PATIENCE_S] * len(waiting)


@contextmanager
def noise(late_ms: list[float]) -> Iterator[None]:
    """Record how late this machine wakes up a process during the block."""
    program = (
        "import select, sys, time\n"
        "late = []\n"
        "began = time.monotonic()\n"
        "while not select.select([sys.stdin], [], [], 0.005)[0]:\n"
        "    late.append(1000 * (time.monotonic() - began) - 5)\n"
        "    began = time.monotonic()\n"
        "print(*late)\n"
    )
    sleeper = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield
    finally:
        said, _ = sleeper.communicate(b"\n")
        late_ms += map(float, said.split())


def measure(contender: Contender, channels: int, options: argparse.Namespace) -> Result:
    """Measure one broker on an empty data folder."""
    result = Result(contender.name, contender.flags, channels)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=options.data_path))
        data_path = Path(folder) / "data"
        prepare = prepare_nsqd if contender.is_nsqd else prepare_ours
        prepare(data_path, channels)
        broker = stack.enter_context(contender.start(data_path, *contender.flags))
        run = Run(broker, result, options.samples)
        stack.callback(run.clients.close)
        stack.enter_context(noise(result.machine_ms))
        steps: list[Callable[[], None]] = [
            run.connect,
            lambda: run.idle(options.idle_seconds),
            run.deferred,
            run.requeued,
            run.timed_out,
            run.touched,
        ]
        if channels > 1:
            steps.insert(2, run.at_once)
        for step in steps:
            step()
        if contender.is_nsqd:
            broker.process.kill()  # on SIGTERM it would first write all messages to disk
            broker.process.wait()
    return result


# ------------------------------------------------------------------------------------------------ output


def quantile(values: Sequence[float], part: float) -> float:
    """Return a quantile of the values."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def row(name: str, values: Sequence[float], missing: int = 0) -> str:
    """Format a line of a table."""
    cells = (min(values), statistics.median(values), quantile(values, 0.99), max(values))
    late = f"  ({missing} of {len(values)} never came)" if missing else ""
    return f"  {name:<26}" + "".join(f"{cell:>11.1f}" for cell in cells) + late


def report(results: Sequence[Result]) -> str:
    """Format the tables; README.md explains them."""
    lines = []
    for result in results:
        lines.append(f"\n{result.broker}, {result.channels:,} channel{'s' if result.channels > 1 else ''}")
        lines.append(" " * 28 + "".join(f"{head:>11}" for head in ("min ms", "median", "p99", "max")))
        for kind, values in result.late_ms.items():
            lines.append(row(f"late: {kind}", values, result.missing[kind]))
        if result.probe_ms:
            lines.append(row("another client's answer", result.probe_ms))
        lines.append(row("late: the machine itself", result.machine_ms))
        lines.append(f"  idle: {result.idle_cpu_percent:.2f} % of a core")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Parse the options."""
    parser = record.parser(__doc__)
    parser.add_argument(
        "--channels",
        type=int,
        default=10_000,
        help="the larger number of channels, a multiple of 10 (default: 10000)",
    )
    parser.add_argument("--samples", type=int, default=200, help="messages of each kind (default: 200)")
    parser.add_argument(
        "--idle-seconds", type=float, default=20.0, help="how long CPU time is counted (default: 20)"
    )
    parser.add_argument("--ours-only", action="store_true", help="without nsqd")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the requested results."""
    options = parse()
    contenders = CONTENDERS[1:] if options.ours_only else CONTENDERS
    about = record.begin(options)
    results = []
    for channels in (1, options.channels):
        for contender in contenders:
            result = measure(contender, channels, options)
            results.append(result)
            print(report([result]), flush=True)
    record.finish({"machine": about, "results": [asdict(result) for result in results]}, options, "timers")


if __name__ == "__main__":
    main()
