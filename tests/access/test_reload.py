"""An auth file that changes while the broker runs: what is revoked or has expired is closed, and nothing else."""

import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
import trio.testing

from access.support import (
    ALL_ROLES,
    Answer,
    AuthFile,
    Given,
    attempt,
    auth,
    authenticated,
    bearer,
    everything,
    http_connected,
    request,
)
from broker.certificates import Certificates
from broker.support import PATIENCE_S, RawClient, connected, pub, running_broker, settle
from interop.peers import qcli_serve
from trio_nsq.access.auth_file import AuthFileError
from trio_nsq.access.authentication import Authentication
from trio_nsq.broker import BoundAddresses
from trio_nsq.protocol.errors import StartupError


class Reloadable:
    """A broker and its auth file."""

    def __init__(self, bound: BoundAddresses, file: AuthFile) -> None:
        self.bound = bound
        self.file = file

    async def ask(self, method: str, target: str, token: str, body: bytes = b"") -> Answer:
        """Send a request over a connection of its own."""
        assert self.bound.http_address is not None
        async with http_connected(self.bound.http_address) as connection:
            return await connection.request(method, target, {"Authorization": token}, body)

    async def reload(self) -> Answer:
        """PUT /config/auth_file, as the token `admin`."""
        return await self.ask("PUT", "/config/auth_file", bearer("admin"), str(self.file.path).encode())

    async def change(self) -> None:
        """Write the changed file, and have the broker read it."""
        self.file.write()
        assert (await self.reload()).status == 200


@asynccontextmanager
async def reloadable(folder: Path) -> AsyncIterator[Reloadable]:
    """A broker with the tokens `admin`, and `a` and `b` with all roles."""
    file = AuthFile(folder / "auth.toml")
    file.add_token("admin", everything("admin", "manage"))
    file.add_token("a", everything(*ALL_ROLES))
    file.add_token("b", everything(*ALL_ROLES))
    async with running_broker(folder / "d", auth_file=file.write()) as bound:
        yield Reloadable(bound, file)


async def changed(broker: Reloadable, change: str) -> int:
    """Revoke the token `a`, or limit it to another topic, or do neither; return the status of its requests."""
    if change == "revoked":
        del broker.file.entries["a"]
    elif change == "limited":
        broker.file.add_token("a", Given(ALL_ROLES, ["else"]))
    await broker.change()
    return {"revoked": 401, "limited": 403}.get(change, 200)


async def is_closed(client: RawClient) -> bool:
    """Whether the broker has closed a connection, or does so soon."""
    with trio.fail_after(PATIENCE_S):
        return await client.frame() is None


async def test_the_connections_of_a_revoked_token_are_closed(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as broker:
        address = broker.bound.tcp_address
        async with (
            connected(address) as a1,
            connected(address) as a2,
            connected(address) as b,
            connected(address) as new,
        ):
            for client, name in ((a1, "a"), (a2, "a"), (b, "b")):
                await authenticated(client, f"{name}-secret")
            await a1.subscribe("t", "c", ready_count=1)
            await b.subscribe("t", "c", ready_count=1)
            await broker.change()  # nothing has changed
            assert await attempt(a2, pub("t2", b"x")) == "OK"
            del broker.file.entries["a"]
            await broker.change()
            assert await is_closed(a1)
            assert await is_closed(a2)
            await b.publish("t", b"x")
            assert (await b.message()).body == b"x"
            assert (await attempt(new, auth("a-secret"))).startswith("E_AUTH_FAILED")
        assert (await broker.ask("GET", "/info", bearer("a"))).message == "INVALID_TOKEN"


async def test_messages_in_flight_to_a_revoked_consumer_go_to_others(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as broker:
        async with connected(broker.bound.tcp_address) as a, connected(broker.bound.tcp_address) as b:
            await authenticated(a, "a-secret")
            await authenticated(b, "b-secret")
            await a.subscribe("t", "c", ready_count=1)
            await b.subscribe("t", "c")
            assert await attempt(b, pub("t", b"x")) == "OK"
            assert (await a.message()).body == b"x"
            del broker.file.entries["a"]
            await broker.change()
            await b.send(b"RDY 1\n")
            again = await b.message()
            assert (again.body, again.attempts) == (b"x", 2)


async def test_a_consumer_whose_role_is_withdrawn_is_closed(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as broker:
        address = broker.bound.tcp_address
        async with connected(address) as mine, connected(address) as other, connected(address) as idle:
            for client in (mine, other, idle):
                await authenticated(client, "a-secret")
            await mine.subscribe("t", "mine")
            await other.subscribe("t", "other")
            broker.file.add_token("a", Given(["consume"], ["t"], ["mine"]))
            await broker.change()
            assert await is_closed(other)
            assert (await attempt(mine, b"FIN 0123456789abcdef\n")).startswith("E_FIN_FAILED")
            # It may stay, and may not publish any more.
            assert (await attempt(idle, pub("t", b"x"))).startswith("E_UNAUTHORIZED")


async def test_a_role_to_publish_that_is_withdrawn_is_gone_at_once(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as broker, connected(broker.bound.tcp_address) as client:
        await authenticated(client, "a-secret")
        for _ in range(3):
            assert await attempt(client, pub("t", b"x")) == "OK"
        broker.file.add_token("a", Given(["publish"], ["else"]))
        await broker.change()
        assert await attempt(client, pub("t", b"x")) == 'E_UNAUTHORIZED AUTH failed for PUB on "t" ""'


async def test_a_kept_http_connection_whose_token_is_revoked(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as broker:
        assert broker.bound.http_address is not None
        async with http_connected(broker.bound.http_address) as connection:
            headers = {"Authorization": bearer("a")}
            assert (await connection.request("POST", "/pub?topic=t", headers, b"x")).status == 200
            del broker.file.entries["a"]
            await broker.change()
            assert (
                await connection.request("POST", "/pub?topic=t", headers, b"x")
            ).message == "INVALID_TOKEN"
            assert await connection.ends()


@pytest.mark.parametrize("change", ["revoked", "limited", "neither"])
@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("POST", "/pub?topic=t", b"x"),
        ("POST", "/mpub?topic=t", b"x"),
        ("PUT", "/topic/settings?topic=t", b"{}"),
    ],
)
async def test_a_body_that_arrives_after_its_token_is_revoked(
    tmp_path: Path, method: str, target: str, body: bytes, change: str
) -> None:
    async with reloadable(tmp_path) as broker:
        assert broker.bound.http_address is not None
        await broker.ask("POST", "/topic/create?topic=t", bearer("b"))
        async with http_connected(broker.bound.http_address) as connection:
            whole = request(method, target, {"Authorization": bearer("a"), "Expect": "100-continue"}, body)
            await connection.send(whole[: -len(body)])
            await connection.until(b"100 Continue\r\n\r\n")  # the head was accepted
            status = await changed(broker, change)
            await connection.send(body)
            assert (await connection.answer()).status == status
            if status != 200:
                assert await connection.ends()
        log = await broker.ask("GET", "/topic/bounds?topic=t", bearer("b"))
        expected = 1 if status == 200 and method == "POST" else 0
        assert json.loads(log.body)["next_sequence"] == expected


@pytest.mark.parametrize("change", ["revoked", "limited", "neither"])
async def test_a_request_that_waits_behind_another_one_while_its_token_is_revoked(
    tmp_path: Path, change: str
) -> None:
    """The first request is another token's, so nothing else ends the connection."""
    async with reloadable(tmp_path) as broker:
        assert broker.bound.http_address is not None
        await broker.ask("POST", "/pub?topic=t", bearer("b"), b"first")
        async with http_connected(broker.bound.http_address) as connection:
            await connection.send(
                request("GET", "/topic/read?topic=t&wait=60s&max_messages=2", {"Authorization": bearer("b")})
                + request("POST", "/topic/delete?topic=t", {"Authorization": bearer("a")})
            )
            await connection.until(b'"body":"first"}\n\r\n')
            status = await changed(broker, change)
            await broker.ask("POST", "/pub?topic=t", bearer("b"), b"second")
            await connection.until(b"0\r\n\r\n")
            assert (await connection.answer()).status == status
        after = await broker.ask("GET", "/topic/bounds?topic=t", bearer("b"))
        assert after.status == (404 if status == 200 else 200)


@pytest.mark.parametrize("change", ["revoked", "limited"])
async def test_a_long_response_ends_when_its_token_is_revoked(tmp_path: Path, change: str) -> None:
    async with reloadable(tmp_path) as broker:
        assert broker.bound.http_address is not None
        await broker.ask("POST", "/pub?topic=t", bearer("b"), b"first")
        async with http_connected(broker.bound.http_address) as connection:
            await connection.send(
                request("GET", "/topic/read?topic=t&wait=60s", {"Authorization": bearer("a")})
            )
            await connection.until(b'"body":"first"}\n\r\n')
            await broker.change()  # nothing has changed
            await broker.ask("POST", "/pub?topic=t", bearer("b"), b"second")
            await connection.until(b'"body":"second"}\n\r\n')
            if change == "revoked":
                del broker.file.entries["a"]
            else:
                broker.file.add_token("a", Given(ALL_ROLES, ["else"]))
            await broker.change()
            await broker.ask("POST", "/pub?topic=t", bearer("b"), b"third")
            assert (
                await connection.ends()
            )  # without the end of the chunks: the client knows that it is not all


@pytest.mark.parametrize("contents", ["", "[[token", '[[token]]\nname = "x"\n', None])
async def test_broken_contents_change_nothing(tmp_path: Path, contents: str | None) -> None:
    """An empty file is valid, and revokes everything; also the token that has asked for it."""
    async with reloadable(tmp_path) as broker, connected(broker.bound.tcp_address) as client:
        await authenticated(client, "a-secret")
        if contents is None:
            broker.file.path.unlink()
        else:
            broker.file.path.write_text(contents)
        answer = await broker.reload()
        if contents == "":
            assert answer.status == 200
            assert await is_closed(client)
            assert (await broker.reload()).status == 401
            return
        assert answer.status == 400
        assert answer.message.startswith("INVALID_VALUE: ")
        assert str(broker.file.path) in answer.message
        assert answer.message.endswith("; the previous contents stay in use")
        assert await attempt(client, pub("t", b"x")) == "OK"
        assert (await broker.ask("GET", "/info", bearer("b"))).status == 200


async def test_another_file_cannot_be_read(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as broker:
        for path in (b"/etc/passwd", b"", b"auth.toml", str(broker.file.path).encode() + b"\n"):
            answer = await broker.ask("PUT", "/config/auth_file", bearer("admin"), path)
            assert answer.status in (400, 413)
            assert b"root" not in answer.body
        assert (await broker.ask("PUT", "/config/auth_file", bearer("a"), b"/etc/passwd")).status == 400


@pytest.mark.slow
def test_sighup(tmp_path: Path) -> None:
    """A certificate that cannot be read does not keep a revoked token valid."""
    tls = Certificates(tmp_path / "certificates").options
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("a", everything(*ALL_ROLES))
    file.add_token("b", everything(*ALL_ROLES))
    flags = [f"--tls-cert={tls['tls_cert']}", f"--tls-key={tls['tls_key']}"]
    with qcli_serve(tmp_path / "d", f"--auth-file={file.write()}", *flags) as broker:

        async def run() -> None:
            async with connected(broker.tcp_address) as a, connected(broker.tcp_address) as b:
                await authenticated(a, "a-secret")
                await authenticated(b, "b-secret")
                del file.entries["a"]
                file.write()
                tls["tls_cert"].write_text("broken")
                broker.process.send_signal(signal.SIGHUP)
                assert await is_closed(a)
                assert await attempt(b, pub("t", b"x")) == "OK"
                file.path.write_text("broken")
                broker.process.send_signal(signal.SIGHUP)
                while not any("auth file" in line and "stay in use" in line for line in broker.log()):
                    assert await attempt(b, pub("t", b"x")) == "OK"

        trio.run(run)


# ---------------------------------------------------------------------- expiry


async def test_a_token_expires_while_its_connection_is_used(tmp_path: Path) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("lasting", everything(*ALL_ROLES))
    expires = datetime.fromtimestamp(time.time() + 2, UTC).isoformat()
    file.add_token("short", everything(*ALL_ROLES), expires=expires)
    async with running_broker(tmp_path / "d", auth_file=file.write()) as bound:
        async with connected(bound.tcp_address) as short, connected(bound.tcp_address) as lasting:
            await authenticated(lasting, "lasting-secret")
            await authenticated(short, "short-secret")
            await short.subscribe("t", "c")
            assert await is_closed(short)
            assert time.time() >= datetime.fromisoformat(expires).timestamp()
            assert await attempt(lasting, pub("t", b"x")) == "OK"


class Renewals:
    """Connections whose renewals are counted, at the times of a clock."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.at: list[float] = []
        self.passes_s = 0.0

    def renew_identities(self) -> int:
        self.at.append(self.now_s)
        self.now_s += self.passes_s
        return 0


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that stands still until a test moves it."""
    return trio.testing.MockClock()


async def test_each_expiry_is_looked_at_in_time(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    """Also one that passes while the connections are renewed for the one before."""
    file = AuthFile(tmp_path / "auth.toml")
    for name, second in (("a", 10), ("b", 11), ("c", 30)):
        file.add_token(name, everything("read"), expires=f"1970-01-01T00:00:{second}Z")
    connections = Renewals(0.0)
    authentication = Authentication(file.write(), verifies_clients=False, unix_time=lambda: connections.now_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(authentication.watch_expiry, connections)
        await settle()
        connections.at.clear()

        async def jump(seconds: float) -> None:
            connections.now_s += seconds
            clock.jump(seconds)
            await settle()

        await jump(9.9)
        assert connections.at == []
        connections.passes_s = 2.0
        await jump(0.1)  # the renewal for `a` takes until `b` has expired
        connections.passes_s = 0.0
        assert connections.at == [10.0]
        await jump(1.0)
        assert connections.at[1:] == [13.0]
        await jump(17.0)
        assert connections.at[2:] == [30.0]
        await jump(59.0)
        assert connections.at[3:] == []
        await jump(1.0)  # the wall clock may have been set
        assert connections.at[3:] == [90.0]
        nursery.cancel_scope.cancel()


async def test_a_certificate_needs_verification(tmp_path: Path) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_certificate("backup", "CN=backup", everything("read"))
    with pytest.raises(StartupError, match=r"--auth-file: .* has certificates, but .* does not verify"):
        Authentication(file.write(), verifies_clients=False)
    del file.entries["backup"]
    authentication = Authentication(file.write(), verifies_clients=False)
    file.add_certificate("backup", "CN=backup", everything("read"))
    file.write()
    with pytest.raises(AuthFileError, match="has certificates"):
        await authentication.reload(Renewals(0.0))
