"""Tests for FIN lines that are read together: the results must equal those line by line."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.support import finish, int32, messages, read_all, reader_in, single_bytes, split_at
from soak import examples
from trio_nsq.protocol.command_reader import CommandReader
from trio_nsq.protocol.commands import Finish, NoOperation, Publish, Requeue, StartClose
from trio_nsq.protocol.encode import encode_finish
from trio_nsq.protocol.states import State

INVALID_ID = b"E_INVALID invalid message ID"


def ids(count: int) -> list[bytes]:
    return [b"%016x" % number for number in range(count)]


def in_state(state: State = State.SUBSCRIBED) -> CommandReader:
    return reader_in(state)


# Around the counts at which the reader searches more lines at a time.
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 79, 80, 81, 82, 335, 336, 337, 3000])
@pytest.mark.parametrize("state", [State.SUBSCRIBED, State.CLOSING])
def test_a_run_is_one_command(count: int, state: State) -> None:
    reader = in_state(state)
    reader.receive_data(encode_finish(ids(count)))
    assert reader.next_command() == finish(ids(count))
    assert reader.next_command() is None
    assert reader.take_buffered() == b""


@pytest.mark.parametrize("count", [1, 16, 17, 80, 81, 3000])
@pytest.mark.parametrize(
    ("behind", "command"),
    [
        (b"NOP\n", NoOperation()),
        (b"CLS\n", StartClose()),
        (b"REQ 0123456789abcdef 5\n", Requeue(b"0123456789abcdef", 5)),
        (b"PUB t\n" + int32(21) + b"FIN 0123456789abcdef\n", Publish("PUB", "t", messages(b"FIN 0123456789abcdef\n"))),
        (b"FIN 0123456789abcdef x\n", finish([b"0123456789abcdef"])),
        (b"FIN 0123456789abcdef\r\n", finish([b"0123456789abcdef"])),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_run_ends_at_another_command(count: int, behind: bytes, command: object) -> None:
    reader = in_state()
    run = encode_finish(ids(count))
    reader.receive_data(run + behind + run)
    assert reader.next_command() == finish(ids(count))
    assert reader.next_command() == command
    assert reader.next_command() == finish(ids(count))
    assert reader.next_command() is None


def test_a_run_split_at_every_byte() -> None:
    wire = encode_finish(ids(5)) + b"NOP\n" + encode_finish(ids(2))
    expected = [finish(ids(5)), NoOperation(), finish(ids(2))]
    for first in range(len(wire) + 1):
        for second in range(first, len(wire) + 1):
            assert read_all(in_state(), [wire[:first], wire[first:second], wire[second:]]) == expected
    assert read_all(in_state(), single_bytes(wire)) == expected


def test_run_after_a_publish() -> None:
    wire = b"PUB t\n" + int32(3) + b"FIN" + encode_finish(ids(20)) + b"NOP\n" + encode_finish(ids(3))
    expected = [Publish("PUB", "t", messages(b"FIN")), finish(ids(20)), NoOperation(), finish(ids(3))]
    assert read_all(in_state(), [wire]) == expected
    assert read_all(in_state(), single_bytes(wire)) == expected


@pytest.mark.parametrize(
    "line",
    [
        b"FIN 0123456\n89abcdef\n",  # a line feed within the width of an id
        b"FIN \n123456789abcdef\n",
        b"FIN 0123456789abcde\n\n",
        b"FIN 01234\nFIN 012345\n",  # looks like the start of two lines
        b"FIN 01\nFIN 012345678\n",
        b"FIN 01234567 9abcdef\n",  # a space, which ends the id
        b"FIN  123456789abcdef\n",
        b"FIN 0123456789abcde \n",
        b"FIN 0123456789abcde\r\n",  # half of a CRLF
    ],
)
@pytest.mark.parametrize("before", [0, 1, 16, 100])
@pytest.mark.parametrize("after", [0, 100])
def test_invalid_line_of_the_right_width(line: bytes, before: int, after: int) -> None:
    """Refused as in nsqd, after the lines before it were executed."""
    assert len(line) == 21
    wire = encode_finish(ids(before)) + line + encode_finish(ids(after))
    expected = [finish(ids(before)), INVALID_ID] if before else [INVALID_ID]
    assert read_all(in_state(), [wire]) == expected
    assert read_all(in_state(), single_bytes(wire)) == expected


@pytest.mark.parametrize(
    "line", [b"0FIN 123456789abcde\n", b"F0IN 123456789abcde\n", b"FIN0 123456789abcde\n"]
)
@pytest.mark.parametrize("before", [1, 16, 100])
def test_a_line_of_the_right_width_with_another_verb(line: bytes, before: int) -> None:
    wire = encode_finish(ids(before)) + line + encode_finish(ids(100))
    expected = [finish(ids(before)), b"E_INVALID invalid command " + line.split(b" ")[0]]
    assert read_all(in_state(), [wire]) == expected
    assert read_all(in_state(), single_bytes(wire)) == expected


def test_ids_need_not_be_hexadecimal() -> None:
    strange = [b"\xff" * 16, b"FIN FIN FIN FIN ".replace(b" ", b"_"), b"0123\r56789abcdef", b"\0" * 16]
    assert read_all(in_state(), [encode_finish(strange)]) == [finish(strange)]
    assert read_all(in_state(), single_bytes(encode_finish(strange))) == [finish(strange)]


def test_lines_that_end_with_crlf() -> None:
    wire = b"".join(b"FIN %s\r\n" % message_id for message_id in ids(40))
    assert read_all(in_state(), [wire]) == [finish(ids(40))]
    assert read_all(in_state(), [wire + encode_finish(ids(40)) + wire]) == [finish(ids(40) * 3)]
    assert read_all(in_state(), single_bytes(wire)) == [finish(ids(40))]


def test_run_before_sub_is_refused() -> None:
    for pieces in ([encode_finish(ids(5))], single_bytes(encode_finish(ids(5)))):
        assert read_all(in_state(State.INIT), pieces) == [b"E_INVALID cannot FIN in current state"]


def test_end_within_a_run() -> None:
    wire = encode_finish(ids(3))
    for size in range(len(wire)):
        whole = size // 21
        expected = [finish(ids(whole))] if whole else []
        assert read_all(in_state(), [wire[:size]], eof=True) == expected


def naive(data: bytes) -> list[object]:
    """Return nsqd's results for lines that are FIN, NOP or invalid, one by one."""
    found: list[object] = []
    *lines, _ = data.split(b"\n")
    for line in lines:
        verb, *params = line.removesuffix(b"\r").split(b" ")
        if verb == b"NOP":
            found.append(NoOperation())
        elif verb != b"FIN":
            return [*found, b"E_INVALID invalid command " + verb]
        elif not params:
            return [*found, b"E_INVALID FIN insufficient number of params"]
        elif len(params[0]) != 16:
            return [*found, INVALID_ID]
        elif found and isinstance(found[-1], Finish):
            found[-1] = finish([*found[-1].ids, params[0]])
        else:
            found.append(finish([params[0]]))
    return found


FRAGMENTS = st.sampled_from(
    [b"FIN 0123456789abcdef\n"] * 6
    + [encode_finish(ids(16)), b"FIN 0123456789abcdef\r\n", b"FIN ", b"\nFIN ", b"0123456789abcdef", b"NOP\n"]
    + [
        b"\n",
        b" ",
        b"\r",
        b"0",
        b"FIN 0123456\nFIN 0123\n",
        b"FIN 0123456789abcde\r\n",
        b"FIN 01 3456789abcdef\n",
    ]
)


@settings(max_examples=examples(200))
@given(st.lists(FRAGMENTS, max_size=40).map(b"".join), st.lists(st.integers(0, 1000), max_size=4))
def test_runs_equal_single_lines(data: bytes, cuts: Sequence[int]) -> None:
    assert read_all(in_state(), [data]) == naive(data)
    assert read_all(in_state(), split_at(data, cuts)) == naive(data)


class CopiedBytes(bytes):
    """Counts how many of its bytes are copied: a reader searches copies."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.copied += len(found) if isinstance(key, slice) else 1
        return found


@pytest.mark.uncompiled
def test_only_the_next_line_is_searched_after_a_long_run() -> None:
    reader = in_state()
    reader.receive_data(encode_finish(ids(2000)))
    assert reader.next_command() == finish(ids(2000))
    lines = CopiedBytes(b"".join(b"FIN %s\r\n" % each for each in ids(500)))  # not a run: each line is longer
    reader.receive_data(lines)
    for each in ids(500):
        assert reader.next_command() == finish([each])
    assert 500 * 21 < lines.copied < 3 * 2000 * 21 + 500 * (16 + 1) * 21
