"""The real nsqadmin, field by field: `stat`, `nodes` and `clients` tell the same of a fleet."""

import http.client
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest

from cli.support import Run, fail_messages
from fleet.support import DEADLINE_S, Fleet, subscribed, wait_until
from interop.peers import Broker, nsqadmin

pytestmark = pytest.mark.interop

Admin = Callable[[str], Any]

COUNTS = (
    *("depth", "backend_depth", "in_flight_count", "deferred_count", "requeue_count", "timeout_count"),
    *("message_count", "client_count"),
)


@pytest.fixture(scope="module")
def admin(fleet: Fleet) -> Iterator[Admin]:
    """Returns the JSON of nsqadmin's API."""
    with nsqadmin(fleet.lookupd_addresses) as address:

        def get(path: str) -> Any:
            connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
            try:
                connection.request("GET", f"/api/{path}")
                answer = connection.getresponse()
                found = json.loads(answer.read())
            finally:
                connection.close()
            assert (answer.status, found.pop("message", "")) == (200, "")
            return found

        yield get


@pytest.fixture(scope="module")
def busy(fleet: Fleet) -> Iterator[str]:
    """A topic with messages in every state, other ones on each broker, and with consumers that take some of them."""
    topic = "busy"
    fleet.create(topic, "archive", "metrics", "paused")
    for number, broker in enumerate(fleet.brokers, 1):
        for each in range(20 * number):
            broker.post("/pub", b"%d" % each, topic=topic)
        broker.post("/pub", b"later", topic=topic, defer=3_600_000)
        wait_until(partial(_has, broker, topic, "message_count", 20 * number + 1), "all messages arrived")
        fail_messages(broker.tcp_address, topic, "metrics", number)
    fleet.ours[1].http("POST", "/channel/pause", topic=topic, channel="paused")
    fleet.nsqd.http("POST", "/topic/pause", topic=topic)
    with (
        subscribed(fleet.ours[0], topic, "archive", ready=5),
        subscribed(fleet.ours[0], topic, "archive", ready=2),
        subscribed(fleet.nsqd, topic, "archive", ready=7),
        subscribed(fleet.nsqd, topic, "metrics"),
    ):
        for broker, in_flight in ((fleet.ours[0], 7), (fleet.nsqd, 7)):
            wait_until(partial(_has, broker, topic, "in_flight_count", in_flight), "consumers have messages")
        yield topic
    fleet.nsqd.http("POST", "/topic/unpause", topic=topic)


def _has(broker: Broker, topic: str, name: str, count: int) -> bool:
    """Return whether the channel `archive` has this count."""
    return bool(broker.channel_stats(topic, "archive")[name] == count)


def test_nodes(run_here: Run, fleet: Fleet, admin: Admin, busy: str) -> None:
    hidden = fleet.ours[2].http_address
    fleet.create("hidden")  # not the busy topic: nsqadmin would leave out the broker in the other tests
    for lookupd in fleet.lookupds:
        lookupd.http("POST", "/topic/tombstone", topic="hidden", node=hidden)
    shown = run_here(fleet.discovering, "nodes", "--format", "json").records
    ours = {record["address"]: record for record in shown if record["kind"] == "broker"}
    theirs = {f"{node['broadcast_address']}:{node['http_port']}": node for node in admin("nodes")["nodes"]}
    assert ours.keys() == theirs.keys() == set(fleet.http_addresses)
    for address, node in theirs.items():
        record = ours[address]
        same = ("hostname", "broadcast_address", "tcp_port", "http_port", "version")
        assert {key: record[key] for key in same} == {key: node[key] for key in same}
        assert record["topics"] == len(node["topics"])
        # nsqadmin tells what one of the services says.
        assert {each["topic"] for each in node["topics"] if each["tombstoned"]} <= {*record["tombstones"]}
        assert ("hidden" in record["tombstones"]) == (address == hidden)
        services = [remote.partition("/")[0] for remote in node["remote_addresses"]]
        assert sorted(record["registered_at"]) == sorted(services)
        about = admin(f"nodes/{quote(address)}")
        assert record["messages"] == about["total_messages"]
        assert record["clients"] == about["total_clients"]
        topics = about["topics"]
        channels = [channel for topic in topics for channel in topic["channels"]]
        assert record["topics"] == len(topics)
        assert record["channels"] == len(channels)
        assert record["depth"] == sum(each["depth"] for each in [*topics, *channels])
        assert record["in_flight"] == sum(channel["in_flight_count"] for channel in channels)
        assert record["deferred"] == sum(channel["deferred_count"] for channel in channels)


def test_stat(run_here: Run, fleet: Fleet, admin: Admin, busy: str) -> None:
    shown = run_here(fleet.cli, "stat", busy, "--format", "json")
    assert (shown.code, shown.err) == (0, "")
    ours = {record["channel"]: record for record in shown.records}
    topic = admin(f"topics/{busy}")
    assert topic["topic_name"] == busy
    for name in ("depth", "backend_depth", "message_count", "paused"):
        assert ours[None][name] == topic[name], name
    channels = {channel["channel_name"]: channel for channel in topic["channels"]}
    assert ours.keys() == {None, *channels}
    for name, channel in channels.items():
        assert {key: ours[name][key] for key in COUNTS} == {key: channel[key] for key in COUNTS}
        assert ours[name]["paused"] == channel["paused"]
        alone = admin(f"topics/{busy}/{name}")
        assert {key: ours[name][key] for key in COUNTS} == {key: alone[key] for key in COUNTS}


def test_stat_of_each_broker(run_here: Run, fleet: Fleet, admin: Admin, busy: str) -> None:
    counters = admin("counter")["stats"]
    topic = admin(f"topics/{busy}")
    by_node = {
        (channel, node["node"]): node
        for channel in ("archive", "metrics", "paused")
        for node in admin(f"topics/{busy}/{channel}")["nodes"]
    }
    shown = run_here(fleet.discovering, "stat", busy, "--by-broker", "--format", "json")
    assert (shown.code, shown.err) == (0, "")
    records = [record for record in shown.records if record["broker"] is not None]
    assert len(by_node) == 3 * len(fleet.brokers)
    assert len(records) == 4 * len(fleet.brokers)
    for record in records:
        channel, address = record["channel"], record["broker"]
        if channel is None:
            (node,) = (each for each in topic["nodes"] if each["node"] == address)
            same: tuple[str, ...] = ("depth", "backend_depth", "message_count", "paused")
        else:
            node, same = by_node.pop((channel, address)), (*COUNTS, "paused")
            assert record["message_count"] == counters[f"{busy}:{channel}:{address}"]["message_count"]
        assert {key: record[key] for key in same} == {key: node[key] for key in same}
    assert by_node == {}


def test_clients(run_here: Run, fleet: Fleet, admin: Admin, busy: str) -> None:
    for channel, count in (("archive", 3), ("metrics", 1), ("paused", 0)):
        shown = run_here(
            fleet.discovering, "clients", f"{busy}/{channel}", "--format", "json", "--interval", "0"
        )
        said = "" if count else f"There are no connected clients in {busy}/{channel}.\n"
        assert (shown.code, shown.err) == (0, said)
        ours = {(record["broker"], record["address"]): record for record in shown.records}
        theirs = {
            (each["node"], each["remote_address"]): each
            for each in admin(f"topics/{busy}/{channel}")["clients"] or ()
        }
        assert ours.keys() == theirs.keys()
        assert len(ours) == count
        for key, client in theirs.items():
            record = ours[key]
            names = {
                "client_id": "client_id", "hostname": "hostname", "agent": "user_agent", "tls": "tls",
                "in_flight": "in_flight_count", "ready": "ready_count", "messages": "message_count",
                "finished": "finish_count", "requeued": "requeue_count", "connect_time": "connect_ts",
            }  # fmt: skip
            assert {name: record[name] for name in names} == {
                name: client[theirs] for name, theirs in names.items()
            }
            assert (record["compression"], record["identity"] or "") == (None, client["auth_identity"])
            assert (client["snappy"], client["deflate"]) == (False, False)
            # Nanoseconds; both round to seconds.
            assert abs(record["connected_s"] - client["connected"] / 1e9) <= 2
