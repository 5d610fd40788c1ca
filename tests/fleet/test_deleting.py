"""Tests for `topic delete --everywhere`, `channel delete --everywhere` and `tombstone`."""

import json
import signal
from pathlib import Path

import pytest

from cli.support import Cli, Run
from fleet.support import Fleet, hung, nodes, refusing_broker, running_fleet, take_down
from interop.peers import Broker
from qcli.framework.errors import ExitCode

pytestmark = pytest.mark.interop


def has_topic(broker: Broker, topic: str) -> bool:
    topics = json.loads(broker.http("GET", "/stats", format="json"))["topics"] or []
    return topic in {each["topic_name"] for each in topics}


def listed(lookupd: Broker, topic: str) -> bool:
    return topic in json.loads(lookupd.http("GET", "/topics"))["topics"]


def test_topic_is_deleted_everywhere(run_here: Run, fleet: Fleet, topic: str) -> None:
    fleet.create(topic, "c")
    other = f"{topic}.kept"
    fleet.create(other)
    result = run_here(fleet.discovering, "topic", "delete", "--everywhere", "--yes", topic)
    assert result.code == 0, result.err
    assert not any(has_topic(broker, topic) for broker in fleet.brokers)
    assert not any(listed(lookupd, topic) for lookupd in fleet.lookupds)
    assert all(has_topic(broker, other) for broker in fleet.brokers)
    told = result.err.splitlines()
    for broker in fleet.brokers:
        assert f"topic {topic} deleted on {broker.http_address}" in told
    for lookupd in fleet.lookupds:
        assert f"topic {topic} hidden from consumers at {lookupd.http_address}" in told
        assert f"topic {topic} deleted in nsqlookupd {lookupd.http_address}" in told
    assert told[-1] == f"topic {topic} stays deleted (2 s)"


def test_channel_is_deleted_everywhere(run_here: Run, fleet: Fleet, topic: str) -> None:
    fleet.create(topic, "old", "kept")
    result = run_here(fleet.discovering, "channel", "delete", "--everywhere", "-y", f"{topic}/old")
    assert result.code == 0, result.err
    for lookupd in fleet.lookupds:
        assert json.loads(lookupd.http("GET", "/channels", topic=topic))["channels"] == ["kept"]
    for broker in fleet.brokers:
        stats = json.loads(broker.http("GET", "/stats", format="json", topic=topic))["topics"][0]
        assert [channel["channel_name"] for channel in stats["channels"]] == ["kept"]


def test_topic_that_is_only_in_the_services_is_deleted(run_here: Run, fleet: Fleet, topic: str) -> None:
    for lookupd in fleet.lookupds:
        lookupd.http("POST", "/topic/create", topic=topic)
    assert run_here(fleet.discovering, "topic", "delete", "--everywhere", "-y", topic).code == 0
    assert not any(listed(lookupd, topic) for lookupd in fleet.lookupds)
    again = run_here(fleet.discovering, "topic", "delete", "--everywhere", "-y", topic)
    assert (again.code, f'Topic "{topic}" does not exist on ' in again.err) == (ExitCode.FAILURE, True)


def test_topic_that_a_consumer_creates_again_is_reported(run_here: Run, fleet: Fleet, topic: str) -> None:
    fleet.create(topic, "c")
    broker = fleet.ours[0]
    with fleet.cli.running("tail", f"{topic}/c", "--nsqd-tcp-address", broker.tcp_address) as tail:
        fleet.cli.wait_until(f"{topic}/c", lambda record: record["client_count"] == 1)
        result = run_here(fleet.discovering, "topic", "delete", "--everywhere", "-y", topic)
        tail.process.send_signal(signal.SIGINT)
        tail.end()
    assert result.code == ExitCode.PARTIAL
    assert f"Topic {topic} exists again on {broker.http_address}." in result.err
    assert "Stop them first." in result.err


def test_everywhere_needs_the_services(run_here: Run, fleet: Fleet, topic: str) -> None:
    result = run_here(fleet.cli, "topic", "delete", "--everywhere", "-y", topic)
    assert (result.code, "--lookupd-http-address" in result.err) == (ExitCode.USAGE, True)


def test_failing_brokers_are_named_and_the_others_are_done(
    tmp_path: Path, run_here: Run, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcli.broker.admin_client.REQUEST_TIMEOUT_S", 0.5)
    with running_fleet(tmp_path) as fleet, refusing_broker(tmp_path / "refusing", fleet.lookupds) as refusing:
        fleet.create(topic)
        stopped, down, working = fleet.ours
        names = ",".join([*fleet.http_addresses, refusing.http_address])
        take_down(down)
        take_down(fleet.lookupds[0])
        with hung(stopped):
            cli = Cli("", names, {"QCLI_LOOKUPD_HTTP_ADDRESS": ",".join(fleet.lookupd_addresses)})
            result = run_here(cli, "topic", "delete", "--everywhere", "-y", topic)
        assert result.code == ExitCode.PARTIAL
        assert not has_topic(working, topic)
        assert not has_topic(fleet.nsqd, topic)
        failures = result.err.partition(" failures:\n")[2]
        for server in (stopped, down, refusing, fleet.lookupds[0]):
            assert failures.count(server.http_address) == 1, result.err
        assert working.http_address not in failures


@pytest.mark.parametrize("service", [0, 1])
def test_tombstone(run_here: Run, fleet: Fleet, topic: str, service: int) -> None:
    fleet.create(topic)
    # Another broker than the one whose tombstones the tests of `nodes` look at: they last for 45 s.
    lookupd, broker = fleet.lookupds[service], fleet.ours[2]
    (name,) = (
        f"{node['broadcast_address']}:{node['http_port']}"
        for node in nodes(lookupd)
        if node["http_port"] == int(broker.http_address.rpartition(":")[2])
    )
    cli = Cli("", "", {"QCLI_LOOKUPD_HTTP_ADDRESS": lookupd.http_address})
    result = run_here(cli, "tombstone", topic, name)
    assert (result.code, result.err) == (
        0,
        f"topic {topic}: {name} hidden from consumers at {lookupd.http_address}\n",
    )
    found = json.loads(lookupd.http("GET", "/lookup", topic=topic))["producers"]
    assert int(name.rpartition(":")[2]) not in {each["http_port"] for each in found}
    assert len(found) == len(fleet.brokers) - 1


def test_tombstone_for_an_unknown_broker(run_here: Run, fleet: Fleet, topic: str) -> None:
    fleet.create(topic)
    result = run_here(fleet.discovering, "tombstone", topic, "127.0.0.1:1")
    assert result.code == ExitCode.FAILURE
    assert f"No broker 127.0.0.1:1 with topic {topic} is registered at " in result.err
    assert "See 'qcli nodes'." in result.err
    missing = run_here(Cli("", ""), "tombstone", topic, "127.0.0.1:1")
    assert (missing.code, "--lookupd-http-address" in missing.err) == (ExitCode.USAGE, True)
    nowhere = Cli("", "", {"QCLI_LOOKUPD_HTTP_ADDRESS": "127.0.0.1:1"})
    assert run_here(nowhere, "tombstone", topic, "127.0.0.1:1").code == ExitCode.UNREACHABLE
