"""The work grows with the bytes, not with the number of pieces they come in, nor with what lies behind them."""

import time
import tracemalloc
from collections.abc import Callable

import pytest

from protocol.support import drain, message_frame, reader_in
from trio_nsq.protocol import (
    OK_FRAME,
    FrameReader,
    Publish,
    State,
    encode_finish,
    encode_mpub,
    encode_pub,
    encode_requeue,
    pack_messages,
)

ID = b"0123456789abcdef"
MIB = 1024 * 1024


def cpu_s(work: Callable[[], None]) -> float:
    """Processor time of this process, the better of two."""
    times = []
    for _ in range(2):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def read_commands(wire: bytes, piece_bytes: int, count: int) -> None:
    reader = reader_in(State.SUBSCRIBED)
    found = 0
    for i in range(0, len(wire), piece_bytes):
        reader.receive_data(wire[i : i + piece_bytes])
        found += len(list(drain(reader)))
    assert found == count


def read_events(wire: bytes, piece_bytes: int, count: int) -> None:
    reader = FrameReader()
    found = 0
    for i in range(0, len(wire), piece_bytes):
        reader.receive_data(wire[i : i + piece_bytes])
        while reader.next_event() is not None:
            found += 1
    assert found == count


def mpub_in_pieces(scale: int) -> None:
    wire = encode_mpub("t", pack_messages([b"x" * 96] * (scale * MIB // 10 // 100)))
    read_commands(wire, 256, 1)


def pub_in_pieces(scale: int) -> None:
    read_commands(encode_pub("t", b"x" * (scale * MIB // 20)), 64, 1)


def fin_and_req_in_turn(scale: int) -> None:
    wire = (encode_finish([ID]) + encode_requeue(ID, 0)) * (scale * 500)
    read_commands(wire, len(wire), scale * 1000)


def fin_before_something_long(scale: int) -> None:
    wire = (encode_finish([ID]) + encode_pub("t", b"x" * 500)) * (scale * 500)
    read_commands(wire, len(wire), scale * 1000)


def frame_in_pieces(scale: int) -> None:
    read_events(message_frame(b"x" * (scale * MIB // 8)), 128, 1)


def frames_of_two_kinds_in_turn(scale: int) -> None:
    wire = (message_frame(b"x" * 300) + OK_FRAME) * (scale * 500)
    read_events(wire, len(wire), scale * 1000)


@pytest.mark.parametrize(
    "work",
    [
        mpub_in_pieces,
        pub_in_pieces,
        fin_and_req_in_turn,
        fin_before_something_long,
        frame_in_pieces,
        frames_of_two_kinds_in_turn,
    ],
)
def test_eight_times_the_bytes_are_eight_times_the_work(work: Callable[[int], None]) -> None:
    """Linear work gives 8, quadratic 64; what is between is left to a busy machine."""
    assert cpu_s(lambda: work(16)) < 16 * cpu_s(lambda: work(2))


def test_a_line_that_never_ends_is_searched_once() -> None:
    def feed(start: bytes) -> None:
        reader = reader_in(State.SUBSCRIBED)
        reader.receive_data(start)
        for _ in range(16_000):
            reader.receive_data(b"x")
            assert reader.next_command() is None

    assert cpu_s(lambda: feed(b"FIN ")) < 5 * cpu_s(lambda: feed(b""))


def test_what_was_read_is_not_kept() -> None:
    wire = encode_mpub("t", pack_messages([b"x" * 1000] * 100)) + encode_finish([ID] * 1000)
    frames = message_frame(b"x" * 1000) * 100 + OK_FRAME
    commands, events = reader_in(State.SUBSCRIBED), FrameReader()
    tracemalloc.start()
    try:
        for _ in range(30):  # 220 kB each
            for i in range(0, len(wire), 10_000):
                commands.receive_data(wire[i : i + 10_000])
                for command in drain(commands):
                    del command
            for i in range(0, len(frames), 10_000):
                events.receive_data(frames[i : i + 10_000])
                while events.next_event() is not None:
                    pass
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 500_000


def test_a_big_body_is_held_once() -> None:
    wire = encode_mpub("t", pack_messages([b"y" * 1000] * 5000))
    reader = reader_in(State.INIT)
    tracemalloc.start()
    try:
        for i in range(0, len(wire), 4096):
            reader.receive_data(wire[i : i + 4096])
            found = list(drain(reader))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(found[0], Publish)
    assert peak < 3.5 * len(wire)  # the buffer, which grows, and the set made of it
