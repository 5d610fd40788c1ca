"""Kill an export of a fleet of brokers repeatedly (SIGKILL), and count the rows with DuckDB and Spark.

One `qcli to-parquet` follows all topics of three brokers, according to a configuration file: a quarter of them each to
local folders, to an S3 store (versitygw), to Delta tables and to Iceberg tables. Meanwhile messages are published, and
the export, or one time in four a broker, is killed at random times. In the end every message in the logs must be in
exactly one row, and every acknowledged message must be in a log.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.killed_brokers import (
    Fleet,
    delta_files,
    iceberg_files,
    running,
    spark,
    stats,
    use_catalog,
    wait_until_exported,
)

from interop.peers import free_address
from storage.stores import BUCKET, Store, versitygw
from trio_nsq.api import broker as api
from trio_nsq.client.http.broker_http import BrokerHTTP
from trio_nsq.client.reading.broker_log import BrokerLog
from trio_nsq.protocol.errors import NSQError
from trio_nsq.protocol.messages import pack_messages

TARGETS = ("local", "s3", "delta", "iceberg")
BROKERS = 3
_MOST_MESSAGES = 200
"""In one publish."""

Log = tuple[str, str]
"""A topic, and the HTTP address of a broker."""


class Publisher(threading.Thread):
    """Publishes to random topics of random brokers.

    Attributes:
        acknowledged: The messages that brokers have acknowledged.
    """

    def __init__(self, fleet: Fleet, topics: list[str], chance: random.Random, rate: float) -> None:
        super().__init__(daemon=True)
        self.acknowledged: Counter[Log] = Counter()
        self._fleet, self._topics, self._chance = fleet, topics, chance
        self._rate = rate
        self._stopped = threading.Event()
        self._clients = {address: BrokerHTTP(address, keep_alive_s=4.0) for address in fleet.addresses}

    def run(self) -> None:
        for topic in self._topics:  # each is on at least one broker
            self._publish(topic, self._chance.choice(self._fleet.addresses))
        while not self._stopped.wait(_MOST_MESSAGES / 2 / self._rate):
            self._publish(self._chance.choice(self._topics), self._chance.choice(self._fleet.addresses))

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def _publish(self, topic: str, address: str) -> None:
        count, log = self._chance.randrange(1, _MOST_MESSAGES), (topic, address)
        number = self.acknowledged[log]
        bodies = [json.dumps({"n": number + each, "text": "x" * 100}).encode() for each in range(count)]
        packed = count.to_bytes(4, "big") + pack_messages(bodies).data
        with suppress(NSQError):  # without an answer, they may be stored
            self._clients[address].ask(api.publish_batch(topic, None, True, body=packed))
            self.acknowledged[log] += count


def configuration(fleet: Fleet, store: Store, folder: Path, status: str) -> str:
    brokers = json.dumps(fleet.addresses)
    local = folder / "export"
    return f"""
nsqd-http-address = {brokers}
channel = "lake"
follow = true
every = "1s"
topic-refresh = "5s"
http-address = "{status}"
json = true
columns = ["n:long", "text:string"]

[local]
topic-pattern = '^local\\.'
folder = "{local}/local"

[s3]
topic-pattern = '^s3\\.'
folder = "{store.place}/lake"

[delta]
topic-pattern = '^delta\\.'
folder = "{local}/delta"
delta = true
compact = true

[iceberg]
topic-pattern = '^iceberg\\.'
folder = "{local}/iceberg"
iceberg = "local/lake.{{topic}}"
compact = true
"""


def line(config: Path) -> list[str]:
    """Return the words of the command."""
    return ["to-parquet", "--config", str(config), "--engine", "inline", "-q"]


def files_of(target: str, folder: Path, topics: list[str]) -> list[str]:
    """Return the files that readers of the folders and tables see."""
    exported = folder / "export"
    if target == "local":
        return [str(path) for path in (exported / "local").rglob("*.parquet")]
    if target == "s3":  # where the store keeps its objects
        return [str(path) for path in (folder / "s3" / BUCKET / "lake").rglob("*.parquet")]
    if target == "delta":
        return [path for topic in topics for path in delta_files(exported / "delta" / topic)]
    return [path for topic in topics for path in iceberg_files(f"lake.{topic.replace('.', '_')}")]


Rows = dict[Log, tuple[int, int, int, int]]
"""Of each log: the rows, the different sequences, the greatest sequence, and the rows without a value in `n`."""


def duckdb_rows(files: list[str]) -> Rows:
    import duckdb

    found = duckdb.execute(
        "SELECT topic, broker, count(*), count(DISTINCT seq), max(seq), count(*) FILTER (n IS NULL) "
        "FROM read_parquet(?, union_by_name=true) GROUP BY ALL",
        [files],
    ).fetchall()
    return {(topic, broker): tuple(numbers) for topic, broker, *numbers in found}


def spark_rows(session: Any, files: list[str]) -> Rows:
    from pyspark.sql import functions as f

    found = (
        session.read.parquet(*files)
        .groupBy("topic", "broker")
        .agg(
            f.count("*"),
            f.countDistinct("seq"),
            f.max("seq"),
            f.sum(f.when(f.col("n").isNull(), 1).otherwise(0)),
        )
        .collect()
    )
    return {(topic, broker): tuple(numbers) for topic, broker, *numbers in found}


def check(rows: Rows, ends: dict[Log, int], acknowledged: Counter[Log]) -> tuple[int, int, int]:
    """Return how many messages are missing, how many rows are repeated, and how many acknowledged are in no log."""
    missing = sum(max(0, end - rows.get(log, (0, 0, 0, 0))[1]) for log, end in ends.items())
    repeated = sum(count - different for count, different, *_ in rows.values())
    lost = sum(max(0, count - ends.get(log, 0)) for log, count in acknowledged.items() if log in ends)
    return missing, repeated, lost


@dataclass
class Kills:
    exports: int = 0
    brokers: int = 0
    rounds: int = 0


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the trial, and return the counts."""
    chance = random.Random(options.seed)
    topics = [
        f"{target}.{number:03}" for target in TARGETS for number in range(options.topics // len(TARGETS))
    ]
    fleet, kills, status = Fleet(folder, BROKERS), Kills(), free_address()
    use_catalog(folder)
    with versitygw(folder / "s3") as store:
        config = folder / "pipeline.toml"
        config.write_text(configuration(fleet, store, folder, status))
        for address in fleet.addresses:
            fleet.start(address)
        publisher = Publisher(fleet, topics, chance, options.rate)
        publisher.start()
        try:
            kill_randomly(options, fleet, kills, config, store.env, status, chance)
            publisher.stop()
            print(
                f"killed: {kills.exports} exports, {kills.brokers} brokers; complete rounds: {kills.rounds}"
            )
            begun_s = time.monotonic()
            ends = {log: end for log, end in all_ends(fleet, topics).items() if end}
            with running(line(config), store.env, folder / "export.log"):
                last = wait_until_exported(status, {topic for topic, _ in ends}, begun_s)
            print(f"exported the rest in {time.monotonic() - begun_s:.0f} s: {last}")
        finally:
            fleet.close()
        counts = judge(folder, topics, ends, publisher.acknowledged)
    killed = {"exports": kills.exports, "brokers": kills.brokers, "rounds": kills.rounds}
    return {"minutes": options.minutes, "topics": len(topics), "killed": killed, "counts": counts}


def kill_randomly(
    options: argparse.Namespace,
    fleet: Fleet,
    kills: Kills,
    config: Path,
    env: dict[str, str],
    status: str,
    chance: random.Random,
) -> None:
    until_s = time.monotonic() + options.minutes * 60
    while time.monotonic() < until_s:
        with running(line(config), env, config.with_name("export.log")) as export:
            life_s = chance.choice((1.0, 1.0, 4.0)) * chance.uniform(1, options.life)
            dies_s = time.monotonic() + life_s
            killed = None
            if chance.random() < 1 / 4:
                time.sleep(life_s / 2)
                killed = chance.choice(fleet.addresses)
                fleet.kill(killed)
                kills.brokers += 1
            time.sleep(max(0.0, dies_s - time.monotonic()))
            found = stats(status)
            if found is not None:
                kills.rounds += found["rounds"]
            if export.poll() is not None and found is None:
                raise RuntimeError(
                    f"the export has ended with {export.returncode}: {config.with_name('export.log')}"
                )
        kills.exports += 1
        if killed is not None:
            fleet.start(killed)
        rounds = "no answer" if found is None else f"{found['rounds']} rounds, written {found['written']:,}"
        problems = [] if found is None else found["problems"][:2]
        print(f"killed after {life_s:.1f} s: {rounds} {problems or ''}", flush=True)


def all_ends(fleet: Fleet, topics: list[str]) -> dict[Log, int]:
    """Return the end of each log that exists."""
    ends = {}
    for address in fleet.addresses:
        known = {each["topic_name"] for each in BrokerHTTP(address).ask(api.stats())["topics"]}
        for topic in known.intersection(topics):
            ends[topic, address] = BrokerLog(address, topic).bounds().end
    return ends


def judge(
    folder: Path, topics: list[str], ends: dict[Log, int], acknowledged: Counter[Log]
) -> list[dict[str, Any]]:
    """Count the rows, print the counts, and return them."""
    found: list[dict[str, Any]] = []
    print(
        f"{'':<9}{'logs':>6}{'messages':>11}{'files':>8}{'':>10}{'rows':>11}{'missing':>9}{'repeated':>10}{'lost':>7}"
    )
    with spark() as session:
        for target in TARGETS:
            of_target = [topic for topic in topics if topic.startswith(f"{target}.")]
            own = {log: end for log, end in ends.items() if log[0] in of_target}
            files = files_of(target, folder, sorted({topic for topic, _ in own}))
            for reader, rows in (("DuckDB", duckdb_rows(files)), ("Spark", spark_rows(session, files))):
                missing, repeated, lost = check(rows, own, acknowledged)
                is_right = (missing, repeated, lost) == (0, 0, 0) and all(
                    rows.get(log) == (end, end, end - 1, 0) for log, end in own.items()
                )
                count, messages = sum(each[0] for each in rows.values()), sum(own.values())
                print(
                    f"{target:<9}{len(own):>6}{messages:>11,}{len(files):>8,}{reader:>10}{count:>11,}"
                    f"{missing:>9,}{repeated:>10,}{lost:>7,}{'' if is_right else '  WRONG'}",
                    flush=True,
                )
                found.append(
                    {
                        "target": target,
                        "reader": reader,
                        "logs": len(own),
                        "messages": messages,
                        "files": len(files),
                        "rows": count,
                        "missing": missing,
                        "repeated": repeated,
                        "lost": lost,
                        "right": is_right,
                    }
                )
    return found


def parse() -> argparse.Namespace:
    """Return the options of this run."""
    parser = record.parser(__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10, help="how long there are kills (default: %(default)s)"
    )
    parser.add_argument(
        "--topics", type=int, default=200, help="a quarter for each target (default: %(default)s)"
    )
    parser.add_argument("--rate", type=float, default=2000, help="messages/s (default: %(default)s)")
    parser.add_argument(
        "--life",
        type=float,
        default=10,
        help="an export lives up to 4 times this, in s (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=7, help="seed of the kills; their timing still varies")
    return parser.parse_args()


def main() -> None:
    """Run the trial and print the counts."""
    options = parse()
    about = record.begin(options, beside_nsqd=False, runs_checkout=False)
    with tempfile.TemporaryDirectory(prefix="fleet-", dir=options.data_path) as name:
        folder = Path(name)
        (folder / "s3").mkdir()
        (folder / "export").mkdir()
        found = run(options, folder)
        if not all(each["right"] for each in found["counts"]):
            log = (folder / "export.log").read_text()
            sys.exit(f"WRONG. The end of the log:\n{log[-3000:]}")
    print("Each message is in exactly one row.")
    record.finish({"machine": about} | found, options, "fleet-export")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
