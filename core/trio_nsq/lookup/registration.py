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
from urllib.parse import quote_plus

import trio

from ..access.secret import NO_SECRET, Secret, SecretFileError
from ..http.client import HTTPClient, RequestFailed
from ..protocol import is_ephemeral, is_valid_name
from ..protocol.address import parse_address
from ..protocol.go_json import decode_object
from ..protocol.limits import MIB
from .announcements import HasChannels
from .peer import LookupPeer, Security
from .protocol import LookupdError, PeerInfo

logger = logging.getLogger("trio_nsq.broker")

MAX_ANSWER_BYTES = 5 * MIB
"""The largest answer to a query for channels."""


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
                found.update(await self._ask(peer, topic))
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

    async def _ask(self, peer: LookupPeer, topic: str) -> list[str]:
        security = self._security
        scheme = "http" if security.tls is None else "https"
        url = f"{scheme}://{peer.http_address}/channels?topic={quote_plus(topic)}"
        logger.info("CI: querying nsqlookupd %s", url)
        try:
            server_name = None if security.tls is None else peer.host
            answer = await self._http.get(url, security.secret.read(), server_name=server_name)
            return decode_object(answer).texts("channels")
        except (RequestFailed, SecretFileError) as exc:
            raise LookupdError(str(exc)) from exc
        except ValueError as exc:
            raise LookupdError(f"the answer is not valid: {exc}") from exc
