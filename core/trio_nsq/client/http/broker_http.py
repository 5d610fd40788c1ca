"""A blocking client of a broker's HTTP API, for qcli commands, Spark's driver and its tasks.

It uses `http.client`: Spark's workers may have only the standard library, and importing trio and httpcore would delay
the start of a command by 0.1 s.
"""

import http.client
import io
import os
import select
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlencode

from trio_nsq.text.arguments import check_type

from ...access.secret import NO_SECRET, Secret
from ...api.request import Request, message_of
from ...protocol.address import is_unix_path, parse_address
from ...protocol.limits import MIB
from ...protocol.untrusted_json import decode_json
from ...text.wording import untrusted_certificate
from ..connection.tls import TLSFiles
from ..errors import WRONG_PORT, BrokerUnreachable, NotABroker, RequestRefused

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
"""Long, because the broker's disk may be slow."""
MAX_ANSWER_BYTES = 256 * MIB
"""Enough for the statistics of 100,000 channels with their consumers."""
_MAX_REFUSAL_BYTES = 64 * 1024
_HTTPS = "https://"
_NO_PARAMETERS: Mapping[str, str] = {}
_T = TypeVar("_T")


class _Kept(NamedTuple):
    """A connection for the next request."""

    connection: http.client.HTTPConnection
    since_s: float
    process: int


class BrokerHTTP:
    """Makes requests to one broker. A request that starts while another one streams uses a new connection.

    Threads may share it. After a fork, the child opens its own connection.

    Args:
        address: `host:port`, `https://host:port`, or the path of a unix socket.
        tls: For https: files or a context. None: the system's CAs.
        secret: For a broker that requires authentication; sent with every request.
        connect_timeout_s: The timeout for the TCP connection, and for each step of the TLS handshake.
        answer_timeout_s: How long the broker may send nothing; None: `ANSWER_TIMEOUT_S`.
        keep_alive_s: Reuse a connection that was idle for less than this; 0: one connection per request.
        max_answer_bytes: The largest answer, headers included. It must also be complete within `answer_timeout_s`, with
            a second more per MiB, up to `ANSWER_TIMEOUT_S`.

    Raises:
        TLSFilesError: A file of `tls` cannot be used.
        TypeError: `address` is not a string, or `tls` is something else.
        ValueError: The address has no port.
    """

    def __init__(
        self,
        address: str,
        tls: TLSFiles | ssl.SSLContext | None = None,
        secret: Secret = NO_SECRET,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        answer_timeout_s: float | None = None,
        keep_alive_s: float = 0.0,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        check_type("the address of the broker", address, str)
        check_type("tls", tls, TLSFiles | ssl.SSLContext | None)
        self.address = address
        self._max_answer_bytes = max_answer_bytes
        self._connect_timeout_s = connect_timeout_s
        self._answer_timeout_s = ANSWER_TIMEOUT_S if answer_timeout_s is None else answer_timeout_s
        self._keep_alive_s = keep_alive_s
        self._tls: ssl.SSLContext | None = None
        if address.startswith(_HTTPS):  # creating a context takes as long as ten requests
            self._tls = tls if isinstance(tls, ssl.SSLContext) else (tls or TLSFiles()).context()
        self._host, self._port = "localhost", 0
        self._is_unix_socket = is_unix_path(address)
        if not self._is_unix_socket:
            self._host, self._port = parse_address(address.removeprefix(_HTTPS))
        self._secret = secret
        self._clear_address = "" if self._is_unix_socket or self._tls is not None else address
        self._kept: list[_Kept] = []  # one, or one more for each other thread that just made a request

    def close(self) -> None:
        """Close the kept connection, if any. The next request opens a new one."""
        while (kept := self._pop_kept()) is not None:
            kept.connection.close()

    def post(self, path: str, params: Mapping[str, str] = _NO_PARAMETERS, body: bytes | None = None) -> bytes:
        """Make a POST request and return the body of the answer. Raises the errors of `stream`."""
        return self.request("POST", path, params, body)

    def request(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] = _NO_PARAMETERS,
        body: bytes | None = None,
    ) -> bytes:
        """Make a request and return the body of the answer. Raises the errors of `stream`."""
        with self.stream(method, path, params, body) as answer:
            return answer.read()

    def ask(self, request: Request[_T]) -> _T:
        """Make a request and return its answer. Raises the errors of `stream`; NotABroker if it is none."""
        data = self.request(request.method, request.path, request.params, request.body)
        try:
            return request.read(data, decode_json)
        except ValueError as exc:
            raise NotABroker(self.address) from exc

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] = _NO_PARAMETERS,
        body: bytes | None = None,
        *,
        is_endless: bool = False,
    ) -> Iterator[http.client.HTTPResponse]:
        """Make a request with the query `params`; the block reads the successful answer.

        Args:
            is_endless: The body of a success has no limit in size and total time. The block must read it piece by
                piece.

        Raises:
            SecretFileError: The file of the secret cannot be used.
            BrokerUnreachable: There is no answer, or it is incomplete.
            NotABroker: The server is not a broker.
            RequestRefused: The broker answered with an error.
        """
        headers = self._secret.headers(self._clear_address)
        kept = self._take_kept()
        connection = kept or self._new_connection()
        connection.response_class = partial(  # type: ignore[assignment]  # http.client only calls it
            _LimitedAnswer, timeout_s=self._answer_timeout_s, max_bytes=self._max_answer_bytes
        )
        sent = answered = is_kept = False
        answer: _LimitedAnswer | None = None
        try:
            if connection is not kept:
                connection.connect()
                connection.sock.settimeout(self._answer_timeout_s)
            sent = True
            connection.request(method, f"{path}?{urlencode(params)}" if params else path, body, headers)
            answer = cast("_LimitedAnswer", connection.getresponse())
            if answer.status != http.client.OK:
                data = answer.read(_MAX_REFUSAL_BYTES)
                answered = True
                is_kept = self._keep(connection, answer)
                raise self._refusal(answer, data, params.get("topic", ""))
            if is_endless:
                answer.remove_limits()
            yield answer
            is_kept = self._keep(connection, answer)
        except OSError as exc:
            # `sock` is set before the TLS handshake; it is None again if the answer ends with the connection.
            reason = self._reason(exc, connected=sent or connection.sock is not None, sent=sent)
            raise BrokerUnreachable(self.address, reason, exc, unanswered=sent) from exc
        except UnicodeError as exc:  # of the resolver
            raise BrokerUnreachable(self.address, "the host name is not valid") from exc
        except http.client.IncompleteRead as exc:
            raise BrokerUnreachable(self.address, "the connection was lost", unanswered=sent) from exc
        except http.client.HTTPException as exc:
            raise NotABroker(self.address, text=WRONG_PORT, unanswered=not answered) from exc
        finally:
            if not is_kept:
                connection.close()
                if answer is not None:  # the connection does not close an answer that ends with it
                    answer.close()

    def _take_kept(self) -> http.client.HTTPConnection | None:
        """Take the kept connection, unless it was idle for too long, or the broker has closed it.

        A request on a closed connection would fail, and nobody would know whether the broker executed it.
        """
        kept = self._pop_kept()
        if kept is None:
            return None
        if not self._is_usable(kept):
            kept.connection.close()
            return None
        return kept.connection

    def _is_usable(self, kept: "_Kept") -> bool:
        return (
            kept.process == os.getpid()  # otherwise the parent uses the same socket
            and time.monotonic() - kept.since_s <= self._keep_alive_s
            and not _is_readable(kept.connection.sock)
        )

    def is_connected(self) -> bool:
        """Whether the next request uses the connection of the last one: the broker has not been restarted since."""
        kept = self._kept[-1:]
        return bool(kept) and self._is_usable(kept[0])

    def _pop_kept(self) -> "_Kept | None":
        """Take a kept connection; each goes to one thread only."""
        try:
            return self._kept.pop()
        except IndexError:
            return None

    def _new_connection(self) -> http.client.HTTPConnection:
        """Make a connection without opening it."""
        if self._is_unix_socket:
            return _UnixConnection(self.address, self._connect_timeout_s)
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._connect_timeout_s)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=self._connect_timeout_s, context=self._tls
        )

    def _keep(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> bool:
        """Keep the connection for the next request, if the answer was read completely; return whether it is kept."""
        if not self._keep_alive_s or not answer.isclosed() or answer.will_close:
            return False
        self.close()
        self._kept.append(_Kept(connection, time.monotonic(), os.getpid()))
        return True

    def _reason(self, error: OSError, *, connected: bool, sent: bool) -> str:
        if isinstance(error, _AnswerTooSlow):
            return f"connected, but no answer within {self._answer_timeout_s:g} s: only a part of it arrived"
        if isinstance(error, TimeoutError):
            timeout_s = self._answer_timeout_s if sent else self._connect_timeout_s
            return f"connected, but no answer within {timeout_s:g} s" if connected else "connecting timed out"
        if isinstance(
            error, ConnectionResetError | BrokenPipeError
        ):  # includes http.client.RemoteDisconnected
            return "the connection was lost"
        if isinstance(error, ssl.SSLCertVerificationError):
            return untrusted_certificate(error.verify_message)
        return error.strerror or str(error)

    def _refusal(
        self, answer: http.client.HTTPResponse, data: bytes, topic: str
    ) -> RequestRefused | NotABroker:
        if not (message := message_of(data)):
            text = " ".join(data.decode("utf-8", "replace").split())[:200] or answer.reason
            # A proxy's error, such as 504, may follow a request that the broker has executed.
            passed_on = answer.status >= http.client.INTERNAL_SERVER_ERROR
            return NotABroker(self.address, answer.status, text, unanswered=passed_on)
        return RequestRefused(self.address, topic, answer.status, message)


def _is_readable(sock: socket.socket) -> bool:
    """Whether the peer has closed an idle connection, or has sent what nobody asked for."""
    ready = select.poll()
    ready.register(sock, select.POLLIN)
    return bool(ready.poll(0))


class _AnswerTooSlow(TimeoutError):
    """The answer is not complete in time."""


class _AnswerTooLarge(OSError):
    """The answer is larger than allowed."""


class _LimitedAnswer(http.client.HTTPResponse):
    """An answer, headers included, that is limited in size and total time."""

    def __init__(
        self, sock: socket.socket, *args: Any, timeout_s: float, max_bytes: int, **kwargs: Any
    ) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp: io.BufferedReader
        self._stream = _LimitedStream(self.fp.detach(), sock, timeout_s, max_bytes)
        self.fp = io.BufferedReader(self._stream)

    def remove_limits(self) -> None:
        """Limit only how long nothing arrives from now on."""
        self._stream.remove_limits()

    def read(self, amt: int | None = None) -> bytes:
        """Read as `HTTPResponse` does, but allocate memory for what arrives, not for the announced length."""
        if amt is not None:
            return self._read(amt)
        body = b"".join(iter(lambda: self._read(MIB), b""))
        if self.length:  # of the announced length, this is missing
            raise http.client.IncompleteRead(body, self.length)
        return body

    def _read(self, amt: int) -> bytes:
        try:
            return super().read(amt)
        except ValueError as exc:  # http.client takes chunks of negative lengths
            raise http.client.HTTPException(str(exc)) from exc


class _LimitedStream(io.RawIOBase):
    """The bytes of one answer from a socket, limited in size and total time.

    Raises:
        _AnswerTooSlow, _AnswerTooLarge: A limit is exceeded.
    """

    def __init__(self, stream: io.RawIOBase, sock: socket.socket, timeout_s: float, max_bytes: int) -> None:
        self._stream = stream
        self._sock = sock
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._received = 0
        self._began_s = time.monotonic()
        self._is_limited = True

    def remove_limits(self) -> None:
        self._is_limited = False
        self._sock.settimeout(self._timeout_s)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if not self._is_limited:
            return self._stream.readinto(buffer)
        total_s = max(min(self._timeout_s + self._received / MIB, ANSWER_TIMEOUT_S), self._timeout_s)
        left_s = self._began_s + total_s - time.monotonic()
        if left_s <= 0:
            raise _AnswerTooSlow
        self._sock.settimeout(min(left_s, self._timeout_s))
        count: int | None = self._stream.readinto(buffer)
        self._received += count or 0
        if self._received > self._max_bytes:
            raise _AnswerTooLarge(f"its answer has more than {self._max_bytes // MIB} MiB")
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
