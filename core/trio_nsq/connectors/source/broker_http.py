"""Finds the HTTP API of a broker, and what the broker can do over it."""

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import trio

from ...api import broker as api
from ...client.connection.addresses import nsqd_address
from ...client.connection.connection import check_broker
from ...client.connection.options import ConnectionSettings
from ...client.errors import BrokerUnreachable, ConnectionFailed, NotABroker, RequestRefused
from ...client.http.broker_http import BrokerHTTP
from ...fleet.identity import BrokerIdentity
from ...protocol.address import format_address, host_of, is_loopback
from ...protocol.limits import MIB
from .options import BrokerAddresses, SourceOptions

logger: logging.Logger = logging.getLogger("trio_nsq.connectors")

_Answer = TypeVar("_Answer")
_Argument = TypeVar("_Argument")
_MAX_ANSWER_BYTES = 64 * MIB
"""The statistics of 100,000 topics have about 30 MB."""


@dataclass(frozen=True, slots=True)
class FoundBroker:
    """A broker that answers.

    Attributes:
        tcp: Its TCP address.
        http: The address of its HTTP API; empty: unknown.
        why_no_http: Why it is unknown, as text.
        is_other: An HTTP API answers, and names another TCP address.
    """

    tcp: str
    http: str = ""
    why_no_http: str = ""
    is_other: bool = False


class BrokerFinder:
    """Makes requests to brokers, in threads of its own.

    Args:
        named: All brokers that may be asked for. An HTTP API that names the TCP address of one is not another's.
        settings: For TLS and authentication.

    Attributes:
        tls: For https; None: the system's CAs.
    """

    def __init__(
        self,
        options: SourceOptions,
        named: Sequence[BrokerAddresses],
        settings: ConnectionSettings,
    ) -> None:
        self.threads: trio.CapacityLimiter = trio.CapacityLimiter(16)
        self._options = options
        self._named = [each.tcp for each in named if each.tcp]
        self._warned: set[BrokerAddresses] = set()
        self.tls = settings.https_context()
        self._secret = settings.secret

    async def find(self, broker: BrokerAddresses) -> FoundBroker:
        """Return the broker's addresses; the HTTP address is empty if it is unknown.

        Raises:
            ConnectionFailed: The broker cannot be reached.
            RequestRefused: It requires authentication.
        """
        failure: BrokerUnreachable | None = None
        others: dict[
            str, tuple[str, str]
        ] = {}  # addresses that answer: that of requests, and the TCP address
        reasons: list[str] = []
        for each in broker.http:
            address = await self._run(self._options.https_address, each)
            if not address:
                reasons.append(f"{each} has no HTTPS port, and TLS is asked for")
                continue
            if (
                broker.tcp
                and each != broker.paired_http
                and not _is_same_host(_host(address), _host(broker.tcp))
            ):
                reasons.append(f"{each} is on another host")
                continue
            try:
                tcp = await self._run(self._tcp_address, address)
            except BrokerUnreachable as exc:
                failure = failure or exc
                reasons.append(f"{exc.address}: {exc.reason}")
                continue
            if not broker.tcp or _is_same_address(tcp, broker.tcp):
                return FoundBroker(broker.tcp or tcp, address)
            others[each] = address, tcp
            reasons.append(f"{each} names {tcp} as its TCP address")
        if broker.paired_http in others:
            address, tcp = others[broker.paired_http]
            if not any(_is_same_address(tcp, each) for each in self._named):
                self._report_mapped(broker, tcp)
                return FoundBroker(broker.tcp, address)
        if not broker.tcp:
            if failure is None:
                raise ConnectionFailed(", ".join(broker.http), "it has no HTTPS port, and TLS is asked for")
            raise ConnectionFailed(failure.address, failure.reason) from failure
        await check_broker(nsqd_address(broker.tcp), self._options.http_connect_timeout_s)
        if others:
            reasons.append(
                "if ports are mapped, give one HTTP address for each TCP address, in the same order"
            )
        return FoundBroker(broker.tcp, "", "; ".join(reasons), is_other=bool(others))

    def _report_mapped(self, broker: BrokerAddresses, tcp: str) -> None:
        if broker not in self._warned:
            self._warned.add(broker)
            logger.warning(
                "the broker at %s names %s as its TCP address, not %s: its ports may be mapped. "
                "The addresses that were given are used",
                *(broker.paired_http, tcp, broker.tcp),
            )

    async def identity(self, address: str) -> BrokerIdentity | None:
        """Return the identity of the broker with this HTTP address; None: unknown."""
        return await self._run(BrokerIdentity.at, self._http(address))

    async def topics(self, address: str) -> list[str]:
        """Return the names of a broker's topics. Raises BrokerUnreachable, RequestRefused."""
        stats = await self._run(self._http(address).ask, api.stats())
        return [topic["topic_name"] for topic in stats["topics"]]

    async def dead_letter_settings(self, address: str, topic: str, channel: str) -> tuple[int, str]:
        """Return `max_attempts` and `dead_letter_topic` of a channel; 0 and empty if the broker has no such settings.

        Raises:
            BrokerUnreachable, RequestRefused: The settings are unknown.
        """
        try:
            found = await self._run(self._http(address).ask, api.settings(topic, channel))
        except RequestRefused as exc:
            if exc.status == 404:  # nsqd, or the channel was deleted
                return 0, ""
            raise
        if "dead_letter_topic" not in found:
            raise NotABroker(address)
        return found["max_attempts"], found["dead_letter_topic"]

    async def _run(self, function: Callable[[_Argument], _Answer], argument: _Argument) -> _Answer:
        return await trio.to_thread.run_sync(function, argument, limiter=self.threads, abandon_on_cancel=True)

    def _http(self, address: str) -> BrokerHTTP:
        return BrokerHTTP(
            address,
            self.tls,
            self._secret,
            connect_timeout_s=self._options.http_connect_timeout_s,
            answer_timeout_s=self._options.http_request_timeout_s,
            max_answer_bytes=_MAX_ANSWER_BYTES,
        )

    def _tcp_address(self, address: str) -> str:
        """Return the TCP address of the broker with this HTTP address: the same host, and the port that it names."""
        port = self._http(address).ask(api.info()).get("tcp_port")
        if port is None:
            raise NotABroker(address)
        return format_address(_host(address), port)


def _is_same_address(one: str, other: str) -> bool:
    """Whether two TCP addresses are of the same port and, as far as their spelling tells, of the same host."""
    return one.rpartition(":")[2] == other.rpartition(":")[2] and _is_same_host(_host(one), _host(other))


def _host(address: str) -> str:
    return host_of(address) or "localhost"


def _is_same_host(one: str, other: str) -> bool:
    return one == other or (_is_local(one) and _is_local(other))


def _is_local(host: str) -> bool:
    return is_loopback(host) or host == socket.gethostname()
