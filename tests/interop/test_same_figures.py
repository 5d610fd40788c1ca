"""Compare `/stats` and statsd of nsqd and our broker after the same short scenario.

The comparison excludes the differences in docs/reference/differences.md and the order of lists that nsqd leaves
unsorted.
"""

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import pack

import pytest

from interop.peers import Broker, nsqd, qcli_serve

pytestmark = pytest.mark.interop

PATIENCE_S = 60.0
BROKERS = {"nsqd": nsqd, "ours": qcli_serve}


def sized(data: bytes) -> bytes:
    return pack(">i", len(data)) + data


def identify(**fields: object) -> bytes:
    return b"IDENTIFY\n" + sized(json.dumps(fields).encode())


def pub(topic: bytes, body: bytes) -> bytes:
    return b"PUB %s\n%s" % (topic, sized(body))


class Client:
    """A connection that counts the frames it receives."""

    def __init__(self, broker: Broker) -> None:
        host, _, port = broker.tcp_address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self._socket.sendall(b"  V2")
        self._stream = self._socket.makefile("rb")
        self.ids: list[bytes] = []

    def send(self, data: bytes, frames: int) -> None:
        """Send data and wait for this number of frames."""
        self._socket.sendall(data)
        for _ in range(frames):
            size = int.from_bytes(self._stream.read(4))
            frame = self._stream.read(size)
            assert frame[:4] != b"\0\0\0\1", frame
            if frame[:4] == b"\0\0\0\2":
                self.ids.append(frame[14:30])

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


def figures(broker: Broker, topic: str) -> list[int]:
    """Return counts that must settle before the comparison, because nsqd moves messages asynchronously."""
    (found,) = json.loads(broker.http("GET", "/stats", format="json", topic=topic))["topics"]
    keys = ("depth", "in_flight_count", "deferred_count", "message_count")
    return [found["depth"], *(channel[key] for channel in found["channels"] for key in keys)]


@contextmanager
def scenario(broker: Broker) -> Iterator[None]:
    """Create topics, channels and clients of every kind, and keep the clients connected until the block exits."""
    broker.create("busy", "c", "idle", "waits#ephemeral")
    broker.create("a.topic.with.a.long.name")
    broker.create("paused", "paused")
    broker.create("kept#ephemeral", "c")
    broker.http("POST", "/topic/pause", topic="paused")
    broker.http("POST", "/channel/pause", topic="busy", channel="idle")
    clients = [Client(broker) for _ in range(5)]
    consumer, publisher, both, nameless, silent = clients
    try:
        consumer.send(
            identify(client_id="it", hostname="here", user_agent="test/1.0") + b"SUB busy c\nRDY 3\n", 2
        )
        publisher.send(identify(client_id="p", hostname="a.host.with.a.long.name.example.org"), 1)
        publisher.send(b"".join(pub(b"busy", b"%d" % n) for n in range(6)), 6)
        publisher.send(b"DPUB busy 3600000\n" + sized(b"later"), 1)
        consumer.send(b"", 3)
        consumer.send(b"FIN %s\n" % consumer.ids[0], 1)
        consumer.send(b"REQ %s 3600000\n" % consumer.ids[1], 1)
        both.send(b"SUB kept#ephemeral c\n", 1)
        both.send(pub(b"paused", b"12345"), 1)
        nameless.send(identify(client_id="", hostname="", user_agent="") + b"SUB busy idle\nRDY 2\n", 2)
        nameless.send(b"CLS\n", 1)
        silent.send(identify(hostname="silent"), 1)
        deadline = time.monotonic() + PATIENCE_S
        expected = [0, 1, 3, 2, 7, 6, 0, 1, 7, 6, 0, 1, 7]
        while figures(broker, "busy") != expected and time.monotonic() < deadline:
            pass
        assert figures(broker, "busy") == expected
        yield
    finally:
        for client in clients:
            client.close()


# ---------------------------------------------------------------------- /stats as text


def normal(text: str) -> list[str]:
    """Return the lines of `/stats` with versions, times, ports and memory figures replaced."""
    text = re.sub(r"^nsqd v\S+ \(built w/\S+\)$", "nsqd V (built w/P)", text, flags=re.M)
    text = re.sub(r"^start_time \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$", "start_time T", text, flags=re.M)
    text = re.sub(r"^uptime (\d+\.)?\d+(µs|ms|s)$", "uptime D", text, flags=re.M)
    text = re.sub(r"^(   \w+ *\t)\d+$", r"\1N", text, flags=re.M)
    text = re.sub(r":(\d{5}) (?=[^\]]*\] (state|msgs): )", ":PORT_ ", text)
    text = re.sub(r"connected: \d+s$", "connected: D", text, flags=re.M)
    text = re.sub(r"(?<=[:,] )[\d.]*[1-9][\d.]*(us|ms|s)(?=,|$)", "T", text, flags=re.M)
    return _sorted_clients(text.split("\n"))


def _sorted_clients(lines: list[str]) -> list[str]:
    """Sort each run of client lines, because their order is unspecified."""
    ordered: list[str] = []
    run: list[str] = []
    for line in lines:
        if line.lstrip().startswith("[V2 "):
            run.append(line)
            continue
        ordered += [*sorted(run), line]
        run = []
    return ordered


QUERIES: list[dict[str, str]] = [
    {},
    {"include_mem": "false"},
    {"include_mem": "0", "include_clients": "0"},
    {"include_mem": "F", "include_clients": "no"},
    {"format": "text", "topic": "busy"},
    {"format": "JSON", "topic": "busy", "channel": "idle"},
    {"topic": "paused"},
    {"channel": "c"},
    {"topic": "busy", "channel": "unknown"},
    {"topic": "unknown"},
    {"topic": "a|b"},
    {"topic": "kept#ephemeral"},
]


@pytest.mark.parametrize("flags", [[], ["--e2e-processing-latency-percentile=0.5,1.0"]], ids=["", "e2e"])
def test_same_text(tmp_path: Path, flags: list[str]) -> None:
    found = {}
    for name, start in BROKERS.items():
        with start(tmp_path / name, *flags) as broker:
            empty = normal(broker.http("GET", "/stats").decode())
            with scenario(broker):
                found[name] = [empty] + [
                    normal(broker.http("GET", "/stats", **query).decode()) for query in QUERIES
                ]
    for query, ours, theirs in zip([None, *QUERIES], found["ours"], found["nsqd"], strict=True):
        assert ours == theirs, query


# ---------------------------------------------------------------------- statsd


def pushed(sink: socket.socket) -> dict[str, str]:
    """Receive one complete push and return `value|type` by name, with PORT for the port in the prefix."""
    text = ""
    while not re.search(r"^\S+\.mem\.gc_runs:\d+\|c\n", text, re.M):
        datagram = sink.recv(65536)
        assert len(datagram) <= 508
        assert datagram.endswith(b"\n")
        text += datagram.decode()
    text = re.sub(r"^(nsq\.127_0_0_1_)\d+\.", r"\1PORT.", text, flags=re.M)
    text = re.sub(r"^(\S+\.mem\.\w+|\S+latency_\w+):\d+", r"\1:N", text, flags=re.M)
    return dict(line.rsplit(":", 1) for line in text.splitlines())


@pytest.mark.slow
def test_same_pushes_to_statsd(tmp_path: Path) -> None:
    found: dict[str, tuple[list[str], dict[str, str]]] = {}
    for name, start in BROKERS.items():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sink:
            sink.bind(("127.0.0.1", 0))
            sink.settimeout(PATIENCE_S)
            flags = [
                f"--statsd-address=127.0.0.1:{sink.getsockname()[1]}",
                "--statsd-interval=2s",
                "--broadcast-address=127.0.0.1",
                "--e2e-processing-latency-percentile=0.99,1.0",
            ]
            with start(tmp_path / name, *flags) as broker, scenario(broker):
                first = pushed(sink)
                # The scenario may take longer than the first interval.
                while first.get("nsq.127_0_0_1_PORT.topic.paused.message_bytes") != "5|c":
                    first = pushed(sink)
                found[name] = list(first), pushed(sink)
    assert found["ours"] == found["nsqd"]
    names, values = found["ours"]
    assert "nsq.127_0_0_1_PORT.topic.busy.channel.waits#ephemeral.e2e_processing_latency_99" in names
    assert values["nsq.127_0_0_1_PORT.topic.busy.channel.c.in_flight_count"] == "3|g"
