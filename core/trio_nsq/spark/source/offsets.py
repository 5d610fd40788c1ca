"""The offsets of a stream, which Spark stores in the checkpoint of a query.

An offset is a JSON object with an object for each broker:

    {"127.0.0.1:4151": {"first": 0, "id": "9a46b01870c003e7", "incarnation": "5f...", "sequence": 1000}}

    first        where the stream started to read this broker's log
    id           the id of the message before `sequence`; absent if there is none
    incarnation  the identity of the log; absent if it is unknown, as in offsets of older versions
    sequence     the next sequence to read

The key is the address where the log was found first. It stays when the broker has another address.

For a broker that has not answered since the stream started it is `{"start": "@1795262400.000"}`, the position where
reading starts. If a query has several topics, the offset has such an object of brokers for each topic:

    {"clicks": {"127.0.0.1:4151": {"first": 0, "sequence": 0}}}

The first offset is empty: the starting position is resolved once and stored with the first batch, because `latest`
would be another sequence later. Spark compares offsets as text, so keys are sorted, and an unchanged log keeps its
object.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ...fleet.log_identity import LogMark
from .fleet import LogKey
from .options import SourceError, Subscription

K = TypeVar("K", bound=Hashable)

Offset: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LogOffset:
    """The read position in one log."""

    first: int
    sequence: int
    last_id: str | None = None
    incarnation: str | None = None

    @property
    def mark(self) -> LogMark:
        """What identifies the log."""
        return LogMark.before(self.sequence, self.last_id, self.incarnation)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"first": self.first}
        if self.last_id is not None:
            found["id"] = self.last_id
        if self.incarnation is not None:
            found["incarnation"] = self.incarnation
        return found | {"sequence": self.sequence}


@dataclass(frozen=True, slots=True)
class NotReached:
    """A log on a broker that has not answered since the stream started.

    Attributes:
        start: The position where reading starts; not relative to the time when the broker answers.
    """

    start: str

    def to_json(self) -> dict[str, Any]:
        """Convert to the object of an offset."""
        return {"start": self.start}


LogOffsets: TypeAlias = dict[LogKey, LogOffset | NotReached]


def parse_offset(offset: Mapping[str, Any], subscription: Subscription) -> LogOffsets:
    """Parse an offset, by log. Raises SourceError if it is not an offset of this query."""
    try:
        if not subscription.single:
            if any("first" in found or "start" in found for found in offset.values()):
                raise SourceError(
                    "the checkpoint belongs to a query with the option topic: give this option, or start the query "
                    "with a new checkpoint"
                )
            return {
                LogKey(topic, broker): _parse(found)
                for topic, brokers in offset.items()
                for broker, found in brokers.items()
            }
        (topic,) = subscription.topics
        return {LogKey(topic, broker): _parse(found) for broker, found in offset.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise SourceError(
            "the checkpoint belongs to another source, another version of this one, or a query with other topics: "
            f"{offset}"
        ) from None


def _parse(found: Mapping[str, Any]) -> LogOffset | NotReached:
    if "start" in found:
        return NotReached(str(found["start"]))
    return LogOffset(int(found["first"]), int(found["sequence"]), found.get("id"), found.get("incarnation"))


def build_offset(positions: LogOffsets, subscription: Subscription) -> Offset:
    """Build an offset of the positions of all logs."""
    return by_topic({key: found.to_json() for key, found in positions.items()}, subscription)


def by_topic(found: Mapping[LogKey, Any], subscription: Subscription) -> Offset:
    """Arrange values like an offset: by broker, and with several topics by topic first."""
    if subscription.single:
        return {key.broker: found[key] for key in sorted(found)}
    offset: Offset = {}
    for key in sorted(found):
        offset.setdefault(key.topic, {})[key.broker] = found[key]
    return offset


def share_limit(available: Mapping[K, int], limit: int | None) -> dict[K, int]:
    """Divide the limit of a batch among the logs.

    Each log gets a share in proportion to its backlog, so that all logs are read at the same pace. It gets at least one
    message, so that a small backlog does not wait for a large one.

    Args:
        available: The backlog of each log.
        limit: The limit of the batch; None: no limit.
    """
    total = sum(available.values())
    if limit is None or total <= limit:
        return dict(available)
    waiting = sorted((key for key in available if available[key]), key=lambda each: -available[each])
    one_each = set(waiting[:limit])
    left, rest = limit - len(one_each), total - len(one_each)
    return {
        key: (key in one_each) + left * (count - (key in one_each)) // rest
        for key, count in available.items()
    }
