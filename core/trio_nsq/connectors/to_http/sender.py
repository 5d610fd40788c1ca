"""Sends requests to receivers, and turns each result into an `Outcome`.

A request has a connection of its own while it runs. Idle connections are kept; the one that was used last is taken
first. A pool of the client looks at all of its connections for each request, so its cost grows with the concurrency.
"""

import math
import os
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from urllib.parse import SplitResult, urljoin, urlsplit

import trio

from ...http.client import Answer, HTTPClient, InvalidRequest, NoConnection, NotHTTP, RequestFailed
from ...http.urls import URL
from ...text.wording import printable, untrusted_certificate
from .outcomes import Outcome, StatusRules, Verdict, retry_after_s

MAX_RESPONSE_BYTES = 64 * 1024
"""A longer response is not read to its end; its connection is closed."""
ACCEPTED_BODY_S = 1.0
"""How long to read the response of a request that was accepted: only so that its connection can be used again."""
_EXCERPT = 200
_MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 307, 308})
KEEP_ALIVE_S = 30.0
"""How long an idle connection is kept."""

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """How requests are sent.

    Attributes:
        connect_timeout_s: The limit for the name lookup, the TCP connection and the TLS handshake.
        request_timeout_s: The limit for a whole request, from connecting to the end of the response.
        rules: What a status means.
        tls: For receivers with https.
        follow_redirects: Send the request again where the receiver redirects it, with the same method and body: on the
            same host and port only, or from http to https on the same host.
    """

    tls: ssl.SSLContext
    connect_timeout_s: float = 2.0
    request_timeout_s: float = 20.0
    rules: StatusRules = field(default_factory=StatusRules)
    follow_redirects: bool = False


class _Connection:
    """A connection to one origin, opened by its first request."""

    def __init__(self, settings: SenderSettings) -> None:
        self.http = HTTPClient(
            connect_timeout_s=settings.connect_timeout_s,
            request_timeout_s=settings.request_timeout_s,
            max_answer_bytes=MAX_RESPONSE_BYTES,
            tls=settings.tls,
            keep_alive_s=KEEP_ALIVE_S,
        )
        self.used_at_s: float | None = None


@lru_cache(maxsize=16)
def _parsed(url: str) -> URL:
    """Parse a URL; without placeholders, it is always the same."""
    return URL.parse(url)


class _Redirected(Exception):
    """The receiver redirects to this URL, with this status."""

    def __init__(self, url: str, status: int) -> None:
        super().__init__(url)
        self.url = url
        self.status = status


class Sender:
    """Sends requests. Close it with `aclose`."""

    def __init__(self, settings: SenderSettings) -> None:
        self._settings = settings
        self._idle: dict[str, list[_Connection]] = {}  # by origin

    async def keep_closing_idle(self) -> None:
        """Close connections that were idle for long, as their receiver may have closed them; runs until cancelled."""
        while True:
            await trio.sleep(KEEP_ALIVE_S)
            await self._close_idle(trio.current_time() - KEEP_ALIVE_S)

    async def aclose(self) -> None:
        """Close all idle connections."""
        await self._close_idle(math.inf)

    async def _close_idle(self, until_s: float) -> None:
        for connections in self._idle.values():
            # The last used ones are at the end, and are taken first.
            while (
                connections and (used_at_s := connections[0].used_at_s) is not None and used_at_s <= until_s
            ):
                await connections.pop(0).http.aclose()

    async def send(self, method: str, url: str, headers: Headers, content: bytes) -> Outcome:
        """Send a request. Never raises for what a receiver or the network does.

        Args:
            url: Percent-encoded.
            content: The body; empty: none.
        """
        with trio.move_on_after(self._settings.request_timeout_s):
            status = None
            for _ in range(_MAX_REDIRECTS + 1):
                try:
                    return await self._send(method, url, headers, content)
                except _Redirected as redirect:
                    url, status = redirect.url, redirect.status
            return Outcome(Verdict.FINAL, f"more than {_MAX_REDIRECTS} redirects", status)
        return Outcome(Verdict.FAILED, f"no complete response within {self._settings.request_timeout_s:g} s")

    async def _send(self, method: str, url: str, headers: Headers, content: bytes) -> Outcome:
        try:
            parsed = _parsed(url)
        except ValueError as error:
            return Outcome(Verdict.FINAL, f"the URL is invalid: {_excerpt(str(error))}")
        origin = f"{parsed.scheme}://{parsed.netloc}"
        fresh = False
        while True:
            connection = _Connection(self._settings) if fresh else self._take(origin)
            was_used = connection.used_at_s is not None
            done = False
            try:
                answer = await connection.http.start(method, parsed, headers, content)
                try:
                    outcome = await self._outcome(url, answer)
                finally:
                    await answer.aclose()
                done = True
                return outcome
            except NoConnection as error:
                return Outcome(Verdict.UNAVAILABLE, _reason(error))
            except InvalidRequest as error:
                return Outcome(Verdict.FINAL, f"the request is not valid HTTP: {error}")
            except RequestFailed as error:
                if not was_used:
                    return Outcome(Verdict.FAILED, _reason(error))
                fresh = True  # the receiver may have closed the idle connection
            finally:
                if done:
                    self._keep(origin, connection)
                else:
                    with trio.CancelScope(shield=True):
                        await connection.http.aclose()

    def _take(self, origin: str) -> _Connection:
        idle = self._idle.get(origin)
        if idle:
            return idle.pop()
        return _Connection(self._settings)

    def _keep(self, origin: str, connection: _Connection) -> None:
        connection.used_at_s = trio.current_time()
        self._idle.setdefault(origin, []).append(connection)

    async def _outcome(self, url: str, answer: Answer) -> Outcome:
        status = answer.status
        verdict = self._settings.rules.verdict(status)
        if verdict is Verdict.DONE:
            await _discard(answer)
            return Outcome(verdict, status=status)
        received = await _read(answer)
        location = answer.headers.get("location", "")
        if status in _REDIRECTS and location and self._settings.follow_redirects:
            return self._redirect(url, location, status)
        reason = _status_text(status)
        if 300 <= status < 400 and location:
            reason += f", redirects to {_excerpt(location)}"
        elif excerpt := _excerpt(" ".join(received.decode("utf-8", "replace").split())):
            reason += f": {excerpt}"
        wait_s = None
        if verdict is Verdict.UNAVAILABLE and (value := answer.headers.get("retry-after")):
            wait_s = retry_after_s(value, time.time())
        return Outcome(verdict, reason, status, wait_s)

    def _redirect(self, url: str, location: str, status: int) -> Outcome:
        """Raise _Redirected, or return why the redirect is not followed."""
        reason = f"{_status_text(status)}, redirects to {_excerpt(location)}"
        try:
            target = urljoin(url, location)
            is_allowed = _is_same_receiver(url, target)
        except ValueError as error:
            return Outcome(Verdict.FINAL, f"{reason}, an invalid URL: {_excerpt(str(error))}", status)
        if not is_allowed:
            rule = "only redirects on the same host and port, or from http to https, are followed"
            return Outcome(Verdict.FINAL, f"{reason}; {rule}", status)
        raise _Redirected(target, status)


async def _read(answer: Answer) -> bytes:
    """Return the first `MAX_RESPONSE_BYTES` of the body, or a little more."""
    received = b""
    while len(received) <= MAX_RESPONSE_BYTES and (piece := await answer.receive()):
        received += piece
    return received


async def _discard(answer: Answer) -> None:
    """Read the body of an accepted request; whatever happens to it, the request was accepted."""
    with (
        trio.CancelScope(shield=True, deadline=trio.current_time() + ACCEPTED_BODY_S),
        suppress(RequestFailed),
    ):
        await _read(answer)


def _is_same_receiver(url: str, target: str) -> bool:
    """Return whether a redirect may be followed: other servers must not get the request and its secrets."""
    before, after = urlsplit(url), urlsplit(target)
    if after.hostname != before.hostname:
        return False
    return _origin(before) == _origin(after) or (before.scheme, after.scheme) == ("http", "https")


def _origin(url: SplitResult) -> tuple[str, int | None]:
    return url.scheme, url.port or {"http": 80, "https": 443}.get(url.scheme)


def _excerpt(text: str) -> str:
    return printable(text[:_EXCERPT])[:_EXCERPT]


def _status_text(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _reason(error: RequestFailed) -> str:
    if str(error).startswith("Server disconnected"):
        return "it closed the connection without a response"
    if isinstance(error, NotHTTP) or str(error).startswith("peer closed"):
        return f"its response is not valid HTTP: {_excerpt(str(error))}"
    pending: Sequence[BaseException] = [error]
    while pending:
        cause, *rest = pending
        if isinstance(cause, ssl.SSLCertVerificationError):
            return untrusted_certificate(cause.verify_message)
        if isinstance(cause, ssl.SSLError):
            return f"TLS failed: {(cause.reason or str(cause)).lower().replace('_', ' ')}"
        if isinstance(cause, OSError) and cause.errno:
            # The errors of name resolution have numbers of their own.
            text = os.strerror(cause.errno) if cause.errno > 0 else cause.strerror
            return (text or str(cause)).lower()
        more = [each for each in (cause.__cause__, cause.__context__) if each is not None]
        if isinstance(cause, BaseExceptionGroup):
            more += cause.exceptions
        pending = [*rest, *more]
    return str(error) or type(error).__name__
