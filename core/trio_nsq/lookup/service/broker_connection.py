"""The connection of a broker to the discovery service."""

import logging
import math

import trio

from ...access.access import Access
from ...access.audit import Event
from ...access.policy import Identity
from ...protocol import CommandError
from ...protocol.address import host_of
from ...protocol.errors import quote
from ..protocol import (
    OK,
    Auth,
    CommandReader,
    Identify,
    Leadership,
    PeerInfo,
    Ping,
    Register,
    Unregister,
    encode_response,
)
from .registry import AddressTaken, Producer, Registry, TooMany

logger: logging.Logger = logging.getLogger("trio_nsq.lookup")

GREETING_TIMEOUT_S = 60.0
"""The timeout for a connection's IDENTIFY, and the shortest timeout between later commands."""
LINGER_S = 1.0
"""How long input is read and dropped after an error. Closing a connection with unread input resets it, and the client
may get the reset before the error."""

_RECEIVE_BYTES = 64 * 1024


class BrokerConnection:
    """The connection of a broker.

    Args:
        stream: The connection; the caller closes it after `serve`.
        peer: The broker's address.
        info: The response to IDENTIFY.
        access: Identifies brokers.
        subject: The subject of the broker's verified certificate; empty without one.
        silence_s: The longest time between two commands; after it the connection is closed. Before IDENTIFY the limit
            is `GREETING_TIMEOUT_S`.
        refuses_plain_text: The connection has no TLS, and the service requires it.
    """

    def __init__(
        self,
        stream: trio.abc.HalfCloseableStream,
        peer: str,
        registry: Registry,
        info: PeerInfo,
        *,
        access: Access,
        subject: str = "",
        silence_s: float,
        refuses_plain_text: bool = False,
    ) -> None:
        self._stream = stream
        self._peer = peer
        self._registry = registry
        self._info = info
        self._access = access
        self._subject = subject
        self._silence_s = silence_s
        self._reader = CommandReader(refuses_plain_text=refuses_plain_text)
        self._scope = trio.CancelScope()  # its deadline is the timeout
        self._identity: Identity | None = access.find(None, subject)
        self._producer: Producer | None = None
        self._refusal_logged = False

    async def serve(self) -> None:
        """Serve the client until it disconnects, fails or is silent for too long; then remove it from the registry."""
        peer = self._peer
        logger.info("TCP: new client(%s)", peer)
        try:
            with self._scope:
                await self._converse()
            if self._scope.cancelled_caught and trio.current_time() >= self._scope.deadline:
                logger.warning("CLIENT(%s): closed, no command within the timeout", peer)
        except trio.BrokenResourceError:
            pass  # the connection is lost
        finally:
            self._unregister()
            logger.info("PROTOCOL(V1): [%s] exiting ioloop", peer)

    async def _converse(self) -> None:
        self._scope.deadline = trio.current_time() + GREETING_TIMEOUT_S
        while True:
            data = await self._stream.receive_some(_RECEIVE_BYTES)
            self._reader.receive_data(bytes(data))
            replies: list[bytes] = []
            error: CommandError | None = None
            try:
                while (command := self._reader.next_command()) is not None:
                    if isinstance(command, Auth):
                        await self._authenticate(command.secret)
                        reply = OK
                    else:
                        reply = self._execute(command, trio.current_time())
                    replies.append(encode_response(reply))
            except CommandError as exc:
                error = exc
                replies.append(encode_response(exc.wire))
            if replies and self._producer is not None:  # before IDENTIFY a PING does not extend it
                self._scope.deadline = trio.current_time() + self._silence_s
            if error is not None:
                logger.error("[%s] - %s", self._peer, quote(str(error)))
                self._unregister()  # before the client can see the error
            await self._stream.send_all(b"".join(replies))
            if error is not None:
                await self._linger()
            if error is not None or not data:
                return

    async def _linger(self) -> None:
        with trio.move_on_after(LINGER_S):
            await self._stream.send_eof()
            while await self._stream.receive_some(_RECEIVE_BYTES):
                pass

    # ------------------------------------------------------------------ authentication

    async def _authenticate(self, secret: bytes) -> None:
        """Execute AUTH. Raises CommandError.

        A service without authentication accepts every secret, so that brokers can get theirs before the service does.
        """
        if self._access.is_open:
            return
        if self._identity is not None and self._identity.source == "token":
            raise CommandError("E_INVALID", "AUTH already set")
        self._identity = self._access.find(secret, self._subject)
        if self._identity is None:
            self._record("login_failed", "AUTH", "E_AUTH_FAILED")
            delay_s = self._access.failures.record_failure(host_of(self._peer), trio.current_time())
            await trio.sleep(delay_s)
            raise CommandError("E_AUTH_FAILED", "AUTH failed: the token is unknown, expired or revoked")

    def _check_role(self) -> None:
        """Check that the client may register some topic. Raises CommandError."""
        if self._access.is_open:
            return
        if self._identity is None:
            self._record("refused", "IDENTIFY", "E_AUTH_FIRST")
            raise CommandError("E_AUTH_FIRST", "AUTH required before IDENTIFY")
        if not self._identity.has("register"):
            self._record("refused", "IDENTIFY", "E_UNAUTHORIZED")
            raise CommandError("E_UNAUTHORIZED", "IDENTIFY needs the role register")

    def _may_register(self, topic: str) -> bool:
        return self._identity is None or self._identity.allows("register", topic)

    def renew(self) -> bool:
        """Take the client's identity from the current auth file, and end the connection if it is no longer valid.

        Topics that the client may no longer register are removed.

        Returns:
            Whether the connection stays.
        """
        if self._identity is None:
            return True
        before = self._identity
        self._identity = self._access.renew(before)
        if self._producer is None:
            return True  # IDENTIFY checks it
        if self._identity is None or not self._identity.has("register"):
            self._access.audit.record("closed", self._peer, before, subject=self._subject)
            logger.warning("CLIENT(%s): closed, its authentication was revoked or has expired", self._peer)
            self._unregister()
            self._scope.deadline = math.inf
            self._scope.cancel()
            return False
        for topic in [topic for topic in self._producer.channels if not self._may_register(topic)]:
            logger.warning("DB: client(%s) UNREGISTER %s: it lost the role register there", self._peer, topic)
            self._registry.unregister(self._producer, topic)
        return True

    def _record(self, event: Event, verb: str, error: str, **details: str | None) -> None:
        self._access.audit.record(
            event,
            self._peer,
            self._identity,
            subject=self._subject,
            action=verb,
            **details,
            error=error,
        )

    # ------------------------------------------------------------------ commands

    def _execute(self, command: Ping | Identify | Register | Unregister, now: float) -> bytes:
        """Execute a command and return the response. Raises CommandError."""
        if isinstance(command, Identify):
            self._identify(command.info, now)
            return self._info.encode()
        if self._producer is None:
            return OK  # a PING, the only other command that is legal before IDENTIFY
        if isinstance(command, Ping):
            logger.debug("CLIENT(%s): pinged (last ping %.3fs)", self._peer, now - self._producer.last_seen)
            self._registry.ping(self._producer, now)
        elif isinstance(command, Register):
            return self._register(self._producer, command)
        elif self._registry.unregister(self._producer, command.topic, command.channel):
            logger.info("DB: client(%s) %s", self._peer, command)
        return OK

    def _identify(self, info: PeerInfo, now: float) -> None:
        where, version = quote(info.broadcast_address), quote(info.version)
        words = "CLIENT(%s): IDENTIFY Address:%s TCP:%d HTTP:%d Version:%s"
        logger.info(words, self._peer, where, info.tcp_port, info.http_port, version)
        self._check_role()
        owner = self._identity.name if self._identity is not None else None
        try:
            self._producer = self._registry.identify(self._peer, info, now, owner)
        except AddressTaken as exc:
            self._record("refused", "IDENTIFY", "E_UNAUTHORIZED", node=str(info.broadcast_address))
            raise CommandError("E_UNAUTHORIZED", f"IDENTIFY: {exc}") from exc
        if info.cluster is not None:
            self._log_leaders(self._producer, info.cluster, now)

    def _log_leaders(self, producer: Producer, cluster: Leadership, now: float) -> None:
        about = cluster.name, cluster.epoch
        if self._registry.is_outdated(producer, now):
            words = "DB: client(%s) led the cluster %s in epoch %d: ignored, a later leader is registered"
            logger.warning(words, self._peer, *about)
            return
        logger.info("DB: client(%s) leads the cluster %s in epoch %d", self._peer, *about)
        for other in self._registry.outdated_by(producer):
            words = "DB: client(%s) led the cluster %s in epoch %d: hidden, client(%s) leads it in epoch %d"
            logger.info(words, other.remote_address, cluster.name, other.epoch, self._peer, cluster.epoch)

    def _register(self, producer: Producer, command: Register) -> bytes:
        if not self._may_register(command.topic):
            # Not an error that ends the connection: the broker's other topics stay registered.
            refusal = f"E_UNAUTHORIZED REGISTER needs the role register on topic {command.topic}"
            level = logging.DEBUG if self._refusal_logged else logging.WARNING
            logger.log(level, "DB: client(%s) %s", self._peer, refusal)
            self._refusal_logged = True
            self._record(
                "refused", "REGISTER", "E_UNAUTHORIZED", topic=command.topic, channel=command.channel
            )
            return refusal.encode()
        try:
            news = self._registry.register(producer, command.topic, command.channel)
        except TooMany as exc:
            raise CommandError("E_INVALID", str(exc)) from exc
        if news:
            logger.info("DB: client(%s) %s", self._peer, command)
        return OK

    def _unregister(self) -> None:
        """Remove the producer from the registry, if the client is one. May be called again."""
        if self._producer is not None:
            logger.info(
                "DB: client(%s) disconnected, %d registrations", self._peer, self._producer.registrations
            )
            self._registry.disconnect(self._producer)
            self._producer = None
