"""One page of a topic's messages, from all its brokers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trio

from ...client.reading.broker_log import Bounds
from ..upstream.client import Upstream, UpstreamError
from .bodies import DECODING, TopicBodies
from .cursor import Cursor
from .merging import Page, Part, merge
from .message import Message, MissingMessages, Row, rows_of
from .reading import TopicLog, Walk

KEEP_BYTES = 4 * 1024
"""What a list keeps of each body."""
READ_BYTES = 16 * 1024 * 1024
"""The most bytes that one page reads from a broker, and one more answer. With larger messages, it has fewer."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a page begins, and in which direction it goes.

    Attributes:
        cursor: The cursor of another page; None: `position`.
        position: A position of the broker's HTTP API.
        earliest, latest: Further positions, which limit the messages: none before the first, and none from the second
            on; empty: no limit.
    """

    backwards: bool
    cursor: Cursor | None = None
    position: str = "latest"
    earliest: str = ""
    latest: str = ""

    def on(self, address: str) -> str:
        """Return the position of a broker."""
        known = self.cursor.position(address) if self.cursor is not None else None
        return known if known is not None else self.position

    async def bounds(self, log: TopicLog) -> Bounds:
        """Return the bounds within the limits, and the sequence where the page begins. Raises UpstreamError."""
        found = await log.bounds(self.on(log.address))
        first, end = found.first, found.end
        if self.earliest:
            first = (await log.bounds(self.earliest)).at
        if self.latest:
            end = (await log.bounds(self.latest)).at
        end = max(first, end)
        return found._replace(first=first, end=end, at=min(max(first, found.at), end))


@dataclass(frozen=True, slots=True)
class Listing:
    """A page, and the brokers that did not do their part, with the reason."""

    page: Page
    errors: Mapping[str, str]


async def read_page(
    upstream: Upstream,
    shown: TopicBodies,
    brokers: Sequence[str],
    start: Start,
    count: int,
    *,
    deadline_s: float,
) -> Listing:
    """Read a page.

    Args:
        shown: The topic, and how its bodies are shown.
        brokers: Their HTTP addresses.
        count: The most messages.
        deadline_s: The limit for each broker; the page has what the broker sent until then.
    """
    errors: dict[str, str] = {}

    async def read(address: str) -> Part:
        log = TopicLog(upstream, address, shown.topic)
        return await _read_part(log, shown, start, count, deadline_s, errors)

    results = await upstream.on_all(brokers, read)
    errors |= {address: error.reason for address, error in results.errors.items()}
    page = merge(results.values, count, backwards=start.backwards, before=start.cursor)
    return Listing(page, errors)


async def _read_part(
    log: TopicLog, shown: TopicBodies, start: Start, count: int, deadline_s: float, errors: dict[str, str]
) -> Part:
    """Read a broker's part. What fails after the beginning goes to `errors`. Raises UpstreamError."""
    position = start.on(log.address)
    rows: list[Row] = []
    walk: Walk | None = None
    with trio.move_on_after(deadline_s) as scope:
        try:
            bounds = await start.bounds(log)
            walk = Walk(log, bounds, bounds.at, backwards=start.backwards)
            first = bounds.at
            if (
                not start.backwards
                and not start.earliest
                and position.isdigit()
                and int(position) < bounds.first
            ):
                rows.append(MissingMessages(log.address, int(position), bounds.first, "discarded"))
                first = int(position)
            messages = 0
            while messages < count and not walk.is_done and walk.size < READ_BYTES:
                piece = await walk.next(count - messages)
                found_rows = rows_of(
                    log.address, piece.records, piece.first, piece.end, piece.kept_from, shown
                )
                found = await trio.to_thread.run_sync(
                    list[Row], found_rows, limiter=DECODING, abandon_on_cancel=True
                )
                messages += sum(isinstance(row, Message) for row in found)
                rows = found + rows if start.backwards else rows + found
        except UpstreamError as exc:
            if walk is None:
                raise
            errors[log.address] = exc.reason
    if scope.cancelled_caught:
        errors[log.address] = f"no answer within {deadline_s:g} s"
    if walk is None:
        raise UpstreamError(log.address, errors[log.address])
    begin, end = (walk.position, bounds.at) if start.backwards else (first, walk.position)
    return Part(rows, begin, end, bounds.first, bounds.end, failed=log.address in errors)
