"""What a destructive action removes, counted on each broker."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...api.broker import unchecked_stats
from ...fleet.changes import Change, Count, removed_by
from ...fleet.stats import parse_topics
from ...text.wording import count_of, is_or_are, was_or_were
from ..upstream.client import Upstream, UpstreamError

_MORE_MESSAGES = 100
"""So many more messages than were shown are no surprise on a topic in use."""


def surprise(now: Count, shown: Count) -> str:
    """Return what to tell a person who confirmed less than is there now; empty: it is about what was shown.

    A broker that did not answer when it was shown makes a difference, too.
    """
    if is_surprise(now.messages, shown.messages):
        there, before, noun = now.messages, shown.messages, "message"
    elif now.channels > shown.channels:
        there, before, noun = now.channels, shown.channels, "channel"
    else:
        return ""
    are = f"there {is_or_are(there)} {count_of(there, noun)} now"
    return f"Nothing was changed: {are}, and {before:,} {was_or_were(before)} shown. Look again."


def is_surprise(now: int, shown: int) -> bool:
    """Whether there are grossly more messages than were shown: more than double, and not just a few."""
    return now > 2 * shown + _MORE_MESSAGES


@dataclass(frozen=True, slots=True)
class Impact:
    """What an action removes.

    Attributes:
        parts: The counts of the brokers that have the topic or channel, by address.
        errors: Why others cannot be asked.
    """

    parts: Mapping[str, Count] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> Count:
        return sum(self.parts.values(), Count())


async def poll(upstream: Upstream, addresses: list[str], change: Change) -> Impact:
    """Ask brokers what a deletion or emptying would remove now."""
    request = unchecked_stats(change.topic, change.channel or None)

    def show(address: str, answer: Mapping[str, Any]) -> Count | None:
        try:
            found = parse_topics(answer).get(change.topic)
        except ValueError as exc:
            raise UpstreamError(address, str(exc)) from exc
        return None if found is None else removed_by(change, found)

    results = (await upstream.ask_all(addresses, request)).map(show)
    parts = {address: count for address, count in results.values.items() if count is not None}
    return Impact(parts, {address: error.reason for address, error in results.errors.items()})
