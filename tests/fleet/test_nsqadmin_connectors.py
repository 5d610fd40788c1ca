"""The real nsqadmin shows and steers `to-file`, `to-http` and `to-nsq` on a fleet as the programs that they replace."""

import http.client
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fleet.support import DEADLINE_S, Fleet, wait_until
from interop.connectors import publish, receiving, stop
from interop.peers import Child, nsqadmin

pytestmark = [pytest.mark.interop, pytest.mark.slow]

Ask = Callable[..., Any]
CHANNELS = {"nsq_to_file": "to-file", "nsq_to_http": "to-http", "nsq_to_nsq": "to-nsq"}
"""The default channel of each command, which is that of the program it replaces."""


@pytest.fixture(scope="module")
def ask(fleet: Fleet) -> Iterator[Ask]:
    """Sends a request to nsqadmin's API, and returns the JSON of the answer."""
    with nsqadmin(fleet.lookupd_addresses) as address:

        def send(path: str, action: str = "") -> Any:
            connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
            try:
                body = json.dumps({"action": action}) if action else None
                connection.request("POST" if action else "GET", f"/api/{path}", body)
                answer = connection.getresponse()
                found = json.loads(answer.read())
            finally:
                connection.close()
            assert (answer.status, found.get("message", "")) == (200, "")
            return found

        yield send


@pytest.fixture
def running(fleet: Fleet, topic: str, tmp_path: Path) -> Iterator[str]:
    """Run the three commands on all brokers of the fleet; return the topic."""
    fleet.create(topic, *CHANNELS)
    with ExitStack() as stack:
        receiver = stack.enter_context(receiving())
        flags = {
            "to-file": [f"--output-dir={tmp_path}", "--sync-interval=50ms"],
            "to-http": [f"--post={receiver.address}/"],
            "to-nsq": [
                f"--destination-nsqd-tcp-address={fleet.ours[0].tcp_address}",
                f"--destination-nsqd-http-address={fleet.ours[0].http_address}",
                f"--destination-topic={topic}.copy",
            ],
        }
        lookupds = [f"--lookupd-http-address={address}" for address in fleet.lookupd_addresses]
        children = []
        for name, more in flags.items():
            argv = [sys.executable, "-m", "qcli", name, f"--topic={topic}", *lookupds, *more]
            children.append(Child(argv, {"XDG_CONFIG_HOME": "/nowhere"}))
            stack.callback(children[-1].close)
        yield topic
        for child in children:
            assert stop(child) == 143, child.stderr.seen


def test_shown(fleet: Fleet, running: str, ask: Ask) -> None:
    for number, broker in enumerate(fleet.brokers, 1):
        publish(broker, running, [b"%d" % each for each in range(10 * number)])
    for channel in CHANNELS:
        wait_until(partial(is_idle, ask, running, channel), f"nsqadmin shows that {channel} is finished")
    topic = ask(f"topics/{running}")
    assert {channel["channel_name"] for channel in topic["channels"]} == set(CHANNELS)
    assert topic["message_count"] == 100
    for channel in CHANNELS:
        about = ask(f"topics/{running}/{channel}")
        assert {node["node"]: node["message_count"] for node in about["nodes"]} == {
            broker.http_address: 10 * number for number, broker in enumerate(fleet.brokers, 1)
        }
        assert (about["depth"], about["in_flight_count"], about["deferred_count"]) == (0, 0, 0)
        clients = {client["node"]: client["user_agent"] for client in about["clients"]}
        # A reader of logs is no client; to-http consumes channels of all brokers.
        consumed = fleet.brokers if channel == "nsq_to_http" else [fleet.nsqd]
        assert clients.keys() == {broker.http_address for broker in consumed}
        assert {agent.partition("/")[0] for agent in clients.values()} == {"qcli"}


def test_paused(fleet: Fleet, running: str, ask: Ask) -> None:
    """A pause of a channel in nsqadmin pauses the command; nsqadmin shows what waits for it."""
    for channel in CHANNELS:
        ask(f"topics/{running}/{channel}", "pause")
    for broker in fleet.brokers:
        publish(broker, running, [b"%d" % each for each in range(10)])
    for channel in CHANNELS:
        wait_until(partial(has_depth, ask, running, channel, 40), f"nsqadmin shows what waits for {channel}")
        assert ask(f"topics/{running}/{channel}")["paused"]
        ask(f"topics/{running}/{channel}", "unpause")
    for channel in CHANNELS:
        wait_until(partial(is_idle, ask, running, channel), f"nsqadmin shows that {channel} is finished")


def is_idle(ask: Ask, topic: str, channel: str) -> bool:
    about = ask(f"topics/{topic}/{channel}")
    waiting = ("depth", "in_flight_count", "deferred_count")
    return bool(about["message_count"] and not any(about[count] for count in waiting))


def has_depth(ask: Ask, topic: str, channel: str, depth: int) -> bool:
    return bool(ask(f"topics/{topic}/{channel}")["depth"] == depth)
