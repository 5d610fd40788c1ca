"""All TCP clients that are connected."""

import logging
import socket

import trio

from ...protocol.address import format_peer
from .client_task import ClientTask
from .services import Services
from .session import Session

logger = logging.getLogger("trio_nsq.broker")


class Sessions:
    """Runs a session for each TCP client. One for a broker.

    Args:
        services: Of the broker.

    Attributes:
        connected: The sessions, oldest first.
    """

    def __init__(self, services: Services) -> None:
        self.connected: dict[Session, None] = {}
        self._services = services
        self._deserted = trio.Event()  # set while there is no session
        self._deserted.set()

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one client."""
        # The plain socket lets frames be sent without a task switch; trio only waits for it.
        sock = socket.socket(fileno=stream.socket.detach())
        sock.setblocking(False)
        if self._services.broker.stopping:
            sock.close()
            return
        try:
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = format_peer(sock.getpeername())
        except OSError:
            sock.close()  # it has gone already
            return
        session = Session(self._services, sock, peer)
        self.connected[session] = None
        if self._deserted.is_set():
            self._deserted = trio.Event()
        logger.info("TCP: new client(%s)", peer)
        try:
            await ClientTask(session, self._services).run()
        except Exception:
            # A mistake of ours, not the client's: it must not reach the other clients.
            logger.exception("TCP: client(%s): internal error", peer)
        finally:
            del self.connected[session]
            if not self.connected:
                self._deserted.set()
            # nsqd's words, which people's log filters know
            logger.info("PROTOCOL(V2): [%s] exiting ioloop", peer)

    async def close_all(self) -> None:
        """End all sessions. A session that ends waits for nobody but the disk."""
        for session in list(self.connected):
            session.send_buffer.flush()
            session.close()
        await self._deserted.wait()
