"""Tests for raw records: read from a log, sent elsewhere, and decoded there."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from log.support import (
    FIRST,
    LOG_KINDS,
    HastyFiles,
    append_each,
    batch,
    numbered,
    record_offsets,
    segment_files,
)
from soak import examples
from trio_nsq.log import DiskLog, Log, RecordBatch
from trio_nsq.log.raw import RawStreamError, RawStreamReader, encode_raw
from trio_nsq.log.records import HEADER_BYTES, encode_header
from trio_nsq.log.segment.format import FILE_HEADER_BYTES
from trio_nsq.protocol import MessageSet

MakeLog = Callable[[], Log]


@pytest.fixture(params=LOG_KINDS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    log = LOG_KINDS[request.param](tmp_path)
    yield log
    log.close()


def raw_stream(log: Log, sequence: int = 0, max_bytes: int = 300) -> bytes:
    """Return all raw records from a sequence on."""
    stream = head = b""
    while found := log.read_raw(sequence, max_bytes):
        stream += b"".join(encode_raw(found, head))
        head, sequence = found[-1].head, found[-1].next_sequence
    return stream


def decoded(stream: bytes, piece_bytes: int = 0) -> list[RecordBatch]:
    """Decode a stream in pieces of this size; 0: at once."""
    reader = RawStreamReader()
    batches: list[RecordBatch] = []
    for start in range(0, len(stream), piece_bytes or len(stream) or 1):
        batches += reader.receive_data(stream[start : start + (piece_bytes or len(stream))])
    reader.end()
    return batches


def test_empty_stream(log: Log) -> None:
    assert log.read_raw(0) == []
    assert log.read_raw(7) == []
    assert decoded(b"") == []


@pytest.mark.parametrize("max_bytes", [0, 100, 300, 10**6])
def test_raw_stream_equals_read(log: Log, max_bytes: int) -> None:
    append_each(log, numbered(0, 30))
    for sequence in range(log.next_sequence + 1):
        raw, batches = log.read_raw(sequence, max_bytes), log.read(sequence, max_bytes)
        assert decoded(b"".join(encode_raw(raw, b""))) == batches
        assert [(record.base_sequence, record.next_sequence) for record in raw] == [
            (one.base_sequence, one.next_sequence) for one in batches
        ]


def test_raw_stream_of_a_disk_log_equals_the_file(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, segment_bytes=400, files=HastyFiles())
    append_each(log, numbered(0, 20))
    log.close()
    log = DiskLog(tmp_path, segment_bytes=400, files=HastyFiles())
    assert len(segment_files(tmp_path)) > 3
    assert raw_stream(log, max_bytes=10**6) == b"".join(path.read_bytes() for path in segment_files(tmp_path))
    log.close()


@given(
    st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=4), max_size=8),
    st.integers(1, 200),
    st.sampled_from([1, 150, 10**6]),
)
@settings(max_examples=examples(60))
def test_stream_in_any_pieces(
    tmp_path_factory: pytest.TempPathFactory, bodies: list[list[bytes]], piece_bytes: int, segment_bytes: int
) -> None:
    log = DiskLog(tmp_path_factory.mktemp("log"), segment_bytes=segment_bytes, files=HastyFiles())
    batches: list[RecordBatch] = []
    for each in bodies:
        batches.append(batch(log.next_sequence, *each))
        log.append(batches[-1:], sync=False)
    stream = raw_stream(log)
    assert decoded(stream) == decoded(stream, piece_bytes) == decoded(stream, 1) == batches
    log.close()


def test_any_flipped_bit_is_detected() -> None:
    log = LOG_KINDS["memory"](Path())
    batches = [batch(0, b"abc"), batch(1, b"d", b"e")]
    append_each(log, batches)
    stream = raw_stream(log, max_bytes=10**6)
    for at in range(len(stream)):
        for bit in range(8):
            changed = bytearray(stream)
            changed[at] ^= 1 << bit
            with pytest.raises(RawStreamError):
                decoded(bytes(changed))


def test_truncated_stream() -> None:
    log = LOG_KINDS["memory"](Path())
    append_each(log, [batch(0, b"abc"), batch(1, b"d", b"e")])
    stream = raw_stream(log, max_bytes=10**6)
    ends = {0, FILE_HEADER_BYTES, *record_offsets([batch(0, b"abc"), batch(1, b"d", b"e")])}
    for end in range(len(stream) + 1):
        if end in ends:
            decoded(stream[:end])
        else:
            with pytest.raises(RawStreamError, match="ends within"):
                decoded(stream[:end])


@pytest.mark.parametrize("data", [b"x", b"NSQBx", b"<html>", b"\x89NSQIDX\n"])
def test_invalid_stream(data: bytes) -> None:
    with pytest.raises(RawStreamError):
        decoded(data + bytes(100))


def test_record_before_any_file_header() -> None:
    one = batch(0, b"a")
    with pytest.raises(RawStreamError, match="without an undamaged file header"):
        decoded(encode_header(one, 0) + one.messages.data)


def test_damaged_record_is_left_out(tmp_path: Path) -> None:
    batches = numbered(0, 6)
    log = DiskLog(tmp_path, files=HastyFiles())
    append_each(log, batches)
    log.close()
    for index, offset in ((1, HEADER_BYTES), (3, 8)):  # in the payload, in the header
        content = bytearray((tmp_path / FIRST).read_bytes())
        content[record_offsets(batches)[index] + offset] ^= 1
        (tmp_path / FIRST).write_bytes(content)
    log = DiskLog(tmp_path, files=HastyFiles())
    assert decoded(raw_stream(log)) == [batches[0], batches[2], batches[4], batches[5]]
    log.close()


def test_payload_that_is_not_a_set_of_messages_is_left_out(tmp_path: Path) -> None:
    """With valid checksums."""
    log = DiskLog(tmp_path, files=HastyFiles())
    log.append([batch(0, b"a")], sync=False)
    log.close()
    seed = int.from_bytes((tmp_path / FIRST).read_bytes()[12:16], "big")
    odd = RecordBatch(1, 1, 1, 0, MessageSet(b"\0\0\0\2a", [2]))
    with (tmp_path / FIRST).open("ab") as file:
        file.write(encode_header(odd, seed) + odd.messages.data)
    log = DiskLog(tmp_path, files=HastyFiles())
    log.append([batch(2, b"b")], sync=False)
    assert decoded(raw_stream(log)) == [batch(0, b"a"), batch(2, b"b")]
    log.close()


def test_closed_log_is_empty(tmp_path: Path) -> None:
    """Its topic was deleted during a read."""
    log = DiskLog(tmp_path, files=HastyFiles())
    append_each(log, numbered(0, 6))
    log.close()
    assert log.read_raw(0) == []
    assert log.read(0) == []
