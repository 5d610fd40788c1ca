"""Workloads for the protocol's readers, to compare their processor time; each workload takes a size.

The time must grow with the number of bytes, not with the number of pieces or with the data behind them.
"""

import time
from collections.abc import Callable

from protocol.support import drain, message_frame, reader_in
from trio_nsq.protocol import pack_messages
from trio_nsq.protocol.encode import encode_finish, encode_mpub, encode_pub, encode_requeue
from trio_nsq.protocol.frames import OK_FRAME, FrameReader
from trio_nsq.protocol.states import State

ID = b"0123456789abcdef"
MIB = 1024 * 1024
REPEATS = 5


def cpu_s(work: Callable[[int], None], size: int) -> float:
    """Return the processor time of this process, the minimum of several runs."""
    times = []
    for _ in range(REPEATS):
        began_s = time.process_time()
        work(size)
        times.append(time.process_time() - began_s)
    return min(times)


def read_commands(wire: bytes, piece_bytes: int, count: int) -> None:
    """Read commands like a broker."""
    reader = reader_in(State.SUBSCRIBED)
    found = 0
    for i in range(0, len(wire), piece_bytes):
        reader.receive_data(wire[i : i + piece_bytes])
        found += len(list(drain(reader)))
    assert found == count


def read_events(wire: bytes, piece_bytes: int, count: int) -> None:
    """Read events like a client."""
    reader = FrameReader()
    found = 0
    for i in range(0, len(wire), piece_bytes):
        reader.receive_data(wire[i : i + piece_bytes])
        while reader.next_event() is not None:
            found += 1
    assert found == count


def mpub_in_pieces(size: int) -> None:
    """One MPUB, 256 bytes at a time."""
    wire = encode_mpub("t", pack_messages([b"x" * 96] * (size * MIB // 10 // 100)))
    read_commands(wire, 256, 1)


def mpub_in_smaller_pieces(size: int) -> None:
    """The same bytes in so many times as many pieces."""
    wire = encode_mpub("t", pack_messages([b"x" * 96] * (MIB // 100)))
    read_commands(wire, 4096 // size, 1)


def pub_in_pieces(size: int) -> None:
    """One PUB, 64 bytes at a time."""
    read_commands(encode_pub("t", b"x" * (size * MIB // 20)), 64, 1)


def fin_and_req_in_turn(size: int) -> None:
    """FIN and REQ in turn, in one piece."""
    wire = (encode_finish([ID]) + encode_requeue(ID, 0)) * (size * 500)
    read_commands(wire, len(wire), size * 1000)


def fin_before_something_long(size: int) -> None:
    """FIN and PUB in turn, in one piece."""
    wire = (encode_finish([ID]) + encode_pub("t", b"x" * 500)) * (size * 500)
    read_commands(wire, len(wire), size * 1000)


def frame_in_pieces(size: int) -> None:
    """One message, 128 bytes at a time; small enough that its memory is not requested from the system each time."""
    read_events(message_frame(b"x" * (size * MIB // 32)), 128, 1)


def frame_in_smaller_pieces(size: int) -> None:
    """The same bytes in so many times as many pieces."""
    read_events(message_frame(b"x" * MIB), 4096 // size, 1)


def frames_of_two_kinds_in_turn(size: int) -> None:
    """Messages and OKs in turn, in one piece."""
    wire = (message_frame(b"x" * 300) + OK_FRAME) * (size * 500)
    read_events(wire, len(wire), size * 1000)


def line_without_end(size: int) -> None:
    """A FIN that never ends, byte by byte."""
    reader = reader_in(State.SUBSCRIBED)
    reader.receive_data(b"FIN ")
    for _ in range(size * 1000):
        reader.receive_data(b"x")
        assert reader.next_command() is None


READERS = {
    work.__name__.replace("_", " "): work
    for work in (
        mpub_in_pieces,
        mpub_in_smaller_pieces,
        pub_in_pieces,
        fin_and_req_in_turn,
        fin_before_something_long,
        frame_in_pieces,
        frame_in_smaller_pieces,
        frames_of_two_kinds_in_turn,
        line_without_end,
    )
}
SMALL, LARGE = 2, 16
