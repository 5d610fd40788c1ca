"""Run NSQ's own nsq_to_file, nsq_to_http and nsq_to_nsq, and the commands that replace them, on the same messages.

- `connector` runs one of them; `stop` ends it in good order.
- `publish` and `await_finished` are about the messages; `drain` takes those of a channel.
- `receiving` runs the HTTP server that nsq_to_http and `qcli to-http` call.
"""

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fleet.support import wait_until
from interop.peers import CLIENTS, Broker, Child, nsq_program
from trio_nsq.protocol import pack_messages

END_DEADLINE_S = 60.0
"""Far above the time of an end in good order: only a program that hangs reaches it."""
COMMANDS = {"nsq_to_file": "to-file", "nsq_to_http": "to-http", "nsq_to_nsq": "to-nsq"}
"""The command of ours that replaces each program. All of them take the program's flags."""


@contextmanager
def connector(name: str, broker: Broker, *flags: str) -> Iterator[Child]:
    """Run a program of NSQ, or a command of ours, on the messages of `broker`, until the block exits.

    Args:
        name: Such as `nsq_to_file` or `to-file`.
        flags: Such as `--topic=clicks`. The broker's address is added.
    """
    child = Child(*_command(name, broker, flags))
    try:
        yield child
    finally:
        child.close()


def _command(name: str, broker: Broker, flags: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line, and what it needs in its environment."""
    if name not in COMMANDS.values():
        return [str(nsq_program(name)), f"--nsqd-tcp-address={broker.tcp_address}", *flags], {}
    environment = {
        "QCLI_NSQD_TCP_ADDRESS": broker.tcp_address,
        "QCLI_NSQD_HTTP_ADDRESS": broker.http_address,
        "XDG_CONFIG_HOME": "/nowhere",
    }
    return [sys.executable, "-m", "qcli", name, *flags], environment


def stop(child: Child, number: signal.Signals = signal.SIGTERM) -> int:
    """Send a signal, wait for the end, and return the exit code."""
    child.process.send_signal(number)
    return child.wait(END_DEADLINE_S)


# ---------------------------------------------------------------------- messages


def publish(broker: Broker, topic: str, bodies: Sequence[bytes]) -> None:
    """Publish over HTTP, in order, to a topic whose channels were created before its messages."""
    for start in range(0, len(bodies), 1000):
        messages = pack_messages(bodies[start : start + 1000])
        broker.post("/mpub", len(messages).to_bytes(4, "big") + messages.data, topic=topic, binary="true")
    # nsqd moves messages to the channels after it has accepted them.
    wait_until(partial(_are_routed, broker, topic), f"the channels of {topic} have its messages")


def _are_routed(broker: Broker, topic: str) -> bool:
    about = _stats(broker, topic)
    return all(channel["message_count"] >= about["message_count"] for channel in about["channels"])


def await_finished(broker: Broker, topic: str, channel: str, child: Child) -> None:
    """Wait until no message of the channel waits, is in flight or deferred. Fails if the program ends before."""

    def is_over() -> bool:
        return broker.is_drained(topic, channel) or child.process.poll() is not None

    wait_until(is_over, f"{topic}/{channel} is finished")
    if (code := child.process.poll()) is not None:
        child.fail(f"ended with exit code {code}")


def _stats(broker: Broker, topic: str) -> dict[str, Any]:
    (about,) = json.loads(broker.http("GET", "/stats", format="json", topic=topic))["topics"]
    found: dict[str, Any] = about
    return found


def drain(broker: Broker, topic: str, channel: str, count: int, *, max_in_flight: int = 50) -> list[bytes]:
    """Take messages from a channel, in the order of their delivery.

    If the channel has more than `count`, only `max_in_flight` 1 takes no more.
    """
    if count == 0:
        return []
    go_nsq = CLIENTS[0]
    with go_nsq.subscribe(
        broker.tcp_address, topic, channel, count, max_in_flight=max_in_flight
    ) as subscriber:
        return [delivery.body for delivery in subscriber.rest()]


# ---------------------------------------------------------------------- receivers of HTTP requests


@dataclass(frozen=True)
class Call:
    """A request as it arrived. The names of the headers are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


Answers = Callable[[int, Call], int]
"""Returns the status of the answer to a request; requests are numbered from 0. Redirections go to `/elsewhere`."""


class Receiver:
    """A running HTTP server that keeps all requests.

    Attributes:
        calls: The requests in the order of their arrival.
        most: The largest number of requests at the same time.
    """

    def __init__(self, answers: Answers) -> None:
        self.calls: list[Call] = []
        self.most = 0
        self._now = 0
        self._answers = answers
        self._lock = threading.Lock()
        answer = self._receive

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                status = answer(Call(self.command, self.path, headers, body))
                to = b"Location: /elsewhere\r\n" if status in (301, 302, 307, 308) else b""
                self.wfile.write(b"HTTP/1.1 %d x\r\n%sContent-Length: 0\r\n\r\n" % (status, to))

            do_GET = do_PUT = do_POST

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128  # connections that are not accepted yet: clients open a hundred at once

        self._server = Server(("127.0.0.1", 0), Handler)
        self.address = "http://127.0.0.1:%d" % self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def _receive(self, call: Call) -> int:
        with self._lock:
            number = len(self.calls)
            self.calls.append(call)
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            return self._answers(number, call)
        finally:
            with self._lock:
                self._now -= 1

    def close(self) -> None:
        """Stop to accept connections."""
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def receiving(answers: Answers = lambda number, call: 200) -> Iterator[Receiver]:
    """Run a receiver until the block exits."""
    receiver = Receiver(answers)
    try:
        yield receiver
    finally:
        receiver.close()
