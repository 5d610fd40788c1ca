"""Tests for headers of messages in the connectors: `to-nsq`, `to-http` and `to-file` keep them, or refuse them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.headers import hpub_body
from cli.support import Cli, only_ours
from cli.to_file import to_file
from connectors.http_receiver import Received, receiver
from interop.peers import Broker, nsqd, qcli_serve
from trio_nsq.protocol.headers import Headers, encode_headers

pytestmark = only_ours

TRACE = {
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "tenant": "sieben: ü 100% ",
}
MESSAGES: list[tuple[bytes, Headers]] = [(b"1", TRACE), (b"2", {}), (b"3", {"traceparent": "ü", "a": ""})]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("target") / "data") as broker:
        yield broker


def publish(broker: Broker, topic: str, messages: list[tuple[bytes, Headers]] = MESSAGES) -> None:
    """Publish messages, at most 1,024 at a time."""
    for start in range(0, len(messages), 1000):
        part = [(body, encode_headers(headers).encode()) for body, headers in messages[start : start + 1000]]
        broker.post("/hpub", hpub_body(*part), topic=topic)


def stored(broker: Broker, topic: str) -> list[tuple[bytes, Headers]]:
    lines = map(json.loads, broker.http("GET", "/topic/read", topic=topic).decode().splitlines())
    return [(line["body"].encode(), line.get("headers", {})) for line in lines]


def to(broker: Broker, *, numbered: bool = True) -> list[str]:
    http = [f"--destination-nsqd-http-address={broker.http_address}"] if numbered else []
    return [f"--destination-nsqd-tcp-address={broker.tcp_address}", *http]


@pytest.mark.parametrize("flags", [[], ["--at-least-once"]], ids=["log", "channel"])
def test_to_nsq_keeps_headers(
    qcli: Cli, broker: Broker, topic: str, target: Broker, flags: list[str]
) -> None:
    """More messages than one request may have with headers, among others without."""
    messages = [*MESSAGES, *[(b"%d" % n, {"n": str(n)} if n % 5 else {}) for n in range(2500)]]
    broker.create(topic, "nsq_to_nsq")
    publish(broker, topic, messages)
    qcli.publish(topic, [b"plain"] * 2000)
    publish(broker, topic, MESSAGES)
    result = qcli("to-nsq", topic, *to(target), "--no-follow", *flags)
    assert result.code == 0, result.err
    assert stored(target, topic) == [*messages, *[(b"plain", {})] * 2000, *MESSAGES]


def test_to_nsq_keeps_headers_of_filtered_and_deferred_messages(
    qcli: Cli, broker: Broker, topic: str, target: Broker
) -> None:
    found: list[tuple[bytes, Headers]] = [
        (b'{"a": 1, "b": 2}', {"n": "1"}),
        (b'{"b": 2}', {"n": "2"}),
        (b"text", {"n": "3"}),
        (b'{"a": 2, "b": 2}', {}),
        (b'{"a": 3, "b": 2}', {"n": "5"}),
    ]
    publish(broker, topic, found)
    later = hpub_body((b'{"a": 4}', b"n:6\n"))
    broker.post("/hpub", later, topic=topic, defer="3600000")
    result = qcli("to-nsq", topic, *to(target), "--no-follow", "--where", "a", "--fields", "a")
    assert result.code == 0, result.err
    assert [(json.loads(body)["a"], headers) for body, headers in stored(target, topic)] == [
        *((1, {"n": "1"}), (2, {}), (3, {"n": "5"}), (4, {"n": "6"}))
    ]
    assert stored(target, f"{topic}.not-json") == [(b"text", {"n": "3"})]


def test_to_nsq_refuses_headers_for_an_nsqd(qcli: Cli, broker: Broker, topic: str, tmp_path: Path) -> None:
    publish(broker, topic)
    with nsqd(tmp_path / "data") as theirs:
        result = qcli("to-nsq", topic, *to(theirs), "--no-follow")
        assert result.code == 1
        assert "does not know headers of messages" in result.err
        assert "--without-headers" in result.err
        assert qcli("to-nsq", topic, *to(theirs), "--no-follow", "--without-headers").code == 0
        (found,) = json.loads(theirs.http("GET", "/stats", format="json", topic=topic))["topics"]
        assert found["message_count"] == 3


def drained(qcli: Cli, topic: str) -> None:
    """Wait until `to-http` has sent all messages."""
    qcli.wait_until(f"{topic}/nsq_to_http", lambda each: not (each["depth"] or each["in_flight_count"]))


def received(request: Received) -> dict[str, str]:
    """Return the headers of a request that are about the message."""
    return {
        name: value.encode("latin-1").decode()
        for name, value in request.headers.items()
        if name.startswith(("x-nsq-", "trace"))
    }


def test_to_http_sends_headers(qcli: Cli, broker: Broker, topic: str) -> None:
    publish(broker, topic)
    with receiver() as server, qcli.running("to-http", topic, "--post", f"{server.url}/a", "-n", "1"):
        server.wait_for(3)
        found = {request.body: received(request) for request in server.requests}
    assert found == {
        b"1": {"traceparent": TRACE["traceparent"], "x-nsq-header-tenant": "sieben: ü 100%"},
        b"2": {},
        b"3": {"x-nsq-header-traceparent": "ü", "x-nsq-header-a": ""},
    }


def test_to_http_to_a_broker_keeps_headers(qcli: Cli, broker: Broker, topic: str, target: Broker) -> None:
    broker.create(topic, "nsq_to_http")
    publish(broker, topic, MESSAGES[:2])
    url = f"http://{target.http_address}/pub?topic={topic}"
    with qcli.running("to-http", topic, "--post", url, "-n", "1"):
        drained(qcli, topic)
    expected: list[tuple[bytes, Headers]] = [(b"1", TRACE | {"tenant": "sieben: ü 100%"}), (b"2", {})]
    assert sorted(stored(target, topic)) == expected


def test_given_headers_of_a_request_count(qcli: Cli, broker: Broker, topic: str) -> None:
    publish(broker, topic, [(b"1", TRACE)])
    flags = ["--header", "Traceparent: mine", "--header", "X-NSQ-Header-Tenant: {{topic}}"]
    with receiver() as server, qcli.running("to-http", topic, "--post", f"{server.url}/a", *flags):
        server.wait_for(1)
        assert received(server.requests[0]) == {"traceparent": "mine", "x-nsq-header-tenant": topic}


def test_batches_to_http_have_headers_with_metadata(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "nsq_to_http")
    publish(broker, topic)
    flags = ["--batch-size", "3", "--with-metadata"]
    with receiver() as server, qcli.running("to-http", topic, "--post", f"{server.url}/a", *flags):
        drained(qcli, topic)
        requests = server.requests
    assert all(received(request) == {} for request in requests)
    records: list[dict[str, Any]] = [each for request in requests for each in json.loads(request.body)]
    assert [each.get("headers") for each in records] == [TRACE, None, {"traceparent": "ü", "a": ""}]


def test_dead_letters_of_to_http_keep_headers(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(f"{topic}.dead", "dead-letters")
    publish(broker, topic, [(b"1", TRACE)])
    with receiver(lambda _: 400) as server, qcli.running("to-http", topic, "--post", f"{server.url}/a"):
        qcli.wait_until(f"{topic}.dead/dead-letters", lambda each: each["depth"] == 1)
    assert stored(broker, f"{topic}.dead") == [(b"1", TRACE)]


@pytest.mark.parametrize("flags", [[], ["--at-least-once"]], ids=["log", "channel"])
def test_to_file_writes_headers_as_json_only(
    qcli: Cli, broker: Broker, topic: str, tmp_path: Path, flags: list[str]
) -> None:
    broker.create(topic, "plain")
    broker.create(topic, "json")
    publish(broker, topic)
    with to_file(qcli, topic, tmp_path / "plain", "--channel", "plain", *flags) as writing:
        writing.until_lines(3)
    with to_file(qcli, topic, tmp_path / "json", "--channel", "json", "--format", "json", *flags) as writing:
        writing.until_lines(3)
    assert (tmp_path / "plain" / f"{topic}.log").read_bytes() == b"1\n2\n3\n"
    lines = map(json.loads, (tmp_path / "json" / f"{topic}.log").read_bytes().splitlines())
    assert [line.get("headers", {}) for line in lines] == [headers for _, headers in MESSAGES]
