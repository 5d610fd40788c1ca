"""Tests of the coordinator in etcd: faults of etcd, of the network and of people."""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socket import create_server
from typing import Any

import pytest
import trustme

from coordination.conftest import LONG_S, PATIENCE, candidate, led_by
from coordination.etcd_server import Member, etcd, text
from spark.support import until
from storage.stores import Fault, Judge, Proxy, Store, proxy
from trio_nsq.access.secret import Secret
from trio_nsq.coordination.etcd import EtcdCoordinator
from trio_nsq.coordination.interface import (
    Coordinator,
    CoordinatorError,
    LeadershipLost,
    Observation,
    ValueChanged,
)
from trio_nsq.coordination.state import NotInSync, OutdatedState
from trio_nsq.storage import Patience

IMPATIENT = Patience(attempt_s=30.0, deadline_s=0.1)
"""For faults that are there until the deadline."""
A, B = candidate("A"), candidate("B")
FAST = ("--heartbeat-interval=50", "--election-timeout=500")
Open = Callable[..., EtcdCoordinator]


@pytest.fixture
def opened(cluster: str) -> Iterator[Open]:
    """Opens coordinators of one cluster; the first argument is the endpoints."""
    with ExitStack() as stack:

        def open_one(*endpoints: tuple[str, int], ttl_s: float = LONG_S, **options: Any) -> EtcdCoordinator:
            options = {"patience": PATIENCE, **options}
            one = EtcdCoordinator(endpoints, cluster, ttl_s=ttl_s, **options)
            stack.callback(one.close)
            return one

        yield open_one


@pytest.fixture
def broken(etcd_member: Member) -> Iterator[Proxy]:
    """A proxy in front of etcd."""
    with proxy(Store("", {}, etcd_member.endpoint)) as running:
        yield running


def nth(number: int, path: str, fault: Fault) -> Judge:
    """Return a judge with a fault for one request to a path, counted from 0."""
    left = [number]

    def judge(method: str, asked: str) -> Fault | None:
        if asked != path:
            return None
        left[0] -= 1
        return fault if left[0] == -1 else None

    return judge


def address_of(running: Proxy) -> tuple[str, int]:
    return ("127.0.0.1", int(running.server_address[1]))


def add(coordinator: Coordinator, name: str) -> None:
    """Let a member be in sync with the leader."""
    led = coordinator.led
    assert led is not None
    coordinator.replace(led.joined(name, candidate(name).addresses).synced(name), led)


def win(coordinator: Coordinator, name: str) -> int:
    epoch = coordinator.campaign(candidate(name))
    assert epoch is not None
    return epoch


def renewed(coordinator: Coordinator) -> bool:
    """Renew the lease; return False if etcd does not answer."""
    with suppress(CoordinatorError):
        coordinator.renew()
        return True
    return False


# ---------------------------------------------------------------------- answers that are lost


@pytest.mark.parametrize("is_sent", [False, True], ids=["lost request", "lost answer"])
@pytest.mark.parametrize("path", ["/v3/lease/grant", "/v3/kv/txn"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_lost_answer_of_a_campaign(
    opened: Open, broken: Proxy, etcd_member: Member, is_sent: bool, path: str, number: int
) -> None:
    """A transaction that was applied without an answer is recognized: this member leads, once."""
    one, two = opened(address_of(broken)), opened(etcd_member.address)
    broken.judge = nth(number, path, Fault(is_sent=is_sent))
    epoch = win(one, "A")
    assert two.read() == Observation(one.led, is_held=True)
    assert one.led is not None
    assert one.led.epoch == epoch
    one.renew()
    add(one, "B")
    one.resign()
    assert win(two, "B") > epoch


@pytest.mark.parametrize("is_sent", [False, True], ids=["lost request", "lost answer"])
@pytest.mark.parametrize("status", [None, 503], ids=["reset", "503"])
def test_a_lost_answer_of_a_change(
    opened: Open, broken: Proxy, etcd_member: Member, is_sent: bool, status: int | None
) -> None:
    one, two = opened(address_of(broken)), opened(etcd_member.address)
    win(one, "A")
    broken.judge = nth(0, "/v3/kv/txn", Fault(is_sent, status))
    add(one, "B")
    assert two.read() == Observation(one.led, is_held=True)
    add(one, "C")
    assert two.read().state == one.led
    broken.judge = nth(0, "/v3/lease/revoke", Fault(is_sent, status))
    one.resign()
    assert not two.read().is_held


def test_a_change_without_any_answer_is_taken_back(opened: Open, broken: Proxy, etcd_member: Member) -> None:
    """The deadline passes after the change was applied: the next renewal undoes it. It is made again or given up."""
    one, two = opened(address_of(broken), patience=IMPATIENT), opened(etcd_member.address)
    win(one, "A")
    before = one.led
    broken.judge = lambda method, path: Fault(is_sent=True)
    with pytest.raises(CoordinatorError, match=r"did not answer within 0.1 s; 127.0.0.1:\d+: \S"):
        add(one, "B")
    assert one.led == before
    broken.judge = lambda method, path: None
    one.renew()
    assert one.led == two.read().state == before


def test_leadership_is_certain_from_when_the_renewal_was_sent(opened: Open, broken: Proxy) -> None:
    """The lease may last longer, but etcd may have begun it when the request left."""
    now_s = [100.0]
    one = opened(address_of(broken), ttl_s=50.0, clock=lambda: now_s[0])

    def pass_time() -> None:
        now_s[0] += 7

    broken.judge = nth(0, "/v3/lease/grant", Fault(is_sent=True, then=pass_time))
    win(one, "A")
    assert (now_s[0], one.certain_until_s) == (107.0, 150.0)
    broken.judge = nth(0, "/v3/lease/keepalive", Fault(is_sent=False, then=pass_time))
    one.renew()
    assert (now_s[0], one.certain_until_s) == (114.0, 157.0)
    broken.judge = lambda method, path: Fault(is_sent=False, status=400)
    with pytest.raises(CoordinatorError):
        one.renew()
    assert one.certain_until_s == 157.0
    assert one.led is not None


# ---------------------------------------------------------------------- people and leases


def test_a_revoked_lease_is_lost(opened: Open, etcd_member: Member, broken: Proxy) -> None:
    one, two = opened(address_of(broken)), opened(etcd_member.address)
    epoch = win(one, "A")
    add(one, "B")
    ids = [lease["ID"] for lease in etcd_member.ask("/v3/lease/leases", {})["leases"]]
    for each in ids:
        etcd_member.ask("/v3/lease/revoke", {"ID": each})
    led = one.led
    assert led is not None
    assert not two.read().is_held
    with pytest.raises(LeadershipLost):
        one.replace(led.joined("C", ()), led)
    assert two.read().state == led
    assert win(two, "B") > epoch
    assert one.campaign(A) is None


def test_a_renewal_finds_the_lost_lease(opened: Open, etcd_member: Member) -> None:
    one = opened(etcd_member.address)
    win(one, "A")
    etcd_member.revoke_leases()
    with pytest.raises(LeadershipLost, match="its lease is over, or was revoked"):
        one.renew()
    assert (one.led, one.certain_until_s) == (None, None)


def test_the_leader_writes_keys_again_that_were_removed(
    opened: Open, etcd_member: Member, cluster: str
) -> None:
    one, two = opened(etcd_member.address), opened(etcd_member.address)
    epoch = win(one, "A")
    add(one, "B")
    led = one.led
    for prefix in ("state", "leader", ""):
        etcd_member.remove(f"/trio-nsq/{cluster}/{prefix}")
        one.renew()
        assert one.led == led
        assert two.read() == Observation(led, is_held=True)
    add(one, "C")
    etcd_member.remove(f"/trio-nsq/{cluster}/")
    with pytest.raises(OutdatedState):
        two.campaign(candidate("B", epoch))
    one.renew()
    one.resign()
    assert win(two, "B") > epoch


@pytest.mark.parametrize("keeps_key", [True, False], ids=["leader's key", "no leader's key"])
def test_an_earlier_value_that_is_put_back_is_replaced(
    opened: Open, etcd_member: Member, cluster: str, keeps_key: bool
) -> None:
    """As by a restored backup. It names a member in sync that has missed messages since."""
    one, two = opened(etcd_member.address), opened(etcd_member.address)
    win(one, "A")
    add(one, "B")
    led = led_by(one)
    one.replace(led.unsynced("B"), led)
    value = text(led.encode().decode())
    etcd_member.ask("/v3/kv/put", {"key": text(f"/trio-nsq/{cluster}/state"), "value": value})
    if not keeps_key:
        etcd_member.remove(f"/trio-nsq/{cluster}/leader")
    one.renew()
    assert two.read() == Observation(one.led, is_held=True)
    assert led_by(one).in_sync == {"A"}
    one.resign()
    with pytest.raises(NotInSync):
        two.campaign(candidate("B", led.epoch))


def test_a_candidate_that_was_removed_meanwhile_does_not_win(
    opened: Open, etcd_member: Member, broken: Proxy, cluster: str
) -> None:
    """The last leader writes once more and resigns, between what the candidate reads and what it writes."""
    one, two = opened(etcd_member.address), opened(address_of(broken))
    epoch = win(one, "A")
    add(one, "B")
    led = one.led
    assert led is not None
    etcd_member.remove(f"/trio-nsq/{cluster}/leader")

    def last_words() -> None:
        one.renew()
        one.replace(led.unsynced("B"), led)
        one.resign()

    broken.judge = nth(0, "/v3/lease/grant", Fault(is_sent=False, then=last_words))
    assert two.campaign(B) is None
    assert broken.requests.count("POST /v3/lease/revoke") == 1
    assert two.read() == Observation(led.unsynced("B"), is_held=False)
    assert win(one, "A") > epoch


def test_a_renewal_that_finds_another_leader_makes_nothing_certain(
    opened: Open, etcd_member: Member, cluster: str, broken: Proxy
) -> None:
    """The key was removed: the lease is alive, but it is no longer that of the leader."""
    one, two = opened(address_of(broken)), opened(etcd_member.address)
    win(one, "A")
    add(one, "B")
    before_s = one.certain_until_s
    etcd_member.remove(f"/trio-nsq/{cluster}/leader")
    win(two, "B")
    certain: list[float | None] = []
    broken.judge = nth(0, "/v3/kv/txn", Fault(is_sent=True, then=lambda: certain.append(one.certain_until_s)))
    with pytest.raises(LeadershipLost, match="another member has its key"):
        one.renew()
    assert certain == [before_s]
    assert one.certain_until_s is None
    assert two.read() == Observation(two.led, is_held=True)


def test_a_former_leader_takes_no_key(opened: Open, etcd_member: Member, cluster: str) -> None:
    """The next leader has resigned already, and the lease of the former one is still alive."""
    one, two = opened(etcd_member.address), opened(etcd_member.address)
    win(one, "A")
    add(one, "B")
    etcd_member.remove(f"/trio-nsq/{cluster}/leader")
    epoch = win(two, "B")
    two.resign()
    with pytest.raises(LeadershipLost):
        one.renew()
    assert win(two, "B") > epoch


def test_a_watch_that_is_refused_is_not_repeated_at_once(
    opened: Open, etcd_member: Member, broken: Proxy
) -> None:
    """For example, the user may only read the keys."""
    one, two = opened(etcd_member.address), opened(address_of(broken))
    win(one, "A")
    seen = two.read()
    broken.judge = lambda method, path: Fault(status=403) if path == "/v3/watch" else None
    assert two.wait_for_change(seen, 0.5) == seen
    assert 1 <= broken.requests.count("POST /v3/watch") <= 2


def test_a_value_that_was_removed_is_written_again_by_a_change(
    opened: Open, etcd_member: Member, cluster: str
) -> None:
    one, two = opened(etcd_member.address), opened(etcd_member.address)
    win(one, "A")
    etcd_member.remove(f"/trio-nsq/{cluster}/state")
    with pytest.raises(ValueChanged):
        add(one, "B")
    assert two.read().state == one.led
    add(one, "B")
    assert two.read().state == one.led


def test_epochs_grow_over_removed_values(opened: Open, etcd_member: Member, cluster: str) -> None:
    """All keys are removed while founders campaign: no epoch is won twice."""
    ledger: list[int] = []
    is_over = threading.Event()
    failures: list[BaseException] = []

    def compete(name: str) -> None:
        coordinator = opened(etcd_member.address)
        try:
            while not is_over.is_set():
                with suppress(OutdatedState):
                    epoch = coordinator.campaign(candidate(name))
                    if epoch is not None:
                        ledger.append(epoch)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=compete, args=(name,)) for name in "ABC"]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(ledger) >= 1 or bool(failures))
        for _ in range(20):
            count = len(ledger)  # before the removal: its winner can be noted before `remove` returns
            etcd_member.remove(f"/trio-nsq/{cluster}/")
            until(lambda: len(ledger) > count or bool(failures))  # noqa: B023
    finally:  # else the founders use the processor, and files, while all later tests of this process run
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert len(set(ledger)) == len(ledger) > 20


# ---------------------------------------------------------------------- faults of etcd


def test_etcd_is_restarted(opened: Open, tmp_path: Path) -> None:
    with etcd(tmp_path, 1, *FAST) as (member,):
        one, two = opened(member.address), opened(member.address)
        win(one, "A")
        seen = two.read()
        member.kill()
        assert one.led is not None
        with pytest.raises(CoordinatorError):
            opened(member.address, patience=IMPATIENT).read()
        member.start()
        until(member.answers)
        one.renew()
        add(one, "B")
        assert two.read() == Observation(one.led, is_held=True) != seen


def test_etcd_is_stopped_and_goes_on(opened: Open, tmp_path: Path) -> None:
    with etcd(tmp_path, 1, *FAST) as (member,):
        one = opened(member.address)
        win(one, "A")
        until_s = one.certain_until_s
        with member.stopped():
            impatient = opened(member.address, patience=Patience(attempt_s=0.2, deadline_s=0.5))
            with pytest.raises(
                CoordinatorError, match=r"did not answer within 0.5 s; 127.0.0.1:\d+: no answer within 0.2 s"
            ):
                impatient.read()
        until(lambda: renewed(one))
        assert one.certain_until_s is not None
        assert until_s is not None
        assert one.certain_until_s > until_s


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Member]]:
    """An etcd with three members; each test leaves them running."""
    with etcd(tmp_path_factory.mktemp("three"), 3, *FAST) as members:
        yield members


def test_one_of_three_members_is_killed(opened: Open, three: list[Member]) -> None:
    """Whichever it is, and whichever is asked first: the leader of etcd, too."""
    one = opened(*(member.address for member in three))
    win(one, "A")
    for member in three:
        member.kill()
        until(lambda: renewed(one))
        assert one.led is not None
        add(one, f"B{member.port}")
        member.start()
        until(member.answers)
    assert opened(three[0].address).read() == Observation(one.led, is_held=True)


def test_one_of_three_members_is_stopped(opened: Open, three: list[Member]) -> None:
    """It accepts connections, and never answers: that costs less than the time of the lease."""
    one = opened(*(member.address for member in three), ttl_s=60.0, patience=Patience(1.0, 30.0))
    win(one, "A")
    for member in three:
        with member.stopped():
            began_s = one.certain_until_s
            until(lambda: renewed(one))
            assert one.led is not None
            assert began_s is not None
            assert one.certain_until_s is not None
            assert one.certain_until_s < began_s + 60.0
        until(member.answers)


def test_the_leader_of_etcd_moves(opened: Open, three: list[Member]) -> None:
    one = opened(*(member.address for member in three))
    win(one, "A")
    ids = [each["ID"] for each in three[0].ask("/v3/cluster/member/list", {})["members"]]
    leaders = set()
    for target in ids:
        statuses = [(member, member.ask("/v3/maintenance/status", {})) for member in three]
        leader = next(
            member for member, status in statuses if status["header"]["member_id"] == status["leader"]
        )
        with suppress(OSError):  # it leads already
            leader.ask("/v3/maintenance/transfer-leadership", {"targetID": target})
        until(lambda: renewed(one))
        add(one, f"B{target}"[:20])
        leaders.add(three[0].ask("/v3/maintenance/status", {})["leader"])
    assert len(leaders) > 1
    assert opened(three[0].address).read() == Observation(one.led, is_held=True)


def test_two_of_three_members_are_away(opened: Open, three: list[Member]) -> None:
    """The third one cannot know who leads, and says so; leadership goes on when they are back."""
    one = opened(*(member.address for member in three))
    win(one, "A")
    for member in three[:2]:
        member.kill()
    with pytest.raises(CoordinatorError):
        opened(*(member.address for member in three), patience=Patience(0.2, 0.5)).read()
    for member in three[:2]:
        member.start()
    until(lambda: all(member.answers() for member in three))
    until(lambda: renewed(one))
    assert one.led is not None


def test_a_silent_endpoint_is_asked_once(opened: Open, etcd_member: Member) -> None:
    """It accepts connections, and never answers. Later requests begin with the endpoint that has answered."""
    with create_server(("127.0.0.1", 0), backlog=100) as silent:
        one = opened(
            ("127.0.0.1", silent.getsockname()[1]), etcd_member.address, patience=Patience(0.5, 60.0)
        )
        win(one, "A")
        one.read()
        silent.setblocking(False)
        connections = 0
        with suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                connections += 1
    assert connections == 1


def test_a_watch_of_a_silent_endpoint_ends(opened: Open, etcd_member: Member) -> None:
    """What changed meanwhile is read from another endpoint."""
    one = opened(etcd_member.address)
    win(one, "A")
    with proxy(Store("", {}, etcd_member.endpoint)) as silent:
        hold = threading.Event()
        silent.judge = lambda method, path: Fault(then=hold.wait) if path == "/v3/watch" else None
        two = opened(address_of(silent), ttl_s=4.0)
        seen = two.read()
        add(one, "B")
        try:
            assert two.wait_for_change(seen, 60.0).state == one.led
            assert two.wait_for_change(two.read(), 1.0).state == one.led
        finally:
            hold.set()


# ---------------------------------------------------------------------- other servers, users and TLS


@contextmanager
def imitation(answer: bytes, status: int = 200) -> Iterator[tuple[str, int]]:
    """Run a server that gives one answer to all requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            """Write no log."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield ("127.0.0.1", server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


EMPTY = b'{"header": {"revision": "5"}, "succeeded": true, "responses": [%s, %s]}' % (
    (b'{"response_range": {}}',) * 2
)


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (EMPTY, 200, "ignores the conditions of transactions"),
        (b"{}", 200, "does not answer as etcd does"),
        (b'{"responses": 7, "header": {"revision": "1"}}', 200, "does not answer as etcd does"),
        (b'{"responses": [1, 2], "header": []}', 200, "does not answer as etcd does"),
        (b"<html>", 200, "is not the HTTP gateway of etcd 3.4 or newer: it answers HTTP 200"),
        (b"404 page not found", 404, "is not the HTTP gateway of etcd 3.4 or newer: it answers HTTP 404"),
        (b"bad gateway", 502, "HTTP 502"),
        (
            b'{"error": "etcdserver: mvcc: database space exceeded", "code": 8}',
            429,
            "database space exceeded",
        ),
        (b'{"error": "etcdserver: no leader", "code": 14}', 503, "did not answer within 0.1 s; .*no leader"),
        (b"x" * (2 << 20), 200, "the answer is too long"),
    ],
)
def test_other_servers_are_refused(opened: Open, answer: bytes, status: int, reason: str) -> None:
    with imitation(answer, status) as address:
        with pytest.raises(CoordinatorError, match=reason):
            opened(address, patience=IMPATIENT).campaign(A)


def test_users_have_a_password(opened: Open, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("right\n")
    with etcd(tmp_path / "data", 1, *FAST) as (member,):
        member.ask("/v3/auth/user/add", {"name": "root", "password": "right"})
        member.ask("/v3/auth/role/add", {"name": "root"})
        member.ask("/v3/auth/user/grant", {"user": "root", "role": "root"})
        member.ask("/v3/auth/enable", {})
        one = opened(member.address, user="root", password=Secret(file=file))
        win(one, "A")
        for wrong in ({"user": "root", "password": Secret("wrong")}, {"user": "other"}, {}):
            with pytest.raises(CoordinatorError) as refused:
                opened(member.address, **wrong).read()
            assert "wrong" not in str(refused.value)
        member.kill()  # its tokens are lost, and new ones are asked for
        member.start()
        until(lambda: renewed(one))
        add(one, "B")
        assert one.read() == Observation(one.led, is_held=True)


def test_tls(opened: Open, tmp_path: Path) -> None:
    authority = trustme.CA()
    cert = authority.issue_cert("127.0.0.1")
    cert.private_key_pem.write_to_path(tmp_path / "key.pem")
    cert.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    flags = (f"--cert-file={tmp_path / 'cert.pem'}", f"--key-file={tmp_path / 'key.pem'}")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with etcd(tmp_path / "data", 1, *FAST, *flags, scheme="https") as (member,):
        one = opened(member.address, tls=trusting)

        def wins() -> bool:
            with suppress(CoordinatorError):
                return one.campaign(A) is not None
            return False

        until(wins)
        assert one.read() == Observation(one.led, is_held=True)
        one.renew()
        with pytest.raises(CoordinatorError, match="certificate verify failed"):
            opened(member.address, patience=IMPATIENT, tls=ssl.create_default_context()).read()


def test_keys_of_the_cluster(opened: Open, etcd_member: Member, cluster: str) -> None:
    """Names of the keys are public: people look at them, and give users rights on them."""
    one = opened(etcd_member.address)
    win(one, "A")
    found = etcd_member.ask(
        "/v3/kv/range",
        {"key": text(f"/trio-nsq/{cluster}/"), "range_end": text(f"/trio-nsq/{cluster}0"), "keys_only": True},
    )
    assert [each["key"] for each in found["kvs"]] == [
        text(f"/trio-nsq/{cluster}/leader"),
        text(f"/trio-nsq/{cluster}/state"),
    ]
