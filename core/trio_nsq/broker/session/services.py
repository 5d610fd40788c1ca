"""What all sessions of a broker have in common."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from ...bodies import Bodies
from ...reactor import Poller
from ..delivery import Delivery
from ..ingest.publisher import Publisher
from ..options import BrokerOptions
from ..state.broker import Broker
from ..timers import Timers
from ..topics import Topics
from .authorization import AuthClient

if TYPE_CHECKING:
    from OpenSSL import SSL


@dataclass(slots=True)
class Services:
    """The parts of a broker that serve its clients.

    Attributes:
        tls_context: For clients' sessions to come; None: no TLS.
        auth_client: Asks who may do what; None: everybody may do everything.
        bodies: Room for large bodies that clients have begun to send.
        parsing: Held while something large that a client sent is decoded on the event loop.
    """

    options: BrokerOptions
    broker: Broker
    timers: Timers
    poller: Poller
    publisher: Publisher
    delivery: Delivery
    topics: Topics
    tls_context: "SSL.Context | None" = None
    auth_client: AuthClient | None = None
    bodies: Bodies = field(default_factory=Bodies)
    parsing: trio.Lock = field(default_factory=trio.Lock)
