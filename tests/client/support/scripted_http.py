"""`scripted`: a broker over HTTP that gives the answers of a script and records requests; and common answers."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, str, bytes]
"""The status, the result for the batch, and the body."""
OURS: Answer = (200, "", b'{"producer":"p","number":null}')
NO_TOPIC: Answer = (404, "", b'{"message":"TOPIC_NOT_FOUND"}')
NSQD: Answer = (404, "", b'{"message":"NOT_FOUND"}')
OK: Answer = (200, "", b"OK")


class Script:
    """A broker with scripted answers; None closes the connection after the request.

    Attributes:
        address: Its address.
        seen: The requests, with the number of their connection.
    """

    def __init__(self, answers: Sequence[Answer | None]) -> None:
        self.seen: list[tuple[str, int]] = []
        self.connections = 0
        waiting = iter(answers)
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                script.connections += 1
                self.connection_number = script.connections

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                script.seen.append((f"{self.command} {self.path}", self.connection_number))
                answer = next(waiting)
                if answer is None:
                    self.close_connection = True
                    return
                status, told, body = answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if told:
                    self.send_header("NSQ-Batch", told)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"


@contextmanager
def scripted(*answers: Answer | None) -> Iterator[Script]:
    script = Script(answers)
    thread = threading.Thread(target=partial(script.server.serve_forever, 0.01))
    thread.start()
    try:
        yield script
    finally:
        script.server.shutdown()
        script.server.server_close()
        thread.join()
