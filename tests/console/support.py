"""`qcli_admin` runs a console, `console_of` its parts in this process; `ask` makes requests."""

import http.client
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from fleet.support import DEADLINE_S
from interop import peers
from interop.peers import Child
from trio_nsq.console.console import Console
from trio_nsq.console.options import ConsoleOptions
from trio_nsq.console.server import make_console


@dataclass(frozen=True)
class Answer:
    """An answer over HTTP; the names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the decoded body."""
        return json.loads(self.body)


def ask(
    address: str,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Make a request to `127.0.0.1:PORT`, and return the answer whatever its status. Redirects are not followed."""
    connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
    try:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, found, answer.read())
    finally:
        connection.close()


@dataclass(frozen=True)
class WebServer:
    """A running `qcli admin`.

    Attributes:
        address: `127.0.0.1:PORT`
    """

    address: str
    child: Child

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Make a request, and return the answer whatever its status."""
        return ask(self.address, method, path, body, headers)


@contextmanager
def qcli_admin(folder: Path, *flags: str) -> Iterator[WebServer]:
    """Run the console on a free loopback port until the block exits.

    Args:
        folder: Gets the file with its address.
        flags: Further flags of `qcli admin`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with peers.qcli_admin(f"--address-file={folder / 'console.json'}", *flags) as running:
        yield WebServer(running.http_address, running.child)


@asynccontextmanager
async def console_of(
    nsqd_addresses: Sequence[str] = (),
    lookupd_addresses: Sequence[str] = (),
    *,
    request_timeout_ms: int = 5000,
) -> AsyncIterator[Console]:
    """Run the parts of a console, without pages, until the block exits; it has polled once."""
    options = ConsoleOptions(
        nsqd_http_addresses=tuple(nsqd_addresses),
        lookupd_http_addresses=tuple(lookupd_addresses),
        request_timeout_ms=request_timeout_ms,
    )
    console = make_console(options)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(console.watcher.run)
            yield console
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await console.upstream.aclose()
