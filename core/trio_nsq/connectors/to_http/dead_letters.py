"""Publishes messages that cannot be delivered to a dead-letter topic of the broker that they came from."""

import logging
from dataclasses import dataclass, field
from typing import Self

import trio

from trio_nsq.client.connection.connection import connect
from trio_nsq.client.connection.options import ConnectionOptions, ConnectionSettings
from trio_nsq.client.errors import AuthRefused, ConnectionFailed, PublishFailed
from trio_nsq.client.publishing.producer import Producer
from trio_nsq.protocol.headers import Headers
from trio_nsq.protocol.limits import MIB

logger: logging.Logger = logging.getLogger("trio_nsq.connectors")

DEAD_LETTERS = "dead-letters"
"""The channel in which a broker of this project keeps the dead letters of a topic; `qcli dlq` shows it."""
RETRY_S = 1.0
NO_LIMIT = 1024 * MIB
"""The broker has accepted the message before, whatever its limits are."""


@dataclass(eq=False, slots=True)
class _Link:
    """The connection to one broker, and the dead-letter topics that have their channel there."""

    producer: Producer
    scope: trio.CancelScope = field(default_factory=lambda: trio.CancelScope(shield=True))
    ready: trio.Event = field(default_factory=trio.Event)
    topics: set[str] = field(default_factory=set)
    creating: trio.Lock = field(default_factory=trio.Lock)


class DeadLetters:
    """Stores dead letters; an async context manager.

    Args:
        connecting: How to connect to the brokers.
    """

    def __init__(self, connecting: ConnectionOptions) -> None:
        self._connecting = connecting
        self._links: dict[str, _Link] = {}
        self._manager = trio.open_nursery()
        self._nursery: trio.Nursery | None = None

    async def __aenter__(self) -> Self:
        self._nursery = await self._manager.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        for link in self._links.values():
            link.scope.cancel()
        await self._manager.__aexit__(*error)  # type: ignore[arg-type]

    async def store(self, address: str, topic: str, body: bytes, headers: Headers) -> None:
        """Publish a message on this broker (TCP address). Returns after its OK; until then it retries."""
        link = self._link(address)
        warned = False
        while True:
            await link.ready.wait()
            try:
                if topic not in link.topics:
                    await self._create_channel(link, address, topic)
                await link.producer.publish(topic, body, headers=headers)
            except (PublishFailed, ConnectionFailed) as error:
                if not warned:
                    logger.warning(
                        "a message cannot go to the dead-letter topic %s at %s, tried again: %s",
                        *(topic, address, error.reason),
                    )
                warned = True
                await trio.sleep(RETRY_S)
                continue
            if warned:
                logger.info("the dead-letter topic %s at %s takes messages again", topic, address)
            return

    def _link(self, address: str) -> _Link:
        link = self._links.get(address)
        if link is None:
            assert self._nursery is not None
            producer = Producer(
                address,
                wait_connected=False,
                max_msg_size=NO_LIMIT,
                max_body_size=NO_LIMIT,
                **self._connecting,
            )
            link = self._links[address] = _Link(producer)
            self._nursery.start_soon(self._hold, link)
        return link

    async def _hold(self, link: _Link) -> None:
        """Keep a producer open until the scope is cancelled."""
        with link.scope:
            async with link.producer:
                link.ready.set()
                await trio.sleep_forever()

    async def _create_channel(self, link: _Link, address: str, topic: str) -> None:
        """Create the channel of the dead letters, as a consumer does; it must exist before other channels."""
        async with link.creating:
            if topic in link.topics:
                return
            connection = await connect(address, ConnectionSettings(**self._connecting))
            try:
                await connection.subscribe(topic, DEAD_LETTERS)
            except AuthRefused as error:  # the secret may publish there, but not consume
                logger.warning("channel %s/%s cannot be created: %s", topic, DEAD_LETTERS, error.reason)
            finally:
                await connection.close_now()
            link.topics.add(topic)
