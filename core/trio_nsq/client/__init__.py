"""The client: `Consumer`, and what it hands out; `Producer`; and the errors they raise."""

from ..protocol.address import format_address, parse_address
from .connection.options import ConnectionOptions, ConnectionSettings
from .consuming.consumer import Consumer, ConsumerStats
from .consuming.message import Message, MessageBatch
from .consuming.options import ConsumerOptions, ConsumerSettings
from .errors import (
    AlreadyAnswered,
    BrokerError,
    ConnectionFailed,
    ConnectionLost,
    ProducerClosed,
    PublishFailed,
)
from .publishing.producer import Producer

__all__ = [
    "AlreadyAnswered",
    "BrokerError",
    "ConnectionFailed",
    "ConnectionLost",
    "ConnectionOptions",
    "ConnectionSettings",
    "Consumer",
    "ConsumerOptions",
    "ConsumerSettings",
    "ConsumerStats",
    "Message",
    "MessageBatch",
    "Producer",
    "ProducerClosed",
    "PublishFailed",
    "format_address",
    "parse_address",
]
