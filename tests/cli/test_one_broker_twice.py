"""A broker that is named several times, by other spellings of its address, is one broker."""

import pytest

from cli.support import Cli, Run, lines, only_ours
from interop.peers import Broker

BODIES = [b"%d" % number for number in range(5)]


def spellings(address: str) -> str:
    """Return an address of the machine itself in all its forms, as the value of one option."""
    port = address.rpartition(":")[2]
    return ",".join(f"{host}:{port}" for host in ("localhost", "127.0.0.1", "[::ffff:127.0.0.1]"))


@pytest.fixture
def cli(broker: Broker) -> Cli:
    return Cli(spellings(broker.tcp_address), spellings(broker.http_address))


def test_stat_counts_it_once(run_here: Run, cli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    broker.post("/pub", b"x", topic=topic)
    found = run_here(cli, "stat", topic, "--format", "json")
    assert found.code == 0, found.err
    assert [each["depth"] for each in found.records if each.get("channel") == "c"] == [1]


@only_ours
def test_its_log_is_read_and_replayed_once(run_here: Run, cli: Cli, broker: Broker, topic: str) -> None:
    for body in BODIES:
        broker.post("/pub", body, topic=topic)
    read = run_here(cli, "tail", topic, "--from", "earliest", "--to", "latest")
    assert (read.code, read.out) == (0, lines(BODIES)), read.err
    again = f"{topic}.again"
    replayed = run_here(cli, "replay", topic, again)
    assert replayed.code == 0, replayed.err
    # A sequence is a position of one broker.
    read = run_here(cli, "tail", again, "--from", "0", "--to", "latest")
    assert (read.code, read.out) == (0, lines(BODIES)), read.err


@pytest.mark.parametrize("http", ["given", "by the next port"])
def test_pub_publishes_to_it_once(
    run_here: Run, cli: Cli, nowhere: Cli, broker: Broker, topic: str, http: str
) -> None:
    broker.create(topic, "c")
    args = ["--nsqd-tcp-address", spellings(broker.tcp_address), "--strategy", "all"]
    published = run_here(cli if http == "given" else nowhere, "pub", topic, *args, stdin=lines(BODIES))
    assert published.code == 0, published.err
    assert broker.channel_stats(topic, "c")["depth"] == len(BODIES)


def test_changes_are_reported_once(run_here: Run, cli: Cli, broker: Broker, topic: str) -> None:
    created = run_here(cli, "topic", "create", topic)
    assert created.code == 0
    assert len(created.err.splitlines()) == 1, created.err
