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
    from .client import *

__all__ = [
    "JSON",
    "AlreadyAnswered",
    "Answer",
    "AuthRefused",
    "BrokerError",
    "BrokerUnreachable",
    "Codec",
    "ConnectionFailed",
    "ConnectionLost",
    "ConnectionOptions",
    "ConnectionSettings",
    "Consumer",
    "ConsumerClosed",
    "ConsumerOptions",
    "ConsumerSettings",
    "ConsumerStats",
    "DeadLetter",
    "DecodeFailed",
    "DiscoveryOptions",
    "DiscoverySettings",
    "Finish",
    "Gap",
    "GivenUp",
    "Handler",
    "HeadersRefused",
    "Hooks",
    "IdempotentProducer",
    "Message",
    "MessageBatch",
    "MessageSet",
    "MessagesLost",
    "Msgspec",
    "NSQError",
    "NotABroker",
    "OnFailure",
    "ProcessCall",
    "Producer",
    "ProducerClosed",
    "ProducerFenced",
    "ProducerOptions",
    "ProducerSettings",
    "ProducerStats",
    "PublishAck",
    "PublishCall",
    "PublishFailed",
    "PublishInDoubt",
    "PublishOutcome",
    "PublishState",
    "Pydantic",
    "RawStreamError",
    "Receipt",
    "RecordBatch",
    "RequestRefused",
    "Retry",
    "RunOptions",
    "TLSFiles",
    "TLSFilesError",
    "Topic",
    "TopicReader",
    "__version__",
    "format_address",
    "parse_address",
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
