"""Tests for the clients of a follower, with real sockets, and a real leader where its answers matter."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from access.support import AuthFile, everything
from broker.certificates import Certificates
from broker.cluster_leader import Leader, leading
from broker.support import PATIENCE_S, RawClient, pub, settle, until
from trio_nsq.access.secret import NO_SECRET, Secret
from trio_nsq.cluster import front as front_module
from trio_nsq.cluster.front import FollowerFront, LeaderTarget
from trio_nsq.http.messages import Request, Response
from trio_nsq.http.routing import Route, Router

SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: trio-nsq-cluster\r\n\r\n"


async def ping(request: Request) -> Response:
    return Response.text("follower")


async def promote(request: Request) -> Response:
    return Response.text(request.body.decode() + request.peer)


LOCAL = Router([Route("GET", "/ping", ping), Route("POST", "/cluster/promote", promote)])


class Follower:
    """A front with listeners on free ports; `ports` has them by their kind."""

    def __init__(self, front: FollowerFront) -> None:
        self.front = front
        self.ports: dict[str, int] = {}

    async def tcp(self, kind: str = "TCP") -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.ports[kind])

    @property
    def http_address(self) -> str:
        return f"http://127.0.0.1:{self.ports['HTTP']}"


@asynccontextmanager
async def following(**options: Any) -> AsyncIterator[Follower]:
    """Run a follower's listeners."""
    follower = Follower(FollowerFront(LOCAL, **{"secret": NO_SECRET} | options))
    async with trio.open_nursery() as nursery:
        for kind, admission in follower.front.admissions.items():
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            follower.ports[kind] = listeners[0].socket.getsockname()[1]
            nursery.start_soon(trio.serve_listeners, admission.handle, listeners)
        with trio.fail_after(2 * PATIENCE_S):
            yield follower
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def cluster(
    folder: Path, *, tls: bool = False, **options: Any
) -> AsyncIterator[tuple[Follower, Leader]]:
    """A leader, and a follower that passes its clients on to it."""
    certificates = Certificates(folder / "certificates")
    async with (
        leading(folder / "d", certificates) as leader,
        following(tls=certificates.client_context(), **options) as follower,
    ):
        follower.front.lead_to(target_of(leader, tls=tls))
        yield follower, leader


def target_of(leader: Leader, epoch: int = 1, *, tls: bool = False) -> LeaderTarget:
    address = f"https://{leader.bound.https_address}" if tls else f"http://{leader.bound.http_address}"
    return LeaderTarget(f"F{epoch}", epoch, address)


BOTH = pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])


class FakeLeader:
    """Switches, then has the test talk with the client.

    Attributes:
        heads: The requests.
        streams: The connections after the switch.
    """

    def __init__(self, answer: bytes = SWITCHED) -> None:
        self.heads: list[bytes] = []
        self.streams: list[trio.SocketStream] = []
        self._answer = answer
        self._arrived = trio.Event()
        self.url = ""

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self._serve, listeners)
            yield
            nursery.cancel_scope.cancel()

    def target(self, epoch: int = 1) -> LeaderTarget:
        return LeaderTarget(f"F{epoch}", epoch, self.url)

    async def _serve(self, stream: trio.SocketStream) -> None:
        head = b""
        async with stream:
            with suppress(trio.BrokenResourceError):
                while not head.endswith(b"\r\n\r\n"):
                    if not (data := await stream.receive_some(1)):
                        return
                    head += data
                self.heads.append(head)
                if not self._answer:
                    await trio.sleep_forever()
                await stream.send_all(self._answer)
                if self._answer is SWITCHED:
                    self.streams.append(stream)
                    await trio.sleep_forever()


async def rest(stream: trio.abc.ReceiveStream) -> bytes:
    with trio.fail_after(PATIENCE_S):
        return b"".join([bytes(data) async for data in stream])


async def is_closed(stream: trio.abc.ReceiveStream) -> bool:
    """Wait until a connection ends."""
    try:
        return await rest(stream) is not None
    except trio.BrokenResourceError:
        return True


def get(path: str, more: bytes = b"Connection: close\r\n") -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\n%b\r\n" % (path.encode(), more)


# ---------------------------------------------------------------------- to the leader


@BOTH
async def test_clients_of_all_listeners_are_served_by_the_leader(tmp_path: Path, tls: bool) -> None:
    async with cluster(tmp_path, tls=tls) as (follower, leader):
        async with await follower.tcp() as one, httpx.AsyncClient(base_url=follower.http_address) as http:
            consumer = RawClient(one)
            await consumer.send(b"  V2")
            await consumer.subscribe("t", "c", ready_count=10)
            for body in (b"x", b"y" * 1_000_000):
                assert (await http.post("/pub?topic=t", content=body)).text == "OK"
                assert (await consumer.message()).body == body
            answer = (await http.get("/stats?format=json&topic=t")).json()
            (client,) = answer["topics"][0]["channels"][0]["clients"]
            assert client["remote_address"] == "127.0.0.1:%d" % one.socket.getsockname()[1]
            context = leader.context
            async with httpx.AsyncClient(
                base_url=f"https://127.0.0.1:{follower.ports['HTTPS']}", verify=context
            ) as https:
                assert (await https.get("/ping")).text == "OK"  # the leader's
            await until(lambda: follower.front.forwarded == 2)
            assert follower.front.forwarded_total == 3
        await until(lambda: follower.front.forwarded == 0)


async def test_a_client_of_a_unix_socket_has_the_address_of_its_follower(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (follower, _):
        path = tmp_path / "socket"
        with trio.socket.socket(socket.AF_UNIX) as listening:
            await listening.bind(str(path))
            listening.listen()
            async with trio.open_nursery() as nursery:
                accept = trio.SocketListener(listening)
                nursery.start_soon(trio.serve_listeners, follower.front.admissions["TCP"].handle, [accept])
                async with await trio.open_unix_socket(str(path)) as stream:
                    client = RawClient(stream)
                    await client.send(b"  V2" + pub("t", b"x"))
                    await client.ok()
                nursery.cancel_scope.cancel()


async def test_the_member_shows_its_token(tmp_path: Path) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("member", everything("replicate"))
    file.add_token("client", everything("publish"))
    async with (
        leading(tmp_path / "d", Certificates(tmp_path / "c"), auth_file=file.write()) as leader,
        following(secret=Secret("member-secret")) as follower,
    ):
        follower.front.lead_to(target_of(leader))
        async with httpx.AsyncClient(base_url=follower.http_address) as http:
            assert (await http.post("/pub?topic=t", content=b"x")).status_code == 401
            with_token = {"Authorization": "Bearer client-secret"}
            assert (await http.post("/pub?topic=t", content=b"x", headers=with_token)).text == "OK"


@BOTH
async def test_a_client_may_end_its_side_and_read_the_answers(tmp_path: Path, tls: bool) -> None:
    async with cluster(tmp_path, tls=tls) as (follower, _):
        async with await follower.tcp() as stream:
            await stream.send_all(b"  V2" + b"".join(pub("t", b"x") for _ in range(100)))
            await stream.send_eof()
            assert (await rest(stream)).count(b"OK") == 100


@BOTH
async def test_the_end_of_a_session_reaches_the_client(tmp_path: Path, tls: bool) -> None:
    async with cluster(tmp_path, tls=tls) as (follower, _):
        async with await follower.tcp() as stream:
            await stream.send_all(b"  V2NONSENSE\n")
            assert b"E_INVALID" in await rest(stream)
        await until(lambda: follower.front.forwarded == 0)


async def test_a_client_that_does_not_read_stops_only_itself(tmp_path: Path) -> None:
    leader = FakeLeader()
    async with leader.run(), following() as follower, trio.open_nursery() as nursery:
        follower.front.lead_to(leader.target())
        async with await follower.tcp() as slow, await follower.tcp() as other:
            await until(lambda: len(leader.streams) == 2)
            for head, stream in zip(leader.heads, leader.streams, strict=True):
                if b"%d " % slow.socket.getsockname()[1] in head:
                    to_slow = stream
                else:
                    to_other = stream
            sent = 0

            async def flood() -> None:
                nonlocal sent
                while True:
                    await to_slow.send_all(bytes(1 << 20))
                    sent += 1

            nursery.start_soon(flood)
            before = -1
            while before != sent:
                before = sent
                await settle()
            assert sent < 64  # what the sockets hold, and nothing more
            await to_other.send_all(b"hello")
            assert await other.receive_some() == b"hello"
            nursery.cancel_scope.cancel()


async def test_the_limit_of_connections() -> None:
    leader = FakeLeader()
    async with leader.run(), following(max_connections=2) as follower:
        follower.front.lead_to(leader.target())
        async with await follower.tcp(), await follower.tcp():
            await until(lambda: follower.front.forwarded == 2)
            async with await follower.tcp() as third:
                assert b"too many connections" in await rest(third)
            assert follower.front.admissions["TCP"].refused_count == 1
            async with await follower.tcp("HTTPS") as https:  # each listener has its own
                await https.send_all(b"x")
                await until(lambda: len(leader.streams) == 3)
                assert await leader.streams[2].receive_some() == b"x"


# ---------------------------------------------------------------------- answered here


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(get("/ping", b""), id="first of many"),
        pytest.param(get("/ping?role=leader"), id="with a query"),
        pytest.param(b"\r\n\n" + get("/ping"), id="after empty lines"),
        pytest.param(b"GET http://x/ping HTTP/1.1\r\nHost: x\r\n\r\n", id="absolute form"),
        pytest.param(b"GET /%70ing HTTP/1.1\r\nHost: x\r\n\r\n", id="escaped"),
        pytest.param(b"GET /ping HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", id="HTTP/1.0"),
    ],
)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "byte by byte"])
async def test_what_each_member_answers_itself(request_: bytes, split: bool) -> None:
    async with following() as follower, await follower.tcp("HTTP") as stream:  # there is no leader
        for piece in [request_[i : i + 1] for i in range(len(request_))] if split else [request_]:
            await stream.send_all(piece)
            if split:
                await settle()
        answer = await rest(stream)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"Connection: close" in answer
        assert answer.endswith(b"follower")
        assert follower.front.forwarded_total == 0


async def test_a_local_request_may_have_a_body() -> None:
    async with following() as follower, httpx.AsyncClient(base_url=follower.http_address) as http:
        answer = await http.post("/cluster/promote", content=b"F1" * 10_000)
        assert answer.text.startswith("F1" * 10_000 + "127.0.0.1:")
        assert (await http.get("/cluster/promote")).status_code == 405
        assert (await http.get("/PING/")).headers["location"] == "/ping"


async def test_a_second_request_on_the_connection_of_a_local_one_is_not_answered(tmp_path: Path) -> None:
    """It would be for the leader."""
    async with cluster(tmp_path) as (follower, _):
        async with await follower.tcp("HTTP") as stream:
            await stream.send_all(get("/ping", b"") + get("/stats"))
            assert (await rest(stream)).count(b"HTTP/1.1") == 1
        async with httpx.AsyncClient(base_url=follower.http_address) as http:
            assert (await http.get("/ping")).text == "follower"
            assert (await http.get("/info")).status_code == 200  # over another connection


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(b"GET /pinger HTTP/1.1\r\n", id="another path"),
        pytest.param(b"GET /ping\r\n", id="no version"),
        pytest.param(b"GET /ping HTTP/2.0\r\n", id="another version"),
        pytest.param(b"GET /%zz HTTP/1.1\r\n", id="bad escape"),
        pytest.param(b"GET /" + b"a" * 20_000, id="a long line"),
        pytest.param(b"  V2", id="the protocol of TCP"),
        pytest.param(b"\x16\x03\x01", id="TLS"),
        pytest.param(b"\r\n" * 10_000, id="only empty lines"),
    ],
)
async def test_everything_else_is_for_the_leader(begin: bytes) -> None:
    leader = FakeLeader()
    async with leader.run(), following() as follower:
        follower.front.lead_to(leader.target())
        async with await follower.tcp("HTTP") as stream:
            await stream.send_all(begin)
            await until(lambda: bool(leader.streams))
            await stream.send_all(b"more")
            await stream.send_eof()
            assert await rest(leader.streams[0]) == begin + b"more"
        assert b"listener=http&" in leader.heads[0]


async def test_an_incomplete_line_is_for_the_leader() -> None:
    leader = FakeLeader()
    async with leader.run(), following() as follower:
        follower.front.lead_to(leader.target())
        async with await follower.tcp("HTTP") as stream:
            await stream.send_all(b"GET /pi")
            await stream.send_eof()
            await until(lambda: bool(leader.streams))
            assert await rest(leader.streams[0]) == b"GET /pi"
        async with await follower.tcp("HTTP") as stream:
            await stream.send_eof()
            assert await rest(stream) == b""
        assert len(leader.heads) == 1


@pytest.mark.parametrize("begin", [b"", b"GET /pi"])
async def test_a_client_that_does_not_send_its_line_is_closed(
    monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr(front_module, "LINE_TIMEOUT_S" if begin else "IDLE_TIMEOUT_S", 0.01)
    async with following() as follower, await follower.tcp("HTTP") as stream:
        if begin:
            await stream.send_all(begin)
        assert await is_closed(stream)
        assert follower.front.waiting == 0


# ---------------------------------------------------------------------- without a leader


async def test_clients_wait_for_a_leader(tmp_path: Path) -> None:
    async with leading(tmp_path / "d", Certificates(tmp_path / "c")) as leader, following() as follower:
        async with await follower.tcp() as one, await follower.tcp("HTTP") as two:
            await one.send_all(b"  V2" + pub("t", b"x"))
            await two.send_all(get("/stats?format=json"))
            await until(lambda: follower.front.waiting == 2)
            follower.front.lead_to(target_of(leader))
            await RawClient(one).ok()
            assert (await rest(two)).startswith(b"HTTP/1.1 200 OK")
        assert follower.front.waiting == 0


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        ("TCP", b"E_INVALID the cluster has no leader"),
        ("HTTP", b'{"message":"NO_LEADER: the cluster has no leader'),
        ("HTTPS", b"\x15\x03\x03\x00\x02\x02\x50"),
    ],
)
@pytest.mark.parametrize("too_many", [False, True], ids=["too long", "too many"])
async def test_clients_that_cannot_wait_are_refused(kind: str, refusal: bytes, too_many: bool) -> None:
    options = {"most_waiting": 1} if too_many else {"patience_s": 0.01}
    async with following(**options) as follower:
        async with await follower.tcp() as first:
            if too_many:
                await until(lambda: follower.front.waiting == 1)
            async with await follower.tcp(kind) as stream:
                await stream.send_all(get("/stats"))
                assert refusal in await rest(stream)
            if too_many:
                assert follower.front.waiting == 1
            else:
                assert b"no leader" in await rest(first)


async def test_a_leader_that_cannot_be_reached_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leader = FakeLeader()
    async with leader.run():
        pass
    gone = leader.target()
    async with following() as follower, await follower.tcp() as client:
        follower.front.lead_to(gone)
        await until(lambda: "cannot be passed on" in caplog.text)
        (listener,) = await trio.open_tcp_listeners(int(gone.url.rpartition(":")[2]), host="127.0.0.1")
        async with await listener.accept() as stream:
            assert (await stream.receive_some()).startswith(
                b"GET /cluster/forward?listener=tcp&client=127.0.0.1%3A"
            )
            await stream.send_all(SWITCHED + b"hello")
            assert await client.receive_some() == b"hello"
        await listener.aclose()
    assert caplog.text.count("cannot be passed on") == 1
    assert f"the leader {gone.url} cannot be reached: Connection refused" in caplog.text


async def test_a_new_leader_ends_the_attempts_to_reach_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front_module, "CONNECT_TIMEOUT_S", 10_000)
    silent, leader = FakeLeader(b""), FakeLeader()
    async with silent.run(), leader.run(), following(patience_s=10_000) as follower:
        follower.front.lead_to(silent.target())
        async with await follower.tcp():
            await until(lambda: bool(silent.heads))
            follower.front.lead_to(leader.target(2))
            await until(lambda: bool(leader.streams))


async def test_a_leader_that_refuses_the_member_is_not_asked_again_and_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = b'{"message":"INVALID_TOKEN"}'
    leader = FakeLeader(b"HTTP/1.1 401 X\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    async with leader.run(), following(patience_s=10_000) as follower:
        follower.front.lead_to(leader.target())
        for _ in range(3):
            async with await follower.tcp() as stream:
                assert b"no leader that accepts clients" in await rest(stream)
    assert len(leader.heads) == 3
    assert caplog.text.count("--cluster-auth-secret-file") == 1


async def test_a_leader_that_is_full_is_asked_again() -> None:
    leader = FakeLeader(b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n")
    async with leader.run(), following(patience_s=10_000) as follower:
        follower.front.lead_to(leader.target())
        async with await follower.tcp():
            await until(lambda: len(leader.heads) == 2)


# ---------------------------------------------------------------------- another leader


async def test_connections_to_an_earlier_leader_are_ended() -> None:
    old, new = FakeLeader(), FakeLeader()
    async with old.run(), new.run(), following() as follower:
        front = follower.front
        front.lead_to(old.target(1))
        async with await follower.tcp() as first, await follower.tcp("HTTPS") as second:
            await until(lambda: front.forwarded == 2)
            front.lead_to(None)  # connections stay
            front.lead_to(new.target(2))
            async with await follower.tcp() as third:
                await until(lambda: front.forwarded == 3)
                assert front.end_forwarded(before=old.target(1)) == 0
                assert front.end_forwarded(before=new.target(2)) == 2
                assert await is_closed(first)
                assert await is_closed(second)
                for stream in old.streams:
                    assert await is_closed(stream)
                await new.streams[0].send_all(b"still here")
                assert await third.receive_some() == b"still here"
                assert front.end_forwarded() == 1
                assert await is_closed(third)
        await until(lambda: front.forwarded == 0)


async def test_connections_are_ended_although_nobody_reads() -> None:
    old = FakeLeader()
    async with old.run(), following() as follower, trio.open_nursery() as nursery:
        follower.front.lead_to(old.target())
        async with await follower.tcp() as client:
            await until(lambda: bool(old.streams))

            async def flood(stream: trio.SocketStream) -> None:
                with suppress(trio.BrokenResourceError):
                    while True:
                        await stream.send_all(bytes(1 << 20))

            nursery.start_soon(flood, client)
            nursery.start_soon(flood, old.streams[0])
            await settle()
            assert follower.front.end_forwarded() == 1
            await until(lambda: follower.front.forwarded == 0)


async def test_a_bug_affects_one_client_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(front_module, "open_upgraded", lambda *args, **options: 1 // 0)
    async with following() as follower:
        follower.front.lead_to(LeaderTarget("F1", 1, "http://127.0.0.1:1"))
        for kind in ("TCP", "HTTP"):
            async with await follower.tcp(kind) as stream:
                await stream.send_all(get("/stats"))
                assert await is_closed(stream)
        assert caplog.text.count("internal error") == 2
        async with httpx.AsyncClient(base_url=follower.http_address) as http:
            assert (await http.get("/ping")).text == "follower"
