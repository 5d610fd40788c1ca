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
from ..source.log_source import FoundLog
from .copies import Copies
from .destination import Destination
from .errors import Unavailable
from .numbers import is_of_message, producer_name, sequence_in
from .options import CopyOptions
from .progress import SourceProgress

logger: logging.Logger = logging.getLogger("trio_nsq.connectors")

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

    def channel(self, topic: str, progress: SourceProgress) -> Stream:
        return self._stream(topic, None, -1, None if self._options.follow else 0, progress)

    async def log(
        self, found: FoundLog, goal: int | None, progress: SourceProgress
    ) -> tuple[Stream, Position | None]:
        """Return the stream of a log, and the position behind the last message that a destination has.

        Args:
            goal: The goal of the last call for this log.
            progress: Gets the attempts to ask destinations, and to publish.

        Raises:
            BrokerUnreachable, RequestRefused: The source cannot be asked.
            CopyRefused: A destination refuses.
        """
        topic, broker = found.topic, found.broker
        log = BrokerLog(
            broker,
            topic,
            self._settings.client_context() if broker.startswith("https://") else None,
            secret=self._settings.secret,
        )
        if goal is None and not self._options.follow:
            goal = await _in_thread(lambda: _end_of(log))
        target, first = self._options.topic_for(topic), self._producer(topic, found.key, 0)
        for destination in self._destinations:
            if not await _patiently(destination, lambda each: each.deduplicates(target, first), progress):
                logger.info(
                    "topic %s: copies are stored at least once, as the broker at %s does not deduplicate",
                    *(target, destination.label),
                )
                return self._stream(topic, None, -1, goal, progress), None
        generation, number, of_others = await self._last(topic, found.key, progress)
        if (generation, number, of_others) == (0, None, None) and found.key != broker:
            # An older version knew the log by the address of its broker.
            _, number, of_others = await self._last(topic, broker, progress)
            if await _in_thread(partial(_has_neither, log, number, of_others)):
                number = of_others = None
        position = await _in_thread(partial(_position_behind, log, number))
        position_of_others = await _in_thread(partial(_position_behind, log, of_others))
        if (position is None) != (number is None) or (position_of_others is None) != (of_others is None):
            logger.warning(
                "topic %s at %s is not the one that was copied before: it was recreated, or lost its last "
                "messages. Its messages are copied from the position of the channel on",
                *(topic, broker),
            )
            generation, of_others = generation + 1, None
        last = position.sequence - 1 if position is not None else -1
        stream = self._stream(topic, self._producer(topic, found.key, generation), last, goal, progress)
        if of_others is not None:
            stream.others.last = sequence_in(of_others)
        if len(self._destinations) == 1:  # of several, it is not known which has the greatest number
            for copies, stored in ((stream.copies, number if position else None), (stream.others, of_others)):
                copies.stored |= {0: stored} if stored is not None else {}
        return stream, position

    def _stream(
        self, topic: str, producer: str | None, last: int, goal: int | None, progress: SourceProgress
    ) -> Stream:
        topics = self._options.topic_for(topic), self._options.not_json_topic_for(topic)
        copies, others = (Copies(each, self._destinations, self._pool, producer) for each in topics)
        copies.last = last
        copies.record_attempt = others.record_attempt = progress.record_attempt
        return Stream(copies, others, goal)

    def _producer(self, topic: str, log: str, generation: int) -> str:
        return producer_name(log, topic, self._options.source.channel, generation)

    async def _last(
        self, topic: str, log: str, progress: SourceProgress
    ) -> tuple[int, int | None, int | None]:
        """Return the newest generation of the copies, and its greatest numbers: of messages, and of other bodies."""
        found = await self._numbers(topic, log, 0, progress)
        generation = 0
        while found != (None, None):
            newer = await self._numbers(topic, log, generation + 1, progress)
            if newer == (None, None):
                break
            generation, found = generation + 1, newer
        return generation, *found

    async def _numbers(
        self, topic: str, log: str, generation: int, progress: SourceProgress
    ) -> tuple[int | None, int | None]:
        """Return the greatest numbers of a generation: of messages, and of bodies that are not JSON objects."""
        producer = self._producer(topic, log, generation)
        number = await self._greatest(self._options.topic_for(topic), producer, progress)
        if not self._options.filter.needs_json:
            return number, None
        return number, await self._greatest(self._options.not_json_topic_for(topic), producer, progress)

    async def _greatest(self, target: str, producer: str, progress: SourceProgress) -> int | None:
        """Return the greatest number over all destinations."""
        numbers = [
            await _patiently(each, lambda each: each.last_number(target, producer), progress)
            for each in self._destinations
        ]
        return max((each for each in numbers if each is not None), default=None)


def _end_of(log: BrokerLog) -> int:
    try:
        return log.bounds().end
    except RequestRefused as exc:
        if exc.is_without_topic:
            return 0
        raise


def _position_behind(log: BrokerLog, number: int | None) -> Position | None:
    """Return the position behind the message with this number; None: the log does not have it, or there is none."""
    if number is None:
        return None
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


def _has_neither(log: BrokerLog, *numbers: int | None) -> bool:
    """Whether a log has none of the messages with these numbers: they are of another log, at the same address."""
    return all(_position_behind(log, number) is None for number in numbers)


async def _in_thread(act: Callable[[], _T]) -> _T:
    return await trio.to_thread.run_sync(act, abandon_on_cancel=True)


async def _patiently(
    destination: Destination, ask: Callable[[Destination], Awaitable[_T]], progress: SourceProgress
) -> _T:
    """Ask a destination until it answers."""
    while True:
        try:
            found = await ask(destination)
        except Unavailable as exc:
            destination.report_failure(exc, "copying waits for it, as it may have some of the messages")
            progress.record_attempt(str(exc))
            await trio.sleep(_RETRY_S)
        else:
            destination.report_success()
            progress.record_attempt("")
            return found
