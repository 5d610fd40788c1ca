"""The clients of a member that follows: passed on to the leader, but for what each member answers itself."""

import logging
import random
from dataclasses import dataclass
from functools import partial
from ssl import SSLContext
from typing import Final, Literal, TypeAlias
from urllib.parse import quote

import trio

from ..access.secret import Secret
from ..event_loop.retries import Delays
from ..http.connection import IDLE_TIMEOUT_S
from ..http.decisions import RequestGuard
from ..http.parsing import split_target
from ..http.prefixed_stream import with_prefix
from ..http.routing import NOT_FOUND, Router
from ..http.serving import peer_of, serve_connection
from ..http.upgrade import UpgradeFailed, open_upgraded
from ..protocol import CommandError
from ..protocol.address import is_ip_peer
from ..protocol.frames import encode_error
from ..server.admission import (
    Admission,
    connection_limit,
    http_refusal,
    http_unavailable,
    https_refusal,
    refuse,
    tcp_refusal,
)
from ..server.relay import relay

logger: logging.Logger = logging.getLogger("trio_nsq.cluster")

CONNECT_TIMEOUT_S: Final = 5.0
PATIENCE_S: Final = 30.0
"""So long a client waits for a leader."""
MOST_WAITING: Final = 1000
LINE_TIMEOUT_S: Final = 10.0
"""Limit for the first line of a request, from its first byte."""
_LINE_BYTES: Final = 16 * 1024
"""A longer first line is no request for this member."""
_MIN_DELAY_S: Final = 0.1
_MAX_DELAY_S: Final = 2.0
_LASTING: Final = (400, 401, 403, 404, 426)
"""Statuses with which the leader refuses this member until somebody changes something."""
_NO_LEADER: Final = "the cluster has no leader that accepts clients now; try again"

ListenerName: TypeAlias = Literal["tcp", "http", "https"]


@dataclass(frozen=True, slots=True)
class LeaderTarget:
    """Where the leader is.

    Attributes:
        member: The id of its data folder.
        epoch: The number of its leadership.
        url: `http://HOST:PORT` or `https://HOST:PORT`.
    """

    member: str
    epoch: int
    url: str


class FollowerFront:
    """Serves the clients of a follower.

    The first request of an HTTP connection decides: for a path that the member answers itself, it gets one answer; all
    other connections go to the leader, with all their requests.

    Args:
        local: Answers the requests for its paths.
        secret: The token of this member, with the role `replicate`.
        max_connections: As in `BrokerOptions`. A client needs two descriptors.
        listeners: The number of listeners.
        guard: Checks the requests that `local` answers.
        patience_s: So long a client waits for a leader.
        most_waiting: So many clients wait; further ones are refused.

    Attributes:
        admissions: Handle the clients, by the kind of listener: `TCP`, `HTTP`, `HTTPS`.
        tls: Settings for a leader with https; None uses the system's CAs. It may be replaced at any time.
        forwarded_total: The clients that were passed on since the start.
    """

    def __init__(
        self,
        local: Router,
        *,
        secret: Secret,
        tls: SSLContext | None = None,
        max_connections: int = 0,
        listeners: int = 3,
        guard: RequestGuard | None = None,
        patience_s: float = PATIENCE_S,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self.tls = tls
        self.forwarded_total: int = 0
        self._local = local
        self._secret = secret
        self._guard = guard
        self._patience_s = patience_s
        self._most_waiting = most_waiting
        self._target: LeaderTarget | None = None
        self._changed = trio.Event()
        self._attempts: set[trio.CancelScope] = set()  # to connect to the target
        self._forwarded: dict[trio.CancelScope, LeaderTarget] = {}
        self._waiting = 0
        self._failure = ""  # the last one that was logged
        most = connection_limit(max_connections, 2 * listeners, logs=False)
        no_leader = CommandError("E_INVALID", _NO_LEADER).wire
        self.admissions: dict[str, Admission] = {
            "TCP": Admission(
                "TCP", most, partial(self._handle, "tcp", encode_error(no_leader)), tcp_refusal(most)
            ),
            "HTTP": Admission("HTTP", most, self._handle_http, http_refusal(most)),
            "HTTPS": Admission(
                "HTTPS", most, partial(self._handle, "https", https_refusal()), https_refusal()
            ),
        }

    @property
    def forwarded(self) -> int:
        """The number of clients that are passed on now."""
        return len(self._forwarded)

    @property
    def waiting(self) -> int:
        """The number of clients that wait for a leader now."""
        return self._waiting

    def lead_to(self, target: LeaderTarget | None) -> None:
        """Pass new clients, and those that wait, on to this leader; None: they wait for one."""
        if target == self._target:
            return
        self._target = target
        self._failure = ""
        self._changed.set()
        self._changed = trio.Event()
        for attempt in self._attempts:
            attempt.cancel()

    def end_forwarded(self, before: LeaderTarget | None = None) -> int:
        """Close the connections that go to an earlier leader than this one; None: all. Returns their number."""
        ended = [scope for scope, to in self._forwarded.items() if before is None or to.epoch < before.epoch]
        for scope in ended:
            scope.cancel()
        return len(ended)

    # ------------------------------------------------------------------ clients

    async def _handle(self, listener: ListenerName, refusal: bytes, client: trio.SocketStream) -> None:
        try:
            async with client:
                await self._forward(listener, refusal, client)
        except trio.BrokenResourceError:
            pass  # the client has disconnected
        except Exception:
            # A bug: it must not affect other clients.
            logger.exception("%s: internal error", listener.upper())

    async def _handle_http(self, client: trio.SocketStream) -> None:
        try:
            async with client:
                data = await _first_line(client)
                if not data:
                    return
                if not self._is_local(data):
                    await self._forward("http", http_unavailable(f"NO_LEADER: {_NO_LEADER}"), client, data)
                    return
                await serve_connection(
                    with_prefix(data, client),
                    self._local,
                    peer=peer_of(client),
                    guard=self._guard,
                    once=True,
                )
        except trio.BrokenResourceError:
            pass  # the client has disconnected
        except Exception:
            logger.exception("HTTP: internal error")

    def _is_local(self, data: bytes) -> bool:
        """Whether this member answers a request that begins like this."""
        line = data.lstrip(b"\r\n").partition(b"\n")[0].rstrip(b"\r")
        match line.split(b" "):
            case [method, target, version] if version.startswith(b"HTTP/1."):
                try:
                    path, query = split_target(target)
                except ValueError:
                    return False
                return self._local.resolve(method.decode("latin-1"), path, query) is not NOT_FOUND
        return False

    async def _forward(
        self, listener: ListenerName, refusal: bytes, client: trio.SocketStream, read: bytes = b""
    ) -> None:
        """Pass a client on to the leader until its connection ends. `read` was read from it already."""
        connected = await self._connect(listener, peer_of(client))
        if connected is None:
            await refuse(client, refusal)
            return
        server, target = connected
        self.forwarded_total += 1
        with trio.CancelScope() as scope:
            self._forwarded[scope] = target
            try:
                await relay(with_prefix(read, client), server)
            finally:
                del self._forwarded[scope]

    # ------------------------------------------------------------------ the leader

    async def _connect(
        self, listener: ListenerName, peer: str
    ) -> tuple[trio.abc.HalfCloseableStream, LeaderTarget] | None:
        """Connect to the leader, and wait for one if necessary. Returns None if there is none in time."""
        # A client of a unix socket has no address.
        about = f"&client={quote(peer, safe='')}" if is_ip_peer(peer) else ""
        path = f"/cluster/forward?listener={listener}{about}"
        delays = Delays(_MIN_DELAY_S, _MAX_DELAY_S, random.random)
        with trio.move_on_after(self._patience_s):
            while True:
                target = self._target
                if target is not None:
                    with trio.CancelScope() as attempt:
                        self._attempts.add(attempt)
                        try:
                            server = await open_upgraded(
                                target.url,
                                path,
                                secret=self._secret,
                                tls=self.tls,
                                timeout_s=CONNECT_TIMEOUT_S,
                            )
                            self._failure = ""
                            return server, target
                        except UpgradeFailed as exc:
                            self._log_failure(exc)
                            if exc.status in _LASTING:
                                return None
                        finally:
                            self._attempts.discard(attempt)
                    if attempt.cancelled_caught:
                        continue
                if not await self._wait(delays.next_s() if target is not None else self._patience_s):
                    return None
        return None

    async def _wait(self, seconds: float) -> bool:
        """Wait for another leader, at most for this long. Returns False if too many clients wait."""
        if self._waiting >= self._most_waiting:
            return False
        self._waiting += 1
        try:
            with trio.move_on_after(seconds):
                await self._changed.wait()
        finally:
            self._waiting -= 1
        return True

    def _log_failure(self, error: UpgradeFailed) -> None:
        """Log why the leader cannot be reached, once for each reason."""
        if (text := str(error)) != self._failure:
            self._failure = text
            logger.warning("clients cannot be passed on: the leader %s", text)


async def _first_line(client: trio.SocketStream) -> bytes:
    """Receive until the first line of a request is complete, or it is clear that none comes.

    Returns what was received; empty if the client has sent nothing, or not the whole line, in time.
    """
    data = b""
    with trio.move_on_after(IDLE_TIMEOUT_S) as waiting:
        while _lacks_line(data):
            if not (more := await client.receive_some(_LINE_BYTES)):
                return data  # the leader answers
            if not data:
                waiting.deadline = trio.current_time() + LINE_TIMEOUT_S
            data += more
        return data
    return b""


def _lacks_line(data: bytes) -> bool:
    line = data.lstrip(b"\r\n")
    # Other protocols do not begin with a capital letter.
    return len(data) < _LINE_BYTES and (not line or (line[:1].isupper() and b"\n" not in line))
