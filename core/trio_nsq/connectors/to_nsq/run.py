"""Copy topics to other brokers.

Between brokers of this project, no state is kept here: the log of the source is read by sequence, and the destination
remembers the sequence of the last message with the messages, see `numbers`. The channel at the source moves behind the
last message that is stored, or was left out by a filter.
"""

import random
from dataclasses import replace

import trio

from ...client.background import BackgroundTask
from ...client.errors import ConnectionFailed
from ..host_pool import make_pool
from ..source.batch import Position, Source
from ..source.log_source import FoundLog
from ..source.run import run_sources
from .destination import Destination
from .errors import NoDestination, Unavailable
from .loops import LoopCheck
from .options import CopyOptions
from .pipe import Pipe, ahead_limit
from .progress import Progress
from .resume import Resume, Stream


async def copy_topics(options: CopyOptions, progress: Progress) -> None:
    """Copy messages until cancelled; without `follow`, until those are copied that were there at the start.

    Raises:
        ConnectionFailed: No source can be reached at the start.
        NoDestination: No destination can be reached at the start.
        AuthRefused, RequestRefused: A source refuses the secret.
        CopyRefused: A destination refuses messages for good.
        LoopFound: A topic would be copied to itself.
        ChannelAhead: A channel has passed messages that no destination has.
        ValueError: See `run_sources`.
    """
    if options.topic is not None and options.source.topic_pattern is not None:
        # The pattern may find the topics that it fills.
        filled = {options.topic, options.not_json_topic_for("")}
        options = replace(options, source=replace(options.source, left_out=filled.__contains__))
    # The channel also moves over messages that a filter leaves out. Without a filter, the destination lost messages. It
    # would not take them any more after newer ones, as the numbers of batches grow.
    may_lead = not options.filter.passes_all
    source = replace(
        options.source,
        channel_may_lead=may_lead,
        refuses_gaps=not may_lead and not options.allows_gaps,
        looks_again=options.follow,
    )
    await _Copying(replace(options, source=source), progress).run()


class _Copying:
    def __init__(self, options: CopyOptions, progress: Progress) -> None:
        self._options = options
        self._progress = progress
        self._destinations = [Destination(each, options) for each in options.destinations]
        pool = make_pool(options.mode, len(self._destinations), random.random)
        self._resume = Resume(options, self._destinations, pool)
        self._loops = LoopCheck(options, self._destinations[0].finder)
        self._streams: dict[tuple[str, str], Stream] = {}
        self._open = 0

    async def run(self) -> None:
        await self._check_destinations()
        background = BackgroundTask()  # a publish that has begun may end after a cancellation
        await background.open(self._run_destinations)
        try:
            await run_sources(self._options.source, self._start, self._handle, self._forget)
        finally:
            await background.close()

    async def _run_destinations(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                for destination in self._destinations:
                    nursery.start_soon(destination.run)
        finally:
            for destination in self._destinations:
                destination.close()

    async def _check_destinations(self) -> None:
        """Raise NoDestination if no destination can be reached."""
        failures: list[Unavailable] = []

        async def find(destination: Destination) -> None:
            try:
                await destination.find()
            except Unavailable as exc:
                if isinstance(exc.__cause__, ConnectionFailed):
                    failures.append(exc)

        async with trio.open_nursery() as nursery:
            for destination in self._destinations:
                nursery.start_soon(find, destination)
        if len(failures) == len(self._destinations):
            text = "; ".join(f"{each.address}: {each.reason}" for each in failures)
            raise NoDestination(text) from (failures[0].__cause__ if len(failures) == 1 else None)

    # ------------------------------------------------------------------ sources

    async def _start(self, found: FoundLog) -> Position | None:
        key = found.topic, found.broker
        await self._loops.check(*key)
        known = self._streams.get(key)
        goal = known.goal if known is not None else None
        stream, position = await self._resume.log(found, goal, self._progress.of(*key))
        self._streams[key] = stream
        return position

    def _forget(self, source: Source) -> None:
        key = source.topic, source.broker
        self._streams.pop(key, None)
        self._progress.forget(*key)

    async def _handle(self, source: Source) -> None:
        key = source.topic, source.broker
        progress = self._progress.of(*key)
        stream = self._streams[key] if source.is_log else self._resume.channel(source.topic, progress)
        progress.exactly_once = stream.copies.producer is not None
        progress.source, progress.waiting = source, 0
        self._open += 1
        try:
            pipe = Pipe(
                source,
                self._options.filter,
                stream.copies,
                stream.others,
                progress,
                stream.goal,
                lambda: ahead_limit(self._open),
                self._loops,
                self._options.with_headers,
            )
            await pipe.run()
        finally:
            self._open -= 1
            progress.last_lag, progress.source = progress.lag, None
