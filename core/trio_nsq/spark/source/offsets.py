"""The offsets of a stream, which Spark keeps in the checkpoint of a query.

An offset is a JSON object with an object for each broker:

    {"127.0.0.1:4151": {"first": 0, "id": "9a46b01870c003e7", "sequence": 1000}}

    first     where the stream started to read this broker's log
    id        the id of the message before `sequence`, which identifies the log; absent if there is none
    sequence  the next sequence to read

The first offset is empty: the starting position is resolved once and kept with the first batch, because `latest` would
be another sequence the next time. A broker that is added later starts in the same way.

Spark compares offsets as text, so keys are sorted, and an unchanged broker keeps its object.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from .options import SourceError

Offset: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BrokerOffset:
    """How far one broker's log is read; see above."""

    first: int
    sequence: int
    last_id: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As the object in an offset."""
        found: dict[str, Any] = {"first": self.first}
        if self.last_id is not None:
            found["id"] = self.last_id
        return found | {"sequence": self.sequence}


def parse_offset(offset: Mapping[str, Any]) -> dict[str, BrokerOffset]:
    """Parse an offset, by broker. Raises SourceError: it is not an offset of this source."""
    try:
        return {
            broker: BrokerOffset(int(found["first"]), int(found["sequence"]), found.get("id"))
            for broker, found in offset.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        raise SourceError(
            f"the checkpoint is of another source, or another version of it: {offset}"
        ) from None


def build_offset(positions: Mapping[str, BrokerOffset]) -> Offset:
    """Build an offset."""
    return {broker: positions[broker].to_json() for broker in sorted(positions)}


def share_limit(available: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """Divide the limit of a batch among the brokers.

    Each broker gets a share in proportion to its backlog, so that all are read at the same pace by time, but at least
    one message, so that a small backlog does not wait for a large one.

    Args:
        available: The backlog of each broker.
        limit: The limit of the batch; None: no limit.
    """
    total = sum(available.values())
    if limit is None or total <= limit:
        return dict(available)
    waiting = sorted((broker for broker in available if available[broker]), key=lambda each: -available[each])
    one_each = set(waiting[:limit])
    left, rest = limit - len(one_each), total - len(one_each)
    return {
        broker: (broker in one_each) + left * (count - (broker in one_each)) // rest
        for broker, count in available.items()
    }
