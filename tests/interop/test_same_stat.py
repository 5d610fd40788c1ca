"""`qcli stat` shows the same figures as nsq_stat: of a channel of nsqd, of our broker, and of both together."""

import csv
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.support import Cli
from fleet.support import cli_of, lookupd_flags, subscribed, together, wait_until
from interop.connectors import drain, publish
from interop.peers import (
    CLIENT_DEADLINE_S,
    CLIENTS,
    Broker,
    Child,
    nsq_program,
    nsqd,
    qcli_lookupd,
    qcli_serve,
)

pytestmark = pytest.mark.interop

INTERVAL_S = 0.125
"""A power of two: nsq_stat divides by it, and drops fractions."""
TOPIC, CHANNEL = "topic", "channel"
COLUMNS = ("total", "inflt", "def", "req", "t-o", "msgs", "clients")
"""The columns of nsq_stat that are compared, apart from rates, and ..."""
RATES = ("ingress", "egress")
DEPTHS = ("total", "mem", "disk")
OURS = (
    *("depth", "in_flight_count", "deferred_count", "requeue_count", "timeout_count", "message_count"),
    "client_count",
)
"""... those of `qcli stat` with the same figures."""


@pytest.fixture(scope="module")
def lookupd() -> Iterator[Broker]:
    with qcli_lookupd() as running:
        yield running


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory, lookupd: Broker) -> Iterator[list[Broker]]:
    """A broker of ours and an nsqd, with messages of one channel in every state."""
    folder = tmp_path_factory.mktemp("stat")
    flags = (*lookupd_flags([lookupd]), "--msg-timeout=15m")
    starts: list[Callable[[], Any]] = [
        lambda: qcli_serve(folder / "ours", *flags),
        lambda: nsqd(folder / "nsqd", *flags, "--node-id=1000", "--mem-queue-size=20"),
    ]
    with together(starts) as running:
        for number, broker in enumerate(running, 1):
            broker.create(TOPIC, CHANNEL)
            publish(broker, TOPIC, [b"%d" % each for each in range(50 * number)])
            broker.post("/pub", b"later", topic=TOPIC, defer=3_600_000)
            requeue_some(broker, number)
        with subscribed(running[0], TOPIC, CHANNEL, ready=5), subscribed(running[1], TOPIC, CHANNEL, ready=7):
            for broker, in_flight in zip(running, (5, 7), strict=True):
                wait_until(partial(has_in_flight, broker, in_flight), "the consumer has messages")
            wait_until(lambda: registered(lookupd) == 2, "the discovery service knows both brokers")
            yield running


def requeue_some(broker: Broker, count: int) -> None:
    """Requeue messages, and finish this number of them."""
    go_nsq = CLIENTS[0]
    with go_nsq.subscribe(
        broker.tcp_address, TOPIC, CHANNEL, count, max_in_flight=1, requeue_first=True
    ) as subscriber:
        subscriber.rest()


def has_in_flight(broker: Broker, count: int) -> bool:
    return bool(broker.channel_stats(TOPIC, CHANNEL)["in_flight_count"] == count)


def registered(lookupd: Broker) -> int:
    return len(json.loads(lookupd.http("GET", "/lookup", topic=TOPIC))["producers"])


def nsq_stat(*flags: str, count: int | None = 1) -> Child:
    argv = [str(nsq_program("nsq_stat")), f"--topic={TOPIC}", f"--channel={CHANNEL}"]
    return Child([*argv, f"--interval={INTERVAL_S}s", *flags, *([f"--count={count}"] if count else [])])


def figures(lines: list[str]) -> list[dict[str, int]]:
    """Return the figures of nsq_stat by their headings."""
    headings = lines[1].replace("|", " ").split()
    assert headings == [*RATES, *DEPTHS, *COLUMNS[1:]]
    rows = [line.replace("|", " ").split() for line in lines if "rate" not in line and "ingress" not in line]
    return [dict(zip(headings, map(int, row), strict=True)) for row in rows]


def last_of_nsq_stat(*flags: str) -> dict[str, int]:
    child = nsq_stat(*flags)
    try:
        assert child.wait(CLIENT_DEADLINE_S) == 0
    finally:
        child.close()
    (found,) = figures(child.stdout.seen)
    return found


def last_of_ours(cli: Cli) -> dict[str, str]:
    shown = cli("stat", f"{TOPIC}/{CHANNEL}", "--format=csv", "--count=2", f"--interval={INTERVAL_S}s")
    assert (shown.code, shown.err) == (0, "")
    *_, found = csv.DictReader(shown.out.decode().splitlines())
    return found


@pytest.mark.parametrize("which", ["ours", "nsqd", "both", "discovered"])
def test_same_figures(brokers: list[Broker], lookupd: Broker, which: str) -> None:
    asked = {"ours": brokers[:1], "nsqd": brokers[1:]}.get(which, brokers)
    if which == "discovered":
        flags = [f"--lookupd-http-address={lookupd.http_address}"]
        cli = Cli("", "", {"QCLI_LOOKUPD_HTTP_ADDRESS": lookupd.http_address})
    else:
        flags = [f"--nsqd-http-address={broker.http_address}" for broker in asked]
        cli = cli_of(*asked)
    theirs, ours = last_of_nsq_stat(*flags), last_of_ours(cli)
    assert {name: theirs[name] for name in COLUMNS} == {
        name: int(ours[our_name]) for name, our_name in zip(COLUMNS, OURS, strict=True)
    }
    assert theirs["disk"] == int(ours["backend_depth"])
    assert theirs["mem"] == int(ours["depth"]) - int(ours["backend_depth"])
    assert [theirs[name] for name in RATES] == [float(ours[f"{name}_rate"]) for name in RATES] == [0, 0]
    messages = {"ours": 51, "nsqd": 101}.get(which, 152)
    assert theirs["msgs"] == messages  # the comparison is not one of zeros
    assert min(theirs[name] for name in ("inflt", "def", "req", "clients")) > 0


def test_same_rates(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        broker.create(TOPIC, CHANNEL)
        theirs = nsq_stat(f"--nsqd-http-address={broker.http_address}", count=None)
        periodic = ("--format=csv", "--count=0", f"--interval={INTERVAL_S}s")
        try:
            with cli_of(broker).running("stat", f"{TOPIC}/{CHANNEL}", *periodic) as ours:
                headings = ours.read_line().decode().rstrip("\n")
                lines = [ours.read_line().decode()]
                wait_until(lambda: len(theirs.stdout.seen) >= 2, "nsq_stat has asked once")
                publish(broker, TOPIC, [b"x"] * 300)
                drain(broker, TOPIC, CHANNEL, 200, max_in_flight=1)  # not one more
                wait_until(lambda: counted(theirs) == [300, 200], "nsq_stat has told of all messages")

                def has_told() -> bool:
                    lines.append(ours.read_line().decode())
                    return bool(told(headings, lines) == pytest.approx([300, 200], rel=0.1))

                wait_until(has_told, "qcli stat has told of all messages")
        finally:
            theirs.close()


def counted(child: Child) -> list[int]:
    """Return how many messages came and went while nsq_stat ran."""
    found = figures(child.stdout.seen)
    return [round(sum(row[name] for row in found) * INTERVAL_S) for name in RATES]


def told(headings: str, lines: list[str]) -> list[float]:
    """Return about how many messages came and went while `qcli stat` ran: it rounds rates and times."""
    rows = list(csv.DictReader([headings, *lines]))
    pairs = [(row, float(row["time"]) - float(before["time"])) for before, row in itertools.pairwise(rows)]
    return [sum(float(row[f"{name}_rate"]) * s for row, s in pairs) for name in RATES]
