"""The HTTP interface of a discovery service (nsqlookupd) for commands: blocking, with errors as failures."""

from typing import TypeVar

from trio_nsq.api import lookupd
from trio_nsq.api.lookupd import Node
from trio_nsq.api.request import Request
from trio_nsq.client import BrokerUnreachable, RequestRefused
from trio_nsq.client.errors import NotABroker
from trio_nsq.client.http.broker_http import BrokerHTTP

from ..framework.errors import Failure
from .admin_client import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S
from .connection_options import ConnectOptions
from .failures import access_refusal, lookupd_unreachable, not_a_lookupd, reason_unreachable

_T = TypeVar("_T")


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
        )

    def nodes(self) -> list[Node]:
        """Return all registered brokers with a usable address. Raises Failure."""
        return [node for node in self.ask(lookupd.nodes()) if node.is_usable]

    def ask(self, request: Request[_T]) -> _T:
        """Make a request and return its answer. Raises Failure: `LookupdRefused` if the service refused."""
        try:
            return self._http.ask(request)
        except RequestRefused as error:
            if error.text == "NOT_FOUND":  # of the path, which every nsqlookupd has
                raise not_a_lookupd(self.address) from error
            raise LookupdRefused(self.address, error.status, error.text) from error
        except NotABroker as error:
            raise not_a_lookupd(self.address) from error
        except BrokerUnreachable as error:
            raise lookupd_unreachable(self.address, reason_unreachable(error).rstrip(".")) from error


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


def listed_with(client: LookupdClient, topic: str) -> list[str]:
    """Return the HTTP addresses of the brokers that a service lists with a topic, as they are registered."""
    return [node.http_address for node in client.nodes() if topic in node.topics and node.http_address]
