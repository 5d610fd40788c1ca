"""Record metadata: JSON that the broker stores in a record with its messages. There are four kinds, and headers.

    {"channel": "billing"}
        Only this channel of the topic gets the messages. Their record has a due time, so that other channels do not
        read them in sequence order.

    {"dead_letters": {"topic": "orders", "channel": "billing", "messages": [[id, sequence, attempts, timestamp_ns,
                                                                             reason], ...]}}
        The origins of dead letters, in the order of the messages in the record.

    {"producer": "load-17", "number": 4, "instance": "5f0e3c9a"}
        The number of an idempotent producer's batch, and which run of the producer gave it; see `Producers`. Without
        an instance, the number belongs to the content of the batch.

    {"producer": "move-89abcdef01234567", "number": 4, "channel": "billing", "dead_letters": {...}}
        Messages that another broker has moved here, see `Move`: a number, with a channel, origins, or both. The
        origins are of the other broker; no channel here has these messages.

    {..., "headers": ["tenant:7\\n", "", ...]}
        The headers of the messages in the record, in order, as `protocol/headers.py` has them; one text if all of its
        messages have the same. Last in each of these kinds, or alone. Versions without headers ignore them: they
        deliver the messages as to clients that want no headers.

Metadata is in the same record as its messages, so that both are stored or neither is. Clients see headers only.
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any

from ..api.answers import Origin

IN_SEQUENCE_NS = 1
"""The due time of a record for one channel, whose messages the channel reads in sequence order with the others.

With another due time, even a past one, each message is an entry among the channel's deferred or requeued messages.
"""


def due_by_other_clock(due_ns: int, ahead_ns: int) -> int:
    """Return a due time by a clock that is ahead by `ahead_ns`; 0 and `IN_SEQUENCE_NS` are no times."""
    return due_ns if due_ns <= IN_SEQUENCE_NS else max(IN_SEQUENCE_NS + 1, due_ns + ahead_ns)


_OF_LETTERS = b'{"dead_letters":'
_OF_BATCH = b'{"producer":'
_HEADERS = b'"headers":['
_ONLY_HEADERS = b"{" + _HEADERS
_BETWEEN_TEXTS = b'","'  # within a text, quotes are escaped
_OF_MESSAGES = b',"channel":', b',"dead_letters":', b"," + _HEADERS


class Reason(StrEnum):
    """Why a message returned from its last delivery."""

    REQUEUED = "requeued"
    TIMED_OUT = "timed_out"
    CONNECTION_LOST = "connection_lost"


@lru_cache(maxsize=8)
def _decoded(metadata: bytes) -> dict[str, Any]:
    """Decode metadata. Several functions ask about the same record in a row; the result must not be changed."""
    found: dict[str, Any] = json.loads(metadata.decode())
    return found


def only_channel(metadata: bytes) -> str | None:
    """Return the only channel that gets the messages with this metadata; None: all do. Raises ValueError."""
    if not metadata or metadata.startswith(_ONLY_HEADERS):
        return None
    channel: str | None = _decoded(metadata).get("channel")
    return channel


def metadata_for_channel(channel: str) -> bytes:
    return json.dumps({"channel": channel}).encode()


def origins(metadata: bytes) -> list[Origin]:
    """Return the origins of the messages with this metadata, in order; empty if they are not dead letters."""
    if not metadata or metadata.startswith(_ONLY_HEADERS):
        return []
    letters = _decoded(metadata).get("dead_letters")
    if letters is None:
        return []
    topic, channel = letters["topic"], letters["channel"]
    return [
        Origin(
            topic=topic,
            channel=channel,
            id=message_id,
            sequence=sequence,
            attempts=attempts,
            timestamp_ns=timestamp_ns,
            reason=Reason(reason).value,
        )
        for message_id, sequence, attempts, timestamp_ns, reason in letters["messages"]
    ]


def metadata_for_dead_letters(found: Sequence[Origin]) -> bytes:
    """Return the metadata of dead letters: at least one, all from the same channel."""
    return json.dumps({"dead_letters": dead_letters_json(found)}, separators=(",", ":")).encode()


def dead_letters_json(found: Sequence[Origin]) -> dict[str, Any]:
    """Return the value of `dead_letters` for these origins."""
    messages = [
        [each["id"], each["sequence"], each["attempts"], each["timestamp_ns"], each["reason"]]
        for each in found
    ]
    return {"topic": found[0]["topic"], "channel": found[0]["channel"], "messages": messages}


def is_of_dead_letters(metadata: bytes) -> bool:
    """Whether this is the metadata of dead letters that a channel of this broker had."""
    return metadata.startswith(_OF_LETTERS)


def metadata_for_moved(
    producer: str,
    number: int,
    channel: str | None,
    letters: dict[str, Any] | None,
    headers: Sequence[str] = (),
) -> bytes:
    """Return the metadata of moved messages; `letters` is the value of `dead_letters`, `headers` of each message."""
    found: dict[str, Any] = {"producer": producer, "number": number}
    found |= {"channel": channel} if channel is not None else {}
    found |= {"dead_letters": letters} if letters is not None else {}
    return metadata_with_headers(json.dumps(found, separators=(",", ":")).encode(), headers)


def metadata_for_batch(producer: str, number: int, instance: str = "") -> bytes:
    found: dict[str, Any] = {"producer": producer, "number": number}
    found |= {"instance": instance} if instance else {}
    return json.dumps(found, separators=(",", ":")).encode()


def batch_number(metadata: bytes) -> tuple[str, int] | None:
    """Return the producer and the batch number in this metadata; None if the batch has no number."""
    if not metadata.startswith(_OF_BATCH):
        return None
    found = _decoded(metadata)
    return found["producer"], found["number"]


def batch_instance(metadata: bytes) -> str:
    """Return which run of a producer gave this batch its number; empty if the number belongs to the content."""
    instance: str = _decoded(metadata).get("instance", "") if metadata.startswith(_OF_BATCH) else ""
    return instance


def is_about_messages(metadata: bytes) -> bool:
    """Whether metadata describes single messages, and not only their batch."""
    if not metadata.startswith(_OF_BATCH):
        return bool(metadata)
    return any(each in metadata for each in _OF_MESSAGES)  # no producer's name has quotes


# ---------------------------------------------------------------------- headers


def metadata_with_headers(metadata: bytes, headers: Sequence[str]) -> bytes:
    """Add the headers of messages to their metadata, which may be empty and has none.

    Args:
        headers: The text of each message, see `protocol/headers.py`; one if all have the same.
    """
    headers = one_if_all_same(headers)
    if not headers:
        return metadata
    encoded = json.dumps(headers, ensure_ascii=False, separators=(",", ":")).encode()
    before = metadata[:-1] + b"," if metadata else b"{"
    return b"%s%s%s}" % (before, _HEADERS, encoded[1:])


def one_if_all_same(headers: Sequence[str]) -> Sequence[str]:
    """Return the texts of messages as metadata has them: one if all have the same, none if no message has headers."""
    if not any(headers):
        return ()
    return headers[:1] if headers.count(headers[0]) == len(headers) else headers


def has_headers(metadata: bytes) -> bool:
    """Whether any message with this metadata has headers."""
    return _HEADERS in metadata and metadata.startswith(b"{")  # what does not begin so is not the broker's


def headers_bytes(metadata: bytes, count: int) -> int:
    """Return about how many bytes the headers of `count` messages with this metadata have together.

    That may be much more than the metadata has: it has one text if all messages have the same.
    """
    if not has_headers(metadata):
        return 0
    at = metadata.index(_HEADERS)
    is_one = metadata.find(_BETWEEN_TEXTS, at) < 0
    return (len(metadata) - at) * (count if is_one else 1)


def headers_in(metadata: bytes, count: int) -> Sequence[str]:
    """Return the text of the headers of each of `count` messages with this metadata; empty if none has headers."""
    if not has_headers(metadata):
        return ()
    headers: list[str] = _decoded(metadata)["headers"]
    return headers * count if len(headers) == 1 else headers


def metadata_of_part(metadata: bytes, start: int, stop: int, count: int) -> bytes:
    """Return the metadata of the messages from `start` up to `stop` of a record with `count` messages."""
    if not metadata.startswith(b"{") or not is_about_messages(metadata) or (start, stop) == (0, count):
        return metadata  # what does not begin so is not the broker's
    found = dict(_decoded(metadata))
    if (letters := found.get("dead_letters")) is not None:
        found["dead_letters"] = letters | {"messages": letters["messages"][start:stop]}
    headers = found.pop("headers", [])
    encoded = json.dumps(found, separators=(",", ":")).encode() if found else b""
    return metadata_with_headers(encoded, headers if len(headers) == 1 else headers[start:stop])
