"""Which of several brokers gets which messages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import trio

from .batches import Batch
from .publisher import Publisher


class Strategy(ABC):
    """Gives batches to brokers.

    Attributes:
        is_spread: Whether each message goes to one of the brokers. False: to every broker.
    """

    is_spread = False

    def __init__(self, publishers: Sequence[Publisher]) -> None:
        self._publishers = publishers

    @abstractmethod
    async def distribute(self, batch: Batch) -> None:
        """Give a batch to brokers; returns when all that get it have taken it."""

    def other(self, publisher: Publisher) -> Publisher | None:
        """Return the broker for the batches of an unavailable one; None: they wait for this one."""
        return None

    def meanwhile(self, publisher: Publisher) -> str:
        """Return the end of the warning that a broker is unavailable."""
        return ""


class AllBrokers(Strategy):
    """Every message goes to every broker. While one is unavailable, the others get no new messages."""

    async def distribute(self, batch: Batch) -> None:
        first, *others = self._publishers
        if not others:
            await first.offer(batch)
            return
        # Concurrently: the other brokers get this batch even while one is unreachable.
        async with trio.open_nursery() as nursery:
            for publisher in self._publishers:
                nursery.start_soon(publisher.offer, batch)

    def meanwhile(self, publisher: Publisher) -> str:
        alone = len(self._publishers) == 1
        return "" if alone else " Until then, the other brokers get no new messages."
