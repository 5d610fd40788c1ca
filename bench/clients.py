"""Compare client libraries: ours, others for Python, and Go publish and consume on one broker of NSQ.

nats.py and redis-py do the same on servers of theirs.

Messages have 200 bytes, over one connection. In each round the clients run in turn, each in its own process; compare
the ratios within a round. README.md explains the table.
"""

import argparse
import asyncio
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

import anyio
from bench import record
from bench.contenders import IN_MEMORY, INTERVAL
from bench.loads import BATCH, BODY_BYTES, CHANNEL, READY_COUNT, Rates, fill, reading, writing
from bench.peer_servers import ALONE

import trio_nsq.sync
from interop.build import PeerUnavailable
from interop.peers import Broker
from trio_nsq.client import Consumer, Message, Producer
from trio_nsq.protocol import pack_messages

BODY = bytes(BODY_BYTES)
BODIES = [BODY] * BATCH
CONSUME, PUBLISH_BATCHES, PUBLISH_SINGLES = "consume + finish", "publish, batches", "publish, one by one"
WORKLOADS = (CONSUME, PUBLISH_BATCHES, PUBLISH_SINGLES)
SINGLES_UNDER_WAY = 1000
BATCHES_UNDER_WAY = 8
BROKERS = {"ours": INTERVAL, "nsqd": IN_MEMORY}


# ------------------------------------------------------------------------------------------ the client's process


@dataclass(frozen=True)
class Job:
    """The job of a client: publish for `seconds`, or consume for `seconds` or until it has `count` messages."""

    address: str
    topic: str
    count: int
    seconds: float


class Meter:
    """Counts messages, from the first on, and ends the process when the job is done."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._count = 0
        self._began_at = self._cpu_s = 0.0

    def start(self) -> None:
        """Start the clock; if not called, the first message starts it."""
        self._began_at = time.perf_counter()
        self._cpu_s = time.process_time()

    def add(self, count: int) -> None:
        """Count messages."""
        if not self._began_at:
            self.start()  # the messages that start the clock do not count
            self._job = replace(self._job, count=self._job.count - count)
            return
        self._count += count
        # The clock is not read for every message.
        if self._count >= self._job.count or ((count > 1 or self._count % 64 == 0) and self._is_over()):
            self._end()

    def _is_over(self) -> bool:
        return time.perf_counter() - self._began_at >= self._job.seconds

    def _end(self) -> NoReturn:
        seconds = time.perf_counter() - self._began_at
        cpu_seconds = time.process_time() - self._cpu_s
        print(json.dumps([self._count / seconds, self._count / cpu_seconds, self._count]), flush=True)
        os._exit(0)


def ours_batches(job: Job, meter: Meter, loop: str = "trio") -> None:
    """Our consumer, batch by batch."""

    async def main() -> None:
        async with our_consumer(job) as consumer:
            async for batch in consumer.batches():
                batch.finish()
                meter.add(len(batch))

    anyio.run(main, backend=loop)


def ours_messages(job: Job, meter: Meter, loop: str = "trio") -> None:
    """Our consumer, message by message."""

    async def main() -> None:
        async with our_consumer(job) as consumer:
            async for message in consumer:
                message.finish()
                meter.add(1)

    anyio.run(main, backend=loop)


def ours_handler(job: Job, meter: Meter, loop: str = "trio") -> None:
    """Our consumer with a handler."""

    async def handle(_message: Message) -> None:
        meter.add(1)

    async def main() -> None:
        async with our_consumer(job) as consumer:
            await consumer.run(handle)

    anyio.run(main, backend=loop)


def our_consumer(job: Job) -> Consumer:
    """Return a consumer that is not connected yet."""
    return Consumer(job.topic, CHANNEL, nsqd_tcp_addresses=[job.address], max_in_flight=READY_COUNT)


def ours_sync_messages(job: Job, meter: Meter) -> None:
    """Our consumer for threads, message by message."""
    addresses = [job.address]
    with trio_nsq.sync.Consumer(
        job.topic, CHANNEL, nsqd_tcp_addresses=addresses, max_in_flight=READY_COUNT
    ) as consumer:
        for message in consumer:
            message.finish()
            meter.add(1)


def ours_publish_many(job: Job, meter: Meter, loop: str = "trio") -> None:
    """Our producer, lists of messages."""
    _our_publishes(job, meter, loop, lambda producer: producer.publish_many(job.topic, BODIES), BATCH)


def ours_publish_set(job: Job, meter: Meter) -> None:
    """Our producer, packed messages."""
    packed = pack_messages(BODIES)
    _our_publishes(job, meter, "trio", lambda producer: producer.publish_set(job.topic, packed), BATCH)


def ours_publish(job: Job, meter: Meter, loop: str = "trio") -> None:
    """Our producer, message by message, from many tasks."""
    _our_publishes(job, meter, loop, lambda producer: producer.publish(job.topic, BODY), 1)


def _our_publishes(
    job: Job, meter: Meter, loop: str, publish: Callable[[Producer], Awaitable[object]], size: int
) -> None:
    async def main() -> None:
        async with Producer(job.address) as producer, anyio.create_task_group() as tasks:

            async def repeat() -> None:
                while True:
                    await publish(producer)
                    meter.add(size)

            meter.start()
            for _ in range(SINGLES_UNDER_WAY if size == 1 else BATCHES_UNDER_WAY):
                tasks.start_soon(repeat)

    anyio.run(main, backend=loop)


def ours_sync_submit(job: Job, meter: Meter) -> None:
    """Our producer for threads, message by message, receipts awaited later."""
    with trio_nsq.sync.Producer(job.address) as producer:
        receipts: deque[Any] = deque()
        meter.start()
        while True:
            receipts.append(producer.submit(job.topic, BODY))
            if len(receipts) >= SINGLES_UNDER_WAY:
                receipts.popleft().wait()
                meter.add(1)


def pynsq_consume(job: Job, meter: Meter) -> None:
    """pynsq's Reader."""
    import nsq

    def handle(_message: object) -> bool:
        meter.add(1)
        return True

    async def main() -> None:
        nsq.Reader(
            topic=job.topic,
            channel=CHANNEL,
            nsqd_tcp_addresses=[job.address],
            message_handler=handle,
            max_in_flight=READY_COUNT,
        )
        await asyncio.sleep(3600)

    asyncio.run(main())


def _pynsq_publish(job: Job, meter: Meter, verb: str, message: bytes | list[bytes], under_way: int) -> None:
    import nsq

    size = len(message) if isinstance(message, list) else 1

    async def main() -> None:
        writer = nsq.Writer([job.address])
        while not writer.conns:
            await asyncio.sleep(0.005)

        def send() -> None:
            getattr(writer, verb)(job.topic, message, callback=done)

        def done(_connection: object, data: object) -> None:
            if data != b"OK":
                sys.exit(f"the broker answered {data!r}")
            meter.add(size)
            send()

        meter.start()
        for _ in range(under_way):
            send()
        await asyncio.sleep(3600)

    asyncio.run(main())


def pynsq_mpub(job: Job, meter: Meter) -> None:
    """pynsq's Writer, lists of messages."""
    _pynsq_publish(job, meter, "mpub", BODIES, BATCHES_UNDER_WAY)


def pynsq_pub(job: Job, meter: Meter) -> None:
    """pynsq's Writer, message by message."""
    _pynsq_publish(job, meter, "pub", BODY, SINGLES_UNDER_WAY)


def gnsq_consume(job: Job, meter: Meter) -> None:
    """gnsq's Consumer."""
    import gnsq

    def handle(_consumer: object, message: object) -> None:
        del message  # passed by keyword
        meter.add(1)

    consumer = gnsq.Consumer(
        job.topic, CHANNEL, [job.address], message_handler=handle, max_in_flight=READY_COUNT
    )
    consumer.start()


def _gnsq_publish(job: Job, meter: Meter, verb: str, message: bytes | list[bytes], under_way: int) -> None:
    import gnsq

    size = len(message) if isinstance(message, list) else 1
    producer = gnsq.Producer([job.address])
    producer.start()
    publish = getattr(producer, verb)
    replies: deque[Any] = deque()
    meter.start()
    while True:
        replies.append(publish(job.topic, message, raise_error=False))
        if len(replies) >= under_way:
            replies.popleft().get()
            meter.add(size)


def gnsq_multipublish(job: Job, meter: Meter) -> None:
    """gnsq's Producer, lists of messages."""
    _gnsq_publish(job, meter, "multipublish", BODIES, BATCHES_UNDER_WAY)


def gnsq_publish(job: Job, meter: Meter) -> None:
    """gnsq's Producer, message by message."""
    _gnsq_publish(job, meter, "publish", BODY, SINGLES_UNDER_WAY)


def ansq_consume(job: Job, meter: Meter) -> None:
    """ansq's Reader."""
    ansq = importlib.import_module("ansq")  # not a dependency of the project, and without types

    async def main() -> None:
        reader = await ansq.create_reader(job.topic, CHANNEL, nsqd_tcp_addresses=[job.address])
        for connection in reader.connections:
            await connection.rdy(READY_COUNT)  # ansq has no option for this
        async for message in reader.messages():
            await message.fin()
            meter.add(1)

    asyncio.run(main())


def _ansq_publish(job: Job, meter: Meter, verb: str, messages: Sequence[bytes], under_way: int) -> None:
    ansq = importlib.import_module("ansq")

    async def main() -> None:
        writer = await ansq.create_writer([job.address])
        publish = getattr(writer, verb)

        async def repeat() -> None:
            while True:
                await publish(job.topic, *messages)
                meter.add(len(messages))

        meter.start()
        await asyncio.gather(*(repeat() for _ in range(under_way)))

    asyncio.run(main())


def ansq_mpub(job: Job, meter: Meter) -> None:
    """ansq's Writer, lists of messages."""
    _ansq_publish(job, meter, "mpub", BODIES, BATCHES_UNDER_WAY)


def ansq_pub(job: Job, meter: Meter) -> None:
    """ansq's Writer, message by message."""
    _ansq_publish(job, meter, "pub", [BODY], SINGLES_UNDER_WAY)


def nats_consume(job: Job, meter: Meter) -> None:
    """nats.py, a pull consumer of a JetStream stream: acknowledges each message, as the others do."""
    nats = importlib.import_module("nats")  # not a dependency of the project

    async def main() -> None:
        connection = await nats.connect(job.address)
        stream = connection.jetstream()
        await stream.add_stream(name=job.topic, subjects=[job.topic])
        for _ in range(0, job.count, BATCH):
            await asyncio.gather(*(stream.publish(job.topic, BODY) for _ in range(BATCH)))
        consumer = await stream.pull_subscribe(job.topic, CHANNEL)
        while True:
            for message in await consumer.fetch(BATCH):
                await message.ack()
                meter.add(1)

    asyncio.run(main())


def nats_publish(job: Job, meter: Meter) -> None:
    """nats.py, message by message into a JetStream stream, from many tasks."""
    nats = importlib.import_module("nats")

    async def main() -> None:
        connection = await nats.connect(job.address)
        stream = connection.jetstream()
        await stream.add_stream(name=job.topic, subjects=[job.topic])

        async def repeat() -> None:
            while True:
                await stream.publish(job.topic, BODY)
                meter.add(1)

        meter.start()
        await asyncio.gather(*(repeat() for _ in range(SINGLES_UNDER_WAY)))

    asyncio.run(main())


def redis_consume(job: Job, meter: Meter) -> None:
    """redis-py's asyncio client, a consumer group of a stream: one XACK for what one XREADGROUP returned."""
    redis = importlib.import_module("redis.asyncio")

    async def main() -> None:
        client = redis.Redis.from_url(f"redis://{job.address}")
        for _ in range(0, job.count, BATCH):
            async with client.pipeline(transaction=False) as pipeline:
                for body in BODIES:
                    pipeline.xadd(job.topic, {"body": body})
                await pipeline.execute()
        await client.xgroup_create(job.topic, CHANNEL, id="0")
        while True:
            for _stream, entries in await client.xreadgroup(CHANNEL, "one", {job.topic: ">"}, count=BATCH):
                await client.xack(job.topic, CHANNEL, *(entry for entry, _fields in entries))
                meter.add(len(entries))

    asyncio.run(main())


def redis_publish(job: Job, meter: Meter) -> None:
    """redis-py's asyncio client, XADD from many tasks, which share 50 connections."""
    redis = importlib.import_module("redis.asyncio")

    async def main() -> None:
        pool = redis.BlockingConnectionPool.from_url(f"redis://{job.address}", max_connections=50, timeout=60)
        client = redis.Redis(connection_pool=pool)

        async def repeat() -> None:
            while True:
                await client.xadd(job.topic, {"body": BODY})
                meter.add(1)

        meter.start()
        await asyncio.gather(*(repeat() for _ in range(SINGLES_UNDER_WAY)))

    asyncio.run(main())


# ------------------------------------------------------------------------------------------ the benchmark's process


@dataclass(frozen=True)
class Contender:
    """A client library and a workload.

    Attributes:
        name: The name in the table.
        workload: The name of the workload.
        module: The module of the library; empty for ours.
        run: The function that its process runs; None: NSQ's load generator.
        server: What it uses in place of an NSQ broker, a key of `peer_servers.ALONE`; empty for clients of NSQ.
    """

    name: str
    workload: str
    module: str = ""
    run: Callable[[Job, Meter], None] | None = None
    server: str = ""

    @property
    def is_ours(self) -> bool:
        return not self.module

    @property
    def is_python(self) -> bool:
        return self.run is not None

    def available(self) -> bool:
        """Whether the library is installed."""
        return not (self.is_python and self.module) or importlib.util.find_spec(self.module) is not None


CONTENDERS = [
    Contender("ours, batches", CONSUME, run=ours_batches),
    Contender("ours, messages", CONSUME, run=ours_messages),
    Contender("ours, handler", CONSUME, run=ours_handler),
    Contender("batches, asyncio", CONSUME, run=partial(ours_batches, loop="asyncio")),
    Contender("messages, asyncio", CONSUME, run=partial(ours_messages, loop="asyncio")),
    Contender("handler, asyncio", CONSUME, run=partial(ours_handler, loop="asyncio")),
    Contender("ours, sync messages", CONSUME, run=ours_sync_messages),
    Contender("pynsq", CONSUME, "nsq", pynsq_consume),
    Contender("gnsq", CONSUME, "gnsq", gnsq_consume),
    Contender("ansq", CONSUME, "ansq", ansq_consume),
    Contender("nats.py", CONSUME, "nats", nats_consume, "nats"),
    Contender("redis-py", CONSUME, "redis", redis_consume, "redis"),
    Contender("Go, bench_reader", CONSUME, "go"),
    Contender("ours, lists", PUBLISH_BATCHES, run=ours_publish_many),
    Contender("lists, asyncio", PUBLISH_BATCHES, run=partial(ours_publish_many, loop="asyncio")),
    Contender("ours, packed sets", PUBLISH_BATCHES, run=ours_publish_set),
    Contender("pynsq", PUBLISH_BATCHES, "nsq", pynsq_mpub),
    Contender("gnsq", PUBLISH_BATCHES, "gnsq", gnsq_multipublish),
    Contender("ansq", PUBLISH_BATCHES, "ansq", ansq_mpub),
    Contender("Go, bench_writer", PUBLISH_BATCHES, "go"),
    Contender("ours", PUBLISH_SINGLES, run=ours_publish),
    Contender("ours, asyncio", PUBLISH_SINGLES, run=partial(ours_publish, loop="asyncio")),
    Contender("ours, sync submit", PUBLISH_SINGLES, run=ours_sync_submit),
    Contender("pynsq", PUBLISH_SINGLES, "nsq", pynsq_pub),
    Contender("gnsq", PUBLISH_SINGLES, "gnsq", gnsq_publish),
    Contender("ansq", PUBLISH_SINGLES, "ansq", ansq_pub),
    Contender("nats.py", PUBLISH_SINGLES, "nats", nats_publish, "nats"),
    Contender("redis-py", PUBLISH_SINGLES, "redis", redis_publish, "redis"),
]


@dataclass
class Result:
    """The rates of one client in one round, in messages per second."""

    round: int
    workload: str
    client: str
    rate: float
    cpu_rate: float
    """Messages per second of the client's processor time, without the broker's."""


def measure(contender: Contender, broker: Broker, topic: str, options: argparse.Namespace) -> Rates:
    """Run a client once, on a new topic."""
    if contender.server:
        _, start = ALONE[contender.server]
        with TemporaryDirectory(dir=options.data_path) as folder, start(Path(folder)) as servers:
            job = Job(servers.addresses[0], topic, options.slow, options.seconds)
            return run_client(contender, job)
    broker.create(topic, CHANNEL)
    count = 10**12
    try:
        if contender.workload == CONSUME:
            is_fast = contender.is_ours or not contender.is_python
            count = fill(broker, options.fast if is_fast else options.slow, topic=topic)
        if contender.run is not None:
            return run_client(contender, Job(broker.tcp_address, topic, count, options.seconds))
        if contender.workload == CONSUME:
            # The generator does not end when the channel is empty: run it for half of the expected time.
            return reading(broker, count / 1_000_000, 1, topic=topic).finish()
        return writing(broker, options.seconds, 1, topic=topic).finish()
    finally:
        broker.http("POST", "/topic/delete", topic=topic)


def has_server(name: str) -> bool:
    """Whether a server of another project is installed, or can be built. Says why it is skipped."""
    check, _ = ALONE[name]
    try:
        check()
    except PeerUnavailable as reason:
        print(f"{name} is skipped: {reason}")
        return False
    return True


def run_client(contender: Contender, job: Job) -> Rates:
    """Run a client in its own process. Raises RuntimeError."""
    command = [sys.executable, __file__, "--as", str(CONTENDERS.index(contender)), json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=job.seconds + 60)
    if done.returncode or not done.stdout:
        raise RuntimeError(f"{contender.name} failed: {done.stderr[-2000:]}")
    return Rates(*json.loads(done.stdout))


def ratios(results: Sequence[Result], workload: str, client: str, figure: str) -> list[float]:
    """Return the ratio of a client's figure to the best other Python client's of NSQ, for each round."""
    others = {
        one.name
        for one in CONTENDERS
        if one.is_python and not one.is_ours and not one.server and one.workload == workload
    }
    of_workload = [result for result in results if result.workload == workload]
    best: dict[int, float] = defaultdict(float)
    for result in of_workload:
        if result.client in others:
            best[result.round] = max(best[result.round], getattr(result, figure))
    return [getattr(result, figure) / best[result.round] for result in of_workload if result.client == client]


def table(results: Sequence[Result]) -> str:
    """Format the table; README.md explains it."""
    lines = []
    for workload in dict.fromkeys(result.workload for result in results):
        lines.append(
            f"{workload:<22}{'msg/s':>12}{'ratio (min - max)':>24}{'msg/CPU s':>14}{'ratio (min - max)':>24}"
        )
        of_workload = [result for result in results if result.workload == workload]
        for client in dict.fromkeys(result.client for result in of_workload):
            own = [result for result in of_workload if result.client == client]
            line = f"  {client:<20}"
            for figure, width in (("rate", 12), ("cpu_rate", 14)):
                median = statistics.median(getattr(result, figure) for result in own)
                spread = ratios(results, workload, client, figure)
                text = f"{statistics.median(spread):.2f} ({min(spread):.2f} - {max(spread):.2f})"
                line += f"{median:>{width},.0f}{text:>24}"
            lines.append(line)
    return "\n".join([*lines, "ratio: to the best other Python client of NSQ in the same round"])


def parse() -> argparse.Namespace:
    """Parse the options."""
    parser = record.parser(__doc__, rounds=3, only="the workloads whose names contain this")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one turn at most (default: 2)")
    parser.add_argument("--broker", choices=BROKERS, default="ours", help="which one (default: ours)")
    parser.add_argument("--fast", type=int, default=400_000, help="messages for ours and Go to consume")
    parser.add_argument("--slow", type=int, default=100_000, help="messages for the others to consume")
    parser.add_argument("--as", dest="client", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the requested results."""
    options = parse()
    if options.client is not None:
        number, job = options.client
        run = CONTENDERS[int(number)].run
        assert run is not None
        job = Job(**json.loads(job))
        run(job, Meter(job))
        return
    about = record.begin(options)
    chosen = [one for one in CONTENDERS if options.only in one.workload]
    for missing in sorted({one.module for one in chosen if not one.available()}):
        print(f"skipped, because not installed: {missing}")
    missing_servers = [server for server in ALONE if not has_server(server)]
    against = BROKERS[options.broker]
    results = []
    with against.running(options.data_path) as broker:
        for number in range(1, options.rounds + 1):
            for place, contender in enumerate(chosen):
                if contender.available() and contender.server not in missing_servers:
                    rates = measure(contender, broker, f"t-{number}-{place}", options)
                    results.append(
                        Result(number, contender.workload, contender.name, rates.rate, rates.cpu_rate)
                    )
                    print(
                        f"round {number}: {contender.workload}: {contender.name}: {rates.rate:,.0f}/s",
                        flush=True,
                    )
    print("", table(results), sep="\n")

    settings = {
        "broker": options.broker,
        "flags": against.flags,
        "seconds": options.seconds,
        "body_bytes": BODY_BYTES,
        "batch": BATCH,
        "ready_count": READY_COUNT,
        "batches_under_way": BATCHES_UNDER_WAY,
        "singles_under_way": SINGLES_UNDER_WAY,
    }
    record.finish(
        {"machine": about, "settings": settings, "results": [asdict(result) for result in results]},
        options,
        "clients",
    )


if __name__ == "__main__":
    main()
