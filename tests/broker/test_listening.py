"""Tests for addresses to listen at: host and port, or the path of a unix socket."""

import errno
import os
import resource
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from broker.certificates import Certificates
from broker.support import (
    PATIENCE_S,
    RawClient,
    identify,
    left_open,
    open_files_before,
    refusal,
    running_broker,
    settle,
)
from trio_nsq.broker import BrokerOptions, StartupError, serve
from trio_nsq.event_loop.reactor import Poller
from trio_nsq.protocol.address import parse_address
from trio_nsq.server.listening import accept_clients, is_exposed, listen, loopback_host


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a short path: those of unix sockets are limited to about a hundred bytes."""
    (tmp_path / "s").mkdir()
    monkeypatch.chdir(tmp_path / "s")
    return Path()


def at_paths() -> dict[str, Any]:
    return {"tcp_address": "./tcp", "http_address": "./http"}


@asynccontextmanager
async def unix_client(path: str) -> AsyncIterator[RawClient]:
    async with await trio.open_unix_socket(path) as stream:
        client = RawClient(stream)
        await client.send(b"  V2")
        yield client


async def test_clients_are_accepted_as_soon_as_descriptors_are_free(
    tmp_path: Path, mock_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with running_broker(tmp_path / "d") as bound, AsyncExitStack() as stack:
        await settle()  # the broker has all its descriptors
        clients = [stack.enter_context(socket.socket()) for _ in range(3)]
        os.close(lowest := os.dup(clients[0].fileno()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            for client in clients:
                client.connect(parse_address(bound.tcp_address))
                await settle()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert caplog.text.count("cannot accept a client: Too many open files; retrying in 0.1 s") == 1
        mock_clock.jump(0.1)
        for client in clients:
            client.setblocking(False)
            raw = RawClient(trio.SocketStream(trio.socket.from_stdlib_socket(client)))
            await raw.send(b"  V2" + identify())
            await raw.ok()


async def test_a_listener_that_is_closed_accepts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    accepted: list[socket.socket] = []
    poller = Poller()
    poller.open()
    listening = await listen("--flag", "127.0.0.1:0")
    with ExitStack() as stack:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                accept_clients, lambda sock, _: accepted.append(sock), listening.listeners, poller
            )
            await settle()
            for _ in range(50):  # more than at once, so that the poller will serve the listener again
                client = stack.enter_context(socket.socket())
                client.connect(parse_address(listening.address))
            assert poller.poll()
            poller.serve()
            nursery.cancel_scope.cancel()
        before = len(accepted)
        assert 0 < before < 50
        poller.poll()
        poller.serve()
        assert len(accepted) == before
        assert not caplog.text
        for sock in accepted:
            sock.close()
    poller.close()


async def test_a_client_that_cannot_be_served_does_not_affect_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    accepted: list[socket.socket] = []

    def begin(sock: socket.socket, _: str) -> None:
        accepted.append(sock)
        if len(accepted) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    poller = Poller()
    poller.open()
    listening = await listen("--flag", "127.0.0.1:0")
    with ExitStack() as stack:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept_clients, begin, listening.listeners, poller)
            await settle()
            first, second = [stack.enter_context(socket.socket()) for _ in range(2)]
            for client in (first, second):
                client.connect(parse_address(listening.address))
            assert poller.poll()
            poller.serve()
            nursery.cancel_scope.cancel()
        assert first.recv(1) == b""
        assert len(accepted) == 2
        assert accepted[1].send(b"x") == 1
        assert second.recv(1) == b"x"
        accepted[1].close()
    assert "No space left on device" in caplog.text
    poller.close()


def unix_http(path: str, **options: Any) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=path, **options)
    scheme = "https" if options else "http"
    return httpx.AsyncClient(transport=transport, base_url=f"{scheme}://localhost", timeout=PATIENCE_S)


@pytest.mark.parametrize(
    "addresses", [{"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0"}, at_paths()]
)
async def test_listeners_of_the_caller_stay_open(folder: Path, addresses: dict[str, Any]) -> None:
    """Clients that come between two brokers wait, and are served by the second one."""
    options = BrokerOptions(data_path=folder / "d", **addresses)
    listeners = {name: await listen("", addresses[f"{name.lower()}_address"]) for name in ("TCP", "HTTP")}
    address = listeners["TCP"].address
    try:
        for _ in range(2):
            with trio.fail_after(PATIENCE_S):
                if address == "./tcp":
                    stream = await trio.open_unix_socket(address)
                else:
                    stream = await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2]))
                async with stream, trio.open_nursery() as nursery:
                    bound = await nursery.start(partial(serve, options, listeners=listeners))
                    assert bound.tcp_address == address
                    client = RawClient(stream)
                    await client.send(b"  V2")
                    await client.publish("t", b"x")
                    nursery.cancel_scope.cancel()
    finally:
        for listening in listeners.values():
            listening.close()
    assert not (folder / "tcp").exists()


async def test_clients_are_served_at_paths(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running_broker(folder / "d", **at_paths()) as bound:
        assert (bound.tcp_address, bound.http_address) == ("./tcp", "./http")
        async with unix_client("./tcp") as consumer, unix_http("./http") as http:
            await consumer.subscribe("t", "c", ready_count=1)
            assert (await http.post("/pub?topic=t", content=b"x")).text == "OK"
            assert (await consumer.message()).body == b"x"
            info = (await http.get("/info")).json()
            assert (info["tcp_port"], info["http_port"]) == (-1, -1)
            (topic,) = (await http.get("/stats?format=json")).json()["topics"]
            (client,) = topic["channels"][0]["clients"]
            shown = [client[key] for key in ("client_id", "hostname", "remote_address")]
            assert shown == ["", "", "@"]
            assert (await http.get("/config/tcp_address")).text == "./tcp"
    messages = [record.getMessage() for record in caplog.records]
    assert "TCP: listening on ./tcp" in messages
    assert "TCP: new client(@)" in messages
    assert any(message.startswith("200 GET /info (@) ") for message in messages)


async def test_client_with_a_path_is_shown_with_it(folder: Path) -> None:
    async with running_broker(folder / "d", **at_paths()), unix_http("./http") as http:
        with trio.socket.socket(trio.socket.AF_UNIX) as sock:
            await sock.bind("./cli\nent")
            await sock.connect("./tcp")
            client = RawClient(trio.SocketStream(sock))
            await client.send(b"  V2")
            await client.publish("t", b"x")
            (producer,) = (await http.get("/stats?format=json")).json()["producers"]
            assert producer["remote_address"] == r"'./cli\nent'"


async def test_https_at_a_path(folder: Path) -> None:
    certificates = Certificates(folder / "c")
    options: dict[str, Any] = {**certificates.options, "https_address": "./https", "tls_required": "true"}
    async with running_broker(folder / "d", **options) as bound, httpx.AsyncClient() as plain:
        async with unix_http("./https", verify=certificates.client_context()) as http:
            assert (await http.get("/ping")).text == "OK"
        answer = await plain.get(f"http://{bound.http_address}/ping")
        assert answer.json() == {"message": "TLS_REQUIRED", "https_port": 0}


async def test_mode_follows_the_umask_and_the_file_is_removed_at_the_stop(folder: Path) -> None:
    before = os.umask(0o022)
    try:
        async with running_broker(folder / "d", **at_paths()):
            mode = (folder / "tcp").stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o755
    finally:
        os.umask(before)
    assert sorted(os.listdir(folder)) == ["d"]


async def test_stale_file_is_replaced(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind("./tcp")
        left.listen()
    async with running_broker(folder / "d", **at_paths()), unix_client("./tcp") as client:
        await client.publish("t", b"x")


async def test_socket_that_never_listened_is_replaced(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as idle:
        idle.bind("./tcp")
        async with running_broker(folder / "d", **at_paths()), unix_client("./tcp") as client:
            await client.publish("t", b"x")


@pytest.mark.parametrize("backlog", [5, 0], ids=["answers", "too busy to answer"])
async def test_socket_in_use_is_kept(folder: Path, backlog: int) -> None:
    waiting: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as used:
        used.bind("./tcp")
        used.listen(backlog)
        if not backlog:
            waiting = list(fill_backlog("./tcp"))
        before = open_files_before()
        text = await refusal(folder / "d", **at_paths())
        assert text.startswith("--tcp-address: ./tcp is in use. Another server may be running: ")
        assert not left_open(before)
        if not backlog:
            used.accept()[0].close()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect("./tcp")
        for sock in waiting:
            sock.close()


def fill_backlog(path: str) -> Iterator[socket.socket]:
    """Connect until the queue is full."""
    while True:
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        if client.connect_ex(path):
            client.close()
            return
        yield client


async def test_file_that_is_not_a_socket_is_kept(folder: Path) -> None:
    (folder / "tcp").write_text("mine")
    text = await refusal(folder / "d", **at_paths())
    assert text == "--tcp-address: ./tcp already exists and is not a socket"
    assert (folder / "tcp").read_text() == "mine"


async def test_failure_of_the_second_address_releases_the_first(folder: Path) -> None:
    before = open_files_before()
    text = await refusal(folder / "d", tcp_address="./tcp", http_address="./no/http")
    assert text == "--http-address: cannot listen on ./no/http: No such file or directory"
    assert sorted(os.listdir(folder)) == ["d"]
    assert not left_open(before)


async def test_file_of_another_process_stays_at_the_stop(folder: Path) -> None:
    async with running_broker(folder / "d", **at_paths()):
        (folder / "tcp").unlink()
        (folder / "tcp").write_text("mine")
    assert (folder / "tcp").read_text() == "mine"


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("./" + "x" * 200, "--flag: cannot listen on ./xxx"),
        ("tcp", "--flag: tcp is neither host:port nor the path of a unix socket"),
        ("127.0.0.1:x", "--flag: 127.0.0.1:x is neither"),
        ("127.0.0.1:65536", "--flag: 127.0.0.1:65536 is neither"),
        ("127.0.0.1:\u0663", "--flag: 127.0.0.1:\u0663 is neither"),
        (
            "203.0.113.1:4150",
            "--flag: cannot listen on 203.0.113.1:4150: Cannot assign requested address. This machine does not have "
            "the address: use one of its own, or 0.0.0.0:4150 for all",
        ),
    ],
)
async def test_invalid_address(folder: Path, address: str, text: str) -> None:
    with pytest.raises(StartupError) as refused:
        await listen("--flag", address)
    assert str(refused.value).startswith(text)


async def test_no_host_means_all_interfaces(folder: Path) -> None:
    listening = await listen("--flag", ":0")
    try:
        hosts = {listener.socket.getsockname()[0] for listener in listening.listeners}
        assert "0.0.0.0" in hosts
    finally:
        listening.close()


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("127.0.0.1:1", "127.0.0.1"),
        ("127.1.2.3:1", "127.1.2.3"),
        ("[::1]:1", "::1"),
        ("0.0.0.0:1", None),
        ("[::]:1", None),
        ("10.0.0.1:1", None),
        ("[fe80::1%2]:1", None),
        ("./127.0.0.1:1", None),
    ],
)
def test_loopback_addresses(address: str, host: str | None) -> None:
    assert loopback_host(address) == host
    assert is_exposed(address) is (host is None and not address.startswith("."))
