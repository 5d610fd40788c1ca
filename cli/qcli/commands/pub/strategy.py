"""Which of several brokers gets which messages."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

import trio

from .batches import Batch
from .keys import Keys
from .publisher import Fallback, Publisher


class Strategy(Fallback, ABC):
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


class OneBroker(Strategy):
    """Each message goes to one broker; if that is unavailable, to the next one in the order of the addresses."""

    is_spread = True

    def other(self, publisher: Publisher) -> Publisher | None:
        place = self._publishers.index(publisher)
        following = [*self._publishers[place + 1 :], *self._publishers[:place]]
        return next((each for each in following if each.is_usable), None)

    def was_accepted(self, publisher: Publisher) -> bool:
        return any(each.result.acknowledged for each in self._publishers)

    async def distribute(self, batch: Batch) -> None:
        # Concurrently: a slow broker delays only the next batch.
        async with trio.open_nursery() as nursery:
            for publisher, part in self._parts(batch):
                if part.bodies:
                    nursery.start_soon(self._offer, publisher, part)

    @abstractmethod
    def _parts(self, batch: Batch) -> Iterable[tuple[Publisher, Batch]]:
        """Divide the messages of a batch."""

    async def _offer(self, publisher: Publisher, batch: Batch) -> None:
        while True:
            target = publisher if publisher.is_usable else self.other(publisher)
            if target is None:
                await publisher.offer(batch)
                return
            if await target.offer_briefly(batch):
                return


class RoundRobin(OneBroker):
    """The brokers get messages in turn. While one is unavailable, the others get all."""

    def __init__(self, publishers: Sequence[Publisher]) -> None:
        super().__init__(publishers)
        self._next = 0

    def _parts(self, batch: Batch) -> Iterable[tuple[Publisher, Batch]]:
        usable = [each for each in self._publishers if each.is_usable] or self._publishers
        count, first = len(usable), self._next
        self._next += len(batch.bodies)
        return [
            (each, batch.part(slice((place - first) % count, None, count)))
            for place, each in enumerate(usable)
        ]

    def meanwhile(self, publisher: Publisher) -> str:
        return " Meanwhile its messages go to the other brokers." if self.other(publisher) else _NO_OTHER


class KeyHash(OneBroker):
    """Messages with the same key go to the same broker: the CRC-32 of the key, modulo the number of brokers.

    While that is unavailable, they go to the next one. Messages without a key go to the brokers in turn.

    Args:
        keys: Returns the keys of a batch.
    """

    def __init__(self, publishers: Sequence[Publisher], keys: Callable[[Batch], Keys]) -> None:
        super().__init__(publishers)
        self._keys = keys
        self._next = 0

    def _parts(self, batch: Batch) -> Iterable[tuple[Publisher, Batch]]:
        count = len(self._publishers)
        parts: list[list[int]] = [[] for _ in self._publishers]
        for index, key in enumerate(self._keys(batch)):
            if key is None:
                self._next += 1
                parts[self._next % count].append(index)
            else:
                parts[crc32(key) % count].append(index)
        return zip(self._publishers, map(batch.chosen, parts), strict=True)

    def meanwhile(self, publisher: Publisher) -> str:
        other = self.other(publisher)
        if other is None:
            return _NO_OTHER
        return f" Meanwhile messages with its keys go to the next broker, {other.result.address}."


_NO_OTHER = " No other broker accepts messages."
