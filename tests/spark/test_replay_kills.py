"""`kill -9` in the middle of replays, at random times.

At the end the broker must have every message exactly once, and before that none twice. The check reads the
topic's log. By default there are a few kills; with `FAULT_COMPLETE=1` (`make soak`) many, of the command, of
Spark's JVM, of its workers, and of the broker. `FAULT_SEED` sets the times.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.support import Cli
from interop.peers import qcli_serve
from spark.support import (
    bodies_in,
    command_of,
    count_in,
    jobs_of,
    jvm_of,
    planned,
    replay,
    replayed,
    workers_of,
    write_parquet,
)
from trio_nsq.spark.replay.request import ReplayRequest
from trio_nsq.spark.runtime.spark_engine import SparkEngine

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
SEED = int(os.environ.get("FAULT_SEED", "1"))
MESSAGES = 24_000
BODY_BYTES = 1000
FILES = 6
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files with all messages, in six pieces."""
    folder = tmp_path_factory.mktemp("events")
    per_file = MESSAGES // FILES
    for index in range(FILES):
        numbers = range(index * per_file, (index + 1) * per_file)
        bodies = [b"%09d" % n + b"x" * (BODY_BYTES - 9) for n in numbers]
        write_parquet(folder / f"{index}.parquet", {"body": bodies}, row_group_size=per_file // 2)
    return folder


def check(qcli: Cli, topic: str, *, complete: bool) -> int:
    """Check that no message is there twice, and at the end that all are there. Returns their number."""
    found = [int(body[:9]) for body in bodies_in(qcli.http_address, topic)]
    assert len(set(found)) == len(found)
    if complete:
        assert sorted(found) == list(range(MESSAGES))
    return len(found)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def with_jobs(qcli: Cli, folder: Path) -> Cli:
    return Cli(qcli.tcp_address, qcli.http_address, jobs_of(folder))


@pytest.mark.parametrize("kills", [15 if COMPLETE else 2])
def test_killed_command(qcli: Cli, topic: str, events: Path, tmp_path: Path, kills: int) -> None:
    chance = random.Random(SEED)
    begin = ["replay", str(events), topic, "--job", "j", "--rate", "5000" if COMPLETE else "40000"]
    before = 0
    for kill in range(kills):
        words = begin if kill == 0 else ["replay", "--job", "j"]
        with with_jobs(qcli, tmp_path).running(*words) as running:
            goal = min(before + chance.randrange(1, max(2, MESSAGES // (kills + 1))), MESSAGES - 2000)
            wait_for(lambda: count_in(qcli.http_address, topic) > goal, "too little is published")  # noqa: B023
            time.sleep(chance.uniform(0, 0.02))
            running.process.kill()
            running.process.wait()
        before = check(qcli, topic, complete=False)
        assert before < MESSAGES
    said = replayed(qcli, tmp_path, "--job", "j")
    assert said["published"] + said["before"] == MESSAGES
    assert check(qcli, topic, complete=True) == MESSAGES


@pytest.mark.slow
def test_killed_workers(engine: SparkEngine, qcli: Cli, topic: str, events: Path, tmp_path: Path) -> None:
    """Repeated tasks send the same batches again, which the broker does not store again."""
    # Slow enough to be in progress still when the workers are found.
    request = ReplayRequest(str(events), topic, qcli.http_address, rate=8_000.0)
    job = planned(request, tmp_path / "jobs")
    tasks = job.tasks(engine.slots, save_results=False)
    assert len(tasks) >= engine.slots
    failures: list[BaseException] = []

    def work() -> None:
        try:
            job.run(engine, tasks, lambda *_: None)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    wait_for(lambda: count_in(qcli.http_address, topic) > MESSAGES // 4, "nothing is published")
    killed = workers_of(os.getpid())
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    thread.join()
    assert killed
    assert failures == []
    assert job.result.before > 0
    assert job.result.published + job.result.before == MESSAGES
    assert check(qcli, topic, complete=True) == MESSAGES


VICTIMS = ["worker", "jvm", "command", "interrupt", "jvm", "worker", "command", "jvm", "interrupt"]


@pytest.mark.slow
@pytest.mark.skipif(not COMPLETE, reason="a minute: FAULT_COMPLETE=1")
def test_killed_processes_of_spark(qcli: Cli, topic: str, events: Path, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    ours = with_jobs(qcli, tmp_path)
    begin = ["replay", str(events), topic, "--job", "j", "--rate", "4000", "--engine", "spark", "-q"]
    for index, victim in enumerate(VICTIMS):
        words = begin if index == 0 else ["replay", "--job", "j", "--engine", "spark", "-q"]
        with ours.running(*words) as running:
            pid = running.process.pid
            goal = count_in(qcli.http_address, topic) + chance.randrange(200, MESSAGES // 12)
            wait_for(lambda: count_in(qcli.http_address, topic) > goal, str(words))  # noqa: B023
            jvm = jvm_of(pid)
            for each in {"worker": workers_of(pid), "jvm": [jvm]}.get(victim, [pid]):
                try:
                    os.kill(each, signal.SIGINT if victim == "interrupt" else signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it has just exited
            if victim == "worker":  # the tasks are repeated; then the command is killed
                goal = min(count_in(qcli.http_address, topic) + 500, MESSAGES - 1000)
                wait_for(lambda: count_in(qcli.http_address, topic) > goal, str(words))  # noqa: B023
                os.kill(pid, signal.SIGKILL)
            result = running.end()
            wait_for(lambda: "SparkSubmit" not in command_of(jvm), "a JVM goes on")  # noqa: B023
        if victim == "interrupt":
            assert result.code == 130
        elif victim == "jvm":
            assert (result.code, "Error: Spark failed: " in result.err) == (4, True), result.err
            assert "Traceback" not in result.err
            assert "Resume with: qcli replay --job j" in result.err
        assert check(qcli, topic, complete=False) < MESSAGES
    assert replay(qcli, tmp_path, "--job", "j", "-q").code == 0
    assert check(qcli, topic, complete=True) == MESSAGES


@pytest.mark.skipif(not COMPLETE, reason="half a minute: FAULT_COMPLETE=1")
def test_killed_broker(events: Path, tmp_path: Path) -> None:
    """The broker restarts at the same address, and the command waits for it. A batch whose OK was lost is not
    stored again.
    """
    chance = random.Random(SEED)
    data = tmp_path / "data"
    with qcli_serve(data) as first:
        http, tcp = first.http_address, first.tcp_address
        qcli = with_jobs(Cli(tcp, http), tmp_path)
        words = ["replay", str(events), "again", "--job", "j", "--rate", "4000", "--format", "json"]
        first.create("again")
        with qcli.running(*words) as running:
            wait_for(lambda: count_in(qcli.http_address, "again") > 500, "nothing is published")
            first.process.kill()
            first.process.wait()
            for _ in range(8):
                flags = [f"--tcp-address={tcp}", f"--http-address={http}"]
                with qcli_serve(data, *flags) as broker:
                    goal = count_in(qcli.http_address, "again") + chance.randrange(200, 2000)
                    wait_for(lambda: count_in(qcli.http_address, "again") > goal, "nothing more is published")  # noqa: B023
                    check(qcli, "again", complete=False)
                    broker.process.kill()
                    broker.process.wait()
            with qcli_serve(data, *flags):
                result = running.end()
                assert result.code == 0, result.err
                assert check(qcli, "again", complete=True) == MESSAGES
