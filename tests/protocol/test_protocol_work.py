"""Tests that readers search, copy and hold data in proportion to the bytes, not to the number of pieces.

bench/growth.py measures the time.
"""

import time
import tracemalloc
from typing import Any, cast

import pytest

from protocol.support import drain, message_frame, reader_in
from trio_nsq.protocol import pack_messages
from trio_nsq.protocol.commands import Publish
from trio_nsq.protocol.encode import encode_finish, encode_mpub
from trio_nsq.protocol.frames import OK_FRAME, FrameReader
from trio_nsq.protocol.states import State

ID = b"0123456789abcdef"


class SearchedBuffer(bytearray):
    """A buffer that counts how many of its bytes were searched."""

    searched = 0

    def find(self, what: Any, start: Any = 0, end: Any = None) -> int:
        self.searched += len(self) - start
        return super().find(what, start)


@pytest.mark.uncompiled
@pytest.mark.parametrize("start", [b"xx", b"FIN ", b"PUB "])
def test_endless_line_is_searched_once(start: bytes) -> None:
    reader = reader_in(State.SUBSCRIBED)
    buffer = SearchedBuffer(start)
    reader.receive_data(cast("bytes", buffer))  # later data is appended to it
    for _ in range(16_000):
        reader.receive_data(b"x")
        assert reader.next_command() is None
    assert len(buffer) == len(start) + 16_000
    assert len(buffer) <= buffer.searched <= len(buffer) + 16_000  # each byte once, and one step per piece


def test_frame_in_many_pieces_is_joined_once() -> None:
    """Joining it with each piece would copy 160 GB."""
    reader = FrameReader()
    wire = message_frame(b"x" * 8_000_000)
    events = []
    began_s = time.process_time()
    for i in range(0, len(wire), 200):
        reader.receive_data(wire[i : i + 200])
        events.append(reader.next_event())
        assert time.process_time() - began_s < 3
    assert [event is None for event in events] == [True] * (len(events) - 1) + [False]


def test_consumed_data_is_released() -> None:
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


def test_large_body_is_held_once() -> None:
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
    assert peak < 3.5 * len(wire)  # the growing buffer, and the set made of it
