"""Tests for FIN lines that are recognized because they are the expected ones: the commands must be the same."""

from hypothesis import given
from hypothesis import strategies as st

from protocol.support import finish, read_all, reader_in, single_bytes, split_at
from trio_nsq.broker.state.in_flight import InFlight
from trio_nsq.broker.state.in_flight_batch import InFlightBatch
from trio_nsq.protocol.commands import Ready
from trio_nsq.protocol.encode import encode_finish, encode_rdy
from trio_nsq.protocol.states import State

RUNS = (3, 40, 1, 200)


def ids(count: int) -> list[bytes]:
    return [b"%016x" % number for number in range(count)]


def in_flight_with(*runs: int) -> InFlight:
    """Return messages in flight, in deliveries of these sizes."""
    in_flight, first = InFlight(), 0
    known = ids(sum(runs))
    for count in runs:
        in_flight.put(InFlightBatch(encode_finish(known[first : first + count]), first, 1, 0, 0))
        first += count
    return in_flight


def test_answers_in_order_are_recognized_up_to_any_length() -> None:
    in_flight = in_flight_with(3, 40, 200)
    wire = encode_finish(ids(243))
    for size in range(len(wire) + 1):
        assert in_flight.expected_answers(wire[:size], 0) == size - size % 21
        assert in_flight.expected_answers(bytearray(b"NOP\n" + wire[:size]), 4) == 4 + size - size % 21


def test_what_follows_the_expected_answers_is_not_recognized() -> None:
    wire = encode_finish(ids(50))
    for count in range(50):
        expected = wire[: 21 * count]
        for behind in (b"RDY 5\n" + wire, b"REQ 0123456789abcdef 0\n", b"FIN 01"):
            assert in_flight_with(3, 40, 200).expected_answers(expected + behind, 0) == len(expected)


def test_answers_continue_where_the_last_ones_ended() -> None:
    in_flight = in_flight_with(3, 40)
    wire = encode_finish(ids(43))
    assert in_flight.finish(wire[: 21 * 13]) == []
    assert in_flight.expected_answers(wire, 0) == 0
    assert in_flight.expected_answers(wire, 21 * 13) == len(wire)


def test_no_answer_is_expected_without_messages_in_flight() -> None:
    assert InFlight().expected_answers(encode_finish(ids(3)), 0) == 0


LINES = st.one_of(
    st.integers(0, 250).map(lambda number: [b"FIN %016x\n" % number]),
    st.tuples(st.integers(0, 250), st.integers(1, 250)).map(
        lambda some: [encode_finish(ids(250)[some[0] : some[0] + some[1]]) or b"NOP\n"]
    ),
    st.sampled_from(
        [
            [b"RDY 5\n"],
            [b"NOP\n"],
            [b"REQ 0000000000000001 5\n"],
            [b"FIN 01\n"],
            [b"FIN 0000000000000001\r\n"],
        ]
    ),
)


@given(
    st.lists(LINES, max_size=8),
    st.booleans(),
    st.integers(0, 244),
    st.lists(st.integers(0, 9999), max_size=4),
)
def test_commands_are_the_same_as_without_expected_answers(
    lines: list[list[bytes]], begins_in_order: bool, finished: int, cuts: list[int]
) -> None:
    in_flight = in_flight_with(*RUNS)
    if finished:
        in_flight.finish(encode_finish(ids(finished)))
    wire = encode_finish(ids(244)[finished : finished + 60]) if begins_in_order else b""
    wire += b"".join(line for some in lines for line in some)
    reader = reader_in(State.SUBSCRIBED)
    reader.expected_answers = in_flight.expected_answers
    pieces = split_at(wire, cuts)
    assert read_all(reader, pieces) == read_all(reader_in(State.SUBSCRIBED), pieces)


def test_repeated_ready_between_answers() -> None:
    expected = [finish(ids(2)), Ready(7), finish(ids(1)), Ready(7), Ready(3), Ready(7)]
    wire = encode_finish(ids(2)) + encode_rdy(7) + encode_finish(ids(1)) + encode_rdy(7)
    wire += encode_rdy(3) + encode_rdy(7)
    assert read_all(reader_in(State.SUBSCRIBED), [wire]) == expected
    assert read_all(reader_in(State.SUBSCRIBED), single_bytes(wire)) == expected


def test_repeated_ready_has_no_effect_while_closing() -> None:
    reader = reader_in(State.SUBSCRIBED)
    assert read_all(reader, [encode_rdy(7)]) == [Ready(7)]
    reader.state = State.CLOSING
    assert read_all(reader, [encode_rdy(7)]) == [Ready(0)]
