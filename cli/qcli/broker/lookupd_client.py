"""The HTTP interface of a discovery service (nsqlookupd) for commands: blocking, with errors as failures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trio_nsq.client import BrokerUnreachable, RequestRefused
from trio_nsq.client.errors import NotABroker
from trio_nsq.client.http.broker_http import BrokerHTTP
from trio_nsq.protocol.address import format_address
from trio_nsq.untrusted_json import decode_json

from ..framework.errors import ExitCode, Failure, reason_of
from .address_options import LOOKUPD_OPTION
from .admin_client import CONNECT_TIMEOUT_S, MAX_ANSWER_BYTES, REQUEST_TIMEOUT_S
from .connection_options import ConnectOptions
from .failures import access_refusal

_MAX_PORT = 65535
_LABEL = "[A-Za-z0-9_-]{1,63}"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?")
"""A name or an address. A path or a URL, for example, would be another kind of address."""


@dataclass(frozen=True, slots=True)
class Node:
    """A broker that is registered at a discovery service.

    Attributes:
        broadcast_address: Its host for clients.
        tcp_port, http_port: Its ports; 0 if it has none.
        version: Its version; may be empty.
        topics: Its topics.
        tombstoned: Those of its topics for which it has a tombstone.
        draining: Whether it has announced that it takes no messages.
    """

    broadcast_address: str
    tcp_port: int
    http_port: int
    version: str = ""
    topics: tuple[str, ...] = ()
    tombstoned: frozenset[str] = frozenset()
    draining: bool = False

    @property
    def has_usable_host(self) -> bool:
        """Whether the host has the form of a name or an address; any client may register a broker with any text."""
        return _HOST.fullmatch(self.broadcast_address) is not None

    @property
    def http_address(self) -> str | None:
        """`host:port`; None if the broker has no HTTP port."""
        return format_address(self.broadcast_address, self.http_port) if self.http_port else None

    @property
    def tcp_address(self) -> str | None:
        """`host:port`; None if the broker has no TCP port."""
        return format_address(self.broadcast_address, self.tcp_port) if self.tcp_port else None


class LookupdClient:
    """One discovery service's HTTP address: `host:port`, or a URL with `https://`.

    Raises Failure: a file for TLS cannot be used.
    """

    def __init__(self, address: str) -> None:
        self.address = address.removeprefix("http://").rstrip("/")
        connecting = ConnectOptions.of_command()
        self._http = BrokerHTTP(
            self.address,
            connecting.https_context(self.address),
            connecting.secret,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            answer_timeout_s=REQUEST_TIMEOUT_S,
            max_answer_bytes=MAX_ANSWER_BYTES,
        )

    def nodes(self) -> list[Node]:
        """Return all registered brokers with a usable address. Raises Failure."""
        try:
            found = [_node(each) for each in self._json("/nodes")["producers"] or []]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise self._not_a_lookupd() from None
        return [node for node in found if node.broadcast_address]

    def version(self) -> str:
        """Return the version. Raises Failure."""
        try:
            return str(self._json("/info")["version"])
        except (KeyError, TypeError, ValueError):
            raise self._not_a_lookupd() from None

    def topics(self) -> list[str]:
        """Return the names of all topics. Raises Failure."""
        return self._names("/topics", {}, "topics")

    def channels(self, topic: str) -> list[str]:
        """Return the names of a topic's channels. Raises Failure."""
        return self._names("/channels", {"topic": topic}, "channels")

    def post(self, path: str, params: Mapping[str, str]) -> None:
        """Make a change. Raises Failure: `LookupdRefused` if the service answered with an error."""
        self._request("POST", path, params)

    def _names(self, path: str, params: Mapping[str, str], key: str) -> list[str]:
        try:
            return [str(name) for name in self._json(path, params)[key] or []]
        except (KeyError, TypeError, ValueError):
            raise self._not_a_lookupd() from None

    def _json(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        return decode_json(self._request("GET", path, params or {}))

    def _request(self, method: str, path: str, params: Mapping[str, str]) -> bytes:
        try:
            return self._http.request(method, path, params)
        except RequestRefused as error:
            if error.text == "NOT_FOUND":  # of the path, which every nsqlookupd has
                raise self._not_a_lookupd() from error
            raise LookupdRefused(self.address, error.status, error.text) from error
        except NotABroker as error:
            raise self._not_a_lookupd() from error
        except BrokerUnreachable as error:
            cause = error.cause
            reason = (
                error.reason if cause is None or isinstance(cause, TimeoutError) else reason_of(cause)
            ).rstrip(".")
            raise Failure(
                f"No nsqlookupd answers at {self.address}: {reason}. Start one with 'qcli lookupd', or use another "
                f"address: {LOOKUPD_OPTION}.",
                ExitCode.UNREACHABLE,
                brief=f"nsqlookupd {self.address}: {reason}",
            ) from error

    def _not_a_lookupd(self) -> Failure:
        return Failure(
            f"{self.address} is not the HTTP port of an nsqlookupd. Is it a broker's, or the TCP port? "
            f"See {LOOKUPD_OPTION}.",
            ExitCode.UNREACHABLE,
        )


class LookupdRefused(Failure):
    """The service answered with an error.

    Attributes:
        text: NSQ's code, such as `TOPIC_NOT_FOUND`, or another text.
    """

    def __init__(self, address: str, status: int, text: str) -> None:
        server = f"The nsqlookupd at {address}"
        super().__init__(
            access_refusal(server, text) or f"{server} refused with HTTP status {status}: {text}."
        )
        self.text = text


def _node(fields: Mapping[str, Any]) -> Node:
    """Convert an element of `producers`. Raises KeyError, TypeError, ValueError."""
    topics = tuple(map(str, fields.get("topics") or ()))
    tombstones: Iterable[bool] = fields.get("tombstones") or ()
    return Node(
        broadcast_address=str(fields["broadcast_address"]),
        tcp_port=_port(fields.get("tcp_port")),
        http_port=_port(fields.get("http_port")),
        version=str(fields.get("version") or ""),
        topics=topics,
        tombstoned=frozenset(topic for topic, has in zip(topics, tombstones, strict=False) if has),
        draining=bool(fields.get("draining")),
    )


def _port(value: object) -> int:
    return value if type(value) is int and 0 < value <= _MAX_PORT else 0
