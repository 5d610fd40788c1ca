"""HTTP requests to brokers and discovery services, with deadlines."""

import json
import re
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx
import trio

from ..._version import __version__
from ...client.connection.tls import TLSFiles
from ...protocol import NSQError
from ...protocol.address import format_address, is_loopback, without_secrets
from ...protocol.limits import MIB
from ...secret import NO_SECRET, Secret, SecretFileError, authorization, warn_in_clear
from ...untrusted_json import decode_json

_T = TypeVar("_T")
_HTTPS = "https://"
_HTTP = "http://"
MAX_ANSWER_BYTES = 64 * MIB
"""The statistics of 100,000 topics have about 30 MB."""
_MAX_REASON = 300
_MAX_AT_ONCE = 64
"""Requests at the same time, of one call of `on_all`."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NO_PARAMETERS: Mapping[str, str] = {}
_HEADERS = {
    "Accept": "application/vnd.nsq; version=1.0",
    "Accept-Encoding": "identity",  # the size of a compressed answer is unknown before decompression
    "User-Agent": f"trio-nsq-admin/{__version__}",
}


def decode_answer(data: bytes) -> Any:
    """Decode JSON of a server. Escaped halves of surrogate pairs become U+FFFD: they cannot be written as UTF-8.

    Raises:
        ValueError: It is not JSON.
    """
    value = decode_json(data)
    if _SURROGATE.search(data) is None:
        return value
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return decode_json(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))


class UpstreamError(NSQError):
    """A broker or discovery service gave no answer, or refused.

    Attributes:
        address: The server, without secrets.
        status: The status of its answer; 0 without one.
        code: NSQ's error code, such as `TOPIC_NOT_FOUND`; empty without one.
        reason: The reason, without the address.
    """

    def __init__(self, address: str, reason: str, *, status: int = 0, code: str = "") -> None:
        address = without_secrets(address)
        super().__init__(f"{address}: {reason}")
        self.address = address
        self.reason = reason
        self.status = status
        self.code = code

    @property
    def is_missing(self) -> bool:
        """Whether the server answered that it does not have the topic or channel."""
        return self.status == 404 and self.code in ("TOPIC_NOT_FOUND", "CHANNEL_NOT_FOUND")


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer."""

    address: str
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the decoded body. Raises UpstreamError."""
        try:
            return decode_answer(self.body)
        except ValueError:
            raise UpstreamError(self.address, "its answer is not JSON: it is not a broker") from None


@dataclass(frozen=True, slots=True)
class Results(Generic[_T]):
    """The results of several servers, by address, in the order in which they were asked.

    Attributes:
        values: Of the servers that answered.
        errors: Of the others.
    """

    values: dict[str, _T] = field(default_factory=dict)
    errors: dict[str, UpstreamError] = field(default_factory=dict)

    @property
    def real_errors(self) -> dict[str, UpstreamError]:
        """The errors, without servers that lack the topic or channel while another server has it."""
        if not self.values:
            return self.errors
        return {address: error for address, error in self.errors.items() if not error.is_missing}


class Upstream:
    """Makes requests. It runs no tasks; connections are kept for the next request.

    Args:
        tls: For https.
        secret: The console's own credentials, for requests without a viewer's token.
        connect_timeout_s: Limit for connecting, including TLS.
        request_timeout_s: Limit for a whole request.

    Raises:
        TLSFilesError: A file of `tls` cannot be used.
    """

    def __init__(
        self,
        tls: TLSFiles,
        secret: Secret = NO_SECRET,
        *,
        connect_timeout_s: float,
        request_timeout_s: float,
    ) -> None:
        self._tls: ssl.SSLContext = tls.context()
        self._secret = secret
        self.connect_timeout_s = connect_timeout_s
        self.request_timeout_s = request_timeout_s
        self._transports: dict[str, httpx.AsyncHTTPTransport] = {}  # by the path of a unix socket; else ""
        self._https: dict[str, str] = {}  # HTTPS addresses of brokers that refuse plain HTTP

    async def aclose(self) -> None:
        """Close all connections. Running requests fail."""
        for transport in self._transports.values():
            await transport.aclose()

    async def request(
        self,
        method: str,
        address: str,
        path: str,
        params: Mapping[str, str] = _NO_PARAMETERS,
        body: bytes = b"",
        *,
        token: str | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Make one request.

        A broker that requires TLS answers plain HTTP with 403 and its HTTPS port; the request is repeated there.

        Args:
            address: `host:port`, a URL without a path, or the path of a unix socket.
            path: Such as `/stats`.
            params: The query.
            token: A viewer's token; "": send no credentials; None: the console's own.
            timeout_s: The limit for the whole request; None: `request_timeout_s`.

        Raises:
            UpstreamError: There is no answer, or its status is not 200.
        """
        limit_s = self.request_timeout_s if timeout_s is None else timeout_s
        try:
            with trio.fail_after(limit_s):
                async with self._open(method, address, path, params, body, token) as response:
                    data = await _read(response, address)
                    if response.status_code != 200:
                        raise _refusal(address, response.status_code, data)
                    return Answer(address, response.headers, data)
        except trio.TooSlowError:
            raise UpstreamError(address, f"no answer within {limit_s:g} s") from None

    async def json(
        self,
        method: str,
        address: str,
        path: str,
        params: Mapping[str, str] = _NO_PARAMETERS,
        body: bytes = b"",
        *,
        token: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Make a request and decode the answer. Raises UpstreamError, also if the answer is not JSON."""
        answer = await self.request(method, address, path, params, body, token=token, timeout_s=timeout_s)
        return answer.json()

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        address: str,
        path: str,
        params: Mapping[str, str] = _NO_PARAMETERS,
        body: bytes = b"",
        *,
        token: str | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Make a request; the block reads the answer, for example with `aiter_raw`, and sets its own deadline.

        Raises:
            UpstreamError: There is no answer, its status is not 200, or it breaks off.
        """
        async with self._open(method, address, path, params, body, token) as response:
            if response.status_code != 200:
                raise _refusal(address, response.status_code, await _read(response, address))
            yield response

    async def on_all(self, addresses: Iterable[str], act: Callable[[str], Awaitable[_T]]) -> Results[_T]:
        """Call `act` for all servers at once, and collect what it returns and its UpstreamErrors."""
        wanted = list(dict.fromkeys(addresses))
        outcomes: dict[str, _T | UpstreamError] = {}
        slots = trio.CapacityLimiter(_MAX_AT_ONCE)

        async def one(address: str) -> None:
            async with slots:
                try:
                    outcomes[address] = await act(address)
                except UpstreamError as exc:
                    outcomes[address] = exc

        async with trio.open_nursery() as nursery:
            for address in wanted:
                nursery.start_soon(one, address)
        results: Results[_T] = Results()
        for address in wanted:
            outcome = outcomes[address]
            if isinstance(outcome, UpstreamError):
                results.errors[address] = outcome
            else:
                results.values[address] = outcome
        return results

    @asynccontextmanager
    async def _open(
        self, method: str, address: str, path: str, params: Mapping[str, str], body: bytes, token: str | None
    ) -> AsyncIterator[httpx.Response]:
        """Make a request, again over HTTPS if the broker wants it. Raises UpstreamError for all that fails."""
        place = self._https.get(address, address)
        try:
            response = await self._send(method, place, path, params, body, token)
            if response.status_code == 403 and not place.startswith(_HTTPS):
                data = await _read(response, address)
                https = _https_address(place, data)
                if not https:
                    raise _refusal(address, 403, data)
                await response.aclose()
                self._https[address] = https
                response = await self._send(method, https, path, params, body, token)
            try:
                yield response
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                    await response.aclose()
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, OSError) as exc:
            raise UpstreamError(address, _why(exc, self.connect_timeout_s)) from exc
        except SecretFileError as exc:
            raise UpstreamError(address, str(exc)) from exc

    async def _send(
        self, method: str, address: str, path: str, params: Mapping[str, str], body: bytes, token: str | None
    ) -> httpx.Response:
        is_path = "/" in address and not address.startswith((_HTTP, _HTTPS))
        base = "http://localhost" if is_path else address if "://" in address else _HTTP + address
        url = httpx.URL(base.rstrip("/") + path, params=dict(params) or None)
        headers = {**_HEADERS, "Host": url.netloc.decode("ascii").rpartition("@")[2]}
        secret = self._secret.read() if token is None else token
        if secret:
            if url.scheme == "http" and not is_path and not is_loopback(url.host):
                warn_in_clear(format_address(url.host, url.port or 80))
            headers["Authorization"] = authorization(secret)
        elif url.userinfo:
            credentials = f"{url.username}:{url.password}".encode()
            headers["Authorization"] = f"Basic {b64encode(credentials).decode()}"
        if body or method != "GET":
            headers["Content-Length"] = str(len(body))
        timeout = httpx.Timeout(None, connect=self.connect_timeout_s)
        request = httpx.Request(
            method, url, headers=headers, content=body, extensions={"timeout": timeout.as_dict()}
        )
        return await self._transport(address if is_path else "").handle_async_request(request)

    def _transport(self, unix_path: str) -> httpx.AsyncHTTPTransport:
        """Return the transport, a new one at the first use.

        It is not an httpx client: that logs URLs with their secrets, uses proxies and keeps cookies.
        """
        if unix_path not in self._transports:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=30)
            self._transports[unix_path] = httpx.AsyncHTTPTransport(
                verify=self._tls, limits=limits, uds=unix_path or None, retries=0
            )
        return self._transports[unix_path]


async def _read(response: httpx.Response, address: str) -> bytes:
    body = bytearray()
    # The cancellation ends the loop, so that the nested generators finish. The library would not close them after
    # a `break`.
    with trio.CancelScope() as reading:
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > MAX_ANSWER_BYTES:
                reading.cancel()
    if reading.cancel_called:
        raise UpstreamError(address, f"its answer has more than {MAX_ANSWER_BYTES // MIB} MiB")
    return bytes(body)


def _refusal(address: str, status: int, body: bytes) -> UpstreamError:
    """Return the error for an answer whose status is not 200."""
    try:
        message = decode_answer(body[:10_000])["message"]
    except (ValueError, KeyError, TypeError):
        message = ""
    if isinstance(message, str) and message:
        code, _, text = message.partition(": ")
        return UpstreamError(
            address, (text or code)[:_MAX_REASON], status=status, code=code if code.isupper() else ""
        )
    return UpstreamError(address, f"it answered with status {status}", status=status)


def _https_address(address: str, body: bytes) -> str:
    """Return the HTTPS address in the 403 answer of a broker that requires TLS; empty without one."""
    try:
        port = decode_json(body)["https_port"]
    except (ValueError, KeyError, TypeError):
        return ""
    if type(port) is not int or not 0 < port <= 65535:
        return ""
    host = address.removeprefix(_HTTP).rpartition(":")[0].strip("[]")
    return _HTTPS + format_address(host, port)


def _why(error: BaseException, connect_timeout_s: float) -> str:
    """Return the reason of an error; if its text is empty, that of its cause."""
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {connect_timeout_s:g} s"
    while (not str(error) or str(error).startswith("all attempts to connect")) and (
        inner := error.__cause__ or error.__context__
    ) is not None:
        error = inner.exceptions[-1] if isinstance(inner, BaseExceptionGroup) else inner
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__)[:_MAX_REASON]
