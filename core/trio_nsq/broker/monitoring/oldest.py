"""The age of the oldest message of each channel, for `/stats` and `/metrics`."""

import logging
from collections.abc import Iterable, Sequence
from functools import partial

import trio

from ...log import Log, LogReadError
from ..state.channel import Channel

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_CHANNELS_PER_PIECE = 400
"""Looking these up in memory takes less than two milliseconds; then other tasks run."""
_READS_AT_ONCE = 100
_READ_TIMEOUT_S = 1.0
"""A disk may hang; then ages are unknown, and monitoring still gets the other numbers."""


class OldestMessages:
    """Finds when the oldest message of each channel was published. One for a broker."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(1)  # for reads, which are slow on a slow disk

    def age_ns(self, channel: Channel, now_ns: int) -> int | None:
        """Return the age of the oldest message that is ready or in flight; 0 if there is none.

        None: unknown, because the message cannot be read, or `refresh` was not called for this channel.

        Args:
            now_ns: Unix nanoseconds by the wall clock.
        """
        if not channel.depth and not channel.in_flight_count:
            return 0
        known = channel.oldest_published
        return None if known is None else max(0, now_ns - known[1])

    async def refresh(self, channels: Iterable[Channel]) -> None:
        """Find the timestamps of the oldest messages of channels, from memory if possible, else from disk."""
        unknown: list[tuple[Channel, int]] = []
        for number, channel in enumerate(list(channels), 1):
            if (sequence := self._look_up(channel)) is not None:
                unknown.append((channel, sequence))
            if number % _CHANNELS_PER_PIECE == 0:
                await trio.lowlevel.checkpoint()
        self._learn(_read_timestamps([each for each in unknown if each[0].topic.ephemeral]))
        on_disk = [each for each in unknown if not each[0].topic.ephemeral]
        with trio.move_on_after(_READ_TIMEOUT_S):
            # In pieces, so that a slow disk makes some progress with each refresh.
            for start in range(0, len(on_disk), _READS_AT_ONCE):
                read = partial(_read_timestamps, on_disk[start : start + _READS_AT_ONCE])
                self._learn(
                    await trio.to_thread.run_sync(read, limiter=self._threads, abandon_on_cancel=True)
                )

    def _look_up(self, channel: Channel) -> int | None:
        """Update a channel from memory. Return the sequence of its oldest message if that must be read."""
        sequence = channel.messages.oldest
        known = channel.oldest_published
        if sequence is None:
            channel.oldest_published = None
        elif known is None or sequence != known[0]:
            timestamp_ns = channel.read_ahead.timestamp_in_memory(sequence)
            if timestamp_ns is None:
                channel.oldest_published = None
                return sequence
            channel.oldest_published = sequence, timestamp_ns
        return None

    def _learn(self, found: Iterable[tuple[Channel, int, int]]) -> None:
        for channel, sequence, timestamp_ns in found:
            channel.oldest_published = sequence, timestamp_ns


def _read_timestamps(wanted: Sequence[tuple[Channel, int]]) -> list[tuple[Channel, int, int]]:
    """Read timestamps from the logs; returns (channel, sequence, timestamp). Thread-safe for logs on disk."""
    known: dict[tuple[Log, int], int] = {}
    found: list[tuple[Channel, int, int]] = []
    for channel, sequence in wanted:
        key = channel.store.log, sequence
        try:
            if key not in known:
                published_ns = channel.store.published_ns(sequence)
                if not published_ns:
                    continue  # damaged, or deleted meanwhile
                known[key] = published_ns
        except LogReadError as exc:
            logger.error("%s/%s: %s", channel.topic.name, channel.name, exc)
        else:
            found.append((channel, sequence, known[key]))
    return found
