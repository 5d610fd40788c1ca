"""Check what go-nsq and pynsq do when one of their brokers begins to drain, as docs/how-to/drain-a-broker.md says."""

import json
import time
from pathlib import Path

import pytest

from interop.peers import CLIENTS, Broker, Client, qcli_serve

pytestmark = [pytest.mark.slow, pytest.mark.interop]

PATIENCE_S = 10.0
"""Below the time limits of a publish in both clients; without other load a publish takes milliseconds."""
PUBLISHERS = [client for client in CLIENTS if client.name in ("go-nsq", "pynsq")]


def stored(broker: Broker) -> list[str]:
    lines = broker.http("GET", "/topic/read", topic="t").decode().splitlines()
    return [json.loads(line)["body"] for line in lines]


@pytest.mark.parametrize("client", PUBLISHERS, ids=lambda client: client.name)
def test_publishes_go_on_to_the_other_broker(client: Client, tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "1") as one, qcli_serve(tmp_path / "2") as two:
        brokers = [one, two]
        for broker in brokers:
            broker.create("t")
        with client.fail_over([broker.tcp_address for broker in brokers], "t") as publisher:
            for number in range(20):
                assert publisher.publish(b"before %d" % number) == []
            draining = max(brokers, key=lambda broker: len(stored(broker)))
            draining.put("/config/draining", b"true")
            kept = stored(draining)
            failures, longest_s = [], 0.0
            for number in range(100):
                begun_at = time.monotonic()
                failures += publisher.publish(b"after %d" % number)
                longest_s = max(longest_s, time.monotonic() - begun_at)
        print(f"{client.name}: longest publish {longest_s:.3f} s; failures: {failures}")
        assert stored(draining) == kept
        bodies = [body for broker in brokers for body in stored(broker)]
        assert sorted(bodies) == sorted(
            f"{when} {n}" for when, count in (("before", 20), ("after", 100)) for n in range(count)
        )
        assert "E_PUB_FAILED PUB failed DRAINING" in failures[0]
        assert longest_s < PATIENCE_S
