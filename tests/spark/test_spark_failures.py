"""Tests for failures of Spark: one sentence says what failed, why, and what to do."""

import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle

from cli.support import Cli
from interop.peers import free_ports
from spark.support import numbers, run_in_process
from trio_nsq.spark.runtime.engine import Advance, Engine
from trio_nsq.spark.runtime.failures import SparkFailed, reason


@dataclass(frozen=True)
class Failing:
    """A task that fails in one of these ways."""

    way: str
    messages: int = 1

    def run(self, advance: Advance | None = None) -> None:
        if self.way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"{self.way}: see https://me:hunter2@store/x, secret=hunter3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "told"),
    [
        (
            "killed",
            "Spark failed: Python workers were killed, perhaps for lack of memory: give executors more mem",
        ),
        ("a bug", r"Spark failed: RuntimeError: a bug: see https://store/x, secret=\*\*\*"),
    ],
)
def test_failed_tasks_are_one_sentence(engine: Engine, way: str, told: str) -> None:
    """The rest is in the notes, without secrets."""
    by_value: Any = cloudpickle  # has no types
    by_value.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests
    try:
        with pytest.raises(SparkFailed, match=told) as caught:
            engine([Failing(way)], lambda _: None, lambda *_: None)
    finally:
        by_value.unregister_pickle_by_value(sys.modules[__name__])
    assert "\n" not in str(caught.value)
    (details,) = caught.value.__notes__
    assert details.count("\n") > 5
    assert "hunter" not in details


IN_STAGE = (
    "org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 in stage 0.0 failed 4 times, "
    "most recent failure: Lost task 1.3 in stage 0.0 (TID 6) (127.0.0.1 executor 6): "
)
IN_WORKER = (
    "org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] An exception was thrown from the Python "
    'worker: Traceback (most recent call last):\n  File "/a/worker.py", line 4327, in invoke_udf\n    run()\n'
)
AT = "\n SQLSTATE: 38000\n\tat org.apache.spark.api.python.BasePythonRunner(PythonRunner.scala:1097)\n\tat java.base/x"
VERSIONS = "Python in worker has different version: 3.12 than that in driver: 3.11, PySpark cannot run"
LOST = "ExecutorLostFailure (executor 6 exited caused by one of the running tasks) Reason: Command exited with code 137"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            f"{IN_WORKER}ModuleNotFoundError: No module named 'x.y'{AT}",
            "the workers has no module x.y: install it",
        ),
        (f"{IN_WORKER}ValueError: one\ntwo{AT}", "^ValueError: one$"),
        (
            f'{IN_STAGE}java.io.IOException: Cannot run program "/x/python": error=2{AT}',
            "Python, /x/python: set",
        ),
        (
            f"{IN_WORKER}pyspark.errors.PySparkRuntimeError: [X] {VERSIONS}{AT}",
            r"run Python 3\.12, .* Python 3\.11:",
        ),
        (
            f"{IN_STAGE}{LOST}\nDriver stacktrace:",
            r"executors were lost \(Command exited with code 137\), perhaps",
        ),
        (
            f"{IN_STAGE}java.lang.OutOfMemoryError: Java heap space{AT}",
            r"ran out of memory \(Java heap space\): give",
        ),
        (
            "java.lang.IllegalStateException: SparkContext has been shutdown",
            "^the cluster ended this program",
        ),
        (f"{IN_STAGE}java.io.IOException: No space left on device{AT}", "^No space left on device$"),
        ("", "^it gave no reason$"),
    ],
)
def test_reason_of_a_failure(text: str, told: str) -> None:
    """The texts are of Spark 4.3 on a standalone cluster."""
    found = reason(text)
    assert re.search(told, found), found
    assert "\n" not in found


def test_wrong_masters_are_refused_at_once(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(1))
    (port,) = free_ports(1)
    for url, told in (
        (
            "bogus://x",
            "The URL bogus://x is not that of a Spark master: give local[N], spark://HOST:PORT, yarn, or ",
        ),
        ("local[x]", r"The URL local[x] is not that of a Spark master: give local[N]"),
        ("sc://x", "The URL sc://x is not that of a Spark master; Spark Connect is not supported: give"),
        ("spark://x", "The URL spark://x is not that of a Spark master: x is not HOST:PORT"),
        (
            "spark://x:65536",
            "The URL spark://x:65536 is not that of a Spark master: x:65536 is not HOST:PORT",
        ),
        (
            f"spark://127.0.0.1:{port}",
            f"No Spark master answers at spark://127.0.0.1:{port} (127.0.0.1:{port}: connection refused): start it",
        ),
        *(
            (
                f"spark://{wrong}",
                f"No Spark master answers at spark://{wrong} ({wrong}: another server has this port)",
            )
            for wrong in (qcli.http_address, qcli.tcp_address)
        ),
    ):
        result = run_in_process(qcli, "to-parquet", topic, str(tmp_path / "a"), "--master", url)
        assert result.code == 1
        assert result.err.startswith(f"Error: {told}")
        assert result.err.count("\n") == 1


def test_missing_python_of_workers(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """With --verbose, Spark's own report comes before the sentence."""
    qcli.publish(topic, numbers(1))
    arguments = ["to-parquet", topic, str(tmp_path / "a"), "--engine", "spark"]
    result = qcli(*arguments, "--verbose", env={"PYSPARK_PYTHON": str(tmp_path / "python")})
    *details, last = result.err.splitlines()
    assert result.code == 1
    assert last == (
        f"Error: Spark failed: a worker cannot run its Python, {tmp_path}/python: set PYSPARK_PYTHON to a Python "
        "that every node has at this path."
    )
    assert "Driver stacktrace:" in details
