"""The answers of discovery services to queries for brokers (NSQ: nsqlookupd, HTTP API). No IO."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..protocol.address import format_address
from ..protocol.go_json import GoObject, decode_object

_UNKNOWN_TOPIC = ("TOPIC_NOT_FOUND", "INVALID_ARG_TOPIC")
_PORTS = range(1, 65536)
_LABEL = "[A-Za-z0-9_-]{1,63}"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?")
"""A name or an address. A path or a URL, for example, would be another kind of address."""


@dataclass(frozen=True, slots=True)
class ProducerAddress:
    """A broker.

    Attributes:
        broadcast_address: The host for clients; "" if the answer has none.
        tcp_port: The TCP port for clients.
        http_port: The port of the HTTP API; 0 if the answer has none.
        hostname: The name of its machine; may be empty. It does not count in comparisons.
    """

    broadcast_address: str
    tcp_port: int
    http_port: int
    hostname: str = field(default="", compare=False, kw_only=True)

    @property
    def is_usable(self) -> bool:
        """Whether clients can connect to it."""
        return bool(self.broadcast_address) and self.tcp_port in _PORTS

    @property
    def has_usable_host(self) -> bool:
        """Whether the host has the form of a name or an address; any client may register a broker with any text."""
        return _HOST.fullmatch(self.broadcast_address) is not None

    @property
    def tcp_address(self) -> str:
        """`host:port` for clients; only if the broker is usable."""
        return format_address(self.broadcast_address, self.tcp_port)

    @property
    def http_address(self) -> str | None:
        """`host:port` of the HTTP API; None: the broker has none."""
        has_port = self.http_port in _PORTS
        return format_address(self.broadcast_address, self.http_port) if has_port else None


@dataclass(frozen=True, slots=True)
class Node(ProducerAddress):
    """A broker that is registered, whatever its topics.

    Attributes:
        topics: Its topics.
        tombstones: Those that are being deleted there; consumers are not sent to this broker for them.
        draining: The broker refuses publishes. Always False in answers of NSQ's own nsqlookupd.
        version: Its version; may be empty.
        remote_address: The address from which it registered; may be empty.
    """

    topics: tuple[str, ...] = ()
    tombstones: frozenset[str] = frozenset()
    draining: bool = False
    version: str = ""
    remote_address: str = field(default="", compare=False, kw_only=True)


def parse_lookup(answer: bytes) -> Iterator[ProducerAddress]:
    """Yield the brokers of an answer to `/lookup`, also those that are not usable. Raises ValueError."""
    for fields in _producers(answer):
        yield ProducerAddress(*_place(fields), hostname=fields.text("hostname"))


def parse_nodes(answer: bytes) -> Iterator[Node]:
    """Yield the brokers of an answer to `/nodes`, also those that are not usable. Raises ValueError."""
    for fields in _producers(answer):
        topics = tuple(fields.texts("topics"))
        marked = zip(topics, fields.booleans("tombstones"), strict=False)
        tombstones = frozenset(topic for topic, has_tombstone in marked if has_tombstone)
        yield Node(
            *_place(fields),
            topics,
            tombstones,
            fields.boolean("draining"),
            fields.text("version"),
            hostname=fields.text("hostname"),
            remote_address=fields.text("remote_address"),
        )


def _producers(answer: bytes) -> list[GoObject]:
    """Return the producers. Services before 1.0 wrap data and errors in an envelope."""
    found = decode_object(answer)
    if status := found.integer("status_code"):
        error = found.text("status_txt")
        if status != 200 and error not in _UNKNOWN_TOPIC:
            raise ValueError(f"status_code {status} {error!a}")
        found = found.object("data")
    return found.objects("producers")


def _place(fields: GoObject) -> tuple[str, int, int]:
    host = fields.text("broadcast_address") or fields.text("address")  # the latter before 0.2.22
    return host, fields.integer("tcp_port"), fields.integer("http_port")
