"""The parts of a broker that all its sessions share."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from ...access.access import Access
from ...bodies import Bodies
from ...reactor import Poller
from ..delivery import Delivery
from ..ingest.publisher import Publisher
from ..options import BrokerOptions
from ..state.broker import Broker
from ..timers import Timers
from ..topics import Topics

if TYPE_CHECKING:
    from ...tls.session import ServerContext


@dataclass(slots=True)
class Services:
    """The parts of a broker that its sessions use.

    Attributes:
        tls_context: For new TLS sessions; None without TLS.
        access: Identifies clients.
        bodies: Limits the memory of large bodies that are arriving.
        parsing: Held while a large request is parsed on the event loop.
    """

    options: BrokerOptions
    broker: Broker
    timers: Timers
    poller: Poller
    publisher: Publisher
    delivery: Delivery
    topics: Topics
    tls_context: "ServerContext | None" = None
    access: Access = field(default_factory=Access)
    bodies: Bodies = field(default_factory=Bodies)
    parsing: trio.Lock = field(default_factory=trio.Lock)
