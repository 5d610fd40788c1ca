"""The broker's HTTP interface, as `stat`, `topic` and `channel` need it."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from .errors import Failure, reason_of, unreachable
from .options import HTTP_OPTION

CONNECT_TIMEOUT_S = 2.0
REQUEST_TIMEOUT_S = 5.0
"""Both as NSQ's tools have them."""


class Refused(Failure):
    """The broker answered, but not with success.

    Args:
        text: NSQ's code, such as `TOPIC_NOT_FOUND`.
    """

    def __init__(self, address: str, status: int, text: str) -> None:
        super().__init__(f"The broker at {address} refused with HTTP status {status}: {text}.")
        self.text = text


class BrokerHTTP:
    """A connection to one broker's HTTP address; a context manager.

    Args:
        address: `host:port`.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        # Brokers are neighbours: a proxy that the environment names for the web is not meant for them.
        self._client = httpx.Client(base_url=f"http://{address}", timeout=timeout, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def stats(self, topic: str | None = None, channel: str | None = None) -> dict[str, Any]:
        """The answer of `/stats`, without clients and memory.

        Args:
            topic: Of this topic only, or of all.
            channel: Of the channels of this name only, or of all.

        Raises:
            Failure: With the code for an unreachable broker, or because it answered with something else.
        """
        params = {"format": "json", "include_clients": "false", "include_mem": "false"}
        params |= {"topic": topic} if topic is not None else {}
        params |= {"channel": channel} if channel is not None else {}
        answer = self._request("GET", "/stats", params)
        try:
            stats = answer.json()
        except ValueError:
            stats = None
        if not isinstance(stats, dict) or "topics" not in stats:
            raise Failure(f"What answers at {self.address} is not a broker: it sent no statistics.")
        stats["topics"] = stats["topics"] or []  # null when the filter matches nothing
        return stats

    def post(self, path: str, params: Mapping[str, str]) -> None:
        """Tell the broker to do something.

        Raises:
            Refused: It answered with an error.
            Failure: With the code for an unreachable broker.
        """
        self._request("POST", path, params)

    def _request(self, method: str, path: str, params: Mapping[str, str]) -> httpx.Response:
        try:
            answer = self._client.request(method, path, params=dict(params))
        except (httpx.TimeoutException, httpx.TransportError) as error:
            if isinstance(error, httpx.ProtocolError):
                raise Failure(
                    f"What answers at {self.address} does not speak HTTP; see {HTTP_OPTION}."
                ) from error
            reason = "it took too long" if isinstance(error, httpx.TimeoutException) else reason_of(error)
            raise unreachable(self.address, HTTP_OPTION, reason) from error
        if answer.is_success:
            return answer
        try:
            text = str(answer.json()["message"])
        except (ValueError, KeyError, TypeError):
            text = answer.text.strip()[:200] or answer.reason_phrase
        raise Refused(self.address, answer.status_code, text)
