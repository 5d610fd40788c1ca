"""Stock NSQ clients and a broker that drains."""

import http.client
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from interop.peers import CLIENTS, Broker, Child, Client, nsqadmin, qcli_lookupd, qcli_serve
from soak import in_soak

pytestmark = pytest.mark.interop

PATIENCE_S = 60

each_client = pytest.mark.parametrize("client", [pytest.param(client, id=client.name) for client in CLIENTS])


def drain(broker: Broker, value: bytes = b"true") -> None:
    broker.put("/config/draining", value)


def stored(broker: Broker, topic: str) -> list[str]:
    """Return the bodies in the log of a topic."""
    lines = broker.http("GET", "/topic/read", topic=topic).decode().splitlines()
    return [json.loads(line)["body"] for line in lines]


@each_client
@pytest.mark.parametrize("batch", [1, *in_soak(3)], ids=["PUB", "MPUB"])
def test_publish_fails_with_the_reason(tmp_path: Path, client: Client, batch: int) -> None:
    bodies = [b"1", b"2", b"3"]
    with qcli_serve(tmp_path / "d") as broker:
        client.publish(broker.tcp_address, "t", [b"before"])
        drain(broker)
        with pytest.raises(pytest.fail.Exception, match="DRAINING"):
            client.publish(broker.tcp_address, "t", bodies, batch=batch)
        assert stored(broker, "t") == ["before"]
        with client.subscribe(broker.tcp_address, "t", "c", 1) as subscriber:
            assert [delivery.body for delivery in subscriber.rest()] == [b"before"]
        drain(broker, b"false")
        client.publish(broker.tcp_address, "t", bodies, batch=batch)
        assert stored(broker, "t") == ["before", "1", "2", "3"]


@pytest.mark.skipif(importlib.util.find_spec("nsq") is None, reason="the Python package nsq is not installed")
def test_pynsq_goes_to_the_other_broker(tmp_path: Path) -> None:
    """Nothing is lost, nothing is stored twice, and the draining broker gets nothing more."""
    with qcli_serve(tmp_path / "one") as one, qcli_serve(tmp_path / "two") as two:
        addresses = [one.tcp_address, two.tcp_address]
        writer = Child([sys.executable, "-m", "interop.pynsq_writer", "--topic", "t", *addresses])
        try:
            bodies = [f"{number}" for number in range(300)]
            writer.stdin.write("".join(f"{body}\n" for body in bodies[:100]).encode())
            writer.stdin.flush()
            deadline = time.monotonic() + PATIENCE_S
            for _ in range(100):
                assert writer.stdout.next(deadline) is not None
            drain(one)
            before = stored(one, "t")
            writer.send(bodies[100:])
            assert writer.wait(PATIENCE_S) == 0
        finally:
            writer.close()
        assert before
        assert stored(one, "t") == before
        assert sorted([*before, *stored(two, "t")]) == sorted(bodies)
        refusals = [line for line in one.log() if "E_PUB_FAILED" in line]
        assert refusals  # pynsq connects again, and is refused again


def test_nsqs_tools_and_consumers_find_a_draining_broker(tmp_path: Path) -> None:
    """nsqadmin and go-nsq ignore the field `draining` in the answers of the broker and of `qcli lookupd`."""
    go_nsq = next(client for client in CLIENTS if client.name == "go-nsq")
    with (
        qcli_lookupd() as lookupd,
        qcli_serve(
            tmp_path / "d", f"--lookupd-tcp-address={lookupd.tcp_address}", "--broadcast-address=127.0.0.1"
        ) as broker,
        nsqadmin([lookupd.http_address]) as admin,
    ):
        broker.post("/mpub", b"1\n2", topic="t")
        broker.post("/pub", b"later", topic="t", defer=3_600_000)
        drain(broker)
        deadline = time.monotonic() + PATIENCE_S
        # The topic is registered by itself, and may come later.
        while not any(
            node.get("draining") and node["topics"]
            for node in get(lookupd.http_address, "/nodes")["producers"]
        ):
            assert time.monotonic() < deadline
        (node,) = get(admin, "/api/nodes")["nodes"]
        assert node["topics"] == [{"topic": "t", "tombstoned": False}]
        assert get(admin, "/api/topics/t")["depth"] == 2
        asking = [f"--lookupd={lookupd.http_address}"]
        with go_nsq.subscribe("", "t", "c", 2, connection=asking) as subscriber:
            assert {delivery.body for delivery in subscriber.rest()} == {b"1", b"2"}
        found = get(admin, "/api/topics/t/c")
        assert (found["depth"], found["deferred_count"]) == (0, 1)


def get(address: str, path: str) -> Any:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200
        return json.loads(answer.read())
    finally:
        connection.close()
