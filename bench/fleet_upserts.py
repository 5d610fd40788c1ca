"""Kill exports with `--key` of two brokers repeatedly (SIGKILL), and compare the tables with the producers' ledger.

Four topics of changes (`c`, `u`, `d`) become a table each: Delta and Iceberg by a `qcli to-parquet --follow` of their
own, and Delta and Iceberg as tables that the topics declare, by two `qcli pipeline run` with one lease in an S3 store
(versitygw). Meanwhile

- two producers of each topic publish changes of their own keys to both brokers, in idempotent batches that they repeat
  until they are acknowledged;
- `qcli pub` publishes earlier changes of further keys again, and `qcli replay` those of a folder of Parquet files;
- exports, supervisors and brokers are killed, and supervisors are suspended for longer than the lease.

The ledger knows for each key the last change that a producer got acknowledged. It reads nothing of the brokers and the
tables. In the end each table must have one row for each key that was not deleted last, with the number of that change,
for DuckDB and for Spark.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.killed_brokers import (
    CATALOG,
    Fleet,
    delta_files,
    iceberg_files,
    running,
    spark,
    use_catalog,
    wait_until_exported,
)

from interop.peers import free_address
from spark.change_load import COLUMNS, Addresses, Batches, Change, Changes, Ledger, Producer, Repeater
from storage.stores import Store, versitygw

SUSPENDED_S = 30.0
"""A lease in a store is taken over 15 to 20 s after its last renewal."""


@dataclass(frozen=True)
class Table:
    """A topic, and what writes its table.

    Attributes:
        is_declared: `pipeline run` writes it.
    """

    topic: str
    is_delta: bool
    is_declared: bool

    def files(self, folder: Path) -> list[str]:
        if self.is_delta:
            return delta_files(folder / "tables" / self.topic)
        return iceberg_files(f"lake.{self.topic.replace('.', '_')}")


TABLES = tuple(
    Table(
        f"{'declared' if is_declared else 'followed'}.{'delta' if is_delta else 'iceberg'}",
        is_delta,
        is_declared,
    )
    for is_declared in (False, True)
    for is_delta in (True, False)
)


@dataclass
class Job:
    """A command that is killed and started again.

    Attributes:
        status: Where it serves its status.
    """

    words: list[str]
    env: dict[str, str]
    log: Path
    status: str
    _stack: ExitStack = field(default_factory=ExitStack)
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = self._stack.enter_context(running(self.words, self.env, self.log))

    def kill(self) -> None:
        self._stack.close()
        self._process = None

    def signal(self, number: int) -> None:
        """Send a signal. Raises RuntimeError if it has ended by itself."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(
                f"it has ended with {self._process.returncode}: {self.log.read_text()[-3000:]}"
            )
        self._process.send_signal(number)


def follower(table: Table, fleet: Fleet, folder: Path) -> Job:
    """Return the export that follows one topic."""
    status = free_address()
    place = (
        ["--delta"] if table.is_delta else ["--iceberg", f"{CATALOG}/lake.{table.topic.replace('.', '_')}"]
    )
    words = ["to-parquet", table.topic, str(folder / "tables" / table.topic), *place]
    words += ["--json", "--columns", COLUMNS, "--key", "user_id", "--op", "op", "--compact"]
    words += ["--channel", "lake", "--follow", "--every", "500ms", "--engine", "inline", "-q"]
    words += ["--http-address", status, "--nsqd-http-address", ",".join(fleet.addresses)]
    return Job(words, {}, folder / f"{table.topic}.log", status)


def supervisor(number: int, fleet: Fleet, store: Store, folder: Path) -> Job:
    """Return a supervisor of the declared tables."""
    status, config = free_address(), folder / "pipeline.toml"
    config.write_text(
        f'every = "500ms"\ntopic-refresh = "2s"\njson = true\ncolumns = {json.dumps(COLUMNS.split(","))}\n'
        f'key = "user_id"\nop = "op"\ncompact = true\nfolder = "{folder}/tables"\n'
    )
    words = [
        "pipeline",
        "run",
        "--config",
        str(config),
        "--lease",
        f"{store.place}/lease",
        "--engine",
        "inline",
    ]
    words += ["--http-address", status, "--nsqd-http-address", ",".join(fleet.addresses)]
    return Job(words, store.env, folder / f"supervisor{number}.log", status)


def declare(fleet: Fleet, folder: Path) -> None:
    """Create the topics, with the channels or the declarations of their exports."""
    for address in fleet.addresses:
        broker, _ = fleet.running[address]
        for table in TABLES:
            broker.create(table.topic, *(() if table.is_declared else ("lake",)))
            if table.is_declared:
                name = f"{CATALOG}/lake.{table.topic.replace('.', '_')}"
                place = f"delta:{folder}/tables/{table.topic}" if table.is_delta else f"iceberg:{name}"
                broker.put("/topic/settings", json.dumps({"table": place}).encode(), topic=table.topic)


def seeded(fleet: Fleet, place: Path, changes: Changes) -> tuple[Path, list[Change]]:
    """Export changes to Parquet files in a new folder, for `qcli replay`; return it, and the changes."""
    broker, _ = fleet.running[fleet.addresses[0]]
    found = changes.some(1000)
    broker.post("/mpub", b"\n".join(json.dumps(each).encode() for each in found), topic=place.name)
    words = ["to-parquet", place.name, str(place), "-q", "--engine", "inline"]
    subprocess.run(
        [sys.executable, "-m", "qcli", *words, "--nsqd-http-address", broker.http_address], check=True
    )
    return place, found


def disturb(
    options: argparse.Namespace, fleet: Fleet, jobs: list[Job], chance: random.Random
) -> Counter[str]:
    """Kill and suspend at random times; return how often. In the end all brokers run, and no job."""
    done: Counter[str] = Counter()
    supervisors = [each for each in jobs if each.words[0] == "pipeline"]
    returns: list[tuple[float, str | Job]] = []  # when a broker is started, or a suspended job continues
    resting: set[str] = set()
    until_s = time.monotonic() + options.minutes * 60
    for job in jobs:
        job.start()
    suspended: Job | None = None
    while (now_s := time.monotonic()) < until_s:
        for at in [each for each in returns if each[0] <= now_s]:
            returns.remove(at)
            if isinstance(at[1], str):
                fleet.start(at[1])
                resting.discard(at[1])
            else:
                at[1].signal(signal.SIGCONT)
                suspended = None
        what = chance.choice(["export", "export", "supervisor", "broker", "suspend"])
        if what == "export":
            job = chance.choice([each for each in jobs if each not in supervisors])
            job.signal(0)
            job.kill()
            job.start()
        elif what == "supervisor":
            job = chance.choice(supervisors)
            if job is suspended:
                continue
            job.signal(0)
            job.kill()
            job.start()
        elif what == "broker":
            address = chance.choice(fleet.addresses)
            if address in resting:
                continue
            fleet.kill(address)
            resting.add(address)
            returns.append((time.monotonic() + chance.choice((0.0, 1.0, 8.0)), address))
        elif suspended is None and chance.random() < 0.5:
            suspended = chance.choice(supervisors)
            suspended.signal(signal.SIGSTOP)
            returns.append((time.monotonic() + SUSPENDED_S, suspended))
        else:
            continue
        done[what] += 1
        time.sleep(chance.choice((0.3, 1, 1, 4)) * chance.uniform(0.5, 1.5))
    for job in jobs:
        job.kill()
    for address in resting:
        fleet.start(address)
    return done


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the trial, and return the counts."""
    chance, fleet = random.Random(options.seed), Fleet(folder, 2)
    ledgers = {table.topic: Ledger() for table in TABLES}
    use_catalog(folder)
    with ExitStack() as stack:
        store = stack.enter_context(versitygw(folder / "s3"))
        stack.callback(fleet.close)
        for address in fleet.addresses:
            fleet.start(address)
        declare(fleet, folder)
        producers: list[Producer] = []
        brokers = [Addresses(*each) for each in zip(fleet.addresses, fleet.tcp_addresses, strict=True)]
        for at, (topic, ledger) in enumerate(ledgers.items()):
            first = 4 * at * options.keys
            ranges = [
                Changes(first + part * options.keys, options.keys, random.Random(chance.random()))
                for part in range(4)
            ]
            producers += [
                Batches(brokers, topic, ledger, random.Random(chance.random()), changes, options.rate / 8)
                for changes in ranges[:2]
            ]
            seed = seeded(fleet, folder / f"seed{at}", ranges[2])
            log = folder / "repeaters.log"
            producers.append(
                Repeater(brokers, topic, ledger, random.Random(chance.random()), ranges[3], seed, log)
            )
        jobs = [follower(table, fleet, folder) for table in TABLES if not table.is_declared]
        jobs += [supervisor(number, fleet, store, folder) for number in range(2)]
        for job in jobs:
            stack.callback(job.kill)
        for each in producers:
            each.start()
        done = disturb(options, fleet, jobs, chance)
        for each in producers:
            each.stop()
        print(
            f"killed and suspended: {dict(done)}; {sum(each.retries for each in producers)} publishes repeated"
        )
        begun_s = time.monotonic()
        del jobs[-1]  # one supervisor
        for job in jobs:
            job.start()
        for job, topics in zip(jobs, ([each.topic] for each in TABLES[:2]), strict=False):
            wait_until_exported(job.status, topics, begun_s)
        wait_until_exported(jobs[-1].status, [each.topic for each in TABLES[2:]], begun_s)
        print(f"exported the rest in {time.monotonic() - begun_s:.0f} s")
    takeovers = sum(path.read_text().count("has the lease now") for path in folder.glob("supervisor*.log"))
    print(f"the lease went to the other supervisor {takeovers} times")
    return {
        "minutes": options.minutes,
        "disturbed": dict(done),
        "takeovers": takeovers,
        "tables": judge(folder, ledgers),
    }


Rows = list[tuple[int | None, int | None]]


def judge(folder: Path, ledgers: dict[str, Ledger]) -> list[dict[str, Any]]:
    """Compare the tables with the ledgers, print the counts, and return them."""
    import duckdb

    found = []
    print(
        f"{'':<18}{'changes':>9}{'deletes':>9}{'keys':>8}{'files':>7}{'':>8}{'rows':>8}{'missing':>9}"
        f"{'repeated':>10}{'deleted':>9}{'older':>7}"
    )
    with spark() as session:
        for table in TABLES:
            ledger, files = ledgers[table.topic], table.files(folder)
            of_duckdb: Rows = duckdb.execute(
                "SELECT user_id, n FROM read_parquet(?, union_by_name=true)", [files]
            ).fetchall()
            of_spark: Rows = [
                (row[0], row[1]) for row in session.read.parquet(*files).select("user_id", "n").collect()
            ]
            for reader, rows in (("DuckDB", of_duckdb), ("Spark", of_spark)):
                there = dict(rows)
                counts = {
                    "missing": len(ledger.newest.keys() - there.keys()),
                    "repeated": len(rows) - len(there),
                    "deleted": len(there.keys() - ledger.newest.keys()),
                    "older": sum(there.get(key, n) != n for key, n in ledger.newest.items()),
                }
                print(
                    f"{table.topic:<18}{ledger.changes:>9,}{ledger.deletes:>9,}{len(ledger.newest):>8,}"
                    f"{len(files):>7,}{reader:>8}{len(rows):>8,}{counts['missing']:>9,}{counts['repeated']:>10,}"
                    f"{counts['deleted']:>9,}{counts['older']:>7,}",
                    flush=True,
                )
                found.append(
                    {"topic": table.topic, "reader": reader, "changes": ledger.changes, "rows": len(rows)}
                    | {"deletes": ledger.deletes, "keys": len(ledger.newest)}
                    | {"wrong": counts}
                )
    return found


def parse() -> argparse.Namespace:
    """Return the options of this run."""
    parser = record.parser(__doc__)
    parser.add_argument(
        "--minutes", type=float, default=5, help="how long there are kills (default: %(default)s)"
    )
    parser.add_argument("--keys", type=int, default=300, help="of each producer (default: %(default)s)")
    parser.add_argument(
        "--rate", type=float, default=1000, help="changes/s in batches (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=7, help="seed of the kills; their timing still varies")
    return parser.parse_args()


def main() -> None:
    """Run the trial and print the counts."""
    options = parse()
    about = record.begin(options, beside_nsqd=False, runs_checkout=False)
    with tempfile.TemporaryDirectory(prefix="upserts-", dir=options.data_path) as name:
        folder = Path(name)
        (folder / "s3").mkdir()
        (folder / "tables").mkdir()
        found = run(options, folder)
        logs = {path.name: path.read_text() for path in sorted(folder.glob("*.log"))}
        is_wrong = any(count for each in found["tables"] for count in each["wrong"].values())
        if is_wrong or any("Traceback" in text for text in logs.values()):
            ends = [f"{name}:\n{text[-3000:]}" for name, text in logs.items()]
            sys.exit("WRONG, or a traceback. The ends of the logs:\n" + "\n".join(ends))
    print("Each table equals the ledger.")
    record.finish({"machine": about} | found, options, "fleet-upserts")


if __name__ == "__main__":
    main()
