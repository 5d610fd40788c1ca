"""The broker's own requests: GET, to auth servers and discovery services."""

import base64
import ssl
from typing import TYPE_CHECKING

import trio

from .._version import __version__
from ..protocol import NSQError
from ..protocol.go_json import decode_object

if TYPE_CHECKING:
    import httpx

_HEADERS = {
    "Accept": "application/vnd.nsq; version=1.0",
    "Accept-Encoding": "identity",  # a packed answer has no bound before it is unpacked
    "User-Agent": f"trio-nsq/{__version__}",
}


class RequestFailed(NSQError):
    """There is no usable answer; the text says why, without what the URL or the answer may hold of secrets."""


class UnexpectedStatus(RequestFailed):
    """The answer's status is not 200.

    Attributes:
        status: The one it has.
        body: Not for the text: it may repeat the query.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"got response {status}")
        self.status = status
        self.body = body


class HTTPClient:
    """Makes requests as nsqd does. It has no tasks of its own.

    Every request has a connection of its own, as in nsqd: they are rare, and one kept open could be found closed.

    Args:
        connect_timeout_s: For a connection, TLS included.
        request_timeout_s: For all of a request.
        max_answer_bytes: The longest body accepted.
        tls: For https; None: the system's authorities.
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

    async def get(self, url: str) -> bytes:
        """Make one request, and return the body of the answer.

        A server that wants https may say so with a 403 and JSON with its `https_port`; then that is asked, which may
        take as long again.

        Args:
            url: With its query. A name and password in it are sent as Basic authorization.

        Raises:
            RequestFailed: There is no answer.
            UnexpectedStatus: Its status is not 200. Redirects are not followed.
        """
        import httpx  # here: brokers that make no requests do without

        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as exc:
            raise RequestFailed(str(exc)) from exc
        status, body = await self._get(parsed)
        if status == 403 and parsed.scheme == "http" and (https_port := _https_port(body)):
            status, body = await self._get(parsed.copy_with(scheme="https", port=https_port))
        if status != 200:
            raise UnexpectedStatus(status, body)
        return body

    async def _get(self, url: "httpx.URL") -> tuple[int, bytes]:
        """Return the status and the body."""
        import httpx

        headers = dict(_HEADERS)
        if url.userinfo:
            credentials = f"{url.username}:{url.password}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(credentials).decode()}"
        timeout = httpx.Timeout(None, connect=self._connect_timeout_s)
        try:
            request = httpx.Request("GET", url, headers=headers, extensions={"timeout": timeout.as_dict()})
            with trio.fail_after(self._request_timeout_s):
                response = await self._transport(url.scheme).handle_async_request(request)
                try:
                    return response.status_code, await self._read(response)
                finally:
                    await response.aclose()
        except trio.TooSlowError:
            raise RequestFailed(f"no answer within {self._request_timeout_s:g} s") from None
        except httpx.ConnectTimeout:
            raise RequestFailed(f"no connection within {self._connect_timeout_s:g} s") from None
        except (httpx.HTTPError, UnicodeError) as exc:  # the latter for a host that cannot even be looked up
            raise RequestFailed(_why(exc)) from exc

    def _transport(self, scheme: str) -> "httpx.AsyncHTTPTransport":
        """The transport for URLs of this scheme, made when it is first needed.

        A transport, and not a client, which logs the URLs that it asks for, secrets included, and uses proxies and
        cookies, which nsqd does not. The CAs of the system are loaded for https only: that takes longer than a request.
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
        # The loop is left by cancelling what it waits for, so that the generators inside of each other, which the
        # library does not close, come to their ends.
        with trio.CancelScope() as reading:
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > self._max_answer_bytes:
                    reading.cancel()
        if reading.cancel_called:
            raise RequestFailed(f"the answer is longer than {self._max_answer_bytes} bytes")
        return bytes(body)

    async def aclose(self) -> None:
        """Let go of everything; requests under way fail."""
        for transport in self._transports.values():
            await transport.aclose()


def _https_port(body: bytes) -> int:
    """The port that the 403 of a server that wants https names; 0 if it names none."""
    try:
        port = decode_object(body).integer("https_port")
    except ValueError:
        return 0
    return port if 0 < port <= 65535 else 0


def _why(error: BaseException) -> str:
    """What happened: libraries wrap errors in others that say nothing."""
    while not str(error) and (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(error) or type(error).__name__
