"""A node of several processes: `qcli serve --processes`."""

import http.client
import json
import os
import signal
import time
from pathlib import Path

import pytest

from broker.certificates import Certificates
from broker.support import connected, identify, pub
from cli.support import Cli, refusal, serving
from interop.peers import free_ports
from node.support import PATIENCE_S, is_alive, is_pending, lock_holder, running_node, suspend, wait_until
from qcli.commands.serve.processes import archive_of


def test_stops_with_all_its_processes(tmp_path: Path) -> None:
    with running_node(tmp_path, 2, "--with-lookupd=127.0.0.1:0") as node:
        assert (tmp_path / "addresses.json").exists()
        pids = node.pids
        assert len(pids) == 3
        code, log = node.stop()
    assert (code, log) == (0, "")
    assert not any(map(is_alive, pids))
    assert not (tmp_path / "addresses.json").exists()
    assert sorted(each.name for each in (tmp_path / "data").iterdir()) == ["process-0", "process-1"]


def test_signals_reach_all_processes(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        for number in (signal.SIGHUP, signal.SIGUSR1):
            node.running.process.send_signal(number)
        wait_until(lambda: [node.stats(index).get("draining") for index in range(2)] == [True, True])
        pids = [node.pid_of(index) for index in range(2)]
        for pid in pids:
            suspend(pid)  # so that the first signal does not end them
        node.running.process.terminate()
        wait_until(lambda: all(is_pending(pid, signal.SIGTERM) for pid in pids))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert node.running.end().code == 1


def test_signals_reach_a_process_that_starts(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        before = node.kill(0)
        wait_until(lambda: before not in node.pids)
        for number in (signal.SIGHUP, signal.SIGUSR1) * 20:
            node.running.process.send_signal(number)
        node.until_restarted(0, before)
        wait_until(lambda: [node.stats(index).get("draining") for index in range(2)] == [True, True])
        code, log = node.stop()
    assert code == 0
    assert log.count("has ended") == 1


def test_a_process_that_ends_is_started_again(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        node.publish_at(0, "t", "kept")
        before = node.kill(0)
        node.until_restarted(0, before)
        assert node.stats()["topics"][0]["depth"] == 1
        code, log = node.stop()
    assert code == 0
    assert "process 0 (PID" in log
    assert "has ended (signal 9)" in log


def test_processes_end_with_the_supervisor(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        node.publish_at(1, "t", "kept")
        pids = node.pids
        node.running.process.kill()
        wait_until(lambda: not any(map(is_alive, pids)))
    with running_node(tmp_path) as node:
        assert node.stats()["topics"][0]["depth"] == 1


def test_a_client_is_served_while_a_process_hangs(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        for index in range(2):
            pid = node.pid_of(index)
            suspend(pid)
            assert node.post("/pub?topic=t", b"x") == (200, b"OK")
            os.kill(pid, signal.SIGCONT)
        assert [node.stats(index)["topics"][0]["depth"] for index in range(2)] == [1, 1]


def test_ping_answers_soon_if_a_process_hangs(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        assert node.get("/ping") == (200, b"OK")
        pid = node.pid_of(1)
        suspend(pid)
        began_s = time.monotonic()
        assert node.get("/ping") == (500, b"NOK - process 1 does not answer")
        assert time.monotonic() - began_s < 20  # other requests wait for 30 s
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: node.get("/ping") == (200, b"OK"))


def test_the_sum_of_the_statistics(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        node.publish_at(0, "t", "a", "b", "c")
        node.publish_at(1, "t", "d")
        node.publish_at(1, "other", "e")
        assert node.post("/channel/create?topic=t&channel=c") == (200, b"")
        node.publish_at(0, "t", "f")
        (other, topic) = node.stats()["topics"]
        assert (other["topic_name"], other["depth"], other["message_count"]) == ("other", 1, 1)
        parts = [node.channel("t", "c", index) for index in range(2)]
        assert [part["depth"] for part in parts] == [4, 1]
        for name in ("depth", "message_count", "backend_depth", "in_flight_count"):
            assert topic["channels"][0][name] == sum(part[name] for part in parts)
        assert (
            topic["channels"][0]["oldest_message_age_ms"] <= parts[0]["oldest_message_age_ms"]
        )  # asked later
        assert topic["message_count"] == 5
        text = node.get("/stats")[1].decode()
        assert "[t              ] depth: 0     be-depth: 0     msgs: 5" in text
        metrics = node.get("/metrics")[1].decode().splitlines()
        assert 'nsq_channel_depth{process="0",channel="c",topic="t"} 4.0' in metrics
        assert 'nsq_channel_depth{process="1",channel="c",topic="t"} 1.0' in metrics
        assert metrics.count("# TYPE nsq_channel_depth gauge") == 1
        assert node.get("/ping") == (200, b"OK")
        about = json.loads(node.get("/info")[1])
        assert about["processes"] == node.processes
        assert f":{about['tcp_port']}" in node.tcp


def test_changes_hold_on_all_processes(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        assert node.post("/topic/pause?topic=none")[0] == 404
        assert node.post("/channel/create?topic=none&channel=c")[0] == 404
        node.publish_at(1, "t", "a")
        assert node.post("/topic/pause?topic=t") == (200, b"")  # process 0 gets the topic
        assert node.request("PUT", "/topic/settings?topic=t", b'{"ttl_ms":60000}')[0] == 200
        for index in range(2):
            (topic,) = node.stats(index)["topics"]
            assert (topic["paused"], topic["ttl_ms"]) == (True, 60_000)
        assert json.loads(node.get("/topic/settings?topic=t")[1])["ttl_ms"] == 60_000
        node.post("/channel/create?topic=t&channel=c")
        node.post("/topic/create?topic=a", at=node.processes[1]["http_address"])
        channel = {"channel_name": "c", "paused": False, "settings": {}}
        assert json.loads(node.get("/definitions")[1])["topics"] == [
            {"topic_name": "a", "paused": False, "settings": {}, "channels": []},
            {"topic_name": "t", "paused": True, "settings": {"ttl_ms": 60_000}, "channels": [channel]},
        ]
        node.post("/topic/delete?topic=a")
        assert node.request("PUT", "/config/draining", b"true") == (200, b"true")
        assert [node.stats(index).get("draining") for index in range(2)] == [True, True]
        assert node.stats()["draining"] is True
        assert node.request("PUT", "/config/draining", b"false")[0] == 200
        assert node.post("/topic/delete?topic=t") == (200, b"")
        assert node.post("/topic/delete?topic=t")[0] == 404
        assert node.stats()["topics"] == []
        status, body = node.get("/topic/read?topic=t")
        assert status == 400
        assert node.processes[1]["http_address"] in body.decode()


def test_commands_say_which_addresses_they_need(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        node.publish_at(0, "t", "a")
        node.publish_at(1, "t", "b")
        shared = Cli(node.tcp, node.http)
        addresses = ",".join(each["http_address"] for each in node.processes)
        for command in ("peek t", "dlq list", "tail t --from 0 --to 1", "to-parquet t x"):
            refused = shared(*command.split())
            assert refused.code == 1, command
            needs = f"needs the address of each: --nsqd-http-address {addresses}"
            assert (
                f"Several processes share {node.http} ('qcli serve --processes'), and this {needs}"
                in refused.err
            )
        bodies = shared("peek", "t", "--format", "raw", "--nsqd-http-address", addresses).out.split()
        assert sorted(bodies) == [b"a", b"b"]


def test_a_batch_with_a_number_is_stored_once(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        pids = [node.pid_of(index) for index in range(2)]
        for index in range(2):
            # The other process hangs while this one accepts the connection.
            suspend(pids[1 - index])
            connections = [http.client.HTTPConnection(node.http, timeout=PATIENCE_S) for _ in range(3)]
            for connection in connections:
                connection.request("GET", "/access")
                connection.getresponse().read()
            os.kill(pids[1 - index], signal.SIGCONT)
            for number, connection in enumerate(connections):
                connection.request("POST", f"/pub?topic=t&producer=p{number}&number=7", b"x")
                assert connection.getresponse().read() == b"OK"
                connection.close()
        assert node.stats()["topics"][0]["message_count"] == 3
        for number in range(3):
            about = json.loads(node.get(f"/topic/producer?topic=t&producer=p{number}")[1])
            assert about["number"] == 7


async def test_a_producer_with_a_name_has_one_process(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        for _ in range(6):
            for name in ("p1", "p2", "p3"):
                async with connected(node.tcp) as client:
                    await client.send(
                        identify(feature_negotiation=True, producer=name, producer_instance="i")
                    )
                    answer = await client.frame()
                    assert answer is not None
                    await client.send(b"PRODUCER t\nPUB t 0\n\0\0\0\1x")
                    claimed = await client.frame()
                    assert claimed is not None
                    await client.ok()
        assert node.stats()["topics"][0]["message_count"] == 3


async def test_spreads_connections(tmp_path: Path) -> None:
    """A process accepts clients while another one hangs, and the other gets the next ones."""
    with running_node(tmp_path) as node:
        pid = node.pid_of(0)
        suspend(pid)
        async with connected(node.tcp) as one, connected(node.tcp) as two:
            for client in (one, two):
                await client.send(pub("t", b"x"))
                await client.ok()
            os.kill(pid, signal.SIGCONT)
            assert node.stats(1)["topics"][0]["message_count"] == 2


def test_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert "does not go with --admin" in refusal(tmp_path, "--processes", "2", "--admin")
    assert "--restore-from" in refusal(
        tmp_path, "--processes", "2", "--restore-from", str(tmp_path / "archive")
    )
    assert "need --processes" in refusal(tmp_path, "--process-ports", "4200")
    assert not data.exists()
    with serving(tmp_path) as broker:
        broker.hear_line()
        wait_until((data / "broker.json").exists)
        broker.process.kill()
        broker.process.wait()
    assert "single broker" in refusal(tmp_path, "--processes", "2")


def test_refuses_a_folder_in_use(tmp_path: Path) -> None:
    with running_node(tmp_path):
        reason = refusal(tmp_path, "--processes", "2")
    assert "is in use" in reason


def test_a_broker_alone_refuses_the_folder_of_a_node(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        node.stop()
    assert "give --processes 2" in refusal(tmp_path)
    assert "than 1. Start 2" in refusal(tmp_path, "--processes", "1")


def test_ends_if_a_process_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "process-1").write_text("no folder")
    with serving(tmp_path, "--processes", "2", "--log-level", "warn") as running:
        result = running.end()
    assert result.code == 1
    assert "ready" not in result.err
    assert "process-1" in result.err


@pytest.mark.parametrize("growing", [True, False])
def test_another_number_of_processes(tmp_path: Path, growing: bool) -> None:
    with running_node(tmp_path, 1 if growing else 2) as node:
        for index in range(len(node.processes)):
            node.publish_at(index, "t", f"{index}a", f"{index}b")
        assert node.post("/channel/create?topic=t&channel=c") == (200, b"")
        if not growing:
            drained, target = (each["http_address"] for each in reversed(node.processes))
            result = Cli(node.tcp, drained)("drain", "--move-to", target)
            assert result.code == 0, result.err
        assert node.stop()[0] == 0
    if not growing:
        for each in sorted((tmp_path / "data" / "process-1").rglob("*"), reverse=True):
            each.rmdir() if each.is_dir() else each.unlink()
        (tmp_path / "data" / "process-1").rmdir()
    with running_node(tmp_path, 2 if growing else 1) as node:
        assert node.channel("t", "c")["depth"] == (2 if growing else 4)


def test_a_new_process_begins_with_the_channels_of_the_others(tmp_path: Path) -> None:
    """Otherwise a channel without a consumer would not get what the process stores."""
    with running_node(tmp_path, 2) as node:
        assert node.post("/topic/create?topic=t")[0] == 200
        for index, channel in enumerate(("first", "second")):  # as after a request to one process
            own = node.processes[index]["http_address"]
            assert node.post(f"/channel/create?topic=t&channel={channel}", at=own)[0] == 200
        assert node.post("/channel/pause?topic=t&channel=second")[0] == 200
        assert (
            node.request("PUT", "/channel/settings?topic=t&channel=first", b'{"max_attempts": 7}')[0] == 200
        )
        assert node.request("PUT", "/topic/settings?topic=t", b'{"retention_time_ms": 90000}')[0] == 200
        assert node.post("/topic/create?topic=empty")[0] == 200
        assert node.post("/channel/create?topic=t&channel=here%23ephemeral")[0] == 200
        node.publish_at(0, "t", "before")
        assert node.stop()[0] == 0
    (tmp_path / "data" / ".new-process-2" / "topics").mkdir(parents=True)  # of a start that was killed
    with running_node(tmp_path, 4) as node:
        for index in (2, 3):
            own = node.processes[index]["http_address"]
            found = json.loads(node.get("/definitions", own)[1])["topics"]
            assert [each["topic_name"] for each in found] == ["empty", "t"]
            assert found[0]["channels"] == []
            assert found[1]["settings"]["retention_time_ms"] == 90000
            channels = {each["channel_name"]: each for each in found[1]["channels"]}
            assert {name: each["paused"] for name, each in channels.items()} == {
                "first": False,
                "second": True,
            }
            assert channels["first"]["settings"]["max_attempts"] == 7
            node.publish_at(index, "t", "after")
            assert [node.channel("t", name, index)["depth"] for name in channels] == [1, 1]
        assert node.channel("t", "first")["depth"] == 3
        code, log = node.stop()
    assert code == 0
    assert "ERROR" not in log
    assert "WARNING" not in log


def test_a_damaged_state_makes_no_new_process_fail(tmp_path: Path) -> None:
    with running_node(tmp_path, 1) as node:
        for topic in ("a", "b"):
            assert node.post(f"/topic/create?topic={topic}")[0] == 200
        assert node.stop()[0] == 0
    for name in ("state.json", "state.json.previous"):
        (tmp_path / "data/process-0/topics/a.topic" / name).write_bytes(b"{")
    with running_node(tmp_path, 2) as node:
        own = node.processes[1]["http_address"]
        found = json.loads(node.get("/definitions", own)[1])["topics"]
        assert [each["topic_name"] for each in found] == ["b"]


def test_a_stray_folder_starts_no_processes(tmp_path: Path) -> None:
    (tmp_path / "data" / "process-4000000000").mkdir(parents=True)
    assert "at most 256 processes" in refusal(tmp_path, "--processes", "auto")


def test_the_ports_of_a_process_do_not_depend_on_its_services(tmp_path: Path) -> None:
    free = free_ports(12)  # even ones, and the odd ones after them
    first = next(each for each in free if {each + 2, each + 4} <= {*free})
    certificates = Certificates(tmp_path / "certificates")
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in certificates.options.items()]
    flags += ["--https-address=127.0.0.1:0", "--http-address=", f"--process-ports={first}"]
    with running_node(tmp_path, 2, *flags) as node:
        for index, each in enumerate(node.processes):
            at = first + 3 * index
            assert each == {"tcp_address": f"127.0.0.1:{at}", "https_address": f"127.0.0.1:{at + 2}"}


def test_a_process_that_cannot_start_again_is_named(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        folder = node.folder / "process-1"
        folder.rename(tmp_path / "away")
        folder.write_text("no folder")
        os.kill(lock_holder(tmp_path / "away"), signal.SIGKILL)
        wait_until(lambda: node.get("/ping") == (500, b"NOK - process 1 does not answer"))
        status, body = node.post("/topic/create?topic=t")
        assert (status, b"process 1 does not answer" in body) == (503, True)
        assert node.post("/pub?topic=t", b"x") == (200, b"OK")


def test_check_config(tmp_path: Path) -> None:
    check = ("serve", "--check-config", "--processes", "2", "--data-path", str(tmp_path / "data"))
    cli = Cli("127.0.0.1:1", "127.0.0.1:1")
    assert cli(*check).code == 0
    with running_node(tmp_path) as node:
        node.stop()
    assert cli(*check).code == 0
    for flags, reason in (
        (["--processes", "1"], "than 1. Start 2"),
        (["--cluster", "a", "--coordinator", "static:127.0.0.1:1"], "--cluster"),
        (["--broadcast-tcp-port", "1"], "--broadcast-tcp-port"),
        (["--statsd-address", "127.0.0.1:8125", "--statsd-prefix", "a"], "--statsd-prefix"),
    ):
        result = cli(*check, *flags)
        assert (result.code, reason in result.err) == (1, True), result.err


@pytest.mark.parametrize(
    ("archive", "place"),
    [
        ("", ""),
        ("/mnt/archive/", "/mnt/archive/process-1"),
        ("s3://bucket/nsq", "s3://bucket/nsq/process-1"),
        ("s3://bucket/nsq?region=eu&scheme=http", "s3://bucket/nsq/process-1?region=eu&scheme=http"),
    ],
)
def test_each_process_has_an_archive(archive: str, place: str) -> None:
    assert archive_of(archive, 1) == place
