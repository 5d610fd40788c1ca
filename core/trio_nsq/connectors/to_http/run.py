"""Consume channels, and send their messages to receivers."""

from dataclasses import replace

import trio

from trio_nsq.client.background import BackgroundTask
from trio_nsq.client.connection.options import ConnectionOptions

from ..source.batch import Position, Source
from ..source.channel_source import ChannelSource
from ..source.log_source import FoundLog
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

    # Until the first request ends, nothing tells how long messages would wait.
    at_first = min(sources.max_in_flight, options.concurrency * options.batching.messages)
    opening = replace(sources, max_in_flight=at_first)

    async def start(found: FoundLog) -> Position | None:
        raise AssertionError("only logs have positions")

    async def handle(source: Source) -> None:
        assert isinstance(source, ChannelSource)
        await SourceDelivery(delivery, source, sources.channel, sources.max_in_flight).run()

    async with DeadLetters(connecting) as letters:
        delivery = Delivery(options, letters, BrokerLimits(sources), statistics=statistics or Statistics())
        try:
            background = BackgroundTask()
            await background.open(delivery.run)
            try:
                await run_sources(opening, start, handle)
            finally:
                await background.close()
        finally:
            with trio.CancelScope(shield=True):
                await delivery.aclose()
