"""Commands on a fleet where a discovery service is hung or down."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from cli.support import Cli, Run
from fleet.support import Fleet, await_nodes, hung, nodes, service_hung
from interop.peers import Broker
from qcli.framework.errors import ExitCode
from soak import in_soak

pytestmark = pytest.mark.interop


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait a second for an answer."""
    for module in ("admin_client", "lookupd_client"):
        monkeypatch.setattr(f"qcli.broker.{module}.REQUEST_TIMEOUT_S", 1.0)


@dataclass(frozen=True)
class Broken:
    """A fleet in which one service does not answer.

    Attributes:
        cli: Runs commands with both services.
        failing: The address of the one that does not answer.
        well: The other one.
        topic: A topic that all brokers have.
    """

    fleet: Fleet
    cli: Cli
    failing: str
    well: Broker
    topic: str


@contextmanager
def breaking(fleet: Fleet, how: str, topic: str) -> Iterator[Broken]:
    """Break a service for a block."""
    fleet.create(topic)
    ours, theirs = fleet.lookupds
    if how == "down":
        yield Broken(fleet, lookupds(ours.http_address, "127.0.0.1:1"), "127.0.0.1:1", ours, topic)
        return
    silent, well = (ours, theirs) if how == "ours hangs" else (theirs, ours)
    with hung(silent):
        cli = lookupds(silent.http_address, well.http_address)
        yield Broken(fleet, cli, silent.http_address, well, topic)


HOW = ("ours hangs", "down", *in_soak("nsqlookupd hangs"))


def lookupds(*addresses: str) -> Cli:
    return Cli("", "", {"QCLI_LOOKUPD_HTTP_ADDRESS": ",".join(addresses)})


@pytest.mark.parametrize("how", HOW)
def test_the_other_service_is_enough(run_here: Run, fleet: Fleet, topic: str, how: str) -> None:
    with breaking(fleet, how, topic) as broken:
        for line in ("stat", "topic list", "topic pause TOPIC", "clients --interval 0"):
            result = run_here(broken.cli, *line.replace("TOPIC", topic).split())
            assert result.code == 0, result.err
            warning, *rest = result.err.splitlines()
            assert warning.startswith(f"Warning: nsqlookupd {broken.failing}: ")
            paused = [f"topic {topic} paused on {address}" for address in sorted(fleet.http_addresses)]
            expected = {
                "topic pause TOPIC": paused,
                "clients --interval 0": ["There are no connected clients."],
            }
            assert rest == expected.get(line, [])
    for lookupd in fleet.lookupds:  # as after `service_hung`
        await_nodes(lookupd, len(fleet.brokers))


@pytest.mark.parametrize("how", HOW)
def test_changes_in_services_are_partial(run_here: Run, own_fleet: Fleet, topic: str, how: str) -> None:
    with breaking(own_fleet, how, topic) as broken:
        hidden = own_fleet.ours[0].http_address
        tombstone = run_here(broken.cli, "tombstone", topic, hidden)
        (node,) = (each for each in nodes(broken.well) if hidden.endswith(f":{each['http_port']}"))
        deleted = run_here(broken.cli, "topic", "delete", topic, "--everywhere", "--yes")
    assert (tombstone.code, broken.failing in tombstone.err) == (ExitCode.PARTIAL, True), tombstone.err
    assert dict(zip(node["topics"], node["tombstones"], strict=True))[topic] is True
    assert (deleted.code, broken.failing in deleted.err) == (ExitCode.PARTIAL, True), deleted.err
    for address in own_fleet.http_addresses:
        assert f"topic {topic} deleted on {address}" in deleted.err
    assert f"topic {topic} deleted in nsqlookupd {broken.well.http_address}" in deleted.err


def test_no_service_answers(run_here: Run, fleet: Fleet) -> None:
    with service_hung(fleet, fleet.lookupds[0]):
        cli = lookupds(fleet.lookupds[0].http_address, "127.0.0.1:1")
        for line in (
            "stat",
            "topic list",
            "topic create t",
            "clients",
            "nodes",
            "tombstone t 127.0.0.1:4151",
        ):
            result = run_here(cli, *line.split())
            assert result.code == ExitCode.UNREACHABLE, result.err
            for reason in (
                f"{fleet.lookupds[0].http_address}: connected, but no answer within 1 s",
                "127.0.0.1:1: connection refused",
            ):
                assert reason in result.err
