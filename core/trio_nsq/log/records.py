"""Record batches: messages that were published together, and their format on disk.

     0      4            8             12       16      20           24
    +------+------------+-------------+--------+-------+------------+
    | NSQB | header_crc | payload_crc | length | count | links+size |
    +------+------------+-------------+--------+-------+------------+
    24              32         40              48       56          56+length
    +---------------+----------+---------------+--------+---------+
    | base_sequence | first_id | timestamp_ns  | due_ns | payload |
    +---------------+----------+---------------+--------+---------+

All integers are big-endian and unsigned. header_crc covers bytes 8..56, including payload_crc: a header that matches it
gives the end of the record, even if the payload is damaged. Its initial value is the file's seed, so that a search for
the next record after damage does not accept a record of another file that was published as a message. The payload is a
`MessageSet`, `(int32 size, bytes)*`, the bytes of the MPUB unchanged, followed by the metadata, which is usually empty:
bytes that the log's owner stores with these messages.

"links+size" holds the size of the metadata in its lower 30 bits. Bit 31 is set if the next record belongs to the same
batch of messages, bit 30 if the previous record does. Recovery keeps all records of a batch or none.
Checksums are zlib's CRC-32, computed by zlib-ng in 1/12 of the time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from struct import Struct
from typing import Final

from ..platform.checksum import crc32
from ..protocol.bulk import MAX_INT32
from ..protocol.headers import Headers, decode_headers
from ..protocol.limits import MAX_RECORD_BYTES as MAX_RECORD_BYTES
from ..protocol.limits import MAX_RECORD_MESSAGES as MAX_RECORD_MESSAGES
from ..protocol.messages import MessageSet, read_sizes
from .record_metadata import headers_in, metadata_of_part

MAGIC: Final = b"NSQB"
_HEADER: Final = Struct(">4sIIIIIQQQQ")
_CHECKED: Final = Struct(">IIIIQQQQ")
HEADER_BYTES: Final = _HEADER.size
_HAS_NEXT: Final = 1 << 31
_HAS_PREVIOUS: Final = 1 << 30
_METADATA_BYTES: Final = _HAS_PREVIOUS - 1
_ANY_CRC: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """A record batch without its payload.

    Attributes:
        base_sequence: The first message's sequence, counted from 0 over the topic's life.
        count: Messages, at least 1.
        length: Bytes of the payload, the metadata included.
        first_id: The first message's id as a number; the other ids are consecutive.
        timestamp_ns: When the messages were published, Unix nanoseconds.
        due_ns: Earliest delivery time, Unix nanoseconds; 0: at once.
        has_previous, has_next: Whether the previous, or the next, record belongs to the same batch of messages.
    """

    base_sequence: int
    count: int
    length: int
    first_id: int
    timestamp_ns: int
    due_ns: int
    payload_crc: int
    metadata_bytes: int = 0
    has_previous: bool = False
    has_next: bool = False

    @property
    def next_sequence(self) -> int:
        """The sequence after this batch's last."""
        return self.base_sequence + self.count

    @property
    def record_bytes(self) -> int:
        return HEADER_BYTES + self.length

    def matches(self, payload: bytes | memoryview) -> bool:
        """Whether a payload is this record's, undamaged."""
        return len(payload) == self.length and crc32(payload) == self.payload_crc


@dataclass(init=False, slots=True)
class RecordBatch:
    """Messages published together, with their sequences. Fields as in `RecordHeader`. Immutable.

    `metadata` belongs to the log's owner; the log does not interpret it.

    Attributes:
        next_sequence: The sequence after this batch's last.
        record_bytes: Header and payload.
    """

    base_sequence: int
    first_id: int
    timestamp_ns: int
    due_ns: int
    messages: MessageSet
    metadata: bytes
    has_previous: bool
    has_next: bool
    next_sequence: int = field(init=False, repr=False, compare=False)
    record_bytes: int = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        base_sequence: int,
        first_id: int,
        timestamp_ns: int,
        due_ns: int,
        messages: MessageSet,
        metadata: bytes = b"",
        has_previous: bool = False,
        has_next: bool = False,
    ) -> None:
        self.base_sequence = base_sequence
        self.first_id = first_id
        self.timestamp_ns = timestamp_ns
        self.due_ns = due_ns
        self.messages = messages
        self.metadata = metadata
        self.has_previous = has_previous
        self.has_next = has_next
        self.next_sequence = base_sequence + len(messages.sizes)
        self.record_bytes = HEADER_BYTES + len(messages.data) + len(metadata)

    @property
    def count(self) -> int:
        """Messages, at least 1."""
        return len(self.messages.sizes)

    def id_of(self, sequence: int) -> str:
        """Return the id of one of the messages, 16 hex digits."""
        return f"{self.first_id + sequence - self.base_sequence:016x}"

    @property
    def last_id(self) -> str:
        return self.id_of(self.next_sequence - 1)

    def ids(self) -> list[bytes]:
        return [b"%016x" % each for each in range(self.first_id, self.first_id + self.count)]

    def headers(self) -> list[Headers]:
        """Return the headers of each message: values by names in lower case; empty for a message without headers.

        Messages with equal headers share one mapping: a record of a few KB may have the same headers for thousands.
        """
        texts = headers_in(self.metadata, self.count) or [""] * self.count
        decoded = {text: decode_headers(text) for text in set(texts)}
        return [decoded[text] for text in texts]

    @property
    def payload_crc(self) -> int:
        """CRC-32 of messages and metadata, as in the header."""
        return crc32(self.metadata, crc32(self.messages.data))


def linked_records(
    first: RecordBatch, rest: Sequence[MessageSet], metadata: Sequence[bytes] = ()
) -> list[RecordBatch]:
    """Return records that recovery keeps together: `first`, and one for each set in `rest`, which must not be empty.

    Args:
        metadata: That of each set in `rest`; empty if they have none.
    """
    records = [replace(first, has_next=True)]
    sequence, message_id = first.next_sequence, first.first_id + first.count
    for number, messages in enumerate(rest, 1):
        records.append(
            RecordBatch(
                sequence,
                message_id,
                first.timestamp_ns,
                first.due_ns,
                messages,
                metadata[number - 1] if metadata else b"",
                has_previous=True,
                has_next=first.has_next or number < len(rest),
            )
        )
        sequence += len(messages.sizes)
        message_id += len(messages.sizes)
    return records


def split_batch(batch: RecordBatch) -> list[RecordBatch]:
    """Split a batch into records within the limits, unless one message is larger. Each has the metadata of its part."""
    sets = batch.messages.split(MAX_RECORD_MESSAGES, MAX_RECORD_BYTES)
    if len(sets) == 1:
        return [batch]
    metadata, start = [batch.metadata] * len(sets), 0
    if batch.metadata:
        for number, messages in enumerate(sets):
            stop = start + len(messages)
            metadata[number] = metadata_of_part(batch.metadata, start, stop, batch.count)
            start = stop
    first = replace(batch, messages=sets[0], metadata=metadata[0])
    return linked_records(first, sets[1:], metadata[1:])


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A record batch in its encoded form.

    Attributes:
        head: The header of the file; it contains the seed.
        header: The same as the first `HEADER_BYTES` of `data`.
        data: Header and payload; both match their checksums.
    """

    head: bytes
    header: RecordHeader
    data: bytes

    @property
    def base_sequence(self) -> int:
        """The first message's sequence."""
        return self.header.base_sequence

    @property
    def next_sequence(self) -> int:
        """The sequence after this batch's last."""
        return self.header.next_sequence


@dataclass(init=False, slots=True)
class UnsyncedPart:
    """Whole records at the end of a segment that are not on stable storage yet.

    Attributes:
        incarnation, base_sequence: Identify the segment.
        offset: Where the records begin in the segment.
        size: Their bytes.
        data: The bytes, in pieces.
    """

    incarnation: bytes
    base_sequence: int
    offset: int
    size: int
    data: Sequence[bytes]

    def __init__(
        self, incarnation: bytes, base_sequence: int, offset: int, size: int, data: Sequence[bytes]
    ) -> None:
        self.incarnation = incarnation
        self.base_sequence = base_sequence
        self.offset = offset
        self.size = size
        self.data = data


def encode_header(batch: RecordBatch, seed: int) -> bytes:
    """Encode the header of a batch, for a file with this seed."""
    messages, metadata = batch.messages, batch.metadata
    payload_crc = crc32(messages.data)
    checked = _CHECKED.pack(
        crc32(metadata, payload_crc) if metadata else payload_crc,
        len(messages.data) + len(metadata),
        len(messages.sizes),
        len(metadata) + (_HAS_PREVIOUS if batch.has_previous else 0) + (_HAS_NEXT if batch.has_next else 0),
        batch.base_sequence,
        batch.first_id,
        batch.timestamp_ns,
        batch.due_ns,
    )
    return b"%s%s%s" % (MAGIC, crc32(checked, seed).to_bytes(4, "big"), checked)


def encode_spoiled(header: RecordHeader, seed: int) -> bytes:
    """Encode a header to overwrite a record's own: the payload no longer matches, so that readers skip the record."""
    links = (_HAS_PREVIOUS if header.has_previous else 0) + (_HAS_NEXT if header.has_next else 0)
    checked = _CHECKED.pack(
        header.payload_crc ^ _ANY_CRC,
        header.length,
        header.count,
        header.metadata_bytes + links,
        header.base_sequence,
        header.first_id,
        header.timestamp_ns,
        header.due_ns,
    )
    return b"%s%s%s" % (MAGIC, crc32(checked, seed).to_bytes(4, "big"), checked)


def decode_header(data: bytes | bytearray, offset: int, seed: int) -> RecordHeader | None:
    """Decode the header at `offset`; None if there is no undamaged header of a file with this seed."""
    if len(data) - offset < HEADER_BYTES or not data.startswith(MAGIC, offset):
        return None
    _, header_crc, payload_crc, length, count, links, base, first_id, timestamp_ns, due_ns = (
        _HEADER.unpack_from(data, offset)
    )
    if crc32(data[offset + 8 : offset + HEADER_BYTES], seed) != header_crc or not count:
        return None
    return RecordHeader(
        base,
        count,
        length,
        first_id,
        timestamp_ns,
        due_ns,
        payload_crc,
        links & _METADATA_BYTES,
        bool(links & _HAS_PREVIOUS),
        links >= _HAS_NEXT,
    )


def decode_payload(header: RecordHeader, payload: bytes) -> RecordBatch | None:
    """Decode a batch; None if the payload does not match the header, or is not a message set."""
    if len(payload) != header.length or crc32(payload) != header.payload_crc:
        return None
    sizes: list[int] = []
    end = len(payload) - header.metadata_bytes
    offset = read_sizes(payload, 0, end, header.count, 0, min(end, MAX_INT32), sizes)
    if offset != end or len(sizes) != header.count:
        return None
    data, metadata = (payload[:offset], payload[offset:]) if header.metadata_bytes else (payload, b"")
    messages = MessageSet(data, sizes)
    return RecordBatch(
        header.base_sequence,
        header.first_id,
        header.timestamp_ns,
        header.due_ns,
        messages,
        metadata,
        header.has_previous,
        header.has_next,
    )


def find_headers(data: bytes, start: int, seed: int) -> Iterator[tuple[int, RecordHeader]]:
    """Yield the offset of each undamaged header from `start` on, and the header."""
    offset = data.find(MAGIC, start)
    while offset >= 0:
        if header := decode_header(data, offset, seed):
            yield offset, header
        offset = data.find(MAGIC, offset + 1)
