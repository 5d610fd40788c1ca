"""HTTP client for requests to auth servers, discovery services and other services."""

import base64
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from .._version import __version__
from ..protocol import NSQError
from ..protocol.go_json import decode_object
from ..secret import authorization

if TYPE_CHECKING:
    import httpx

_HEADERS = {
    "Accept": "application/vnd.nsq; version=1.0",
    "Accept-Encoding": "identity",  # the size of a compressed answer is unknown before decompression
    "User-Agent": f"trio-nsq/{__version__}",
}


class RequestFailed(NSQError):
    """A request failed. The text gives the reason, without secrets from the URL or the answer."""


class UnexpectedStatus(RequestFailed):
    """The answer's status is not 200.

    Attributes:
        status: The status code.
        body: The body. It is not in the text, because it may repeat the query.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"got response {status}")
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with any status. The names of its headers match in any case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HTTPClient:
    """Makes requests as nsqd does. It runs no tasks.

    As in nsqd, every request opens a new connection: requests are rare, and a kept connection may be closed by then.

    Args:
        connect_timeout_s: Limit for connecting, including TLS.
        request_timeout_s: Limit for the whole request.
        max_answer_bytes: The longest body accepted.
        tls: Settings for https; None uses the system's CAs.
    """

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        request_timeout_s: float,
        max_answer_bytes: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        self._max_answer_bytes = max_answer_bytes
        self._tls = tls
        self._transports: dict[str, httpx.AsyncHTTPTransport] = {}  # by scheme

    async def get(self, url: str, token: str = "", *, server_name: str | None = None) -> bytes:
        """Make one request, and return the body of the answer.

        A server that requires https can answer 403 with `https_port` in its JSON. The request is then repeated there,
        with a new timeout.

        Args:
            url: The URL with its query. A user name and password in it are sent as Basic authorization.
            token: Sent as authorization if the URL has no user name.
            server_name: The name that the server's certificate must have; None: the host of the URL.

        Raises:
            RequestFailed: There is no valid answer.
            UnexpectedStatus: The status is not 200. Redirects are not followed.
        """
        import httpx  # here, because most brokers make no requests

        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as exc:
            raise RequestFailed(str(exc)) from exc
        reply = await self._request("GET", parsed, token, server_name)
        if reply.status == 403 and parsed.scheme == "http" and (https_port := _https_port(reply.body)):
            secure = parsed.copy_with(scheme="https", port=https_port)
            reply = await self._request("GET", secure, token, server_name)
        if reply.status != 200:
            raise UnexpectedStatus(reply.status, reply.body)
        return reply.body

    async def request(self, method: str, url: str, body: bytes = b"", content_type: str = "") -> Reply:
        """Make one request, and return the answer whatever its status. Redirects are not followed.

        Args:
            url: As in `get`.
            content_type: The type of `body`.

        Raises:
            RequestFailed: There is no valid answer.
        """
        import httpx

        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as exc:
            raise RequestFailed(str(exc)) from exc
        return await self._request(method, parsed, content_type=content_type, body=body)

    async def _request(
        self,
        method: str,
        url: "httpx.URL",
        token: str = "",
        server_name: str | None = None,
        *,
        content_type: str = "",
        body: bytes = b"",
    ) -> Reply:
        """Make one request."""
        import httpx

        headers = dict(_HEADERS)
        if content_type:
            headers["Content-Type"] = content_type
        if url.userinfo:
            credentials = f"{url.username}:{url.password}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(credentials).decode()}"
        elif token:
            headers["Authorization"] = authorization(token)
        timeout = httpx.Timeout(None, connect=self._connect_timeout_s)
        extensions: dict[str, Any] = {"timeout": timeout.as_dict()}
        if server_name is not None:
            extensions["sni_hostname"] = server_name
        try:
            request = httpx.Request(method, url, headers=headers, content=body or None, extensions=extensions)
            with trio.fail_after(self._request_timeout_s):
                response = await self._transport(url.scheme).handle_async_request(request)
                try:
                    return Reply(response.status_code, response.headers, await self._read(response))
                finally:
                    await response.aclose()
        except trio.TooSlowError:
            raise RequestFailed(f"no answer within {self._request_timeout_s:g} s") from None
        except httpx.ConnectTimeout:
            raise RequestFailed(f"no connection within {self._connect_timeout_s:g} s") from None
        except (httpx.HTTPError, UnicodeError) as exc:  # UnicodeError: an invalid host name
            raise RequestFailed(_why(exc)) from exc

    def _transport(self, scheme: str) -> "httpx.AsyncHTTPTransport":
        """Return the transport for URLs of this scheme. Create it at the first use.

        It is a transport and not an httpx client: a client logs URLs with their secrets, and uses proxies and cookies,
        which nsqd does not. The system's CAs are loaded only for https, because that takes longer than a request.
        """
        import httpx

        if scheme not in self._transports:
            context = self._tls or ssl.create_default_context() if scheme == "https" else False
            self._transports[scheme] = httpx.AsyncHTTPTransport(
                verify=context, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
            )
        return self._transports[scheme]

    async def _read(self, response: "httpx.Response") -> bytes:
        body = bytearray()
        # The cancellation ends the loop, so that the nested generators finish. The library would not close them after
        # a `break`.
        with trio.CancelScope() as reading:
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > self._max_answer_bytes:
                    reading.cancel()
        if reading.cancel_called:
            raise RequestFailed(f"the answer is longer than {self._max_answer_bytes} bytes")
        return bytes(body)

    async def aclose(self) -> None:
        """Close all connections. Running requests fail."""
        for transport in self._transports.values():
            await transport.aclose()


def _https_port(body: bytes) -> int:
    """Return the port in the 403 answer of a server that requires https; 0 without one."""
    try:
        port = decode_object(body).integer("https_port")
    except ValueError:
        return 0
    return port if 0 < port <= 65535 else 0


def _why(error: BaseException) -> str:
    """Return the text of an error; if it says nothing, that of its cause.

    Libraries wrap errors in empty ones, and trio wraps those of all attempts to connect in one without their reasons.
    """
    while (not str(error) or str(error).startswith("all attempts to connect")) and (
        inner := error.__cause__ or error.__context__
    ) is not None:
        error = inner.exceptions[-1] if isinstance(inner, BaseExceptionGroup) else inner
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
