"""HTTP client under trio and asyncio, for brokers, auth servers, discovery services and other services."""

import base64
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from .._version import __version__
from ..access.secret import authorization
from ..api.https import https_port
from ..event_loop import runtime
from ..protocol import NSQError
from .failures import innermost, reason_of
from .urls import URL

if TYPE_CHECKING:  # slow to import, and most brokers make no requests
    import httpcore

_MAX_KEPT = 256
"""Idle connections."""
HEADERS = {
    "Accept": "application/vnd.nsq; version=1.0",
    "Accept-Encoding": "identity",  # the size of a compressed answer is unknown before decompression
    "User-Agent": f"trio-nsq/{__version__}",
}


Headers: TypeAlias = Mapping[str, str] | Sequence[tuple[bytes, bytes]]
_NO_HEADERS: Mapping[str, str] = {}


class RequestFailed(NSQError):
    """A request failed. The text gives the reason, without secrets from the URL or the answer."""


class NoConnection(RequestFailed, OSError):
    """The server cannot be reached, or its certificate is not accepted."""


class InvalidRequest(RequestFailed):
    """The request is not valid HTTP: nothing was sent."""


class NotHTTP(RequestFailed):
    """The answer is not HTTP."""


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
    """An answer with any status. The names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HTTPClient:
    """Makes requests. It runs no tasks.

    Args:
        connect_timeout_s: Limit for connecting, including TLS.
        request_timeout_s: Limit for the whole request; with `start`, until the head of the answer has
            arrived.
        max_answer_bytes: The longest body accepted.
        tls: Settings for https; None uses the system's CAs.
        keep_alive_s: Use a connection again that was idle for less than this. 0: every request opens a new one, as in
            nsqd: requests are rare, and a kept connection may be closed by then.
    """

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        request_timeout_s: float,
        max_answer_bytes: int,
        tls: ssl.SSLContext | None = None,
        keep_alive_s: float = 0.0,
    ) -> None:
        self._keep_alive_s = keep_alive_s
        self._connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        self._max_answer_bytes = max_answer_bytes
        self._tls = tls
        self._pools: dict[str, httpcore.AsyncConnectionPool] = {}  # by scheme, or the path of a unix socket

    async def get(
        self, url: str, token: str = "", *, server_name: str | None = None, method: str = "GET"
    ) -> bytes:
        """Make one request, and return the body of the answer.

        A server that requires https can answer 403 with `https_port` in its JSON. The request is then repeated there,
        with a new timeout.

        Args:
            url: The URL with its query. A user name and password in it are sent as Basic authorization.
            token: Sent as authorization if the URL has no user name.
            server_name: The name that the server's certificate must have; None: the host of the URL.
            method: Another one than GET, for a request without a body.

        Raises:
            RequestFailed: There is no valid answer.
            UnexpectedStatus: The status is not 200. Redirects are not followed.
        """
        parsed = _parsed(url)
        reply = await self._request(method, parsed, token, server_name)
        if parsed.scheme == "http" and (port := https_port(reply.status, reply.body)):
            reply = await self._request(method, parsed.on_https(port), token, server_name)
        if reply.status != 200:
            raise UnexpectedStatus(reply.status, reply.body)
        return reply.body

    async def request(
        self,
        method: str,
        url: str,
        body: bytes = b"",
        content_type: str = "",
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> Reply:
        """Make one request, and return the answer whatever its status. Redirects are not followed.

        Args:
            url: As in `get`.
            content_type: The type of `body`.
            headers: More headers, or other values for those of `HEADERS`.

        Raises:
            RequestFailed: There is no valid answer.
        """
        return await self._request(
            method, _parsed(url), content_type=content_type, body=body, more_headers=headers
        )

    async def _request(
        self,
        method: str,
        url: URL,
        token: str = "",
        server_name: str | None = None,
        *,
        content_type: str = "",
        body: bytes = b"",
        more_headers: Mapping[str, str] = _NO_HEADERS,
    ) -> Reply:
        headers = {**HEADERS, **more_headers}
        if content_type:
            headers["Content-Type"] = content_type
        if url.credentials:
            headers["Authorization"] = f"Basic {base64.b64encode(url.credentials.encode()).decode()}"
        elif token:
            headers["Authorization"] = authorization(token)
        try:
            with runtime.fail_after(self._request_timeout_s):
                answer = await self.start(method, url, headers, body, server_name=server_name)
                async with aclosing(answer):
                    return Reply(answer.status, answer.headers, await self.read(answer))
        except runtime.TooSlowError:
            raise RequestFailed(f"no answer within {self._request_timeout_s:g} s") from None

    async def start(
        self,
        method: str,
        url: URL,
        headers: Headers,
        body: bytes = b"",
        *,
        unix_path: str = "",
        server_name: str | None = None,
    ) -> "Answer":
        """Make a request and return the answer, with any status, once its head has arrived. The caller closes it.

        The time until then is limited; the body is not.

        Raises:
            RequestFailed: There is no valid answer.
        """
        import httpcore

        extensions: dict[str, Any] = {"timeout": {"connect": self._connect_timeout_s}}
        if server_name is not None:
            extensions["sni_hostname"] = server_name
        all_headers: list[tuple[str | bytes, str | bytes]]
        all_headers = [*(headers.items() if isinstance(headers, Mapping) else headers)]
        if not any(name.lower() in ("host", b"host") for name, _ in all_headers):
            all_headers.insert(0, ("Host", url.netloc))
        if body or method != "GET":
            all_headers.append(("Content-Length", str(len(body))))
        with self._failures():
            place = httpcore.URL(
                scheme=url.scheme.encode(), host=url.host.encode(), port=url.port, target=url.target.encode()
            )
            request = httpcore.Request(
                method, place, headers=all_headers, content=body or None, extensions=extensions
            )
            pool = self._pool(url.scheme, unix_path)
            try:
                with runtime.fail_after(self._request_timeout_s):
                    return Answer(await pool.handle_async_request(request), self._failures)
            except runtime.TooSlowError:
                raise RequestFailed(f"no answer within {self._request_timeout_s:g} s") from None

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Convert the library's errors inside the block to RequestFailed."""
        import httpcore

        try:
            yield
        except httpcore.ConnectTimeout:
            raise NoConnection(f"no connection within {self._connect_timeout_s:g} s") from None
        except httpcore.ConnectError as exc:
            raise NoConnection(_why(exc)) from exc
        except httpcore.LocalProtocolError as exc:
            raise InvalidRequest(str(exc)) from exc
        except httpcore.RemoteProtocolError as exc:
            # A server that closes the connection before the end of an answer raises it, too.
            is_lost = any(words in str(exc) for words in ("disconnected", "peer closed"))
            raise (RequestFailed if is_lost else NotHTTP)(_why(exc)) from exc
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as exc:
            raise RequestFailed(_why(exc)) from exc
        except UnicodeError as exc:  # an invalid host name, or header
            raise RequestFailed(_why(exc)) from exc

    async def read(self, answer: "Answer") -> bytes:
        """Return the body of an answer. Raises RequestFailed: it is too long, or breaks off."""
        body = bytearray()
        while piece := await answer.receive():
            body += piece
            if len(body) > self._max_answer_bytes:
                raise RequestFailed(f"the answer is longer than {self._max_answer_bytes} bytes")
        return bytes(body)

    def _pool(self, scheme: str, unix_path: str) -> "httpcore.AsyncConnectionPool":
        """Return the connections for URLs of this scheme, or to a unix socket. Create them at the first use.

        The system's CAs are loaded only for https, because that takes longer than a request.
        """
        import httpcore

        from .exact_streams import ExactBackend

        key = unix_path or scheme
        if key not in self._pools:
            self._pools[key] = httpcore.AsyncConnectionPool(
                self._tls or ssl.create_default_context() if scheme == "https" else None,
                max_connections=None,
                max_keepalive_connections=_MAX_KEPT if self._keep_alive_s else 0,
                keepalive_expiry=self._keep_alive_s,
                uds=unix_path or None,
                network_backend=ExactBackend() if self._keep_alive_s else None,
            )
        return self._pools[key]

    async def aclose(self) -> None:
        """Close all connections. Running requests fail."""
        for pool in self._pools.values():
            await pool.aclose()


class Answer:
    """An answer whose body is streamed. `HTTPClient` makes it.

    Attributes:
        status: The status code.
        headers: The headers, by lower-case name.
    """

    def __init__(
        self, response: "httpcore.Response", failures: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.status: int = response.status
        self.headers: dict[str, str] = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers
        }
        self._response = response
        self._failures = failures
        self._pieces = response.aiter_stream()

    async def receive(self) -> bytes:
        """Receive a part of the body; b"" at its end. After a cancellation, the rest is lost.

        Raises RequestFailed: it breaks off.
        """
        with self._failures():
            return await anext(self._pieces, b"")

    async def aclose(self) -> None:
        """Keep the connection if the answer was read to its end; close others, without waiting."""
        await runtime.shielded(self._close)

    async def _close(self) -> None:
        with runtime.cancel_scope() as ending, suppress(RequestFailed), self._failures():
            ending.cancel()
            while await anext(self._pieces, b""):
                pass  # the cancellation ends the library's nested generators, which it would not close
        with runtime.move_on_after(1):
            await self._response.aclose()


def _parsed(url: str) -> URL:
    try:
        return URL.parse(url)
    except ValueError as exc:
        raise RequestFailed(f"the URL is not valid: {exc}") from exc


def _why(error: BaseException) -> str:
    """Return the reason of an error: the system's, if it has one.

    The library wraps errors in others that are empty, or have Python's values in them.
    """
    import httpcore

    is_wrapped = isinstance(error, httpcore.ConnectError) or not str(error)
    return reason_of(innermost(error) if is_wrapped else error)
