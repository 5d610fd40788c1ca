"""The client's side of a connection that switches from HTTP to another protocol: those of a cluster's members."""

import ssl
from typing import Final

import trio

from ..access.secret import Secret, SecretFileError
from ..protocol import NSQError
from ..protocol.untrusted_json import decode_json
from ..text.wording import printable
from ..tls.client_session import TLSClientSession
from ..tls.errors import TLSError
from ..tls.stream import TLSStream
from .client import HEADERS
from .failures import innermost, reason_of
from .prefixed_stream import PrefixedStream
from .urls import URL

CLUSTER_PROTOCOL: Final = "trio-nsq-cluster"
"""What members of a cluster ask each other for with `Upgrade`."""
_MAX_BYTES: Final = 16 * 1024
_MAX_SHOWN: Final = 300
_BEGIN: Final = b"HTTP/"
_NOT_HTTP: Final = "does not speak HTTP: is this the HTTP port of a broker?"


class UpgradeFailed(NSQError):
    """The other protocol cannot be spoken. The text has the URL and the reason.

    Attributes:
        status: The status of the answer; 0: there is none.
    """

    def __init__(self, url: str, reason: str, status: int = 0) -> None:
        super().__init__(f"{url} {reason}")
        self.status = status


async def open_upgraded(
    url: str,
    path: str,
    *,
    secret: Secret,
    tls: ssl.SSLContext | None = None,
    server_name: str | None = None,
    timeout_s: float,
) -> trio.abc.HalfCloseableStream:
    """Connect to a member of a cluster, and switch to the protocol of the path.

    Args:
        url: `http://HOST:PORT` or `https://HOST:PORT`, without a path.
        path: The path and the query, encoded.
        secret: The token that is sent.
        tls: Settings for https; None uses the system's CAs.
        server_name: The name that the server's certificate must have; None: the host of the URL.
        timeout_s: Limit for everything.

    Raises:
        UpgradeFailed: The server cannot be reached, or refuses.
    """
    try:
        place = URL.at(url, path)
        headers = {
            "Host": place.netloc,
            "Connection": "Upgrade",
            "Upgrade": CLUSTER_PROTOCOL,
            "User-Agent": HEADERS["User-Agent"],
            **secret.headers(place.netloc if place.scheme == "http" else ""),
        }
    except SecretFileError as exc:
        raise UpgradeFailed(url, f"needs a token: {exc}") from exc
    except ValueError as exc:
        raise UpgradeFailed(url, f"is not a valid address: {exc}") from exc
    try:
        with trio.fail_after(timeout_s):
            return await _open(url, place, headers, tls, server_name or place.host)
    except trio.TooSlowError:
        raise UpgradeFailed(url, f"does not answer within {timeout_s:g} s") from None


async def _open(
    url: str, place: URL, headers: dict[str, str], tls: ssl.SSLContext | None, server_name: str
) -> trio.abc.HalfCloseableStream:
    stream: trio.abc.HalfCloseableStream
    try:
        stream = await trio.open_tcp_stream(place.host, place.port)
    except (OSError, UnicodeError) as exc:
        raise UpgradeFailed(url, f"cannot be reached: {reason_of(innermost(exc))}") from exc
    try:
        if place.scheme == "https":
            context = tls or ssl.create_default_context()
            stream = secure = TLSStream(stream, TLSClientSession(context, server_name))
            await secure.do_handshake()
        return await _switch(url, place.target, headers, stream)
    except BaseException as exc:
        await trio.aclose_forcefully(stream)
        for tls_error in (exc, exc.__cause__):  # a server may refuse a certificate after the handshake
            if isinstance(tls_error, TLSError):
                raise UpgradeFailed(url, f"cannot be reached: {tls_error}") from exc
        if isinstance(exc, trio.BrokenResourceError):
            raise UpgradeFailed(url, "has closed the connection") from exc
        raise


async def _switch(
    url: str, target: str, headers: dict[str, str], stream: trio.abc.HalfCloseableStream
) -> trio.abc.HalfCloseableStream:
    import h11  # slow, and most brokers do not need it

    exchange = h11.Connection(h11.CLIENT)
    request = h11.Request(method="GET", target=target, headers=list(headers.items()))
    head = exchange.send(request)
    assert head is not None
    await stream.send_all(head + (exchange.send(h11.EndOfMessage()) or b""))
    status, begin, body = 0, b"", bytearray()
    try:
        while not isinstance(event := exchange.next_event(), h11.EndOfMessage) and len(body) <= _MAX_BYTES:
            if isinstance(event, h11.InformationalResponse) and event.status_code == 101:
                beyond, _ = exchange.trailing_data
                return PrefixedStream(beyond, stream) if beyond else stream
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            elif event is h11.NEED_DATA:
                if not (data := await stream.receive_some(_MAX_BYTES)):
                    break
                begin = begin or bytes(data[: len(_BEGIN)])
                exchange.receive_data(bytes(data))
    except h11.RemoteProtocolError as exc:
        raise UpgradeFailed(url, _NOT_HTTP) from exc
    if status:
        raise UpgradeFailed(url, _refusal(status, bytes(body)), status)
    raise UpgradeFailed(url, "has closed the connection" if _BEGIN.startswith(begin) else _NOT_HTTP)


def _refusal(status: int, body: bytes) -> str:
    """Say why a server does not switch, by its answer."""
    code = _code(body)
    if code == "TLS_REQUIRED":
        return "requires https: --cluster-tls"
    if status in (401, 403):
        needs = "this needs a token of the role replicate: --cluster-auth-secret-file"
        return f"refuses the connection: {needs} ({status} {code})"
    if status == 404 and code.startswith("NO_CLUSTER"):
        return "is not a member of a cluster"
    if status == 404:
        return "does not know the requests of clusters: is it an older version, or another server?"
    if status == 426:
        return f"has not got the request for {CLUSTER_PROTOCOL}: a proxy between them may have removed it"
    return f"refuses the connection: {status} {code}".rstrip()


def _code(body: bytes) -> str:
    try:
        answer = decode_json(body)
    except ValueError:
        return ""
    message = answer.get("message") if isinstance(answer, dict) else None
    return printable(message[:_MAX_SHOWN]) if isinstance(message, str) else ""
