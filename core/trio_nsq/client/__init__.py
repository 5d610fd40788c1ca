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

_MODULES = {
    "Answer": ".consuming.answers",
    "Codec": ".topics",
    "ConnectionOptions": ".connection.options",
    "ConnectionSettings": ".connection.options",
    "Consumer": ".consuming.consumer",
    "ConsumerOptions": ".consuming.options",
    "ConsumerSettings": ".consuming.options",
    "ConsumerStats": ".consuming.consumer",
    "DeadLetter": ".consuming.answers",
    "DiscoveryOptions": ".discovery.options",
    "DiscoverySettings": ".discovery.options",
    "Finish": ".consuming.answers",
    "Gap": "..log.gaps",
    "GivenUp": ".consuming.answers",
    "Handler": ".consuming.answers",
    "Hooks": ".hooks",
    "IdempotentProducer": ".http.idempotent_producer",
    "JSON": ".topics",
    "Message": ".consuming.message",
    "MessageBatch": ".consuming.message",
    "MessageSet": "..protocol.messages",
    "Msgspec": ".topics",
    "OnFailure": ".consuming.answers",
    "ProcessCall": ".hooks",
    "Producer": ".publishing.producer",
    "ProducerOptions": ".publishing.options",
    "ProducerSettings": ".publishing.options",
    "ProducerStats": ".publishing.receipt",
    "PublishAck": ".publishing.queue",
    "PublishCall": ".hooks",
    "PublishOutcome": ".http.idempotent_producer",
    "PublishState": ".publishing.receipt",
    "Pydantic": ".topics",
    "RawStreamError": "..log.raw",
    "Receipt": ".publishing.receipt",
    "RecordBatch": "..log.records",
    "Retry": ".consuming.answers",
    "RunOptions": ".consuming.options",
    "TLSFiles": ".connection.tls",
    "TLSFilesError": ".connection.tls",
    "Topic": ".topics",
    "TopicReader": ".reading.topic_reader",
    "format_address": "..protocol.address",
    "parse_address": "..protocol.address",
}
"""The modules of all names that are not in `errors`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, ".errors"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
