"""What the tests of exports share: brokers with messages in them, and a look at what was written."""

import io
import time
from collections.abc import Callable, Container, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from cli.support import Cli, Result
from interop.peers import Broker
from qcli.app import run
from trio_nsq.broker.state.record_metadata import metadata_for_channel
from trio_nsq.log import DiskLog, RecordBatch
from trio_nsq.protocol import pack_messages
from trio_nsq.spark.broker_log import BrokerLog
from trio_nsq.spark.ranges import Span

HOUR_NS = 3600 * 10**9
NOON_NS = 1_795_262_400 * 10**9
"""2026-11-21T12:00:00Z"""
FIRST_ID = 7 << 54 | 1000

_DEADLINE_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process brings about."""
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def cli_of(broker: Broker) -> Cli:
    """`qcli` that finds this broker."""
    return Cli(broker.tcp_address, broker.http_address)


def fill(qcli: Cli, topic: str, bodies: Sequence[bytes]) -> None:
    """Publish these."""
    qcli.publish(topic, bodies)


def bodies_in(address: str, topic: str) -> list[bytes]:
    """All that was published, in order."""
    log = BrokerLog(address, topic)
    bounds = log.bounds()
    found = log.read(Span(bounds.first, bounds.end)) if bounds.end > bounds.first else ()
    return [body for each in found if isinstance(each, RecordBatch) for body in each.messages.bodies()]


def numbers(count: int, start: int = 0) -> list[bytes]:
    """Bodies that differ."""
    return [b"%d" % number for number in range(start, start + count)]


def export(qcli: Cli, topic: str, folder: Path, *args: str) -> dict[str, Any]:
    """Run `to-parquet` as it should go; returns what it says."""
    result = run_in_process(qcli, "to-parquet", topic, str(folder), "--format", "json", *args)
    assert result.code == 0, result.err
    (record,) = result.records
    return record


def run_in_process(qcli: Cli, *args: str) -> Result:
    """Run a command in this process, which takes a tenth of the time."""
    address = [] if "--nsqd-http-address" in args else ["--nsqd-http-address", qcli.http_address]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run([*args, *address])
    return Result(code, out.getvalue().encode(), err.getvalue())


def parquet_files(folder: Path) -> list[str]:
    """The names of all files with messages, below the folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.parquet"))


def leftovers(folder: Path) -> list[Path]:
    """What was begun and not completed."""
    return [path for path in folder.rglob("*") if ".tmp-" in path.name]


def rows(folder: Path, *columns: str) -> pa.Table:
    """What a plain reader sees, by broker and sequence."""
    table = ds.dataset(folder, format="parquet", partitioning="hive").to_table()
    found = table.sort_by([("broker", "ascending"), ("seq", "ascending")])
    return found.select(list(columns)) if columns else found


def column(folder: Path, name: str) -> list[Any]:
    """One column of it."""
    found: list[Any] = rows(folder, name)[name].to_pylist()
    return found


def write_log(
    data_path: Path,
    topic: str,
    records: Sequence[tuple[int, Sequence[bytes]]],
    for_channel: Container[int] = (),
) -> None:
    """Put a topic into the data folder of a broker that does not run.

    Args:
        data_path: The data folder.
        topic: Its name; there is none yet.
        records: Times in Unix nanoseconds, and what was published then.
        for_channel: Which of the records had come back for one channel.
    """
    folder = data_path / "topics" / f"{topic}.topic"
    folder.mkdir(parents=True)
    log = DiskLog(folder, segment_bytes=64 * 1024 * 1024, now_ns=lambda: NOON_NS)
    sequence = 0
    for index, (timestamp_ns, bodies) in enumerate(records):
        due_ns, metadata = (timestamp_ns, metadata_for_channel("c")) if index in for_channel else (0, b"")
        messages = pack_messages(bodies)
        batch = RecordBatch(sequence, FIRST_ID + sequence, timestamp_ns, due_ns, messages, metadata)
        log.append([batch], sync=False)
        sequence += len(bodies)
    log.close()
