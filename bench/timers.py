"""How late timers are, and what an idle broker costs, beside nsqd: with one channel and with 10,000.

Lateness is what a client sees: from the moment at which a message was due, by the client's own clock, to the moment at
which it arrived; so the way there and back is in it. README.md says how to read the tables.
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
APART_MS = 5  # between the times at which two messages are due
PAUSE_S = 0.0005
"""Between two commands: else their way through a busy broker would be measured, and not its timers."""
PATIENCE_S = 15.0
"""Longer than this after the last was due nobody waits: what has not come counts as that late."""
# nsqd at its log level: where it listens is known from a line of that.
CONTENDERS = [NSQD, EVERY_OK.with_flags("--log-level=error")]


@dataclass
class Result:
    """What one broker did with so many channels."""

    broker: str
    flags: Sequence[str]
    channels: int
    late_ms: dict[str, list[float]] = field(default_factory=dict)
    """Lateness of every message, by kind of timer."""
    missing: dict[str, int] = field(default_factory=dict)
    """Messages that had not come when patience ended, by kind."""
    idle_cpu_percent: float = 0.0
    """Of one core, with every channel there and every consumer connected."""
    probe_ms: list[float] = field(default_factory=list)
    """Answer times of an uninvolved client while all channels came due at one instant."""
    machine_ms: list[float] = field(default_factory=list)
    """How late a process that does nothing else wakes up from 5 ms of sleep meanwhile: nobody is more punctual."""


# ------------------------------------------------------------------------------------------------ one broker


class Run:
    """The measurements of one broker with so many channels.

    With one channel, one consumer has all messages; with more, each consumer has a channel of its own and one message.
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
        """Publish one message, and wait until it is stored."""
        defer = f"&defer={defer_ms}" if defer_ms else ""
        self._publisher.request("POST", f"/pub?topic={topic}{defer}", body=body)
        reply = self._publisher.getresponse()
        assert (reply.status, reply.read()) == (200, b"OK")

    # -------------------------------------------------------------------- what is measured

    def idle(self, seconds: float) -> None:
        """CPU time while nothing happens but heartbeats."""
        for _ in self.clients.messages(time.monotonic() + 3):
            pass
        before_s, began_s = cpu_s(self.broker), time.monotonic()
        for _ in self.clients.messages(began_s + seconds):
            pass
        took_s = time.monotonic() - began_s
        self.result.idle_cpu_percent = 100 * (cpu_s(self.broker) - before_s) / took_s

    def deferred(self) -> None:
        """Deferred publishes, due one after the other, in a topic that has one channel."""
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
        """REQ with delays, due one after the other."""
        due_s: dict[tuple[Client, bytes], float] = {}
        for n, message in enumerate(self._hold("requeued")):
            delay_ms = FIRST_DELAY_MS + self.samples + n * APART_MS
            due_s[message.client, message.body] = time.monotonic() + delay_ms / 1000
            message.client.sock.sendall(b"REQ %s %d\n" % (message.id, delay_ms))
            time.sleep(PAUSE_S)
        self._collect("requeued", due_s)

    def timed_out(self) -> None:
        """Messages in flight that nobody answers."""
        held = self._hold("timeout")
        due_s = {
            (message.client, message.body): message.at_s + message.client.msg_timeout_s for message in held
        }
        self._collect("timeout", due_s)

    def touched(self) -> None:
        """The same, touched one after the other."""
        due_s: dict[tuple[Client, bytes], float] = {}
        for message in self._hold("touched"):
            due_s[message.client, message.body] = time.monotonic() + message.client.msg_timeout_s
            message.client.sock.sendall(b"TOUCH %s\n" % message.id)
            time.sleep(PAUSE_S)
        self._collect("touched", due_s)

    def at_once(self) -> None:
        """A message of every channel comes due at the same instant."""
        at_s = time.monotonic() + 3
        for topic in self.topics:
            self.publish(topic, "at once", round(1000 * (at_s - time.monotonic())))
        due_s = {(client, b"at once"): at_s for client in self.clients.all[:CONSUMERS]}
        probe = Thread(target=self._probe, args=(at_s - 0.5, at_s + 2.5))
        probe.start()
        self._collect("at once", due_s)
        probe.join()

    def _probe(self, from_s: float, to_s: float) -> None:
        """Note how long an uninvolved client waits for each answer."""
        client = Client(self.broker.tcp_address, "probe", "c#ephemeral", 0)
        time.sleep(max(0.0, from_s - time.monotonic()))
        while (sent_s := time.monotonic()) < to_s:
            client.sock.sendall(b"FIN 0123456789abcdef\n")  # answered with an error that ends nothing
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
                    message.client.sock.sendall(b"FIN %s\n" % message.id)  # late, of an earlier measurement
                if len(held) == wanted:
                    break
        return list(held.values())

    def _collect(self, kind: str, due_s: dict[tuple[Client, bytes], float]) -> None:
        """Receive what is due, and note how late it is."""
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
    """Note how late this machine lets a process wake up meanwhile."""
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
            broker.process.kill()  # in good order it would first write all that it has to disk
            broker.process.wait()
    return result


# ------------------------------------------------------------------------------------------------ what is printed


def quantile(values: Sequence[float], part: float) -> float:
    """The value that so large a part does not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def row(name: str, values: Sequence[float], missing: int = 0) -> str:
    """One line of a table."""
    cells = (min(values), statistics.median(values), quantile(values, 0.99), max(values))
    late = f"  ({missing} of {len(values)} never came)" if missing else ""
    return f"  {name:<26}" + "".join(f"{cell:>11.1f}" for cell in cells) + late


def report(results: Sequence[Result]) -> str:
    """The tables README.md explains."""
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
    """The options of this run."""
    parser = record.parser(__doc__)
    parser.add_argument(
        "--channels", type=int, default=10_000, help="beside one, a multiple of 10 (default: 10000)"
    )
    parser.add_argument("--samples", type=int, default=200, help="messages of each kind (default: 200)")
    parser.add_argument(
        "--idle-seconds", type=float, default=20.0, help="how long CPU time is counted (default: 20)"
    )
    parser.add_argument("--ours-only", action="store_true", help="without nsqd")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write what was asked for."""
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
