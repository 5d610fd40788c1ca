"""The connected TCP clients."""

import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import trio

from ...protocol.address import format_peer
from .client_task import ClientTask
from .deps import SessionDeps
from .session import Session

if TYPE_CHECKING:
    from ..siblings import Siblings

logger: logging.Logger = logging.getLogger("trio_nsq.broker")


class Sessions:
    """Runs a session for each TCP client. One for a broker.

    Attributes:
        connected: The sessions, oldest first.
    """

    def __init__(self, deps: SessionDeps) -> None:
        self.connected: dict[Session, None] = {}
        self._deps = deps
        self._all_closed = trio.Event()  # set while there is no session
        self._all_closed.set()

    async def handle(
        self,
        stream: trio.SocketStream,
        peer: str = "",
        *,
        siblings: "Siblings | None" = None,
        deps: SessionDeps | None = None,
    ) -> None:
        """Serve one client until its end, also if this is cancelled; arguments as of `begin`.

        Args:
            peer: Its address; empty: that of the socket.
        """
        sock = socket.socket(fileno=stream.socket.detach())
        sock.setblocking(False)
        ended = trio.Event()
        try:
            peer = peer or format_peer(sock.getpeername())
        except OSError:
            sock.close()  # the client has disconnected already
            return
        try:
            session = self.begin(sock, peer, ended.set, siblings=siblings, deps=deps)
        except Exception:
            # A bug, or the kernel refuses to watch the socket: it must not affect other clients.
            logger.exception("TCP: client(%s): internal error", peer)
            return
        try:
            await ended.wait()
        except trio.Cancelled:  # such as that of a member whose token was revoked
            if session is not None:
                session.close()
            with trio.CancelScope(shield=True):
                await ended.wait()
            raise

    def begin(
        self,
        sock: socket.socket,
        peer: str,
        on_end: Callable[[], object],
        *,
        siblings: "Siblings | None" = None,
        deps: SessionDeps | None = None,
    ) -> Session | None:
        """Begin to serve a client. Returns its session; None: the broker stops, so the client is closed.

        Args:
            sock: Its non-blocking socket. Frames are sent without a task switch; trio only waits for it.
            peer: Its address.
            on_end: Called when the connection is closed, perhaps at once.
            siblings: The processes of the node, for a client of a shared port.
            deps: Instead of those of all clients.

        Raises:
            OSError: The kernel refuses to watch the socket, which is closed then, like after any other error.
        """
        if self._deps.broker.stopping:
            sock.close()
            on_end()
            return None
        deps = deps or self._deps
        try:
            session = Session(deps, sock, peer, is_shared=siblings is not None)
        except BaseException:
            sock.close()
            on_end()
            raise
        self.connected[session] = None
        if self._all_closed.is_set():
            self._all_closed = trio.Event()
        logger.info("TCP: new client(%s)", peer)
        try:
            ClientTask(session, deps, partial(self._end, session, on_end), siblings).begin()
        except BaseException:
            sock.close()
            self._end(session, on_end)
            raise
        return session

    def _end(self, session: Session, on_end: Callable[[], object]) -> None:
        del self.connected[session]
        if not self.connected:
            self._all_closed.set()
        # nsqd's text, which log filters may match
        logger.info("PROTOCOL(V2): [%s] exiting ioloop", session.peer)
        on_end()

    def renew_identities(self) -> int:
        """Close the sessions whose token or certificate was revoked or has expired. Returns their number."""
        closed = 0
        for session in list(self.connected):
            topic = channel = None
            if session.subscription is not None:
                topic, channel = session.subscription.channel.topic.name, session.subscription.channel.name
            elif session.elsewhere is not None:
                topic, channel, _ = session.elsewhere
            if not session.authorizer.renew(topic, channel):
                logger.warning("%s: closed, its authentication was revoked or has expired", session.peer)
                session.close()
                closed += 1
        return closed

    def abandon_all(self) -> None:
        """Have all sessions close, and send nothing more to their clients."""
        for session in self.connected:
            session.send_buffer.abandon()
            session.close()

    async def close_all(self) -> None:
        """Close all sessions. This waits only for the disk, never for a client."""
        for session in list(self.connected):
            session.send_buffer.flush()
            session.close()
        await self._all_closed.wait()
