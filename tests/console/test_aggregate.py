"""Sums over brokers, in the shape of nsqadmin's API; and brokers of which there is a newer version."""

from typing import Any

import pytest

from trio_nsq.api.lookupd import Node
from trio_nsq.console.api.aggregate import sum_channels, sum_topics, topic_part
from trio_nsq.console.api.producers import Producer, merge, out_of_date

NOW_S = 1_700_000_100


def latency(*values: tuple[float, float], count: int = 1) -> dict[str, Any]:
    return {"count": count, "percentiles": [{"quantile": q, "value": v} for q, v in values]}


def channel(name: str, depth: int = 0, **fields: Any) -> dict[str, Any]:
    return {"channel_name": name, "depth": depth, "backend_depth": 1, "message_count": 10, **fields}


def part(node: str, *channels: dict[str, Any], host: str = "h", **fields: Any) -> dict[str, Any]:
    raw = {"topic_name": "t", "depth": 5, "backend_depth": 2, "message_count": 7, "channels": [*channels]}
    return topic_part({**raw, **fields}, node, host, NOW_S)


def test_sum_of_a_topic() -> None:
    found = sum_topics(
        "t", [part("b:1", channel("c", 3)), part("a:1", channel("c", 4, paused=True), channel("d"))]
    )
    assert [found[key] for key in ("node", "depth", "memory_depth", "backend_depth", "message_count")] == [
        "*",
        *(10, 6, 4, 14),
    ]
    assert [node["node"] for node in found["nodes"]] == ["a:1", "b:1"]
    assert found["paused"] is False
    of_c, of_d = found["channels"]
    assert (of_c["channel_name"], of_c["depth"], of_c["memory_depth"], of_c["paused"]) == ("c", 7, 5, True)
    assert [node["node"] for node in of_c["nodes"]] == ["a:1", "b:1"]
    assert [node["depth"] for node in of_c["nodes"]] == [4, 3]
    assert [node["node"] for node in of_d["nodes"]] == ["a:1"]


def test_parts_keep_their_own_channels() -> None:
    found = sum_topics("t", [part("a:1", channel("c", 3)), part("b:1", channel("c", 4))])
    assert [node["channels"][0]["depth"] for node in found["nodes"]] == [3, 4]


def test_no_parts() -> None:
    found = sum_topics("t", [])
    assert (found["node"], found["nodes"], found["channels"], found["e2e_processing_latency"]) == (
        "",
        None,
        None,
        None,
    )


def test_parts_are_in_the_order_of_their_machines() -> None:
    found = sum_topics("t", [part("a:1", host="z"), part("b:1", host="y")])
    assert [node["hostname"] for node in found["nodes"]] == ["y", "z"]


def test_latency_of_all_brokers() -> None:
    parts = [
        part("a:1", e2e_processing_latency=latency((0.99, 300), (0.5, 100), count=3)),
        part("b:1", e2e_processing_latency=latency((0.99, 700), count=1)),
    ]
    found = sum_topics("t", parts)["e2e_processing_latency"]
    assert {key: found[key] for key in ("count", "topic", "channel", "host")} == {
        "count": 4,
        "topic": "t",
        "channel": "",
        "host": "*",
    }
    assert found["percentiles"] == [
        {"quantile": 0.99, "count": 4, "min": 300, "max": 700, "average": 400},
        {"quantile": 0.5, "count": 3, "min": 100, "max": 100, "average": 100},
    ]


def test_latency_without_messages() -> None:
    found = sum_topics("t", [part("a:1", e2e_processing_latency=latency((0.5, 0), count=0)), part("b:1")])
    (percentile,) = found["e2e_processing_latency"]["percentiles"]
    assert percentile["average"] == 0


def test_clients_are_in_the_order_of_their_machines_and_have_their_broker() -> None:
    client = {"client_id": "x", "connect_ts": NOW_S - 90, "tls": True, "ready_count": 5}
    first = part("a:1", channel("c", clients=[{**client, "hostname": "z"}]))
    second = part("b:1", channel("c", clients=[{**client, "hostname": "y"}]))
    found = sum_channels("t", "c", [first["channels"][0], second["channels"][0]])
    assert [(each["hostname"], each["node"]) for each in found["clients"]] == [("y", "b:1"), ("z", "a:1")]
    assert found["clients"][0]["connected"] == 90_000_000_000
    assert found["clients"][0]["tls"] is True
    assert found["clients"][0]["ready_count"] == 5


@pytest.mark.parametrize(
    "raw",
    [
        {"topic_name": ["x"], "depth": "7", "backend_depth": 1.5, "paused": 1, "channels": {"a": 1}},
        {"depth": True, "message_count": 10**30, "channels": [1, None, {"channel_name": 5, "clients": [7]}]},
        {"e2e_processing_latency": {"count": "x", "percentiles": [3, {"quantile": None, "value": "y"}]}},
        {"e2e_processing_latency": 5},
    ],
)
def test_wrong_types_count_as_nothing(raw: dict[str, Any]) -> None:
    found = sum_topics("t", [topic_part(raw, "a:1", "h", NOW_S)])
    assert (found["depth"], found["message_count"], found["paused"]) == (0, 0, False)


def test_a_broker_of_two_services_is_there_once() -> None:
    first = Node("h", 4150, 4151, ("b", "a"), frozenset({"b"}), hostname="n", remote_address="1.1.1.1:5")
    second = Node("h", 4150, 4151, ("a",), hostname="n", remote_address="")
    (found,) = merge({"l1": [first], "l2": [second]}, lambda address: f"http://{address}")
    assert (found.address, found.node) == ("http://h:4151", "h:4151")
    assert found.topics == {"a": False, "b": True}
    assert found.remote_addresses == ("l1/1.1.1.1:5", "l2/N/A")
    assert found.remote_address == "1.1.1.1:5"


@pytest.mark.parametrize(
    ("versions", "old"),
    [
        ([("a", "1.3.0"), ("a", "1.2.1")], {1}),
        ([("a", "1.3.0"), ("b", "0.1.0")], set()),
        ([("a", "1.3.0-rc1"), ("a", "1.3.0"), ("a", "1.3.0+build")], {0}),
        ([("a", "1.10.0"), ("a", "1.9.9"), ("a", "unknown")], {1, 2}),
    ],
)
def test_brokers_are_compared_with_their_kind(versions: list[tuple[str, str]], old: set[int]) -> None:
    producers = [Producer(str(number), version=version) for number, (_, version) in enumerate(versions)]
    kinds = [kind for kind, _ in versions]
    assert out_of_date(producers, lambda each: kinds[int(each.address)]) == {str(number) for number in old}
