"""A blocking client of a broker's HTTP API, for qcli commands, Spark's driver and its tasks.

It uses `http.client`: Spark's workers may have only the standard library, and importing httpx would delay the start of
a command by 0.2 s.
"""

import http.client
import io
import select
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlencode

from ...protocol.limits import MIB
from ...secret import NO_SECRET, Secret
from ...untrusted_json import decode_json
from ..connection.tls import TLSFiles
from ..errors import WRONG_PORT, BrokerUnreachable, NotABroker, RequestRefused

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
"""Long, because the broker's disk may be slow."""
_HTTPS = "https://"
_NO_PARAMETERS: Mapping[str, str] = {}


class BrokerHTTP:
    """Makes requests to one broker. A request that starts while another one streams uses a new connection.

    Args:
        address: `host:port`, `https://host:port`, or the path of a unix socket.
        tls: For https: files or a context. None: the system's CAs.
        secret: For a broker that requires authentication; sent with every request.
        connect_timeout_s: The timeout for the TCP connection, and for each step of the TLS handshake.
        answer_timeout_s: How long the broker may send nothing; None: `ANSWER_TIMEOUT_S`.
        keep_alive_s: Reuse a connection that was idle for less than this; 0: one connection per request.
        max_answer_bytes: The largest answer, headers included. It must also be complete within `answer_timeout_s`, with
            a second more per MiB, up to `ANSWER_TIMEOUT_S`. None: no limit in size and total time.

    Raises:
        TLSFilesError: A file of `tls` cannot be used.
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
        max_answer_bytes: int | None = None,
    ) -> None:
        self.address = address
        self._max_answer_bytes = max_answer_bytes
        self._connect_timeout_s = connect_timeout_s
        self._answer_timeout_s = ANSWER_TIMEOUT_S if answer_timeout_s is None else answer_timeout_s
        self._keep_alive_s = keep_alive_s
        self._tls: ssl.SSLContext | None = None
        if address.startswith(_HTTPS):  # creating a context takes as long as ten requests
            self._tls = tls if isinstance(tls, ssl.SSLContext) else (tls or TLSFiles()).context()
        self._host, self._port = "localhost", 0
        self._is_unix_socket = "/" in address.removeprefix(_HTTPS)
        if not self._is_unix_socket:
            host, _, port = address.removeprefix(_HTTPS).rpartition(":")
            if not port.isdecimal():
                raise ValueError(f"{address!r} has no port; write it as host:port")
            self._host, self._port = host.strip("[]"), int(port)
        self._secret = secret
        self._clear_address = "" if self._is_unix_socket or self._tls is not None else address
        self._idle: http.client.HTTPConnection | None = None
        self._idle_since_s = 0.0

    def close(self) -> None:
        """Close the kept connection, if any. The next request opens a new one."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None

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

    def request_json(self, method: str, path: str, params: Mapping[str, str] = _NO_PARAMETERS) -> Any:
        """Make a request and decode the answer. Raises the errors of `stream`; NotABroker if it is not JSON."""
        data = self.request(method, path, params)
        try:
            return decode_json(data)
        except ValueError as exc:
            raise NotABroker(self.address) from exc

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] = _NO_PARAMETERS,
        body: bytes | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Make a request with the query `params`; the block reads the successful answer.

        Raises:
            SecretFileError: The file of the secret cannot be used.
            BrokerUnreachable: There is no answer, or it is incomplete.
            NotABroker: The server is not a broker.
            RequestRefused: The broker answered with an error.
        """
        headers = self._secret.headers(self._clear_address)
        kept = self._take_kept()
        connection = kept or self._new_connection()
        if self._max_answer_bytes is not None:
            connection.response_class = partial(  # type: ignore[assignment]  # http.client only calls it
                _LimitedAnswer, timeout_s=self._answer_timeout_s, max_bytes=self._max_answer_bytes
            )
        sent = answered = False
        answer: http.client.HTTPResponse | None = None
        try:
            if connection is not kept:
                connection.connect()
                connection.sock.settimeout(self._answer_timeout_s)
            sent = True
            connection.request(method, f"{path}?{urlencode(params)}" if params else path, body, headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                data = answer.read()
                answered = True
                self._keep(connection, answer)
                raise self._refusal(answer, data, params.get("topic", ""))
            yield answer
            self._keep(connection, answer)
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
            if connection is not self._idle:
                connection.close()
                if answer is not None:  # the connection does not close an answer that ends with it
                    answer.close()

    def _take_kept(self) -> http.client.HTTPConnection | None:
        """Take the kept connection, unless it was idle for too long, or the broker has closed it.

        A request on a closed connection would fail, and nobody would know whether the broker executed it.
        """
        if self._idle is not None and (
            time.monotonic() - self._idle_since_s > self._keep_alive_s or _is_readable(self._idle.sock)
        ):
            self.close()
        connection, self._idle = self._idle, None
        return connection

    def _new_connection(self) -> http.client.HTTPConnection:
        """Make a connection without opening it."""
        if self._is_unix_socket:
            return _UnixConnection(self.address, self._connect_timeout_s)
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._connect_timeout_s)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=self._connect_timeout_s, context=self._tls
        )

    def _keep(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> None:
        """Keep the connection for the next request, if the answer was read completely."""
        if self._keep_alive_s and answer.isclosed() and not answer.will_close:
            self.close()
            self._idle, self._idle_since_s = connection, time.monotonic()

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
        return error.strerror or str(error)

    def _refusal(
        self, answer: http.client.HTTPResponse, data: bytes, topic: str
    ) -> RequestRefused | NotABroker:
        try:
            message = str(decode_json(data)["message"])
        except (ValueError, KeyError, TypeError):  # a broker's error has a message
            text = " ".join(data.decode("utf-8", "replace").split())[:200] or answer.reason
            return NotABroker(self.address, answer.status, text)
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
        self.fp = io.BufferedReader(_LimitedStream(self.fp.detach(), sock, timeout_s, max_bytes))

    def read(self, amt: int | None = None) -> bytes:
        """Read as `HTTPResponse` does, but allocate memory for what arrives, not for the announced length."""
        if amt is not None:
            return super().read(amt)
        body = b"".join(iter(lambda: super(_LimitedAnswer, self).read(MIB), b""))
        if self.length:  # of the announced length, this is missing
            raise http.client.IncompleteRead(body, self.length)
        return body


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

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
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
