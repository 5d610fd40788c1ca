"""Fifty viewers: all get the updates, each broker is polled once for all of them, and memory stays bounded."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from console.support import ask
from console.viewers import DEADLINE_S, LiveViewer, live_viewers, read_until
from interop.peers import Broker, RunningConsole, nsqd, qcli_admin, qcli_serve

pytestmark = pytest.mark.interop

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
VIEWERS = 50
ROUNDS = 600 if COMPLETE else 5
TOPICS = 300
MIB = 1024


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Broker]]:
    """A broker of ours and a real nsqd, whose log has a line for each request."""
    folder = tmp_path_factory.mktemp("viewers")
    with qcli_serve(folder / "ours") as ours, nsqd(folder / "nsqd") as theirs:
        for number in range(TOPICS):
            theirs.create(f"topic{number:03}", "channel")
        yield [ours, theirs]


@pytest.fixture
def console(brokers: list[Broker]) -> Iterator[RunningConsole]:
    """Their console, which polls often."""
    addresses = [f"--nsqd-http-address={broker.http_address}" for broker in brokers]
    with qcli_admin(*addresses, "--poll-interval=100ms") as running:
        # On a busy machine, an nsqd may answer later than the first poll waits.
        deadline = time.monotonic() + DEADLINE_S
        while ask(running.http_address, "GET", "/topics/topic007").status != 200:
            assert time.monotonic() < deadline, "the console has never had the topics of nsqd"
        yield running


def polls(broker: Broker) -> int:
    """Return how often an nsqd was asked for its statistics by a console."""
    return sum("GET /stats" in line for line in broker.log())


def memory_kib(console: RunningConsole) -> int:
    """Return the resident memory of the console's process."""
    status = Path(f"/proc/{console.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1])


def test_all_viewers_get_the_updates_of_one_poll(brokers: list[Broker], console: RunningConsole) -> None:
    theirs = brokers[1]
    with live_viewers(console.http_address, "/topics/topic007", VIEWERS) as viewers:
        read_until(viewers, lambda: all(viewer.updates for viewer in viewers), "every viewer got the page")
        before, rounds = polls(theirs), viewers[0].rounds
        for _ in range(7):
            theirs.post("/pub", b"x", topic="topic007")
        read_until(
            viewers,
            lambda: all(viewer.shows(">7<") for viewer in viewers),
            "every viewer got the new number",
        )
        read_until(viewers, lambda: viewers[0].rounds >= rounds + 10, "ten rounds")
        asked = polls(theirs) - before
        assert asked <= 3 * (
            viewers[0].rounds - rounds
        )  # a viewer may miss some; without sharing it would be 50


def test_viewer_that_does_not_read_delays_nobody(brokers: list[Broker], console: RunningConsole) -> None:
    with ExitStack() as stack:
        for _ in range(5):
            stuck = LiveViewer(console.http_address, "/?n=500", receive_buffer=4096)
            stack.callback(stuck.socket.close)
        with live_viewers(console.http_address, "/", 1) as viewers:
            for number in range(5):
                name = f"new{number}"
                brokers[0].create(name)
                read_until(viewers, partial(viewers[0].shows, name), f"the viewer got {name}")


def test_memory_is_bounded(brokers: list[Broker], console: RunningConsole) -> None:
    """A block is rendered once for all viewers, and old ones are dropped."""
    theirs = brokers[1]
    with live_viewers(console.http_address, "/", 1) as viewers:
        read_until(viewers, lambda: viewers[0].rounds >= 3, "three rounds")
        before = memory_kib(console)
    with live_viewers(console.http_address, "/", VIEWERS) as viewers:
        for number in range(ROUNDS):
            wanted = viewers[0].rounds + 1
            theirs.post("/pub", b"x", topic=f"topic{number % TOPICS:03}")
            read_until(viewers, partial(viewers[0].has_rounds, wanted), "another round")
        growth = memory_kib(console) - before
    assert growth < 64 * MIB


def test_viewers_that_leave_are_forgotten(brokers: list[Broker], console: RunningConsole) -> None:
    """More viewers than the console serves at once, one after the other."""
    for _ in range(6):
        with live_viewers(console.http_address, "/topics/topic001", VIEWERS) as viewers:
            read_until(
                viewers, lambda: all(viewer.updates for viewer in viewers), "every viewer got the page"
            )
