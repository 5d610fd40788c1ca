"""Check that the programs of bench/ start, and that goload produces the load that it reports."""

import itertools
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from interop.peers import Broker, load_program, qcli_serve
from soak import in_soak

BENCH = Path(__file__).parents[2] / "bench"


PROGRAMS = sorted(path.stem for path in BENCH.glob("*.py") if "parse_args()" in path.read_text())


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_prints_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: most of a new one's time is the same imports, 28 times."""
    program = str(BENCH / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    monkeypatch.setattr(sys, "path", sys.path[:])  # the program adds folders to it
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(program, run_name="__main__")
    said = capsys.readouterr()
    assert (ended.value.code, said.err) == (0, "")
    assert "--keep" in said.out


STARTS_A_BROKER = """
import sys
from pathlib import Path
from bench import record
from bench.contenders import INTERVAL
options = record.parser(None).parse_args([f"--data-path={sys.argv[1]}"])
record.begin(options, beside_nsqd=False, runs_checkout=False)
with INTERVAL.running(options.data_path) as broker:
    command = Path(f"/proc/{broker.process.pid}/cmdline").read_text()
print("command:", *command.split(chr(0)))
"""


def test_programs_measure_brokers_that_start_as_those_of_users(tmp_path: Path) -> None:
    """A copy of a Python that has imported everything starts in a fraction of the time, and has more memory."""
    folders = os.pathsep.join([str(BENCH.parent), str(BENCH.parent / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", STARTS_A_BROKER, str(tmp_path)],
        env={name: value for name, value in os.environ.items() if name != "TEST_PROCESSES"}
        | {"PYTHONPATH": folders},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert " -m qcli serve " in done.stdout


@pytest.mark.soak
@pytest.mark.interop
def test_connectors_measures_every_contender(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    flags = ["--only=file", "--rounds=1", "--messages=1000", f"--data-path={tmp_path}", f"--json={kept}"]
    command = [sys.executable, str(BENCH / "connectors.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    results = json.loads(kept.read_text())["results"]
    assert [result["contender"] for result in results] == [
        *("nsq_to_file, nsqd", "nsq_to_file, our broker", "to-file, nsqd", "to-file, our broker"),
    ]
    assert all(result["rate"] > 0 and result["cpu_us"] > 0 for result in results)


def test_neighbours_reports_latency_alone_and_under_attack(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    flags = ["--only=connections", "--rounds=1", "--seconds=0.2", f"--data-path={tmp_path}", f"--json={kept}"]
    command = [sys.executable, str(BENCH / "neighbours.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(kept.read_text())["results"][0]
    assert (result["scenario"], result["broker"]) == ("connections", "ours, --sync=interval")
    for phase in ("alone", "attacked"):
        figures = result[phase]
        assert figures["requests"] > 0
        assert 0 < figures["p50"] <= figures["p99"] <= figures["max"]


@pytest.mark.soak
@pytest.mark.interop
def test_cluster_measures_leader_and_follower(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    flags = ["--only=pub-16,oks", "--rounds=1", "--seconds=0.5", f"--data-path={tmp_path}", f"--json={kept}"]
    command = [sys.executable, str(BENCH / "cluster.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "round 1 of 1 is over\n")
    results = json.loads(kept.read_text())["results"]
    assert sorted((each["workload"], each["contender"]) for each in results) == [
        *(("oks", "one node"), ("oks", "two members"), ("pub-16", "one node"), ("pub-16", "two members")),
    ]
    for each in results:
        assert each["figures"]["rate"] > 0
        assert ("follower_us" in each["figures"]) == (each["contender"] == "two members")
    assert "| pub-16 |" in done.stdout


@pytest.mark.interop
@pytest.mark.skipif(
    "BENCH_PEERS" not in os.environ, reason="BENCH_PEERS=1 builds nats-server, which takes minutes"
)
def test_peers_measures_all_servers(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    command = [sys.executable, str(BENCH / "peers.py"), "--quick"]
    command += [f"--data-path={tmp_path}", f"--json={kept}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    results = json.loads(kept.read_text())["results"]
    found = {(each["promise"], each["load"], each["contender"]) for each in results}
    promises = ("synced", "unsynced")
    loads = ("pub-1", "pub-2", "pub-16", "pub-200", "batch", "consume", "through")
    servers = ("trio-nsq", "NATS JetStream", "Redis", "RabbitMQ")
    here = [name for name in servers if f"{name} is skipped" not in done.stdout]
    assert found == set(itertools.product(promises, loads, here))
    assert len(results) == len(found)
    for each in results:
        figures = each["figures"]
        assert figures["rate"] > 0
        assert figures["server_us"] > 0
        assert ("delivered" in figures) == (each["load"] == "through")
        assert ("disk_bytes" in figures) == (each["load"] == "consume")
        if each["load"] == "consume":
            assert figures["memory_mib"] > 1
        else:
            assert 0 < figures["p50_ms"] <= figures["p99_ms"]


@pytest.mark.soak
@pytest.mark.interop
def test_archive_measures_publishing_and_a_restore(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    flags = [
        *("--only=pub-16,restore", "--rounds=1", "--seconds=0.3", "--restore-mb=20"),
        *(f"--data-path={tmp_path}", f"--json={kept}"),
    ]
    command = [sys.executable, str(BENCH / "archive.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "round 1 of 1 is over\n")
    results = json.loads(kept.read_text())["results"]
    assert sorted((each["load"], each["contender"]) for each in results) == [
        *(("pub-16", "--archive"), ("pub-16", "without an archive"), ("restore", "--archive")),
    ]
    restored = results[-1]["figures"] if results[-1]["load"] == "restore" else results[0]["figures"]
    assert restored["size"] > 16
    assert restored["ratio"] > 0


def stages(tmp_path: Path, *flags: str) -> tuple[list[str], dict[str, dict[str, list[float]]]]:
    """Run `stages.py` briefly; return the lines that it printed, and the nanoseconds per message."""
    kept = tmp_path / "kept.json"
    command = [sys.executable, str(BENCH / "stages.py"), f"--data-path={tmp_path}", f"--json={kept}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, dict[str, list[float]]] = json.loads(kept.read_text())["ns_per_message"]
    return done.stdout.splitlines(), found


SOME_STAGES = {"parse PUB or MPUB x 1", "append + sync x 20", "finish shuffled x 200"}


@pytest.mark.parametrize("only", [",".join(sorted(SOME_STAGES)), *in_soak("")], ids=["some", "all"])
def test_stages_measures_each_stage(tmp_path: Path, only: str) -> None:
    lines, found = stages(tmp_path, "--repeats=2", f"--only={only}")
    printed = {" ".join(line.split()[:-3]) for line in lines}
    assert found["ours"].keys() < printed
    assert found["ours"].keys() >= SOME_STAGES
    assert all(len(each) == 2 and min(each) > 0 for each in found["ours"].values())
    assert any(" modules compiled, Python 3." in line or ": pure, Python 3." in line for line in lines)


def test_stages_compares_with_another_checkout(tmp_path: Path) -> None:
    """The other checkout is this one, with a clock that runs ten times as fast: no noise is as large."""
    (tmp_path / "sitecustomize.py").write_text(
        "import time\nreal_ns = time.thread_time_ns\ntime.thread_time_ns = lambda: 10 * real_ns()\n"
    )
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    lines, found = stages(
        tmp_path, f"--against={tmp_path}", "--only=finish shuffled x 200", "--repeats=9", "--processes=1"
    )
    assert len(found["ours"]["finish shuffled x 200"]) == len(found["theirs"]["finish shuffled x 200"]) == 3
    assert sum(line.endswith("faster") for line in lines) == 1


def test_stages_refuses_unknown_stage_and_folder(tmp_path: Path) -> None:
    for flag, said in (
        ("--only=nothing", "there is no stage nothing"),
        (f"--against={tmp_path}", "run 'make setup'"),
    ):
        command = [sys.executable, str(BENCH / "stages.py"), f"--data-path={tmp_path}", flag]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        assert said in done.stderr


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data", "--sync=interval") as broker:
        yield broker


def goload(command: str, *flags: str) -> dict[str, float]:
    return told_by(load_program("goload"), command, *flags)


def told_by(program: Path, *flags: str) -> dict[str, float]:
    words = [str(program), *flags, "--timeout=60s"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stderr) == (0, "")
    told: dict[str, float] = json.loads(done.stdout)
    return told


def stored(broker: Broker, topic: str) -> tuple[int, int]:
    """Return the message count of a topic, and the bytes of its messages."""
    stats = json.loads(broker.http("GET", "/stats", format="json", topic=topic))
    found: dict[str, Any] = stats["topics"][0]
    return found["message_count"], found["message_bytes"]


@pytest.mark.interop
@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("command", ["pub", "http"])
def test_goload_publishes_every_message_it_counts(broker: Broker, command: str, batch: int) -> None:
    topic = f"{command}-{batch}"
    address = broker.tcp_address if command == "pub" else broker.http_address
    told = goload(
        command,
        f"--addr={address}",
        f"--topic={topic}",
        "--connections=3",
        "--size=50",
        f"--batch={batch}",
        "--runfor=100ms",
    )
    assert told["messages"] >= 3 * batch
    assert stored(broker, topic) == (told["messages"], told["messages"] * 50)
    assert told["seconds"] >= 0.1


@pytest.mark.interop
@pytest.mark.parametrize(("topics", "connections"), [(1, 3), (4, 3)])
def test_goload_through_stores_all_messages_in_every_topic(
    broker: Broker, topics: int, connections: int
) -> None:
    name = f"through-{topics}"
    told = goload(
        "through",
        f"--addr={broker.tcp_address}",
        f"--topic={name}",
        f"--topics={topics}",
        "--channels=2",
        f"--connections={connections}",
        "--batch=5",
        "--mixed",
        "--count=400",
    )
    assert told["messages"] == 400
    assert told["seconds"] >= told["publish_seconds"] > 0
    each = 400 // topics
    for topic in [f"{name}-{n}" for n in range(topics)] if topics > 1 else [name]:
        assert stored(broker, topic) == (each, each * 200)


MIXED = ("--topics=4", "--channels=2", "--connections=3", "--count=2000")


@pytest.mark.interop
def test_goload_mixed_finishes_every_message_of_every_channel(broker: Broker) -> None:
    told = goload("mixed", f"--addr={broker.tcp_address}", "--topic=mixed", *MIXED)
    assert told["messages"] == 2000
    assert 20 <= told["deferred"] <= 60
    assert 150 <= told["requeued"] <= 250
    assert told["deliveries"] == 2 * 2000 + told["requeued"]
    assert told["seconds"] >= told["publish_seconds"] > 0
    topics = [f"mixed-{n}" for n in range(4)]
    assert sum(stored(broker, topic)[1] for topic in topics) == told["body_bytes"]
    for topic in topics:
        assert stored(broker, topic)[0] == 500
        for channel in ("ch-0", "ch-1"):
            assert broker.is_drained(topic, channel)
    requeues = [broker.channel_stats(t, c)["requeue_count"] for t in topics for c in ("ch-0", "ch-1")]
    assert sum(requeues) == told["requeued"]


@pytest.mark.interop
def test_goload_mixed_fails_if_a_message_is_not_finished(broker: Broker) -> None:
    for timeout_s in (2, 60):  # a busy machine takes longer for the messages that are finished
        topic = f"lost-{timeout_s}"
        broker.create(f"{topic}-2", "ch-1")
        broker.http("POST", "/channel/pause", topic=f"{topic}-2", channel="ch-1")
        words = [str(load_program("goload")), "mixed", f"--addr={broker.tcp_address}", f"--topic={topic}"]
        words += [*MIXED, f"--timeout={timeout_s}s"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert f"{topic}-2/ch-1 has not finished 500 messages, the first is number 0" in done.stderr
        if done.stderr.count("has not finished") == 1:
            break
    assert done.stderr.count("has not finished") == 1


@pytest.mark.interop
def test_goload_latency_publishes_at_a_steady_rate(broker: Broker) -> None:
    flags = [f"--addr={broker.tcp_address}", "--topic=latency", "--rate=1000", "--runfor=600ms"]
    told = goload("latency", *flags)
    assert told["messages"] == stored(broker, "latency")[0] == 600
    assert told["seconds"] >= 0.5
    assert 0 < told["p50_ms"] <= told["p99_ms"] <= told["max_ms"]


@pytest.mark.interop
def test_goload_oks_publishes_at_a_steady_rate(broker: Broker) -> None:
    flags = [f"--addr={broker.tcp_address}", "--topic=oks", "--rate=1000", "--runfor=600ms"]
    told = goload("oks", *flags, "--connections=10")
    assert stored(broker, "oks")[0] == 600
    assert 290 <= told["messages"] <= 300, "those of the first 300 ms are not measured"
    assert told["seconds"] >= 0.2
    assert 0 < told["p50_ms"] <= told["p99_ms"] <= told["max_ms"]


@pytest.mark.interop
def test_gonsqload_counts_what_it_publishes_and_consumes(broker: Broker) -> None:
    program = load_program("gonsqload")
    flags = [f"--addr={broker.tcp_address}", "--topic=go", "--size=50", "--runfor=100ms"]
    broker.create("go", "ch")
    published = 0.0
    for command in (["publish"], ["publish", "--batch=7", "--goroutines=2"], ["async", "--under-way=10"]):
        told = told_by(program, *command, *flags)
        assert told["seconds"] >= 0.1
        assert told["messages"] >= 2
        published += told["messages"]
        assert stored(broker, "go") == (published, published * 50)
    told = told_by(program, "consume", f"--addr={broker.tcp_address}", "--topic=go", "--runfor=10ms")
    assert 0 < told["messages"] <= published


@pytest.mark.interop
def test_goload_prints_error_of_broker(broker: Broker) -> None:
    words = [str(load_program("goload")), "pub", f"--addr={broker.tcp_address}", "--topic=no/topic"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "E_BAD_TOPIC" in done.stderr


@pytest.mark.soak
@pytest.mark.interop
def test_quick_compares_versions_that_it_builds(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    flags = ["--only=publish-batch-2", "--rounds=8", "--seconds=0.02", "--pure", f"--base={BENCH.parent}"]
    command = [sys.executable, str(BENCH / "quick.py"), *flags, f"--data-path={tmp_path}", f"--json={kept}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    found = json.loads(kept.read_text())
    assert "Both have the same sources" in done.stdout
    assert "not compiled" in found["versions"]["new"]["says"]
    assert [line["case"] for line in found["comparisons"]] == ["I: publish-batch-2", "F: publish-batch-2"]
    for line in found["comparisons"]:
        assert line["low"] <= line["ratio"] <= line["high"]
    slower = [line["case"] for line in found["comparisons"] if line["verdict"] == "slower"]
    assert done.returncode == bool(slower), done.stderr
    assert all(case in done.stderr for case in slower)


def test_quick_refuses_unknown_revision() -> None:
    command = [sys.executable, str(BENCH / "quick.py"), "--pure", "--new=no-such-revision"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 2
    assert "no-such-revision" in done.stderr
    assert "Traceback" not in done.stderr
