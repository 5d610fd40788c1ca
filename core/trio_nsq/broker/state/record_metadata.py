"""Record metadata: what the broker stores with messages in their record. JSON objects of three kinds.

    {"channel": "billing"}
        Only this channel of the topic gets them. Their record has a due time, so that nobody reads them in their turn.

    {"dead_letters": {"topic": "orders", "channel": "billing", "messages": [[id, sequence, attempts, timestamp_ns,
                                                                             reason], ...]}}
        Dead letters, and where they come from, in the order of the messages in the record.

    {"producer": "load-17", "number": 4}
        A batch that is to be published once, and all of it; see `Producers`.

It lies in the record of its messages, so that both are stored or neither is. Clients do not see it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

_OF_BATCH = b'{"producer":'


class Reason(StrEnum):
    """How a message came back from its last delivery."""

    REQUEUED = "requeued"
    TIMED_OUT = "timed_out"
    CONNECTION_LOST = "connection_lost"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a dead letter comes from.

    Attributes:
        topic, channel: Where it was given up.
        id: It had this id there, 16 hex digits.
        sequence: Its place in that topic.
        attempts: How often it was delivered there.
        timestamp_ns: When it was published there, Unix nanoseconds.
        reason: How it came back the last time.
    """

    topic: str
    channel: str
    id: str
    sequence: int
    attempts: int
    timestamp_ns: int
    reason: Reason


def only_channel(metadata: bytes) -> str | None:
    """The only channel that gets the messages with this metadata; None: all do. Raises ValueError."""
    channel: str | None = json.loads(metadata).get("channel") if metadata else None
    return channel


def metadata_for_channel(channel: str) -> bytes:
    return json.dumps({"channel": channel}).encode()


def origins(metadata: bytes) -> list[Origin]:
    """Where the messages with this metadata come from, in their order; empty if they are no dead letters."""
    letters = json.loads(metadata).get("dead_letters") if metadata else None
    if letters is None:
        return []
    topic, channel = letters["topic"], letters["channel"]
    return [
        Origin(topic, channel, message_id, sequence, attempts, timestamp_ns, Reason(reason))
        for message_id, sequence, attempts, timestamp_ns, reason in letters["messages"]
    ]


def metadata_for_dead_letters(found: Sequence[Origin]) -> bytes:
    """The metadata of messages that come from there, at least one and all from the same channel."""
    messages = [
        [each.id, each.sequence, each.attempts, each.timestamp_ns, each.reason.value] for each in found
    ]
    letters = {"topic": found[0].topic, "channel": found[0].channel, "messages": messages}
    return json.dumps({"dead_letters": letters}, separators=(",", ":")).encode()


def metadata_for_batch(producer: str, number: int) -> bytes:
    return json.dumps({"producer": producer, "number": number}, separators=(",", ":")).encode()


def batch_number(metadata: bytes) -> tuple[str, int] | None:
    """The producer whose batch it is that has this metadata, and its number; None: nobody has numbered it."""
    if not metadata.startswith(_OF_BATCH):
        return None
    found = json.loads(metadata)
    return found["producer"], found["number"]


def is_about_messages(metadata: bytes) -> bool:
    """Whether metadata tells something of the messages that is needed wherever they go."""
    return bool(metadata) and not metadata.startswith(_OF_BATCH)
