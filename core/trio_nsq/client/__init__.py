"""The client: `Consumer`, `Producer`, `IdempotentProducer`, `TopicReader`, their message types and errors.

Names are imported on first use: Spark's workers do not have trio, which the consumer needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..log.gaps import Gap
    from ..log.raw import RawStreamError
    from ..log.records import RecordBatch
    from ..protocol.address import format_address, parse_address
    from ..protocol.messages import MessageSet
    from .connection.options import ConnectionOptions, ConnectionSettings
    from .connection.tls import TLSFiles, TLSFilesError
    from .consuming.answers import Answer, DeadLetter, Finish, GivenUp, Handler, OnFailure, Retry
    from .consuming.consumer import Consumer, ConsumerStats
    from .consuming.message import Message, MessageBatch
    from .consuming.options import ConsumerOptions, ConsumerSettings, RunOptions
    from .discovery.options import DiscoveryOptions, DiscoverySettings
    from .errors import (
        AlreadyAnswered,
        AuthRefused,
        BrokerError,
        BrokerUnreachable,
        ConnectionFailed,
        ConnectionLost,
        ConsumerClosed,
        DecodeFailed,
        HeadersRefused,
        MessagesLost,
        NotABroker,
        ProducerClosed,
        ProducerFenced,
        PublishFailed,
        PublishInDoubt,
        RequestRefused,
    )
    from .hooks import Hooks, ProcessCall, PublishCall
    from .http.idempotent_producer import IdempotentProducer, PublishOutcome
    from .publishing.options import ProducerOptions, ProducerSettings
    from .publishing.producer import Producer
    from .publishing.queue import PublishAck
    from .publishing.receipt import ProducerStats, PublishState, Receipt
    from .reading.topic_reader import TopicReader
    from .topics import JSON, Codec, Msgspec, Pydantic, Topic

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
    "format_address",
    "parse_address",
]

_NAMES = {
    "..log.gaps": ("Gap",),
    "..log.raw": ("RawStreamError",),
    "..log.records": ("RecordBatch",),
    "..protocol.address": ("format_address", "parse_address"),
    "..protocol.messages": ("MessageSet",),
    ".connection.options": ("ConnectionOptions", "ConnectionSettings"),
    ".connection.tls": ("TLSFiles", "TLSFilesError"),
    ".consuming.answers": ("Answer", "DeadLetter", "Finish", "GivenUp", "Handler", "OnFailure", "Retry"),
    ".consuming.consumer": ("Consumer", "ConsumerStats"),
    ".consuming.message": ("Message", "MessageBatch"),
    ".consuming.options": ("ConsumerOptions", "ConsumerSettings", "RunOptions"),
    ".discovery.options": ("DiscoveryOptions", "DiscoverySettings"),
    ".hooks": ("Hooks", "ProcessCall", "PublishCall"),
    ".http.idempotent_producer": ("IdempotentProducer", "PublishOutcome"),
    ".publishing.options": ("ProducerOptions", "ProducerSettings"),
    ".publishing.producer": ("Producer",),
    ".publishing.queue": ("PublishAck",),
    ".publishing.receipt": ("ProducerStats", "PublishState", "Receipt"),
    ".reading.topic_reader": ("TopicReader",),
    ".topics": ("Codec", "JSON", "Msgspec", "Pydantic", "Topic"),
}
"""By module, all names that are not in `errors`."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, ".errors"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
