"""`kill -9` of a query that copies a topic, at random times: of its driver, its JVM, or both. Each message
must be copied once.

It takes three minutes, so it runs only with `FAULT_COMPLETE=1` (`make soak`). `FAULT_SEED` sets the times.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cli.support import Cli
from spark.support import bodies_in, jvm_of
from trio_nsq.client.errors import RequestRefused
from trio_nsq.client.reading.broker_log import BrokerLog

SEED = int(os.environ.get("FAULT_SEED", "1"))
KILLS = 6
MESSAGES = 300_000
PER_BATCH = 15_000
DEADLINE_S = 120.0
PROGRAM = """\
import sys
from trio_nsq.spark.runtime.spark_engine import open_spark

address, source, copy, checkpoint, per_batch, to_the_end = sys.argv[1:]
with open_spark("local[2,2]") as engine:
    read = engine.session().readStream.format("nsq")
    read = read.options(topic=source, maxOffsetsPerTrigger=per_batch, minPartitions=2, columns="body")
    write = read.option("nsqdHttpAddress", address).load().writeStream.format("nsq")
    write = write.options(topic=copy, nsqdHttpAddress=address, checkpointLocation=checkpoint)
    if to_the_end == "True":
        write = write.trigger(availableNow=True)
    write.start().awaitTermination()
"""


@contextmanager
def copying(
    address: str, source: str, copy: str, checkpoint: Path, *, to_the_end: bool
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the query as a process."""
    words = [address, source, copy, str(checkpoint), str(PER_BATCH), str(to_the_end)]
    with subprocess.Popen([sys.executable, "-c", PROGRAM, *words]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("FAULT_COMPLETE") != "1", reason="takes three minutes: FAULT_COMPLETE=1")
def test_killed_query_copies_each_message_once(qcli: Cli, topic: str, tmp_path: Path) -> None:
    chance, copy, address = random.Random(SEED), f"{topic}-copy", qcli.http_address
    bodies = [b"%09d" % number * 10 for number in range(MESSAGES)]
    qcli.publish(topic, bodies)

    def copied() -> int:
        try:
            return BrokerLog(address, copy).bounds().end
        except RequestRefused:
            return 0  # the topic does not exist yet

    for kill in range(KILLS):
        with copying(address, topic, copy, tmp_path / "checkpoint", to_the_end=False) as query:
            before, deadline = copied(), time.monotonic() + DEADLINE_S
            while copied() == before:
                assert time.monotonic() < deadline
                assert query.poll() is None
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 1))
            jvm = jvm_of(query.pid)
            for victim in ([query.pid], [jvm], [query.pid, jvm])[kill % 3]:
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        print(f"kill {kill}: {copied():,} messages")
    with copying(address, topic, copy, tmp_path / "checkpoint", to_the_end=True) as query:
        assert query.wait(DEADLINE_S) == 0
    assert sorted(bodies_in(address, copy)) == bodies
