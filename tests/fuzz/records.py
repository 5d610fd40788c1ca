"""Fuzz target for records of a log and of other brokers: payloads, and the frames that are made of them."""

from random import Random
from struct import pack, unpack_from
from zlib import crc32

from trio_nsq.broker.state.batch import Batch
from trio_nsq.log import RecordHeader
from trio_nsq.log.records import decode_payload

FIRST_ID = 0x0123456789ABCFF0  # its last digits overflow
TIMESTAMP_NS = 1_700_000_000_000_000_000
HEADER_FIELDS = ">IB"


class Payloads:
    """Records with valid checksums; the header has the number of messages and the bytes of the metadata."""

    name = "payloads"
    memory_per_byte = 10  # a copy without the metadata, and a list entry for an empty message of four bytes
    memory_bytes = 8_000

    def valid(self, rng: Random) -> list[bytes]:
        bodies = [
            rng.choice((b"", b"x", b"\0\0\0\1", b"y" * 300, rng.randbytes(rng.randrange(40))))
            for _ in range(rng.choice((1, 1, 2, 3, 5, 20)))
        ]
        metadata = rng.choice((b"", b"", b"note", b"\0\0\0\0"))
        return [
            pack(HEADER_FIELDS, len(bodies), len(metadata)),
            *(pack(">i", len(body)) + body for body in bodies),
            metadata,
        ]

    def check(self, data: bytes, rng: Random) -> None:
        if (given := _given(data)) is None:
            return
        header, payload = given
        bodies: list[bytes] = []
        at = 0
        end = len(payload) - header.metadata_bytes
        while len(bodies) < header.count and at + 4 <= end:
            (size,) = unpack_from(">i", payload, at)
            if not 0 <= size <= end - at - 4:
                break
            bodies.append(payload[at + 4 : at + 4 + size])
            at += 4 + size
        record = decode_payload(header, payload)
        if at != end or len(bodies) != header.count:
            assert record is None, f"taken for {record}"
            return
        assert record is not None, f"{bodies} are refused"
        assert record.messages.bodies() == bodies
        assert (record.messages.data, record.metadata) == (payload[:end], payload[end:])
        lines, frames = Batch([record]).take(0, len(bodies), 2**31)
        ids = [b"%016x" % (FIRST_ID + index) for index in range(len(bodies))]
        assert lines == b"".join(b"FIN %s\n" % each for each in ids)
        assert frames == b"".join(
            pack(">iiqH16s", 30 + len(body), 2, TIMESTAMP_NS, 1, each) + body
            for each, body in zip(ids, bodies, strict=True)
        )

    def read(self, data: bytes) -> None:
        if given := _given(data):
            decode_payload(*given)


def _given(data: bytes) -> tuple[RecordHeader, bytes] | None:
    if len(data) < 5:
        return None
    count, metadata_bytes = unpack_from(HEADER_FIELDS, data)
    payload = data[5:]
    if not count:
        return None  # `decode_header` refuses these
    return RecordHeader(
        0, count, len(payload), FIRST_ID, TIMESTAMP_NS, 0, crc32(payload), metadata_bytes
    ), payload
