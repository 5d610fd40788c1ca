"""How far a stream of the data source `nsq` has come, as Spark keeps it in its checkpoint.

A JSON object, with an object for each broker:

    {"127.0.0.1:4151": {"first": 0, "id": "9a46b01870c003e7", "sequence": 1000}}

    first     where the stream began to read this broker's log
    id        of the message before `sequence`, by which the log can be told from another one; absent if there is none
    sequence  the one that will be read next

Before anything is known it is an empty object, so that where a stream begins is settled once, and noted with the first
batch: `latest` asked for a second time would be another place. A broker that joins later does so in the same way.

Spark compares offsets as text: keys are sorted, and what has not changed stays as it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from .options import SourceError

Offset: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BrokerOffset:
    """How far one broker's log is read; see the module."""

    first: int
    sequence: int
    last_id: str | None = None

    def as_json(self) -> dict[str, Any]:
        """As it is in an offset."""
        found: dict[str, Any] = {"first": self.first}
        if self.last_id is not None:
            found["id"] = self.last_id
        return found | {"sequence": self.sequence}


def parse_offset(offset: Mapping[str, Any]) -> dict[str, BrokerOffset]:
    """By broker. Raises SourceError: this is no offset of ours."""
    try:
        return {
            broker: BrokerOffset(int(found["first"]), int(found["sequence"]), found.get("id"))
            for broker, found in offset.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        raise SourceError(
            f"the checkpoint is of another source, or another version of it: {offset}"
        ) from None


def build_offset(places: Mapping[str, BrokerOffset]) -> Offset:
    """The other way round."""
    return {broker: places[broker].as_json() for broker in sorted(places)}


def share_limit(available: Mapping[str, int], most: int | None) -> dict[str, int]:
    """How many messages of each broker go into a batch.

    Of each about the same part of what there is, so that they come to the end together, and times with them; but one at
    least, so that little is not passed over while there is much elsewhere.

    Args:
        available: How many there are, by broker.
        most: In all; None: no limit.
    """
    total = sum(available.values())
    if most is None or total <= most:
        return dict(available)
    waiting = sorted((broker for broker in available if available[broker]), key=lambda each: -available[each])
    one_each = set(waiting[:most])
    left, rest = most - len(one_each), total - len(one_each)
    return {
        broker: (broker in one_each) + left * (count - (broker in one_each)) // rest
        for broker, count in available.items()
    }
