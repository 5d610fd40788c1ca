"""Query a discovery service over HTTP for brokers (NSQ: nsqlookupd, HTTP API)."""

import logging
import ssl
from collections.abc import Iterable
from functools import cache
from typing import TypeVar
from urllib.parse import urlsplit

from ..access.secret import warn_in_clear
from ..api import lookupd as api
from ..api.lookupd import Node, ProducerAddress
from ..api.request import Request
from ..http.client import HTTPClient, NotHTTP, RequestFailed, UnexpectedStatus
from ..protocol import NSQError
from ..protocol.address import is_loopback, without_secrets
from ..protocol.go_json import decode_object
from ..protocol.limits import MIB
from ..protocol.untrusted_json import decode_json

logger: logging.Logger = logging.getLogger("trio_nsq.lookup")

MAX_ANSWER_BYTES = 5 * MIB
"""The largest answer: enough for ten thousand producers."""

WRONG_PORT = "use the HTTP port of nsqlookupd, by default 4161"
"""The end of the reason if the server at an address is another one."""

Found = TypeVar("Found")
Place = TypeVar("Place", bound=ProducerAddress)


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
        return _usable(address, await _ask(address, api.lookup(topic), timeout_s, tls, token))
    except UnexpectedStatus as exc:
        if exc.status == 404 and _says_unknown(exc.body):
            return []
        raise LookupFailed(address, _refusal(exc)) from exc


async def lookup_nodes(
    address: str, *, timeout_s: float, tls: ssl.SSLContext | None = None, token: str = ""
) -> list[Node]:
    """Query a discovery service for all brokers. Arguments, order, omissions and errors as for `lookup_topic`."""
    try:
        return _usable(address, await _ask(address, api.nodes(), timeout_s, tls, token))
    except UnexpectedStatus as exc:
        raise LookupFailed(address, _refusal(exc)) from exc


async def _ask(
    address: str, request: Request[Found], timeout_s: float, tls: ssl.SSLContext | None, token: str
) -> Found:
    """Return the answer to a request. Raises LookupFailed and UnexpectedStatus."""
    http = HTTPClient(
        connect_timeout_s=timeout_s,
        request_timeout_s=timeout_s,
        max_answer_bytes=MAX_ANSWER_BYTES,
        tls=tls or _system_tls(),
    )
    url = _base_url(address) + request.target
    place = urlsplit(url)
    in_clear = place.scheme == "http" and not is_loopback(place.hostname or "")
    try:
        try:
            body = await http.get(url, "" if in_clear else token)
        except UnexpectedStatus as exc:
            if not (in_clear and token and exc.status == 401):
                raise
            warn_in_clear(place.netloc.rpartition("@")[2])
            body = await http.get(url, token)
        return request.read(body, decode_json)
    except UnexpectedStatus:
        raise
    except NotHTTP as exc:
        raise LookupFailed(address, f"it does not answer in HTTP: {WRONG_PORT}") from exc
    except RequestFailed as exc:
        raise LookupFailed(address, str(exc)) from exc
    except ValueError as exc:
        raise LookupFailed(address, f"the answer is not valid: {exc}") from exc
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
    return f"it is not an nsqlookupd: {WRONG_PORT}" if error.status == 404 else str(error)


@cache
def _system_tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # cached: creating it takes longer than a request


def _base_url(address: str) -> str:
    return (address if "://" in address else f"http://{address}").rstrip("/")


def _says_unknown(body: bytes) -> bool:
    """Whether the body of a 404 is about the topic; other servers send 404 for every unknown path."""
    try:
        answer = decode_object(body)
        return "TOPIC_NOT_FOUND" in (answer.text("message"), answer.text("status_txt"))
    except ValueError:
        return False


def _usable(address: str, brokers: Iterable[Place]) -> list[Place]:
    """Return the brokers with a usable address, and warn about the others."""
    usable = []
    for broker in brokers:
        if broker.is_usable:
            usable.append(broker)
        else:
            logger.warning("nsqlookupd %s: no usable address in %r", without_secrets(address), broker)
    return usable
