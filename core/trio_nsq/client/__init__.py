"""The client: `Consumer`, `Producer`, `IdempotentProducer`, `TopicReader`, their message types and errors.

Names are imported on first use: Spark's workers do not have trio, which the consumer needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..log.gaps import Gap
    from ..protocol.address import format_address, parse_address
    from .connection.options import ConnectionOptions, ConnectionSettings
    from .consuming.consumer import Consumer, ConsumerStats
    from .consuming.message import Message, MessageBatch
    from .consuming.options import ConsumerOptions, ConsumerSettings
    from .discovery.options import DiscoveryOptions, DiscoverySettings
    from .errors import (
        AlreadyAnswered,
        AuthRefused,
        BrokerError,
        BrokerUnreachable,
        ConnectionFailed,
        ConnectionLost,
        ProducerClosed,
        PublishFailed,
        PublishInDoubt,
        RequestRefused,
    )
    from .http.idempotent_producer import IdempotentProducer
    from .publishing.options import ProducerOptions, ProducerSettings
    from .publishing.producer import Producer
    from .reading.topic_reader import TopicReader

__all__ = [
    "AlreadyAnswered",
    "AuthRefused",
    "BrokerError",
    "BrokerUnreachable",
    "ConnectionFailed",
    "ConnectionLost",
    "ConnectionOptions",
    "ConnectionSettings",
    "Consumer",
    "ConsumerOptions",
    "ConsumerSettings",
    "ConsumerStats",
    "DiscoveryOptions",
    "DiscoverySettings",
    "Gap",
    "IdempotentProducer",
    "Message",
    "MessageBatch",
    "Producer",
    "ProducerClosed",
    "ProducerOptions",
    "ProducerSettings",
    "PublishFailed",
    "PublishInDoubt",
    "RequestRefused",
    "TopicReader",
    "format_address",
    "parse_address",
]

_MODULES = {
    "ConnectionOptions": ".connection.options",
    "ConnectionSettings": ".connection.options",
    "Consumer": ".consuming.consumer",
    "ConsumerOptions": ".consuming.options",
    "ConsumerSettings": ".consuming.options",
    "ConsumerStats": ".consuming.consumer",
    "DiscoveryOptions": ".discovery.options",
    "DiscoverySettings": ".discovery.options",
    "Gap": "..log.gaps",
    "IdempotentProducer": ".http.idempotent_producer",
    "Message": ".consuming.message",
    "MessageBatch": ".consuming.message",
    "Producer": ".publishing.producer",
    "ProducerOptions": ".publishing.options",
    "ProducerSettings": ".publishing.options",
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
