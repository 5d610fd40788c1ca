"""The workloads of the comparison with nsqd, and their goals.

A workload returns figures; a row of the table shows one of them, with goals. NSQ's own generators make the load where
possible.
"""

import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import backlog
from bench.bare_server import bare_batches, bare_consume, bare_singles
from bench.clients import CONSUME, PUBLISH_SINGLES, Job, run_client
from bench.clients import CONTENDERS as CLIENTS
from bench.connections import Client, Clients, prepare_nsqd, prepare_ours, topics_of
from bench.contenders import (
    EVERY_OK,
    IN_MEMORY,
    INTERVAL,
    NSQD,
    ON_DISK,
    SYNCED,
    Contender,
    cpu_s,
)
from bench.disk import most_messages, receiver, sync_times, written_messages
from bench.loads import (
    BATCH,
    BODY_BYTES,
    CHANNEL,
    CONNECTIONS,
    READY_COUNT,
    TOPIC,
    fill,
    goload,
    gonsqload,
    reading,
    unfinished,
    writing,
)

from interop.peers import Broker

Figures = dict[str, float]
Limit = Callable[[Path, float], Figures]
SETTLE_S = 3.0
IDLE_S = 5.0
CPU = "cpu_us"
"""The broker's processor time per message, in microseconds; for figures of deliveries, per delivery."""
DISK = "the disk"
"""The syncs of the disk as a limit, in place of a broker."""
WRITTEN, RECEIVED = "only writing", "receive and write"
"""The same of the disk with the writes and syncs of `--sync=interval`: alone, and behind the same load."""
BARE, BARE_SYNCED = "a bare server", "a bare server, synced"
"""A server in C that does the least in one thread: bench/bare.c."""
I, F = INTERVAL.name, EVERY_OK.name  # noqa: E741


@dataclass(frozen=True)
class Turn:
    """One run of a workload on one broker.

    Attributes:
        contender: The broker.
        data_path: The parent of its data folder.
        seconds: The duration of the load, for workloads with a duration.
        share: The fraction of the load, for workloads with a number of messages.
    """

    contender: Contender
    data_path: Path
    seconds: float
    share: float

    def broker(self, prepare: Callable[[Broker], None] | None = None) -> AbstractContextManager[Broker]:
        """Run the broker; `prepare` as for `Contender.running`."""
        return self.contender.running(self.data_path, prepare)

    def count(self, messages: int) -> int:
        """Return this run's share of a number of messages."""
        return max(1, round(messages * self.share * self.contender.pace))


@dataclass(frozen=True)
class Goal:
    """The required ratio of our figure to another broker's. None: the ratio is only shown."""

    ours: str
    other: str
    ratio: float | None = None


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        title: The title of the row.
        figure: The name of the workload's figure.
        unit: The unit of the figure.
        goals: The comparisons.
        less: Less is better; a goal is then an upper limit.
    """

    title: str
    figure: str
    unit: str
    goals: tuple[Goal, ...]
    less: bool = False


@dataclass(frozen=True)
class Workload:
    """A workload.

    Attributes:
        name: The name on the command line.
        measure: Runs the workload on one broker.
        rows: The rows of the table.
        limits: Return what the disk below a folder takes in so many seconds, by the names of the figures. They are
            measured in each round, in place of a broker.
        memory_flags: Additional flags of nsqd in memory: see `MANY_QUEUES`.
    """

    name: str
    measure: Callable[[Turn], Figures]
    rows: tuple[Row, ...]
    limits: dict[str, Limit] = field(default_factory=dict)
    memory_flags: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """Return the names of the brokers, and those of the `limits`."""
        goals = [goal for row in self.rows for goal in row.goals]
        return list(dict.fromkeys(name for goal in goals for name in (goal.other, goal.ours)))


CONTENDERS = {one.name: one for one in (IN_MEMORY, INTERVAL, EVERY_OK, ON_DISK, SYNCED, NSQD)}

MANY_QUEUES = ("--mem-queue-size=1000000",)  # a larger queue would take 80 MB for each of them


# ------------------------------------------------------------------------------------------ publish and consume


def publish_batches(turn: Turn, connections: int, batch: int = BATCH, size: int = BODY_BYTES) -> Figures:
    """Publish with MPUB."""
    with turn.broker() as broker:
        broker.create(TOPIC, CHANNEL)
        before_s = cpu_s(broker)
        rates = writing(broker, turn.seconds, connections, batch=batch, size=size).finish()
        return {"rate": rates.rate, CPU: _cpu_us(broker, before_s, rates.messages)}


def publish_singles(turn: Turn, connections: int) -> Figures:
    """Publish with PUB, each connection waiting for its OK."""
    with turn.broker() as broker:
        broker.create(TOPIC, CHANNEL)
        runfor = f"{turn.seconds}s"
        return _generated(broker, "pub", broker.tcp_address, connections=connections, runfor=runfor)


def publish_http(turn: Turn, connections: int, batch: int) -> Figures:
    """Publish over HTTP: `/pub`, or `/mpub` if `batch` is not 1."""
    with turn.broker() as broker:
        broker.create(TOPIC, CHANNEL)
        address, runfor = broker.http_address, f"{turn.seconds}s"
        return _generated(broker, "http", address, connections=connections, batch=batch, runfor=runfor)


def _generated(broker: Broker, command: str, address: str, copies: int = 1, **flags: object) -> Figures:
    """Run `goload`. With `copies`, figures are per delivery: each message goes to this many channels."""
    before_s = cpu_s(broker)
    told = goload(command, address, **flags)
    messages = copies * told["messages"]
    return {"rate": messages / told["seconds"], CPU: _cpu_us(broker, before_s, messages)}


def _cpu_us(broker: Broker, before_s: float, messages: float) -> float:
    return 1e6 * (cpu_s(broker) - before_s) / messages


class Consume:
    """Consume a backlog.

    The required backlog depends on the broker and the machine: if the consumers empty the channel, the measurement is
    repeated with a three times larger backlog, also in the next rounds.

    Args:
        read: Consumes for some seconds, and returns the rate and the number of messages.
        per_s: The messages per second that the first backlog is enough for.
    """

    def __init__(self, read: "Callable[[Broker, float], tuple[float, float]]", per_s: int) -> None:
        self._read = read
        self._per_s = per_s
        self._backlogs: dict[str, int] = {}

    def __call__(self, turn: Turn) -> Figures:
        """Measure. `ran_dry` is 1 if the consumers still emptied the channel: the rate is then too low."""
        name, seconds = turn.contender.name, turn.seconds / 2
        backlog = self._backlogs.get(name, round(self._per_s * seconds * turn.contender.pace) + 20_000)
        with turn.broker() as broker:
            broker.create(TOPIC, CHANNEL)
            for _ in range(3):
                self._backlogs[name] = backlog
                fill(broker, backlog)
                before_s = cpu_s(broker)
                rate, messages = self._read(broker, seconds)
                cpu_us = _cpu_us(broker, before_s, messages)
                ran_dry = unfinished(broker) <= CONNECTIONS * READY_COUNT  # messages in flight at the end
                if not ran_dry:
                    break
                backlog *= 3
        return {"rate": rate, CPU: cpu_us, "ran_dry": float(ran_dry)}


def read_fast(broker: Broker, seconds: float) -> tuple[float, float]:
    """Consume with `bench_reader`; return the rate and the number of messages."""
    rates = reading(broker, seconds).finish()
    return rates.rate, rates.messages


def publish_and_consume(turn: Turn) -> Figures:
    """Publish and consume at the same time, on one channel."""
    with turn.broker() as broker:
        broker.create(TOPIC, CHANNEL)
        before_s = cpu_s(broker)
        reader = reading(broker, turn.seconds)
        published, delivered = writing(broker, turn.seconds).finish(), reader.finish()
        cpu_us = _cpu_us(broker, before_s, published.messages + delivered.messages)
        return {"published": published.rate, "delivered": delivered.rate, CPU: cpu_us}


def fan_out(turn: Turn, channels: int) -> Figures:
    """Publish while all channels are drained; `rate` is of deliveries, until the last one."""
    with turn.broker() as broker:
        address, count = broker.tcp_address, turn.count(100_000)
        return _generated(
            broker, "through", address, copies=channels, channels=channels, batch=BATCH, count=count
        )


def many_topics(turn: Turn, topics: int, channels: int) -> Figures:
    """Publish MPUB of 20 and PUB over 8 connections, to each topic in turn, while all channels are drained."""
    with turn.broker() as broker:
        return _generated(
            broker,
            "through",
            broker.tcp_address,
            copies=channels,
            topics=topics,
            channels=channels,
            batch=20,
            mixed=True,
            connections=8,
            count=max(topics, turn.count(50_000)),
        )


def mixed(turn: Turn, topics: int, channels: int, connections: int) -> Figures:
    """Publish, finish and requeue messages of all kinds and sizes at the same time, until all are finished.

    The generator fails if a channel does not finish a message. `CPU` is per delivery; `repeated` counts deliveries
    that nothing in the load asks for.
    """

    def prepare(broker: Broker) -> None:
        for n in range(topics):
            broker.create(f"{TOPIC}-{n}", *(f"{CHANNEL}-{c}" for c in range(channels)))

    # nsqd looks for due messages only in channels that it has had for 5 seconds, or since its start.
    with turn.broker(prepare) as broker:
        before_s = cpu_s(broker)
        told = goload(
            "mixed",
            broker.tcp_address,
            topics=topics,
            channels=channels,
            connections=connections,
            count=max(topics, turn.count(50_000)),
        )
        return {
            "delivered": told["deliveries"] / told["seconds"],
            "published": told["messages"] / told["publish_seconds"],
            "repeated": told["deliveries"] - channels * told["messages"] - told["requeued"],
            CPU: _cpu_us(broker, before_s, told["deliveries"]),
        }


def latency(turn: Turn, messages_per_s: int) -> Figures:
    """Measure the latency from publish to delivery, at a steady rate."""
    with turn.broker() as broker:
        broker.create(TOPIC, CHANNEL)
        before_s = cpu_s(broker)
        told = goload("latency", broker.tcp_address, rate=messages_per_s, runfor=f"{1 + turn.seconds}s")
        return told | {CPU: _cpu_us(broker, before_s, told["messages"])}


def latency_of_ok(turn: Turn, messages_per_s: int, connections: int) -> Figures:
    """Measure the latency from publish to OK, at a steady rate over all connections."""
    with turn.broker() as broker:
        broker.create(TOPIC, CHANNEL)
        before_s = cpu_s(broker)
        seconds = 1 + turn.seconds
        told = goload(
            "oks", broker.tcp_address, rate=messages_per_s, connections=connections, runfor=f"{seconds}s"
        )
        # The messages of the first moment are published, too, and not measured.
        return told | {CPU: _cpu_us(broker, before_s, messages_per_s * seconds)}


# ------------------------------------------------------------------------------------------ client libraries


def publish_go(turn: Turn, command: str, **flags: object) -> Figures:
    """Publish with go-nsq."""
    with turn.broker() as broker:
        broker.create(TOPIC, CHANNEL)
        before_s = cpu_s(broker)
        told = gonsqload(command, broker.tcp_address, runfor=f"{turn.seconds}s", **flags)
        cpu_us = _cpu_us(broker, before_s, told["messages"])
        return {"rate": told["messages"] / told["seconds"], CPU: cpu_us}


def read_go(broker: Broker, seconds: float, **flags: object) -> tuple[float, float]:
    """Consume with go-nsq; return the rate and the number of messages."""
    told = gonsqload("consume", broker.tcp_address, runfor=f"{seconds}s", **flags)
    return told["messages"] / told["seconds"], told["messages"]


def publish_pynsq(turn: Turn) -> Figures:
    """Publish with pynsq, message by message."""
    with turn.broker() as broker:
        broker.create(TOPIC, CHANNEL)
        before_s = cpu_s(broker)
        rate, messages = _pynsq(broker, PUBLISH_SINGLES, turn.seconds)
        return {"rate": rate, CPU: _cpu_us(broker, before_s, messages)}


def read_pynsq(broker: Broker, seconds: float) -> tuple[float, float]:
    """Consume with pynsq; return the rate and the number of messages."""
    return _pynsq(broker, CONSUME, seconds)


def _pynsq(broker: Broker, workload: str, seconds: float) -> tuple[float, float]:
    (client,) = (one for one in CLIENTS if (one.name, one.workload) == ("pynsq", workload))
    rates = run_client(client, Job(broker.tcp_address, TOPIC, 10**12, seconds))
    return rates.rate, rates.messages


# ------------------------------------------------------------------------------------------ at rest


def queued(turn: Turn, messages: int) -> Figures:
    """Fill, stop and start the broker."""
    result = backlog.measure(
        turn.contender, round(messages * turn.share), turn.data_path, BODY_BYTES, consume_s=0
    )
    return {
        "memory_mib": result.memory_full,
        "restart_s": result.stop_s + result.start_s,
        "stop_s": result.stop_s,
        "start_s": result.start_s,
        CPU: 1e6 * result.cpu_s / result.messages,
    }


class Idle:
    """Only heartbeats."""

    def __init__(self, consumers: int, channels: int) -> None:
        self._consumers, self._channels = consumers, channels
        self._prepared: TemporaryDirectory[str] | None = None

    def __call__(self, turn: Turn) -> Figures:
        """Measure one broker that already has all channels."""
        consumers, channels = round(self._consumers * turn.share), round(self._channels * turn.share)
        topics = topics_of(channels)
        with ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory(prefix="bench-", dir=turn.data_path))
            data = Path(folder) / "data"
            if turn.contender.is_nsqd:
                prepare_nsqd(data, channels)
            else:
                shutil.copytree(self._prepare(turn.data_path, channels), data)
            broker = stack.enter_context(turn.contender.start(data, *turn.contender.flags))
            clients = Clients()
            stack.callback(clients.close)
            for n in range(consumers):
                topic, channel = topics[n % len(topics)], f"c{n // len(topics)}"
                clients.add(Client(broker.tcp_address, topic, channel, READY_COUNT))
            _wait(clients, SETTLE_S)
            before_s, began_s = cpu_s(broker), time.monotonic()
            _wait(clients, max(1, IDLE_S * turn.share))
            percent = 100 * (cpu_s(broker) - before_s) / (time.monotonic() - began_s)
            if turn.contender.is_nsqd:
                broker.process.kill()
                broker.process.wait()
        return {"cpu_percent": percent}

    def _prepare(self, folder: Path, channels: int) -> Path:
        """Return a data folder with this many channels. Creating them takes long, so it is cached."""
        if self._prepared is None:
            self._prepared = TemporaryDirectory(prefix="bench-", dir=folder)
            prepare_ours(Path(self._prepared.name) / "data", channels)
        return Path(self._prepared.name) / "data"


def _wait(clients: Clients, seconds: float) -> None:
    for _ in clients.messages(time.monotonic() + seconds):
        pass


# ------------------------------------------------------------------------------------------ limits of the disk


def disk_rate(
    folder: Path, seconds: float, connections: int, batch: int = BATCH, size: int = BODY_BYTES
) -> Figures:
    """Return the messages of a sync divided by the time of a sync."""
    return {"rate": most_messages(folder, connections, batch, size)}


def written(folder: Path, seconds: float, batch: int, size: int) -> Figures:
    """Return the messages that a file takes with the syncs of `--sync=interval`, if nothing else runs."""
    return {"rate": written_messages(folder, seconds, batch, size)}


def received(folder: Path, seconds: float, connections: int, batch: int, size: int) -> Figures:
    """Return the messages that a file takes with the same syncs, if they come from the load generator."""
    with receiver(folder, batch, size) as address:
        return {"rate": writing(address, seconds, connections, batch=batch, size=size).finish().rate}


def disk_latency(folder: Path, seconds: float, *, more_ms: float) -> Figures:
    """Return the time to sync one message, plus what a broker may take."""
    took_s = sorted(sync_times(folder, 4 + BODY_BYTES))
    percentiles = {"p50_ms": statistics.median(took_s), "p99_ms": took_s[int(0.99 * len(took_s))]}
    return {name: 1000 * seconds + more_ms for name, seconds in percentiles.items()}


# ------------------------------------------------------------------------------------------ the table


def _goals(
    i: float | None = None,
    f: float | None = None,
    *,
    safe_i: float | None = None,
    safe_f: float | None = None,
    safe_f_to: Contender = SYNCED,
    disk: float | None = None,
    show_disk: bool = False,
    written: float | None = None,
) -> tuple[Goal, ...]:
    """Compare I and F with nsqd in memory.

    With `safe_i` also I with nsqd on disk, with `safe_f` F with `safe_f_to`, with `disk` F with the syncs of the disk,
    with `written` I with the same writes and syncs alone, and for information with the disk behind the same load.
    """
    goals = [Goal(I, IN_MEMORY.name, i), Goal(F, IN_MEMORY.name, f)]
    if safe_i is not None:
        goals.append(Goal(I, ON_DISK.name, safe_i))
    if safe_f is not None:
        goals.append(Goal(F, safe_f_to.name, safe_f))
    if disk is not None or show_disk:
        goals.append(Goal(F, DISK, disk))
    if written is not None:
        goals += [Goal(I, WRITTEN, written), Goal(I, RECEIVED)]
    return tuple(goals)


_BESIDE_BARE = (Goal(I, BARE), Goal(F, BARE_SYNCED))
"""For information: how far a broker is from the least that a server does."""


def _bare_limits(connections: int, batch: int = 1, size: int = BODY_BYTES) -> dict[str, Limit]:
    """Return the limits for PUB over so many connections, or for MPUB if `batch` is not 1."""
    measure = (
        partial(bare_singles, connections=connections)
        if batch == 1
        else partial(bare_batches, connections=connections, batch=batch, size=size)
    )
    return {name: partial(measure, synced=name == BARE_SYNCED) for name in (BARE, BARE_SYNCED)}


def _body(size: int, name: str, batch: int, goals: tuple[Goal, ...]) -> Workload:
    title = f"publish, bodies of {name}, MPUB of {batch}, 2 connections"
    limits: dict[str, Limit] = {
        DISK: partial(disk_rate, connections=2, batch=batch, size=size),
        WRITTEN: partial(written, batch=batch, size=size),
        RECEIVED: partial(received, connections=2, batch=batch, size=size),
        **_bare_limits(2, batch, size),
    }
    goals = (*goals, *_BESIDE_BARE)
    compared = {goal.other for goal in goals}
    return Workload(
        f"body-{name.replace(' ', '').lower()}",
        partial(publish_batches, connections=2, batch=batch, size=size),
        (Row(title, "rate", "msg/s", goals),),
        {other: limit for other, limit in limits.items() if other in compared},
    )


def _library(name: str, title: str, measure: Callable[[Turn], Figures]) -> Workload:
    """Return the workload of a client library's loop. It has no goal: the library takes most of the time."""
    return Workload(name, measure, (Row(title, "rate", "msg/s", _goals()),))


WORKLOADS = [
    Workload(
        "publish-batch-2",
        partial(publish_batches, connections=2),
        (
            Row(
                "publish, MPUB of 200, 2 connections",
                "rate",
                "msg/s",
                (*_goals(1.5, 0.6, safe_i=4, safe_f=500, show_disk=True), *_BESIDE_BARE),
            ),
        ),
        {DISK: partial(disk_rate, connections=2), **_bare_limits(2, BATCH)},
    ),
    Workload(
        "publish-batch-32",
        partial(publish_batches, connections=32),
        (
            Row(
                "publish, MPUB of 200, 32 connections",
                "rate",
                "msg/s",
                (*_goals(1.5, 1.2, show_disk=True), *_BESIDE_BARE),
            ),
        ),
        {DISK: partial(disk_rate, connections=32), **_bare_limits(32, BATCH)},
    ),
    Workload(
        "publish-one-2",
        partial(publish_singles, connections=2),
        (
            Row(
                "publish, PUB, 2 connections",
                "rate",
                "msg/s",
                (*_goals(0.9, safe_f=4, disk=0.7), *_BESIDE_BARE),
            ),
        ),
        {DISK: partial(disk_rate, connections=2, batch=1), **_bare_limits(2)},
    ),
    Workload(
        "publish-one-16",
        partial(publish_singles, connections=16),
        (Row("publish, PUB, 16 connections", "rate", "msg/s", (*_goals(1.0), *_BESIDE_BARE)),),
        _bare_limits(16),
    ),
    Workload(
        "publish-one-200",
        partial(publish_singles, connections=200),
        (
            Row(
                "publish, PUB, 200 connections",
                "rate",
                "msg/s",
                (*_goals(1.1, 0.7, safe_f=30, show_disk=True), *_BESIDE_BARE),
            ),
        ),
        {DISK: partial(disk_rate, connections=200, batch=1), **_bare_limits(200)},
    ),
    Workload(
        "consume",
        Consume(read_fast, 600_000),
        (
            Row(
                "consume + FIN, 2 connections, RDY 2500",
                "rate",
                "msg/s",
                # Filling an nsqd that syncs every message takes minutes, and it reads no faster than it writes.
                (*_goals(1.7, 1.6, safe_i=5, safe_f=5, safe_f_to=ON_DISK), Goal(I, BARE)),
            ),
        ),
        {BARE: bare_consume},
    ),
    Workload(
        "publish-and-consume",
        publish_and_consume,
        tuple(
            Row(
                f"publish while consuming, one channel: {figure}",
                figure,
                "msg/s",
                _goals(1.3, 0.5, safe_i=3, safe_f=3),
            )
            for figure in ("published", "delivered")
        ),
    ),
    Workload(
        "fan-out",
        partial(fan_out, channels=10),
        (
            Row(
                "fan-out into 10 channels, until all are drained",
                "rate",
                "deliveries/s",
                _goals(6, 3, safe_i=8, safe_f=8),
            ),
        ),
        memory_flags=MANY_QUEUES,
    ),
    Workload(
        "topics",
        partial(many_topics, topics=100, channels=4),
        (
            Row(
                "100 topics x 4 channels, PUB and MPUB of 20, until all are drained",
                "rate",
                "deliveries/s",
                _goals(1.2, 0.5, safe_i=3, safe_f=3),
            ),
        ),
        memory_flags=MANY_QUEUES,
    ),
    Workload(
        "mixed",
        partial(mixed, topics=20, channels=2, connections=10),
        (
            Row("mixed load, until all is finished: delivered", "delivered", "deliveries/s", _goals(1.0)),
            Row("mixed load: published", "published", "msg/s", _goals()),
        ),
        memory_flags=MANY_QUEUES,
    ),
    _body(1024, "1 KiB", 200, _goals(1.2, safe_i=1.5, safe_f=1.5, disk=0.8)),
    _body(16 * 1024, "16 KiB", 100, _goals(safe_i=1.5, safe_f=1.5, disk=0.8, written=0.9)),
    _body(256 * 1024, "256 KiB", 10, _goals(safe_i=1.5, safe_f=1.5, disk=0.8, written=0.9)),
    Workload(
        "latency",
        partial(latency, messages_per_s=5000),
        (
            Row(
                "latency from publish to consume at 5,000 msg/s: p99",
                "p99_ms",
                "ms",
                (Goal(I, IN_MEMORY.name, 1.0), Goal(F, IN_MEMORY.name), Goal(F, DISK, 1.0)),
                less=True,
            ),
        ),
        {DISK: partial(disk_latency, more_ms=1.0)},
    ),
    Workload(
        "latency-of-ok",
        partial(latency_of_ok, messages_per_s=5000, connections=50),
        tuple(
            Row(
                f"latency from PUB to OK at 5,000 msg/s, 50 connections: {name}",
                f"{name}_ms",
                "ms",
                (Goal(I, IN_MEMORY.name), Goal(F, IN_MEMORY.name), Goal(F, DISK, goal)),
                less=True,
            )
            for name, goal in (("p50", None), ("p99", 1.0))
        ),
        {DISK: partial(disk_latency, more_ms=0.3)},
    ),
    Workload(
        "http-pub",
        partial(publish_http, connections=16, batch=1),
        (Row("HTTP /pub, 16 connections", "rate", "msg/s", _goals(1.0)),),
    ),
    Workload(
        "http-mpub",
        partial(publish_http, connections=16, batch=BATCH),
        (Row("HTTP /mpub of 200, 16 connections", "rate", "msg/s", _goals(1.2)),),
    ),
    _library("go-publish", "go-nsq: Publish in 16 goroutines", partial(publish_go, command="publish")),
    _library(
        "go-multi",
        "go-nsq: MultiPublish of 100 in 4 goroutines",
        partial(publish_go, command="publish", goroutines=4, batch=100),
    ),
    _library("go-async", "go-nsq: PublishAsync, 1,000 under way", partial(publish_go, command="async")),
    _library("go-consume", "go-nsq: a Consumer with its defaults", Consume(read_go, 30_000)),
    _library(
        "go-consume-tuned",
        "go-nsq: a Consumer with 8 handlers, MaxInFlight 2500",
        Consume(partial(read_go, handlers=8, max_in_flight=READY_COUNT), 600_000),
    ),
    _library("pynsq-publish", "pynsq: Writer.pub, 1,000 under way", publish_pynsq),
    _library(
        "pynsq-consume", "pynsq: a Reader with a handler, max_in_flight 2500", Consume(read_pynsq, 50_000)
    ),
    Workload(
        "queued",
        partial(queued, messages=2_000_000),
        (
            Row(
                "memory with 2 million queued messages", "memory_mib", "MiB", _goals(1 / 6, 1 / 6), less=True
            ),
            Row(
                "stop and start with 2 million queued messages",
                "restart_s",
                "s",
                _goals(1 / 20, 1 / 20),
                less=True,
            ),
        ),
    ),
    Workload(
        "idle",
        Idle(consumers=1000, channels=10_000),
        (
            Row(
                "CPU with 1,000 idle consumers, 10,000 idle channels",
                "cpu_percent",
                "% of a core",
                (Goal(I, NSQD.name, 1.0), Goal(F, NSQD.name, 1.0)),
                less=True,
            ),
        ),
    ),
]
