"""Help for tests of programs that use a broker. The pytest plugin has it as fixtures; other runners may use it, too.

NSQServer       a broker in a process of its own, which can be killed and suspended
NSQ             what a test wants of such a broker: fresh topics, and what became of messages
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .broker import NSQ
    from .server import NSQServer, ServerFailed

__all__ = ["NSQ", "NSQServer", "ServerFailed"]

_MODULES = {"NSQ": ".broker", "NSQServer": ".server", "ServerFailed": ".server"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
