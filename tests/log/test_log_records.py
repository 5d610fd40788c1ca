"""Tests for the encoding of records, byte for byte."""

from dataclasses import replace
from struct import pack, unpack_from
from zlib import crc32

import pytest

from log.support import batch
from trio_nsq.log import RecordBatch, RecordHeader
from trio_nsq.log.records import (
    HEADER_BYTES,
    MAGIC,
    MAX_RECORD_MESSAGES,
    decode_header,
    decode_payload,
    encode_header,
    find_headers,
    split_batch,
)
from trio_nsq.protocol import MessageSet, pack_messages

BATCH = RecordBatch(
    base_sequence=0x0102030405060708,
    first_id=0x1112131415161718,
    timestamp_ns=0x2122232425262728,
    due_ns=0x3132333435363738,
    messages=batch(0, b"a", b"bc").messages,
)
PAYLOAD = b"\0\0\0\1a\0\0\0\2bc"
CHECKED = (
    pack(">I", crc32(PAYLOAD))
    + b"\0\0\0\x0b\0\0\0\2\0\0\0\0\1\2\3\4\5\6\7\x08"
    + bytes(range(0x11, 0x19))
    + bytes(range(0x21, 0x29))
    + bytes(range(0x31, 0x39))
)
SEED = 0xCAFE
HEADER = b"NSQB" + pack(">I", crc32(CHECKED, SEED)) + CHECKED


def test_layout() -> None:
    assert BATCH.messages.data == PAYLOAD
    assert encode_header(BATCH, SEED) == HEADER
    assert len(HEADER) == HEADER_BYTES == 56
    assert BATCH.record_bytes == 56 + 11


def test_decoding() -> None:
    header = decode_header(HEADER, 0, SEED)
    assert header == RecordHeader(
        0x0102030405060708, 2, 11, 0x1112131415161718, 0x2122232425262728, 0x3132333435363738, crc32(PAYLOAD)
    )
    assert (header.next_sequence, header.record_bytes) == (0x010203040506070A, 67)
    assert decode_payload(header, PAYLOAD) == BATCH
    assert decode_header(b"xxx" + HEADER + b"yyy", 3, SEED) == header


def test_metadata_follows_the_messages() -> None:
    noted = replace(BATCH, metadata=b"note")
    header = decode_header(encode_header(noted, SEED), 0, SEED)
    assert header is not None
    assert (header.length, header.metadata_bytes, header.record_bytes) == (15, 4, 71)
    assert header.payload_crc == noted.payload_crc == crc32(PAYLOAD + b"note")
    assert noted.record_bytes == 71
    assert decode_payload(header, PAYLOAD + b"note") == noted


@pytest.mark.parametrize("metadata_bytes", [0, 1, 3, 5, 15, 16, 2**32 - 1])
def test_wrong_length_of_metadata_is_damage(metadata_bytes: int) -> None:
    header = decode_header(encode_header(replace(BATCH, metadata=b"note"), SEED), 0, SEED)
    assert header is not None
    assert decode_payload(replace(header, metadata_bytes=metadata_bytes), PAYLOAD + b"note") is None


def test_header_of_another_file_is_invalid() -> None:
    assert decode_header(HEADER, 0, SEED + 1) is None
    assert decode_header(HEADER, 0, 0) is None
    assert list(find_headers(HEADER, 0, 0)) == []


def test_incomplete_header() -> None:
    for size in range(HEADER_BYTES):
        assert decode_header(HEADER[:size], 0, SEED) is None
        assert decode_header(b"abc" + HEADER[:size], 3, SEED) is None
    assert decode_header(HEADER, 1, SEED) is None
    assert decode_header(HEADER, 56, SEED) is None


@pytest.mark.parametrize("bit", range(8))
def test_flipped_bit_anywhere(bit: int) -> None:
    header = decode_header(HEADER, 0, SEED)
    assert header is not None
    for i in range(len(HEADER)):
        damaged = bytearray(HEADER)
        damaged[i] ^= 1 << bit
        assert decode_header(bytes(damaged), 0, SEED) is None
    for i in range(len(PAYLOAD)):
        damaged = bytearray(PAYLOAD)
        damaged[i] ^= 1 << bit
        assert decode_payload(header, bytes(damaged)) is None
    for i in range(len(PAYLOAD)):
        assert decode_payload(header, PAYLOAD[:i]) is None
    assert decode_payload(header, PAYLOAD + b"\0") is None


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b"\0\0\0\1a", 2),  # more than there are
        (b"\0\0\0\1a\0\0\0\1b", 1),  # and fewer
        (b"\0\0\0\2a", 1),
        (b"\xff\xff\xff\xff", 1),
        (b"\0\0\0", 1),
    ],
)
def test_payload_that_is_not_a_set_of_messages_is_refused(data: bytes, count: int) -> None:
    """With valid checksums."""
    wrong = RecordBatch(0, 0, 0, 0, MessageSet(data, [1] * count))
    header = decode_header(encode_header(wrong, SEED), 0, SEED)
    assert header is not None
    assert decode_payload(header, data) is None


def test_record_without_messages_is_refused() -> None:
    assert decode_header(encode_header(RecordBatch(0, 0, 0, 0, MessageSet(b"", [])), 0), 0, 0) is None


def test_finding_headers_among_other_bytes() -> None:
    header = decode_header(HEADER, 0, SEED)
    damaged = HEADER[:40] + b"?" + HEADER[41:]
    data = b"NSQ" + HEADER + MAGIC * 3 + damaged + HEADER[:-1] + b"NSQ" + HEADER + HEADER[:20]
    assert list(find_headers(data, 0, SEED)) == [(3, header), (3 + 56 + 12 + 56 + 55 + 3, header)]
    assert list(find_headers(data, 4, SEED)) == [(185, header)]
    assert list(find_headers(b"", 0, SEED)) == []


def test_sizes_and_positions_of_a_batch() -> None:
    one = batch(10, b"a", b"b", b"c")
    assert (one.count, one.base_sequence, one.next_sequence) == (3, 10, 13)
    assert unpack_from(">Q", encode_header(one, 0), 24) == (10,)


def test_every_part_of_a_split_batch_has_its_metadata() -> None:
    """It may say for which channel the messages are."""
    messages = pack_messages([b"%d" % n for n in range(2 * MAX_RECORD_MESSAGES + 1)])
    parts = split_batch(RecordBatch(7, 100, 5, 0, messages, b"for one channel"))
    assert [part.count for part in parts] == [MAX_RECORD_MESSAGES, MAX_RECORD_MESSAGES, 1]
    assert [part.metadata for part in parts] == [b"for one channel"] * 3
    assert [(part.base_sequence, part.first_id) for part in parts] == [
        (7 + at, 100 + at) for at in (0, MAX_RECORD_MESSAGES, 2 * MAX_RECORD_MESSAGES)
    ]
    assert [(part.has_previous, part.has_next) for part in parts] == [
        (False, True),
        (True, True),
        (True, False),
    ]
