"""Help for tests of programs that publish and consume. The pytest plugin has the broker as fixtures.

NSQServer       a broker in a process of its own, which can be killed and suspended
NSQ             what a test wants of such a broker: fresh topics, and what became of messages
FakeProducer    a producer without a broker, whose failures a test orders
deliver         runs a message handler without a broker; deliver_sync without async code
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .broker import NSQ
    from .delivery import Delivery, deliver, deliver_sync
    from .fake_producer import FakeMessage, FakeProducer, FakeSyncProducer
    from .server import NSQServer, ServerFailed

__all__ = [
    "NSQ",
    "Delivery",
    "FakeMessage",
    "FakeProducer",
    "FakeSyncProducer",
    "NSQServer",
    "ServerFailed",
    "deliver",
    "deliver_sync",
]

_MODULES = {
    "NSQ": ".broker",
    "Delivery": ".delivery",
    "FakeMessage": ".fake_producer",
    "FakeProducer": ".fake_producer",
    "FakeSyncProducer": ".fake_producer",
    "NSQServer": ".server",
    "ServerFailed": ".server",
    "deliver": ".delivery",
    "deliver_sync": ".delivery",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
