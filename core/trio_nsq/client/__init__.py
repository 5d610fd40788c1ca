"""The client: `Consumer`, and what it hands out; `Producer`; and the errors they raise."""

from ..protocol.address import format_address, parse_address
from .consumer import Consumer, ConsumerStats
from .consumer_options import ConsumerOptions, ConsumerSettings
from .errors import (
    AlreadyAnswered,
    BrokerError,
    ConnectionFailed,
    ConnectionLost,
    ProducerClosed,
    PublishFailed,
)
from .message import Message, MessageBatch
from .options import ConnectionOptions, ConnectionSettings
from .producer import Producer

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
