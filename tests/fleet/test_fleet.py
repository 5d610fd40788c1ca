"""The fleet itself: who is registered where, and what becomes of a broker that hangs, ends or refuses."""

import json
from pathlib import Path

import pytest

from cli.support import Run
from fleet.support import (
    Fleet,
    await_nodes,
    cli_of,
    hung,
    nodes,
    read_only_broker,
    refusing_broker,
    running_fleet,
    take_down,
)
from qcli.framework.errors import ExitCode

pytestmark = pytest.mark.interop


def ports(fleet: Fleet) -> set[int]:
    return {int(address.rpartition(":")[2]) for address in fleet.http_addresses}


def test_all_brokers_are_registered_at_both_services(fleet: Fleet, topic: str) -> None:
    assert [json.loads(lookupd.http("GET", "/info"))["version"] for lookupd in fleet.lookupds] == [
        json.loads(fleet.ours[0].http("GET", "/info"))["version"],
        "1.3.0",
    ]
    fleet.create(topic, "c")
    for lookupd in fleet.lookupds:
        here = {node["http_port"] for node in nodes(lookupd) if topic in node["topics"]}
        assert here == ports(fleet)


@pytest.mark.parametrize(
    "command",
    [
        ("peek", "{}"),
        ("dlq", "list"),
        ("topic", "settings", "{}"),
        ("tail", "{}", "--from=earliest", "-n", "1"),
    ],
)
def test_reading_notes_an_nsqd(run_here: Run, fleet: Fleet, topic: str, command: tuple[str, ...]) -> None:
    """It has no such request, so the result of the others is complete."""
    for broker in (fleet.ours[0], fleet.nsqd):
        broker.post("/pub", b"a", topic=topic)
    both = f"--nsqd-http-address={fleet.ours[0].http_address},{fleet.nsqd.http_address}"
    result = run_here(cli_of(fleet.ours[0]), *(each.format(topic) for each in command), both)
    assert result.code == 0, result.err
    assert f"Note: The broker at {fleet.nsqd.http_address} " in result.err
    assert "Error" not in result.err


def test_hung_broker_works_again(run_here: Run, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcli.broker.admin_client.REQUEST_TIMEOUT_S", 0.5)
    broker = fleet.ours[0]
    with hung(broker):
        silent = run_here(cli_of(broker), "stat")
    monkeypatch.undo()
    assert (silent.code, "does not answer" in silent.err) == (ExitCode.UNREACHABLE, True)
    assert run_here(cli_of(broker), "stat").code == 0


def test_broker_that_is_down_is_not_registered(tmp_path: Path, run_here: Run) -> None:
    with running_fleet(tmp_path, ours=1) as fleet:
        take_down(fleet.ours[0])
        for lookupd in fleet.lookupds:
            await_nodes(lookupd, 1)
        assert run_here(cli_of(fleet.ours[0]), "stat").code == ExitCode.UNREACHABLE


def test_brokers_that_refuse(tmp_path: Path, run_here: Run, topic: str) -> None:
    with refusing_broker(tmp_path / "refusing") as broker:
        refused = run_here(cli_of(broker), "stat")
    assert (refused.code, "requires a secret" in refused.err) == (1, True)
    with read_only_broker(tmp_path / "read-only") as broker:
        assert run_here(cli_of(broker), "stat").code == 0
        refused = run_here(cli_of(broker), "topic", "create", topic)
    assert (refused.code, "runs with --http-read-only" in refused.err) == (1, True)
