"""`qcli clients`: consumers and producers of our brokers and of nsqd."""

import csv
import io
import subprocess
from pathlib import Path

import pytest

from cli.support import Cli, Run
from fleet.support import Fleet, cli_of, hung, subscribed
from interop.peers import Broker, nsqd, qcli_serve
from interop.same.certificates import Certificates
from qcli.framework.errors import ExitCode

pytestmark = pytest.mark.interop

JSON = ("--format", "json", "--interval", "0")


def test_consumers_of_a_channel(run_here: Run, fleet: Fleet, topic: str) -> None:
    fleet.create(topic, "c", "other")
    for broker in (fleet.ours[0], fleet.nsqd):
        for _ in range(3):
            broker.post("/pub", b"x", topic=topic)
    with (
        subscribed(fleet.ours[0], topic, "c", ready=2) as here,
        subscribed(fleet.nsqd, topic, "c", ready=7) as there,
        subscribed(fleet.ours[1], topic, "other"),
    ):
        await_in_flight(fleet.ours[0], topic, 2)
        await_in_flight(fleet.nsqd, topic, 3)
        shown = run_here(fleet.discovering, "clients", f"{topic}/c", *JSON)
        assert (shown.code, shown.err) == (0, "")
        found = {record["broker"]: record for record in shown.records}
        for broker, address, in_flight, ready in (
            (fleet.ours[0], here, 2, 2),
            (fleet.nsqd, there, 3, 7),
        ):
            record = found.pop(broker.http_address)
            assert 0 <= record.pop("connected_s") < 60
            assert record.pop("connect_time") > 1_600_000_000
            assert record == {
                "kind": "consumer", "broker": broker.http_address, "topic": topic, "channel": "c",
                "address": address, "client_id": "tester", "hostname": "here", "agent": "tests/1",
                "tls": False, "tls_version": None, "compression": None, "identity": None,
                "in_flight": in_flight, "ready": ready, "messages": in_flight, "finished": 0, "requeued": 0,
                "rate": None,
            }  # fmt: skip
        assert found == {}
        of_topic = run_here(fleet.discovering, "clients", topic, *JSON).records
        assert [record["channel"] for record in of_topic] == ["c", "c", "other"]
        everywhere = run_here(fleet.discovering, "clients", *JSON).records
        of_both = [
            [r | {"connected_s": 0} for r in some if r["topic"] == topic] for some in (everywhere, of_topic)
        ]
        assert of_both[0] == of_both[1]
        nobody = run_here(cli_of(fleet.ours[1]), "clients", f"{topic}/c")
        assert (nobody.code, nobody.out) == (0, b"")
        assert nobody.err == f"There are no connected clients in {topic}/c.\n"


def await_in_flight(broker: Broker, topic: str, count: int) -> None:
    Cli(broker.tcp_address, broker.http_address).wait_until(
        f"{topic}/c", lambda record: bool(record["in_flight_count"] == count)
    )


def test_producers_and_rates(fleet: Fleet, topic: str) -> None:
    fleet.create(topic, "c")
    for broker in (fleet.ours[0], fleet.nsqd):
        cli = cli_of(broker)
        with (
            cli.running("tail", f"{topic}/c", stdout=subprocess.DEVNULL),
            cli.running("pub", topic, "--no-retry", "--rate", "800") as pub,
        ):
            pub.write(b"x\n" * 20_000)
            cli.wait_until(
                f"{topic}/c", lambda each: bool(each["client_count"] and each["message_count"] > 3000)
            )
            shown = cli("clients", topic, "--format", "json", "--interval", "1s")
            assert (shown.code, shown.err) == (0, "")
            consumer, producer = shown.records
            assert [consumer["kind"], consumer["channel"]] == ["consumer", "c"]
            assert [producer["kind"], producer["channel"]] == ["producer", None]
            assert producer["messages"] > 3000
            assert producer["agent"] == consumer["agent"] != ""
            assert 300 < producer["rate"] < 2000
            assert 300 < consumer["rate"] < 2000
            only_consumers = cli("clients", f"{topic}/c", *JSON).records
            assert [record["kind"] for record in only_consumers] == ["consumer"]
            other_topic = f"{topic}.other"
            broker.create(other_topic)
            assert cli("clients", other_topic, *JSON).records == []


def test_missing_topic_or_channel(run_here: Run, fleet: Fleet, topic: str) -> None:
    here, there = fleet.ours[0], fleet.nsqd
    both = cli_of(here, there)
    missing = run_here(both, "clients", topic, *JSON)
    where = f"{here.http_address} or {there.http_address}"
    assert (missing.code, f'Topic "{topic}" does not exist on {where}' in missing.err) == (1, True)
    here.create(topic, "c")
    assert run_here(both, "clients", f"{topic}/c", *JSON).code == 0
    there.create(topic, "d")
    missing = run_here(both, "clients", f"{topic}/e", *JSON)
    assert (missing.code, f'Channel "{topic}/e" does not exist on {where}' in missing.err) == (1, True)


def test_hung_broker_is_named(
    run_here: Run, fleet: Fleet, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcli.broker.admin_client.REQUEST_TIMEOUT_S", 1.0)
    fleet.create(topic, "c")
    with subscribed(fleet.ours[0], topic, "c"), hung(fleet.ours[1]):
        shown = run_here(fleet.discovering, "clients", topic, *JSON)
    assert shown.code == ExitCode.PARTIAL
    assert [record["broker"] for record in shown.records] == [fleet.ours[0].http_address]
    assert f"The broker at {fleet.ours[1].http_address} does not answer" in shown.err


def test_csv_and_table(run_here: Run, fleet: Fleet, topic: str) -> None:
    fleet.create(topic, "c")
    with (
        subscribed(fleet.ours[0], topic, "c", ready=3) as address,
        subscribed(fleet.nsqd, topic, "c") as other,
    ):
        text = run_here(
            fleet.discovering, "clients", topic, "--format", "csv", "--interval", "0"
        ).out.decode()
        keys = list(run_here(fleet.discovering, "clients", topic, *JSON).records[0])
        table = run_here(fleet.discovering, "clients", topic, "--interval", "10ms").out.decode()
        single = run_here(cli_of(fleet.ours[0]), "clients", f"{topic}/c", "--interval", "0").out.decode()
        with fleet.discovering.on_terminal("clients", topic, "--interval", "10ms", columns=80) as terminal:
            assert terminal.end() == 0
    heading, *rows = csv.reader(io.StringIO(text))
    assert heading == keys
    assert {(row[heading.index("address")], row[heading.index("ready")]) for row in rows} == {
        (address, "3"), (other, "0"),
    }  # fmt: skip
    lines = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert lines["consumer"] == [
        "channel",
        "agent",
        "broker",
        "tls",
        "in",
        "flight",
        "ready",
        "rate",
        "connected",
    ]
    assert lines[address][:7] == ["c", "tests/1", fleet.ours[0].http_address, "no", "0", "3", "0"]
    assert lines[other][:7] == ["c", "tests/1", fleet.nsqd.http_address, "no", "0", "0", "0"]
    assert single.splitlines()[0].split() == [
        "consumer",
        "agent",
        "tls",
        "in",
        "flight",
        "ready",
        "connected",
    ]
    assert max(map(len, terminal.shown.decode().splitlines())) <= 80


def test_tls_and_compression(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path)
    for run in (qcli_serve, nsqd):
        with run(tmp_path / run.__name__, *certificates.flags) as broker:
            broker.create("t", "c")
            cli = cli_of(broker)
            with cli.running("tail", "t/c", "--tls-root-ca-file", str(certificates.ca), "--snappy"):
                cli.wait_until("t/c", lambda record: bool(record["client_count"]))
                (record,) = cli("clients", "t/c", *JSON).records
                table = cli("clients", "t/c", "--interval", "0").out.decode()
        assert (record["tls"], record["tls_version"], record["compression"]) == (True, "TLS1.3", "snappy")
        assert "TLS1.3" in table.splitlines()[1].split()
