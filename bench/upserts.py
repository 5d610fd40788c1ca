"""Compare commits to tables with a key (`to-parquet --key`) with commits that append.

    python bench/upserts.py [--messages 100000] [--keys 10000] [--commits 10] [--rounds 3]

Prints messages per second of the commits, the median of the rounds, and their ratio. The files of the messages are
written before. Keys are chosen at random, so each commit but the first writes all files of the table again.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

import pytest
from bench import record

from spark.support import NOON_NS
from spark.table_support import DELTA, ICEBERG, table_rows, use_catalog, write_changes
from trio_nsq.spark.export.layout import BodyFormat, JsonColumn, Layout
from trio_nsq.spark.schemas.column_types import JsonType
from trio_nsq.spark.tables.opening import open_table
from trio_nsq.spark.tables.target import TableTarget
from trio_nsq.storage import LocalStorage

COLUMNS = (
    JsonColumn("user", JsonType.LONG, "user"),
    JsonColumn("n", JsonType.LONG, "n"),
    JsonColumn("text", JsonType.STRING, "text"),
)


def main() -> None:
    parser = record.parser(__doc__, rounds=3)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--commits", type=int, default=10)
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": record.begin(options, beside_nsqd=False)}
    chance = random.Random(1)
    bodies = [
        {"user": chance.randrange(options.keys), "n": number, "text": "x" * 100}
        for number in range(options.messages)
    ]
    print("| table | append, messages/s | key, messages/s | ratio |\n|---|---|---|---|")
    for target in (DELTA, ICEBERG):
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(options.rounds):
            for keyed, rates in found.items():
                rates.append(_rate(target, bodies, options.commits, keyed=keyed))
        append, key = (statistics.median(found[keyed]) for keyed in (False, True))
        print(f"| {target.kind} | {append:,.0f} | {key:,.0f} | {append / key:.1f} |")
        results[target.kind] = {"append": append, "key": key}
    record.finish(results, options, "upserts")


def _rate(target: TableTarget, bodies: Sequence[dict[str, Any]], commits: int, *, keyed: bool) -> float:
    """Return messages per second of the commits."""
    layout = Layout(body=BodyFormat.JSON, json_columns=COLUMNS, key=("user",) if keyed else ())
    size = len(bodies) // commits
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        place = Path(folder) / "f"
        place.mkdir()
        use_catalog(patch, Path(folder))
        results = [
            write_changes(
                place,
                layout,
                "b",
                first,
                [(NOON_NS + n, bodies[n]) for n in range(first, first + size)],
            )
            for first in range(0, size * commits, size)
        ]
        begun_s = time.perf_counter()
        table = open_table(target, LocalStorage(place), "t", "e")
        for number, result in enumerate(results, 1):
            table.commit(number, [result], layout)
        elapsed_s = time.perf_counter() - begun_s
        rows = len(table_rows(target, place))
        assert rows == (len({each["user"] for each in bodies[: size * commits]}) if keyed else size * commits)
    return size * commits / elapsed_s


if __name__ == "__main__":
    main()
