"""`kill -9` in the middle of exports, at random times.

At the end a reader must see each sequence exactly once, and before that none twice. By default there are a
few kills; with `FAULT_COMPLETE=1` (`make soak`) many, of the command, of Spark's JVM and of its workers.
`FAULT_SEED` sets the times.
"""

import os
import random
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.support import Cli
from interop.peers import Broker
from spark.support import column, command_of, export, jvm_of, leftovers, parquet_files, workers_of

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
SEED = int(os.environ.get("FAULT_SEED", "1"))
MESSAGES = 24_000
BODY_BYTES = 500
DEADLINE_S = 120.0
ARGUMENTS = ["--target-file-size", "400KiB", "--partition-by", "hour", "--compression", "none"]
"""About 30 ranges."""


@pytest.fixture(scope="module")
def filled(broker: Broker) -> str:
    """Create a topic with messages."""
    qcli = Cli(broker.tcp_address, broker.http_address)
    qcli.publish("filled", [b"%09d" % number + b"x" * (BODY_BYTES - 9) for number in range(MESSAGES)])
    return "filled"


def check_meanwhile(folder: Path) -> int:
    """Check that every completed file can be read, and no sequence is in two. Returns the number of
    sequences.
    """
    found: list[int] = []
    for name in parquet_files(folder):
        found += pq.read_table(folder / name, columns=["seq"], partitioning=None)["seq"].to_pylist()
    assert len(set(found)) == len(found)
    return len(found)


def check_end(qcli: Cli, topic: str, folder: Path) -> None:
    """Check that all published messages are in files once."""
    export(qcli, topic, folder, *ARGUMENTS)
    assert column(folder, "seq") == list(range(MESSAGES))
    assert [int(body[:9]) for body in column(folder, "body")] == list(range(MESSAGES))
    assert leftovers(folder) == []
    assert export(qcli, topic, folder, *ARGUMENTS)["messages"] == 0


def wait_for_files(folder: Path, count: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while len(parquet_files(folder)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def count_double(folder: Path) -> int:
    """Return how many files have doubles in the column `price`."""
    types = [pq.read_schema(folder / name).field("price").type for name in parquet_files(folder)]
    return types.count(pa.float64())


@pytest.mark.parametrize("kills", [12 if COMPLETE else 2])
def test_killed_conversion(qcli: Cli, topic: str, tmp_path: Path, kills: int) -> None:
    """Files are converted to doubles one after the other, and each once."""
    chance = random.Random(SEED)
    arguments = ["--json", "--target-file-size", "64KiB", "--partition-by", "hour"]
    prices: list[float] = list(range(24_000))
    for start in range(0, len(prices), 500):
        qcli.publish(
            topic,
            [b'{"price": %d, "text": "%0100d"}' % (price, price) for price in prices[start : start + 500]],
        )
    export(qcli, topic, tmp_path, *arguments)
    files = len(parquet_files(tmp_path))
    qcli.publish(topic, [b'{"price": 0.5}'])
    for number in range(kills):
        with qcli.running("to-parquet", topic, str(tmp_path), "--engine", "inline", *arguments) as running:
            deadline = time.monotonic() + DEADLINE_S
            while count_double(tmp_path) < (number + 1) * files // (kills + 3):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 0.01))
            running.process.kill()
            running.process.wait()
        assert count_double(tmp_path) < files
    export(qcli, topic, tmp_path, *arguments)
    assert count_double(tmp_path) == files + 1
    assert column(tmp_path, "price") == [*prices, 0.5]
    assert (leftovers(tmp_path), column(tmp_path, "unparsed")) == ([], [None] * (len(prices) + 1))


@pytest.mark.parametrize("kills", [12 if COMPLETE else 2])
def test_killed_command(qcli: Cli, filled: str, tmp_path: Path, kills: int) -> None:
    chance = random.Random(SEED)
    folder = tmp_path / "a"
    before = 0
    for _ in range(kills):
        with qcli.running("to-parquet", filled, str(folder), "--engine", "inline", *ARGUMENTS) as running:
            wait_for_files(folder, min(before + chance.randrange(1, 4), 29))
            time.sleep(chance.uniform(0, 0.05))
            running.process.kill()
            running.process.wait()
        before = len(parquet_files(folder))
        check_meanwhile(folder)
    check_end(qcli, filled, folder)


# ---------------------------------------------------------------------- Spark


VICTIMS = [
    "worker",
    "jvm",
    "interrupt",
    "worker",
    "command",
    "jvm",
    "command",
    "worker",
    "jvm",
    "command",
    "worker",
]


@pytest.mark.slow
def test_killed_processes_of_spark(qcli: Cli, filled: str, tmp_path: Path) -> None:
    """Kill a worker, whose task is then repeated, and in the same run the JVM; the long form kills many more."""
    chance = random.Random(SEED)
    folder = tmp_path / "a"
    runs = [("worker", "jvm")] if not COMPLETE else [(victim,) for victim in VICTIMS]
    left = [*ARGUMENTS, "--engine", "spark", "-q"]
    for victims in runs:
        if len(parquet_files(folder)) > 20:
            check_end(qcli, filled, folder)
            folder = tmp_path / f"a{len(list(tmp_path.iterdir()))}"
        with qcli.running("to-parquet", filled, str(folder), *left) as running:
            pid = running.process.pid
            before = len(parquet_files(folder))
            for index, victim in enumerate(victims):
                wait_for_files(folder, before + 2 * index + chance.randrange(1, 3))
                time.sleep(chance.uniform(0, 0.02))
                jvm = jvm_of(pid)
                pids = {"worker": workers_of(pid), "jvm": [jvm]}.get(victim, [pid])
                for each in pids:
                    try:
                        os.kill(each, signal.SIGINT if victim == "interrupt" else signal.SIGKILL)
                    except ProcessLookupError:
                        pass  # it has just exited
            result = running.end()
            deadline = time.monotonic() + DEADLINE_S
            while "SparkSubmit" in command_of(jvm):  # it exits with its command, however that ends
                assert time.monotonic() < deadline
                time.sleep(0.02)
        if victims == ("worker",):
            assert result.code == 0, result.err
        elif victims == ("interrupt",):
            assert result.code == 130
            assert leftovers(folder) == []
        elif victims[-1] == "jvm":
            assert result.code in (1, 4), result.err
            assert "Error: Spark failed: " in result.err
            assert "Traceback" not in result.err
        check_meanwhile(folder)
    check_end(qcli, filled, folder)
