"""Deferred messages on several brokers: a calendar of what is due, a list, and cancellation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import trio

from ...api import broker as api
from ...api.answers import DeferredCounts
from ...bodies.reading import BodyReader, ReadsBody
from ...fleet.deferred import Cancelled, cancel_all
from ...fleet.deferred import cancel as cancel_some
from ..messages.bodies import DECODING, PageBodies
from ..upstream.client import Results, Upstream
from ..upstream.json_lines import read_lines
from .listed_message import ListedMessage, listed_message

_DAYS = 14
CANCEL_S = 10.0
"""One request of a viewer cancels for this long; then the viewer continues."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A part of the calendar: from `start_s` until before `end_s`, Unix seconds; None: open."""

    label: str
    start_s: int | None
    end_s: int | None


@dataclass(frozen=True, slots=True)
class Bar:
    """A slot, and how many messages are due in it, on all brokers."""

    slot: Slot
    count: int


@dataclass(frozen=True, slots=True)
class Counts:
    """The deferred messages of one broker: how many in all, and how many are due before the end of each slot."""

    total: int
    first_due_s: float
    last_due_s: float
    before: Sequence[int]


def slots(now_s: float) -> list[Slot]:
    """Return the calendar: today by hour, then some days, then the rest. Times are UTC."""
    now = datetime.fromtimestamp(now_s, UTC)
    hour = now.replace(minute=0, second=0, microsecond=0)
    midnight = hour.replace(hour=0) + timedelta(days=1)
    found: list[Slot] = []
    start: datetime | None = None  # what is overdue counts in the first hour
    while hour < midnight:
        end = hour + timedelta(hours=1)
        found.append(Slot(f"today, {hour:%H}:00", _unix(start), _unix(end)))
        start = hour = end
    for day in range(_DAYS):
        begin = midnight + timedelta(days=day)
        label = "tomorrow" if day == 0 else f"{begin:%a %Y-%m-%d}"
        found.append(Slot(label, _unix(begin), _unix(begin + timedelta(days=1))))
    return [*found, Slot("later", found[-1].end_s, None)]


def bars(calendar: Sequence[Slot], counts: Sequence[Counts]) -> list[Bar]:
    found: list[Bar] = []
    before = 0
    total = sum(each.total for each in counts)
    for number_, slot in enumerate(calendar):
        until = total if slot.end_s is None else sum(each.before[number_] for each in counts)
        found.append(Bar(slot, max(0, until - before)))
        before = until
    return found


async def count(
    upstream: Upstream,
    addresses: Sequence[str],
    topic: str,
    channel: str,
    calendar: Sequence[Slot],
) -> Results[Counts]:
    """Count the deferred messages of a channel by due time, on each broker."""
    ends = [slot.end_s for slot in calendar if slot.end_s is not None]
    request = api.deferred_counts(topic, channel, ends)

    def show(_address: str, answer: DeferredCounts) -> Counts:
        times_s = (answer["first_due_ns"] or 0) / 1e9, (answer["last_due_ns"] or 0) / 1e9
        return Counts(answer["deferred_count"], *times_s, answer["due_before"])

    return (await upstream.ask_all(addresses, request)).map(show)


async def messages(
    upstream: Upstream,
    addresses: Sequence[str],
    topic: str,
    channel: str,
    at_most: int,
    reader: BodyReader,
) -> Results[list[ListedMessage]]:
    """Return the deferred messages of a channel that are due first, on each broker; `reader` reads their bodies."""
    request = api.deferred(topic, channel, at_most)
    read = partial(PageBodies().read, reader)

    async def ask(address: str) -> list[ListedMessage]:
        lines = await read_lines(upstream, address, request, at_most=at_most)
        listed = partial(_listed, address, lines.objects, read)
        return await trio.to_thread.run_sync(listed, limiter=DECODING)

    return await upstream.on_all(addresses, ask)


def _listed(address: str, lines: Sequence[Mapping[str, Any]], read: ReadsBody) -> list[ListedMessage]:
    return [listed_message(address, line, read) for line in lines]


def first(lists: Mapping[str, list[ListedMessage]], at_most: int) -> list[ListedMessage]:
    """Return the messages of all brokers that are due first."""
    every = [message for found in lists.values() for message in found]
    return sorted(every, key=lambda message: (message.due_s, message.broker, message.sequence))[:at_most]


async def cancel(
    upstream: Upstream,
    addresses: Sequence[str],
    topic: str,
    channel: str,
    ids: Mapping[str, Sequence[str]] | None,
) -> tuple[dict[str, Cancelled], dict[str, str]]:
    """Cancel deferred messages, for at most `CANCEL_S`; return what each broker did, and why some stopped.

    Args:
        ids: By broker; None: all.
    """
    done = {address: Cancelled() for address in addresses}
    deadline = trio.current_time() + CANCEL_S
    work = {
        address: cancel_all(topic, channel, cancelled, lambda: trio.current_time() <= deadline)
        if ids is None
        else cancel_some(topic, channel, ids.get(address, ()), cancelled)
        for address, cancelled in done.items()
    }
    return done, await upstream.perform_all(work)


def _unix(moment: datetime | None) -> int | None:
    return int(moment.timestamp()) if moment is not None else None
