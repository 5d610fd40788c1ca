"""Compare `qcli to-parquet` with Spark's own writer and plain pyarrow, and measure the time of small exports.

All run in turn, because rates on a shared machine drift; compare the ratios. README.md explains the tables.
"""

import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

import pyarrow as pa
import pyarrow.parquet as pq
from bench import record
from pyspark.sql import DataFrame, SparkSession

from cli.support import Cli, command_line
from interop.peers import qcli_serve
from trio_nsq.spark.export.columns import DICTIONARY_COLUMNS, schema_of
from trio_nsq.spark.export.job import open_export
from trio_nsq.spark.export.layout import BodyFormat, Layout
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.logs import BrokerPlace, LogPlace
from trio_nsq.spark.runtime import java
from trio_nsq.spark.runtime.engine import Engine, run_inline
from trio_nsq.spark.runtime.spark_engine import open_spark
from trio_nsq.spark.schemas.documents import schema_columns
from trio_nsq.spark.segments.places import parse_places

TOPIC = "bench"
BODY_BYTES = 200
SMALL_MESSAGES = 20_000
ORDERS = 100_000
WORKERS = 2
PARTITIONS = 4

STOCK = """\
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[*]").getOrCreate()
frame = spark.range({rows}).selectExpr({columns})
frame.write.parquet(sys.argv[1])
spark.stop()
"""
# The columns of an export, with bodies of the same size that compress equally (hex digits).
COLUMNS = [
    "'bench' AS topic",
    "'127.0.0.1:4151' AS broker",
    "id AS seq",
    "lower(lpad(hex(id), 16, '0')) AS id_",
    "1795262400000000000 + id AS ts_ns",
    "timestamp_micros((1795262400000000000 + id) div 1000) AS ts",
    "CAST(NULL AS INT) AS attempts",
    "CAST(concat(sha2(CAST(id AS STRING), 256), sha2(CAST(id + 1 AS STRING), 256), "
    "sha2(CAST(id + 2 AS STRING), 256), '01234567') AS BINARY) AS body",
]


BODIES = ExportRequest(TOPIC, "")


def body(number: int) -> bytes:
    """Return the body of a row, the same as in the JVM's rows."""
    digests = [hashlib.sha256(b"%d" % (number + more)).hexdigest().encode() for more in range(3)]
    return b"".join(digests) + b"01234567"


SCHEMA = """{"fields": [
  {"name": "order", "type": "long"},
  {"name": "user", "type": "struct<name:string,age:int,premium:boolean>"},
  {"name": "price", "type": "decimal(10,2)"},
  {"name": "placed", "type": "timestamp(ms)"},
  {"name": "tags", "type": "array<string>"},
  {"name": "items", "type": "array<struct<sku:string,count:int>>"}
]}"""
"""The columns of `order`."""


ORDERS_TOPIC = "orders"
WITH_SCHEMA = ExportRequest(
    ORDERS_TOPIC,
    "",
    layout=Layout(body=BodyFormat.JSON, keep_rest=True),
    json_fields=schema_columns(SCHEMA),
)


def order(number: int) -> bytes:
    """Return a JSON body with nested values."""
    digest = hashlib.sha256(b"%d" % number).hexdigest()
    fields = {
        "order": number,
        "user": {"name": digest[:12], "age": number % 90, "premium": number % 3 == 0},
        "price": number % 10_000 + 0.25,
        "placed": 1_795_262_400_000 + number,
        "tags": ["new", digest[12:16]],
        "items": [{"sku": digest[16:28], "count": number % 5}],
    }
    return json.dumps(fields, separators=(",", ":")).encode()


# ---------------------------------------------------------------------- rates


def export_rate(
    engine: Engine, place: LogPlace, messages: int, folder: Path, ranges: int, request: ExportRequest = BODIES
) -> float:
    """Return the messages per second of an export, from the plan to the last rename."""
    begun_s = time.perf_counter()
    with open_export(replace(request, place=str(folder), min_ranges=ranges), [place]) as job:
        job.run(engine, job.plan([place]), lambda *_: None)
    elapsed_s = time.perf_counter() - begun_s
    assert job.result.messages == messages, job.result
    return messages / elapsed_s


def roomy_jvm() -> None:
    """Start the JVM with all compiler tiers and more memory, which Spark's own writer needs; qcli uses less."""
    flags = ("-Xmx2g", *(flag for flag in java._FLAGS if flag.startswith(("-D", "-XX:+Ignore"))))
    setattr(java, "_FLAGS", flags)  # noqa: B010


def rows_in_jvm(session: SparkSession, messages: int) -> DataFrame:
    """Create rows that Spark keeps in memory, so that only its writer is measured."""
    frame = session.range(0, messages, 1, PARTITIONS).selectExpr(*COLUMNS).persist()
    assert frame.count() == messages
    return frame


def spark_rate(frame: DataFrame, messages: int, folder: Path) -> float:
    """Return the rate of Spark's own writer, with pyarrow's compression level."""
    begun_s = time.perf_counter()
    frame.write.option("compression", "zstd").option("parquet.compression.codec.zstd.level", "1").parquet(
        str(folder)
    )
    return messages / (time.perf_counter() - begun_s)


def orders_in_memory(place: LogPlace, folder: Path) -> Any:
    """Return the rows of an export of orders as a table."""
    export_rate(run_inline, place, ORDERS, folder, 1, WITH_SCHEMA)
    table = pq.read_table(folder)
    shutil.rmtree(folder)
    return table


def pyarrow_rate(table: Any, folder: Path) -> float:
    """Return the rate of plain pyarrow in one thread, with a table in memory."""
    folder.mkdir()
    begun_s = time.perf_counter()
    pq.write_table(
        table,
        folder / "all.parquet",
        compression="zstd",
        compression_level=1,
        use_dictionary=DICTIONARY_COLUMNS,
        row_group_size=300_000,
    )
    return len(table) / (time.perf_counter() - begun_s)


def table_in_memory(bodies: Sequence[bytes]) -> Any:
    """Return the rows of an export as a table."""
    count = len(bodies)
    numbers = pa.array(range(count), pa.int64())
    times = pa.array(range(1_795_262_400_000_000_000, 1_795_262_400_000_000_000 + count), pa.int64())
    microseconds = pa.array([each // 1000 for each in times.to_pylist()], pa.int64())
    columns = [
        pa.repeat(TOPIC, count),
        pa.repeat("127.0.0.1:4151", count),
        numbers,
        pa.array([f"{number:016x}" for number in range(count)]),
        times,
        microseconds.cast(pa.timestamp("us", tz="UTC")),
        pa.nulls(count, pa.int32()),
        pa.array(bodies, pa.binary()),
    ]
    return pa.Table.from_arrays(columns, schema=schema_of(Layout()))


# ---------------------------------------------------------------------- small exports


def small_seconds(qcli: Cli, engine: str, folder: Path) -> float:
    """Return the duration of the command, from its start to its end."""
    words = ["to-parquet", TOPIC, str(folder), "--to", str(SMALL_MESSAGES), "--engine", engine, "-q"]
    begun_s = time.perf_counter()
    subprocess.run(command_line(*words), env=qcli.environment(), check=True, timeout=300)
    return time.perf_counter() - begun_s


def stock_seconds(folder: Path) -> float:
    """Return the duration of a script that starts pyspark with its defaults and writes as many rows."""
    program = STOCK.format(rows=SMALL_MESSAGES, columns=", ".join(map(repr, COLUMNS)))
    begun_s = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", program, str(folder)], check=True, timeout=300, stderr=subprocess.DEVNULL
    )
    return time.perf_counter() - begun_s


# ---------------------------------------------------------------------- main


def rounds_of(
    count: int, contenders: dict[str, Callable[[Path], float]], folder: Path
) -> dict[str, list[float]]:
    """Run all in turn, each with a new folder that is removed afterwards."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(count):
        for name, work in contenders.items():
            place = folder / f"{name.replace(' ', '-').replace(',', '')}-{number}"
            found[name].append(work(place))
            print(f"  {name}: {found[name][-1]:,.2f}", file=sys.stderr)
            shutil.rmtree(place, ignore_errors=True)
    return found


def ratio(found: dict[str, list[float]], name: str, base: str) -> str:
    """Format the median ratio of the rounds, with the smallest and the largest."""
    ratios = [one / other for one, other in zip(found[name], found[base], strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def main() -> None:
    """Measure, print, and save the results."""
    parser = record.parser(__doc__, rounds=3)
    parser.add_argument(
        "--messages", type=int, default=1_000_000, help="how many are exported (default: a million)"
    )
    parser.add_argument("--only-rates", action="store_true", help="skip the small exports, which take long")
    args = parser.parse_args()
    about = record.begin(args, beside_nsqd=False) | {"pyarrow": pa.__version__}
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-export-", dir=args.data_path))
        )
        broker = stack.enter_context(qcli_serve(folder / "data", "--sync=interval"))
        qcli = Cli(broker.tcp_address, broker.http_address)
        bodies = [body(number) for number in range(args.messages)]
        qcli.publish(TOPIC, bodies)
        qcli.publish(ORDERS_TOPIC, [order(number) for number in range(ORDERS)])

        small = rounds_of(
            0 if args.only_rates else args.rounds,
            {
                "inline": lambda place: small_seconds(qcli, "inline", place),
                "embedded Spark": lambda place: small_seconds(qcli, "spark", place),
                "stock pyspark": stock_seconds,
            },
            folder,
        )
        roomy_jvm()
        engine = stack.enter_context(open_spark(f"local[{WORKERS}]"))
        frame = rows_in_jvm(SparkSession(engine._context), args.messages)
        table = table_in_memory(bodies)
        del bodies
        orders = BrokerPlace(broker.http_address, ORDERS_TOPIC)
        nested = orders_in_memory(orders, folder / "orders")
        served = BrokerPlace(broker.http_address, TOPIC)
        (segments,) = parse_places([str(folder / "data")], TOPIC)
        contenders: dict[str, Callable[[Path], float]] = {
            "to-parquet, inline": lambda place: export_rate(run_inline, served, args.messages, place, 1),
            "to-parquet, Spark": lambda place: export_rate(engine, served, args.messages, place, PARTITIONS),
            "segments, inline": lambda place: export_rate(run_inline, segments, args.messages, place, 1),
            "segments, Spark": lambda place: export_rate(engine, segments, args.messages, place, PARTITIONS),
            "Spark's writer": lambda place: spark_rate(frame, args.messages, place),
            "pyarrow": lambda place: pyarrow_rate(table, place),
            "schema, inline": lambda place: export_rate(run_inline, orders, ORDERS, place, 1, WITH_SCHEMA),
            "schema, pyarrow": lambda place: pyarrow_rate(nested, place),
        }
        rounds_of(1, contenders, folder)  # to warm up
        rates = rounds_of(args.rounds, contenders, folder)

    print(f"{args.messages:,} messages of {BODY_BYTES} bytes, zstd 1, {args.rounds} rounds; warm")
    print(f"{'':22}{'messages/s':>12}   {'x Spark writer':>20}   {'x pyarrow':>20}")
    for name, found in rates.items():
        spark, arrow = ratio(rates, name, "Spark's writer"), ratio(rates, name, "pyarrow")
        print(f"{name:22}{statistics.median(found):>12,.0f}   {spark:>20}   {arrow:>20}")
    direct = ratio(rates, "segments, Spark", "to-parquet, Spark")
    print(
        f"\nto-parquet writes nested columns at {ratio(rates, 'schema, inline', 'schema, pyarrow')} x pyarrow"
    )
    print(f"\nSpark reads segments at {direct} x the rate through the broker")
    if not args.only_rates:
        print(f"\n{SMALL_MESSAGES:,} messages, from the start of the process to its end")
    for name, found in small.items() if not args.only_rates else ():
        print(f"{name:22}{statistics.median(found):>10.2f} s   x stock {ratio(small, name, 'stock pyspark')}")
    settings = {"messages": args.messages, "rounds": args.rounds, "body_bytes": BODY_BYTES}
    kept = {"machine": about, "settings": settings, "messages_per_s": rates, "small_s": small}
    record.finish(kept, args, "export")


if __name__ == "__main__":
    main()
