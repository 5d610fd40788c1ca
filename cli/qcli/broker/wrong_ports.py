"""What listens at an address that is not the one that a command needs. Asked after a failure only."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from trio_nsq.protocol.address import is_unix_path, next_port

from ..framework.params import is_https, without_scheme

if TYPE_CHECKING:
    from trio_nsq.api.answers import Info
    from trio_nsq.client.http.broker_http import BrokerHTTP

_TIMEOUT_S = 2.0
_MAX_ANSWER_BYTES = 64 * 1024


class _Kind(NamedTuple):
    """A server, and the beginning of its answer."""

    name: str
    default_http_port: int
    answer: bytes


_BROKER = _Kind("a broker", 4151, b"\0\0\0\x12\0\0\0\x01E_BAD_PROTOCOL")
_CONSOLE = re.compile(rb"/static/[0-9a-f]+/console\.js|<title>nsqadmin</title>")
HTTP_OF_BROKER = "the HTTP port of a broker"
TLS_PORT = "a port with TLS, such as that of HTTPS"
_LOOKUPD = _Kind("an nsqlookupd", 4161, b"\0\0\0\x02OK")


def what_listens(address: str) -> str:
    """Return what listens at `host:port`, such as `the HTTP port of a broker, whose TCP port is 4150`; empty: unknown.

    No secret is sent.
    """
    if is_https(address) or is_unix_path(address):
        return ""
    address = without_scheme(address)
    port = address.rpartition(":")[2]
    if (info := _info(address)) is not None:
        if "tcp_port" in info:
            return f"{HTTP_OF_BROKER}, whose TCP port is {info['tcp_port']}"
        return "the HTTP port of an nsqlookupd"
    if _is_console(address):
        return "the web console"
    kind = _kind_of_tcp(address)
    if kind is None:
        return TLS_PORT if _has_tls(address) else ""
    # By convention, HTTP listens at the next port.
    following = next_port(address)
    info = _info(following)
    is_its = info is not None and (kind is not _BROKER or str(info.get("tcp_port")) == port)
    http_port = following.rpartition(":")[2] if is_its else f"{kind.default_http_port} by default"
    return f"the TCP port of {kind.name}, whose HTTP port is {http_port}"


def is_other_server(address: str) -> bool:
    """Return whether an HTTP address is known to be that of another server than a broker."""
    what = what_listens(address)
    return bool(what) and not what.startswith(HTTP_OF_BROKER)


def _is_console(address: str) -> bool:
    """Return whether the pages of `qcli admin` or nsqadmin are here."""
    from trio_nsq.client.errors import BrokerUnreachable, RequestRefused

    for path in ("/", "/login"):  # the first one may redirect to the second
        with suppress(BrokerUnreachable, RequestRefused):
            if _CONSOLE.search(_http(address).request("GET", path)):
                return True
    return False


def _info(address: str) -> Info | None:
    """Return what a broker or nsqlookupd tells of itself."""
    from trio_nsq.api.broker import info
    from trio_nsq.client.errors import BrokerUnreachable, RequestRefused

    with suppress(BrokerUnreachable, RequestRefused):
        return _http(address).ask(info())
    return None


def _http(address: str) -> BrokerHTTP:
    from trio_nsq.client.http.broker_http import BrokerHTTP

    return BrokerHTTP(
        address,
        connect_timeout_s=_TIMEOUT_S,
        answer_timeout_s=_TIMEOUT_S,
        max_answer_bytes=_MAX_ANSWER_BYTES,
    )


def _has_tls(address: str) -> bool:
    """Return whether a server answers the beginning of TLS, with whatever certificate and demands."""
    import ssl

    from trio_nsq.protocol.address import parse_address

    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection(parse_address(address), _TIMEOUT_S) as connection,
            context.wrap_socket(connection),
        ):
            return True
    except ssl.SSLError as error:
        return " alert " in str(error).lower().replace(
            "_", " "
        )  # it asks for a certificate, or for other versions
    except OSError:
        return False


def _kind_of_tcp(address: str) -> _Kind | None:
    """Greet as a broker greets a discovery service."""
    from trio_nsq.protocol.address import parse_address

    with suppress(OSError), socket.create_connection(parse_address(address), _TIMEOUT_S) as connection:
        connection.sendall(b"  V1PING\n")
        answer = connection.recv(100)
        return next((kind for kind in (_BROKER, _LOOKUPD) if answer.startswith(kind.answer)), None)
    return None
