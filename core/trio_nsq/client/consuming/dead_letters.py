"""Publish messages that are given up to another topic."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from typing import Any

from trio_nsq.protocol.headers import MAX_PREFIX_BYTES
from trio_nsq.protocol.limits import MIB

from ..connection.options import ConnectionSettings
from ..errors import BrokerError, PublishFailed
from ..publishing.producer import Producer
from ..publishing.queue import accepts_no_publishes
from .message import Message


def dead_letter_publisher(
    topic: str, settings: ConnectionSettings, connected: Callable[[], Sequence[str]]
) -> Callable[[Message, Exception], Awaitable[None]]:
    """Return a function that publishes a message to a topic, on the broker that delivered it.

    If this broker drains, another one is used.

    Args:
        settings: The consumer's.
        connected: Returns the addresses of the brokers to which the consumer is connected.
    """
    options: Any = {each.name: getattr(settings, each.name) for each in fields(ConnectionSettings)}

    async def publish_to(addresses: Sequence[str], message: Message) -> None:
        # The broker has accepted a message of this size before; hooks may have taken an envelope off it.
        size = len(message.body) + 2 * MAX_PREFIX_BYTES
        limits: Any = {"max_msg_size": size, "max_body_size": max(5 * MIB, size + 2 * MAX_PREFIX_BYTES)}
        async with Producer(addresses, **limits, **options) as producer:
            await producer.publish(topic, message.body, headers=message.headers)

    async def publish(message: Message, _: Exception) -> None:
        address = message.nsqd_address
        try:
            await publish_to([address], message)
        except PublishFailed as failure:
            cause = failure.__cause__
            others = [each for each in connected() if each != address]
            if not others or not isinstance(cause, BrokerError) or not accepts_no_publishes(cause):
                raise
            await publish_to(others, message)

    return publish
