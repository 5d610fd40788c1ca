"""One message of a topic: by sequence, or found by its id."""

from dataclasses import dataclass
from functools import partial

import trio

from ...client.reading.broker_log import Bounds
from ..upstream.client import UpstreamError
from .bodies import DECODING, TopicBodies
from .message import Row, rows_of
from .reading import TopicLog


@dataclass(frozen=True, slots=True)
class Single:
    """What is at a sequence.

    Attributes:
        row: The message, or what is missing there; None: the sequence is after the end of the log.
        bounds: Of the log.
    """

    row: Row | None
    bounds: Bounds


async def read_single(log: TopicLog, sequence: int, shown: TopicBodies) -> Single:
    """Read the message with a sequence. Raises UpstreamError."""
    bounds = await log.bounds()
    if sequence >= bounds.end:
        return Single(None, bounds)
    piece = await log.read(sequence, sequence + 1, 1)
    found = rows_of(log.address, piece.records, sequence, sequence + 1, piece.kept_from, shown)
    row = await trio.to_thread.run_sync(partial(next, found, None), limiter=DECODING)
    return Single(row, bounds)


async def find_id(log: TopicLog, wanted: int, deadline_s: float) -> int | None:
    """Return the sequence of the message with an id; None if the log does not have it.

    Ids grow with the sequence, so this reads about as many records as the number of messages has binary digits.

    Raises:
        UpstreamError: The broker does not answer in time.
    """
    with trio.move_on_after(deadline_s):
        bounds = await log.bounds()
        low, high = bounds.first, bounds.end
        while low < high:
            middle = (low + high) // 2
            piece = await log.read(middle, high, 1)
            if not piece.records:
                high = middle
                continue
            record = piece.records[0]
            if wanted < record.first_id:
                high = min(middle, record.base_sequence)
            elif wanted >= record.first_id + record.count:
                low = record.next_sequence
            else:
                return record.base_sequence + wanted - record.first_id
        return None
    raise UpstreamError(log.address, f"no answer within {deadline_s:g} s")
