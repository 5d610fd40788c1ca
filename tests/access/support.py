"""Auth files for tests, a naive policy engine to compare with, and an HTTP client that sends what it is told to."""

import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from struct import pack

import trio

from broker.support import PATIENCE_S, RawClient
from trio_nsq.access.policy import token_digest

ALL_ROLES = ("publish", "consume", "read", "manage", "admin", "register", "replicate", "unmask")


@dataclass(frozen=True)
class Given:
    """A grant as an auth file has it. None: the file does not have the key."""

    roles: Sequence[str]
    topics: Sequence[str] | None = None
    channels: Sequence[str] | None = None

    def toml(self) -> str:
        """The inline table."""
        keys = {"roles": self.roles, "topics": self.topics, "channels": self.channels}
        given = (f"{key} = {json.dumps(list(value))}" for key, value in keys.items() if value is not None)
        return f"{{ {', '.join(given)} }}"


def everything(*roles: str) -> Given:
    """These roles, on all topics."""
    return Given(roles)


@dataclass
class AuthFile:
    """An auth file. `write` is needed after each change."""

    path: Path
    entries: dict[str, str] = field(default_factory=dict)

    def add_token(self, name: str, *grants: Given, expires: str | None = None, secret: str = "") -> None:
        """Add a token; without a secret it is the name and `-secret`."""
        self._add(
            "token", name, f'hash = "{token_digest((secret or f"{name}-secret").encode())}"', grants, expires
        )

    def add_certificate(self, name: str, subject: str, *grants: Given, expires: str | None = None) -> None:
        """Add a certificate."""
        self._add("certificate", name, f"subject = {json.dumps(subject)}", grants, expires)

    def _add(self, kind: str, name: str, key: str, grants: Iterable[Given], expires: str | None) -> None:
        lines = [f"[[{kind}]]", f'name = "{name}"', key]
        if expires is not None:
            lines.append(f"expires = {expires}")
        lines.append(f"grants = [{', '.join(grant.toml() for grant in grants)}]")
        self.entries[name] = "\n".join(lines) + "\n"

    def write(self) -> Path:
        """Write the file, and return its path."""
        self.path.write_text("\n".join(self.entries.values()))
        return self.path


# ---------------------------------------------------------------------- the naive engine


def name_matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a whole name."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None


def naively_allows(grants: Iterable[Given], role: str, topic: str, channel: str | None = None) -> bool:
    """Whether grants allow a role on a topic, or on a channel of it: the rules as the documentation has them."""
    for grant in grants:
        topics = ["*"] if grant.topics is None else grant.topics
        channels = ["*"] if grant.channels is None else grant.channels
        if role not in grant.roles or not any(name_matches(pattern, topic) for pattern in topics):
            continue
        if channel is not None:
            if any(name_matches(pattern, channel) for pattern in channels):
                return True
        elif role != "manage" or "*" in channels:
            return True
    return False


def naively_allows_everywhere(grants: Iterable[Given], role: str) -> bool:
    """Whether one grant allows a role on all topics and channels."""
    return any(
        role in grant.roles
        and (grant.topics is None or "*" in grant.topics)
        and (grant.channels is None or "*" in grant.channels)
        for grant in grants
    )


# ---------------------------------------------------------------------- clients


def auth(secret: bytes | str) -> bytes:
    """AUTH."""
    body = secret.encode() if isinstance(secret, str) else secret
    return b"AUTH\n" + pack(">i", len(body)) + body


def bearer(name: str) -> str:
    """The Authorization header of a token of `AuthFile.add_token`."""
    return f"Bearer {name}-secret"


@dataclass(frozen=True)
class Answer:
    """An answer. `headers` has lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def message(self) -> str:
        """The message of an error."""
        return str(json.loads(self.body)["message"])


class HTTPConnection:
    """A kept HTTP connection over a stream."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._received = b""

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        await self.stream.send_all(data)

    async def request(
        self, method: str, target: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        """Send a request, and return the answer."""
        await self.send(request(method, target, headers, body))
        return await self.answer()

    async def answer(self) -> Answer:
        """Return the next answer, which must be complete."""
        head = (await self.until(b"\r\n\r\n")).decode("latin-1")
        line, *rest = head.removesuffix("\r\n\r\n").split("\r\n")
        headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in rest)}
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await self.until(b"\r\n"), 16):
                body += (await self.exactly(size + 2))[:-2]
            await self.until(b"\r\n")
        else:
            body = await self.exactly(int(headers["content-length"]))
        return Answer(int(line.split()[1]), headers, body)

    async def ends(self) -> bool:
        """Whether the server closes the connection and sends nothing more."""
        with trio.fail_after(PATIENCE_S):
            return not self._received and not await self.stream.receive_some()

    async def until(self, end: bytes) -> bytes:
        """Return everything up to these bytes."""
        while end not in self._received:
            await self._receive()
        found, self._received = (
            self._received[: self._received.index(end) + len(end)],
            self._received[self._received.index(end) + len(end) :],
        )
        return found

    async def exactly(self, size: int) -> bytes:
        """Return so many bytes, whatever they are."""
        while len(self._received) < size:
            await self._receive()
        found, self._received = self._received[:size], self._received[size:]
        return found

    async def _receive(self) -> None:
        with trio.fail_after(PATIENCE_S):
            data = await self.stream.receive_some()
        assert data, f"the connection ended after {self._received!r}"
        self._received += bytes(data)


def request(method: str, target: str, headers: Mapping[str, str] | None = None, body: bytes = b"") -> bytes:
    """The bytes of a request."""
    known = {"Host": "localhost", "Content-Length": str(len(body)), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in known.items())
    return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


@asynccontextmanager
async def http_connected(address: str) -> AsyncIterator[HTTPConnection]:
    """A kept connection to `host:port`."""
    host, _, port = address.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        yield HTTPConnection(stream)


async def authenticated(client: RawClient, secret: bytes | str) -> bytes:
    """Send AUTH; return the reply, which must not be an error."""
    await client.send(auth(secret))
    frame = await client.frame()
    assert frame is not None
    assert frame[0] == 0, frame
    return frame[1]


async def attempt(client: RawClient, command: bytes) -> str:
    """Send a command that is answered with a frame; return its text."""
    await client.send(command)
    frame = await client.frame()
    assert frame is not None
    return frame[1].decode()
