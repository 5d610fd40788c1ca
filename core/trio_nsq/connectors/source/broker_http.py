"""Finds the HTTP API of a broker, and what the broker can do over it."""

import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

import trio

from ...client.connection.addresses import nsqd_address
from ...client.errors import BrokerUnreachable, ConnectionFailed, NotABroker, RequestRefused
from ...client.http.broker_http import BrokerHTTP
from ...protocol.address import format_address, is_loopback
from ...protocol.limits import MIB
from ...secret import Secret
from .options import BrokerAddresses, SourceOptions

_Answer = TypeVar("_Answer")
_HTTPS = "https://"
_MAX_ANSWER_BYTES = 64 * MIB
"""The statistics of 100,000 topics have about 30 MB."""


class BrokerFinder:
    """Makes requests to brokers, in threads of its own.

    Args:
        tls: For https; None: the system's CAs.
        secret: For brokers that require authentication.
    """

    def __init__(self, options: SourceOptions, tls: ssl.SSLContext | None, secret: Secret) -> None:
        self.threads = trio.CapacityLimiter(16)
        self._options = options
        self._tls = tls
        self._secret = secret

    async def find(self, broker: BrokerAddresses) -> BrokerAddresses:
        """Return the broker with its TCP address and the address of its HTTP API, or with none if it is not known.

        Raises:
            ConnectionFailed: The broker cannot be reached.
            RequestRefused: It requires authentication.
        """
        failure: BrokerUnreachable | None = None
        for each in broker.http:
            address = await self._run(self._options.https_address, each)
            if not address:
                continue
            try:
                tcp = await self._run(self._tcp_address, address, broker.tcp)
            except BrokerUnreachable as exc:
                failure = failure or exc
                continue
            if tcp:
                return BrokerAddresses(broker.tcp or tcp, (address,))
        if not broker.tcp:
            if failure is None:
                raise ConnectionFailed(", ".join(broker.http), "it has no HTTPS port, and TLS is asked for")
            raise ConnectionFailed(failure.address, failure.reason)
        await self._check_reachable(broker.tcp)
        return BrokerAddresses(broker.tcp, ())

    async def topics(self, address: str) -> list[str]:
        """Return the names of a broker's topics. Raises BrokerUnreachable, RequestRefused."""
        return await self._run(self._topics, address)

    async def dead_letter_settings(self, address: str, topic: str, channel: str) -> tuple[int, str]:
        """Return `max_attempts` and `dead_letter_topic` of a channel; 0 and empty if the broker has no such settings.

        Raises:
            BrokerUnreachable, RequestRefused: The settings are unknown.
        """
        return await self._run(self._dead_letter_settings, address, topic, channel)

    async def _run(self, function: Callable[..., _Answer], *args: object) -> _Answer:
        return await trio.to_thread.run_sync(function, *args, limiter=self.threads, abandon_on_cancel=True)

    def _http(self, address: str) -> BrokerHTTP:
        return BrokerHTTP(
            address,
            self._tls,
            self._secret,
            connect_timeout_s=self._options.http_connect_timeout_s,
            answer_timeout_s=self._options.http_request_timeout_s,
            max_answer_bytes=_MAX_ANSWER_BYTES,
        )

    def _tcp_address(self, address: str, wanted: str) -> str:
        """Return the TCP address of the broker with this HTTP address; empty if it is not the wanted broker."""
        host = (
            "localhost" if _is_path(address) else address.removeprefix(_HTTPS).rpartition(":")[0].strip("[]")
        )
        if wanted and not _is_same_host(host, wanted.rpartition(":")[0].strip("[]")):
            return ""
        try:
            port = int(self._http(address).request_json("GET", "/info")["tcp_port"])
        except (ValueError, KeyError, TypeError):
            raise NotABroker(address) from None
        if not wanted:
            return format_address(host, port)
        return wanted if port == int(wanted.rpartition(":")[2]) else ""

    def _topics(self, address: str) -> list[str]:
        found = self._http(address).request_json(
            "GET", "/stats", {"format": "json", "include_clients": "false"}
        )
        try:
            return [str(topic["topic_name"]) for topic in found["topics"] or []]
        except (KeyError, TypeError):
            raise NotABroker(address) from None

    def _dead_letter_settings(self, address: str, topic: str, channel: str) -> tuple[int, str]:
        params = {"topic": topic, "channel": channel}
        try:
            found = self._http(address).request_json("GET", "/channel/settings", params)
            return int(found["max_attempts"]), str(found["dead_letter_topic"])
        except RequestRefused as exc:
            if exc.status == 404:  # nsqd, or the channel was deleted
                return 0, ""
            raise
        except (ValueError, KeyError, TypeError):
            raise NotABroker(address) from None

    async def _check_reachable(self, address: str) -> None:
        """Raises ConnectionFailed if nothing listens at a TCP address."""
        host, _, port = nsqd_address(address).rpartition(":")
        try:
            with trio.fail_after(self._options.http_connect_timeout_s):
                stream = await trio.open_tcp_stream(host.strip("[]"), int(port))
        except (OSError, trio.TooSlowError) as exc:
            reason = (
                "connecting timed out" if isinstance(exc, trio.TooSlowError) else str(exc.strerror or exc)
            )
            raise ConnectionFailed(address, reason) from exc
        await trio.aclose_forcefully(stream)


def _is_path(address: str) -> bool:
    return "/" in address.removeprefix(_HTTPS)


def _is_same_host(one: str, other: str) -> bool:
    return one == other or (_is_local(one) and _is_local(other))


def _is_local(host: str) -> bool:
    return is_loopback(host) or host == socket.gethostname()
