"""Thousands of consumers in one thread, and data folders with tens of thousands of channels."""

import http.client
import json
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import pack, unpack_from
from threading import Thread

from interop.peers import qcli_serve

TOPICS = 10
MSG_TIMEOUT_MS = 1000  # the shortest that IDENTIFY allows


class Client:
    """One connection; `Clients` reads it when it has data."""

    def __init__(
        self, address: str, topic: str, channel: str, ready_count: int, msg_timeout_ms: int = MSG_TIMEOUT_MS
    ) -> None:
        self.msg_timeout_s = msg_timeout_ms / 1000
        host, _, port = address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)), timeout=60)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        settings = {
            "feature_negotiation": True,
            "msg_timeout": msg_timeout_ms,
            "output_buffer_size": -1,  # this measures timers, not buffers
        }
        body = json.dumps(settings).encode()
        self.sock.sendall(
            b"  V2IDENTIFY\n%sSUB %s %s\nRDY %d\n"
            % (pack(">i", len(body)) + body, topic.encode(), channel.encode(), ready_count)
        )
        frames: list[tuple[int, bytes]] = []
        while len(frames) < 2:
            frames += self.receive()
        assert frames[1] == (0, b"OK"), frames

    def receive(self) -> list[tuple[int, bytes]]:
        """Read once, answer heartbeats, and return the other complete frames."""
        data = self.sock.recv(256 * 1024)
        if not data:
            raise ConnectionError("the broker closed a connection")
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= 8:
            size, frame_type = unpack_from(">ii", self._buffer, start)
            if len(self._buffer) - start < 4 + size:
                break
            content = self._buffer[start + 8 : start + 4 + size]
            start += 4 + size
            if content == b"_heartbeat_":
                self.sock.sendall(b"NOP\n")
            else:
                frames.append((frame_type, content))
        self._buffer = self._buffer[start:]
        return frames


@dataclass(frozen=True)
class Message:
    """A received message, and its arrival by `time.monotonic`."""

    client: Client
    at_s: float
    id: bytes
    body: bytes


class Clients:
    """All connections, polled together."""

    def __init__(self) -> None:
        self.all: list[Client] = []
        self._selector = selectors.DefaultSelector()

    def add(self, client: Client) -> None:
        """Add a connection."""
        self.all.append(client)
        self._selector.register(client.sock, selectors.EVENT_READ, client)

    def close(self) -> None:
        """Close all connections."""
        for client in self.all:
            client.sock.close()
        self._selector.close()

    def messages(self, until_s: float) -> Iterator[Message]:
        """Yield messages as they arrive, until this time."""
        while (now_s := time.monotonic()) < until_s:
            for key, _ in self._selector.select(min(0.1, until_s - now_s)):
                at_s = time.monotonic()
                for frame_type, content in key.data.receive():
                    if frame_type == 2:
                        yield Message(key.data, at_s, content[10:26], content[26:])


def topics_of(channels: int) -> list[str]:
    """Return the topics for this number of channels."""
    return [f"t{n}" for n in range(1 if channels == 1 else TOPICS)]


def prepare_nsqd(data_path: Path, channels: int) -> None:
    """Write the metadata file with the channels; creating them one by one in nsqd would take minutes."""
    topics = topics_of(channels)
    each = [{"name": f"c{n}", "paused": False} for n in range(channels // len(topics))]
    data = {
        "topics": [{"name": topic, "paused": False, "channels": each} for topic in topics],
        "version": "1.3.0",
    }
    data_path.mkdir()
    (data_path / "nsqd.dat").write_text(json.dumps(data))


def prepare_ours(data_path: Path, channels: int) -> None:
    """Create the channels in a broker, then stop it."""
    topics = topics_of(channels)
    with qcli_serve(data_path, "--log-level=error") as broker:

        def make(topic: str) -> None:
            connection = http.client.HTTPConnection(broker.http_address, timeout=60)
            paths = [f"/channel/create?topic={topic}&channel=c{n}" for n in range(channels // len(topics))]
            for path in [f"/topic/create?topic={topic}", *paths]:
                connection.request("POST", path)
                reply = connection.getresponse()
                assert (reply.status, reply.read()) == (200, b""), path
            connection.close()

        makers = [Thread(target=make, args=(topic,)) for topic in topics]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
