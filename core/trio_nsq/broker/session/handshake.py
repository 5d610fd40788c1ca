"""IDENTIFY: negotiates settings with a client, and upgrades the connection to TLS and compression."""

from functools import lru_cache
from typing import TYPE_CHECKING

import trio

from ..._version import __version__
from ...protocol.command_reader import CommandReader
from ...protocol.compression import Deflate, Snappy
from ...protocol.frames import OK_FRAME, encode_response
from ...protocol.identify import (
    IdentifyRequest,
    IdentifySettings,
    Upgrades,
    choose_upgrades,
    identify_reply,
    negotiate,
    parse_identify,
)
from ..ingest.idempotent import NamedProducer
from ..state.consumer import ELSEWHERE, REGION, ZONE
from .deps import SessionDeps
from .transport import Transport

if TYPE_CHECKING:
    from ..siblings import Siblings

_LARGE_BODY_BYTES = 4096
_NO_UPGRADES = Upgrades()


@lru_cache(maxsize=256)
def _unidentified(host: str) -> IdentifyRequest:
    """Return what a client of this host has before IDENTIFY."""
    return IdentifyRequest(client_id=host, hostname=host)


class Handshake:
    """Negotiates with a client, and holds the result.

    Attributes:
        identity: The client's IDENTIFY request.
        settings: The negotiated settings, or the defaults.
        upgrades: The layers on the connection: TLS, compression.
        producer: The client as a producer with a name; None: it has none.
        under_way: A TLS handshake is running: no frames may be sent.
    """

    def __init__(self, deps: SessionDeps, reader: CommandReader, transport: Transport, host: str) -> None:
        self.identity: IdentifyRequest = _unidentified(host)
        self.settings = self._negotiated = deps.default_settings
        self.upgrades: Upgrades = _NO_UPGRADES
        self.producer: NamedProducer | None = None
        self.under_way: bool = False
        self._is_identified = False
        self._deps = deps
        self._reader = reader
        self._transport = transport

    @property
    def nearness(self) -> int:
        """How near the client is: `ZONE`, `REGION` or `ELSEWHERE`."""
        options, identity = self._deps.options, self.identity
        if options.topology_zone and identity.topology_zone == options.topology_zone:
            return ZONE
        if options.topology_region and identity.topology_region == options.topology_region:
            return REGION
        return ELSEWHERE

    async def owner_in(self, siblings: "Siblings", body: bytes) -> int | None:
        """Return the process that serves this client, a producer with a name; None: this one. Raises CommandError."""
        if self._is_identified:
            return None
        request = await self._parse(body)
        if not (request.producer and request.feature_negotiation):
            return None
        owner = siblings.owner_of(request.producer)
        return None if owner == siblings.index else owner

    def identify_now(self, body: bytes) -> bool:
        """Negotiate and answer, if nothing has to wait. Otherwise do nothing, and return False. Raises CommandError."""
        if len(body) > _LARGE_BODY_BYTES:
            return False
        request = parse_identify(body)
        settings, upgrades = self._negotiate(request)
        if upgrades.any:
            return False
        self._answer(request, settings, upgrades)
        return True

    async def identify(self, body: bytes) -> bytes | None:
        """Negotiate, answer, and upgrade the connection to TLS and compression. Raises CommandError.

        Returns the data received after the command, for the new layers to decode; None without new layers.
        """
        request = await self._parse(body)
        settings, upgrades = self._negotiate(request)
        self._answer(request, settings, upgrades)
        return await self._upgrade(upgrades) if upgrades.any else None

    def _negotiate(self, request: IdentifyRequest) -> tuple[IdentifySettings, Upgrades]:
        """Return the settings and the layers that a request results in. Raises CommandError."""
        deps, limits = self._deps, self._deps.options.limits
        settings, upgrades = negotiate(request, limits, self._negotiated), _NO_UPGRADES
        if request.feature_negotiation and self._transport.bare:  # a connection is upgraded only once
            upgrades = choose_upgrades(request, limits, tls=deps.tls_context is not None)
        return settings, upgrades

    def _answer(self, request: IdentifyRequest, settings: IdentifySettings, upgrades: Upgrades) -> None:
        """Use the settings, and answer."""
        deps = self._deps
        self.identity, self._negotiated = request, settings
        self._reader.heartbeats = settings.heartbeat_interval_ms > 0
        if not self._is_identified:  # as in nsqd, a second IDENTIFY is answered but changes nothing
            self._is_identified = True
            self.settings = settings
            if request.producer and request.feature_negotiation:
                self.producer = NamedProducer(request.producer, request.producer_instance, deps.idempotent)
                self._reader.numbered = True
            self._reader.uncounted_requeues = request.uncounted_requeues and request.feature_negotiation
        if not request.feature_negotiation:
            self._transport.send_buffer.put(OK_FRAME)
            return
        reply = identify_reply(
            request,
            settings,
            upgrades,
            deps.options.limits,
            __version__,
            auth_required=not deps.access.is_open,
            region=deps.options.topology_region,
            zone=deps.options.topology_zone,
        )
        self._transport.send_buffer.put(encode_response(reply))

    async def _parse(self, body: bytes) -> IdentifyRequest:
        """Parse the body. A large one takes milliseconds, so only one is parsed at a time. Raises CommandError."""
        if len(body) <= _LARGE_BODY_BYTES:
            return parse_identify(body)
        async with self._deps.parsing:
            await trio.lowlevel.checkpoint()
            return parse_identify(body)

    async def _upgrade(self, upgrades: Upgrades) -> bytes:
        """Upgrade the connection to TLS and compression, and send an OK through each. Raises CommandError."""
        self.upgrades = upgrades
        buffer = self._transport.send_buffer
        buffer.flush()
        received = self._reader.take_buffered()  # a correct client has sent nothing yet
        if upgrades.tls:
            assert self._deps.tls_context is not None
            self.under_way = True
            await self._transport.start_tls(self._deps.tls_context, received)
            self.under_way = False
            received = b""
            self._reader.tls_required = False
            buffer.put(OK_FRAME)
        if upgrades.snappy or upgrades.deflate:
            codec = Snappy() if upgrades.snappy else Deflate(upgrades.deflate_level)
            self._transport.add_codec(codec)
            buffer.put(OK_FRAME)
        return received
