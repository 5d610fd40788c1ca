"""Tests for the maximum numbers of clients, topics and channels, and the errors beyond them."""

import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import httpx
import pytest
import trio

from broker.certificates import Certificates
from broker.support import PATIENCE_S, connected, pub, running_broker, settle
from trio_nsq.broker.options import BrokerOptions
from trio_nsq.broker.server import Server
from trio_nsq.broker.storage.data_folder import DataFolder
from trio_nsq.protocol.address import parse_address
from trio_nsq.server.admission import Admission, connection_limit, tcp_refusal


async def test_tcp_client_beyond_the_limit_gets_an_error(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d", max_connections=2) as bound, AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(connected(bound.tcp_address)) for _ in range(2)]
        await first.publish("t", b"one")
        await second.publish("t", b"two")
        async with connected(bound.tcp_address) as third:
            await third.send(pub("t", b"three"))
            text = "E_INVALID too many connections: the broker accepts 2 (--max-connections)"
            assert await third.error() == text
            assert await third.frame() is None
        await first.publish("t", b"four")
        await second.stream.aclose()
        with trio.fail_after(20):
            while True:  # the broker notices it a moment later
                async with connected(bound.tcp_address) as next_one:
                    await next_one.send(pub("t", b"five"))
                    if await next_one.frame() == (0, b"OK"):
                        break


async def test_client_whose_socket_cannot_be_watched_takes_no_place(tmp_path: Path) -> None:
    """The kernel refuses that beyond its limit of watched descriptors. It refuses a file here, for the same call."""
    folder = DataFolder(tmp_path / "d")
    async with trio.open_nursery() as nursery:
        server = Server(BrokerOptions(data_path=tmp_path / "d"), folder, nursery)
        admission = Admission("TCP", 1, server.sessions.handle, tcp_refusal(1))
        server.poller.open()
        for _ in range(3):
            with pytest.raises(PermissionError):
                admission.begin(server.sessions.begin, nursery, unwatchable(), "client")
        assert not server.sessions.connected
        with trio.fail_after(PATIENCE_S):
            await server.sessions.close_all()  # does not wait for them

        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        admission.begin(server.sessions.begin, nursery, ours, "client")
        assert [session.peer for session in server.sessions.connected] == ["client"]
        assert admission.refused_count == 0
        theirs.close()
        server.poller.close()
        with trio.fail_after(PATIENCE_S):
            await server.sessions.close_all()
        nursery.cancel_scope.cancel()
    folder.close()


async def test_error_of_what_serves_a_client_gives_its_place_back() -> None:
    def fails(sock: socket.socket, peer: str, leave: Callable[[], None]) -> None:
        if peer != "begins":
            if peer == "leaves":
                leave()
            sock.close()
            raise OSError("no")

    admission = Admission("TCP", 1, trio.SocketStream.aclose, b"")
    async with trio.open_nursery() as nursery:
        for peer in "fails", "leaves", "fails", "begins":
            ours, theirs = socket.socketpair()
            with ours, theirs, suppress(OSError):
                admission.begin(fails, nursery, ours, peer)
        assert admission.refused_count == 0
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            admission.begin(fails, nursery, ours, "more")
            assert admission.refused_count == 1


def unwatchable() -> socket.socket:
    """Return a socket in Python that is a file to the kernel: epoll does not watch files."""
    sock = socket.socket()
    with open(os.devnull, "rb") as file:
        os.dup2(file.fileno(), sock.fileno())
    return sock


async def test_tcp_clients_leave_room_for_http(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d", max_connections=1) as bound:
        async with connected(bound.tcp_address) as client, httpx.AsyncClient() as first:
            await client.publish("t", b"one")
            url = f"http://{bound.http_address}/ping"
            assert (await first.get(url)).status_code == 200  # and its connection stays
            async with httpx.AsyncClient() as second:
                answer = await second.get(url)
            assert answer.status_code == 503
            text = "TOO_MANY_CONNECTIONS: the broker accepts 1 (--max-connections)"
            assert answer.json() == {"message": text}


async def test_https_client_beyond_the_limit_gets_an_alert(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = Certificates(tmp_path)
    context = certificates.client_context()
    async with (
        running_broker(tmp_path / "d", max_connections=1, **certificates.options) as bound,
        httpx.AsyncClient(base_url=f"https://{bound.https_address}", verify=context) as first,
    ):
        assert (await first.get("/ping")).status_code == 200  # and its connection stays
        assert "further clients are refused" not in caplog.text
        host, _, port = (bound.https_address or "").rpartition(":")
        for _ in range(3):
            async with await trio.open_ssl_over_tcp_stream(host, int(port), ssl_context=context) as second:
                with pytest.raises(trio.BrokenResourceError) as refused:
                    await second.do_handshake()
            assert "alert internal error" in str(refused.value.__cause__)
        assert (
            caplog.text.count("HTTPS: 1 clients are connected, the limit; further clients are refused") == 1
        )
        figures = (await first.get("/metrics")).text.splitlines()
        assert 'nsq_refused_connections_total{listener="HTTPS"} 3.0' in figures
        assert 'nsq_refused_connections_total{listener="TCP"} 0.0' in figures


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_default_leaves_descriptors_for_files(
    few_descriptors: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A quarter for logs, 64 for other uses; then half each for TCP and HTTP."""
    assert connection_limit(0) == (256 - 64 - 64) // 2
    assert connection_limit(0, 3) == (256 - 64 - 64) // 3
    assert connection_limit(3) == 3
    assert not caplog.text
    assert connection_limit(1000) == 64
    assert "--max-connections is 1000, but the limit of open files allows only 64" in caplog.text


async def test_new_topics_work_while_clients_use_all_their_descriptors(
    tmp_path: Path, few_descriptors: None
) -> None:
    # Other tests may have left descriptors open in this process: of four more, clients may use three.
    there = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (256 + 4 * there, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    limit = connection_limit(0)
    async with running_broker(tmp_path / "d", sync="interval") as bound, AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(connected(bound.tcp_address))
        served = 1
        for _ in range(limit + 16):  # each takes two descriptors of this process, which has both ends
            try:
                client = await stack.enter_async_context(connected(bound.tcp_address))
                await client.send(b"IDENTIFY\n\0\0\0\2{}")
                frame = await client.frame()
            except OSError:
                break
            served += frame == (0, b"OK")
        assert limit - 8 <= served <= limit
        for number in range(20):
            await publisher.publish(f"t{number}", b"x")


async def test_a_flood_of_refused_clients_leaves_descriptors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with running_broker(tmp_path / "d", max_connections=1) as bound, AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(connected(bound.tcp_address))
        await publisher.publish("t", b"x")
        await settle()  # the broker has all its descriptors
        flood = [stack.enter_context(socket.socket()) for _ in range(200)]
        os.close(lowest := os.dup(flood[0].fileno()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 64, limits[1]))
        try:
            for client in flood:
                client.setblocking(False)
                client.connect_ex(parse_address(bound.tcp_address))
            await settle()
            await publisher.publish("t2", b"x")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert "Too many open files" not in caplog.text


async def test_topic_limit(tmp_path: Path) -> None:
    reason = "there are 2 topics, as many as --max-topics allows"
    async with running_broker(tmp_path / "d", max_topics=2) as bound:
        base = f"http://{bound.http_address}"
        async with connected(bound.tcp_address) as client, httpx.AsyncClient(base_url=base) as http:
            await client.publish("one", b"x")
            assert (await http.post("/topic/create?topic=two")).status_code == 200
            for answer in (
                await http.post("/topic/create?topic=three"),
                await http.post("/pub?topic=three", content=b"x"),
            ):
                assert (answer.status_code, answer.json()) == (503, {"message": reason})
            async with connected(bound.tcp_address) as another:
                await another.send(b"SUB three c\n")
                assert await another.error() == f"E_SUB_FAILED SUB failed {reason}"
            await client.send(pub("three", b"x"))
            assert await client.error() == f"E_PUB_FAILED PUB failed {reason}"
            assert (await http.post("/topic/delete?topic=one")).status_code == 200
            assert (await http.post("/topic/create?topic=three")).status_code == 200
    # Existing topics are served, also if the limit was lowered.
    async with running_broker(tmp_path / "d", max_topics=1) as bound:
        async with connected(bound.tcp_address) as client:
            await client.publish("two", b"x")
            await client.publish("three", b"x")


async def test_channel_limit(tmp_path: Path) -> None:
    reason = "topic t has 2 channels, as many as --max-channels allows"
    async with running_broker(tmp_path / "d", max_channels=2) as bound, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(bound.tcp_address)) for _ in range(6)]
        for number, client in enumerate(clients):  # all at once: some are created while others are requested
            await client.send(b"SUB t c%d\n" % number)
        answers = [await client.frame() for client in clients]
        assert answers.count((0, b"OK")) == 2
        assert answers.count((1, f"E_SUB_FAILED SUB failed {reason}".encode())) == 4
        async with httpx.AsyncClient(base_url=f"http://{bound.http_address}") as http:
            answer = await http.post("/channel/create?topic=t&channel=d")
            assert (answer.status_code, answer.json()) == (503, {"message": reason})
            assert (await http.post("/topic/create?topic=other")).status_code == 200
            assert (await http.post("/channel/create?topic=other&channel=d")).status_code == 200
