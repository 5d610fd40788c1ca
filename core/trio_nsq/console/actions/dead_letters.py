"""Dead letters on several brokers: counts, lists, requeues and drops them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from ...api import broker as api
from ...fleet.dead_letters import CHANNEL, LetterCounts, LetterFilter, LetterGroup, Moved
from ...fleet.dead_letters import count as count_letters
from ...fleet.dead_letters import move as move_letters
from ...fleet.snapshot import Snapshot
from ...fleet.stats import Queue, TopicStats, number, text
from ..messages.bodies import DECODING, TopicBodies
from ..upstream.client import Results, Upstream
from ..upstream.json_lines import read_lines
from .listed_message import ListedMessage, listed_message

_COUNT_S = 3.0
"""Counting goes on for this long; then the counts are a lower bound."""
WORK_S = 10.0
"""One request of a viewer moves letters for this long; then the viewer continues."""
_MAX_ORIGINS = 1000


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

    def of(self, topic: str) -> LetterFilter:
        """Return the letters of a topic, without regard to ids."""
        return LetterFilter(topic, self.origin or None, self.reason or None)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter; `origin` is None if a producer published it to the dead-letter topic.

    Attributes:
        attempts: Deliveries by the channel of origin.
        origin_published_s: The first publish, Unix seconds.
    """

    message: ListedMessage
    origin: LetterGroup | None
    origin_id: str
    attempts: int
    origin_published_s: float


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
    upstream: Upstream, addresses: Sequence[str], topic: str, chosen: Filter
) -> Results[LetterCounts]:
    """Count the letters of a topic by origin and reason, on each broker."""

    async def ask(address: str) -> LetterCounts:
        deadline = trio.current_time() + _COUNT_S
        procedure = count_letters(
            chosen.of(topic),
            lambda counted: trio.current_time() <= deadline and len(counted.rows) <= _MAX_ORIGINS,
        )
        return await upstream.perform(address, procedure)

    return await upstream.on_all(addresses, ask)


async def letters(
    upstream: Upstream, address: str, shown: TopicBodies, chosen: Filter, start: int, at_most: int
) -> tuple[list[DeadLetter], bool]:
    """Return letters of one broker from a sequence on, and whether there are more."""
    request = api.dead_letters(*chosen.of(shown.topic), start, at_most + 1)
    found = await read_lines(upstream, address, request, at_most=at_most + 1)
    more = found.is_cut or len(found.objects) > at_most
    listed = partial(_letters, address, found.objects[:at_most], shown)
    return await trio.to_thread.run_sync(listed, limiter=DECODING), more


async def move(
    upstream: Upstream,
    addresses: Sequence[str],
    topic: str,
    verb: str,
    chosen: Filter,
    *,
    to: str = "channel",
    starts: Mapping[str, int] | None = None,
    limit_s: float = WORK_S,
) -> tuple[dict[str, Moved], dict[str, str]]:
    """Requeue or drop letters on all these brokers; return what each did, and why some stopped.

    Args:
        verb: `requeue` or `drop`.
        to: Requeue to the `channel` of origin, or to all channels of its `topic`.
        starts: The sequences to continue from, by broker.
        limit_s: No request begins after this time.
    """
    done = {address: Moved() for address in addresses}
    deadline = trio.current_time() + limit_s
    work = {
        address: move_letters(
            chosen.of(topic),
            verb,
            moved,
            to=to if verb == "requeue" else None,
            ids=(chosen.ids or {}).get(address, ()),
            first=(starts or {}).get(address, 0),
            goes_on=lambda: trio.current_time() <= deadline,
        )
        for address, moved in done.items()
        if chosen.ids is None or chosen.ids.get(address)
    }
    return done, await upstream.perform_all(work)


def _letters(address: str, lines: Sequence[Mapping[str, Any]], shown: TopicBodies) -> list[DeadLetter]:
    return [_letter(address, line, shown) for line in lines]


def _letter(address: str, line: Mapping[str, Any], shown: TopicBodies) -> DeadLetter:
    raw = line.get("origin")
    if raw is None:
        return DeadLetter(listed_message(address, line, shown.read), None, "", 0, 0)
    origin = LetterGroup(raw["topic"], raw["channel"], raw["reason"])
    message = listed_message(address, line, partial(shown.read, origin=origin.topic or ""))
    return DeadLetter(message, origin, raw["id"], raw["attempts"], raw["timestamp_ns"] / 1e9)


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
        for channel, queue in topic.channels.items():
            if most := number(queue.raw, "max_attempts"):
                target, dropped = text(queue.raw, "dead_letter_topic"), number(queue.raw, "given_up_count")
                yield Rule(address, name, channel, most, target, queue.dead_letters, dropped)
