"""Links of followers, and clients that followers pass on: over HTTP and HTTPS, with and without tokens."""

import json
import logging
import ssl
from functools import partial
from pathlib import Path

import pytest
import trio

from access.support import ALL_ROLES, AuthFile, Given, auth, bearer, everything
from broker.certificates import Certificates
from broker.cluster_leader import Leader, leading
from broker.support import PATIENCE_S, RawClient, pub, running_broker, until
from log.support import HastyFiles
from trio_nsq.access.secret import NO_SECRET, Secret
from trio_nsq.broker import BoundAddresses
from trio_nsq.broker.replication import Replication
from trio_nsq.http.upgrade import UpgradeFailed
from trio_nsq.replication.follower import follow
from trio_nsq.replication.replica import Replica

UPGRADE = b"Connection: Upgrade\r\nUpgrade: trio-nsq-cluster\r\n"
CLIENT = "192.0.2.7:5000"


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certificates")


BOTH = pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])


@BOTH
async def test_a_follower_follows_by_http(tmp_path: Path, certificates: Certificates, tls: bool) -> None:
    (tmp_path / "f").mkdir()
    async with leading(tmp_path / "d", certificates) as leader, trio.open_nursery() as nursery:
        replica = await trio.to_thread.run_sync(Replica.open, HastyFiles(), tmp_path / "f")
        async with leader.upgraded("/cluster/replicate", tls=tls) as stream:
            nursery.start_soon(partial(follow, stream, replica, cluster="prod", member="two"))
            await until(lambda: leader.replication.in_sync == {"two"})
            nursery.cancel_scope.cancel()
        replica.close()


@BOTH
async def test_a_client_that_is_passed_on_is_served_as_any_other(
    tmp_path: Path, certificates: Certificates, tls: bool
) -> None:
    async with leading(tmp_path / "d", certificates) as leader:
        async with (
            leader.upgraded(f"/cluster/forward?listener=tcp&client={CLIENT}", tls=tls) as one,
            leader.upgraded("/cluster/forward?listener=tcp", tls=tls) as two,
        ):
            consumer, producer = RawClient(one), RawClient(two)
            await consumer.send(b"  V2")
            await consumer.subscribe("t", "c", ready_count=10)
            await producer.send(b"  V2" + pub("t", b"x" * 200_000))
            await producer.ok()
            assert (await consumer.message()).body == b"x" * 200_000
            # A broker serves its own listener's clients, and shows them by their own addresses.
            async with leader.upgraded(f"/cluster/forward?listener=http&client={CLIENT}", tls=tls) as http:
                await http.send_all(
                    b"GET /stats?format=json HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
                )
                answer = b"".join([bytes(data) async for data in http])
        stats = json.loads(answer.partition(b"\r\n\r\n")[2])
        (client,) = stats["topics"][0]["channels"][0]["clients"]
        assert client["remote_address"] == CLIENT
        (other,) = stats["producers"]
        assert other["remote_address"].startswith("127.0.0.1:")


@BOTH
async def test_a_client_of_https_brings_its_own_tls(
    tmp_path: Path, certificates: Certificates, tls: bool
) -> None:
    target = f"/cluster/forward?listener=https&client={CLIENT}"
    async with leading(tmp_path / "d", certificates) as leader:
        async with leader.upgraded(target, tls=tls) as stream:
            inner = trio.SSLStream(stream, leader.context, server_hostname="127.0.0.1", https_compatible=True)
            await inner.send_all(b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            answer = b"".join([bytes(data) async for data in inner])
    assert answer.startswith(b"HTTP/1.1 200 OK")


@BOTH
async def test_the_end_of_a_client_reaches_the_session(
    tmp_path: Path, certificates: Certificates, tls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with leading(tmp_path / "d", certificates) as leader:
        async with leader.upgraded(f"/cluster/forward?listener=tcp&client={CLIENT}", tls=tls) as stream:
            client = RawClient(stream)
            await client.send(b"  V2" + pub("t", b"x"))
            await client.ok()
            assert f"TCP: new client({CLIENT})" in caplog.text
        await until(lambda: f"[{CLIENT}] exiting" in caplog.text)
        assert "GET /cluster/forward" not in caplog.text


@BOTH
async def test_a_client_may_end_its_side_and_read_the_answers(
    tmp_path: Path, certificates: Certificates, tls: bool
) -> None:
    async with leading(tmp_path / "d", certificates) as leader:
        async with await leader.open("/cluster/forward?listener=tcp", tls=tls) as stream:
            await stream.send_all(b"  V2" + b"".join(pub("t", b"x") for _ in range(100)))
            await stream.send_eof()
            assert b"".join([bytes(data) async for data in stream]).count(b"OK") == 100


@BOTH
async def test_why_a_member_is_refused(tmp_path: Path, certificates: Certificates, tls: bool) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("reader", everything("read"))
    async with leading(tmp_path / "d", certificates, auth_file=file.write()) as leader:
        for secret, code in (
            (NO_SECRET, "401 AUTH_REQUIRED"),
            (Secret("x"), "401 INVALID_TOKEN"),
            (Secret("reader-secret"), "403 FORBIDDEN"),
        ):
            with pytest.raises(UpgradeFailed, match=f"--cluster-auth-secret-file \\({code}"):
                await leader.open("/cluster/replicate", tls=tls, secret=secret)


async def test_a_leader_that_requires_tls_says_so(tmp_path: Path, certificates: Certificates) -> None:
    async with leading(tmp_path / "d", certificates, tls_required="true") as leader:
        with pytest.raises(UpgradeFailed, match="requires https: --cluster-tls"):
            await leader.open("/cluster/replicate", tls=False)
        await trio.aclose_forcefully(await leader.open("/cluster/replicate", tls=True))


@BOTH
async def test_a_session_that_ends_ends_the_connection(
    tmp_path: Path, certificates: Certificates, tls: bool
) -> None:
    async with leading(tmp_path / "d", certificates) as leader:
        async with leader.upgraded("/cluster/forward?listener=tcp", tls=tls) as stream:
            client = RawClient(stream)
            await client.send(b"  V2NONSENSE\n")
            assert (await client.error()).startswith("E_INVALID")
            assert await client.frame() is None


@BOTH
async def test_clients_that_are_passed_on_count_for_the_limit_of_their_listener(
    tmp_path: Path, certificates: Certificates, tls: bool
) -> None:
    target = "/cluster/forward?listener=tcp"
    async with (
        leading(tmp_path / "d", certificates, max_connections=16) as leader,
        trio.open_nursery() as nursery,
    ):
        done = trio.Event()
        connected = 0

        async def stay(*, task_status: trio.TaskStatus[None]) -> None:
            nonlocal connected
            async with leader.upgraded(target, tls=tls) as stream:
                client = RawClient(stream)
                await client.send(b"  V2" + pub("t", b"x"))
                await client.ok()
                task_status.started()
                await done.wait()

        for _ in range(16):
            await nursery.start(stay)
        async with leader.upgraded(target, tls=tls) as stream:
            assert "too many connections" in await RawClient(stream).error()
        # Not for that of the listener by which the follower has connected.
        async with leader.upgraded("/nothing", tls=tls, status=404):
            pass
        done.set()


async def test_only_members_may(tmp_path: Path, certificates: Certificates) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("member", everything("replicate"))
    file.add_token("all-others", everything(*(role for role in ALL_ROLES if role != "replicate")))
    file.add_token("limited", Given(["replicate"], ["t*"]))
    file.add_token("client", everything("publish"))
    async with leading(tmp_path / "d", certificates, auth_file=file.write()) as leader:
        for target in ("/cluster/replicate", "/cluster/forward?listener=tcp"):
            for token, status in (("", 401), (bearer("all-others"), 403), (bearer("limited"), 403)):
                async with leader.upgraded(target, token, status=status):
                    pass
        async with leader.upgraded("/cluster/forward?listener=tcp", bearer("member")) as stream:
            client = RawClient(stream)
            await client.send(b"  V2" + auth("client-secret"))  # a client has its own token
            frame = await client.frame()
            assert frame is not None
            assert json.loads(frame[1])["identity"] == "client"
            await client.send(pub("t", b"x"))
            await client.ok()


@BOTH
@pytest.mark.parametrize("target", ["/cluster/replicate", "/cluster/forward?listener=tcp"])
async def test_connections_of_a_revoked_member_end(
    tmp_path: Path, certificates: Certificates, tls: bool, target: str
) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("admin", everything("admin"))
    for name in ("a", "b"):
        file.add_token(name, everything(*ALL_ROLES))
    path = tmp_path / "audit.log"
    async with (
        leading(tmp_path / "d", certificates, auth_file=file.write(), audit_log=str(path)) as leader,
        leader.upgraded(target, bearer("a"), tls=tls) as a,
        leader.upgraded(target, bearer("b"), tls=tls) as b,
    ):
        if "forward" in target:
            first = RawClient(a)
            await first.send(b"  V2" + auth("a-secret"))
            assert await first.frame() is not None  # a client without an identity is closed in any case
        file.add_token("a", everything("read"))
        file.write()
        await put(leader.bound, "/config/auth_file", str(file.path).encode())
        with trio.fail_after(PATIENCE_S):
            assert await at_its_end(a)
        if "forward" in target:
            client = RawClient(b)
            await client.send(b"  V2" + auth("b-secret"))
            assert await client.frame() is not None
    recorded = [json.loads(line) for line in path.read_text().splitlines()]
    of_members = [(each["event"], each["name"]) for each in recorded if "/cluster/" in each.get("action", "")]
    connected = [("action", "a"), ("action", "b")] if "replicate" in target else []
    assert of_members == [*connected, ("closed", "a")]


async def at_its_end(stream: trio.abc.ReceiveStream) -> bool:
    try:
        return await stream.receive_some() == b""
    except trio.BrokenResourceError:
        return True


async def put(bound: BoundAddresses, target: str, body: bytes) -> None:
    host, _, port = str(bound.http_address).rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        head = f"PUT {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nAuthorization: {bearer('admin')}\r\n"
        await stream.send_all(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert b"".join([bytes(data) async for data in stream]).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("", "MISSING_ARG_LISTENER"),
        ("listener=udp", "INVALID_ARG_LISTENER"),
        ("listener=https", "INVALID_ARG_LISTENER"),  # there is none
        ("listener=tcp&client=evil", "INVALID_ARG_CLIENT"),
        (f"listener=tcp&client={CLIENT}%0aforged", "INVALID_ARG_CLIENT"),
        (f"listener=tcp&client={CLIENT}", "NO_CLUSTER"),
    ],
)
async def test_invalid_requests_are_refused(tmp_path: Path, query: str, code: str) -> None:
    async with running_broker(tmp_path) as bound:
        leader = Leader(bound, Replication(tmp_path / "none", "prod", "one", 1), ssl.create_default_context())
        status = 404 if code == "NO_CLUSTER" else 400
        async with leader.upgraded(f"/cluster/forward?{query}", status=status) as stream:
            body = b"".join([bytes(data) async for data in stream])
        assert json.loads(body)["message"].startswith(code)
        async with leader.upgraded("/cluster/replicate", status=404) as stream:
            assert b"NO_CLUSTER: this broker is not a member" in await stream.receive_some()
