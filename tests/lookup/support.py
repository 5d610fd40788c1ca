"""Discovery services for tests, and a raw client for them."""

import json
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from struct import pack, unpack
from typing import Any, TypeAlias

import trio

from broker.support import PATIENCE_S, time_limit
from interop.peers import nsqlookupd
from trio_nsq.access.policy import token_digest
from trio_nsq.log import Files
from trio_nsq.lookup.service.options import LookupdOptions
from trio_nsq.lookup.service.server import serve

FREE = "127.0.0.1:0"


@dataclass(frozen=True)
class Lookupd:
    """A running discovery service.

    Attributes:
        tcp_address, http_address: `127.0.0.1:PORT`.
        end: Ends it at once, like a kill.
        reload: Has it read its files again, as SIGHUP does.
        log: Its log output, if it is a process.
    """

    tcp_address: str
    http_address: str
    end: Callable[[], None]
    reload: Callable[[], Awaitable[None]] | None = None
    log: Callable[[], list[str]] = list


Runs: TypeAlias = Callable[..., AbstractAsyncContextManager[Lookupd]]
"""Runs a service on these addresses, or on free ports."""


@asynccontextmanager
async def ours(
    tcp_address: str = FREE, http_address: str = FREE, *, files: Files | None = None, **options: Any
) -> AsyncIterator[Lookupd]:
    """Run `qcli lookupd` in the test's trio run."""
    settings = LookupdOptions(tcp_address, http_address, **({"broadcast_address": "127.0.0.1"} | options))
    reload, reloads = trio.open_memory_channel[None](0)

    async def read_again() -> None:
        for _ in range(2):  # the second request is taken when the first one is done
            await reload.send(None)

    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def run(task_status: Any) -> None:
            with scope:
                await serve(settings, files=files, reloads=reloads, task_status=task_status)

        bound = await nursery.start(run)
        with time_limit(nursery.cancel_scope):
            yield Lookupd(bound.tcp_address, bound.http_address, scope.cancel, read_again)
        scope.cancel()


@asynccontextmanager
async def real(tcp_address: str = FREE, http_address: str = FREE) -> AsyncIterator[Lookupd]:
    """Run nsqlookupd."""
    with nsqlookupd(f"--tcp-address={tcp_address}", f"--http-address={http_address}") as lookupd:

        def end() -> None:
            lookupd.process.kill()
            lookupd.process.wait()

        yield Lookupd(lookupd.tcp_address, lookupd.http_address, end, log=lookupd.log)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again, until a service has the expected state."""
    with trio.fail_after(PATIENCE_S):
        while not await condition():
            await trio.sleep(0.01)


def identify(**changes: Any) -> bytes:
    """Return an IDENTIFY as a broker sends it, with these fields changed."""
    fields = {
        "broadcast_address": "b",
        "hostname": "h",
        "http_port": 4151,
        "tcp_port": 4150,
        "version": "1.3.0",
    }
    body = json.dumps(fields | changes).encode()
    return b"IDENTIFY\n" + pack(">i", len(body)) + body


def auth(secret: bytes) -> bytes:
    """Return an AUTH with this secret."""
    return b"AUTH\n" + pack(">i", len(secret)) + secret


def token_of(name: str) -> bytes:
    """Return the token of an entry of `write_auth_file`."""
    return f"token-of-{name}".encode()


def write_auth_file(path: Path, entries: Mapping[str, str], *, certificates: Mapping[str, str] = {}) -> Path:
    """Write an auth file.

    Args:
        entries: The names of tokens, see `token_of`, each with the lines of TOML after its hash.
        certificates: The same for certificates; the names are subjects.
    """
    parts = [
        f'[[token]]\nname = "{name}"\nhash = "{token_digest(token_of(name))}"\n{lines}\n'
        for name, lines in entries.items()
    ]
    for number, (subject, lines) in enumerate(certificates.items()):
        parts.append(
            f"[[certificate]]\nname = 'certificate-{number}'\nsubject = {json.dumps(subject)}\n{lines}\n"
        )
    path.write_text("\n".join(parts))
    return path


def grant(*roles: str, topics: str = "*") -> str:
    """Return the line of one grant in an auth file."""
    return f'grants = [{{ roles = {json.dumps(roles)}, topics = ["{topics}"] }}]'


class RawProducer:
    """A raw connection to a discovery service."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._buffer = b""

    async def response(self) -> bytes | None:
        """Return the next response; None if the service has closed the connection."""
        head = await self._exactly(4)
        if head is None:
            return None
        (size,) = unpack(">i", head)
        return await self._exactly(size)

    async def _exactly(self, size: int) -> bytes | None:
        with trio.fail_after(PATIENCE_S):
            while len(self._buffer) < size:
                more = await self.stream.receive_some(65536)
                if not more:
                    assert not self._buffer, "the connection ended inside a response"
                    return None
                self._buffer += more
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    async def ask(self, commands: bytes) -> list[bytes | None]:
        """Send commands, one per line; return their responses."""
        await self.stream.send_all(commands)
        return [await self.response() for _ in range(commands.count(b"\n"))]

    async def register(self, *lines: str) -> None:
        """Send REGISTER or UNREGISTER, and expect OK."""
        responses = await self.ask("".join(f"{line}\n" for line in lines).encode())
        assert responses == [b"OK"] * len(lines)


@asynccontextmanager
async def raw_connection(address: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawProducer]:
    """Connect to a service, over TLS with a context, and send nothing."""
    host, _, port = address.rpartition(":")
    stream: trio.abc.Stream = await trio.open_tcp_stream(host, int(port))
    if tls is not None:
        stream = trio.SSLStream(stream, tls, server_hostname=host, https_compatible=True)
    async with stream:
        yield RawProducer(stream)


@asynccontextmanager
async def producer(
    lookupd: Lookupd, *, token: bytes | None = None, tls: ssl.SSLContext | None = None, **identity: Any
) -> AsyncIterator[RawProducer]:
    """Connect a producer, authenticate it if it has a token, and send IDENTIFY."""
    async with raw_connection(lookupd.tcp_address, tls) as client:
        await client.stream.send_all(b"  V1")
        if token is not None:
            await client.stream.send_all(auth(token))
            assert await client.response() == b"OK"
        await client.stream.send_all(identify(**identity))
        assert b"tcp_port" in (await client.response() or b"")
        yield client


class Log(logging.Handler):
    """The log lines of the library, to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._more = trio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._more.set()
        self._more = trio.Event()

    async def until(self, text: str, *, after: int = 0) -> int:
        """Wait for a line that contains a text.

        Args:
            after: The number of lines to skip.

        Returns:
            The number of lines up to the line found.
        """
        with trio.fail_after(PATIENCE_S):
            while True:
                for number, line in enumerate(self.lines[after:], after + 1):
                    if text in line:
                        return number
                await self._more.wait()


@contextmanager
def watched_log() -> Iterator[Log]:
    """Collect the log of broker, service and clients in this trio run."""
    logger = logging.getLogger("trio_nsq")
    log = Log()
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    try:
        yield log
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)
