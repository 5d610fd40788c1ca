"""Requests to discovery services, and their answers (NSQ: nsqlookupd, HTTP API). No IO."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from ..protocol.address import check_host, format_address
from ..protocol.go_json import GoObject, decode_object
from .request import Decoder, Endpoint, raw

_UNKNOWN_TOPIC = ("TOPIC_NOT_FOUND", "INVALID_ARG_TOPIC")
_PORTS = range(1, 65536)


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
        try:
            check_host(self.broadcast_address)
        except ValueError:
            return False
        return True

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


# ---------------------------------------------------------------------- requests


def _names(key: str, body: bytes, decode: Decoder) -> list[str]:
    """Return the names of an answer. Services before 1.0 wrap it in an envelope."""
    found = decode(body)
    if isinstance(found, dict) and found.get("status_code"):
        found = found.get("data") or {key: []}
    names = found.get(key, 0) if isinstance(found, dict) else 0
    if not isinstance(names, list | None) or not all(isinstance(name, str) for name in names or ()):
        raise ValueError(f"no list of {key}")
    return names or []


def _version(body: bytes, decode: Decoder) -> str:
    found = decode(body)
    if not isinstance(found, dict) or "version" not in found:
        raise ValueError("no version")
    return str(found["version"])


lookup: Endpoint[list[ProducerAddress]] = Endpoint(
    "GET /lookup", lambda body, decode: list(parse_lookup(body)), "topic"
)
"""The brokers that have a topic, also those that are not usable."""
nodes: Endpoint[list[Node]] = Endpoint("GET /nodes", lambda body, decode: list(parse_nodes(body)))
"""All brokers, also those that are not usable."""
topics: Endpoint[list[str]] = Endpoint("GET /topics", partial(_names, "topics"))
channels: Endpoint[list[str]] = Endpoint("GET /channels", partial(_names, "channels"), "topic")
version: Endpoint[str] = Endpoint("GET /info", _version)
tombstone: Endpoint[bytes] = Endpoint("POST /topic/tombstone", raw, "topic node")
"""Hide a broker from the consumers of a topic; `node` is its HTTP address, as it is registered."""
