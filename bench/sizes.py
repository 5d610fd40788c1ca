"""Measure bytes: memory of the broker by topic, channel and message, and bytes on disk by message.

For docs/how-to/size-a-broker.md. The figures are no times, so other work on the machine does not change them.
"""

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.contenders import INTERVAL, memory_mib

from interop.peers import Broker
from trio_nsq.sync import Consumer, Producer

COUNT = 1000
QUEUED = 200_000
CONSUMERS = 16
IN_FLIGHT = 2500
BODY_BYTES = 100
KIB = 1024


def memory(broker: Broker) -> float:
    """Return the resident memory in KiB, once the broker has done what it does after requests."""
    time.sleep(1)
    return memory_mib(broker) * KIB


def in_flight(broker: Broker, stack: ExitStack) -> int:
    """Receive messages with all consumers and answer none; return how many."""
    received = 0
    for _ in range(CONSUMERS):
        consumer = stack.enter_context(
            Consumer("t", "c", nsqd_tcp_addresses=broker.tcp_address, max_in_flight=IN_FLIGHT)
        )
        mine = 0
        for batch in consumer.batches():
            mine += len(batch)
            if mine >= IN_FLIGHT:
                break
        received += mine
    return received


def measure_memory(broker: Broker) -> dict[str, float]:
    """Return KiB of an idle broker, of a topic and of a channel, and bytes of a message in its states."""
    idle = memory(broker)
    for number in range(COUNT):
        broker.create(f"t{number}")
    topics = memory(broker)
    broker.create("t0", *(f"c{number}" for number in range(COUNT)))
    channels = memory(broker)
    broker.create("t", "c")
    with Producer(broker.tcp_address) as producer:
        producer.publish_many("t", [b"x" * BODY_BYTES] * QUEUED)
    queued = memory(broker)
    with ExitStack() as stack:
        count = in_flight(broker, stack)
        delivered = memory(broker)
    return {
        "idle, KiB": idle,
        "a topic, KiB": (topics - idle) / COUNT,
        "a channel, KiB": (channels - topics) / COUNT,
        f"a queued message of {BODY_BYTES} bytes, bytes": (queued - channels) * KIB / QUEUED,
        f"a message in flight of {BODY_BYTES} bytes, bytes": (delivered - queued) * KIB / count,
    }


def measure_disk(broker: Broker, folder: Path) -> dict[str, float]:
    """Return bytes on disk for each message, published alone and by 200."""
    figures = {}
    for size in (10, 100, 1000, 10_000):
        for batch in (1, 200):
            topic = f"size{size}x{batch}"
            with Producer(broker.tcp_address) as producer:
                for _ in range(10):
                    producer.publish_many(topic, [b"x" * size] * batch)
            data = next(folder.glob(f"*/data/topics/{topic}.topic"))
            # Blocks of zeros may follow the records: the records are what is left without them.
            bytes_written = sum(len(path.read_bytes().rstrip(b"\0")) for path in data.glob("*.log"))
            figures[f"{size} bytes, by {batch}"] = (bytes_written - 52) / (10 * batch)
    return figures


def main() -> None:
    """Measure, print and keep."""
    options = record.parser(__doc__).parse_args()
    about = record.begin(options, beside_nsqd=False)
    with INTERVAL.running(options.data_path) as broker:
        figures = measure_memory(broker)
    folder = options.data_path / f"sizes-{os.getpid()}"
    folder.mkdir()
    with INTERVAL.running(folder) as broker:
        figures |= measure_disk(broker, folder)
    folder.rmdir()
    for name, figure in figures.items():
        print(f"{name}: {figure:,.1f}")
    record.finish({"machine": about, "figures": figures}, options, "sizes")


if __name__ == "__main__":
    main()
