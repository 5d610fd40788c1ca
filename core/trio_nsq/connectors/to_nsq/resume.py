"""Where to continue: the destinations know which messages they have."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import trio

from ...client.consuming.options import ConsumerSettings
from ...client.errors import RequestRefused
from ...client.reading.broker_log import BrokerLog, LogReplaced
from ..host_pool import HostPool
from ..source.batch import Position
from .copies import Copies
from .destination import Destination
from .errors import Unavailable
from .numbers import is_of_message, producer_name, sequence_in
from .options import CopyOptions

logger = logging.getLogger("trio_nsq.connectors")

_RETRY_S = 1.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Stream:
    """The way of the messages of one source.

    Attributes:
        copies: For messages.
        others: For bodies that are not JSON objects.
        goal: See `Pipe`.
    """

    copies: Copies
    others: Copies
    goal: int | None


class Resume:
    """Finds out where to continue. A destination that does not answer is waited for."""

    def __init__(self, options: CopyOptions, destinations: Sequence[Destination], pool: HostPool) -> None:
        self._options = options
        self._destinations = destinations
        self._pool = pool
        self._settings = ConsumerSettings(**options.source.consumer)

    def channel(self, topic: str) -> Stream:
        """Return the stream of a channel."""
        return self._stream(topic, None, -1, None if self._options.follow else 0)

    async def log(self, topic: str, broker: str, goal: int | None) -> tuple[Stream, Position | None]:
        """Return the stream of a log, and the position behind the last message that a destination has.

        Args:
            goal: The goal of the last call for this log.

        Raises:
            BrokerUnreachable, RequestRefused: The source cannot be asked.
            CopyRefused: A destination refuses.
        """
        log = BrokerLog(
            broker,
            topic,
            self._settings.client_context() if broker.startswith("https://") else None,
            secret=self._settings.secret,
        )
        if goal is None and not self._options.follow:
            goal = await _in_thread(lambda: _end_of(log))
        target, first = self._options.topic_for(topic), self._producer(topic, broker, 0)
        for destination in self._destinations:
            if not await _patiently(destination, lambda each: each.deduplicates(target, first)):
                logger.info(
                    "topic %s: copies are stored at least once, as the broker at %s does not deduplicate",
                    *(target, destination.label),
                )
                return self._stream(topic, None, -1, goal), None
        generation, number = await self._last(topic, broker)
        position: Position | None = None
        if number is not None:
            position = await _in_thread(partial(_position_behind, log, number))
            if position is None:
                logger.warning(
                    "topic %s at %s is not the one that was copied before: it was recreated, or lost its last "
                    "messages. Its messages are copied from the position of the channel on",
                    *(topic, broker),
                )
                generation, number = generation + 1, None
        last = sequence_in(number) if number is not None else -1
        stream = self._stream(topic, self._producer(topic, broker, generation), last, goal)
        if self._options.filter.needs_json:
            for destination in self._destinations:
                await _patiently(destination, stream.others.update_last)
        return stream, position

    def _stream(self, topic: str, producer: str | None, last: int, goal: int | None) -> Stream:
        topics = self._options.topic_for(topic), self._options.not_json_topic_for(topic)
        copies, others = (Copies(each, self._destinations, self._pool, producer) for each in topics)
        copies.last = last
        return Stream(copies, others, goal)

    def _producer(self, topic: str, broker: str, generation: int) -> str:
        return producer_name(broker, topic, self._options.source.channel, generation)

    async def _last(self, topic: str, broker: str) -> tuple[int, int | None]:
        """Return the newest generation of the copies, and its greatest number over all destinations."""
        generation, number = 0, await self._greatest(topic, broker, 0)
        while number is not None:
            newer = await self._greatest(topic, broker, generation + 1)
            if newer is None:
                break
            generation, number = generation + 1, newer
        return generation, number

    async def _greatest(self, topic: str, broker: str, generation: int) -> int | None:
        target, producer = self._options.topic_for(topic), self._producer(topic, broker, generation)
        numbers = [
            await _patiently(each, lambda each: each.last_number(target, producer))
            for each in self._destinations
        ]
        return max((each for each in numbers if each is not None), default=None)


def _end_of(log: BrokerLog) -> int:
    try:
        return log.bounds().end
    except RequestRefused as exc:
        if exc.text == "TOPIC_NOT_FOUND":
            return 0
        raise


def _position_behind(log: BrokerLog, number: int) -> Position | None:
    """Return the position behind the message with this number; None: the log does not have it."""
    sequence = sequence_in(number)
    if _end_of(log) <= sequence:
        return None
    try:
        found = log.id_at(sequence)
    except LogReplaced:
        return None
    if found is not None and not is_of_message(number, found.encode()):
        return None
    return Position(sequence + 1, found)


async def _in_thread(act: Callable[[], _T]) -> _T:
    return await trio.to_thread.run_sync(act, abandon_on_cancel=True)


async def _patiently(destination: Destination, ask: Callable[[Destination], Awaitable[_T]]) -> _T:
    """Ask a destination until it answers."""
    while True:
        try:
            found = await ask(destination)
        except Unavailable as exc:
            destination.report_failure(exc)
            await trio.sleep(_RETRY_S)
        else:
            destination.report_success()
            return found
