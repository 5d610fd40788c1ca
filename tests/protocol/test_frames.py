"""Tests for frames: encoded and decoded from one table, whole, in pieces and followed by others."""

import pytest

from protocol.support import flattened, int32, message_frame, read_frames, single_bytes
from trio_nsq.protocol import FrameError
from trio_nsq.protocol.bulk import MESSAGE_FRAME_BYTES, MESSAGE_HEADER_BYTES
from trio_nsq.protocol.frames import (
    CLOSE_WAIT_FRAME,
    DEFAULT_MAX_FRAME_BYTES,
    HEARTBEAT_FRAME,
    OK_FRAME,
    ErrorFrame,
    FrameReader,
    FrameType,
    MessageRun,
    ResponseFrame,
    encode_error,
    encode_frame,
    encode_response,
)

ID = b"0123456789abcdef"

# The arguments of the broker, the bytes on the wire, and the decoded event.
CASES: list[tuple[bytes, bytes, object]] = [
    (OK_FRAME, b"\0\0\0\6\0\0\0\0OK", ResponseFrame(b"OK")),
    (CLOSE_WAIT_FRAME, b"\0\0\0\x0e\0\0\0\0CLOSE_WAIT", ResponseFrame(b"CLOSE_WAIT")),
    (HEARTBEAT_FRAME, b"\0\0\0\x0f\0\0\0\0_heartbeat_", ResponseFrame(b"_heartbeat_")),
    (encode_response(b"{}"), b"\0\0\0\6\0\0\0\0{}", ResponseFrame(b"{}")),
    (encode_response(b""), b"\0\0\0\4\0\0\0\0", ResponseFrame(b"")),
    (encode_error(b"E_BAD_PROTOCOL"), b"\0\0\0\x12\0\0\0\1E_BAD_PROTOCOL", ErrorFrame("E_BAD_PROTOCOL", "")),
    (
        encode_error(b"E_FIN_FAILED FIN " + ID + b" failed ID not in flight"),
        b"\0\0\0\x3d\0\0\0\1E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight",
        ErrorFrame("E_FIN_FAILED", "FIN 0123456789abcdef failed ID not in flight"),
    ),
    (encode_error(b""), b"\0\0\0\4\0\0\0\1", ErrorFrame("", "")),
    (encode_error(b"E_X \xff\xc3\xa9"), b"\0\0\0\x0b\0\0\0\1E_X \xff\xc3\xa9", ErrorFrame("E_X", "\\xffé")),
    (
        encode_frame(FrameType.MESSAGE, bytes(range(8)) + b"\0\1" + ID + b"body"),
        b"\0\0\0\x22\0\0\0\2\0\1\2\3\4\5\6\7\0\x010123456789abcdefbody",
        (ID, b"body", 0x0001020304050607, 1),
    ),
    (
        message_frame(b"", timestamp_ns=2**63 - 1, attempts=65535),
        b"\0\0\0\x1e\0\0\0\2\x7f" + b"\xff" * 9 + ID,
        (ID, b"", 2**63 - 1, 65535),
    ),
    (
        message_frame(b"\0" * 70_000),
        b"\0\1\x11\x8e\0\0\0\2\0\0\0\0\0\0\0\1\0\1" + ID + b"\0" * 70_000,
        (ID, b"\0" * 70_000, 1, 1),
    ),
]


@pytest.mark.parametrize(("encoded", "wire", "event"), CASES, ids=range(len(CASES)))
def test_encoding_and_decoding(encoded: bytes, wire: bytes, event: object) -> None:
    assert encoded == wire
    assert read_frames(FrameReader(), [wire]) == [event]
    behind = wire[:100] if len(wire) < 100 else b"\0\0\0"  # and another frame, complete or not
    again = [event, event] if len(wire) < 100 else [event]
    assert read_frames(FrameReader(), [wire + behind]) == again
    reader = FrameReader()
    for cut in range(0, len(wire), max(1, len(wire) // 200)):
        assert read_frames(FrameReader(), [wire[:cut], wire[cut:] + behind]) == again
    if len(wire) < 100:
        for i, byte in enumerate(single_bytes(wire)):
            assert read_frames(reader, [byte]) == ([event] if i == len(wire) - 1 else [])


def test_pipelined_frames() -> None:
    wire = b"".join(wire for _, wire, _ in CASES)
    expected = [event for _, _, event in CASES]
    for piece_bytes in (1, 2, 3, 7, 64, 4096, len(wire)):
        pieces = [wire[i : i + piece_bytes] for i in range(0, len(wire), piece_bytes)]
        assert read_frames(FrameReader(), pieces) == expected


def test_only_a_heartbeat_frame_is_a_heartbeat() -> None:
    assert ResponseFrame(b"_heartbeat_").is_heartbeat
    assert not ResponseFrame(b"OK").is_heartbeat
    assert not ResponseFrame(b"_heartbeat_ ").is_heartbeat


def test_text_of_an_error() -> None:
    assert str(ErrorFrame("E_BAD_TOPIC", "PUB topic")) == "E_BAD_TOPIC PUB topic"
    assert str(ErrorFrame("E_BAD_PROTOCOL", "")) == "E_BAD_PROTOCOL"


def test_sizes_equal_those_of_the_format() -> None:
    assert MESSAGE_HEADER_BYTES == 8 + 2 + 16
    assert len(message_frame(b"")) == MESSAGE_FRAME_BYTES


# ---------------------------------------------------------------------- runs


def test_complete_messages_are_one_run() -> None:
    wire = b"".join(
        message_frame(b"%d" % n * n, message_id=b"%016x" % n, timestamp_ns=n, attempts=n + 1)
        for n in range(1000)
    )
    reader = FrameReader()
    reader.receive_data(wire + OK_FRAME + wire[:-1])
    run = reader.next_event()
    assert run == MessageRun(
        [b"%016x" % n for n in range(1000)],
        [b"%d" % n * n for n in range(1000)],
        list(range(1000)),
        list(range(1, 1001)),
    )
    assert len(run) == 1000
    assert reader.next_event() == ResponseFrame(b"OK")
    run = reader.next_event()
    assert isinstance(run, MessageRun)
    assert len(run) == 999  # the last one is incomplete
    assert reader.next_event() is None
    reader.receive_data(wire[-1:] + OK_FRAME)
    run = reader.next_event()
    assert isinstance(run, MessageRun)
    assert run.ids == [b"%016x" % 999]
    assert reader.next_event() == ResponseFrame(b"OK")
    assert reader.next_event() is None


def test_a_run_split_at_every_byte() -> None:
    wire = message_frame(b"") + message_frame(b"a") + HEARTBEAT_FRAME + message_frame(b"bc") + OK_FRAME
    expected = read_frames(FrameReader(), [wire])
    assert len(expected) == 5
    for first in range(len(wire) + 1):
        for second in range(first, len(wire) + 1):
            pieces = [wire[:first], wire[first:second], wire[second:]]
            assert read_frames(FrameReader(), pieces) == expected


def test_frame_of_exactly_the_limit() -> None:
    assert read_frames(FrameReader(40), [message_frame(b"x" * 10)]) == [(ID, b"x" * 10, 1, 1)]
    assert read_frames(FrameReader(40), [encode_response(b"x" * 36)]) == [ResponseFrame(b"x" * 36)]


# ---------------------------------------------------------------------- invalid frames

SIZE = "invalid frame size {}: is this an NSQ broker's TCP port?"


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (int32(3) + int32(0), SIZE.format(3)),
        (int32(0) + int32(0), SIZE.format(0)),
        (int32(-1) + int32(0), SIZE.format(-1)),
        (b"\x80\0\0\0\0\0\0\0", SIZE.format(-(2**31))),
        (int32(101) + int32(0), SIZE.format(101)),
        (int32(101) + int32(2), SIZE.format(101)),
        (
            int32(14) + b"E_BAD_PROTOCOL",
            "it answers as nsqlookupd: use the TCP port of a broker, by default 4150",
        ),
        (
            b"HTTP/1.1 400 Bad Request",
            "it answers in HTTP: use the port of the TCP protocol, by default 4150",
        ),
        (b"\x15\x03\x03\0\x02\x02\x50", None),  # a TLS alert, 7 bytes: too short to recognize
        (int32(4) + int32(4), "unknown frame type 4"),
        (int32(100) + int32(-1), "unknown frame type -1"),
        (int32(4) + int32(2), "invalid size 4 of a message frame"),
        (int32(29) + int32(2), "invalid size 29 of a message frame"),
    ],
)
def test_invalid_head_is_refused_at_once(head: bytes, error: str | None) -> None:
    expected = [] if error is None else [error]
    for pieces in ([head], single_bytes(head), [head[:8], head[8:]], [head + b"x" * 100]):
        if error is not None or len(pieces[0]) < 8:
            assert read_frames(FrameReader(100), pieces) == expected


@pytest.mark.parametrize("bad", [int32(29) + int32(2), int32(101) + int32(2), int32(4) + int32(7)])
@pytest.mark.parametrize("padding", [0, 100])
def test_earlier_frames_are_returned_first(bad: bytes, padding: int) -> None:
    wire = message_frame(b"a") + message_frame(b"b") + bad + b"\0" * padding
    for pieces in ([wire], single_bytes(wire), [wire[:50], wire[50:]]):
        *found, error = read_frames(FrameReader(100), pieces)
        assert found == [(ID, b"a", 1, 1), (ID, b"b", 1, 1)]
        assert isinstance(error, str)


def test_error_is_permanent() -> None:
    reader = FrameReader()
    reader.receive_data(b"HTTP/1.1")
    for _ in range(2):
        with pytest.raises(FrameError):
            reader.next_event()
        reader.receive_data(OK_FRAME)


def test_default_limit() -> None:
    reader = FrameReader()
    reader.receive_data(int32(DEFAULT_MAX_FRAME_BYTES) + int32(2))
    assert reader.next_event() is None
    assert read_frames(FrameReader(), [int32(DEFAULT_MAX_FRAME_BYTES + 1) + int32(2)]) == [
        SIZE.format(DEFAULT_MAX_FRAME_BYTES + 1)
    ]


# ---------------------------------------------------------------------- unread bytes for an upgrade


def test_unread_bytes_are_handed_over_once() -> None:
    wire = OK_FRAME + b"\x16\x03\x01"
    for cut in range(len(wire)):
        reader = FrameReader()
        found = read_frames(reader, [wire[:cut]])
        reader.receive_data(wire[cut:])
        if not found:
            event = reader.next_event()
            assert event is not None
            found = flattened(event)
        assert found == [ResponseFrame(b"OK")]
        assert reader.take_buffered() == b"\x16\x03\x01"
        assert reader.take_buffered() == b""
        assert reader.next_event() is None
        assert read_frames(reader, [OK_FRAME]) == [ResponseFrame(b"OK")]


def test_handover_within_a_frame_resets_the_missing_bytes() -> None:
    reader = FrameReader()
    frame = encode_response(b"x" * 100)
    assert read_frames(reader, [frame[:20]]) == []
    assert reader.take_buffered() == frame[:20]
    assert read_frames(reader, [OK_FRAME]) == [ResponseFrame(b"OK")]


def test_later_changes_of_the_received_data_have_no_effect() -> None:
    """A caller may reuse its receive buffer."""
    reader = FrameReader()
    data = bytearray(OK_FRAME)
    reader.receive_data(data)
    data[-2:] = b"NO"
    assert reader.next_event() == ResponseFrame(b"OK")
