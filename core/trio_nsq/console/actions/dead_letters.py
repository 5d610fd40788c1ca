"""Dead letters on several brokers: counts, lists, requeues and drops them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from ..fleet.snapshot import Snapshot
from ..fleet.stats import Queue, TopicStats, number, text
from ..upstream.client import Results, Upstream, UpstreamError
from ..upstream.json_lines import read_lines
from .shown import Shown, shown

CHANNEL = "dead-letters"
"""The channel of a dead-letter topic that holds the letters."""
REASONS = ("requeued", "timed_out", "connection_lost")
VERBS = {"requeue": "requeued", "drop": "dropped"}
_COUNT_S = 3.0
"""Counting goes on for this long; then the counts are a lower bound."""
WORK_S = 10.0
"""One request of a viewer moves letters for this long; then the viewer continues."""
_MAX_ORIGINS = 1000
_MAX_IDS = 500


@dataclass(frozen=True, slots=True)
class Filter:
    """Which dead letters; empty: all.

    Attributes:
        origin: `TOPIC` or `TOPIC/CHANNEL`.
        ids: By broker; None: all that match.
    """

    origin: str = ""
    reason: str = ""
    ids: Mapping[str, Sequence[str]] | None = None

    def params(self, topic: str) -> dict[str, str]:
        """Return the parameters of a request."""
        params = {"topic": topic}
        params |= {"origin": self.origin} if self.origin else {}
        return params | ({"reason": self.reason} if self.reason else {})


@dataclass(frozen=True, slots=True)
class Origin:
    """Where letters come from; empty texts: a producer published them to the dead-letter topic."""

    topic: str
    channel: str
    reason: str

    @property
    def name(self) -> str:
        """`TOPIC/CHANNEL`."""
        return f"{self.topic}/{self.channel}" if self.channel else self.topic


@dataclass(slots=True)
class Counted:
    """How many letters there are on one broker.

    Attributes:
        by_origin: The numbers.
        first_s, last_s: When the first and the last one became a dead letter, by origin, Unix seconds.
        in_flight: Letters that consumers of the dead-letter topic have: they are in no other number.
        is_complete: Whether all were counted.
    """

    by_origin: Counter[Origin] = field(default_factory=Counter)
    first_s: dict[Origin, float] = field(default_factory=dict)
    last_s: dict[Origin, float] = field(default_factory=dict)
    in_flight: int = 0
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter; `origin` is None if a producer published it to the dead-letter topic.

    Attributes:
        attempts: Deliveries by the channel of origin.
        origin_published_s: The first publish, Unix seconds.
    """

    message: Shown
    origin: Origin | None
    origin_id: str
    attempts: int
    origin_published_s: float


@dataclass(slots=True)
class Progress:
    """What one broker requeued or dropped.

    Attributes:
        kept: The numbers of letters that cannot be requeued, by reason.
        next_sequence: Where to continue; None: it is finished.
        error: Why it stopped; empty if it did not.
    """

    done: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    next_sequence: int | None = None
    error: str = ""


def topics_of(snapshot: Snapshot) -> dict[str, Mapping[str, Queue]]:
    """Return the dead-letter topics, with the queues of their channels by broker; nsqd has none."""
    found: dict[str, Mapping[str, Queue]] = {}
    for name, topic in snapshot.topics.items():
        if (channel := topic.channels.get(CHANNEL)) is not None:
            parts = {
                address: part
                for address, part in channel.parts.items()
                if not snapshot.brokers[address].is_nsqd
            }
            if parts:
                found[name] = parts
    return found


async def count(
    upstream: Upstream, addresses: Sequence[str], token: str | None, topic: str, chosen: Filter
) -> Results[Counted]:
    """Count the letters of a topic by origin and reason, on each broker."""

    async def ask(address: str) -> Counted:
        counted, start, deadline = Counted(), 0, trio.current_time() + _COUNT_S
        while True:
            params = chosen.params(topic) | {"from": str(start)}
            answer = await upstream.json("GET", address, "/dead_letters", params, token=token)
            _add(counted, address, answer)
            if (following := _next(answer, start)) is None:
                return counted
            if trio.current_time() > deadline or len(counted.by_origin) > _MAX_ORIGINS:
                counted.is_complete = False
                return counted
            start = following

    return await upstream.on_all(addresses, ask)


async def letters(
    upstream: Upstream, address: str, token: str | None, topic: str, chosen: Filter, start: int, at_most: int
) -> tuple[list[Letter], bool]:
    """Return letters of one broker from a sequence on, and whether there are more."""
    params = chosen.params(topic) | {"from": str(start), "max_messages": str(at_most + 1)}
    found = await read_lines(upstream, address, "/dead_letters/messages", params, token, at_most=at_most + 1)
    more = found.is_cut or len(found.objects) > at_most
    return [_letter(address, line) for line in found.objects[:at_most]], more


async def move(
    upstream: Upstream,
    addresses: Sequence[str],
    token: str | None,
    topic: str,
    verb: str,
    chosen: Filter,
    *,
    to: str = "channel",
    starts: Mapping[str, int] | None = None,
    limit_s: float = WORK_S,
) -> dict[str, Progress]:
    """Requeue or drop letters on all these brokers.

    Args:
        verb: `requeue` or `drop`.
        to: Requeue to the `channel` of origin, or to all channels of its `topic`.
        starts: The sequences to continue from, by broker.
        limit_s: No request begins after this time.
    """
    found: dict[str, Progress] = {}
    deadline = trio.current_time() + limit_s

    async def work(address: str) -> None:
        progress = found[address] = Progress()
        ids = chosen.ids.get(address, ()) if chosen.ids is not None else None
        pages = [ids[at : at + _MAX_IDS] for at in range(0, len(ids), _MAX_IDS)] if ids is not None else [()]
        try:
            for page in pages:
                start: int | None = (starts or {}).get(address, 0)
                while start is not None:
                    if trio.current_time() > deadline:
                        progress.next_sequence = start
                        return
                    params = chosen.params(topic) | {"from": str(start)}
                    params |= {"id": ",".join(page)} if page else {}
                    params |= {"to": to} if verb == "requeue" else {}
                    answer = await upstream.json(
                        "POST", address, f"/dead_letters/{verb}", params, token=token
                    )
                    start = _moved(progress, VERBS[verb], answer, start)
        except UpstreamError as exc:
            progress.error = exc.reason

    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(work, address)
    return {address: found[address] for address in addresses}


def _add(counted: Counted, address: str, answer: Any) -> None:
    rows = answer.get("origins") if isinstance(answer, dict) else None
    if not isinstance(rows, list):
        raise UpstreamError(address, "its answer has no counts of dead letters")
    counted.in_flight = number(answer, "in_flight")
    for row in rows[:_MAX_ORIGINS]:
        if not isinstance(row, dict):
            continue
        origin = Origin(text(row, "topic"), text(row, "channel"), text(row, "reason"))
        first_s, last_s = number(row, "first_ns") / 1e9, number(row, "last_ns") / 1e9
        counted.by_origin[origin] += number(row, "count")
        counted.first_s[origin] = min(counted.first_s.get(origin, first_s), first_s)
        counted.last_s[origin] = max(counted.last_s.get(origin, last_s), last_s)


def _moved(progress: Progress, key: str, answer: Any, start: int) -> int | None:
    """Add an answer to the progress, and return the sequence to continue from."""
    if not isinstance(answer, dict):
        return None
    progress.done += number(answer, key)
    rows = answer.get("kept")
    for row in rows[:_MAX_ORIGINS] if isinstance(rows, list) else ():
        if isinstance(row, dict):
            progress.kept[text(row, "why")] += number(row, "count")
    return _next(answer, start)


def _next(answer: Any, start: int) -> int | None:
    """Return the sequence to continue from; None at the end, or if the broker does not get on."""
    following = answer.get("next_sequence")
    return following if type(following) is int and following > start else None


def _letter(address: str, line: Mapping[str, Any]) -> Letter:
    raw = line.get("origin")
    if not isinstance(raw, dict):
        return Letter(shown(address, line), None, "", 0, 0)
    origin = Origin(text(raw, "topic"), text(raw, "channel"), text(raw, "reason"))
    published_s = number(raw, "timestamp_ns") / 1e9
    return Letter(shown(address, line), origin, text(raw, "id"), number(raw, "attempts"), published_s)


@dataclass(frozen=True, slots=True)
class Rule:
    """A channel with a limit of attempts, on one broker.

    Attributes:
        to: The dead-letter topic; empty: messages are dropped.
        moved, dropped: Messages since the broker's start.
    """

    broker: str
    topic: str
    channel: str
    max_attempts: int
    to: str
    moved: int
    dropped: int


def rules_of(address: str, topics: Mapping[str, TopicStats]) -> Iterator[Rule]:
    """Yield the channels of a broker that have a limit of attempts."""
    for name, topic in topics.items():
        channels = topic.raw.get("channels")
        for raw in channels if isinstance(channels, list) else ():
            if isinstance(raw, dict) and (most := number(raw, "max_attempts")):
                moved, dropped = number(raw, "dead_letter_count"), number(raw, "given_up_count")
                target = text(raw, "dead_letter_topic")
                yield Rule(address, name, text(raw, "channel_name"), most, target, moved, dropped)
