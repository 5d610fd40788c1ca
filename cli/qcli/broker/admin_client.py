"""The HTTP interface of a broker for commands: the library's blocking client, with errors as failures."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from http.client import HTTPMessage
from typing import TypeVar

from trio_nsq.access.secret import Secret
from trio_nsq.api import broker as api
from trio_nsq.api.answers import Info, MemberView, Stats, TopicStats
from trio_nsq.api.request import Request
from trio_nsq.client import BrokerUnreachable, RequestRefused
from trio_nsq.client.http.broker_http import BrokerHTTP
from trio_nsq.fleet.cluster import waits_for_leader
from trio_nsq.protocol.address import is_unix_path
from trio_nsq.protocol.untrusted_json import decode_json
from trio_nsq.text.wording import printable

from ..framework.errors import ExitCode, Failure
from ..framework.params import is_https, without_scheme
from .connection_options import ConnectOptions, refuse_plain_http
from .failures import NO_ANSWER, Refused, check_broker, http_failure, not_a_broker

_T = TypeVar("_T")

CONNECT_TIMEOUT_S = 2.0
REQUEST_TIMEOUT_S = 5.0
"""Both values are those of NSQ's tools."""
_PATIENT_S = 30.0
"""Long, because a broker may wait for its disk."""
PROMPT_S = 1.0
_KEEP_ALIVE_S = 4.0
_LOCAL_HOSTS = {"localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]", ""}


class AdminClient:
    """One broker's HTTP address.

    Args:
        address: `host:port`, `https://host:port`, or the path of a unix socket.
        connecting: The connection options; None: those of the current command.
        secret: Instead of the one of the connection options.
        is_patient: Wait longer for answers, and keep the connection. Only what broker it is, is to be told soon: this
            needs no disk, so that a broker that hangs is found.

    Raises:
        click.UsageError: The command line asks for TLS, and the address is not https.
        Failure: A file for TLS cannot be used.
    """

    def __init__(
        self,
        address: str,
        connecting: ConnectOptions | None = None,
        *,
        secret: Secret | None = None,
        is_patient: bool = False,
    ) -> None:
        if connecting is None:
            refuse_plain_http(address)
            connecting = ConnectOptions.of_command()
        self.address = address
        self._is_broker = False
        tls, secret = connecting.https_context(address), secret or connecting.secret
        self._http = self._quick_http = BrokerHTTP(
            address,
            tls,
            secret,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            answer_timeout_s=REQUEST_TIMEOUT_S,
        )
        # A member of a cluster answers some requests itself.
        self._prompt_http = BrokerHTTP(
            address,
            tls,
            secret,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            answer_timeout_s=PROMPT_S,
        )
        if is_patient:
            self._http = BrokerHTTP(
                address,
                tls,
                secret,
                connect_timeout_s=CONNECT_TIMEOUT_S,
                answer_timeout_s=_PATIENT_S,
                keep_alive_s=_KEEP_ALIVE_S,
            )

    def close(self) -> None:
        self._http.close()

    def info(self) -> Info:
        """Return the broker's `/info`. Raises Failure: no broker answers."""
        return self._translated(lambda: self._quick_http.ask(api.info()))

    def member(self) -> MemberView:
        """Return the member of a cluster that listens here. It answers without a leader, and so do changes of it.

        Raises:
            Refused: The broker is no member of a cluster.
            Failure: No broker answers.
        """
        found = self._translated(lambda: self._quick_http.ask(api.member()))
        self._is_broker = True
        return found

    def stats(
        self,
        topic: str | None = None,
        channel: str | None = None,
        *,
        clients: bool = False,
        disk: bool = False,
    ) -> Stats:
        """Return the statistics, as `api.broker.stats` asks for them. Raises Failure: no broker answers."""
        try:
            return self.ask(api.stats(topic, channel, clients=clients, disk=disk))
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
        return self.info().get("tcp_port") == int(tcp_port)

    def requires_tls_for_tcp(self) -> bool:
        """Return whether TCP connections to the broker must use TLS. Raises Failure: no broker answers.

        The answer is False if the broker authenticates clients and this one may not ask: a connection over TCP, which
        needs the same secret, shows it.
        """
        try:
            return self.ask(api.option("tls_required")) != b"0"
        except Refused as error:
            if error.is_about_secret:
                return False
            raise

    def ask_promptly(self, request: Request[_T]) -> _T:
        """Ask what a broker answers at once, if it can at all. Raises Failure: it does not, or no broker answers."""
        return self._translated(lambda: self._prompt_http.ask(request))

    def ask(self, request: Request[_T]) -> _T:
        """Make a request and return its answer. Nothing is changed unless a broker answers.

        Raises:
            Refused: The broker answered with an error.
            Failure: No broker answers.
        """
        return self._translated(lambda: self.make(request))

    def make(self, request: Request[_T]) -> _T:
        """Do the same, for callers who know what to do after the library's errors.

        Raises:
            RequestRefused, BrokerUnreachable: As `BrokerHTTP.stream`.
            Failure: The answer is not from a broker.
        """
        if request.method != "GET":
            self.check_broker()
        body = self._http.request(request.method, request.path, request.params, request.body)
        try:
            return request.read(body, decode_json)
        except ValueError as error:
            raise not_a_broker(self.address) from error

    def make_with_headers(self, request: Request[bytes]) -> tuple[bytes, HTTPMessage]:
        """Make a request that changes nothing at other servers, and return body and headers. Raises as `make`."""
        with self._http.stream(request.method, request.path, request.params) as answer:
            return answer.read(), answer.headers

    def check_broker(self) -> None:
        """Check what listens, once. Raises Failure: it is no broker; BrokerUnreachable: no server answers."""
        if not self._is_broker:
            check_broker(self._quick_http)
            self._is_broker = True

    def _translated(self, act: Callable[[], _T]) -> _T:
        try:
            try:
                return act()
            except RequestRefused as error:
                if error.text == "NOT_FOUND":  # that is, the endpoint
                    self.check_broker()
                raise
        except (RequestRefused, BrokerUnreachable) as error:
            raise self._without_leader(error) or http_failure(error) from error

    def _without_leader(self, error: RequestRefused | BrokerUnreachable) -> Failure | None:
        """Return the failure if a member of a cluster has not answered because it waits for a leader; else None."""
        if not (isinstance(error, BrokerUnreachable) and error.reason.startswith(NO_ANSWER)):
            return None
        try:
            about = self._prompt_http.ask(api.member())
        except (RequestRefused, BrokerUnreachable):
            return None
        if not waits_for_leader(about):
            return None
        reason = printable(about.get("reason") or "it knows none")
        name = printable(about["cluster"])
        text = f"The cluster {name} has no leader, as its member at {self.address} says: {reason}."
        return Failure(f"{text} See 'qcli cluster status'.", ExitCode.UNREACHABLE, brief=text)


def client_of(
    tcp_address: str, http_addresses: Iterable[str], connecting: ConnectOptions
) -> AdminClient | None:
    """Return a client of the broker at a TCP address, which has one of these HTTP addresses; None: none of them is its.

    The secret is not sent in clear text to a broker that is reached over TLS otherwise.

    Raises:
        Refused: None is known to be its, because one that may be requires another secret.
    """
    refusal: Refused | None = None
    for address in dict.fromkeys(http_addresses):
        is_plain = connecting.encrypts_tcp and not is_https(address) and not is_unix_path(address)
        client = AdminClient(address, replace(connecting, auth_secret="") if is_plain else connecting)
        try:
            if client.listens_at(tcp_address):
                return client
        except Refused as error:
            if error.is_about_secret:
                refusal = refusal or error
        except Failure:  # unreachable
            pass
    if refusal is not None:
        raise refusal
    return None


def channels_by_topic(topics: Iterable[TopicStats]) -> dict[str, list[str]]:
    """Return the sorted names of channels by topic, from the `topics` of `/stats` of one broker or several."""
    names: dict[str, set[str]] = {}
    for topic in topics:
        channels = names.setdefault(topic["topic_name"], set())
        channels.update(channel["channel_name"] for channel in topic["channels"])
    return {topic: sorted(names[topic]) for topic in sorted(names)}
