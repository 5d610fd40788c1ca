"""Query a discovery service over HTTP for brokers (NSQ: nsqlookupd, HTTP API)."""

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar
from urllib.parse import quote_plus, urlsplit

from ..http.client import HTTPClient, RequestFailed, UnexpectedStatus
from ..protocol import NSQError
from ..protocol.address import is_loopback, without_secrets
from ..protocol.go_json import GoObject, decode_object
from ..protocol.limits import MIB
from ..secret import warn_in_clear

logger = logging.getLogger("trio_nsq.lookup")

MAX_ANSWER_BYTES = 5 * MIB
"""The largest answer: enough for ten thousand producers."""

_UNKNOWN_TOPIC = ("TOPIC_NOT_FOUND", "INVALID_ARG_TOPIC")
_MAX_PORT = 65535

Found = TypeVar("Found", bound="ProducerAddress")


class LookupFailed(NSQError):
    """A discovery service gave no usable answer.

    Attributes:
        address: The address of the service, without user, password and query.
        reason: The reason, without the address.
    """

    def __init__(self, address: str, reason: str) -> None:
        address = without_secrets(address)
        super().__init__(f"nsqlookupd {address}: {reason}")
        self.address = address
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ProducerAddress:
    """A broker.

    Attributes:
        broadcast_address: The host for clients; never "".
        tcp_port: The TCP port for clients; within 1-65535.
        http_port: The port of the HTTP API; 0 if the answer has none.
    """

    broadcast_address: str
    tcp_port: int
    http_port: int


@dataclass(frozen=True, slots=True)
class Node(ProducerAddress):
    """A broker that is registered, whatever its topics.

    Attributes:
        tombstones: The topics that are being deleted there; consumers are not sent to this broker for them.
        draining: The broker refuses publishes. Always False in answers of NSQ's own nsqlookupd.
    """

    tombstones: frozenset[str]
    draining: bool


async def lookup_topic(
    address: str, topic: str, *, timeout_s: float, tls: ssl.SSLContext | None = None, token: str = ""
) -> list[ProducerAddress]:
    """Query a discovery service for the brokers that have a topic.

    Args:
        address: The service's HTTP address: `host:port`, or a URL that begins with `http://` or `https://`.
        topic: The topic.
        timeout_s: The total timeout, including connecting. A redirect to https may double it.
        tls: For https; None: the system's CAs.
        token: For a service that requires authentication. Over http to another machine it is sent, with a warning, only
            if the service asks for it: brokers may require a secret, and their discovery services none.

    Returns:
        The brokers, in arbitrary order; empty if the topic is unknown. A broker without a usable address is omitted and
        logged as a warning.

    Raises:
        LookupFailed: The service cannot be reached, is too slow, or its answer is invalid.
    """
    try:
        answer = await _get(address, f"/lookup?topic={quote_plus(topic)}", timeout_s, tls, token)
    except UnexpectedStatus as exc:
        if exc.status == 404 and _says_unknown(exc.body):
            return []
        raise LookupFailed(address, _refusal(exc)) from exc
    return _producers(address, answer, lambda fields: ProducerAddress(*_place(fields)))


async def lookup_nodes(
    address: str, *, timeout_s: float, tls: ssl.SSLContext | None = None, token: str = ""
) -> list[Node]:
    """Query a discovery service for all brokers. Arguments, order, omissions and errors as for `lookup_topic`."""
    try:
        answer = await _get(address, "/nodes", timeout_s, tls, token)
    except UnexpectedStatus as exc:
        raise LookupFailed(address, _refusal(exc)) from exc
    return _producers(address, answer, _node)


async def _get(address: str, path: str, timeout_s: float, tls: ssl.SSLContext | None, token: str) -> bytes:
    """Return the body of an answer. Raises LookupFailed and UnexpectedStatus."""
    http = HTTPClient(
        connect_timeout_s=timeout_s,
        request_timeout_s=timeout_s,
        max_answer_bytes=MAX_ANSWER_BYTES,
        tls=tls or _system_tls(),
    )
    url = _base_url(address) + path
    place = urlsplit(url)
    in_clear = place.scheme == "http" and not is_loopback(place.hostname or "")
    try:
        try:
            return await http.get(url, "" if in_clear else token)
        except UnexpectedStatus as exc:
            if not (in_clear and token and exc.status == 401):
                raise
            warn_in_clear(place.netloc.rpartition("@")[2])
            return await http.get(url, token)
    except UnexpectedStatus:
        raise
    except RequestFailed as exc:
        raise LookupFailed(address, str(exc)) from exc
    finally:
        await http.aclose()


def _refusal(error: UnexpectedStatus) -> str:
    """Return the reason of an error answer; the codes about tokens repeat nothing of the query."""
    if error.status in (401, 403):
        try:
            if message := decode_object(error.body).text("message"):
                return f"{error}: {message}"
        except ValueError:
            pass
    return str(error)


@cache
def _system_tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # cached: creating it takes longer than a request


def _base_url(address: str) -> str:
    return (address if "://" in address else f"http://{address}").rstrip("/")


def _unwrapped(answer: GoObject) -> GoObject:
    """Return the data of an answer. Services before 1.0 wrap data and errors in an envelope."""
    status = answer.integer("status_code")
    if status == 0:
        return answer
    error = answer.text("status_txt")
    if status == 200 or error in _UNKNOWN_TOPIC:
        return answer.object("data")
    raise ValueError(f"status_code {status} {error!a}")


def _says_unknown(body: bytes) -> bool:
    """Whether the body of a 404 is about the topic; other servers send 404 for every unknown path."""
    try:
        answer = decode_object(body)
        return "TOPIC_NOT_FOUND" in (answer.text("message"), answer.text("status_txt"))
    except ValueError:
        return False


def _producers(address: str, answer: bytes, parse: Callable[[GoObject], Found]) -> list[Found]:
    """Return the brokers of an answer. Raises LookupFailed."""
    producers = []
    try:
        for fields in _unwrapped(decode_object(answer)).objects("producers"):
            producer = parse(fields)
            if producer.broadcast_address and 0 < producer.tcp_port <= _MAX_PORT:
                producers.append(producer)
            else:
                logger.warning("nsqlookupd %s: no usable address in %r", without_secrets(address), producer)
    except ValueError as exc:
        raise LookupFailed(address, f"the answer is not valid: {exc}") from exc
    return producers


def _place(fields: GoObject) -> tuple[str, int, int]:
    host = fields.text("broadcast_address") or fields.text("address")  # the latter before 0.2.22
    return host, fields.integer("tcp_port"), fields.integer("http_port")


def _node(fields: GoObject) -> Node:
    marked = zip(fields.texts("topics"), fields.booleans("tombstones"), strict=False)
    tombstones = frozenset(topic for topic, has_tombstone in marked if has_tombstone)
    return Node(*_place(fields), tombstones, fields.boolean("draining"))
