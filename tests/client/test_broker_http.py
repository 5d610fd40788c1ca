"""Tests for the blocking HTTP client of a broker: answers, errors and unreachable brokers."""

import pickle
import socket
import subprocess
import sys

import pytest

from client.support.scripted_http import OK, Answer, scripted
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
        assert not caught.value.unanswered


@pytest.mark.parametrize("body", [b"no JSON", b"[" * 100_000])
def test_answer_is_not_json(body: bytes) -> None:
    with scripted((200, "", body)) as broker, pytest.raises(NotABroker):
        BrokerHTTP(broker.address).request_json("GET", "/info")


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


def test_address_without_a_port() -> None:
    with pytest.raises(ValueError, match="'localhost' has no port"):
        BrokerHTTP("localhost")


def test_workers_of_spark_need_the_standard_library_only() -> None:
    script = (
        "import sys; sys.modules |= dict.fromkeys(['trio', 'httpx', 'httptools']); "
        "from trio_nsq.client import IdempotentProducer; import trio_nsq.spark.broker_log"
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
