"""Tests for the blocking HTTP client of a broker: answers, errors and unreachable brokers."""

import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest

from client.support.scripted_http import OK, Answer, scripted
from trio_nsq.api.broker import info
from trio_nsq.client.connection.tls import TLSFiles, TLSFilesError
from trio_nsq.client.errors import BrokerUnreachable, NotABroker, PublishInDoubt, RequestRefused
from trio_nsq.client.http.broker_http import BrokerHTTP

REFUSED: Answer = (400, "", b'{"message":"INVALID_TOPIC"}')
PROXY: Answer = (502, "", b"<h1>Bad\n gateway</h1>")


def test_requests_are_encoded() -> None:
    with scripted(OK, OK) as broker:
        http = BrokerHTTP(broker.address)
        assert http.request("GET", "/ping") == b"OK"
        assert http.post("/pub", {"topic": "a b", "defer": "1"}, b"body") == b"OK"
        assert [request for request, _ in broker.seen] == ["GET /ping", "POST /pub?topic=a+b&defer=1"]


@pytest.mark.parametrize(("keep_alive_s", "connections"), [(0, [1, 2, 3]), (30, [1, 1, 1])])
def test_connections_are_reused_if_requested_also_after_errors(
    keep_alive_s: float, connections: list[int]
) -> None:
    with scripted(OK, REFUSED, OK) as broker:
        http = BrokerHTTP(broker.address, keep_alive_s=keep_alive_s)
        http.request("GET", "/ping")
        with pytest.raises(RequestRefused):
            http.request("GET", "/stats")
        http.request("GET", "/ping")
        http.close()
        assert [connection for _, connection in broker.seen] == connections


def test_connection_that_the_broker_closed_is_not_used() -> None:
    """The request would fail, and be in doubt."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = BrokerHTTP(f"127.0.0.1:{listener.getsockname()[1]}", keep_alive_s=30)
        closed = threading.Event()
        seen: list[bytes] = []

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                seen.append(connection.recv(65536).partition(b" ")[0])
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK")
                connection.close()
                closed.set()

        server = threading.Thread(target=serve)
        server.start()
        http.request("GET", "/ping")
        closed.wait()
        assert http.post("/mpub", body=b"x") == b"OK"
        server.join()
        http.close()
        assert seen == [b"GET", b"POST"]


def test_request_during_a_stream_uses_another_connection() -> None:
    with scripted(OK, OK) as broker:
        http = BrokerHTTP(broker.address, keep_alive_s=30)
        with http.stream("GET", "/topic/read") as answer:
            assert http.request("GET", "/topic/bounds") == b"OK"
            assert answer.read() == b"OK"
        http.close()
        assert [connection for _, connection in broker.seen] == [1, 2]


def test_error_of_a_broker_differs_from_that_of_a_proxy() -> None:
    with scripted(REFUSED, PROXY) as broker:
        http = BrokerHTTP(broker.address)
        with pytest.raises(
            RequestRefused, match=r"INVALID_TOPIC \(topic t, HTTP status 400\): topic is invalid$"
        ):
            http.request("GET", "/stats", {"topic": "t"})
        with pytest.raises(NotABroker, match=r"not an NSQ broker \(HTTP status 502\)") as caught:
            http.request("GET", "/stats")
        assert (caught.value.status, caught.value.text) == (502, "<h1>Bad gateway</h1>")
        assert (
            caught.value.unanswered
        )  # an error of a proxy may follow a request that the broker has executed


@pytest.mark.parametrize("body", [b"no JSON", b"[" * 100_000])
def test_answer_is_not_json(body: bytes) -> None:
    with scripted((200, "", body)) as broker, pytest.raises(NotABroker):
        BrokerHTTP(broker.address).ask(info())


def test_lost_connection_leaves_a_request_unanswered() -> None:
    with scripted(None) as broker:
        with pytest.raises(BrokerUnreachable, match="the connection was lost") as caught:
            BrokerHTTP(broker.address).post("/pub", {"topic": "t"}, b"x")
        assert caught.value.unanswered
    with pytest.raises(BrokerUnreachable, match="Connection refused") as caught:
        BrokerHTTP(broker.address).post("/pub", {"topic": "t"}, b"x")
    assert not caught.value.unanswered
    assert isinstance(caught.value.cause, ConnectionRefusedError)


def test_silent_broker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "127.0.0.1:%d" % listener.getsockname()[1]
        with pytest.raises(BrokerUnreachable, match=r"connected, but no answer within 0\.05 s") as caught:
            BrokerHTTP(address, answer_timeout_s=0.05).request("GET", "/ping")
        assert caught.value.unanswered


def test_tls_files_are_read_for_https_only() -> None:
    missing = TLSFiles(root_ca_file="/no/such/file")
    with scripted(OK) as broker:
        assert BrokerHTTP(broker.address, missing).request("GET", "/ping") == b"OK"
    with pytest.raises(TLSFilesError, match="tls_root_ca_file /no/such/file: No such file"):
        BrokerHTTP("https://127.0.0.1:1", missing)


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("localhost", "'localhost' has no port"),
        ("https://localhost", "'localhost' has no port"),
        ("localhost:0", "has no valid port"),
        ("localhost:65536", "has no valid port"),
        ("localhost:\u0664\u0661\u0665\u0661", "has no valid port"),
        (":4151", "has no host"),
    ],
)
def test_addresses_without_a_host_or_port(address: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        BrokerHTTP(address)


def test_workers_of_spark_need_the_standard_library_only() -> None:
    script = (
        "import sys; sys.modules |= dict.fromkeys(['trio', 'httpcore', 'httptools']); "
        "from trio_nsq.client import IdempotentProducer; import trio_nsq.client.reading.broker_log"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    "error",
    [
        BrokerUnreachable("a:1", "why", OSError()),
        NotABroker("a:1", 502, "text"),
        PublishInDoubt("a:1", "why"),
        RequestRefused("a:1", "t", 404, "TOPIC_NOT_FOUND"),
    ],
)
def test_errors_can_be_pickled(error: Exception) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there)) == (type(error), str(error))


@contextmanager
def sending(begin: bytes, again: bytes, interval_s: float = 0.0) -> Iterator[str]:
    """Run a server that answers each request with these bytes, and repeats the latter without an end."""
    ended = threading.Event()

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            with suppress(OSError):
                self.wfile.write(begin)
                while not ended.wait(interval_s):
                    self.wfile.write(again)

    server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=partial(server.serve_forever, 0.01))
    thread.start()
    try:
        yield "127.0.0.1:%d" % server.server_address[1]
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", b" "),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["headers", "body", "length", "chunks", "refusal", "continue"],
)
def test_limited_answer_that_does_not_end_in_time(begin: bytes, again: bytes) -> None:
    with sending(begin, again, interval_s=0.01) as address:
        http = BrokerHTTP(address, answer_timeout_s=0.2, max_answer_bytes=1 << 20)
        with pytest.raises(BrokerUnreachable, match=r"connected, but no answer within 0\.2 s"):
            http.request("GET", "/stats")


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"A"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", b" "),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["headers", "refusal", "continue"],
)
def test_answer_whose_body_never_begins(begin: bytes, again: bytes) -> None:
    """Only the body of an endless answer may take any time."""
    with sending(begin, again, interval_s=0.01) as address:
        http = BrokerHTTP(address, answer_timeout_s=0.2)
        with (
            pytest.raises(BrokerUnreachable, match=r"connected, but no answer within 0\.2 s"),
            http.stream("GET", "/topic/read", is_endless=True),
        ):
            pass


def test_endless_answer_may_take_longer_than_others() -> None:
    with sending(b"HTTP/1.1 200 OK\r\n\r\n", b"12345678", interval_s=0.01) as address:
        http = BrokerHTTP(address, answer_timeout_s=0.2, max_answer_bytes=200)
        with http.stream("GET", "/topic/read", is_endless=True) as answer:
            assert len(answer.read(320)) == 320


@pytest.mark.parametrize(
    "begin",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffff\r\n",
    ],
    ids=["body", "length", "chunk"],
)
def test_limited_answer_that_is_too_large(begin: bytes) -> None:
    """The memory is not allocated for an announced length: 100 TB."""
    with sending(begin, b" " * 100_000) as address:
        http = BrokerHTTP(address, max_answer_bytes=1 << 20)
        with pytest.raises(BrokerUnreachable, match="its answer has more than 1 MiB"):
            http.request("GET", "/stats")


def test_limited_answers_are_complete() -> None:
    body = bytes(range(256)) * 12_288  # 3 MiB
    with scripted((200, "", body), REFUSED, None, OK) as broker:
        http = BrokerHTTP(broker.address, keep_alive_s=30, max_answer_bytes=4 << 20)
        assert http.request("GET", "/stats") == body
        with pytest.raises(RequestRefused):
            http.request("GET", "/stats")
        with pytest.raises(BrokerUnreachable, match="the connection was lost"):
            http.request("GET", "/stats")
        assert http.request("GET", "/ping") == b"OK"
        http.close()
        assert [connection for _, connection in broker.seen] == [1, 1, 1, 2]


def test_answer_that_is_too_slow_ends_its_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        http = BrokerHTTP("127.0.0.1:%d" % listener.getsockname()[1], answer_timeout_s=0.2)
        asking = threads.submit(http.request, "GET", "/stats")
        with listener.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n{")  # it ends with the connection
            assert isinstance(asking.exception(), BrokerUnreachable)
            connection.settimeout(10)
            while connection.recv(65536):
                pass


def test_limited_answer_that_is_cut_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        http = BrokerHTTP("127.0.0.1:%d" % listener.getsockname()[1], max_answer_bytes=1 << 20)
        asking = threads.submit(http.request, "GET", "/stats")
        with listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        with pytest.raises(BrokerUnreachable, match="the connection was lost"):
            asking.result()


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 99999999999999\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n-5\r\n",
    ],
)
@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request"])
def test_absurd_lengths_are_errors_of_the_library(head: bytes, status: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        http = BrokerHTTP("127.0.0.1:%d" % listener.getsockname()[1])
        asking = threads.submit(http.request, "GET", "/stats")
        with listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 " + status + b"\r\n" + head + b"abc")
        error = asking.exception(timeout=30)
    assert isinstance(error, BrokerUnreachable | NotABroker), repr(error)
