"""`pub` and `tail` over TCP on a fleet where one broker is hung, one is down and one refuses."""

import json
import time
from collections.abc import Iterator
from functools import partial

import pytest

from cli.support import Cli, lines
from fleet.support import SECRET, Wreck, cli_of, wait_until, wrecked_fleet
from interop.peers import Broker
from qcli.framework.errors import ExitCode
from soak import in_soak

pytestmark = [pytest.mark.interop, pytest.mark.slow]

BODIES = [b"%d" % number for number in range(100)]
HANDSHAKE_S = 10.0
FIRST_ANSWER_S = 35.0
"""How long a client waits for the answer to its handshake."""
PATIENCE_S = 45.0
"""For the start of the command's process, on a machine that is busy."""


@pytest.fixture(scope="module")
def wreck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wreck]:
    with wrecked_fleet(tmp_path_factory.mktemp("wreck"), lambda brokers: None) as running:
        yield running


def without_refusing(wreck: Wreck) -> Cli:
    return cli_of(wreck.well, wreck.nsqd, wreck.silent, wreck.down)


def count(broker: Broker, topic: str) -> int:
    return int(broker.channel_stats(topic, "c")["message_count"])


def test_tail_receives_from_the_brokers_that_work(wreck: Wreck, topic: str) -> None:
    for broker in (wreck.well, wreck.nsqd):
        broker.create(topic, "c")
        broker.post("/mpub", b"\n".join(BODIES), topic=topic)
    began = time.monotonic()
    received = without_refusing(wreck)("tail", f"{topic}/c", "-n", "200")
    assert time.monotonic() - began < PATIENCE_S
    assert (received.code, sorted(received.out.split())) == (0, sorted(BODIES * 2))
    assert f"Warning: could not connect to {wreck.down.tcp_address}: Connection refused" in received.err


def test_tail_ends_if_a_broker_needs_a_secret(wreck: Wreck, topic: str) -> None:
    for broker in (wreck.well, wreck.nsqd, wreck.refusing):
        broker.create(topic, "c", "of-refused")
        broker.post("/pub", b"x", topic=topic)
    # From a channel of its own: it may consume messages of the other broker before it is refused.
    refused = cli_of(wreck.well, wreck.refusing)("tail", f"{topic}/of-refused", "-n", "3")
    assert refused.code == ExitCode.FAILURE
    assert f"Error: The broker at {wreck.refusing.tcp_address} requires AUTH." in refused.err
    allowed = wreck.cli("tail", f"{topic}/c", "-n", "3", "--auth-secret", SECRET)
    assert (allowed.code, allowed.out) == (0, lines([b"x"] * 3)), allowed.err


def test_pub_to_all_publishes_nothing(wreck: Wreck, topic: str) -> None:
    for broker in (wreck.well, wreck.nsqd):
        broker.create(topic, "c")
    began = time.monotonic()
    refused = without_refusing(wreck)("pub", topic, stdin=lines(BODIES))
    assert time.monotonic() - began < FIRST_ANSWER_S + PATIENCE_S
    assert refused.code == ExitCode.UNREACHABLE
    for text in (
        f"No broker answers at {wreck.down.tcp_address}: connection refused.",
        f"The broker at {wreck.silent.tcp_address} does not answer: connected, but no answer within 35 s.",
        "Nothing was published to any broker.",
    ):
        assert text in refused.err
    assert (count(wreck.well, topic), count(wreck.nsqd, topic)) == (0, 0)


@pytest.mark.parametrize(
    ("by_discovery", "strategy"),
    [(False, "round-robin"), (True, "hash"), *in_soak((False, "hash"), (True, "round-robin"))],
)
def test_pub_to_one_of_the_brokers_loses_nothing(
    wreck: Wreck, topic: str, strategy: str, by_discovery: bool
) -> None:
    working = [wreck.well, wreck.nsqd, *([wreck.refusing] if by_discovery else [])]
    for broker in working:
        broker.create(topic, "c")
    cli = wreck.discovering if by_discovery else without_refusing(wreck)
    if by_discovery:
        cli = Cli("", "", cli.env)
    began = time.monotonic()
    published = cli("pub", topic, "--strategy", strategy, "--auth-secret", SECRET, stdin=lines(BODIES))
    assert time.monotonic() - began < HANDSHAKE_S + PATIENCE_S
    assert published.code == 0, published.err
    assert f"Warning: the broker at {wreck.silent.tcp_address} is unreachable" in published.err
    bodies: list[bytes] = []
    for broker in working:
        # nsqd moves messages to the channel a moment later.
        wait_until(partial(_is_distributed, broker, topic), "all messages are in the channel")
        if depth := count(broker, topic):
            received = cli_of(broker)("tail", f"{topic}/c", "-n", str(depth), "--auth-secret", SECRET)
            bodies += received.out.split()
    assert sorted(bodies) == sorted(BODIES)


def _is_distributed(broker: Broker, topic: str) -> bool:
    (stats,) = json.loads(broker.http("GET", "/stats", format="json", topic=topic))["topics"]
    return bool(stats["depth"] == 0)


def test_pub_with_a_secret_missing_publishes_nothing(wreck: Wreck, topic: str) -> None:
    for broker in (wreck.well, wreck.refusing):
        broker.create(topic, "c")
    refused = cli_of(wreck.well, wreck.refusing)("pub", topic, stdin=lines(BODIES))
    assert refused.code == ExitCode.FAILURE
    assert f"The broker at {wreck.refusing.tcp_address} requires AUTH." in refused.err
    assert refused.err.endswith("Nothing was published to any broker.\n")
    assert (count(wreck.well, topic), count(wreck.refusing, topic)) == (0, 0)
