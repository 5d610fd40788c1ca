"""The broker's HTTP interface, as `stat`, `topic`, `channel` and completion need it; over TCP, TLS or a unix socket.

With the standard library's client: one request after the other is all there is to do, and a command that has to
import more than that is three times as slow to start.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from trio_nsq.untrusted_json import decode_json

from ..framework.errors import (
    NO_ANSWER,
    Failure,
    hung_up,
    no_broker,
    no_tls,
    reason_of,
    unreachable,
    wants_https,
)
from ..framework.params import is_unix_path, without_scheme
from .address_options import HTTP_OPTION
from .connection_options import Connecting, refuse_plain_http

CONNECT_TIMEOUT_S = 2.0
REQUEST_TIMEOUT_S = 5.0
"""Both as NSQ's tools have them."""
_LOCAL_HOSTS = {"localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]", ""}


class Refused(Failure):
    """The broker answered, but not with success.

    Attributes:
        status: The HTTP status.
        text: NSQ's code, such as `TOPIC_NOT_FOUND`, or what else it said.
    """

    def __init__(self, address: str, status: int, text: str) -> None:
        super().__init__(f"The broker at {address} refused with HTTP status {status}: {text}.")
        self.status = status
        self.text = text


class BrokerHTTP:
    """One broker's HTTP address.

    Args:
        address: `host:port`, `https://host:port`, or the path of a unix socket.
        connecting: How; None: as the command that runs was told.

    Raises:
        click.UsageError: The command was told to use TLS, and this is no address for it.
        Failure: A file for TLS cannot be used.
    """

    def __init__(self, address: str, connecting: Connecting | None = None) -> None:
        if connecting is None:
            refuse_plain_http(address)
            connecting = Connecting.of_command()
        self.address = address
        self._tls = connecting.https_context(address)

    def _connection(self) -> http.client.HTTPConnection:
        if is_unix_path(self.address):
            return _UnixHTTPConnection(self.address, timeout=CONNECT_TIMEOUT_S)
        host, _, port = without_scheme(self.address).rpartition(":")
        host = host.strip("[]")
        if self._tls is None:
            return http.client.HTTPConnection(host, int(port), timeout=CONNECT_TIMEOUT_S)
        return http.client.HTTPSConnection(host, int(port), timeout=CONNECT_TIMEOUT_S, context=self._tls)

    def stats(self, topic: str | None = None, channel: str | None = None) -> dict[str, Any]:
        """The answer of `/stats`, without clients and memory.

        Args:
            topic: Of this topic only; None: of all.
            channel: Of the channels of this name only; None: of all.

        Raises:
            Failure: No broker answers, or what answers is none.
        """
        params = {"format": "json", "include_clients": "false", "include_mem": "false"}
        params |= {"topic": topic} if topic is not None else {}
        params |= {"channel": channel} if channel is not None else {}
        try:
            stats = decode_json(self._request("GET", "/stats", params))
        except ValueError:
            stats = None
        except Refused as error:
            if error.text == "NOT_FOUND":  # every broker has them
                raise self._no_broker() from error
            raise
        if not isinstance(stats, dict) or "topics" not in stats:
            raise self._no_broker()
        stats["topics"] = stats["topics"] or []  # null when the filter matches nothing
        return stats

    def listens_at(self, tcp_address: str) -> bool:
        """Whether this is the broker whose TCP address is this, `host:port`. Raises Failure: no broker answers."""
        tcp_host, _, tcp_port = tcp_address.rpartition(":")
        here = is_unix_path(self.address)
        http_host = "localhost" if here else without_scheme(self.address).rpartition(":")[0]
        if tcp_host != http_host and not {tcp_host, http_host} <= _LOCAL_HOSTS:
            return False
        try:
            told = decode_json(self._request("GET", "/info", {}))["tcp_port"]
        except (ValueError, KeyError, TypeError):
            return False
        return bool(told == int(tcp_port))

    def get(self, path: str, params: Mapping[str, str]) -> bytes:
        """Ask the broker something. Raises as `post`."""
        return self._request("GET", path, params)

    def post(self, path: str, params: Mapping[str, str]) -> bytes:
        """Tell the broker to do something.

        Raises:
            Refused: It answered with an error.
            Failure: No broker answers, or what answers is none.
        """
        return self._request("POST", path, params)

    def decoded(self, answer: bytes) -> Any:
        """The JSON of an answer. Raises Failure if it is none, and so not a broker's."""
        try:
            return decode_json(answer)
        except ValueError as error:
            raise self._no_broker() from error

    def request(self, method: str, path: str, params: Mapping[str, str], body: bytes | None = None) -> bytes:
        """Any request, and the answer's body. Raises as `post`."""
        return self._request(method, path, params, body)

    def _request(self, method: str, path: str, params: Mapping[str, str], body: bytes | None = None) -> bytes:
        connection = self._connection()
        try:
            connection.connect()
            connection.sock.settimeout(REQUEST_TIMEOUT_S)
            connection.request(method, f"{path}?{urlencode(params)}", body)
            answer = connection.getresponse()
            answered = answer.read()
        except OSError as error:
            if failure := no_tls(self.address, error):
                raise failure from error
            if isinstance(error, TimeoutError):
                # With TLS the socket is there before the handshake.
                connected = connection.sock is not None
                reason = f"{NO_ANSWER} within {REQUEST_TIMEOUT_S:g} s" if connected else "it took too long"
            else:
                reason = reason_of(error)
            if (
                self._tls is None
                and isinstance(error, ConnectionResetError)
                and not is_unix_path(self.address)
            ):
                reason = hung_up(self.address)
            raise unreachable(self.address, HTTP_OPTION, reason) from error
        except http.client.HTTPException as error:
            raise self._no_broker() from error
        finally:
            connection.close()
        if answer.status == 200:
            return answered
        try:
            text = str(decode_json(answered)["message"])
        except (ValueError, KeyError, TypeError):
            if answer.status == http.client.NOT_FOUND:
                raise self._no_broker() from None  # a broker would say what it did not find
            text = " ".join(answered.decode("utf-8", "replace").split())[:200] or answer.reason
        if text == "TLS_REQUIRED":
            raise wants_https(self.address, HTTP_OPTION)
        raise Refused(self.address, answer.status, text)

    def _no_broker(self) -> Failure:
        return no_broker(self.address, HTTP_OPTION, "HTTP", "TCP")


class _UnixHTTPConnection(http.client.HTTPConnection):
    """HTTP over the unix socket of this path."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
