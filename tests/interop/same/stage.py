"""Play the same script with nsqd and with our broker, and compare their answers.

One or more clients play a script with one broker. A step is one of these:

- bytes: the client sends them, preceded by the magic if they are its first. ``{N}`` is replaced with the id of the Nth
  message that any client received, counted from 0, and every word ``T`` with the name of the script's own topic.
- a number: the client waits for this number of frames.
- a function from this module, such as ``client("b")`` or ``http_request("POST", "/channel/pause?...")``.

After the last step, each client reads to the end of its connection. Scripts end every connection, usually with
``END``, so that all answers arrive.
"""

import http.client
import json
import re
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from struct import pack, unpack
from types import TracebackType
from typing import Any, Protocol

import pytest
import snappy

from interop.peers import Broker, nsqd, qcli_serve
from interop.same.certificates import Certificates

PATIENCE_S = 20.0
"""Maximum wait for an answer; then the test fails instead of hanging."""
SETTLING_S = 5.0
"""Maximum wait for counters to reach their expected values."""
MAGIC = b"  V2"
END = b"NOP\nNOPE\n"
"""A valid and an unknown command: the broker answers all earlier commands, then ends the connection."""
GONE = b"0123456789abcdef"
"""An id that no message has."""


# ------------------------------------------------------------------------------------------------ scripts


class Expected(Protocol):
    """What two servers must answer; see `Script`."""

    @property
    def row(self) -> str: ...
    @property
    def here(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Script:
    """Steps and the expected answers.

    Attributes:
        row: The key of the row of docs/reference/differences.md that this script shows; empty if the answers are equal.
        here: The expected answers of our broker, if `row` is set. Otherwise nsqd's answers are expected.
    """

    steps: "tuple[Step, ...]"
    row: str = ""
    here: tuple[str, ...] = ()


def same(*steps: "Step") -> Script:
    """Return a script that both brokers must answer equally."""
    return Script(steps)


def differs(row: str, *steps: "Step", here: list[str]) -> Script:
    """Return a script that our broker answers with ``here``, for the reason in this row of differences.md."""
    return Script(steps, row, tuple(here))


@dataclass(frozen=True)
class Pair:
    """Both brokers, started with the same options."""

    nsqd: Broker
    ours: Broker
    certificates: Certificates | None


@contextmanager
def pair(
    folder: Path, *flags: str, ours_only: Sequence[str] = (), certificates: Certificates | None = None
) -> Iterator[Pair]:
    """Run nsqd and our broker with ``flags``, our broker also with ``ours_only``, and with their data in ``folder``."""
    with nsqd(folder / "nsqd", *flags) as theirs, qcli_serve(folder / "ours", *flags, *ours_only) as ours:
        yield Pair(theirs, ours, certificates)


def check(brokers: Pair, topic: str, script: Script) -> None:
    """Play the script with both brokers; fail unless their answers are equal, or differ as the script's row states."""
    with ThreadPoolExecutor() as both_at_once:  # in parallel, because some scripts wait
        playing = [
            both_at_once.submit(play, Stage(broker, topic, brokers.certificates), script)
            for broker in (brokers.nsqd, brokers.ours)
        ]
    compare(script, *(each.result() for each in playing))


def compare(script: Expected, theirs: list[str], ours: list[str]) -> None:
    """Fail unless the answers of nsqd and our broker are equal, or differ as the script's row states."""
    expected = list(script.here) if script.row else theirs
    assert not any("(nothing for" in line for line in theirs), "a script ends every connection it makes"
    both = f"ours: {ours}\nnsqd: {theirs}"
    if ours != expected:
        because = (
            f"{expected} was expected for the row {script.row}" if script.row else "nsqd answers otherwise"
        )
        pytest.fail(f"{because}\n{both}", pytrace=False)
    if script.row and ours == theirs:
        pytest.fail(f"nsqd answers the same: this does not show the row {script.row}\n{both}", pytrace=False)


def play(stage: "Stage", script: Script) -> list[str]:
    """Play the script, close all connections, and return the broker's answers.

    For each client, the answers come before the messages: if a client publishes and consumes, the order of its OK and
    the message is unspecified. Answers to clients other than the first begin with the client's name.
    """
    with stage:
        try:
            for step in script.steps:
                stage.do(step)
        except NoFrame:
            stage.client.answers.append("(no frame)")
        finally:
            stage.steps_done.set()
        for name in stage.clients:
            client(name)(stage)
            while stage.client.read_frame():
                pass
        return stage.transcript()


# ------------------------------------------------------------------------------------------------ the stage


class Client:
    """A connection that sends bytes and records frames. Ids and versions are replaced: they differ between brokers."""

    def __init__(self, broker: Broker, ids: list[bytes]) -> None:
        host, _, port = broker.tcp_address.rpartition(":")
        self.connected_at_s = time.monotonic()
        self.socket: socket.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answers: list[str] = []
        self.messages: list[str] = []
        self._ids = ids
        self._greeted = False
        self._heartbeats = 0
        self._buffer = b""
        self._decode: Callable[[bytes], bytes] | None = None
        self._encode: Callable[[bytes], bytes] | None = None

    def send(self, data: bytes) -> None:
        if not self._greeted:
            data = MAGIC + data
        self.send_raw(self.encoded(data))

    def encoded(self, data: bytes) -> bytes:
        """Return the data in the form in which it is sent: compressed, if compression was started."""
        return self._encode(data) if self._encode else data

    def send_raw(self, data: bytes) -> None:
        """Send bytes unchanged: without magic and compression."""
        self._greeted = True
        try:
            self.socket.sendall(data)
        except OSError:
            pass  # the broker has ended the connection; the script compares its earlier answers

    def read_frame(self) -> bool:
        """Record the next frame, but only count heartbeats; return false at the end of the connection."""
        while (frame := self._frame()) is not None:
            if frame != (0, b"_heartbeat_"):
                self._note(*frame)
                return True
            self._heartbeats += 1
        return False

    def await_heartbeats(self, count: int) -> bool:
        """Record frames until the connection has received `count` heartbeats; return false if it ends before."""
        while self._heartbeats < count and (frame := self._frame()) is not None:
            if frame == (0, b"_heartbeat_"):
                self._heartbeats += 1
            else:
                self._note(*frame)
        return self._heartbeats == count

    def _frame(self) -> tuple[int, bytes] | None:
        head = self._read(8)
        if not head:
            return None
        size, kind = unpack(">ii", head) if len(head) == 8 else (0, 0)
        data = self._read(size - 4) if 4 <= size < 2**24 else b""
        if len(data) != size - 4:
            self.answers.append(f"(no frame: {head + data!r})")
            return None
        return kind, data

    def _note(self, kind: int, data: bytes) -> None:
        if kind == 2:
            timestamp_ns, attempts, message_id = unpack(">qH16s", data[:26])
            assert abs(timestamp_ns - time.time_ns()) < 120e9
            if message_id not in self._ids:
                self._ids.append(message_id)
            self.messages.append(f"{self.normal(message_id)} attempts {attempts}: {_body(data[26:])}")
        else:
            self.answers.append({0: "", 1: "error "}.get(kind, f"type {kind} ") + self.normal(data))

    def normal(self, data: bytes) -> str:
        for number, message_id in enumerate(self._ids):
            data = data.replace(message_id, b"{%d}" % number)
        return _text(re.sub(rb'"version":"[^"]*"', b'"version":""', data))

    def _read(self, count: int) -> bytes:
        """Return `count` bytes, or fewer at the end."""
        while len(self._buffer) < count:
            try:
                data = self.socket.recv(65536)
            except TimeoutError:
                self.answers.append(f"(nothing for {PATIENCE_S:g} s)")
                self.close()
                data = b""
            except ssl.SSLError as error:
                self.answers.append(f"(TLS: {error.reason})")
                data = b""
            except OSError:  # reset, or closed on this side after a failed handshake or a timeout
                data = b""
            if not data:
                break
            self._buffer += self._decode(data) if self._decode else data
        found, self._buffer = self._buffer[:count], self._buffer[count:]
        return found

    def start_compression(self, encode: Callable[[bytes], bytes], decode: Callable[[bytes], bytes]) -> None:
        """Encode all data sent from now on, and decode all data received."""
        self._encode, self._decode = encode, decode
        self._buffer = decode(self._buffer)

    def start_tls(self, context: ssl.SSLContext) -> None:
        """Perform the TLS handshake, and record the version or the error."""
        assert not self._buffer, self._buffer
        try:
            wrapped = context.wrap_socket(self.socket, server_hostname="127.0.0.1")
        except OSError as error:
            self.answers.append(f"(no TLS: {getattr(error, 'reason', error)})")
        else:
            self.socket = wrapped
            self.answers.append(f"({wrapped.version()})")

    def close(self) -> None:
        self.socket.close()


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _body(data: bytes) -> str:
    """Return the body of a message, or its size and checksum if it is long."""
    return _text(data) if len(data) <= 100 else f"{len(data)} bytes with CRC {zlib.crc32(data)}"


class NoFrame(Exception):
    """A frame that the script waits for does not arrive, so the remaining steps are skipped."""


@dataclass
class Stage:
    """A run of one script with one broker."""

    broker: Broker
    topic: str
    certificates: Certificates | None = None
    clients: dict[str, Client] = field(default_factory=dict)
    ids: list[bytes] = field(default_factory=list)
    http_answers: list[str] = field(default_factory=list)
    steps_done: threading.Event = field(default_factory=threading.Event)
    name: str = ""

    def __enter__(self) -> "Stage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self.clients.values():
            client.close()
        if error is not None:
            error.add_note(f"until then: {self.transcript()}")

    @property
    def client(self) -> Client:
        """The client that plays the current steps."""
        if self.name not in self.clients:
            self.clients[self.name] = Client(self.broker, self.ids)
        return self.clients[self.name]

    def do(self, step: "Step") -> None:
        if isinstance(step, bytes):
            self.client.send(self.named(step))
        elif isinstance(step, int):
            for _ in range(step):
                if not self.client.read_frame():
                    raise NoFrame
        else:
            step(self)

    def named(self, data: bytes) -> bytes:
        """Return the data with the topic's name and the message ids filled in."""
        data = re.sub(rb"\bT\b", self.topic.encode(), data)
        return re.sub(rb"\{([0-9])\}", lambda match: self.ids[int(match[1])], data)

    def request(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.broker.http_address, timeout=PATIENCE_S)
        try:
            connection.request(method, self.named(target.encode()).decode(), body)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def transcript(self) -> list[str]:
        found: list[str] = []
        for name, client in self.clients.items():
            found += [f"{name}: {line}" if name else line for line in client.answers + client.messages]
        return [line.replace(self.topic, "T") for line in found + self.http_answers]


Action = Callable[[Stage], None]
Step = bytes | int | Action


# ------------------------------------------------------------------------------------------------ bytes


def sized(data: bytes) -> bytes:
    """Return a body preceded by its size."""
    return pack(">i", len(data)) + data


def identify_raw(body: bytes) -> bytes:
    return b"IDENTIFY\n" + sized(body)


def identify(**fields: object) -> bytes:
    return identify_raw(json.dumps(fields).encode())


def negotiate(**fields: object) -> bytes:
    """Return IDENTIFY with feature negotiation."""
    return identify(feature_negotiation=True, **fields)


def reply(**changes: object) -> str:
    """Return the reply to IDENTIFY with negotiation, with these fields changed."""
    fields = {
        "max_rdy_count": 2500,
        "version": "",
        "max_msg_timeout": 900000,
        "msg_timeout": 60000,
        "tls_v1": False,
        "deflate": False,
        "deflate_level": 6,
        "max_deflate_level": 6,
        "snappy": False,
        "sample_rate": 0,
        "auth_required": False,
        "output_buffer_size": 16384,
        "output_buffer_timeout": 250,
    }
    return json.dumps(fields | changes, separators=(",", ":"))


def batch(*bodies: bytes) -> bytes:
    """Return the body of an MPUB."""
    return sized(pack(">i", len(bodies)) + b"".join(map(sized, bodies)))


def pub(*bodies: bytes, topic: bytes = b"T") -> bytes:
    """Return one PUB for each body."""
    return b"".join(b"PUB " + topic + b"\n" + sized(body) for body in bodies)


# ------------------------------------------------------------------------------------------------ steps


def client(name: str) -> Action:
    """Switch to the client of this name; connect it if it is new. The first client's name is empty."""

    def step(stage: Stage) -> None:
        stage.name = name

    return step


def half_close(stage: Stage) -> None:
    """Close the sending side of the client's connection."""
    stage.client.socket.shutdown(socket.SHUT_WR)


def leave(stage: Stage) -> None:
    """Close the sending side of the client's connection, and read to its end."""
    stage.client.socket.shutdown(socket.SHUT_WR)
    while stage.client.read_frame():
        pass


def ended(stage: Stage) -> None:
    """Wait until the broker ends the connection."""
    while stage.client.read_frame():
        pass
    stage.client.answers.append("(end)")


def raw(data: bytes) -> Step:
    """Send bytes unchanged: without magic and compression."""

    def step(stage: Stage) -> None:
        stage.client.send_raw(data)

    return step


def with_raw(data: bytes, rest: bytes) -> Step:
    """Send ``data`` and, in the same write, ``rest`` unchanged."""

    def step(stage: Stage) -> None:
        stage.client.send_raw(stage.client.encoded(stage.named(data)) + rest)

    return step


def tls(certificate: str = "", version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> Step:
    """Start TLS of this version, with the certificate of this name if given."""

    def step(stage: Stage) -> None:
        assert stage.certificates is not None
        stage.client.start_tls(stage.certificates.context(certificate, version))

    return step


def snappy_on(stage: Stage) -> None:
    """Start snappy in both directions."""
    decompressor = snappy.StreamDecompressor()
    unfinished = b""

    def decode(data: bytes) -> bytes:
        # python-snappy accepts only whole chunks: it fails if a header is split.
        nonlocal unfinished
        unfinished += data
        decoded = b""
        while len(unfinished) >= 4 and len(unfinished) >= (
            end := 4 + int.from_bytes(unfinished[1:4], "little")
        ):
            decoded += decompressor.decompress(unfinished[:end])
            unfinished = unfinished[end:]
        return decoded

    stage.client.start_compression(snappy.StreamCompressor().add_chunk, decode)


def deflate_on(stage: Stage) -> None:
    """Start deflate in both directions; flush after every step."""
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)

    def encode(data: bytes) -> bytes:
        return compressor.compress(data) + compressor.flush(zlib.Z_SYNC_FLUSH)

    stage.client.start_compression(encode, zlib.decompressobj(wbits=-zlib.MAX_WBITS).decompress)


def http_request(method: str, target: str, body: bytes = b"") -> Step:
    """Send one request; record status and body of the response."""

    def step(stage: Stage) -> None:
        status, content = stage.request(method, target, body)
        content = re.sub(rb'"https_port": [0-9]+', b'"https_port": N', content)
        stage.http_answers.append(f"HTTP {status} {_text(content)}")

    return step


def post(target: str, body: bytes = b"") -> Step:
    return http_request("POST", target, body)


def channel(action: str) -> Step:
    """Send an HTTP request for this action on channel c of the topic."""
    return post(f"/channel/{action}?topic=T&channel=c")


def stats(stage: Stage) -> dict[str, Any] | None:
    """Return the /stats entry of the topic, or None if it does not exist."""
    _, content = stage.request("GET", "/stats?format=json&include_mem=false&topic=T")
    topics = json.loads(content)["topics"]
    return topics[0] if topics else None


def figures(*names: str, of: str = "c") -> Step:
    """Record these counters of the channel, or of the topic if ``of`` is empty."""

    def step(stage: Stage) -> None:
        stage.http_answers.append(f"{of or 'topic'} has {_figures(stage, of, names)}")

    return step


def settles(of: str = "c", /, **wanted: object) -> Step:
    """Wait until the channel, or the topic if ``of`` is empty, has these counters, and record them.

    The step polls, because nsqd moves messages from the topic to the channels asynchronously.
    """

    def step(stage: Stage) -> None:
        deadline = time.monotonic() + SETTLING_S
        while (found := _figures(stage, of, wanted)) != wanted and time.monotonic() < deadline:
            time.sleep(0.005)
        stage.http_answers.append(f"{of or 'topic'} settles at {found}")

    return step


def disappears(of: str) -> Step:
    """Wait until the channel, or the topic if ``of`` is empty, is deleted, and record whether that happens."""

    def step(stage: Stage) -> None:
        deadline = time.monotonic() + SETTLING_S
        while (there := _figures(stage, of, ())) is not None and time.monotonic() < deadline:
            time.sleep(0.005)
        stage.http_answers.append(f"{of or 'topic'} {'stays' if there is not None else 'disappears'}")

    return step


def exists(of: str) -> Step:
    """Record whether the channel, or the topic if ``of`` is empty, exists."""

    def step(stage: Stage) -> None:
        there = _figures(stage, of, ()) is not None
        stage.http_answers.append(f"{of or 'topic'} {'exists' if there else 'does not exist'}")

    return step


def _figures(stage: Stage, of: str, names: Iterable[str]) -> dict[str, object] | None:
    """Return counters of a channel or the topic from /stats, or None if it does not exist."""
    topic = stats(stage)
    if topic is None:
        return None
    places = [channel for channel in topic["channels"] if channel["channel_name"] == of] if of else [topic]
    return {name: places[0][name] for name in names} if places else None


def comes(at_least_s: float, at_most_s: float, *steps: Step, since: str | None = None) -> Step:
    """Run the steps, and record whether the connection, or that of the client `since`, is then this old.

    On a busy machine this is more reliable than `takes`: the broker's timers start after the connection, so that an
    answer is never too early, however late the steps begin.
    """

    def step(stage: Stage) -> None:
        for inner in steps:
            stage.do(inner)
        age_s = time.monotonic() - stage.clients[stage.name if since is None else since].connected_at_s
        in_time = at_least_s <= age_s <= at_most_s
        stage.client.answers.append("(in time)" if in_time else f"(after {age_s:.0f} s)")

    return step


def takes(at_least_s: float, at_most_s: float, *steps: Step) -> Step:
    """Run the steps, and record whether their duration is within the bounds."""

    def step(stage: Stage) -> None:
        began = time.monotonic()
        for inner in steps:
            stage.do(inner)
        took_s = time.monotonic() - began
        in_time = at_least_s <= took_s <= at_most_s
        stage.client.answers.append("(in time)" if in_time else f"(after {took_s:.0f} s)")

    return step


def wait(seconds: float) -> Step:
    """Wait in real time, because the brokers use their own clocks."""

    def step(_stage: Stage) -> None:
        time.sleep(seconds)

    return step


def heartbeats(count: int) -> Step:
    """Wait until the client has received `count` heartbeats since it connected."""

    def step(stage: Stage) -> None:
        came = stage.client.await_heartbeats(count)
        stage.client.answers.append(f"({count} heartbeats)" if came else "(end)")

    return step
