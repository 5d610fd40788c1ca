"""Deferred messages on several brokers: a calendar of what is due, a list, and cancellation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import trio

from ..fleet.stats import number
from ..upstream.client import Results, Upstream, UpstreamError
from ..upstream.json_lines import read_lines
from .shown import Shown, shown

_DAYS = 14
CANCEL_S = 10.0
"""One request of a viewer cancels for this long; then the viewer continues."""
_IDS_AT_ONCE = 500


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


@dataclass(slots=True)
class Cancelled:
    """What one broker cancelled.

    Attributes:
        missed: Ids that were not deferred any more.
        is_finished: Whether there is nothing left to cancel.
        error: Why it stopped; empty if it did not.
    """

    done: int = 0
    missed: int = 0
    is_finished: bool = True
    error: str = ""


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
    """Return the numbers of all brokers together."""
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
    token: str | None,
    topic: str,
    channel: str,
    calendar: Sequence[Slot],
) -> Results[Counts]:
    """Count the deferred messages of a channel by due time, on each broker."""
    ends = [slot.end_s for slot in calendar if slot.end_s is not None]
    params = {"topic": topic, "channel": channel, "before": ",".join(f"@{end}" for end in ends)}

    async def ask(address: str) -> Counts:
        answer = await upstream.json("GET", address, "/channel/deferred/counts", params, token=token)
        return _counts(address, answer, len(ends))

    return await upstream.on_all(addresses, ask)


async def messages(
    upstream: Upstream, addresses: Sequence[str], token: str | None, topic: str, channel: str, at_most: int
) -> Results[list[Shown]]:
    """Return the deferred messages of a channel that are due first, on each broker."""
    params = {"topic": topic, "channel": channel, "max_messages": str(at_most)}

    async def ask(address: str) -> list[Shown]:
        lines = await read_lines(upstream, address, "/channel/deferred", params, token, at_most=at_most)
        return [shown(address, line) for line in lines.objects]

    return await upstream.on_all(addresses, ask)


def first(lists: Mapping[str, list[Shown]], at_most: int) -> list[Shown]:
    """Return the messages of all brokers that are due first."""
    every = [message for found in lists.values() for message in found]
    return sorted(every, key=lambda message: (message.due_s, message.broker, message.sequence))[:at_most]


async def cancel(
    upstream: Upstream,
    addresses: Sequence[str],
    token: str | None,
    topic: str,
    channel: str,
    ids: Mapping[str, Sequence[str]] | None,
) -> dict[str, Cancelled]:
    """Cancel deferred messages, for at most `CANCEL_S`.

    Args:
        ids: By broker; None: all.
    """
    names = {"topic": topic, "channel": channel}
    found: dict[str, Cancelled] = {}
    deadline = trio.current_time() + CANCEL_S

    async def drop(address: str, some: Sequence[str]) -> None:
        params = {**names, "id": ",".join(some)}
        answer = await upstream.json("POST", address, "/channel/deferred/cancel", params, token=token)
        done = answer.get("cancelled") if isinstance(answer, dict) else None
        count = len(done) if isinstance(done, list) else 0
        found[address].done += count
        found[address].missed += len(some) - count

    async def next_ids(address: str) -> list[str]:
        params = {**names, "max_messages": str(_IDS_AT_ONCE)}
        lines = await read_lines(upstream, address, "/channel/deferred", params, token, at_most=_IDS_AT_ONCE)
        return [message.id for line in lines.objects if (message := shown(address, line)).id]

    async def work(address: str) -> None:
        progress = found[address] = Cancelled()
        try:
            if ids is not None:
                some = ids.get(address, ())
                for at in range(0, len(some), _IDS_AT_ONCE):
                    await drop(address, some[at : at + _IDS_AT_ONCE])
                return
            while listed := await next_ids(address):
                before = progress.done
                await drop(address, listed)
                if progress.done == before:
                    return  # the rest is due by now
                if trio.current_time() > deadline:
                    progress.is_finished = False
                    return
        except UpstreamError as exc:
            progress.error = exc.reason

    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(work, address)
    return {address: found[address] for address in addresses}


def _counts(address: str, answer: Any, wanted: int) -> Counts:
    before = answer.get("due_before") if isinstance(answer, dict) else None
    if not isinstance(before, list) or len(before) != wanted or not all(type(each) is int for each in before):
        raise UpstreamError(address, "its answer has no counts of deferred messages")
    times_s = (number(answer, "first_due_ns") / 1e9, number(answer, "last_due_ns") / 1e9)
    return Counts(number(answer, "deferred_count"), *times_s, before)


def _unix(moment: datetime | None) -> int | None:
    return int(moment.timestamp()) if moment is not None else None
