"""Consoles for tests: `qcli_admin` runs one as a process, `console_of` its parts in this process."""

import http.client
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from fleet.support import DEADLINE_S
from interop.peers import STOP_DEADLINE_S, Child
from trio_nsq.console.console import Console
from trio_nsq.console.options import ConsoleOptions
from trio_nsq.console.server import make_console


@dataclass(frozen=True)
class Answer:
    """An answer over HTTP."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the decoded body."""
        return json.loads(self.body)


@dataclass(frozen=True)
class WebServer:
    """A server of pages: `qcli admin`, or nsqadmin.

    Attributes:
        address: `127.0.0.1:PORT`
    """

    address: str
    child: Child

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Make a request, and return the answer whatever its status."""
        connection = http.client.HTTPConnection(self.address, timeout=DEADLINE_S)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()


@contextmanager
def qcli_admin(folder: Path, *flags: str) -> Iterator[WebServer]:
    """Run the console on a free loopback port until the block exits.

    Args:
        folder: Gets the file with its address.
        flags: Further flags of `qcli admin`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "console.json"
    argv = [
        *(sys.executable, "-m", "qcli", "admin"),
        "--http-address=127.0.0.1:0",
        f"--address-file={file}",
        *flags,
    ]
    child = Child(argv)
    try:
        await_line(child, "ready")
        yield WebServer(json.loads(file.read_text())["http_address"], child)
        if child.process.poll() is None:
            child.process.terminate()
            if code := child.wait(STOP_DEADLINE_S):
                child.fail(f"SIGTERM ended it with exit code {code}")
    finally:
        child.close()


def await_line(child: Child, text: str) -> str:
    """Wait for a line on stderr that contains a text, and return it."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            line = child.stderr.next(deadline)
        except TimeoutError:
            child.fail(f"did not write {text!r} within {DEADLINE_S:g} s")
        if line is None:
            child.fail(f"ended before it wrote {text!r}")
        if text in line:
            return line


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
