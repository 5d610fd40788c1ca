"""Records of messages: `tail`, `peek`, `dlq`, `deferred`, `log dump`."""

from typing import TypedDict

from trio_nsq.api.answers import Origin

from .brokers import OfBroker


class _MessageParts(OfBroker, total=False):
    sequence: int
    due_ns: int | None
    channel: str | None
    headers: dict[str, str]
    body: str
    body_base64: str


class MessageRecord(_MessageParts):
    """A message; `body_base64` replaces `body` if the body is not UTF-8.

    Attributes:
        broker: The HTTP address of the broker, if several were asked.
        topic: null: a segment file does not tell it.
        id: 16 hex digits.
        timestamp_ns: When it was published, Unix nanoseconds.
        attempts: How often it was delivered; 0 if it was read from the log.
        sequence: Its position in the topic; absent if a consumer took it.
        due_ns: When it may be delivered, Unix nanoseconds; null: at once.
        channel: The channel that it waits in; absent or null if it was read from the topic.
        headers: Absent if it has none.
    """

    topic: str | None
    id: str
    timestamp_ns: int
    attempts: int


class PeekedRecord(MessageRecord, total=False):
    """A message of a topic or channel.

    Attributes:
        state: Its state in the channel, such as fresh, requeued or deferred.
    """

    state: str


class LetterRecord(MessageRecord):
    """A message of a dead-letter topic.

    Attributes:
        origin: null: a producer published it to this topic.
    """

    origin: Origin | None


class LetterCountRecord(OfBroker):
    """How many dead letters have the same origin and reason; both are null if a producer published them.

    Attributes:
        topic, channel: Of origin.
        reason: requeued, timed_out or connection_lost.
        first_ns, last_ns: When the first and the last one became a dead letter, Unix nanoseconds.
    """

    dead_letter_topic: str
    topic: str | None
    channel: str | None
    reason: str | None
    count: int
    first_ns: int
    last_ns: int


class LogMessageRecord(MessageRecord, total=False):
    """A message of a log, read from its files.

    Attributes:
        producer, number: The producer and the number that it was published with; absent without them.
    """

    producer: str
    number: int


class RecordBatchRecord(TypedDict):
    """A record batch of a log, with --headers.

    Attributes:
        topic: null: a segment file does not tell it.
        offset: Of the record in the file, bytes.
        sequence: Of its first message.
        count: How many messages it has.
        id: Of its first message, 16 hex digits.
        timestamp_ns: When it was published, Unix nanoseconds.
        due_ns: When its messages may be delivered, Unix nanoseconds; null: at once.
        bytes: The size of the record.
    """

    topic: str | None
    file: str
    offset: int
    sequence: int
    count: int
    id: str
    timestamp_ns: int
    due_ns: int | None
    bytes: int
