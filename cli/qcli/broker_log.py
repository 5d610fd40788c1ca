"""What can go wrong when a topic's log is read over HTTP, in words for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .errors import Failure, leaves, reason_of, unreachable
from .options import HTTP_OPTION
from .output import talk
from .params import Source

if TYPE_CHECKING:
    from trio_nsq.client.topic_reader import TopicReader
    from trio_nsq.log import RecordBatch


@contextmanager
def reading_errors() -> Iterator[None]:
    """Turn what a `TopicReader` raises inside, also from tasks, into failures."""
    from trio_nsq.client import ConnectionFailed
    from trio_nsq.client.topic_reader import ReadRefused

    try:
        yield
    except Exception as group:
        for error in leaves(group):
            if isinstance(error, ReadRefused):
                wanted = Source(error.topic, None)
                raise not_readable(error.address, wanted, error.status, error.text) from error
            if isinstance(error, ConnectionFailed):
                cause = error.__cause__
                reason = reason_of(cause) if isinstance(cause, OSError) else error.reason
                raise unreachable(error.address, HTTP_OPTION, reason) from error
        raise


def not_readable(address: str, wanted: Source, status: int, text: str) -> Failure:
    """The failure of a command whose request was answered with an error."""
    if text == "NOT_FOUND":  # that is, the endpoint
        return Failure(
            f"The broker at {address} cannot be read by sequence or time: it is an nsqd, or an older 'qcli serve'."
        )
    if text == "TOPIC_NOT_FOUND":
        return Failure(f"There is no topic {wanted.topic} on {address}.")
    if text == "CHANNEL_NOT_FOUND":
        return Failure(f"There is no channel {wanted} on {address}.")
    return Failure(f"The broker at {address} refused with HTTP status {status}: {text}.")


def note_beginning(topic: str, reader: TopicReader) -> None:
    """Say so if there may have been more that is no longer kept; where a sequence was asked for, a gap says so."""
    if reader.start_is_time and reader.start_sequence == reader.first_sequence > 0:
        talk(f"Note: {topic}: the oldest message that is kept is {reader.first_sequence}.")


def is_for_all(batch: RecordBatch) -> bool:
    """Whether it was published to the topic, and not brought back for one of its channels."""
    if not (batch.note and batch.due_ns):
        return True
    from trio_nsq.broker.note import only_channel

    return only_channel(batch.note) is None


def note_gap(topic: str, first: int, end: int, reason: str) -> bool:
    """Say which messages are missing, [first, end), and why; returns whether they are damaged."""
    many = end - first > 1
    which = f"messages {first} to {end - 1} are" if many else f"message {first} is"
    if reason == "damaged":
        talk(f"Damage: {topic}: {which} damaged on the broker's disk, and passed over.")
        return True
    talk(f"Note: {topic}: {which} no longer kept.")
    return False
