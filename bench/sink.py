"""Measure the rates of `write.format("nsq")` into our broker and nsqd, compared with Spark's `noop` sink.

All run in turn. README.md explains the table.
"""

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.export import PARTITIONS, WORKERS, ratio, roomy_jvm, rounds_of, rows_in_jvm
from pyspark.sql import DataFrame, SparkSession

from interop.peers import Broker, nsqd, qcli_serve
from trio_nsq.spark.runtime.spark_engine import open_spark

BASE = "noop"
"""Spark's sink that drops rows before they reach Python."""


def seconds_of(frame: DataFrame, sink: str, **options: str) -> float:
    """Return the duration of a write."""
    begun_s = time.perf_counter()
    frame.write.format(sink).options(**options).mode("append").save()
    return time.perf_counter() - begun_s


def main() -> None:
    """Measure, print, and save the results."""
    parser = record.parser(__doc__, rounds=5)
    parser.add_argument(
        "--messages", type=int, default=1_000_000, help="messages per write (default: %(default)s)"
    )
    args = parser.parse_args()
    about = record.begin(args)
    numbers = itertools.count()
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-sink-", dir=args.data_path))
        )
        synced = stack.enter_context(qcli_serve(folder / "synced"))
        lazy = stack.enter_context(qcli_serve(folder / "lazy", "--sync=interval"))
        stock = stack.enter_context(nsqd(folder / "nsqd", "--mem-queue-size=100000000"))
        roomy_jvm()
        engine = stack.enter_context(open_spark(f"local[{WORKERS}]"))
        session = SparkSession(engine._context)
        rows = rows_in_jvm(session, args.messages)
        bodies = rows.select("body")
        several = rows.selectExpr("body", "concat('topic', seq % 10) AS topic", "0 AS defer_ms")

        def rate(frame: DataFrame, broker: Broker) -> float:
            name = f"topic{next(numbers)}"
            seconds = seconds_of(frame, "nsq", topic=name, nsqdHttpAddress=broker.http_address)
            for topic in json.loads(broker.http("GET", "/stats", format="json"))["topics"]:
                broker.http("POST", "/topic/delete", topic=topic["topic_name"])
            return float(args.messages / seconds)

        contenders: dict[str, Callable[[Path], float]] = {
            BASE: lambda _: args.messages / seconds_of(bodies, BASE),
            "ours, every OK synced": lambda _: rate(bodies, synced),
            "ours, --sync=interval": lambda _: rate(bodies, lazy),
            "ours, ten topics": lambda _: rate(several, synced),
            "nsqd, in memory": lambda _: rate(bodies, stock),
        }
        rounds_of(1, contenders, folder)  # to warm up
        rates = rounds_of(args.rounds, contenders, folder)

    print(f"{args.messages:,} messages of 200 bytes, {PARTITIONS} tasks on {WORKERS} threads, warm")
    print(f"{'':26}{'messages/s':>12}   {'x noop':>20}   {'x nsqd':>20}")
    for name, found in rates.items():
        noop, beside = ratio(rates, name, BASE), ratio(rates, name, "nsqd, in memory")
        print(f"{name:26}{statistics.median(found):>12,.0f}   {noop:>20}   {beside:>20}")
    settings = {"messages": args.messages, "rounds": args.rounds}
    record.finish({"machine": about, "settings": settings, "messages_per_s": rates}, args, "sink")


if __name__ == "__main__":
    main()
