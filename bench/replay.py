"""Measure the rates of `qcli replay` from files: unlimited, in order, with Spark, and without publishing.

All run in turn. README.md explains the table.
"""

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

import pyarrow as pa
from bench import record
from bench.export import BODY_BYTES, TOPIC, WORKERS, body, ratio, rounds_of

from cli.support import Cli
from interop.peers import Broker, nsqd, qcli_serve
from spark.support import export
from trio_nsq.spark.replay.job import open_job
from trio_nsq.spark.replay.request import ReplayRequest
from trio_nsq.spark.runtime.engine import Engine, run_inline
from trio_nsq.spark.runtime.spark_engine import open_spark

BASE = "only reading"
_numbers = itertools.count()


def rate_of(
    folder: Path,
    broker: Broker,
    messages: int,
    engine: Engine,
    *,
    ordered: bool = False,
    dry_run: bool = False,
) -> float:
    """Return the messages per second of a job, from the plan to its end."""
    request = ReplayRequest(
        str(folder / "archive"), f"again{next(_numbers)}", broker.http_address, ordered=ordered
    )
    begun_s = time.perf_counter()
    with open_job(folder / "jobs", None, request) as job:
        job.plan(None)
        job.run(engine, job.tasks(WORKERS, dry_run=dry_run), lambda *_: None)
    elapsed_s = time.perf_counter() - begun_s
    assert job.result.published == messages, job.result
    if not dry_run:
        broker.post("/topic/delete", b"", topic=request.topic)  # to free disk space
    return messages / elapsed_s


def main() -> None:
    """Measure, print, and save the results."""
    parser = record.parser(__doc__, rounds=5)
    parser.add_argument(
        "--messages", type=int, default=1_000_000, help="messages per replay (default: %(default)s)"
    )
    args = parser.parse_args()
    about = record.begin(args) | {"pyarrow": pa.__version__}
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-replay-", dir=args.data_path))
        )
        weak = stack.enter_context(qcli_serve(folder / "weak", "--sync=interval"))
        synced = stack.enter_context(qcli_serve(folder / "synced"))
        stock = stack.enter_context(nsqd(folder / "stock", "--mem-queue-size=0"))
        weak_cli = Cli(weak.tcp_address, weak.http_address)
        weak_cli.publish(TOPIC, [body(number) for number in range(args.messages)])
        export(weak_cli, TOPIC, folder / "archive", "--row-group-size", "16MiB")
        engine = stack.enter_context(open_spark(f"local[{WORKERS}]"))

        def turn(broker: Broker, engine: Engine, **options: bool) -> Callable[[Path], float]:
            return lambda _: rate_of(folder, broker, args.messages, engine, **options)

        contenders = {
            BASE: turn(weak, run_inline, dry_run=True),
            "inline": turn(weak, run_inline),
            "inline, every OK synced": turn(synced, run_inline),
            "inline, ordered": turn(weak, run_inline, ordered=True),
            "Spark": turn(weak, engine),
            "Spark, every OK synced": turn(synced, engine),
            "inline, into nsqd": turn(stock, run_inline),
        }
        rounds_of(1, contenders, folder)  # to warm up
        rates = rounds_of(args.rounds, contenders, folder)
    print(f"{args.messages:,} messages of {BODY_BYTES} bytes, {args.rounds} rounds; warm")
    print(f"{'':26}{'messages/s':>12}   {f'x {BASE}':>20}")
    for name, found in rates.items():
        print(f"{name:26}{statistics.median(found):>12,.0f}   {ratio(rates, name, BASE):>20}")
    settings = {"messages": args.messages, "rounds": args.rounds, "body_bytes": BODY_BYTES}
    record.finish({"machine": about, "settings": settings, "messages_per_s": rates}, args, "replay")


if __name__ == "__main__":
    main()
