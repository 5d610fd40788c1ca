"""`qcli nodes`: what it shows of brokers and discovery services in every state."""

import csv
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.support import Cli, Result, Run
from fleet.support import (
    SECRET,
    Fleet,
    await_nodes,
    cli_of,
    hung,
    lookupd_flags,
    refusing_broker,
    running_fleet,
    service_hung,
    subscribed,
    take_down,
    together,
    wait_until,
)
from interop.peers import Broker, nsqd, qcli_lookupd, qcli_serve
from interop.same.certificates import Certificates
from qcli.framework.errors import ExitCode

pytestmark = pytest.mark.interop

NODES = ("nodes", "--format", "json")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait a second for an answer."""
    for module in ("admin_client", "lookupd_client"):
        monkeypatch.setattr(f"qcli.broker.{module}.REQUEST_TIMEOUT_S", 1.0)


def by_address(result: Result) -> dict[str, dict[str, Any]]:
    return {record["address"]: record for record in result.records}


def with_brokers(fleet: Fleet, *addresses: str) -> Cli:
    """Run commands with these brokers and the fleet's services."""
    return Cli("", ",".join(addresses), fleet.discovering.env)


def test_every_broker_and_service_is_shown(run_here: Run, fleet: Fleet, topic: str) -> None:
    fleet.create(topic, "c", "d")
    with subscribed(fleet.ours[1], topic, "d"):
        shown = run_here(fleet.discovering, *NODES)
    assert (shown.code, shown.err) == (0, "")
    records = by_address(shown)
    assert sorted(records) == sorted(fleet.http_addresses + fleet.lookupd_addresses)
    for broker in fleet.brokers:
        record = records[broker.http_address]
        info = json.loads(broker.http("GET", "/info"))
        assert {key: record[key] for key in ("kind", "status", "reason", "health", "draining")} == {
            "kind": "broker", "status": "ok", "reason": None, "health": "OK", "draining": False,
        }  # fmt: skip
        assert {key: record[key] for key in info.keys() & record.keys() - {"draining"}} == {
            key: info[key] for key in info.keys() & record.keys() - {"draining"}
        }
        assert sorted(record["registered_at"]) == sorted(fleet.lookupd_addresses)
        assert (record["not_registered_at"], record["configured"]) == ([], False)
        assert (record["topics"] >= 1, record["channels"] >= 2) == (True, True)
        assert 0 <= record["uptime_s"] < 3600
    assert records[fleet.ours[1].http_address]["clients"] >= 1
    versions = [records[address]["version"] for address in fleet.lookupd_addresses]
    assert versions == [records[fleet.ours[0].http_address]["version"], "1.3.0"]
    assert [records[address]["brokers"] for address in fleet.lookupd_addresses] == [4, 4]


def test_depth_age_and_disk(run_here: Run, fleet: Fleet, topic: str) -> None:
    for broker in (fleet.ours[0], fleet.nsqd):
        before = by_address(run_here(cli_of(broker), *NODES))[broker.http_address]
        broker.create(topic, "c", "d")
        for _ in range(3):
            broker.post("/pub", b"x" * 10_000, topic=topic)
        broker.create(f"{topic}.alone")
        broker.post("/pub", b"x", topic=f"{topic}.alone")
        # nsqd moves messages to channels a moment later.
        wait_until(lambda: broker.channel_stats(topic, "c")["depth"] == 3, "in the channel")  # noqa: B023
        wait_until(lambda: broker.channel_stats(topic, "d")["depth"] == 3, "in the channel")  # noqa: B023
        after = by_address(run_here(cli_of(broker), *NODES))[broker.http_address]
        assert after["depth"] - before["depth"] == 3 + 3 + 1
        assert after["messages"] - before["messages"] == 4
        assert after["topics"] - before["topics"] == 2
        if broker is fleet.nsqd:
            assert [
                after[key] for key in ("oldest_message_age_ms", "disk_used_bytes", "disk_free_bytes")
            ] == [None] * 3
            continue
        assert after["oldest_message_age_ms"] >= 0
        assert 30_000 < after["disk_used_bytes"] - before["disk_used_bytes"] < 31_000
        assert 0 < after["disk_free_bytes"] < after["disk_total_bytes"]


@pytest.mark.usefixtures("impatient")
def test_registered_broker_that_hangs(run_here: Run, fleet: Fleet) -> None:
    silent = fleet.ours[2]
    with hung(silent):
        shown = run_here(fleet.discovering, *NODES)
        table = run_here(fleet.discovering, "nodes")
    assert shown.code == ExitCode.PARTIAL
    record = by_address(shown)[silent.http_address]
    assert record["status"] == "no answer"
    assert record["reason"] == (
        f"The broker at {silent.http_address} does not answer: connected, but no answer within 1 s."
    )
    assert (record["version"], record["depth"], record["uptime_s"]) == ("0.1.0", None, None)
    assert sorted(record["registered_at"]) == sorted(fleet.lookupd_addresses)
    assert [each["status"] for each in shown.records].count("ok") == 5
    assert shown.err.startswith(f"Error: The broker at {silent.http_address} does not answer")
    assert table.code == ExitCode.PARTIAL
    line = next(line for line in table.out.decode().splitlines() if line.startswith(silent.http_address))
    assert line.split() == [silent.http_address, "no", "answer", "0.1.0", str(record["topics"]), "2/2"]


@pytest.mark.usefixtures("impatient")
def test_service_that_hangs(run_here: Run, fleet: Fleet) -> None:
    for silent, other in (fleet.lookupds, fleet.lookupds[::-1]):
        with service_hung(fleet, silent):
            shown = run_here(fleet.discovering, *NODES)
        assert shown.code == ExitCode.PARTIAL
        records = by_address(shown)
        assert records[silent.http_address]["status"] == "no answer"
        assert silent.http_address in shown.err
        for address in fleet.http_addresses:
            assert records[address]["status"] == "ok"
            assert (records[address]["registered_at"], records[address]["not_registered_at"]) == (
                [other.http_address],
                [],
            )


def test_brokers_that_are_down_or_not_registered(tmp_path: Path, run_here: Run) -> None:
    with running_fleet(tmp_path, ours=2) as fleet, qcli_serve(tmp_path / "alone") as alone:
        down, up = fleet.ours
        take_down(down)
        for lookupd in fleet.lookupds:
            await_nodes(lookupd, 2)
        shown = run_here(with_brokers(fleet, down.http_address, up.http_address, alone.http_address), *NODES)
        table = run_here(with_brokers(fleet, down.http_address, up.http_address, alone.http_address), "nodes")
    assert shown.code == ExitCode.PARTIAL
    assert [record["address"] for record in shown.records][:3] == [
        down.http_address, up.http_address, alone.http_address,
    ]  # fmt: skip
    records = by_address(shown)
    assert records[down.http_address]["status"] == "no answer"
    assert records[down.http_address]["configured"] is True
    assert records[down.http_address]["reason"].endswith("connection refused.")
    assert records[fleet.nsqd.http_address]["configured"] is False
    assert records[up.http_address]["not_registered_at"] == []
    assert records[alone.http_address]["status"] == "ok"
    assert records[alone.http_address]["not_registered_at"] == fleet.lookupd_addresses
    services = " ".join(fleet.lookupd_addresses)
    assert f"{alone.http_address} is not registered at: {services}\n" in table.out.decode()


def test_broker_with_two_addresses_is_shown_once(run_here: Run, fleet: Fleet) -> None:
    broker = fleet.ours[0]
    port = broker.http_address.rpartition(":")[2]
    shown = run_here(with_brokers(fleet, f"localhost:{port}", broker.http_address), *NODES)
    assert shown.code == 0
    (record,) = [each for each in shown.records if str(each["http_port"]) == port]
    assert (record["address"], record["configured"]) == (f"localhost:{port}", True)
    assert sorted(record["registered_at"]) == sorted(fleet.lookupd_addresses)


def test_tombstones_are_shown(run_here: Run, fleet: Fleet, topic: str) -> None:
    fleet.create(topic)
    hidden = fleet.ours[1]
    fleet.lookupds[1].http("POST", "/topic/tombstone", topic=topic, node=hidden.http_address)
    shown = run_here(fleet.discovering, *NODES)
    assert by_address(shown)[hidden.http_address]["tombstones"] == [topic]
    assert by_address(shown)[fleet.ours[0].http_address]["tombstones"] == []
    table = run_here(fleet.discovering, "nodes").out.decode()
    assert f"{hidden.http_address} is hidden from consumers (tombstone) of: {topic}\n" in table


def test_broker_that_refuses(tmp_path: Path, run_here: Run, fleet: Fleet) -> None:
    with qcli_lookupd() as lookupd, refusing_broker(tmp_path / "refusing", [lookupd]) as broker:
        cli = Cli("", "", {"QCLI_LOOKUPD_HTTP_ADDRESS": lookupd.http_address})
        refused = run_here(cli, *NODES)
        allowed = run_here(cli, *NODES, env={"QCLI_CLIENT_AUTH_SECRET": SECRET})
    record = by_address(refused)[broker.http_address]
    assert (refused.code, record["status"], record["registered_at"]) == (1, "refused", [lookupd.http_address])
    assert "requires a secret" in record["reason"]
    assert (allowed.code, by_address(allowed)[broker.http_address]["status"]) == (0, "ok")


def test_brokers_that_require_tls(tmp_path: Path, run_here: Run, topic: str) -> None:
    """nsqlookupd does not know the ports for HTTPS, but a broker that requires TLS tells its port."""
    certificates = Certificates.make(tmp_path / "certificates")
    flags = [*certificates.flags, "--tls-required=true"]
    with together([qcli_lookupd]) as lookupds:
        register = lookupd_flags(lookupds)
        starts = [
            partial(qcli_serve, tmp_path / "ours", *flags, *register),
            partial(nsqd, tmp_path / "nsqd", *flags, *register),
            partial(qcli_serve, tmp_path / "plain", *register),
        ]
        with together(starts) as brokers:
            (lookupd,), (ours, theirs, plain) = lookupds, brokers
            await_nodes(lookupd, 3)
            cli = Cli("", "", {"QCLI_LOOKUPD_HTTP_ADDRESS": lookupd.http_address})
            tls = ("--tls-root-ca-file", str(certificates.ca))
            shown = run_here(cli, *NODES, *tls)
            created = run_here(cli, "topic", "create", topic, *tls)
            named = f"https://{ours.https_address}"
            both = ("--nsqd-http-address", named, "--lookupd-http-address", lookupd.http_address)
            once = run_here(cli, *NODES, *tls, *both)
            with hung(ours):
                silent = run_here(cli, "stat", *tls)
    https = {f"https://{each.https_address}" for each in (ours, theirs)}
    reason = f"The broker at {plain.http_address} was not asked: it does not tell a port for HTTPS"
    for result in (shown, once):
        assert result.code == ExitCode.PARTIAL
        records = by_address(result)
        assert records.keys() == {*https, plain.http_address, lookupd.http_address}
        for address in https:
            assert (records[address]["status"], records[address]["registered_at"]) == (
                "ok",
                [lookupd.http_address],
            )
        assert records[plain.http_address]["status"] == "refused"
        assert reason in result.err
    assert created.code == ExitCode.PARTIAL
    assert reason in created.err
    for address in https:
        assert f"topic {topic} created on {address}\n" in created.err
    assert silent.code == ExitCode.PARTIAL
    assert f"The broker at {ours.http_address} was not asked" in silent.err


def test_broker_that_drains(tmp_path: Path, run_here: Run) -> None:
    with qcli_lookupd() as lookupd, qcli_serve(tmp_path / "data") as broker:
        cli = Cli("", broker.http_address, {"QCLI_LOOKUPD_HTTP_ADDRESS": lookupd.http_address})
        unregistered = run_here(cli, "nodes", "--check")
        broker.put("/config/draining", b"true")
        shown = run_here(cli, *NODES)
        checked = run_here(cli, "nodes", "--check")
    record = by_address(shown)[broker.http_address]
    assert (shown.code, record["status"], record["draining"]) == (0, "draining", True)
    # Only a broker that takes messages must be registered.
    assert (unregistered.code, checked.code) == (1, 0), checked.out


def test_csv_and_tsv_have_the_keys_of_json(run_here: Run, fleet: Fleet) -> None:
    keys = list(run_here(fleet.discovering, *NODES).records[0])
    for form, delimiter in (("csv", ","), ("tsv", "\t")):
        text = run_here(fleet.discovering, "nodes", "--format", form).out.decode()
        heading, *rows = csv.reader(io.StringIO(text), delimiter=delimiter)
        assert heading == keys
        assert {row[heading.index("address")] for row in rows} == {
            *fleet.http_addresses, *fleet.lookupd_addresses,
        }  # fmt: skip
        assert [row[heading.index("registered_at")].count(" ") for row in rows] == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("columns", [64, 80, 140])
def test_tables_fit_the_terminal(fleet: Fleet, topic: str, columns: int) -> None:
    fleet.create(topic, "c")
    fleet.ours[0].post("/pub", b"waits", topic=topic)  # a column of ages
    with fleet.discovering.on_terminal("nodes", columns=columns) as terminal:
        assert terminal.end() == 0
    brokers, lookupds = (
        text.splitlines() for text in terminal.shown.decode().replace("\r", "").split("\n\n")[:2]
    )
    assert max(map(len, [*brokers, *lookupds])) <= columns
    assert (len(brokers), len(lookupds)) == (1 + len(fleet.brokers), 1 + len(fleet.lookupds))
    for name in ("broker", "status", "topics", "depth", "oldest", "up", "lookupds"):
        assert name in brokers[0].split()
    if columns == 64:
        return
    assert [line.split()[0] for line in brokers[1:]] == sorted(fleet.http_addresses)
    assert [line.split()[0] for line in lookupds[1:]] == fleet.lookupd_addresses
    assert ("clients" in brokers[0].split()) == (columns == 140)


def test_nothing_answers(run_here: Run) -> None:
    shown = run_here(Cli("", "127.0.0.1:1,127.0.0.2:1"), *NODES)
    assert shown.code == ExitCode.UNREACHABLE
    assert [record["status"] for record in shown.records] == ["no answer", "no answer"]
    service = run_here(Cli("", "", {"QCLI_LOOKUPD_HTTP_ADDRESS": "127.0.0.1:1"}), *NODES)
    assert (service.code, "No nsqlookupd answers at 127.0.0.1:1" in service.err) == (
        ExitCode.UNREACHABLE,
        True,
    )


def test_service_without_brokers(run_here: Run) -> None:
    with qcli_lookupd() as lookupd:
        shown = run_here(Cli("", "", {"QCLI_LOOKUPD_HTTP_ADDRESS": lookupd.http_address}), *NODES)
    assert (shown.code, [(each["kind"], each["brokers"]) for each in shown.records]) == (0, [("lookupd", 0)])


def test_hosts_that_are_not_allowed_are_not_asked(run_here: Run, fleet: Fleet) -> None:
    shown = run_here(fleet.discovering, *NODES, "--lookupd-allowed-host", "10.0.0.*")
    assert [record["kind"] for record in shown.records] == ["lookupd", "lookupd"]
    assert "'127.0.0.1' is not among the hosts of --lookupd-allowed-host; left out." in shown.err


def test_other_servers_are_recognized(run_here: Run, fleet: Fleet) -> None:
    lookupd: Broker = fleet.lookupds[0]
    swapped = Cli("", lookupd.http_address, {"QCLI_LOOKUPD_HTTP_ADDRESS": fleet.ours[0].http_address})
    shown = run_here(swapped, *NODES)
    assert shown.code == ExitCode.UNREACHABLE
    assert f"{lookupd.http_address} is not the HTTP port of an NSQ broker" in shown.err
    assert f"{fleet.ours[0].http_address} is not the HTTP port of an nsqlookupd" in shown.err
