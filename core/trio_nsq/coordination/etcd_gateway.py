"""Requests to etcd's JSON gateway (v3.4 or newer), to several endpoints in turn.

Each request ends in time, whatever the endpoint does, and an endpoint that has failed is asked last the next time.
"""

import json
import random
import ssl
import threading
import time
from base64 import b64encode
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import httpcore

from ..access.secret import NO_SECRET, Secret, warn_in_clear
from ..event_loop.fan_out import start
from ..event_loop.retries import Delays
from ..protocol.address import format_address
from ..protocol.untrusted_json import decode_json
from ..storage import Patience
from .interface import CoordinatorError

_MAX_ANSWER_BYTES = 1 << 20
_KEEP_ALIVE_S = 30.0
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0
_UNKNOWN, _DEADLINE, _NOT_FOUND, _INTERNAL, _UNAVAILABLE, _UNAUTHENTICATED = 2, 4, 5, 13, 14, 16
_TRANSIENT = frozenset({_UNKNOWN, _DEADLINE, _INTERNAL, _UNAVAILABLE})
"""Codes of gRPC with which a server answers that has no leader, or is too slow."""
_OLD_TOKENS = ("invalid auth token", "revision of auth store is old", "user name is empty")


class NotFound(CoordinatorError):
    """The lease of a request does not exist."""


class _NoAnswer(Exception):
    """An endpoint did not answer, or could not execute a request now. Perhaps it was executed."""


class _OldToken(Exception):
    """The token of the user has expired."""


class EtcdGateway:
    """Makes requests to the members of one etcd.

    Args:
        endpoints: Their hosts and ports.
        tls: Settings for https; None: http.
        user: The name of the user; empty: etcd has no users.
        password: Its password; read for each authentication.
        patience: The time limits.
    """

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        tls: ssl.SSLContext | None = None,
        user: str = "",
        password: Secret = NO_SECRET,
        *,
        patience: Patience,
    ) -> None:
        self._endpoints = deque(endpoints)
        self._scheme = b"http" if tls is None else b"https"
        self._user = user
        self._password = password
        self._attempt_s, self._deadline_s = patience
        self._token = ""
        self._is_closed = False
        self._in_progress = 0
        self._lock = threading.Lock()
        self._pool = httpcore.ConnectionPool(tls, max_connections=None, keepalive_expiry=_KEEP_ALIVE_S)
        self._shown = ", ".join(format_address(*endpoint) for endpoint in endpoints)

    def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make a request, and repeat it until an endpoint answers.

        Raises:
            NotFound: The lease does not exist.
            CoordinatorError: No endpoint answers in time, or etcd refuses the request.
        """
        end_s = time.monotonic() + self._deadline_s
        pauses = Delays(_MIN_PAUSE_S, _MAX_PAUSE_S, random.random)
        while True:
            for _ in range(len(self._endpoints)):
                try:
                    return self._ask(path, body)
                except _NoAnswer as exc:
                    reason = f"{self._place()}: {exc}"
                    self._endpoints.rotate(-1)
                if time.monotonic() >= end_s:
                    break
            pause_s = pauses.next_s()
            if time.monotonic() + pause_s >= end_s:
                raise CoordinatorError(
                    f"etcd ({self._shown}) did not answer within {self._deadline_s:g} s; {reason}"
                )
            threading.Event().wait(pause_s)

    def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the first endpoint, with a new token if necessary. Raises _NoAnswer, CoordinatorError."""
        for _ in range(2):
            token = self._token
            if self._user and not token:
                token = self._token = self._authenticate()
            try:
                return self._answer(path, body, token)
            except _OldToken as exc:
                self._token = ""
                reason = exc
        raise CoordinatorError(f"etcd ({self._shown}) refuses its own token: {reason}")

    def _authenticate(self) -> str:
        if self._scheme == b"http":
            warn_in_clear(self._place())
        body = {"name": self._user, "password": self._password.read()}
        try:
            return str(self._answer("/v3/auth/authenticate", body, "")["token"])
        except _OldToken as exc:  # the same words mean here that the request is wrong
            raise CoordinatorError(f"etcd ({self._shown}) refuses the user {self._user}: {exc}") from exc
        except KeyError:
            raise CoordinatorError(f"{self._place()} does not answer as etcd does") from None

    def _answer(self, path: str, body: Mapping[str, Any], token: str) -> dict[str, Any]:
        """Ask the first endpoint in another thread: a server that sends slowly must not keep this one."""
        endpoint = self._endpoints[0]

        def ask() -> tuple[int, bytes]:
            with self._opened(endpoint, path, body, token, _limits(self._attempt_s)) as answer:
                return answer.status, b"".join(_limited(answer.iter_stream()))

        try:
            status, data = start(ask).result(self._attempt_s + _MIN_PAUSE_S)
        except TimeoutError:
            raise _NoAnswer(f"no answer within {self._attempt_s:g} s") from None
        return self._decoded(status, data)

    @contextmanager
    def _opened(
        self,
        endpoint: tuple[str, int],
        path: str,
        body: Mapping[str, Any],
        token: str,
        limits: dict[str, float],
    ) -> Iterator[httpcore.Response]:
        """Make a request, and give its answer to the block. Raises _NoAnswer, also for errors in the block."""
        data = json.dumps(body).encode()
        headers = [
            (b"Host", format_address(*endpoint).encode()),
            (b"Content-Type", b"application/json"),
            (b"Content-Length", str(len(data)).encode()),
        ]
        if token:
            headers.append((b"Authorization", token.encode()))
        self._count(1)
        try:
            url = httpcore.URL(
                scheme=self._scheme, host=endpoint[0].encode(), port=endpoint[1], target=path.encode()
            )
            request = httpcore.Request(
                "POST", url, headers=headers, content=data, extensions={"timeout": limits}
            )
            with closing(self._pool.handle_request(request)) as answer:
                yield answer
        except httpcore.TimeoutException as exc:
            raise _NoAnswer(f"no answer within {limits['read']:g} s") from exc
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as exc:
            raise _NoAnswer(str(exc) or type(exc).__name__) from exc
        except (httpcore.UnsupportedProtocol, UnicodeError) as exc:
            raise CoordinatorError(f"the address {endpoint[0]}:{endpoint[1]} is not valid: {exc}") from exc
        finally:
            self._count(-1)

    def _decoded(self, status: int, data: bytes) -> dict[str, Any]:
        """Return a successful answer. Raises _NoAnswer, _OldToken, NotFound, CoordinatorError."""
        try:
            fields = decode_json(data)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            if status >= 500:
                raise _NoAnswer(f"HTTP {status}")
            raise CoordinatorError(
                f"{self._place()} is not the HTTP gateway of etcd 3.4 or newer: it answers HTTP {status}"
            )
        if isinstance(fields.get("error"), dict):  # of a stream
            error = fields["error"]
            status, fields = 500, {"code": error.get("grpc_code"), "error": error.get("message")}
        if status == 200:
            return fields
        text, code = (
            str(fields.get("error") or fields.get("message") or f"HTTP {status}")[:300],
            fields.get("code"),
        )
        if code == _UNAUTHENTICATED or any(words in text for words in _OLD_TOKENS):
            raise _OldToken(text)
        if code == _NOT_FOUND:
            raise NotFound(f"etcd ({self._shown}): {text}")
        if code in _TRANSIENT:
            raise _NoAnswer(text)
        raise CoordinatorError(f"etcd ({self._shown}) refuses the request: {text}")

    def watch(self, body: Mapping[str, Any], timeout_s: float, woken: threading.Event) -> None:
        """Set an event at the first change of what is watched, or later if the watch fails. Returns at once.

        Args:
            body: The request for `/v3/watch`.
            timeout_s: The watch may end after this time.
        """
        endpoint, token = self._endpoints[0], self._token
        limits = _limits(self._attempt_s)

        def watch() -> None:
            try:
                with self._opened(endpoint, "/v3/watch", body, token, limits) as answer:
                    limits["read"] = timeout_s  # etcd has answered: the next message is a change
                    lines = _lines(answer.iter_stream())
                    if not _is_created(next(lines, b"")) or not next(lines, b""):
                        raise _NoAnswer("the watch has ended")
            except _NoAnswer:
                woken.wait(_MAX_PAUSE_S)  # the caller would watch again at once
            finally:
                woken.set()

        start(watch)

    def close(self) -> None:
        """Close all connections, when the last request has ended: until then, httpcore would not close all of them."""
        self._is_closed = True
        self._count(0)

    def _count(self, more: int) -> None:
        """Count the requests in progress."""
        with self._lock:
            self._in_progress += more
            is_last = self._is_closed and not self._in_progress
        if is_last:
            self._pool.close()

    def _place(self) -> str:
        return format_address(*self._endpoints[0])


def _limits(timeout_s: float) -> dict[str, float]:
    return dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)


def _is_created(line: bytes) -> bool:
    """Whether etcd accepts a watch."""
    try:
        result = decode_json(line)["result"]
        return result.get("created") is True and not result.get("canceled")
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


def _limited(pieces: Iterator[bytes]) -> Iterator[bytes]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > _MAX_ANSWER_BYTES:
            raise OSError("the answer is too long")
        yield piece


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream as they arrive."""
    kept = b""
    for piece in pieces:
        *lines, kept = (kept + piece).split(b"\n")
        if len(kept) > _MAX_ANSWER_BYTES:
            return
        yield from lines


def encoded(data: bytes) -> str:
    """Return bytes as etcd's JSON has them."""
    return b64encode(data).decode()
