"""The load: NSQ's own generators, `bench_writer` and `bench_reader`, and `goload` for other workloads.

Rates are messages per second, counted by the generator.
"""

import json
import os
import re
import resource
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from interop.build import go_program
from interop.peers import Broker

TOPIC, CHANNEL = "sub_bench", "ch"
BODY_BYTES = 200
BATCH = 200
CONNECTIONS = 2
FILL_CONNECTIONS = 16
"""The connections that fill a backlog, without being measured: many, so that syncing every OK is fast enough."""
READY_COUNT = 2500  # nsqd's maximum, and bench_reader's default
PATIENCE_S = 120


_own_processors: set[int] = set()


def keep_to(processors: set[int]) -> None:
    """Have load generators that start from now on run on these processors only; empty: on all."""
    _own_processors.clear()
    _own_processors.update(processors)


@contextmanager
def _on_own_processors() -> Iterator[None]:
    """Start a load generator in this block: it inherits the processors that `keep_to` has set."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _own_processors or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Rates(NamedTuple):
    """Messages per second, messages per second of the generator's processor time, and the number of messages."""

    rate: float
    cpu_rate: float
    messages: float


class Target(Protocol):
    """A broker, or what takes its place: see `bench.disk.receiver`."""

    @property
    def tcp_address(self) -> str: ...

    def log(self) -> list[str]: ...


class Load:
    """A running load generator of NSQ. It opens one connection per Go processor."""

    def __init__(
        self, program: str, broker: Target, seconds: float, connections: int, *flags: str, topic: str = TOPIC
    ) -> None:
        self._broker = broker
        self._seconds = seconds
        self._command = [
            str(go_program(program)),
            f"--nsqd-tcp-address={broker.tcp_address}",
            f"--runfor={seconds}s",
            f"--topic={topic}",
            *flags,
        ]
        self._cpu_before_s = children_cpu_s()
        with _on_own_processors():
            self._process = subprocess.Popen(
                self._command,
                env=os.environ | {"GOMAXPROCS": str(connections)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )

    def finish(self) -> Rates:
        """Wait until the generator ends. The processor time is correct if no other child process ends meanwhile.

        Raises:
            RuntimeError: It failed, or printed no result.
        """
        try:
            _, said = self._process.communicate(timeout=self._seconds + PATIENCE_S)
        finally:
            self._process.kill()
        cpu_s = children_cpu_s() - self._cpu_before_s
        told = re.search(r"duration: (\S+) .* ([\d.]+)ops/s", said)
        if self._process.returncode or told is None:
            log = "\n".join(self._broker.log()[-20:])
            raise RuntimeError(f"{self._command} failed: {said[-2000:]}\nThe broker's log:\n{log}")
        rate = float(told[2])
        messages = rate * _seconds(told[1])
        return Rates(rate, messages / cpu_s, messages)


def _seconds(duration: str) -> float:
    """Parse a duration below an hour as Go prints it: `1m2.5s`, `0.5s`, `12.3ms`."""
    units = {"m": 60, "s": 1, "ms": 1e-3, "µs": 1e-6}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)(ms|µs|m|s)", duration))


def children_cpu_s() -> float:
    """Return the processor time of the child processes that have ended, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def writing(
    broker: Target,
    seconds: float,
    connections: int = CONNECTIONS,
    *,
    batch: int = BATCH,
    size: int = BODY_BYTES,
    topic: str = TOPIC,
) -> Load:
    """Start to publish, by MPUB of `batch` messages."""
    return Load(
        "bench_writer",
        broker,
        seconds,
        connections,
        f"--batch-size={batch}",
        f"--size={size}",
        topic=topic,
    )


def reading(
    broker: Target,
    seconds: float,
    connections: int = CONNECTIONS,
    *,
    topic: str = TOPIC,
    channel: str = CHANNEL,
) -> Load:
    """Start to consume and finish messages."""
    flags = [f"--channel={channel}", f"--rdy={READY_COUNT}", f"--size={BODY_BYTES}"]
    return Load("bench_reader", broker, seconds, connections, *flags, topic=topic)


def unfinished(broker: Broker, topic: str = TOPIC) -> int:
    """Return the depth plus the messages in flight of the topic's only channel."""
    stats = json.loads(broker.http("GET", "/stats", format="json", topic=topic, include_mem="false"))
    found = stats["topics"][0]
    channel = found["channels"][0]
    return int(found["depth"] + channel["depth"] + channel["in_flight_count"])


def fill(
    broker: Broker, messages: int, size: int = BODY_BYTES, batch: int = BATCH, topic: str = TOPIC
) -> int:
    """Publish until at least this many messages are queued; return how many there are."""
    while (queued := unfinished(broker, topic)) < messages:
        # The generator runs for a fixed time; if it was too short, it runs again.
        seconds = max(0.2, min(10.0, (messages - queued) / 1_000_000))
        writing(broker, seconds, FILL_CONNECTIONS, batch=batch, size=size, topic=topic).finish()
    return queued


def goload(command: str, address: str, **flags: object) -> dict[str, float]:
    """Run our own generator; return its figures (see tests/interop/goload).

    Args:
        command: `pub`, `http`, `through`, `mixed`, `latency` or `oks`.
        address: The TCP address of the broker; for `http` the HTTP address.
        flags: The flags of the command.

    Raises:
        RuntimeError: It failed.
    """
    return run_program(go_program("goload"), command, address, flags)


def gonsqload(command: str, address: str, **flags: object) -> dict[str, float]:
    """Run a loop of tests/interop/gonsqload: `publish`, `async` or `consume`; as `goload`."""
    return run_program(go_program("gonsqload"), command, address, flags)


def run_program(program: Path, command: str, address: str, flags: Mapping[str, object]) -> dict[str, float]:
    """Run a load of a Go program, and return its figures. Raises RuntimeError: it failed."""
    words = [
        str(program),
        command,
        f"--addr={address}",
        f"--timeout={PATIENCE_S}s",
        *(f"--{name.replace('_', '-')}={str(value).lower()}" for name, value in flags.items()),
    ]
    with _on_own_processors():
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S + 30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed: {done.stderr[-2000:]}")
    told: dict[str, float] = json.loads(done.stdout)
    return told
