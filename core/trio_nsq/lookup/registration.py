"""A broker's connections to its discovery services: one `LookupPeer` for each.

Only the first publish to a new topic waits for an answer of a service.

With TLS, a service must prove that it has the name in the configured address, over TCP and HTTP; the address that it
announces decides only where to connect for HTTP.
"""

import logging
import random
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

import trio

from ..access.secret import NO_SECRET, Secret, SecretFileError
from ..api import lookupd as api
from ..api.request import Endpoint, Request
from ..http.client import HTTPClient, RequestFailed, UnexpectedStatus
from ..protocol import is_ephemeral, is_valid_name
from ..protocol.address import format_address, parse_address
from ..protocol.go_json import decode_object
from ..protocol.limits import MIB
from ..protocol.untrusted_json import decode_json
from .announcements import HasChannels
from .former_leaders import FormerLeader
from .hosts import normal_host
from .peer import LookupPeer, Security
from .protocol import LookupdError, PeerInfo

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

MAX_ANSWER_BYTES = 5 * MIB
"""The largest answer to a query."""
HIDE_INTERVAL_S: Final = 30.0
"""How often tombstones are renewed; by default they last 45 s (`--tombstone-lifetime`)."""
HIDE_FOR_S: Final = 330.0
"""A service lists a lost broker for 5 minutes after its last ping (`--inactive-producer-timeout`)."""
_HIDE_RETRY_S: Final = 5.0
_HIDE_AT_ONCE: Final = 8

_Answer = TypeVar("_Answer")
_channels = Endpoint("GET /channels", lambda body, decode: decode_object(body).texts("channels"), "topic")


class _Refused(LookupdError):
    """A service answers with an error."""


class LookupRegistration:
    """Keeps a broker registered while `run` runs.

    Args:
        topics: The broker's topics by name; the broker calls `changed` when it creates or deletes one.
        info: The broker's IDENTIFY.
        addresses: The services, `host:port` each.
        connect_timeout_s, request_timeout_s: The timeouts of HTTP queries.
        tls: Verifies the services; None connects in plain text.
        secret: For services with authentication; sent to every service.
        random_fraction: Returns numbers in [0, 1), for the jitter of reconnect delays.

    Raises:
        ValueError: An address is invalid.
    """

    def __init__(
        self,
        topics: Mapping[str, HasChannels],
        info: PeerInfo,
        addresses: Iterable[str],
        *,
        connect_timeout_s: float,
        request_timeout_s: float,
        tls: ssl.SSLContext | None = None,
        secret: Secret = NO_SECRET,
        random_fraction: Callable[[], float] = random.random,
    ) -> None:
        self._topics = topics
        self._info = info
        self._connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        self._security = Security(tls, secret)
        self._random_fraction = random_fraction
        self._peers: dict[str, LookupPeer] = {}
        self._nursery: trio.Nursery | None = None
        self._http = self._http_client()
        self.set_addresses(addresses)

    def _http_client(self) -> HTTPClient:
        return HTTPClient(
            connect_timeout_s=self._connect_timeout_s,
            request_timeout_s=self._request_timeout_s,
            max_answer_bytes=MAX_ANSWER_BYTES,
            tls=self._security.tls,
        )

    def use_tls(self, tls: ssl.SSLContext) -> None:
        """Verify services by other CAs, or show another certificate, from the next connection on."""
        self._security.tls = tls
        # The previous client keeps no connections open, so it need not be closed.
        self._http = self._http_client()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the services; if empty, the broker need not query channels."""
        return tuple(self._peers)

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Register with exactly these services. Raises ValueError for an invalid address, and changes nothing then."""
        wanted = dict.fromkeys(addresses)
        for address in wanted:
            parse_address(address)
        for address in [address for address in self._peers if address not in wanted]:
            logger.info("LOOKUP(%s): removing peer", address)
            self._peers.pop(address).close()
        for address in wanted:
            if address not in self._peers:
                logger.info("LOOKUP(%s): adding peer", address)
                self._peers[address] = LookupPeer(
                    address, self._info, self._topics, self._security, self._random_fraction
                )
                if self._nursery is not None:
                    self._nursery.start_soon(self._peers[address].run)

    def set_draining(self, draining: bool) -> None:
        """Register again with this value in IDENTIFY, which a service accepts once per connection."""
        if draining != self._info.draining:
            self._info = replace(self._info, draining=draining)
            for peer in self._peers.values():
                peer.identify_as(self._info)

    async def run(self) -> None:
        """Keep the broker registered until cancelled. Closing the connections unregisters it."""
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
        """Mark a channel, or a topic if the channel is None, as created or deleted."""
        for peer in self._peers.values():
            peer.changed(topic, channel)

    async def until_announced(self) -> None:
        """Wait until each service knows all topics and channels, or cannot be reached or refuses them."""
        for peer in list(self._peers.values()):
            await peer.announced.wait()

    # ------------------------------------------------------------------ a former leader

    async def retire(self, broadcast_address: str, http_port: int) -> None:
        """Hide a broker that is gone from the consumers of all its topics, until no service lists it any longer.

        First this broker's own registration is tried, so that consumers find at least one. If the other one registers
        again, it is hidden no longer. Errors are logged.

        Args:
            broadcast_address, http_port: The address that it has registered. This broker's own is left alone.
        """
        own = normal_host(self._info.broadcast_address), self._info.http_port
        if (normal_host(broadcast_address), http_port) == own:
            return
        name = format_address(broadcast_address, http_port)
        with trio.move_on_after(HIDE_FOR_S):
            async with trio.open_nursery() as nursery:
                for address in self._peers:
                    former = FormerLeader(broadcast_address, http_port)
                    nursery.start_soon(self._retire_at, address, name, former)

    async def _retire_at(self, address: str, name: str, former: FormerLeader) -> None:
        """Hide a former leader at one service."""
        peer = self._peers[address]
        logged = ""
        await peer.announced.wait()
        while self._peers.get(address) is peer:
            began = trio.current_time()
            pause_s, failure = _HIDE_RETRY_S, ""
            if peer.http_address:
                try:
                    tombstones = former.tombstones(await self._ask(peer, api.nodes()))
                except LookupdError as exc:
                    failure = str(exc)
                else:
                    if not tombstones:
                        return
                    pause_s = HIDE_INTERVAL_S
                    words = "LOOKUPD(%s): hiding the former leader %s from consumers: %d tombstones"
                    logger.info(words, address, name, len(tombstones))
                    failure = await self._hide(peer, tombstones)
            if failure and failure != logged:
                logger.error("LOOKUPD(%s): cannot hide the former leader %s: %s", address, name, failure)
                logged = failure
            await trio.sleep_until(began + pause_s)

    async def _hide(self, peer: LookupPeer, tombstones: Iterable[tuple[str, str]]) -> str:
        """Create tombstones, and return why one failed; empty: none."""
        failures: list[LookupdError] = []
        pending = iter(tombstones)

        async def create() -> None:
            for topic, node in pending:
                if failures and not isinstance(failures[-1], _Refused):
                    return  # the others would wait for their timeout, too
                try:
                    await self._ask(peer, api.tombstone(topic, node))
                except LookupdError as exc:
                    failures.append(exc)

        async with trio.open_nursery() as nursery:
            for _ in range(_HIDE_AT_ONCE):
                nursery.start_soon(create)
        return str(failures[-1]) if failures else ""

    # ------------------------------------------------------------------ queries

    async def channels(self, topic: str) -> list[str]:
        """Query all services for the channels of a topic.

        This takes as long as the slowest service, up to the request timeout; up to twice that if the broker is still
        connecting. Errors are logged; the answers of the other services are used.

        Returns:
            The channels that any service knows, sorted, without invalid and ephemeral names.
        """
        with trio.move_on_after(self._request_timeout_s):
            for peer in list(self._peers.values()):
                await peer.tried.wait()
        peers = [peer for peer in self._peers.values() if peer.http_address]
        if not peers:
            logger.error("no available nsqlookupd to query for channels to pre-create for topic %s", topic)
            return []
        found: set[str] = set()
        failures: list[str] = []

        async def ask(peer: LookupPeer) -> None:
            try:
                found.update(await self._ask(peer, _channels(topic)))
            except LookupdError as exc:
                failures.append(f"{peer.http_address}: {exc}")

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(ask, peer)
        if failures:
            level = logging.WARNING if len(failures) < len(peers) else logging.ERROR
            text = "failed to query nsqlookupd for channels to pre-create for topic %s - %s"
            logger.log(level, text, topic, "; ".join(failures))
        return sorted(name for name in found if is_valid_name(name) and not is_ephemeral(name))

    async def _ask(self, peer: LookupPeer, request: Request[_Answer]) -> _Answer:
        """Return the answer to a request. Raises LookupdError; _Refused: the next request may succeed."""
        security = self._security
        scheme = "http" if security.tls is None else "https"
        url = f"{scheme}://{peer.http_address}{request.target}"
        level = logging.INFO if request.method == "GET" else logging.DEBUG  # there may be thousands
        logger.log(level, "CI: querying nsqlookupd %s", url)
        try:
            server_name = None if security.tls is None else peer.host
            answer = await self._http.get(
                url, security.secret.read(), server_name=server_name, method=request.method
            )
            return request.read(answer, decode_json)
        except UnexpectedStatus as exc:
            hint = (
                ": its token needs the role manage" if exc.status == 403 and request.method != "GET" else ""
            )
            raise _Refused(f"{exc}{hint}") from exc
        except (RequestFailed, SecretFileError) as exc:
            raise LookupdError(str(exc)) from exc
        except ValueError as exc:
            raise LookupdError(f"the answer is not valid: {exc}") from exc
