"""Consume channels, and send their messages to receivers."""

import trio

from trio_nsq.client.connection.options import ConnectionOptions

from ..source.batch import Position, Source
from ..source.channel_source import ChannelSource
from ..source.options import SourceOptions
from ..source.run import run_sources
from .broker_limits import BrokerLimits
from .dead_letters import DeadLetters
from .delivery import Delivery
from .options import DeliveryOptions
from .source_delivery import SourceDelivery
from .statistics import Statistics


async def to_http(
    sources: SourceOptions,
    options: DeliveryOptions,
    connecting: ConnectionOptions,
    statistics: Statistics | None = None,
) -> None:
    """Send the messages of channels to receivers; runs until cancelled.

    Args:
        sources: What to consume; `at_least_once` must be set.
        connecting: How to connect to brokers, to publish dead letters.
        statistics: Counts what is done.

    Raises:
        As `run_sources`.
    """
    if not sources.at_least_once:
        raise ValueError("at_least_once is False; receivers cannot be sent messages exactly once")

    async def start(topic: str, broker: str) -> Position | None:
        raise AssertionError("only logs have positions")

    async def handle(source: Source) -> None:
        assert isinstance(source, ChannelSource)
        await SourceDelivery(delivery, source, sources.channel).run()

    async with DeadLetters(connecting) as letters:
        delivery = Delivery(options, letters, BrokerLimits(sources), statistics=statistics or Statistics())
        try:
            await run_sources(sources, start, handle)
        finally:
            with trio.CancelScope(shield=True):
                await delivery.aclose()
