"""The page of health: what is wrong with each broker and discovery service, disks and memory."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from console.health_support import broker, health
from console.support import WebServer, qcli_admin
from fleet.support import Fleet, hung, running_fleet, wait_until
from trio_nsq.api.lookupd import Node
from trio_nsq.console.fleet.health import health_of
from trio_nsq.fleet.snapshot import BrokerState, LookupdState, Snapshot
from trio_nsq.fleet.stats import parse_topics

NODE = Node("host", 1, 2)


def disk(used: Any, free: Any, total: Any) -> dict[str, Any]:
    return {"disk": {"used_bytes": used, "free_bytes": free, "total_bytes": total}}


def test_a_healthy_broker() -> None:
    found = health(broker(stats=disk(10, 50, 100)))
    assert found.problems == ()
    assert found.disk is not None
    assert (found.disk.used_bytes, found.disk.free_share) == (10, 0.5)
    assert found.memory_bytes == 5


def test_problems() -> None:
    assert health(broker(error="Connection refused")).problems == ("It does not answer: Connection refused.",)
    assert health(broker(answered_at_s=0.0)).problems == ("It does not answer: it was not asked yet.",)
    sick = broker(stats={"health": "NOK - disk full"})
    assert health(sick).problems == ("It reports: disk full.",)
    assert health(broker(stats=disk(1, 9, 100))).problems == ("Its disk is almost full: 9.0% is free.",)


@pytest.mark.parametrize(
    ("archive", "problems"),
    [
        ({"state": "archiving", "error": "", "lag_s": 59.9}, []),
        ({"state": "archiving", "error": "no route", "lag_s": 3.0}, []),  # it is tried again
        ({"state": "archiving", "error": "", "lag_s": 3600}, ["Its archive is 3,600 s behind."]),
        (
            {"state": "archiving", "error": "No route.", "lag_s": 61.0},
            ["Its archive is not written, and is 61 s behind: No route."],
        ),
        (
            {"state": "waiting", "error": "b writes to it", "lag_s": 0.0},
            ["Its archive is not written, and is 0 s behind: b writes to it."],
        ),
        ({"state": "copying", "error": "", "lag_s": 0.0}, []),
        (
            {"state": "archiving", "error": "", "lag_s": 0.0, "conflicts": 2},
            [
                "Its archive has other messages under the names of 2 segments, which stay on the disk: the broker was "
                "restored from an older state, and needs another archive."
            ],
        ),
        ({"state": [], "error": None, "lag_s": float("inf")}, []),
        ([], []),
    ],
)
def test_archives(archive: Any, problems: list[str]) -> None:
    state = broker(stats={"archive": archive})
    assert list(health(state).problems) == problems
    assert list(health(state, details=False).problems) == ["Its archive is late."] * len(problems)


def test_registrations() -> None:
    lookupds = (LookupdState("l1"), LookupdState("l2"), LookupdState("l3", error="gone"))
    here = broker(registrations={"l1": NODE})
    assert health(here, *lookupds).problems == ("It is not registered with l2.",)
    draining = broker(registrations={"l1": NODE}, info={"draining": True})
    assert health(draining, *lookupds).problems == ()


@pytest.mark.parametrize(
    "stats",
    [{}, {"disk": 5}, {"disk": {}}, disk(1, None, None), disk(1, None, 9), disk(1, 2, "x"), disk(1, 2, 0)],
)
def test_an_unknown_disk(stats: dict[str, Any]) -> None:
    assert health(broker(stats=stats)).disk is None


def test_unavailable_topics_have_reasons() -> None:
    topics = parse_topics({"topics": [{"topic_name": "a", "unavailable": "no file"}, {"topic_name": "b"}]})
    assert health(broker(topics=topics)).unavailable == {"a": "no file"}


def test_only_readers_of_all_topics_get_reasons_and_disks() -> None:
    sick = broker(stats={"health": "NOK - topic secret"} | disk(1, 1, 100))
    found = health(sick, details=False)
    assert found.problems == ("It reports a problem.",)
    assert found.disk is None


def test_those_with_problems_come_first() -> None:
    states = {name: BrokerState(name, answered_at_s=1.0) for name in ("a", "b", "c")}
    states["b"] = BrokerState("b", error="gone")
    assert [each.state.address for each in health_of(Snapshot(1, 1.0, states), {})] == ["b", "a", "c"]


# ---------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet with its data in memory, because the disk of a machine that tests may really be almost full."""
    memory = Path("/dev/shm")
    folder = memory if memory.is_dir() else tmp_path_factory.mktemp("fleet")
    with (
        tempfile.TemporaryDirectory(dir=folder) as data,
        running_fleet(Path(data), "--max-bytes-per-file=1048576", ours=2) as running,
    ):
        running.create("t", "c")
        yield running


@pytest.fixture(scope="module")
def site(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    flags = [f"--lookupd-http-address={address}" for address in fleet.lookupd_addresses]
    with qcli_admin(
        tmp_path_factory.mktemp("console"), "--poll-interval=50ms", "--http-client-request-timeout=2s", *flags
    ) as running:
        yield running


def page(site: WebServer) -> str:
    answer = site.ask("GET", "/health")
    assert answer.status == 200
    return answer.body.decode()


def row(site: WebServer, address: str) -> str:
    """Return the row of a broker or service, without tags."""
    found = re.search(rf'<tr data-key="{re.escape(address)}".*?</tr>', page(site), re.DOTALL)
    return re.sub("<[^>]*>", " ", found[0]) if found else ""


def test_all_is_well(site: WebServer, fleet: Fleet) -> None:
    wait_until(lambda: "All brokers and discovery services are healthy." in page(site), "all are healthy")
    ours = row(site, fleet.ours[0].http_address)
    assert re.search(r"OK .* % of [0-9.]+ [KMGT]iB used .* MiB", ours, re.DOTALL)
    nsqd = row(site, fleet.nsqd.http_address)
    assert "nsqd does not tell" in nsqd
    assert "MiB" in nsqd
    for lookupd in fleet.lookupds:
        assert re.search(r"OK\s+3\s", row(site, lookupd.http_address))


def test_a_broker_that_hangs(site: WebServer, fleet: Fleet) -> None:
    address = fleet.ours[1].http_address
    with hung(fleet.ours[1]):
        wait_until(lambda: "unresponsive" in row(site, address), "the broker is unresponsive")
        assert "OK" in row(site, fleet.ours[0].http_address)
        assert "1 server has a problem." in page(site)
    wait_until(lambda: "OK" in row(site, address), "the broker is back")


def test_draining(site: WebServer, fleet: Fleet) -> None:
    one = fleet.ours[0]
    fleet.cli("drain", "--nsqd-http-address", one.http_address, "--timeout", "1ms")
    wait_until(lambda: "draining" in row(site, one.http_address), "the broker drains")
    fleet.cli("drain", "--nsqd-http-address", one.http_address, "--stop")
    wait_until(lambda: "draining" not in row(site, one.http_address), "the broker accepts again")


def test_a_service_that_hangs(site: WebServer, fleet: Fleet) -> None:
    """The last test: nsqd registers again with a service that hung only after 15 s."""
    address = fleet.lookupds[0].http_address
    with hung(fleet.lookupds[0]):
        wait_until(lambda: "unresponsive" in row(site, address), "the service is unresponsive")
