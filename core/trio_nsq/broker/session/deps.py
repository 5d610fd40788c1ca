"""The parts of a broker that all its sessions share."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from ...access.access import Access
from ...event_loop.reactor import Poller
from ...protocol.identify import IdentifySettings
from ...server.body_memory import BodyMemoryLimit
from ..clock import BrokerClock
from ..delivery import Deliverer
from ..ingest.idempotent import IdempotentPublisher
from ..ingest.write_path import WritePath
from ..options import BrokerOptions
from ..state.broker import Broker
from ..topic_registry import TopicRegistry
from .heartbeats import Heartbeats
from .wrong_ports import WrongPorts

if TYPE_CHECKING:
    from ...tls.session import ServerContext


@dataclass(slots=True)
class SessionDeps:
    """The parts of a broker that its sessions use.

    Attributes:
        nursery: Runs the sends to clients that do not read fast enough.
        tls_context: For new TLS sessions; None without TLS.
        access: Identifies clients.
        bodies: Limits the memory of large bodies that are arriving.
        wrong_ports: Logs clients that speak another protocol.
        parsing: Held while a large request is parsed on the event loop.
        default_settings: Those of a client before IDENTIFY.
    """

    options: BrokerOptions
    broker: Broker
    clock: BrokerClock
    poller: Poller
    write_path: WritePath
    delivery: Deliverer
    topics: TopicRegistry
    idempotent: IdempotentPublisher
    nursery: trio.Nursery
    tls_context: "ServerContext | None" = None
    access: Access = field(default_factory=Access)
    bodies: BodyMemoryLimit = field(default_factory=BodyMemoryLimit)
    wrong_ports: WrongPorts = field(default_factory=WrongPorts)
    heartbeats: Heartbeats = field(default_factory=Heartbeats)
    parsing: trio.Lock = field(default_factory=trio.Lock)
    default_settings: IdentifySettings = field(init=False)

    def __post_init__(self) -> None:
        self.default_settings = IdentifySettings.default(self.options.limits)
