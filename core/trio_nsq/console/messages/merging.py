"""Merge the messages of several brokers by time. No IO."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .cursor import Cursor
from .message import Message, Row


@dataclass(frozen=True, slots=True)
class Part:
    """What one broker has for a page: all rows from `first` up to, but not including, `end`.

    Attributes:
        rows: In order, the oldest first.
        kept_from, next_sequence: The bounds of the log.
        failed: The broker stopped answering: the other brokers' rows go on without it.
    """

    rows: Sequence[Row]
    first: int
    end: int
    kept_from: int
    next_sequence: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """Rows of all brokers.

    Attributes:
        rows: In the order of the page.
        older, newer: The cursors of the pages before and after these in time; None: there is nothing.
    """

    rows: list[Row]
    older: Cursor | None
    newer: Cursor | None


@dataclass(slots=True)
class _Source:
    """The rows of one broker that are left; `rows[-1]` is the next one."""

    rows: list[Row]
    is_at_end: bool
    time_ns: int | None = None
    taken: list[Row] = field(default_factory=list)


def merge(parts: Mapping[str, Part], limit: int, *, backwards: bool, before: Cursor | None) -> Page:
    """Merge the rows of several brokers.

    Each broker's rows stay in the order of their sequences, also if its clock was set back.

    Args:
        parts: By address.
        limit: The most messages.
        backwards: Whether the page has the newest of the rows, newest first; otherwise the oldest, oldest first.
        before: The cursor at which the page begins; None: an end of the logs. Brokers that are not in `parts` keep
            their positions in it.
    """
    sources = {address: _source(part, backwards) for address, part in parts.items()}
    rows: list[Row] = []
    messages = 0
    time_ns = before.time_ns if before is not None else None
    while messages < limit:
        if any(not source.rows and not source.is_at_end for source in sources.values()):
            break  # this broker's next message is not known
        address = _next_source(sources, backwards)
        if address is None:
            break
        source = sources[address]
        row = source.rows.pop()
        rows.append(row)
        source.taken.append(row)
        if isinstance(row, Message):
            messages += 1
            time_ns = row.timestamp_ns
    near, far = _cursors(parts, sources, backwards, before, time_ns)
    older, newer = (far, near) if backwards else (near, far)
    return Page(
        rows,
        older if _has_older(parts, older) else None,
        None if backwards and before is None else newer,
    )


def _source(part: Part, backwards: bool) -> _Source:
    if backwards:
        return _Source(list(part.rows), part.failed or part.first <= part.kept_from)
    return _Source(list(reversed(part.rows)), part.failed or part.end >= part.next_sequence)


def _next_source(sources: Mapping[str, _Source], backwards: bool) -> str | None:
    """Return the broker with the next row. What is missing comes with the message before it."""
    times: list[tuple[int, str]] = []
    for address, source in sources.items():
        if source.rows:
            row = source.rows[-1]
            if not isinstance(row, Message):
                return address
            times.append((row.timestamp_ns, address))
    if not times:
        return None
    return (max if backwards else min)(times)[1]  # at equal times, one direction mirrors the other


def _cursors(
    parts: Mapping[str, Part],
    sources: Mapping[str, _Source],
    backwards: bool,
    before: Cursor | None,
    time_ns: int | None,
) -> tuple[Cursor, Cursor]:
    """Return the cursors where the page begins and ends, in its direction."""
    known = dict(before.sequences) if before is not None else {}
    near, far = dict(known), dict(known)
    for address, part in parts.items():
        taken = sources[address].taken
        near[address] = far[address] = part.end if backwards else part.first
        if taken:
            far[address] = taken[-1].first_sequence if backwards else taken[-1].next_sequence
    begin_ns = before.time_ns if before is not None else None
    return Cursor(near, begin_ns), Cursor(far, time_ns)


def _has_older(parts: Mapping[str, Part], cursor: Cursor) -> bool:
    return any(cursor.sequences.get(address, 0) > part.kept_from for address, part in parts.items())
