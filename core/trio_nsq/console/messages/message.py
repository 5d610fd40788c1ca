"""Messages of a topic's log as the console shows them, decoded from a broker's raw stream. No IO."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...api.answers import Origin
from ...api.fields import check
from ...log.gaps import Gap, gaps
from ...log.record_metadata import IN_SEQUENCE_NS, batch_number, headers_in, only_channel, origins
from ...log.records import RecordBatch
from ...protocol.headers import Headers, decode_headers
from .bodies import TopicBodies

_METADATA_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        broker: The HTTP address of its broker.
        sequence: Counted from 0 on this broker.
        id: 16 hex digits.
        timestamp_ns, due_ns: When it was published, and until when it is or was deferred, Unix nanoseconds; None: it is
            not deferred.
        body: The body as it is shown, or its beginning: decoded, and with masked fields.
        size: The size of the whole body as it was published.
        batch: The first sequence of the messages published together with it, as far as known, and the one after them.
        batch_goes_on: Whether the batch has more messages than that.
        channel: The only channel that gets it; None: all do.
        origin: Where it was before it became a dead letter.
        producer: The name and the batch number of an idempotent producer.
        headers: Values by names.
        shown_size: The size of the whole body as it is shown.
        formats: What was undone to show the body, such as `("gzip", "avro")`.
        problem: Why it is not decoded; empty: it is, or need not be.
        is_masked: Whether fields are masked.
    """

    broker: str
    sequence: int
    id: str
    timestamp_ns: int
    due_ns: int | None
    body: bytes
    size: int
    batch: tuple[int, int]
    batch_goes_on: bool = False
    channel: str | None = None
    origin: Origin | None = None
    producer: tuple[str, int] | None = None
    headers: Headers = field(default_factory=dict)
    shown_size: int = 0
    formats: tuple[str, ...] = ()
    problem: str = ""
    is_masked: bool = False

    @property
    def first_sequence(self) -> int:
        """The same as `sequence`, as of a gap."""
        return self.sequence

    @property
    def next_sequence(self) -> int:
        return self.sequence + 1


@dataclass(frozen=True, slots=True)
class MissingMessages:
    """Messages that cannot be read: discarded by retention, or damaged or missing in the log."""

    broker: str
    first_sequence: int
    next_sequence: int
    reason: Literal["discarded", "damaged"]

    @property
    def count(self) -> int:
        """How many there are."""
        return self.next_sequence - self.first_sequence


Row = Message | MissingMessages


def rows_of(
    broker: str, records: Sequence[RecordBatch], first: int, end: int, kept_from: int, shown: TopicBodies
) -> Iterator[Row]:
    """Yield the messages in a range, and what is missing there, in order.

    Args:
        records: From `LogStream.receive_records`; they reach to `end`, or what follows them is missing.
        kept_from: The oldest sequence of the log.
        shown: How bodies are shown.
    """
    for record in records:
        yield from _missing(broker, gaps(first, record.base_sequence, kept_from))
        start = max(first - record.base_sequence, 0)
        stop = min(end - record.base_sequence, record.count)
        yield from _messages(broker, record, range(start, stop), shown)
        first = record.base_sequence + stop
    if first < end:
        yield from _missing(broker, gaps(first, end, kept_from))


def matching(
    broker: str,
    records: Sequence[RecordBatch],
    first: int,
    end: int,
    shown: TopicBodies,
    matches: Callable[[bytes], bool],
    *,
    backwards: bool,
    goes_on: Callable[[], bool],
) -> tuple[list[Message], int]:
    """Search a range for messages whose body, as it is shown, matches.

    Args:
        backwards: Search from the end to the first one.
        goes_on: Whether to decode one more body. At least one message is looked at.

    Returns:
        The messages in the order of the search, and how far that came.
    """
    found: list[Message] = []
    has_begun, step = False, -1 if backwards else 1
    for record in records[::step]:
        start = max(first - record.base_sequence, 0)
        stop = min(end - record.base_sequence, record.count)
        bodies, letters = record.messages.bodies(), _of_metadata(record)[1]
        for index in range(start, stop)[::step]:
            reader = shown.reader(letters[index]["topic"] if index < len(letters) else "")
            if has_begun and reader.changes(bodies[index]) and not goes_on():
                return found, record.base_sequence + index + backwards
            has_begun = True
            if matches(reader.content(bodies[index])):
                found += _messages(broker, record, range(index, index + 1), shown)
    return found, first if backwards else end


def _missing(broker: str, found: Sequence[Gap]) -> Iterator[MissingMessages]:
    for gap in found:
        yield MissingMessages(broker, gap.first_sequence, gap.next_sequence, gap.reason)


def _messages(broker: str, record: RecordBatch, indexes: range, shown: TopicBodies) -> Iterator[Message]:
    channel, letters, producer, headers = _of_metadata(record)
    due_ns = record.due_ns if record.due_ns > IN_SEQUENCE_NS else None
    data, sizes = record.messages.data, record.messages.sizes
    end = sum(sizes[: indexes.start]) + 4 * indexes.start
    for index in indexes:
        start = end + 4
        end = start + sizes[index]
        origin = letters[index] if index < len(letters) else None
        body = shown.read(data[start:end], "" if origin is None else origin["topic"])
        yield Message(
            broker,
            record.base_sequence + index,
            f"{record.first_id + index:016x}",
            record.timestamp_ns,
            due_ns,
            body.content[: shown.keep_bytes],
            sizes[index],
            (record.base_sequence, record.next_sequence),
            record.has_previous or record.has_next,
            channel,
            origin,
            producer,
            headers[index] if index < len(headers) else {},
            len(body.content) + (not body.is_complete),
            body.formats,
            body.problem,
            body.is_masked,
        )


def _of_metadata(
    record: RecordBatch,
) -> tuple[str | None, list[Origin], tuple[str, int] | None, list[Headers]]:
    """Return the only channel, the origins, the producer and the headers.

    There is nothing of metadata that this program cannot read.
    """
    if not record.metadata:
        return None, [], None, []
    try:
        channel = only_channel(record.metadata)
        letters = [check(letter, Origin) for letter in origins(record.metadata)]
        producer = batch_number(record.metadata)
        headers: list[Headers] = [*map(decode_headers, headers_in(record.metadata, record.count))]
    except _METADATA_ERRORS:
        return None, [], None, []
    return channel if isinstance(channel, str) else None, letters, producer, headers
