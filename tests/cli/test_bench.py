"""Tests for `qcli bench`: its counts are those of the broker, and it leaves no topic behind."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from access.support import AuthFile, Given
from cli.support import DEADLINE_S, Cli, Result, Run, Running
from interop.peers import Broker, nsqd, qcli_lookupd, qcli_serve

RECORD = {
    *("benchmark", "brokers", "topic", "channel", "settings", "interrupted", "messages", "bytes", "seconds"),
    *("messages_per_second", "bytes_per_second", "messages_by_second", "connections", "connection_rates"),
    *("missing", "finished_afterwards", "client_cpu_seconds", "times"),
}


_NSQD = pytest.param("nsqd", marks=pytest.mark.interop)
also_nsqd = pytest.mark.parametrize("target", ["ours", _NSQD], indirect=True)


@pytest.fixture(
    scope="module", params=["ours", pytest.param("nsqd", marks=[pytest.mark.interop, pytest.mark.soak])]
)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker to measure, ours and nsqd."""
    run = nsqd if request.param == "nsqd" else qcli_serve
    with run(tmp_path_factory.mktemp("target") / "data") as running:
        yield running


@pytest.fixture
def bench(target: Broker, run_here: Run) -> Run:
    """Runs `qcli bench` against the broker."""
    return lambda *args: run_here(Cli(target.tcp_address, target.http_address), "bench", *args)


@pytest.fixture
def bench_topic(topic: str) -> str:
    """A new name that a measurement may use without a question."""
    return f"bench-{topic}"


def record(result: Result) -> dict[str, Any]:
    """Return the JSON report of a run that succeeded."""
    assert result.code == 0, result.err
    (found,) = result.records
    assert set(found) == RECORD
    return found


def stats(broker: Broker, topic: str) -> dict[str, Any]:
    """Return the topic's entry in the statistics."""
    (found,) = json.loads(broker.http("GET", "/stats", format="json", topic=topic))["topics"]
    return dict(found)


def topics(broker: Broker) -> set[str]:
    return {each["topic_name"] for each in json.loads(broker.http("GET", "/stats", format="json"))["topics"]}


def wait_for_messages(broker: Broker, topic: str, count: int) -> None:
    """Wait until so many messages are published."""
    deadline = time.monotonic() + DEADLINE_S
    while topic not in topics(broker) or stats(broker, topic)["message_count"] < count:
        assert time.monotonic() < deadline


# ------------------------------------------------------------------------------------------------ pub


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--connections", "1", "--pipeline", "8"),
        ("--connections", "3", "--batch-size", "1", "--size", "1"),
        ("--connections", "5", "--batch-size", "7", "--size", "5000", "--pipeline", "2"),
        ("--snappy",),
        ("--deflate",),
    ],
)
@also_nsqd
def test_pub_publishes_exactly_the_messages_that_it_reports(
    bench: Run, target: Broker, topic: str, flags: tuple[str, ...]
) -> None:
    found = record(bench("pub", topic, "-n", "1001", "--format", "json", *flags))
    size = found["settings"]["size"]
    stored = stats(target, topic)
    assert (stored["message_count"], stored["message_bytes"]) == (1001, 1001 * size)
    assert (found["messages"], found["bytes"], found["missing"]) == (1001, 1001 * size, 0)
    assert sum(each["messages"] for each in found["connections"]) == 1001
    assert {each["broker"] for each in found["connections"]} == {target.tcp_address} == set(found["brokers"])
    assert (found["benchmark"], found["topic"], found["channel"]) == ("pub", topic, None)


def test_pub_publishes_for_a_time(bench: Run, target: Broker, topic: str) -> None:
    found = record(bench("pub", topic, "--duration", "1100ms", "--connections", "2", "--format", "json"))
    assert found["messages"] == stats(target, topic)["message_count"] > 0
    assert found["seconds"] >= 1.1
    assert found["messages_per_second"] == pytest.approx(found["messages"] / found["seconds"], rel=1e-3)
    assert len(found["messages_by_second"]) == int(found["seconds"])
    assert 0 < sum(found["messages_by_second"]) <= found["messages"]
    rates = found["connection_rates"]
    assert rates["min"] <= rates["avg"] <= rates["max"]
    times = found["times"]["acknowledged"]
    assert times["count"] == found["messages"] / 200 == sum(each["count"] for each in times["histogram"])
    assert 0 < times["p50_ms"] <= times["p90_ms"] <= times["p99_ms"] <= times["p99.9_ms"] <= times["max_ms"]


def test_defaults_are_those_of_bench_writer_and_bench_reader(bench: Run, bench_topic: str) -> None:
    processors = len(os.sched_getaffinity(0))
    limits = {"connections": processors, "duration_seconds": None}
    found = record(bench("pub", bench_topic, "-n", "1", "--format", "json"))
    assert found["settings"] == limits | {"count": 1, "batch_size": 200, "pipeline": 1, "size": 200}
    found = record(bench("sub", f"{bench_topic}/c", "--format", "json"))
    limits["duration_seconds"] = 10
    assert found["settings"] == limits | {"backlog": None, "max_in_flight": 2500}


def test_refused_messages_are_a_failure_and_the_topic_is_deleted(bench: Run, target: Broker) -> None:
    before = topics(target)
    result = bench("pub", "--size", "1048577", "--batch-size", "1", "--duration", "1s")
    assert (result.code, result.out) == (1, b"")
    assert f"The broker at {target.tcp_address} refused: E_BAD_MESSAGE PUB message too big" in result.err
    assert topics(target) == before


# ------------------------------------------------------------------------------------------------ sub


@pytest.mark.parametrize("flags", [(), ("--connections", "3", "--max-in-flight", "7"), ("--snappy",)])
@also_nsqd
def test_sub_finishes_exactly_the_messages_that_it_reports(
    bench: Run, target: Broker, bench_topic: str, flags: tuple[str, ...]
) -> None:
    target.create(bench_topic, "c")
    bodies = [b"x" * (1 + number % 300) for number in range(3000)]
    Cli(target.tcp_address, target.http_address).publish(bench_topic, bodies)
    found = record(bench("sub", f"{bench_topic}/c", "--format", "json", *flags))
    assert (found["messages"], found["bytes"]) == (3000, sum(map(len, bodies)))
    assert (found["topic"], found["channel"]) == (bench_topic, "c")
    assert sum(each["messages"] for each in found["connections"]) == 3000
    channel = target.channel_stats(bench_topic, "c")
    assert (channel["depth"], channel["in_flight_count"], channel["requeue_count"]) == (0, 0, 0)
    assert (channel["message_count"], channel["timeout_count"]) == (3000, 0)


def test_sub_leaves_the_rest_when_its_time_is_over(bench: Run, target: Broker, bench_topic: str) -> None:
    """All FINs have arrived when the command ends, although the broker still delivers."""
    target.create(bench_topic, "c")
    Cli(target.tcp_address, target.http_address).publish(bench_topic, [b"x" * 200] * 60_000)
    flags = ("--duration", "20ms", "--connections", "1")
    found = record(bench("sub", f"{bench_topic}/c", "--format", "json", *flags))
    channel = target.channel_stats(bench_topic, "c")
    # An nsqd may send one more message while it answers CLS, and then close without reading its FIN.
    is_nsqd = json.loads(target.http("GET", "/info"))["version"] == "1.3.0"
    assert channel["in_flight_count"] <= (1 if is_nsqd else 0)
    assert channel["requeue_count"] == 0
    deadline = time.monotonic() + DEADLINE_S
    while (channel := target.channel_stats(bench_topic, "c"))["message_count"] < 60_000:
        assert time.monotonic() < deadline  # nsqd moves messages from the topic to the channel
    finished = found["messages"] + found["finished_afterwards"]
    assert 60_000 - channel["in_flight_count"] <= finished + channel["depth"] <= 60_000
    assert channel["depth"] > 0


def test_sub_publishes_its_own_backlog(bench: Run, target: Broker) -> None:
    found = record(bench("sub", "--backlog", "2345", "--size", "10", "--format", "json"))
    assert (found["messages"], found["bytes"]) == (2345, 23450)
    assert found["topic"].startswith("bench-")
    assert found["topic"] not in topics(target)


@pytest.mark.parametrize("command", ["sub", "latency"])
def test_messages_of_others_are_not_consumed_without_agreement(
    bench: Run, target: Broker, topic: str, command: str
) -> None:
    target.create(topic)
    Cli(target.tcp_address, target.http_address).publish(topic, [b"keep me"])
    result = bench(command, f"{topic}/c" if command == "sub" else topic)
    assert (result.code, result.out) == (2, b"")
    assert "confirm with --yes" in result.err
    assert (stats(target, topic)["depth"], stats(target, topic)["channels"]) == (1, [])


def test_sub_consumes_a_topic_of_others_with_yes(bench: Run, target: Broker, topic: str) -> None:
    target.create(topic, "c")
    Cli(target.tcp_address, target.http_address).publish(topic, [b"one", b"two"])
    assert record(bench("sub", f"{topic}/c", "--yes", "--format", "json"))["messages"] == 2


def test_sub_without_messages_is_a_failure(bench: Run, bench_topic: str) -> None:
    result = bench("sub", f"{bench_topic}/c", "--duration", "50ms")
    assert (result.code, result.out) == (1, b"")
    assert result.err == f"Error: No message of {bench_topic}/c arrived: publish to {bench_topic} first.\n"


def test_backlog_is_for_the_own_topic_only(bench: Run, bench_topic: str) -> None:
    result = bench("sub", f"{bench_topic}/c", "--backlog", "5")
    assert result.code == 2
    assert "--backlog is for the command's own topic" in result.err


# ------------------------------------------------------------------------------------------------ latency


@also_nsqd
def test_latency_receives_each_message_once(bench: Run, target: Broker, bench_topic: str) -> None:
    found = record(bench("latency", bench_topic, "--rate", "500", "--duration", "400ms", "--format", "json"))
    assert stats(target, bench_topic)["message_count"] == found["messages"] == 200
    assert (found["missing"], found["bytes"]) == (0, 200 * 200)
    assert found["seconds"] >= 199 / 500
    assert set(found["times"]) == {"received", "acknowledged", "sent_late"}
    for times in found["times"].values():
        assert times["count"] == 200 == sum(each["count"] for each in times["histogram"])
        assert 0 <= times["p50_ms"] <= times["p99_ms"] <= times["max_ms"]
    # Nothing is received before it is sent.
    assert found["times"]["received"]["mean_ms"] > found["times"]["sent_late"]["mean_ms"]


def test_all_messages_of_a_stall_are_late(target: Broker, bench_topic: str) -> None:
    """A generator that waits for each answer would report one late message."""
    cli = Cli(target.tcp_address, target.http_address)
    flags = ("--rate", "500", "--duration", "1500ms", "--format", "json")
    with cli.running("bench", "latency", bench_topic, *flags) as running:
        wait_for_messages(target, bench_topic, 20)
        target.process.send_signal(signal.SIGSTOP)
        # The stall is what is measured, so it has to last.
        threading.Timer(0.5, target.process.send_signal, (signal.SIGCONT,)).start()
        found = record(running.end())
    assert found["messages"] == 750
    late = sum(each["count"] for each in found["times"]["received"]["histogram"] if each["up_to_ms"] > 100)
    assert late > 100


# ------------------------------------------------------------------------------------------------ the run


@pytest.mark.parametrize(
    "command", [("pub", "-n", "1"), ("sub", "--backlog", "1"), ("latency", "--duration", "1ms")]
)
def test_own_topic_is_deleted_unless_kept(bench: Run, target: Broker, command: tuple[str, ...]) -> None:
    before = topics(target)
    record(bench(*command, "--format", "json"))
    assert topics(target) == before
    result = bench(*command, "--keep", "--format", "json")
    kept = record(result)["topic"]
    assert topics(target) == before | {kept}
    assert f"Topic {kept} is kept.\n" in result.err
    target.http("POST", "/topic/delete", topic=kept)


def interrupt(running: Running, number: int = signal.SIGINT) -> Result:
    running.process.send_signal(number)
    return running.end()


def stop_with_unanswered_commands(broker: Broker, client: Running) -> None:
    """Stop the broker's process, and wait until the client has read all answers and waits for more."""
    broker.process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_S
    while not (
        state(broker.process.pid) == "T"
        and not has_unread_answers(broker.tcp_address)
        and state(client.process.pid) == "S"
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # nothing tells of the kernel's buffers


def state(pid: int) -> str:
    """Return the state of a process: S: it waits; T: it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def has_unread_answers(address: str) -> bool:
    """Return whether the kernel has data from this address that a client has not read."""
    port = int(address.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[2].endswith(f":{port:04X}") and int(row[4].partition(":")[2], 16) for row in rows)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_reports_what_was_done(target: Broker, topic: str, number: int, code: int) -> None:
    cli = Cli(target.tcp_address, target.http_address)
    with cli.running(
        "bench", "pub", topic, "--duration", "1h", "--size", "10", "--format", "json"
    ) as running:
        wait_for_messages(target, topic, 1000)
        result = interrupt(running, number)
    assert (result.code, result.err) == (code, "")
    (found,) = result.records
    assert found["interrupted"] is True
    assert found["messages"] == stats(target, topic)["message_count"] >= 1000


def test_interrupted_run_deletes_its_topic(target: Broker) -> None:
    before = topics(target)
    cli = Cli(target.tcp_address, target.http_address)
    with cli.running("bench", "latency", "--duration", "1h") as running:
        deadline = time.monotonic() + DEADLINE_S
        while not (new := topics(target) - before) or stats(target, *new)["message_count"] == 0:
            assert time.monotonic() < deadline
        result = interrupt(running)
    assert result.code == 130
    assert b"Published and received" in result.out
    assert topics(target) == before


def test_broker_that_stops_answering_is_named(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        cli = Cli(broker.tcp_address, broker.http_address)
        with cli.running("bench", "pub", "t", "--duration", "1h", "--format", "json") as running:
            wait_for_messages(broker, "t", 1000)
            stop_with_unanswered_commands(broker, running)
            result = interrupt(running)  # and do not wait for answers for ten seconds
        broker.process.send_signal(signal.SIGCONT)
        assert result.code == 4
        assert (
            f"The broker at {broker.tcp_address} did not take part to the end: no answer within" in result.err
        )
        assert result.records[0]["messages"] >= 1000


def test_killed_broker_ends_the_run_with_a_report(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        cli = Cli(broker.tcp_address, broker.http_address)
        with cli.running("bench", "pub", "t", "--duration", "1h", "--format", "json") as running:
            wait_for_messages(broker, "t", 1000)
            broker.process.kill()
            result = running.end()
    assert result.code == 4
    assert f"The broker at {broker.tcp_address} did not take part to the end: " in result.err
    assert result.records[0]["messages"] >= 1000


@pytest.mark.parametrize("command", ["pub", "sub", "latency"])
def test_missing_broker(run_here: Run, nowhere: Cli, command: str) -> None:
    named = {"pub": "bench-t", "sub": "bench-t/c", "latency": "bench-t"}[command]
    result = run_here(nowhere, "bench", command, named)
    assert result.code == 3
    assert result.err.startswith("Error: No broker answers at 127.0.0.1:1: ")


def test_own_topic_needs_the_http_address(run_here: Run, target: Broker) -> None:
    result = run_here(Cli(target.tcp_address, "127.0.0.1:1"), "bench", "pub")
    assert (result.code, result.out) == (2, b"")
    assert f"No HTTP address of the broker at {target.tcp_address} is known" in result.err


@pytest.mark.parametrize("command", ["pub", "sub", "latency"])
def test_broker_that_refuses_says_why(tmp_path: Path, run_here: Run, command: str) -> None:
    """Not that the topic, which it did not create, was not deleted, nor that its HTTP address is unknown."""
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("web", Given(["publish"], ["clicks"]))
    with qcli_serve(tmp_path / "data", f"--auth-file={file.write()}") as broker:
        refusal = f"Error: The broker at {broker.http_address} "
        for secret, said in (
            ("", f"{refusal}requires a secret. Give --auth-secret-file, "),
            ("unknown", f"{refusal}rejected your secret: it is unknown, expired or revoked. "),
            ("web-secret", f"{refusal}refused: your secret does not have the role manage on topic bench-"),
        ):
            env = {"QCLI_CLIENT_AUTH_SECRET": secret}
            result = run_here(Cli(broker.tcp_address, broker.http_address, env), "bench", command)
            assert (result.code, result.out) == (1, b"")
            assert result.err.startswith(said)
            assert "deleted" not in result.err


def test_killed_broker_is_named_before_its_topic(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        cli = Cli(broker.tcp_address, broker.http_address)
        with cli.running("bench", "pub", "--duration", "1h") as running:
            deadline = time.monotonic() + DEADLINE_S
            while not (new := topics(broker)) or stats(broker, *new)["message_count"] < 1000:
                assert time.monotonic() < deadline
            broker.process.kill()
            result = running.end()
    assert result.code == 4
    error = result.err.splitlines()[-1]
    assert error.startswith(f"Error: The broker at {broker.tcp_address} did not take part to the end: ")
    assert f" Topic {next(iter(new))} was not deleted: No broker answers at {broker.http_address}" in error


# ------------------------------------------------------------------------------------------------ several brokers


def test_several_brokers_are_measured_together(
    run_here: Run, nowhere: Cli, target: Broker, broker: Broker
) -> None:
    names = [word for each in (target, broker) for word in ("--nsqd-tcp-address", each.tcp_address)]
    names += [word for each in (broker, target) for word in ("--nsqd-http-address", each.http_address)]
    for command, count in [
        (("pub", "-n", "4000", "--connections", "1"), 4000),
        (("sub", "--backlog", "4000"), 4000),
        (("latency", "--rate", "1000", "--duration", "100ms"), 100),
    ]:
        found = record(run_here(nowhere, "bench", *command, *names, "--format", "json"))
        assert found["messages"] == count
        shares = dict.fromkeys(found["brokers"], 0)
        for each in found["connections"]:
            shares[each["broker"]] += each["messages"]
        assert sum(shares.values()) == count
        assert min(shares.values()) > 0
        assert not {found["topic"]} & (topics(target) | topics(broker))


def test_brokers_of_a_discovery_service(tmp_path: Path, run_here: Run, nowhere: Cli) -> None:
    with qcli_lookupd() as lookupd:
        flag = f"--lookupd-tcp-address={lookupd.tcp_address}"
        with qcli_serve(tmp_path / "a", flag) as one, qcli_serve(tmp_path / "b", flag) as two:
            wanted = sorted([one.tcp_address, two.tcp_address])
            deadline = time.monotonic() + DEADLINE_S
            while len(json.loads(lookupd.http("GET", "/nodes"))["producers"]) < 2:
                assert time.monotonic() < deadline
            command = ("bench", "pub", "-n", "2000", "--lookupd-http-address", lookupd.http_address)
            found = record(run_here(nowhere, *command, "--format", "json"))
            assert sorted(found["brokers"]) == wanted
            assert {each["broker"] for each in found["connections"]} == set(wanted)
            assert topics(one) == topics(two) == set()


# ------------------------------------------------------------------------------------------------ the report


def test_report_for_people(bench: Run, target: Broker, topic: str) -> None:
    result = bench("pub", topic, "-n", "1000", "--connections", "2")
    assert result.code == 0
    text = result.out.decode().splitlines()
    assert text[0].startswith("Published 1,000 messages, 195.3 KiB, in ")
    assert text[1] == f"{topic} at {target.tcp_address}"
    assert [line.split()[0] for line in text[3:6]] == ["throughput", "2", "this"]
    assert text[7].split() == ["p50", "p90", "p99", "p99.9", "max"]
    assert text[8].startswith("acknowledged ")
    assert text[10] == "Times: acknowledged"
    assert sum(float(line.split()[-1].rstrip("%")) for line in text[11:]) == pytest.approx(100, abs=1)
    assert max(map(len, text)) <= 80
