"""nsqadmin and the console while brokers and discovery services are down or hang: the same statuses and numbers."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from console.support import Answer, ask
from fleet.support import Fleet, hung, running_fleet, take_down, wait_until
from interop.peers import nsqadmin, qcli_admin

pytestmark = pytest.mark.interop

TIMEOUT = "--http-client-request-timeout=400ms"
READS = ("/api/topics", "/api/topics/busy", "/api/topics/busy/a", "/api/nodes", "/api/counter")
CHANGES = (
    ("POST", "/api/topics/busy", {"action": "pause"}),
    ("POST", "/api/topics/busy/a", {"action": "unpause"}),
    ("POST", "/api/topics/busy/a", {"action": "empty"}),
)


@dataclass(frozen=True)
class Pair:
    """nsqadmin and ours: those that ask discovery services, and those that have the addresses of the brokers."""

    fleet: Fleet
    discovering: tuple[str, str]
    direct: tuple[str, str]

    def both(
        self, method: str, path: str, body: object = None, *, direct: bool = False
    ) -> tuple[Answer, Answer]:
        """Send a request to both."""
        content = None if body is None else json.dumps(body).encode()
        with ThreadPoolExecutor(2) as threads:
            addresses = self.direct if direct else self.discovering
            theirs, ours = (threads.submit(ask, address, method, path, content) for address in addresses)
            return theirs.result(), ours.result()


@contextmanager
def pair(folder: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        fleet = stack.enter_context(running_fleet(folder, ours=2))
        for name in ("busy", "other"):
            fleet.create(name, "a", "b")
        lookupds = [f"--lookupd-http-address={address}" for address in fleet.lookupd_addresses]
        brokers = [f"--nsqd-http-address={address}" for address in fleet.http_addresses]
        consoles = [
            (
                stack.enter_context(nsqadmin([], *flags, TIMEOUT)),
                stack.enter_context(qcli_admin(*flags, TIMEOUT, "--poll-interval=100ms")).http_address,
            )
            for flags in (lookupds, brokers)
        ]
        yield Pair(fleet, *consoles)


@pytest.fixture(scope="module")
def wounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """For faults that end with a block."""
    with pair(tmp_path_factory.mktemp("fleet")) as running:
        yield running


def kind(answer: Answer) -> tuple[int, str]:
    """Return the status, and how the message begins."""
    message = answer.json()["message"]
    begin = "WARNING: " if message.startswith("WARNING: ") else message.partition(": ")[0]
    return answer.status, begin


def assert_same(pair: Pair, *, direct: bool = False, changes: bool = True) -> None:
    """Check that both answer all requests alike. A server that is slow by chance counts as one that hangs."""
    reads: list[tuple[str, str, object]] = [("GET", path, None) for path in READS]
    for request in [*reads, *(CHANGES if changes else ())]:
        wait_until(partial(_same, pair, request, direct), f"the same answers: {request}")


def _same(pair: Pair, request: tuple[str, str, object], direct: bool) -> bool:
    return alike(*pair.both(*request, direct=direct))


def alike(theirs: Answer, ours: Answer) -> bool:
    """Whether two answers have the same status, begin of the message, brokers and numbers."""
    if kind(theirs) != kind(ours) or theirs.status != 200:
        return kind(theirs) == kind(ours)
    one, other = theirs.json(), ours.json()
    if "message_count" in one:
        parts = [
            [each["message_count"], sorted(node["node"] for node in each["nodes"])] for each in (one, other)
        ]
    else:
        parts = [[len(value) for key, value in each.items() if key != "message"] for each in (one, other)]
    return parts[0] == parts[1]


Fault = Callable[[Fleet], AbstractContextManager[None]]


@pytest.mark.parametrize(
    ("fault", "direct"),
    [
        pytest.param(lambda fleet: hung(fleet.ours[0]), False, id="a broker hangs"),
        pytest.param(
            lambda fleet: hung(fleet.ours[0]), True, id="a broker hangs, without discovery services"
        ),
        pytest.param(lambda fleet: hung(fleet.nsqd), False, id="nsqd hangs"),
        pytest.param(lambda fleet: hung(fleet.lookupds[1]), False, id="a discovery service hangs"),
    ],
)
def test_while_a_server_hangs(wounded: Pair, fault: Fault, direct: bool) -> None:
    with fault(wounded.fleet):
        assert_same(wounded, direct=direct)


def test_a_change_waits_once_for_servers_that_hang(wounded: Pair) -> None:
    """nsqadmin asks one after the other."""
    reasons = [f"{address}: no answer within 0.4 s" for address in wounded.fleet.http_addresses[:2]]

    def ours_is_first() -> bool:
        ended: list[str] = []
        with ThreadPoolExecutor(2) as threads:
            for name, address in zip(("nsqadmin", "ours"), wounded.discovering, strict=True):
                asked = threads.submit(ask, address, "POST", "/api/topics/busy/a", b'{"action": "pause"}')
                asked.add_done_callback(lambda _, name=name: ended.append(name))  # type: ignore[misc]
        message = asked.result().json()["message"]
        return ended == ["ours", "nsqadmin"] and all(reason in message for reason in reasons)

    with hung(*wounded.fleet.ours):
        wait_until(ours_is_first, "nsqadmin waits longer")


def test_node_that_hangs(wounded: Pair) -> None:
    path = f"/api/nodes/{wounded.fleet.ours[0].http_address}"
    with hung(wounded.fleet.ours[0]):
        for direct in (False, True):
            wait_until(partial(_same, wounded, ("GET", path, None), direct), "the same answers")
        answers = wounded.both("DELETE", path, {"topic": "busy"})
        assert [answer.status for answer in answers] == [502, 502]


def test_create_without_discovery_services(wounded: Pair) -> None:
    theirs = ask(wounded.direct[0], "POST", "/api/topics", b'{"topic": "theirs"}')
    assert theirs.status == 200
    for broker in wounded.fleet.brokers:
        assert b"theirs" not in broker.http("GET", "/stats", format="json", topic="theirs")
    body = json.dumps({"topic": "created", "channel": "c"}).encode()
    answer = ask(wounded.direct[1], "POST", "/api/topics", body)
    assert (answer.status, answer.json()) == (200, {"message": ""})
    for broker in wounded.fleet.brokers:
        assert broker.channel_stats("created", "c")["depth"] == 0


def test_while_more_and_more_servers_are_down(tmp_path: Path) -> None:
    with pair(tmp_path) as running:
        fleet = running.fleet
        take_down(fleet.ours[0])
        assert_same(running, direct=True)
        take_down(fleet.lookupds[1])
        assert_same(running, changes=False)
        create, pause = ("/api/topics", {"topic": "new"}), ("/api/topics/busy", {"action": "pause"})
        await_kinds(running, *create, (200, "WARNING: "), (200, "WARNING: "))
        take_down(fleet.lookupds[0])
        assert_same(running, changes=False)
        await_kinds(running, *create, (200, "WARNING: "), (502, "UPSTREAM_ERROR"))  # nothing was created
        await_kinds(running, *pause, (502, "UPSTREAM_ERROR"), (200, "WARNING: "))
        wait_until(lambda: paused(fleet), "paused")
        take_down(fleet.ours[1])
        take_down(fleet.nsqd)
        assert_same(running, direct=True)


def await_kinds(pair: Pair, path: str, body: object, theirs: tuple[int, str], ours: tuple[int, str]) -> None:
    """Repeat a POST until nsqadmin and ours give answers of these kinds: a server may be slow by chance."""
    wait_until(
        lambda: [*map(kind, pair.both("POST", path, body))] == [theirs, ours], f"{path}: {theirs}, {ours}"
    )


def paused(fleet: Fleet) -> bool:
    """Whether the brokers that still run have paused the topic."""
    return all(
        json.loads(broker.http("GET", "/stats", format="json", topic="busy"))["topics"][0]["paused"]
        for broker in fleet.brokers[1:]
    )
