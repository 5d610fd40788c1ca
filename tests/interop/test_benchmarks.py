"""Check that the programs of bench/ start, and that goload produces the load that it reports."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from interop.peers import Broker, goload_program, qcli_serve

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize(
    "name",
    [
        *("compare", "growth", "neighbours", "generators", "agreement"),
        *("backlog", "timers", "kills", "clients", "connectors", "web_console"),
    ],
)
def test_program_prints_help(name: str) -> None:
    command = [sys.executable, str(BENCH / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--keep" in done.stdout


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


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data", "--sync=interval") as broker:
        yield broker


def goload(command: str, *flags: str) -> dict[str, float]:
    words = [str(goload_program()), command, *flags, "--timeout=60s"]
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


@pytest.mark.interop
def test_goload_latency_publishes_at_a_steady_rate(broker: Broker) -> None:
    flags = [f"--addr={broker.tcp_address}", "--topic=latency", "--rate=1000", "--runfor=600ms"]
    told = goload("latency", *flags)
    assert told["messages"] == stored(broker, "latency")[0] == 600
    assert told["seconds"] >= 0.5
    assert 0 < told["p50_ms"] <= told["p99_ms"] <= told["max_ms"]


@pytest.mark.interop
def test_goload_prints_error_of_broker(broker: Broker) -> None:
    words = [str(goload_program()), "pub", f"--addr={broker.tcp_address}", "--topic=no/topic"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "E_BAD_TOPIC" in done.stderr
