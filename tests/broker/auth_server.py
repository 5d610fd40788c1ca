"""An auth server for tests: in the test's trio run, in a thread, or as a process.

    python -m broker.auth_server --port 4180 --answer answer.json

serves the file, which it reads for each request, and prints the query string of every request.
"""

import argparse
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from struct import pack
from typing import Any

import trio

from broker.support import RawClient
from trio_nsq.http.messages import Request, Response
from trio_nsq.http.routing import Route, Router
from trio_nsq.http.serving import serve_connection
from trio_nsq.protocol.address import format_address

LONGEST_START_S = 20


def answer(*authorizations: dict[str, Any], ttl: int = 3600, **fields: Any) -> Response:
    """Return a valid answer; the fields may include `identity` and `identity_url`."""
    return Response.json({"ttl": ttl, "authorizations": authorizations, **fields})


def authorization(topic: str = ".*", channel: str = ".*", *permissions: str) -> dict[str, Any]:
    """Return one authorization, by default with both permissions."""
    return {"topic": topic, "channels": [channel], "permissions": permissions or ("subscribe", "publish")}


EVERYTHING = answer(authorization(), identity="tester", identity_url="http://127.0.0.1/tester")


class AuthServer(Router):
    """An auth server with given answers.

    Attributes:
        response: The answer to every request, or a function that makes it; may be changed at any time.
        queries: The query strings unchanged, oldest first.
        headers: The headers of each of these requests.
        address: `127.0.0.1:PORT`, for `--auth-http-address`.
        gate: Answers wait for this event.
    """

    def __init__(self, response: Response | Callable[[Request], Response]) -> None:
        super().__init__([Route("GET", "/auth", self._answer)])
        self.response = response
        self.queries: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.address = ""
        self.gate = trio.Event()
        self.gate.set()

    def resolve(self, method: str, path: str, query: str = "") -> Route | Response:
        """Route a request, and record its query, because handlers get only the decoded one."""
        self.queries.append(query)
        return super().resolve(method, path, query)

    async def _answer(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        await self.gate.wait()
        return self.response(request) if callable(self.response) else self.response

    async def serve(
        self,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve on a port of 127.0.0.1 until cancelled; 0 is a free port."""

        async def handle(stream: trio.SocketStream) -> None:
            await serve_connection(trio.SSLStream(stream, tls, server_side=True) if tls else stream, self)

        listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
        self.address = format_address(*listeners[0].socket.getsockname())
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, handle, listeners)
            task_status.started()


@asynccontextmanager
async def running_auth_server(
    response: Response | Callable[[Request], Response] = EVERYTHING, tls: ssl.SSLContext | None = None
) -> AsyncIterator[AuthServer]:
    """Run an auth server in this trio run; with `tls` over https."""
    server = AuthServer(response)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, 0, tls)
        yield server
        nursery.cancel_scope.cancel()


@contextmanager
def threaded_auth_server(
    response: Response | Callable[[Request], Response] = EVERYTHING, tls: ssl.SSLContext | None = None
) -> Iterator[AuthServer]:
    """Run an auth server in a thread, for tests without trio and for brokers in processes."""
    started: list[tuple[AuthServer, trio.lowlevel.TrioToken, trio.CancelScope]] = []
    ready = threading.Event()

    async def run() -> None:
        with trio.CancelScope() as scope:
            async with running_auth_server(response, tls) as server:
                started.append((server, trio.lowlevel.current_trio_token(), scope))
                ready.set()
                await trio.sleep_forever()

    thread = threading.Thread(target=trio.run, args=(run,), daemon=True)
    thread.start()
    assert ready.wait(LONGEST_START_S), "the auth server did not start"
    server, token, scope = started[0]
    try:
        yield server
    finally:
        token.run_sync_soon(scope.cancel)
        thread.join()


async def _main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--answer", type=Path, help="a JSON file; by default every client may do everything")
    parser.add_argument("--tls-cert", type=Path)
    parser.add_argument("--tls-key", type=Path)
    given = parser.parse_args()

    def respond(request: Request) -> Response:
        print(json.dumps(request.query), flush=True)
        if given.answer is None:
            return EVERYTHING
        return Response(200, given.answer.read_bytes(), "application/json")

    tls = None
    if given.tls_cert is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(given.tls_cert, given.tls_key)
    server = AuthServer(respond)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, given.port, tls)
        print(f"listening on {server.address}", flush=True)


if __name__ == "__main__":
    try:
        trio.run(_main)
    except* KeyboardInterrupt:
        pass


def auth(secret: bytes) -> bytes:
    """Return an AUTH command."""
    return b"AUTH\n" + pack(">i", len(secret)) + secret


async def authenticated(client: RawClient, secret: bytes = b"secret") -> bytes:
    """Send AUTH and expect success; return the reply."""
    await client.send(auth(secret))
    frame = await client.frame()
    assert frame is not None
    assert frame[0] == 0, frame
    return frame[1]


def options(server: AuthServer) -> dict[str, Any]:
    """Return the options of a broker that uses this server."""
    return {"auth_http_addresses": (server.address,)}
