"""The server of the discovery service: TCP for brokers, HTTP for consumers and administrators, one registry."""

import logging
import platform
import socket
from dataclasses import dataclass
from functools import partial

import trio

from ..._version import __version__
from ...http import log_request, peer_of, serve_connection
from ...listening import Listening, listen, loopback_host, port_of
from ...log import Files
from ...protocol import CommandError
from ...protocol.errors import quote
from ...under_trio import require_trio
from ...wording import count_of
from ..protocol import OK, Command, CommandReader, Identify, PeerInfo, Ping, Register, encode_response
from .http_api import make_router
from .names_file import NamesFile
from .options import LookupdOptions
from .registry import Producer, Registry, TooMany

logger = logging.getLogger("trio_nsq.lookup")

GREETING_TIMEOUT_S = 60.0
"""The timeout for a connection's IDENTIFY, and the shortest timeout between later commands."""
LINGER_S = 1.0
"""How long input is read and dropped after an error. Closing a connection with unread input resets it, and the client
may get the reset before the error."""
SAVE_INTERVAL_S = 0.2
"""The shortest time between two writes of the names: many may be registered at once."""
SAVE_RETRY_S = 10.0
"""The delay before a failed write is repeated."""

_RECEIVE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class LookupdAddresses:
    """The bound addresses of a discovery service, `host:port` each."""

    tcp_address: str
    http_address: str


async def serve(
    options: LookupdOptions,
    *,
    files: Files | None = None,
    task_status: trio.TaskStatus[LookupdAddresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a discovery service until cancelled; then save the names and close all connections.

    Args:
        options: The configuration.
        files: The file system; tests may replace it.
        task_status: Gets the bound addresses once clients can connect.

    Raises:
        StartupError: The service cannot start; the text is for the user.
        RuntimeError: The caller is not a trio task.
    """
    require_trio("trio_nsq.lookup.service.server.serve")
    logger.info("trio-nsq v%s (Python %s)", __version__, platform.python_version())
    registry = Registry(
        inactive_timeout_s=options.inactive_producer_timeout_ms / 1000,
        tombstone_lifetime_s=options.tombstone_lifetime_ms / 1000,
        max_registrations=options.max_registrations,
    )
    names_file = NamesFile(options.data_path, files) if options.data_path is not None else None
    try:
        if names_file is not None:
            names = names_file.load()
            names_file.try_to_save(names)
            registry.load(names)
            logger.info("DB: found %s in %s", count_of(len(registry.topics()), "topic"), names_file.path)
        saver = _NamesSaver(registry, names_file)
        try:
            await _listen_and_serve(options, registry, saver, task_status)
        finally:
            with trio.CancelScope(shield=True):
                await saver.save_last_changes()
    finally:
        if names_file is not None:
            names_file.close()
        logger.info("LOOKUPD: bye")


async def _listen_and_serve(
    options: LookupdOptions,
    registry: Registry,
    saver: "_NamesSaver",
    task_status: trio.TaskStatus[LookupdAddresses],
) -> None:
    opened: dict[str, Listening] = {}
    try:
        opened["TCP"] = await listen("--tcp-address", options.tcp_address)
        opened["HTTP"] = await listen("--http-address", options.http_address)
        bound = LookupdAddresses(opened["TCP"].address, opened["HTTP"].address)
        identity = PeerInfo(
            # The host name may resolve to another address than loopback.
            broadcast_address=options.broadcast_address
            or loopback_host(bound.http_address)
            or socket.gethostname(),
            hostname=socket.gethostname(),
            http_port=port_of(bound.http_address) or 0,
            tcp_port=port_of(bound.tcp_address) or 0,
            version=__version__,
        )
        silence_s = max(GREETING_TIMEOUT_S, 2 * options.inactive_producer_timeout_ms / 1000)
        router = make_router(registry)

        async def handle_broker(stream: trio.SocketStream) -> None:
            await BrokerConnection(stream, registry, identity, silence_s=silence_s).serve()

        async def handle_http(stream: trio.SocketStream) -> None:
            try:
                await serve_connection(stream, router, on_request=partial(log_request, logger))
            except Exception:
                # A bug must not affect the other clients.
                logger.exception("HTTP: internal error")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(saver.run)
            nursery.start_soon(trio.serve_listeners, handle_broker, opened["TCP"].listeners)
            nursery.start_soon(trio.serve_listeners, handle_http, opened["HTTP"].listeners)
            for name, there in opened.items():
                logger.info("%s: listening on %s", name, there.address)
            task_status.started(bound)
    finally:
        for name, there in opened.items():
            logger.info("%s: closing %s", name, there.address)
            there.close()


class BrokerConnection:
    """The connection of a broker.

    Args:
        stream: Closed at the end of `serve`.
        identity: The response to IDENTIFY.
        silence_s: The longest time between two commands; after it the connection is closed. Before IDENTIFY the limit
            is `GREETING_TIMEOUT_S`.
    """

    def __init__(
        self, stream: trio.SocketStream, registry: Registry, identity: PeerInfo, *, silence_s: float
    ) -> None:
        self._stream = stream
        self._registry = registry
        self._identity = identity
        self._silence_s = silence_s
        self._peer = peer_of(stream)
        self._producer: Producer | None = None

    async def serve(self) -> None:
        """Serve the client until it disconnects, fails or is silent for too long; then remove it from the registry."""
        peer = self._peer
        logger.info("TCP: new client(%s)", peer)
        try:
            async with self._stream:
                with trio.CancelScope() as watchdog:
                    await self._converse(watchdog)
                if watchdog.cancelled_caught:
                    logger.warning("CLIENT(%s): closed, no command within the timeout", peer)
        except trio.BrokenResourceError:
            pass  # the connection is lost
        except Exception:
            # A bug must not affect the other clients.
            logger.exception("TCP: client(%s): internal error", peer)
        finally:
            self._unregister()
            logger.info("PROTOCOL(V1): [%s] exiting ioloop", peer)

    async def _converse(self, watchdog: trio.CancelScope) -> None:
        reader = CommandReader()
        watchdog.deadline = trio.current_time() + GREETING_TIMEOUT_S
        while True:
            data = await self._stream.receive_some(_RECEIVE_BYTES)
            reader.receive_data(data)
            replies: list[bytes] = []
            error: CommandError | None = None
            try:
                while (command := reader.next_command()) is not None:
                    replies.append(encode_response(self._execute(command, trio.current_time())))
            except CommandError as exc:
                error = exc
                replies.append(encode_response(exc.wire))
            if replies and self._producer is not None:  # before IDENTIFY a PING does not extend it
                watchdog.deadline = trio.current_time() + self._silence_s
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

    def _execute(self, command: Command, now: float) -> bytes:
        """Execute a command and return the response. Raises CommandError."""
        if isinstance(command, Identify):
            info = command.info
            where, version = quote(info.broadcast_address), quote(info.version)
            words = "CLIENT(%s): IDENTIFY Address:%s TCP:%d HTTP:%d Version:%s"
            logger.info(words, self._peer, where, info.tcp_port, info.http_port, version)
            self._producer = self._registry.identify(self._peer, info, now)
            return self._identity.encode()
        if self._producer is None:
            return OK  # a PING, the only other command that is legal before IDENTIFY
        if isinstance(command, Ping):
            logger.debug("CLIENT(%s): pinged (last ping %.3fs)", self._peer, now - self._producer.last_seen)
            self._registry.ping(self._producer, now)
        elif isinstance(command, Register):
            try:
                news = self._registry.register(self._producer, command.topic, command.channel)
            except TooMany as exc:
                raise CommandError("E_INVALID", str(exc)) from exc
            if news:
                logger.info("DB: client(%s) %s", self._peer, command)
        elif self._registry.unregister(self._producer, command.topic, command.channel):
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


class _NamesSaver:
    """Writes the registry's names to the file, if there is one, when they change."""

    def __init__(self, registry: Registry, names_file: NamesFile | None) -> None:
        self._registry = registry
        self._file = names_file
        self._changed = trio.Event()
        if names_file is not None:
            registry.on_names_changed = self._mark_changed

    def _mark_changed(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Write the names whenever they change."""
        while True:
            await self._changed.wait()
            await trio.sleep(SAVE_INTERVAL_S if await self._save() else SAVE_RETRY_S)

    async def save_last_changes(self) -> None:
        """Write pending changes at shutdown; a failure is logged."""
        if self._changed.is_set():
            await self._save()

    async def _save(self) -> bool:
        assert self._file is not None  # without a file, nothing is marked as changed
        self._changed = trio.Event()
        names = self._registry.durable_names()
        try:
            with trio.CancelScope(shield=True):  # a cancelled write would count as done
                await trio.to_thread.run_sync(self._file.save, names)
        except OSError as exc:
            logger.error("DB: cannot write %s: %s", self._file.path, exc.strerror)
            self._changed.set()
            return False
        return True
