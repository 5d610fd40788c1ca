"""The HTTP interface of a discovery service (nsqlookupd) for commands: blocking, with errors as failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trio_nsq.client import BrokerUnreachable, RequestRefused
from trio_nsq.client.errors import NotABroker
from trio_nsq.client.http.broker_http import BrokerHTTP
from trio_nsq.lookup.answers import Node, parse_nodes
from trio_nsq.untrusted_json import decode_json

from ..framework.errors import ExitCode, Failure
from .address_options import LOOKUPD_OPTION
from .admin_client import CONNECT_TIMEOUT_S, MAX_ANSWER_BYTES, REQUEST_TIMEOUT_S
from .connection_options import ConnectOptions
from .failures import access_refusal, lookupd_unreachable, reason_unreachable


class LookupdClient:
    """One discovery service's HTTP address: `host:port`, or a URL with `https://`.

    Raises Failure: a file for TLS cannot be used.
    """

    def __init__(self, address: str) -> None:
        self.address = address.removeprefix("http://").rstrip("/")
        connecting = ConnectOptions.of_command()
        self._http = BrokerHTTP(
            self.address,
            connecting.https_context(self.address),
            connecting.secret,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            answer_timeout_s=REQUEST_TIMEOUT_S,
            max_answer_bytes=MAX_ANSWER_BYTES,
        )

    def nodes(self) -> list[Node]:
        """Return all registered brokers with a usable address. Raises Failure."""
        try:
            return [node for node in parse_nodes(self._request("GET", "/nodes", {})) if node.is_usable]
        except ValueError:
            raise self._not_a_lookupd() from None

    def version(self) -> str:
        """Return the version. Raises Failure."""
        try:
            return str(self._json("/info")["version"])
        except (KeyError, TypeError, ValueError):
            raise self._not_a_lookupd() from None

    def topics(self) -> list[str]:
        """Return the names of all topics. Raises Failure."""
        return self._names("/topics", {}, "topics")

    def channels(self, topic: str) -> list[str]:
        """Return the names of a topic's channels. Raises Failure."""
        return self._names("/channels", {"topic": topic}, "channels")

    def post(self, path: str, params: Mapping[str, str]) -> None:
        """Make a change. Raises Failure: `LookupdRefused` if the service answered with an error."""
        self._request("POST", path, params)

    def _names(self, path: str, params: Mapping[str, str], key: str) -> list[str]:
        try:
            return [str(name) for name in self._json(path, params)[key] or []]
        except (KeyError, TypeError, ValueError):
            raise self._not_a_lookupd() from None

    def _json(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        return decode_json(self._request("GET", path, params or {}))

    def _request(self, method: str, path: str, params: Mapping[str, str]) -> bytes:
        try:
            return self._http.request(method, path, params)
        except RequestRefused as error:
            if error.text == "NOT_FOUND":  # of the path, which every nsqlookupd has
                raise self._not_a_lookupd() from error
            raise LookupdRefused(self.address, error.status, error.text) from error
        except NotABroker as error:
            raise self._not_a_lookupd() from error
        except BrokerUnreachable as error:
            raise lookupd_unreachable(self.address, reason_unreachable(error).rstrip(".")) from error

    def _not_a_lookupd(self) -> Failure:
        return Failure(
            f"{self.address} is not the HTTP port of an nsqlookupd. Is it a broker's, or the TCP port? "
            f"See {LOOKUPD_OPTION}.",
            ExitCode.UNREACHABLE,
        )


class LookupdRefused(Failure):
    """The service answered with an error.

    Attributes:
        text: NSQ's code, such as `TOPIC_NOT_FOUND`, or another text.
    """

    def __init__(self, address: str, status: int, text: str) -> None:
        server = f"The nsqlookupd at {address}"
        super().__init__(
            access_refusal(server, text) or f"{server} refused with HTTP status {status}: {text}."
        )
        self.text = text
