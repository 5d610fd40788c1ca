"""The HTTP requests of a drain, to the broker that drains and to the one that gets its messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trio_nsq.client import BrokerUnreachable, RequestRefused
from trio_nsq.client.http.broker_http import BrokerHTTP
from trio_nsq.secret import Secret
from trio_nsq.untrusted_json import decode_json

from ...broker.admin_client import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S
from ...broker.connection_options import ConnectOptions, refuse_plain_http
from ...broker.failures import http_failure, not_a_broker
from ...broker.stats_check import check_stats
from ...framework.errors import Failure

_ANSWER_TIMEOUT_S = 30.0
"""Long, because a target may wait for its disk."""
_KEEP_ALIVE_S = 4.0
_MAX_DIGITS = 20
Error = RequestRefused | BrokerUnreachable


@dataclass(frozen=True, slots=True)
class Batch:
    """The next messages of a stream.

    Attributes:
        through: The last sequence; None: the stream has ended.
    """

    body: bytes
    through: int | None
    messages: int
    damaged: int
    expired: int


class DrainClient:
    """Makes requests to one broker; raises RequestRefused and BrokerUnreachable.

    Args:
        secret: Instead of the one of the connection options.

    Raises:
        click.UsageError: The command line asks for TLS, and the address is not https.
        Failure: A file for TLS or the secret cannot be used.
    """

    def __init__(self, address: str, secret: Secret | None = None) -> None:
        refuse_plain_http(address)
        connecting = ConnectOptions.of_command()
        self.address = address
        tls, secret = connecting.https_context(address), secret or connecting.secret
        self._http = BrokerHTTP(
            address,
            tls,
            secret,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            answer_timeout_s=_ANSWER_TIMEOUT_S,
            keep_alive_s=_KEEP_ALIVE_S,
        )
        self._quick_http = BrokerHTTP(
            address, tls, secret, connect_timeout_s=CONNECT_TIMEOUT_S, answer_timeout_s=REQUEST_TIMEOUT_S
        )

    def close(self) -> None:
        """Close the kept connection."""
        self._http.close()

    def call(
        self, method: str, path: str, params: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> bytes:
        """Make a request, and return the body of the answer."""
        return self._http.request(method, path, params or {}, body)

    def json(
        self, method: str, path: str, params: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> Any:
        """As `call`, for an answer in JSON. Raises Failure: it is not JSON, and so not from a broker."""
        try:
            return decode_json(self.call(method, path, params, body))
        except ValueError as error:
            raise not_a_broker(self.address) from error

    def stats(self, **params: str) -> dict[str, Any]:
        """Return `/stats`. Raises Failure: it is not from a broker."""
        usual = {"format": "json", "include_mem": "false", "include_clients": "false"}
        stats = self.json("GET", "/stats", usual | params)
        try:
            return check_stats(stats)
        except ValueError as error:
            raise not_a_broker(self.address) from error

    def info(self) -> dict[str, Any]:
        """Return `/info`, which needs no disk, so that a broker that hangs is found soon.

        Raises Failure: it is not from a broker.
        """
        try:
            info = decode_json(self._quick_http.request("GET", "/info"))
        except ValueError as error:
            raise not_a_broker(self.address) from error
        if not isinstance(info, dict):
            raise not_a_broker(self.address)
        return info

    # ------------------------------------------------------------------ at the source

    def set_draining(self, draining: bool) -> None:
        """Switch the drain mode on or off."""
        self.call("PUT", "/config/draining", body=b"true" if draining else b"false")

    def move_of(self, topic: str) -> dict[str, Any] | None:
        """Return the status of a topic's move; None if there is none."""
        status = self.json("GET", "/topic/move", {"topic": topic})
        if isinstance(status, dict) and status.get("move", "") is None:
            return None
        return self._checked_status(status)

    def begin_move(self, topic: str, to: str) -> dict[str, Any]:
        """Begin or continue a move, and return its status."""
        return self._checked_status(self.json("POST", "/topic/move/begin", {"topic": topic, "to": to}))

    def _checked_status(self, status: Any) -> dict[str, Any]:
        """Return the status of a move. Raises Failure: it is not from a broker."""
        if not (_has(status, {"move": str, "to": str, "began_ns": int, "streams": list})):
            raise not_a_broker(self.address)
        for stream in status["streams"]:
            if not _has(stream, {"producer": str, "begun": bool, "left": int}):
                raise not_a_broker(self.address)
            channel, moved = stream.get("channel"), stream.get("moved")
            if not isinstance(channel, str | None) or not isinstance(moved, int | None):
                raise not_a_broker(self.address)
            if channel is not None and not _has(stream, {"withdrawn": int, "dead_letter_topic": str}):
                raise not_a_broker(self.address)
        found: dict[str, Any] = status
        return found

    def next(self, topic: str, move: str, channel: str | None, moved: int | None, max_bytes: int) -> Batch:
        """Confirm the messages up to `moved`, and return the next ones of a stream."""
        params = {"topic": topic, "move": move, "max_bytes": str(max_bytes)}
        params |= {"channel": channel} if channel is not None else {}
        params |= {"moved": str(moved)} if moved is not None else {}
        with self._http.stream("POST", "/topic/move/next", params) as answer:
            body = answer.read()
            through = answer.headers.get("NSQ-Move-Through")
            counts = [
                self._number(answer.headers.get(f"NSQ-Move-{name}", "0"))
                for name in ("Messages", "Damaged", "Expired")
            ]
        return Batch(body, self._number(through) if through is not None else None, *counts)

    def _number(self, text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < _MAX_DIGITS):
            raise not_a_broker(self.address)
        return int(text)

    # ------------------------------------------------------------------ at the target

    def store(self, topic: str, producer: str, body: bytes = b"", *, close: bool = False) -> int | None:
        """Store a batch, and return how far the stream is stored; None: no message of it is.

        With `close`, the target refuses further batches of the stream.
        """
        params = {"topic": topic, "producer": producer} | ({"close": "true"} if close else {})
        answer = self.json("POST", "/topic/move/store", params, body)
        number = answer.get("number", "") if isinstance(answer, dict) else ""
        if number is not None and (type(number) is not int or number < 0):
            raise not_a_broker(self.address)
        return number


def _has(value: Any, kinds: Mapping[str, type]) -> bool:
    """Whether a JSON value is an object with values of these types."""
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in kinds.items())


def code_of(error: Error) -> str:
    """Return the code of a refusal; empty for other errors."""
    return error.text.partition(":")[0] if isinstance(error, RequestRefused) else ""


def failure_of(error: Error) -> Failure:
    """Return the failure for an error. The texts of refusals to move are for the user."""
    if isinstance(error, RequestRefused) and error.status == 409:
        return Failure(f"{error.text.partition(': ')[2] or error.text}.")
    return http_failure(error)
