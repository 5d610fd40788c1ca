"""An NSQ-compatible broker on trio, and a client library on trio and asyncio.

`Consumer` and `Producer` work with any NSQ broker, `TopicReader` with `qcli serve`; `trio_nsq.broker.serve` runs one.
`trio_nsq.sync` has `Consumer` and `Producer` for programs without async code. Names are resolved on first use, so that
a program that needs only the protocol does not import trio.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .protocol.errors import NSQError

if TYPE_CHECKING:
    from . import sync
    from .client import (
        BrokerError,
        ConnectionFailed,
        ConnectionLost,
        Consumer,
        Gap,
        Message,
        MessageBatch,
        Producer,
        PublishFailed,
        TopicReader,
    )

__all__ = [
    "BrokerError",
    "ConnectionFailed",
    "ConnectionLost",
    "Consumer",
    "Gap",
    "Message",
    "MessageBatch",
    "NSQError",
    "Producer",
    "PublishFailed",
    "TopicReader",
    "__version__",
    "sync",
]


def __getattr__(name: str) -> Any:
    if name == "sync":
        return import_module(".sync", __name__)
    if name in __all__:
        return getattr(import_module(".client", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
