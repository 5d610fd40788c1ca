"""HTTP requests to brokers and discovery services, with deadlines."""

from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import trio

from ..._version import __version__
from ...access.secret import NO_SECRET, Secret, SecretFileError, authorization, warn_in_clear
from ...api.https import https_address
from ...api.request import Procedure, Request, json_object, message_of, perform
from ...client.connection.tls import TLSFiles
from ...http.client import HEADERS, HTTPClient, RequestFailed
from ...http.client import Answer as HTTPAnswer
from ...http.credentials import CONSOLE_HEADER
from ...http.urls import URL
from ...protocol import NSQError
from ...protocol.address import format_address, is_loopback, is_unix_path, without_secrets
from ...protocol.limits import MIB
from ...protocol.untrusted_json import decode_json

_T = TypeVar("_T")
_V = TypeVar("_V")
MAX_ANSWER_BYTES = 64 * MIB
"""The statistics of 100,000 topics have about 30 MB."""
_MAX_REASON = 300
_MAX_AT_ONCE = 64
"""Requests at the same time, of one call of `on_all`."""
_KEEP_ALIVE_S = 30.0
_USER_AGENT = f"trio-nsq-admin/{__version__}"


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

    def decode(self, data: bytes) -> Any:
        """Decode JSON of the body. Raises UpstreamError."""
        try:
            return decode_json(data)
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

    def map(self, show: Callable[[str, _T], _V]) -> "Results[_V]":
        """Return the results of a function of address and value; a server for which it raises UpstreamError failed."""
        found: Results[_V] = Results(errors=self.errors)
        for address, value in self.values.items():
            try:
                found.values[address] = show(address, value)
            except UpstreamError as exc:
                found.errors[address] = exc
        return found

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
        self._http = HTTPClient(
            connect_timeout_s=connect_timeout_s,
            request_timeout_s=request_timeout_s,
            max_answer_bytes=MAX_ANSWER_BYTES,
            tls=tls.context(),
            keep_alive_s=_KEEP_ALIVE_S,
        )
        self._secret = secret
        self._token: str | None = None
        self.request_timeout_s = request_timeout_s
        self._https: dict[str, str] = {}  # HTTPS addresses of brokers that refuse plain HTTP

    def with_token(self, token: str | None) -> "Upstream":
        """Return this with a viewer's token in each request; "": without credentials; None: with the console's own."""
        found = copy(self)
        found._token = token
        return found

    async def aclose(self) -> None:
        """Close all connections. Running requests fail."""
        await self._http.aclose()

    @asynccontextmanager
    async def open(self, address: str, request: Request[Any]) -> AsyncIterator[HTTPAnswer]:
        """Make a request; the block reads the successful answer, and sets a deadline.

        A broker that requires TLS answers plain HTTP with 403 and its HTTPS port; the request is repeated there.

        Args:
            address: `host:port`, a URL without a path, or the path of a unix socket.

        Raises:
            UpstreamError: There is no answer, its status is not 200, or it breaks off.
        """
        place = self._https.get(address, address)
        try:
            async with aclosing(await self._send(place, request)) as answer:
                if answer.status == 200:
                    yield answer
                    return
                data = await self._http.read(answer)
                https = "" if "://" in place else https_address(place, answer.status, data)
                if not https:
                    raise _refusal(address, answer.status, data)
            self._https[address] = https
            async with aclosing(await self._send(https, request)) as answer:
                if answer.status != 200:
                    raise _refusal(address, answer.status, await self._http.read(answer))
                yield answer
        except (RequestFailed, SecretFileError, ValueError) as exc:
            raise UpstreamError(address, str(exc)) from exc

    async def fetch(self, address: str, request: Request[Any], *, timeout_s: float | None = None) -> Answer:
        """Make a request, and return the headers and the body of the answer. Raises UpstreamError.

        Args:
            address: As for `open`.
            timeout_s: The limit for the whole request; None: `request_timeout_s`.
        """
        limit_s = self.request_timeout_s if timeout_s is None else timeout_s
        try:
            with trio.fail_after(limit_s):
                async with self.open(address, request) as answer:
                    return Answer(address, answer.headers, await self._http.read(answer))
        except trio.TooSlowError:
            raise UpstreamError(address, f"no answer within {limit_s:g} s") from None

    async def ask(self, address: str, request: Request[_T], *, timeout_s: float | None = None) -> _T:
        """Make a request and return its answer. Raises UpstreamError; the arguments are those of `fetch`."""
        answer = await self.fetch(address, request, timeout_s=timeout_s)
        try:
            return request.read(answer.body, answer.decode)
        except ValueError as exc:
            raise UpstreamError(address, f"its answer is not valid: {exc}") from exc

    async def json(self, method: str, address: str, path: str) -> Any:
        """Make a request without parameters, and return the JSON of the answer. Raises UpstreamError."""
        return await self.ask(address, Request(method, path, json_object(lambda value: value)))

    async def perform(self, address: str, procedure: Procedure[_T]) -> _T:
        """Run a procedure of requests to one server, and return its result. Raises UpstreamError."""
        try:
            return await perform(procedure, lambda request: self.ask(address, request))
        except ValueError as exc:
            raise UpstreamError(address, f"its answers are not valid: {exc}") from exc

    async def perform_all(self, work: Mapping[str, Procedure[None]]) -> dict[str, str]:
        """Run procedures, each on its server, all at once; return why servers stopped, by address."""
        results = await self.on_all(work, lambda address: self.perform(address, work[address]))
        return {address: error.reason for address, error in results.errors.items()}

    async def ask_all(
        self, addresses: Iterable[str], request: Request[_T], *, timeout_s: float | None = None
    ) -> Results[_T]:
        """Make a request to all servers at once, and collect the answers. The arguments are those of `fetch`."""
        return await self.on_all(addresses, lambda address: self.ask(address, request, timeout_s=timeout_s))

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

    async def _send(self, address: str, request: Request[Any]) -> HTTPAnswer:
        is_path = is_unix_path(address)
        url = URL.at(address, request.target)
        headers = {**HEADERS, "User-Agent": _USER_AGENT}
        secret = self._secret.read() if self._token is None else self._token
        if secret:
            if url.scheme == "http" and not is_path and not is_loopback(url.host):
                warn_in_clear(format_address(url.host, url.port))
            headers["Authorization"] = authorization(secret)
            if self._token and (own := self._secret.read()):
                headers[CONSOLE_HEADER] = authorization(own)
        elif url.credentials:
            headers["Authorization"] = f"Basic {b64encode(url.credentials.encode()).decode()}"
        return await self._http.start(
            request.method, url, headers, request.body or b"", unix_path=address if is_path else ""
        )


def _refusal(address: str, status: int, body: bytes) -> UpstreamError:
    """Return the error for an answer whose status is not 200."""
    if message := message_of(body[:10_000]):
        code, _, text = message.partition(": ")
        return UpstreamError(
            address, (text or code)[:_MAX_REASON], status=status, code=code if code.isupper() else ""
        )
    return UpstreamError(address, f"it answered with status {status}", status=status)
