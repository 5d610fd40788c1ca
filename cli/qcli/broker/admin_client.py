"""The HTTP interface of a broker, for commands: `trio_nsq`'s blocking client, with its errors as failures."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trio_nsq.client import errors
from trio_nsq.client.http.broker_http import BrokerHTTP
from trio_nsq.untrusted_json import decode_json

from ..framework.errors import (
    Failure,
    https_required,
    hung_up,
    not_a_broker,
    reason_of,
    tls_failure,
    unreachable,
)
from ..framework.params import is_unix_path, without_scheme
from .address_options import HTTP_OPTION
from .connection_options import ConnectOptions, refuse_plain_http

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


class AdminClient:
    """One broker's HTTP address.

    Args:
        address: `host:port`, `https://host:port`, or the path of a unix socket.
        connecting: How; None: as the command that runs was told.

    Raises:
        click.UsageError: The command was told to use TLS, and this is no address for it.
        Failure: A file for TLS cannot be used.
    """

    def __init__(self, address: str, connecting: ConnectOptions | None = None) -> None:
        if connecting is None:
            refuse_plain_http(address)
            connecting = ConnectOptions.of_command()
        self.address = address
        tls = connecting.https_context(address)
        self._encrypted = tls is not None
        self._http = BrokerHTTP(
            address, tls, connect_timeout_s=CONNECT_TIMEOUT_S, answer_timeout_s=REQUEST_TIMEOUT_S
        )

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
            stats = decode_json(self.get("/stats", params))
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
            told = decode_json(self.get("/info", {}))["tcp_port"]
        except (ValueError, KeyError, TypeError):
            return False
        return bool(told == int(tcp_port))

    def get(self, path: str, params: Mapping[str, str]) -> bytes:
        """Ask the broker something. Raises as `post`."""
        return self.request("GET", path, params)

    def post(self, path: str, params: Mapping[str, str]) -> bytes:
        """Tell the broker to do something.

        Raises:
            Refused: It answered with an error.
            Failure: No broker answers, or what answers is none.
        """
        return self.request("POST", path, params)

    def decoded(self, answer: bytes) -> Any:
        """The JSON of an answer. Raises Failure if it is none, and so not a broker's."""
        try:
            return decode_json(answer)
        except ValueError as error:
            raise self._no_broker() from error

    def request(self, method: str, path: str, params: Mapping[str, str], body: bytes | None = None) -> bytes:
        """Any request, and the answer's body. Raises as `post`."""
        with self._failures():
            return self._http.request(method, path, params, body)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn the errors of the client into failures."""
        try:
            yield
        except errors.RequestRefused as error:
            if error.text == "TLS_REQUIRED":
                raise https_required(self.address, HTTP_OPTION) from error
            raise Refused(self.address, error.status, error.text) from error
        except errors.NotABroker as error:
            if error.status in (0, http.client.NOT_FOUND):  # a broker would say what it did not find
                raise self._no_broker() from error
            raise Refused(self.address, error.status, error.text) from error
        except errors.BrokerUnreachable as error:
            if failure := tls_failure(self.address, error):
                raise failure from error
            reason = error.reason
            if error.cause is not None and not isinstance(error.cause, TimeoutError):
                reason = reason_of(error.cause)
            plain_tcp = not (self._encrypted or is_unix_path(self.address))
            if plain_tcp and isinstance(error.cause, ConnectionResetError):
                reason = hung_up(self.address)
            raise unreachable(self.address, HTTP_OPTION, reason) from error

    def _no_broker(self) -> Failure:
        return not_a_broker(self.address, HTTP_OPTION, "HTTP", "TCP")
