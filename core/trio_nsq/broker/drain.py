"""The drain mode: the broker refuses publishes, and its consumers empty it. See docs/how-to/drain-a-broker.md."""

import logging
from collections.abc import AsyncIterable
from dataclasses import dataclass

from .ingest.write_path import WritePath
from .state.broker import Broker
from .topic_registry import TopicRegistry

logger: logging.Logger = logging.getLogger("trio_nsq.broker")


@dataclass(frozen=True, slots=True)
class DrainMode:
    """Switches the drain mode on and off. One for a broker. A restart switches it off."""

    broker: Broker
    topics: TopicRegistry
    write_path: WritePath

    async def set(self, draining: bool) -> None:
        """Refuse the publishes of clients from now on, or accept them again.

        Returns when all publishes that were accepted before are stored and answered. This waits for the disk only.
        """
        if draining != self.broker.draining:
            self.broker.draining = draining
            if self.topics.lookup is not None:
                self.topics.lookup.set_draining(draining)
            if draining:
                logger.warning("DRAIN: the broker refuses publishes from now on")
            else:
                logger.info("DRAIN: ended, the broker accepts publishes again")
        if draining:
            await self.write_path.until_stored()

    async def begin_on_request(self, requests: AsyncIterable[object]) -> None:
        """Switch the mode on at each request; runs until cancelled."""
        async for _ in requests:
            await self.set(True)
