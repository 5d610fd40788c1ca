"""A broker's connections to its discovery services: it says what it has, and asks what others have.

Each service has one task. It connects, introduces the broker, and then does one of three things: tell what has
changed, ping when that is due, or rest until something happens. Whatever goes wrong ends the connection; the next one
begins with telling everything. Nobody in the broker waits for any of it, but for the first publish to a new topic.
"""

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote_plus

import trio

from ..protocol import is_ephemeral, is_valid_name
from ..protocol.address import format_address, parse_address
from ..protocol.go_json import decode_object
from ..protocol.limits import MIB
from .announcements import Announcements, HasChannels
from .protocol import (
    MAGIC_V1,
    OK,
    PING,
    LookupdError,
    PeerInfo,
    ResponseReader,
    encode_command,
    encode_identify,
)

if TYPE_CHECKING:
    from ..http.client import HTTPClient

logger = logging.getLogger("trio_nsq.broker")

PING_INTERVAL_S = 15.0
"""A service counts a broker as gone that has not pinged for five minutes (`--inactive-producer-timeout`)."""
STEP_TIMEOUT_S = 1.0
"""How long connecting may take, and each sending and receiving; nsqd's."""
MIN_DELAY_S = 0.1
MAX_DELAY_S = PING_INTERVAL_S
"""Between attempts to connect; nsqd tries again at each ping."""
MAX_ANSWER_BYTES = 5 * MIB
"""Of an answer to a question for channels."""

_COMMANDS_AT_ONCE = 100
"""Sent before their responses are read; with few enough, neither side waits for the other to read first."""
_RECEIVE_BYTES = 16 * 1024
# A host that cannot even be looked up is a UnicodeError.
_FAILURES = (LookupdError, OSError, UnicodeError, trio.BrokenResourceError, trio.TooSlowError)


class LookupRegistration:
    """Keeps a broker registered. Nothing happens before `run`, nor after it.

    Args:
        topics: The broker's, by name; it also has to call `changed` for whatever it makes or deletes.
        info: What the services are told of the broker.
        addresses: The services, `host:port` each.
        connect_timeout_s, request_timeout_s: For questions, which go over HTTP.
        random_fraction: Gives numbers in [0, 1), to spread attempts to connect.

    Raises:
        ValueError: An address is not one.
    """

    def __init__(
        self,
        topics: Mapping[str, HasChannels],
        info: PeerInfo,
        addresses: Iterable[str],
        *,
        connect_timeout_s: float,
        request_timeout_s: float,
        random_fraction: Callable[[], float] = random.random,
    ) -> None:
        self._topics = topics
        self._info = info
        self._connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        self._random_fraction = random_fraction
        self._peers: dict[str, _Peer] = {}
        self._nursery: trio.Nursery | None = None
        self._http: HTTPClient | None = None
        self.set_addresses(addresses)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The services registered with; without any, the broker need not ask for channels."""
        return tuple(self._peers)

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Register with these services, and with no others any more. Raises ValueError; then nothing has changed."""
        wanted = dict.fromkeys(addresses)
        for address in wanted:
            parse_address(address)
        for address in [address for address in self._peers if address not in wanted]:
            logger.info("LOOKUP(%s): removing peer", address)
            self._peers.pop(address).close()
        for address in wanted:
            if address not in self._peers:
                logger.info("LOOKUP(%s): adding peer", address)
                self._peers[address] = _Peer(address, self._info, self._topics, self._random_fraction)
                if self._nursery is not None:
                    self._nursery.start_soon(self._peers[address].run)
        if self._peers and self._http is None:
            from ..http.client import HTTPClient  # with all of an HTTP client

            self._http = HTTPClient(
                connect_timeout_s=self._connect_timeout_s,
                request_timeout_s=self._request_timeout_s,
                max_answer_bytes=MAX_ANSWER_BYTES,
            )

    async def run(self) -> None:
        """Keep the broker registered until cancelled; then the services forget it, the connections being closed."""
        try:
            async with trio.open_nursery() as self._nursery:
                for peer in self._peers.values():
                    self._nursery.start_soon(peer.run)
                await trio.sleep_forever()
        finally:
            self._nursery = None
            if self._peers:
                logger.info("LOOKUP: closing")

    def changed(self, topic: str, channel: str | None = None) -> None:
        """Note that something of this name, a topic if the channel is None, was made or deleted."""
        for peer in self._peers.values():
            peer.changed(topic, channel)

    # ------------------------------------------------------------------ asking

    async def channels(self, topic: str) -> list[str]:
        """Ask all services which channels a topic has.

        Takes as long as the slowest of them, up to the request timeout; when the broker has just begun to connect,
        that time again. What goes wrong is logged, and what the others say is returned.

        Returns:
            What they know together, sorted: valid names, and no ephemeral ones, whose consumers make them.
        """
        with trio.move_on_after(self._request_timeout_s):
            for peer in list(self._peers.values()):
                await peer.tried.wait()
        hosts = [host for peer in self._peers.values() if (host := peer.http_address)]
        if not hosts:
            logger.error("no available nsqlookupd to query for channels to pre-create for topic %s", topic)
            return []
        found: set[str] = set()
        failures: list[str] = []

        async def ask(host: str) -> None:
            try:
                found.update(await self._ask(host, topic))
            except LookupdError as exc:
                failures.append(f"{host}: {exc}")

        async with trio.open_nursery() as nursery:
            for host in hosts:
                nursery.start_soon(ask, host)
        if failures:
            level = logging.WARNING if len(failures) < len(hosts) else logging.ERROR
            text = "failed to query nsqlookupd for channels to pre-create for topic %s - %s"
            logger.log(level, text, topic, "; ".join(failures))
        return sorted(name for name in found if is_valid_name(name) and not is_ephemeral(name))

    async def _ask(self, host: str, topic: str) -> list[str]:
        from ..http.client import RequestFailed

        assert self._http is not None  # there is a peer
        url = f"http://{host}/channels?topic={quote_plus(topic)}"
        logger.info("CI: querying nsqlookupd %s", url)
        try:
            return decode_object(await self._http.get(url)).texts("channels")
        except RequestFailed as exc:
            raise LookupdError(str(exc)) from exc
        except ValueError as exc:
            raise LookupdError(f"the answer is not valid: {exc}") from exc


class _Peer:
    """One service."""

    def __init__(
        self,
        address: str,
        info: PeerInfo,
        topics: Mapping[str, HasChannels],
        random_fraction: Callable[[], float],
    ) -> None:
        self.tried = trio.Event()  # set once it is known whether the service is there
        self._address = address
        self._info = info
        self._random_fraction = random_fraction
        self._announcements = Announcements(topics)
        self._wake = trio.Event()
        self._scope = trio.CancelScope()
        self._identity: PeerInfo | None = None  # kept over lost connections: its HTTP may be there still

    @property
    def http_address(self) -> str | None:
        """Where to ask it; None if that is not known."""
        if self._identity is None or not self._identity.broadcast_address:
            return None
        return format_address(self._identity.broadcast_address, self._identity.http_port)

    def close(self) -> None:
        """End `run`."""
        self._scope.cancel()

    def changed(self, topic: str, channel: str | None) -> None:
        self._announcements.changed(topic, channel)
        if self._announcements.pending:
            self._wake.set()

    async def run(self) -> None:
        """Be connected whenever that is possible."""
        delay_s = MIN_DELAY_S
        with self._scope:
            while True:
                started = trio.current_time()
                try:
                    await self._connect()
                except _FAILURES as exc:
                    logger.error("LOOKUPD(%s): %s", self._address, _why(exc))
                except Exception:
                    # A mistake of ours: it must not reach the broker.
                    logger.exception("LOOKUPD(%s): internal error", self._address)
                finally:
                    self._announcements.disconnected()
                    self.tried.set()
                if trio.current_time() - started >= MAX_DELAY_S:
                    delay_s = MIN_DELAY_S  # it has proved itself
                await trio.sleep(delay_s * (1 - self._random_fraction() / 2))
                delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def _connect(self) -> None:
        """Be connected for as long as that goes well."""
        logger.info("LOOKUP connecting to %s", self._address)
        host, port = parse_address(self._address)
        with trio.fail_after(STEP_TIMEOUT_S):
            stream = await trio.open_tcp_stream(host, port)
        async with stream:
            conversation = _Conversation(stream)
            await self._introduce(conversation)
            self.tried.set()
            self._announcements.connected()
            await self._keep_told(conversation)

    async def _introduce(self, conversation: "_Conversation") -> None:
        (reply,) = await conversation.ask([MAGIC_V1 + encode_identify(self._info)])
        try:
            self._identity = identity = PeerInfo.parse(reply)
        except ValueError:
            hint = ""
            if not self._info.http_port:
                hint = " (it wants to know an HTTP port, and there is none: see --broadcast-http-port)"
            raise LookupdError(f"IDENTIFY - {_excerpt(reply)}{hint}") from None
        logger.info("LOOKUPD(%s): peer info %s", self._address, identity)
        if not identity.broadcast_address:
            logger.error("LOOKUPD(%s): no broadcast address", self._address)

    async def _keep_told(self, conversation: "_Conversation") -> None:
        next_ping = trio.current_time() + PING_INTERVAL_S
        while True:
            if trio.current_time() >= next_ping:
                logger.debug("LOOKUPD(%s): sending heartbeat", self._address)
                await self._tell(conversation, [("PING", PING)])
                next_ping = trio.current_time() + PING_INTERVAL_S
            elif self._announcements.pending:
                commands = self._announcements.take(_COMMANDS_AT_ONCE)
                for command in commands:
                    logger.info("LOOKUPD(%s): %s", self._address, command)
                await self._tell(
                    conversation, [(str(command), encode_command(command)) for command in commands]
                )
            else:
                self._wake = trio.Event()
                with trio.move_on_at(next_ping):
                    await conversation.until_heard_or(self._wake)

    async def _tell(self, conversation: "_Conversation", commands: Sequence[tuple[str, bytes]]) -> None:
        """Send commands, each with its name for errors."""
        for start in range(0, len(commands), _COMMANDS_AT_ONCE):
            part = commands[start : start + _COMMANDS_AT_ONCE]
            responses = await conversation.ask([command for _, command in part])
            for (name, _), response in zip(part, responses, strict=True):
                if response != OK:
                    raise LookupdError(f"{name} - {_excerpt(response)}")


class _Conversation:
    """Commands and responses over one connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._reader = ResponseReader()

    async def ask(self, commands: Sequence[bytes]) -> list[bytes]:
        """Send commands; returns their responses.

        Raises:
            LookupdError: It sends something else, or ends the connection.
            trio.BrokenResourceError, trio.TooSlowError: The connection is lost, or takes or gives nothing.
        """
        with trio.fail_after(STEP_TIMEOUT_S):
            await self._stream.send_all(b"".join(commands))
        responses: list[bytes] = []
        while len(responses) < len(commands):
            if (response := self._reader.next_response()) is not None:
                responses.append(response)
                continue
            with trio.fail_after(STEP_TIMEOUT_S):
                self._reader.receive_data(await self._received())
        return responses

    async def _received(self) -> bytes:
        data = await self._stream.receive_some(_RECEIVE_BYTES)
        if not data:
            raise LookupdError("it has closed the connection")
        return bytes(data)

    async def until_heard_or(self, event: trio.Event) -> None:
        """Wait for an event. Raises LookupdError if the service says something unasked, or ends the connection."""
        heard: list[bytes | Exception] = []

        async def hear() -> None:
            try:
                heard.append(await self._received())
            except (LookupdError, trio.BrokenResourceError) as exc:
                heard.append(exc)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hear)
            await event.wait()
            nursery.cancel_scope.cancel()
        for what in heard:
            raise what if isinstance(what, Exception) else LookupdError(f"unasked - {_excerpt(what)}")


def _excerpt(data: bytes) -> str:
    return ascii(data[:200].decode("utf-8", "replace"))


def _why(error: BaseException) -> str:
    if isinstance(error, trio.TooSlowError):
        return f"nothing happened for {STEP_TIMEOUT_S:g} s"
    return str(error) or "the connection was lost"
