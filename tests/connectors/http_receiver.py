"""An HTTP server for tests of `to-http`: it records requests, and answers as the test says."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Received:
    """A request. Header names are in lower case; `target` is path and query as sent."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """An answer. `raw`: these bytes instead; the connection is closed after them."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"OK"
    raw: bytes | None = None


class Receiver:
    """Runs until it is closed; a thread per connection.

    Args:
        answer: Returns the answer to a request; it is called in a thread, and may block.
        tls: For https.

    Attributes:
        requests: All requests, in the order in which they were complete.
        connections: The number of connections so far.
    """

    def __init__(
        self,
        answer: Callable[[Received], Answer | int] = lambda _: 200,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.requests: list[Received] = []
        self.connections = 0
        self.answer = answer
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        self._server = _Server(("127.0.0.1", port), _handler(self))
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            # The thread of a connection does the handshake, at its first read.
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`, or with https, without a slash at the end."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[bytes]:
        return [each.body for each in self.requests]

    def wait_for(self, count: int) -> list[Received]:
        """Wait until there were this many requests; return all."""
        with self._changed:
            found = self._changed.wait_for(lambda: len(self.requests) >= count, DEADLINE_S)
            assert found, f"{count} requests were expected, {len(self.requests)} arrived"
            return list(self.requests)

    def record(self, request: Received) -> Answer:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
        found = self.answer(request)
        return Answer(found) if isinstance(found, int) else found

    def opened(self, sock: socket.socket) -> None:
        self.connections += 1
        self._open.add(sock)

    def ended(self, sock: socket.socket) -> None:
        self._open.discard(sock)

    def drop_connections(self) -> None:
        """Close all connections, as a server that restarts."""
        for sock in list(self._open):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it was closed meanwhile

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.drop_connections()
        self._thread.join()


@contextmanager
def receiver(
    answer: Callable[[Received], Answer | int] = lambda _: 200,
    port: int = 0,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Receiver]:
    """Run a receiver for a block."""
    running = Receiver(answer, port, tls)
    try:
        yield running
    finally:
        running.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    block_on_close = False

    def handle_error(self, *_: Any) -> None:
        """The client closed its connection."""


def _handler(owner: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            owner.opened(self.request)

        def finish(self) -> None:
            owner.ended(self.request)
            super().finish()

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", "0"))
            body = self.rfile.read(length)
            headers = {name.lower(): value for name, value in self.headers.items()}
            answer = owner.record(Received(self.command, self.path, headers, body))
            if answer.raw is not None:
                self.wfile.write(answer.raw)
                self.close_connection = True
                return
            head = f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n"
            lines = {"Content-Length": str(len(answer.body)), **answer.headers}
            head += "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            self.wfile.write(head.encode() + b"\r\n" + answer.body)

        do_GET = do_PUT = do_POST

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    return Handler
