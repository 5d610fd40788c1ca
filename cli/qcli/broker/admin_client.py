"""The HTTP interface of a broker for commands: the library's blocking client, with errors as failures."""

from collections.abc import Iterable, Mapping
from typing import Any

from trio_nsq.client import BrokerUnreachable, RequestRefused
from trio_nsq.client.http.broker_http import BrokerHTTP
from trio_nsq.untrusted_json import decode_json

from ..framework.params import is_unix_path, without_scheme
from .connection_options import ConnectOptions, refuse_plain_http
from .failures import Refused, http_failure, not_a_broker
from .stats_check import check_info, check_stats

CONNECT_TIMEOUT_S = 2.0
REQUEST_TIMEOUT_S = 5.0
"""Both values are those of NSQ's tools."""
MAX_ANSWER_BYTES = 256 << 20
"""Enough for the statistics of 100,000 channels with their consumers."""
_LOCAL_HOSTS = {"localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]", ""}


class AdminClient:
    """One broker's HTTP address.

    Args:
        address: `host:port`, `https://host:port`, or the path of a unix socket.
        connecting: The connection options; None: those of the current command.

    Raises:
        click.UsageError: The command line asks for TLS, and the address is not https.
        Failure: A file for TLS cannot be used.
    """

    def __init__(self, address: str, connecting: ConnectOptions | None = None) -> None:
        if connecting is None:
            refuse_plain_http(address)
            connecting = ConnectOptions.of_command()
        self.address = address
        self._http = BrokerHTTP(
            address,
            connecting.https_context(address),
            connecting.secret,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            answer_timeout_s=REQUEST_TIMEOUT_S,
            max_answer_bytes=MAX_ANSWER_BYTES,
        )

    def info(self) -> dict[str, Any]:
        """Return the broker's `/info`. Raises Failure: no broker answers."""
        try:
            return check_info(decode_json(self.request("GET", "/info", {})))
        except ValueError as error:
            raise not_a_broker(self.address) from error

    def stats(
        self,
        topic: str | None = None,
        channel: str | None = None,
        *,
        clients: bool = False,
        disk: bool = False,
    ) -> dict[str, Any]:
        """Return the statistics (`/stats`) of all topics and channels, or of one, without memory.

        Args:
            clients: List the clients, too.
            disk: Tell the disk space, too; an nsqd does not.

        Raises Failure: no broker answers.
        """
        params = {"format": "json", "include_clients": str(clients).lower(), "include_mem": "false"}
        params |= {"include_disk": "true"} if disk else {}
        params |= {"topic": topic} if topic is not None else {}
        params |= {"channel": channel} if channel is not None else {}
        try:
            return check_stats(decode_json(self.request("GET", "/stats", params)))
        except ValueError as error:
            raise not_a_broker(self.address) from error
        except Refused as error:
            if error.text == "NOT_FOUND":  # every broker has /stats
                raise not_a_broker(self.address) from error
            raise

    def listens_at(self, tcp_address: str) -> bool:
        """Return whether the broker also listens at this TCP address. Raises Failure: no broker answers."""
        tcp_host, _, tcp_port = tcp_address.rpartition(":")
        here = is_unix_path(self.address)
        http_host = "localhost" if here else without_scheme(self.address).rpartition(":")[0]
        if tcp_host != http_host and not {tcp_host, http_host} <= _LOCAL_HOSTS:
            return False
        try:
            told = decode_json(self.request("GET", "/info", {}))["tcp_port"]
        except (ValueError, KeyError, TypeError):
            return False
        return bool(told == int(tcp_port))

    def requires_tls_for_tcp(self) -> bool:
        """Return whether TCP connections to the broker must use TLS. Raises Failure: no broker answers.

        The answer is False if the broker authenticates clients and this one may not ask: a connection over TCP, which
        needs the same secret, shows it.
        """
        try:
            return self.request("GET", "/config/tls_required", {}) != b"0"
        except Refused as error:
            if error.is_about_secret:
                return False
            raise

    def decoded(self, answer: bytes) -> Any:
        """Decode the JSON of an answer. Raises Failure if it is not JSON, and so not from a broker."""
        try:
            return decode_json(answer)
        except ValueError as error:
            raise not_a_broker(self.address) from error

    def request(self, method: str, path: str, params: Mapping[str, str], body: bytes | None = None) -> bytes:
        """Make a request and return the body of the answer.

        Raises:
            Refused: The broker answered with an error.
            Failure: No broker answers.
        """
        try:
            return self._http.request(method, path, params, body)
        except (RequestRefused, BrokerUnreachable) as error:
            raise http_failure(error) from error


def channels_by_topic(topics: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the sorted names of channels by topic, from the `topics` of `/stats` of one broker or several."""
    names: dict[str, set[str]] = {}
    for topic in topics:
        channels = names.setdefault(topic["topic_name"], set())
        channels.update(channel["channel_name"] for channel in topic["channels"] or [])
    return {topic: sorted(names[topic]) for topic in sorted(names)}
