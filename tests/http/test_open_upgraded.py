"""Tests for the client that switches to the protocol of a cluster, with correct and faulty servers."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from broker.certificates import Certificates
from broker.support import PATIENCE_S
from trio_nsq.access.secret import NO_SECRET, Secret
from trio_nsq.http.upgrade import UpgradeFailed, open_upgraded
from trio_nsq.protocol import NSQError
from trio_nsq.tls.context import server_context
from trio_nsq.tls.session import TLSSession
from trio_nsq.tls.settings import TLSSettings
from trio_nsq.tls.stream import TLSStream

SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: trio-nsq-cluster\r\n\r\n"


class Server:
    """A server that reads the head of a request, sends an answer in pieces, and then what it gets, in brackets.

    Attributes:
        heads: The heads of the requests.
    """

    def __init__(self, *pieces: bytes, settings: TLSSettings | None = None, stays: bool = False) -> None:
        self.heads: list[bytes] = []
        self._pieces = pieces
        self._stays = stays
        self._context = server_context(settings) if settings is not None else None
        self.port = 0

    @property
    def url(self) -> str:
        return f"{'http' if self._context is None else 'https'}://127.0.0.1:{self.port}"

    async def _serve(self, plain: trio.SocketStream) -> None:
        stream: trio.abc.HalfCloseableStream = plain
        if self._context is not None:
            stream = secure = TLSStream(plain, TLSSession(self._context))
            await secure.do_handshake()
        async with stream:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                if not (data := await stream.receive_some(1)):
                    return
                head += data
            self.heads.append(head)
            for piece in self._pieces:
                await stream.send_all(piece)
                await trio.testing.wait_all_tasks_blocked()
            if self._stays:
                await trio.sleep_forever()
            if not any(b"Upgrade: trio" in piece for piece in self._pieces):
                return
            async for data in stream:
                await stream.send_all(b"[" + data + b"]")
            await stream.send_all(b"end")

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listener.socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self._forgiving, [listener])
            yield
            nursery.cancel_scope.cancel()

    async def _forgiving(self, stream: trio.SocketStream) -> None:
        try:
            await self._serve(stream)
        except (NSQError, trio.BrokenResourceError):
            await trio.aclose_forcefully(stream)


async def rest(stream: trio.abc.ReceiveStream) -> bytes:
    with trio.fail_after(PATIENCE_S):
        return b"".join([bytes(data) async for data in stream])


async def failure(server: Server, secret: Secret = NO_SECRET, **options: object) -> UpgradeFailed:
    """Return the error; its text without the URL."""
    with pytest.raises(UpgradeFailed) as caught:
        await open_upgraded(
            server.url,
            "/cluster/replicate",
            secret=secret,
            timeout_s=PATIENCE_S,
            **options,  # type: ignore[arg-type]  # of several types
        )
    assert str(caught.value).startswith(f"{server.url} ")
    return caught.value


def answer(status: str, message: str) -> bytes:
    body = json.dumps({"message": message}).encode()
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certificates")


def settings(certificates: Certificates, **more: object) -> TLSSettings:
    options = certificates.options
    return TLSSettings(cert=options["tls_cert"], key=options["tls_key"], **more)  # type: ignore[arg-type]  # of several types


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([SWITCHED], id="whole"),
        pytest.param([SWITCHED[:40], SWITCHED[40:]], id="in parts"),
        pytest.param([SWITCHED + b"ea", b"rly"], id="with data"),
        pytest.param([b"HTTP/1.1 102 Processing\r\n\r\n" + SWITCHED], id="after another status"),
    ],
)
async def test_the_stream_after_the_answer(
    certificates: Certificates, pieces: list[bytes], tls: bool
) -> None:
    server = Server(*pieces, settings=settings(certificates) if tls else None)
    async with server.run():
        stream = await open_upgraded(
            server.url,
            "/cluster/forward?listener=tcp&client=[fe80::1%25eth0]:1",
            secret=Secret("qnsq_x"),
            tls=certificates.client_context() if tls else None,
            timeout_s=PATIENCE_S,
        )
        async with stream:
            early = b"early" if len(pieces) == 2 and pieces[1] == b"rly" else b""
            received = b""
            while len(received) < len(early):
                with trio.fail_after(PATIENCE_S):
                    more = await stream.receive_some(len(early) - len(received))
                assert more
                received += more
            assert received == early
            for _ in range(2):
                await stream.send_all(b"x" * 100_000)
            await stream.send_eof()
            echoed = await rest(stream)  # one side has ended, the other has not
            assert echoed.endswith(b"end")
            assert echoed.count(b"x") == 200_000
    (head,) = server.heads
    assert head.startswith(b"GET /cluster/forward?listener=tcp&client=%5Bfe80::1%25eth0%5D:1 HTTP/1.1\r\n")
    assert b"\r\nHost: 127.0.0.1:%d\r\n" % server.port in head
    assert b"\r\nAuthorization: Bearer qnsq_x\r\n" in head
    assert b"\r\nConnection: Upgrade\r\nUpgrade: trio-nsq-cluster\r\n" in head


TOKEN = "refuses the connection: this needs a token of the role replicate: --cluster-auth-secret-file"


@pytest.mark.parametrize(
    ("reply", "reason", "status"),
    [
        (answer("401 Unauthorized", "AUTH_REQUIRED"), f"{TOKEN} (401 AUTH_REQUIRED)", 401),
        (answer("403 Forbidden", "FORBIDDEN: x"), f"{TOKEN} (403 FORBIDDEN: x)", 403),
        (answer("403 Forbidden", "TLS_REQUIRED"), "requires https: --cluster-tls", 403),
        (answer("404 Not Found", "NO_CLUSTER: x"), "is not a member of a cluster", 404),
        (
            answer("404 Not Found", "NOT_FOUND"),
            "does not know the requests of clusters: is it an older version, or another server?",
            404,
        ),
        (
            answer("426 Upgrade Required", "UPGRADE_REQUIRED: x"),
            "has not got the request for trio-nsq-cluster: a proxy between them may have removed it",
            426,
        ),
        (
            answer("503 Service Unavailable", "TOO_MANY_CONNECTIONS: \x1b[31m"),
            "refuses the connection: 503 TOO_MANY_CONNECTIONS: \\x1b[31m",
            503,
        ),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", "refuses the connection: 200", 200),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\nhel", "refuses the connection: 200", 200),
        (
            b"HTTP/1.1 500 X\r\nContent-Length: 99999\r\n\r\n" + bytes(99999),
            "refuses the connection: 500",
            500,
        ),
        (b"HTTP/1.1 500 X\r\nContent-Length: 2\r\n\r\n[]", "refuses the connection: 500", 500),
        (b'HTTP/1.1 500 X\r\nContent-Length: 13\r\n\r\n{"message":1}', "refuses the connection: 500", 500),
        (b"", "has closed the connection", 0),
        (b"HTTP/1.1 101 Switch", "has closed the connection", 0),
        (b"E_INVALID not HTTP", "does not speak HTTP: is this the HTTP port of a broker?", 0),
        (
            b"HTTP/1.1 200 OK\r\nX: " + bytes(100_000),
            "does not speak HTTP: is this the HTTP port of a broker?",
            0,
        ),
    ],
)
async def test_the_reason_of_a_refusal(reply: bytes, reason: str, status: int) -> None:
    server = Server(*([reply] if reply else []))
    async with server.run():
        error = await failure(server)
    assert str(error) == f"{server.url} {reason}"
    assert error.status == status


async def test_nobody_listens() -> None:
    server = Server()
    async with server.run():
        pass
    assert str(await failure(server)).endswith("cannot be reached: Connection refused")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://nowhere.invalid:1", "cannot be reached: "),
        ("ftp://127.0.0.1:1", "is not a valid address: "),
        ("http://:1", "is not a valid address: "),
    ],
)
async def test_addresses(url: str, reason: str) -> None:
    with pytest.raises(UpgradeFailed, match=f"^{url} {reason}"):
        await open_upgraded(url, "/x", secret=NO_SECRET, timeout_s=PATIENCE_S)


async def test_a_certificate_that_is_not_trusted(certificates: Certificates) -> None:
    server = Server(SWITCHED, settings=settings(certificates))
    async with server.run():
        reason = "cannot be reached: its certificate is not trusted: "
        assert f"{reason}unable to get local issuer certificate" in str(await failure(server))
        context = certificates.client_context()
        other_name = await failure(server, tls=context, server_name="example.org")
        assert f"{reason}Hostname mismatch" in str(other_name)
        stream = await open_upgraded(
            server.url, "/x", secret=NO_SECRET, tls=context, server_name="localhost", timeout_s=PATIENCE_S
        )
        await trio.aclose_forcefully(stream)


async def test_a_server_without_tls() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    url = f"https://127.0.0.1:{listeners[0].socket.getsockname()[1]}"

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        with pytest.raises(UpgradeFailed, match=r"^https://\S+ cannot be reached: TLS: wrong version number"):
            await open_upgraded(url, "/x", secret=NO_SECRET, timeout_s=PATIENCE_S)
        nursery.cancel_scope.cancel()


async def test_a_server_that_requires_a_certificate(certificates: Certificates) -> None:
    demanding = settings(certificates, client_auth_policy="require-verify", root_ca_file=certificates.ca_path)
    server = Server(SWITCHED, settings=demanding)
    async with server.run():
        error = await failure(server, tls=certificates.client_context())
        assert "cannot be reached: TLS: " in str(error)
        context = certificates.client_context("known")
        await trio.aclose_forcefully(
            await open_upgraded(server.url, "/x", secret=NO_SECRET, tls=context, timeout_s=PATIENCE_S)
        )


async def test_the_file_of_the_token(tmp_path: Path) -> None:
    server = Server(SWITCHED)
    async with server.run():
        file = tmp_path / "token"
        error = await failure(server, Secret(file=file))
        assert str(error).startswith(f"{server.url} needs a token: auth_secret_file {file}: No such file")
        file.write_text("first\n")
        for token in (b"first", b"second"):  # it is read for each connection
            stream = await open_upgraded(server.url, "/x", secret=Secret(file=file), timeout_s=PATIENCE_S)
            await trio.aclose_forcefully(stream)
            assert b"Bearer " + token in server.heads[-1]
            file.write_text("second\n")


async def test_a_server_that_does_not_answer(autojump_clock: MockClock) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
    with pytest.raises(UpgradeFailed, match=f"^{url} does not answer within 3 s$"):
        await open_upgraded(url, "/x", secret=NO_SECRET, timeout_s=3)
    assert 3 <= trio.current_time() < 4  # the limit, and nothing else, has ended it
    await listeners[0].aclose()


async def test_the_body_of_a_refusal_is_not_read_without_end() -> None:
    server = Server(b"HTTP/1.1 500 X\r\nContent-Length: 9999999\r\n\r\n" + bytes(20_000), stays=True)
    async with server.run():
        assert str(await failure(server)) == f"{server.url} refuses the connection: 500"
