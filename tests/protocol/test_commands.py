"""Tests for commands: encoded and decoded, whole, byte by byte, split anywhere and followed by others."""

import tracemalloc
from dataclasses import dataclass

import pytest

from protocol.support import (
    LIMITS,
    drain,
    finish,
    int32,
    messages,
    mpub_body,
    read_all,
    reader_in,
    single_bytes,
)
from trio_nsq.protocol import CommandError, Limits, pack_messages
from trio_nsq.protocol.command_reader import CommandReader
from trio_nsq.protocol.commands import (
    Auth,
    Claim,
    Command,
    Finish,
    Identify,
    LineTooLong,
    NoOperation,
    Publish,
    Ready,
    Requeue,
    StartClose,
    Subscribe,
    Touch,
)
from trio_nsq.protocol.encode import (
    encode_auth,
    encode_claim,
    encode_cls,
    encode_dpub,
    encode_finish,
    encode_hpub,
    encode_identify,
    encode_mpub,
    encode_nop,
    encode_pub,
    encode_rdy,
    encode_requeue,
    encode_sub,
    encode_touch,
)
from trio_nsq.protocol.headers import with_prefixes
from trio_nsq.protocol.limits import MAGIC_V2
from trio_nsq.protocol.states import LEGAL_STATES, State

ID = b"0123456789abcdef"
ID2 = b"fedcba9876543210"
ALL_BYTES = bytes(range(256))


@dataclass(frozen=True)
class Case:
    """A command: the arguments of our side, the bytes on the wire, and the decoded command."""

    name: str
    state: State
    encoded: bytes
    wire: bytes
    command: Command


CASES = [
    Case(
        "IDENTIFY",
        State.INIT,
        encode_identify({"client_id": "ü", "msg_timeout": 1000}),
        b'IDENTIFY\n\0\0\0\x29{"client_id":"\\u00fc","msg_timeout":1000}',
        Identify(b'{"client_id":"\\u00fc","msg_timeout":1000}'),
    ),
    Case("AUTH", State.INIT, encode_auth(b"a\nb"), b"AUTH\n\0\0\0\3a\nb", Auth(b"a\nb")),
    Case("SUB", State.INIT, encode_sub("t", "c"), b"SUB t c\n", Subscribe("t", "c")),
    Case(
        "SUB ephemeral",
        State.INIT,
        encode_sub("t.-_9#ephemeral", "c#ephemeral"),
        b"SUB t.-_9#ephemeral c#ephemeral\n",
        Subscribe("t.-_9#ephemeral", "c#ephemeral"),
    ),
    Case(
        "PUB",
        State.INIT,
        encode_pub("t", b"body"),
        b"PUB t\n\0\0\0\4body",
        Publish("PUB", "t", messages(b"body")),
    ),
    Case(
        "PUB of all bytes",
        State.SUBSCRIBED,
        encode_pub("t", ALL_BYTES),
        b"PUB t\n\0\0\1\0" + ALL_BYTES,
        Publish("PUB", "t", messages(ALL_BYTES)),
    ),
    Case(
        "PUB of something like commands",
        State.CLOSING,
        encode_pub("t", b"\nFIN " + ID + b"\nCLS\n"),
        b"PUB t\n\0\0\0\x1a\nFIN " + ID + b"\nCLS\n",
        Publish("PUB", "t", messages(b"\nFIN " + ID + b"\nCLS\n")),
    ),
    Case(
        "DPUB",
        State.INIT,
        encode_dpub("t", 3_600_000, b"x"),
        b"DPUB t 3600000\n\0\0\0\1x",
        Publish("DPUB", "t", messages(b"x"), 3_600_000),
    ),
    Case(
        "DPUB of no delay",
        State.INIT,
        encode_dpub("t", 0, b"x"),
        b"DPUB t 0\n\0\0\0\1x",
        Publish("DPUB", "t", messages(b"x"), 0),
    ),
    Case(
        "MPUB",
        State.INIT,
        encode_mpub("t", pack_messages([b"a", b"bc\n", b"\0" * 300])),
        b"MPUB t\n\0\0\1\x40\0\0\0\3\0\0\0\1a\0\0\0\3bc\n\0\0\1\x2c" + b"\0" * 300,
        Publish("MPUB", "t", messages(b"a", b"bc\n", b"\0" * 300)),
    ),
    Case(
        "MPUB of one",
        State.INIT,
        encode_mpub("t", pack_messages([b"a"])),
        b"MPUB t\n\0\0\0\x09\0\0\0\1\0\0\0\1a",
        Publish("MPUB", "t", messages(b"a")),
    ),
    Case("PRODUCER", State.INIT, encode_claim("t"), b"PRODUCER t\n", Claim("t")),
    Case(
        "PUB with a number",
        State.INIT,
        encode_pub("t", b"x", 17),
        b"PUB t 17\n\0\0\0\1x",
        Publish("PUB", "t", messages(b"x"), first=17),
    ),
    Case(
        "DPUB with a number",
        State.INIT,
        encode_dpub("t", 5, b"x", 17),
        b"DPUB t 5 17\n\0\0\0\1x",
        Publish("DPUB", "t", messages(b"x"), 5, first=17),
    ),
    Case(
        "MPUB with a number",
        State.INIT,
        encode_mpub("t", pack_messages([b"a"]), 0),
        b"MPUB t 0\n\0\0\0\x09\0\0\0\1\0\0\0\1a",
        Publish("MPUB", "t", messages(b"a"), first=0),
    ),
    Case(
        "HPUB",
        State.SUBSCRIBED,
        encode_hpub("t", with_prefixes([b"a", b"bc"], ["x:1\n", ""])),
        b"HPUB t 0\n\0\0\0\x17\0\0\0\2\0\0\0\x07\0\4x:1\na\0\0\0\4\0\0bc",
        Publish("HPUB", "t", messages(b"a", b"bc"), headers=["x:1\n", ""]),
    ),
    Case(
        "HPUB with a number",
        State.INIT,
        encode_hpub("t", with_prefixes([b"a"], ["x:1\n"]), 0, 17),
        b"HPUB t 0 17\n\0\0\0\x0f\0\0\0\1\0\0\0\x07\0\4x:1\na",
        Publish("HPUB", "t", messages(b"a"), first=17, headers=["x:1\n"]),
    ),
    Case(
        "HPUB for later",
        State.INIT,
        encode_hpub("t", with_prefixes([b"a"], ["x:1\n"]), 90),
        b"HPUB t 90\n\0\0\0\x0f\0\0\0\1\0\0\0\x07\0\4x:1\na",
        Publish("HPUB", "t", messages(b"a"), 90, headers=["x:1\n"]),
    ),
    Case("RDY", State.SUBSCRIBED, encode_rdy(2500), b"RDY 2500\n", Ready(2500)),
    Case("RDY 0", State.SUBSCRIBED, encode_rdy(0), b"RDY 0\n", Ready(0)),
    Case("FIN", State.SUBSCRIBED, encode_finish([ID]), b"FIN " + ID + b"\n", finish([ID])),
    Case(
        "FIN of two",
        State.CLOSING,
        encode_finish([ID, ID2]),
        b"FIN " + ID + b"\nFIN " + ID2 + b"\n",
        finish([ID, ID2]),
    ),
    Case("REQ", State.SUBSCRIBED, encode_requeue(ID, 90), b"REQ " + ID + b" 90\n", Requeue(ID, 90)),
    Case("REQ at once", State.CLOSING, encode_requeue(ID, 0), b"REQ " + ID + b" 0\n", Requeue(ID, 0)),
    Case(
        "uncounted REQ",
        State.SUBSCRIBED,
        encode_requeue(ID, 7, counts_attempt=False),
        b"REQ " + ID + b" 7 uncounted\n",
        Requeue(ID, 7, counts_attempt=False),
    ),
    Case("TOUCH", State.SUBSCRIBED, encode_touch(ID), b"TOUCH " + ID + b"\n", Touch(ID)),
    Case("CLS", State.SUBSCRIBED, encode_cls(), b"CLS\n", StartClose()),
    Case("NOP", State.INIT, encode_nop(), b"NOP\n", NoOperation()),
]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    value: Case = request.param
    return value


def test_table_has_every_verb_and_every_kind_of_command() -> None:
    assert {case.wire.partition(b"\n")[0].split(b" ")[0] for case in CASES} == set(LEGAL_STATES)
    assert {type(case.command) for case in CASES} == set(Command.__args__)


def test_encoding(case: Case) -> None:
    assert case.encoded == case.wire


def test_decoding_whole(case: Case) -> None:
    assert read_all(reader_in(case.state), [case.wire]) == [case.command]


def test_decoding_byte_by_byte(case: Case) -> None:
    reader = reader_in(case.state)
    found: list[object] = []
    for i, byte in enumerate(single_bytes(case.wire)):
        reader.receive_data(byte)
        now = list(drain(reader))
        # Nothing early, except that each FIN line is a command.
        assert (not now) or i + 1 == len(case.wire) or isinstance(case.command, Finish)
        found += now
    assert found == [case.command] or found == [finish([ID]), finish([ID2])]


def test_decoding_with_more_data_after_it(case: Case) -> None:
    behind = b"NOP\nPUB t\n\0\0\0\1xTHE BEGINNING OF"
    expected = [case.command, NoOperation(), Publish("PUB", "t", messages(b"x"))]
    assert read_all(reader_in(case.state), [case.wire + behind]) == expected
    assert read_all(reader_in(case.state), single_bytes(case.wire + behind)) == expected
    for cut in range(len(case.wire)):
        assert read_all(reader_in(case.state), [case.wire[:cut], case.wire[cut:] + behind]) == expected


def test_decoding_lines_that_end_with_crlf(case: Case) -> None:
    lines = -1 if isinstance(case.command, Finish) else 1  # bodies must not change
    wire = case.wire.replace(b"\n", b"\r\n", lines)
    assert read_all(reader_in(case.state), [wire * 2]) == read_all(reader_in(case.state), [case.wire * 2])
    assert read_all(reader_in(case.state), single_bytes(wire)) == [case.command]


def test_pipelined_conversation() -> None:
    cases = [case for case in CASES if case.state is State.INIT and not isinstance(case.command, Subscribe)]
    cases += [case for case in CASES if case.name == "SUB"]
    cases += [c for c in CASES if c.state is State.SUBSCRIBED and not isinstance(c.command, StartClose)]
    cases += [case for case in CASES if isinstance(case.command, StartClose)]
    cases += [case for case in CASES if case.state is State.CLOSING]
    wire = MAGIC_V2 + b"".join(case.wire for case in cases)
    expected = [case.command for case in cases]
    for piece_bytes in (1, 2, 3, 7, 64, len(wire)):
        pieces = [wire[i : i + piece_bytes] for i in range(0, len(wire), piece_bytes)]
        reader = CommandReader(LIMITS)
        reader.numbered = reader.uncounted_requeues = True
        assert read_all(reader, pieces) == expected


def unnumbered() -> CommandReader:
    """Return the reader of a client that is no producer with a name."""
    reader = reader_in(State.INIT)
    reader.numbered = False
    return reader


def test_finish_without_ids_is_refused() -> None:
    assert encode_finish([]) == b""


def test_surplus_parameters_are_ignored() -> None:
    assert read_all(unnumbered(), [b"NOP x y\nPUB t u v\n\0\0\0\1xSUB t c d\nRDY 5 x\nCLS x\n"]) == [
        NoOperation(),
        Publish("PUB", "t", messages(b"x")),
        Subscribe("t", "c"),
        Ready(5),
        StartClose(),
    ]
    assert read_all(reader_in(State.INIT), [b"IDENTIFY x\n\0\0\0\2{}"]) == [Identify(b"{}")]
    assert read_all(reader_in(State.SUBSCRIBED), [b"FIN " + ID + b" x\nTOUCH " + ID + b" x\n"]) == [
        finish([ID]),
        Touch(ID),
    ]
    assert read_all(reader_in(State.SUBSCRIBED), [b"REQ " + ID + b" 5 x\n"]) == [Requeue(ID, 5)]


def test_repeated_publish_lines_with_others_between() -> None:
    """The reader caches the last line; the cache must not confuse PUB, MPUB and topics."""
    wire = b""
    expected: list[object] = []
    for topic in ("a", "b", "b", "a", "a#ephemeral", "a"):
        wire += encode_pub(topic, b"1") * 2 + encode_mpub(topic, messages(b"2", b"3")) * 2
        wire += encode_dpub(topic, 7, b"4") + encode_pub(topic, b"5")
        expected += [Publish("PUB", topic, messages(b"1"))] * 2
        expected += [Publish("MPUB", topic, messages(b"2", b"3"))] * 2
        expected += [Publish("DPUB", topic, messages(b"4"), 7), Publish("PUB", topic, messages(b"5"))]
    assert read_all(reader_in(State.INIT), [wire]) == expected
    assert read_all(reader_in(State.INIT), single_bytes(wire)) == expected


def test_refused_topic_is_not_cached() -> None:
    reader = reader_in(State.INIT)
    reader.receive_data(b"PUB a!\n\0\0\0\1xPUB a!\n\0\0\0\1x")
    with pytest.raises(CommandError, match="E_BAD_TOPIC"):
        reader.next_command()


# ---------------------------------------------------------------------- magic


@pytest.mark.parametrize("size", range(5))
def test_magic_in_pieces(size: int) -> None:
    reader = CommandReader(LIMITS)
    reader.receive_data(MAGIC_V2[:size])
    assert reader.next_command() is None
    assert reader.greeted == (size == 4)
    reader.receive_data(MAGIC_V2[size:] + b"NOP\n")
    assert reader.next_command() == NoOperation()
    assert reader.greeted


@pytest.mark.parametrize("magic", [b"  V1", b"GET ", b"\0\0\0\0", b"V2  ", b"  v2"])
def test_other_magic_is_refused_with_a_bare_code(magic: bytes) -> None:
    reader = CommandReader(LIMITS)
    reader.receive_data(magic[:3])
    assert reader.next_command() is None
    reader.receive_data(magic[3:] + b"NOP\n")
    with pytest.raises(CommandError) as caught:
        reader.next_command()
    assert caught.value.wire == b"E_BAD_PROTOCOL"
    assert caught.value.fatal
    assert not reader.greeted


def test_end_before_the_magic_is_silent() -> None:
    assert read_all(CommandReader(LIMITS), [b"  V"], eof=True) == []


# ---------------------------------------------------------------------- states

INIT, SUBSCRIBED, CLOSING = State.INIT, State.SUBSCRIBED, State.CLOSING
EXAMPLE = {
    b"IDENTIFY": (b"IDENTIFY\n\0\0\0\2{}", {INIT}),
    b"AUTH": (b"AUTH\n\0\0\0\1x", {INIT}),
    b"SUB": (b"SUB t c\n", {INIT}),
    b"PUB": (b"PUB t\n\0\0\0\1x", {INIT, SUBSCRIBED, CLOSING}),
    b"MPUB": (b"MPUB t\n" + mpub_body(b"x"), {INIT, SUBSCRIBED, CLOSING}),
    b"HPUB": (b"HPUB t\n" + mpub_body(b"\0\4a:1\nx"), {INIT, SUBSCRIBED, CLOSING}),
    b"DPUB": (b"DPUB t 1\n\0\0\0\1x", {INIT, SUBSCRIBED, CLOSING}),
    b"RDY": (b"RDY 1\n", {SUBSCRIBED, CLOSING}),
    b"FIN": (b"FIN " + ID + b"\n", {SUBSCRIBED, CLOSING}),
    b"REQ": (b"REQ " + ID + b" 0\n", {SUBSCRIBED, CLOSING}),
    b"TOUCH": (b"TOUCH " + ID + b"\n", {SUBSCRIBED, CLOSING}),
    b"CLS": (b"CLS\n", {SUBSCRIBED}),
    b"NOP": (b"NOP\n", {INIT, SUBSCRIBED, CLOSING}),
}


def test_table_of_states_equals_that_of_nsqd_and_hpub() -> None:
    assert {verb: set(states) for verb, states in LEGAL_STATES.items() if verb != b"PRODUCER"} == {
        verb: states for verb, (_, states) in EXAMPLE.items()
    }
    assert [(state.name, state.value) for state in State] == [("INIT", 0), ("SUBSCRIBED", 3), ("CLOSING", 4)]


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("verb", EXAMPLE)
def test_every_command_in_every_state(verb: bytes, state: State) -> None:
    wire, legal = EXAMPLE[verb]
    for pieces in ([wire], single_bytes(wire)):
        (found,) = read_all(reader_in(state), pieces)
        if state in legal:
            assert not isinstance(found, bytes)
        else:
            assert found == b"E_INVALID cannot " + verb + b" in current state"


@pytest.mark.parametrize("verb", [verb for verb, (_, legal) in EXAMPLE.items() if State.INIT not in legal])
def test_state_is_checked_before_the_parameters(verb: bytes) -> None:
    assert read_all(reader_in(State.INIT), [verb + b"\n"]) == [
        b"E_INVALID cannot " + verb + b" in current state"
    ]
    assert read_all(reader_in(State.INIT), [verb + b" ! !\n"]) == [
        b"E_INVALID cannot " + verb + b" in current state"
    ]


@pytest.mark.parametrize("line", [b"RDY 1", b"RDY x", b"RDY 99999", b"RDY", b"RDY -1"])
def test_ready_counts_are_ignored_while_closing(line: bytes) -> None:
    assert read_all(reader_in(State.CLOSING), [line + b"\nNOP\n"]) == [Ready(0), NoOperation()]


# ---------------------------------------------------------------------- errors

NAME_64 = b"a" * 64
NAME_65 = b"a" * 65
EPHEMERAL_64 = b"a" * 54 + b"#ephemeral"
EPHEMERAL_65 = b"a" * 55 + b"#ephemeral"

REFUSED: list[tuple[State, bytes, bytes]] = [
    # unknown verbs
    (INIT, b"\n", b"E_INVALID invalid command "),
    (INIT, b"\r\n", b"E_INVALID invalid command "),
    (INIT, b" NOP\n", b"E_INVALID invalid command "),
    (INIT, b"nop\n", b"E_INVALID invalid command nop"),
    (INIT, b"NOP\r\r\n", b"E_INVALID invalid command NOP\r"),
    (INIT, b"GET / HTTP/1.1\n", b"E_INVALID invalid command GET"),
    (INIT, b"\xff\xfe q\n", b"E_INVALID invalid command \xff\xfe"),
    (SUBSCRIBED, b"FINISH\n", b"E_INVALID invalid command FINISH"),
    # too few parameters
    (INIT, b"SUB\n", b"E_INVALID SUB insufficient number of parameters"),
    (INIT, b"SUB t\n", b"E_INVALID SUB insufficient number of parameters"),
    (INIT, b"SUB !\n", b"E_INVALID SUB insufficient number of parameters"),
    (INIT, b"PUB\n", b"E_INVALID PUB insufficient number of parameters"),
    (INIT, b"MPUB\n", b"E_INVALID MPUB insufficient number of parameters"),
    (INIT, b"DPUB\n", b"E_INVALID DPUB insufficient number of parameters"),
    (INIT, b"DPUB !\n", b"E_INVALID DPUB insufficient number of parameters"),
    (SUBSCRIBED, b"FIN\n", b"E_INVALID FIN insufficient number of params"),
    (SUBSCRIBED, b"TOUCH\n", b"E_INVALID TOUCH insufficient number of params"),
    (SUBSCRIBED, b"REQ\n", b"E_INVALID REQ insufficient number of params"),
    (SUBSCRIBED, b"REQ x\n", b"E_INVALID REQ insufficient number of params"),
    (SUBSCRIBED, b"REQ " + ID + b"\n", b"E_INVALID REQ insufficient number of params"),
    # and AUTH, which has none
    (INIT, b"AUTH x\n", b"E_INVALID AUTH invalid number of parameters"),
    (INIT, b"AUTH \n", b"E_INVALID AUTH invalid number of parameters"),
    # names; of two errors the first in nsqd's order is reported
    (INIT, b"SUB ! !\n", b'E_BAD_TOPIC SUB topic name "!" is not valid'),
    (INIT, b"SUB t !\n", b'E_BAD_CHANNEL SUB channel name "!" is not valid'),
    (INIT, b"SUB t \n", b'E_BAD_CHANNEL SUB channel name "" is not valid'),
    (INIT, b"SUB t " + NAME_65 + b"\n", b'E_BAD_CHANNEL SUB channel name "' + NAME_65 + b'" is not valid'),
    (INIT, b"PUB  t\n", b'E_BAD_TOPIC PUB topic name "" is not valid'),
    (INIT, b"PUB " + NAME_65 + b"\n", b'E_BAD_TOPIC PUB topic name "' + NAME_65 + b'" is not valid'),
    (INIT, b"PUB " + EPHEMERAL_65 + b"\n", b'E_BAD_TOPIC PUB topic name "' + EPHEMERAL_65 + b'" is not valid'),
    (INIT, b"PUB #ephemeral\n", b'E_BAD_TOPIC PUB topic name "#ephemeral" is not valid'),
    (INIT, b"PUB t\r\r\n", b'E_BAD_TOPIC PUB topic name "t\\r" is not valid'),
    (INIT, b"PUB a\x00\xff\xc3\xa9\xc2\x85\n", b'E_BAD_TOPIC PUB topic name "a\\x00\\xff\xc3\xa9\\u0085" is not valid'),
    # nsqd repeats the code here
    (INIT, b"MPUB a!b\n", b'E_BAD_TOPIC MPUB topic name "a!b" is not valid'),
    (INIT, b"DPUB ! x\n", b'E_BAD_TOPIC DPUB topic name "!" is not valid'),
    (INIT, b"DPUB t x\n", b"E_INVALID DPUB could not parse timeout x"),
    (INIT, b"DPUB t -1\n", b"E_INVALID DPUB could not parse timeout -1"),
    (INIT, b"DPUB t 1.5\n\0\0\0\0", b"E_INVALID DPUB could not parse timeout 1.5"),
    (INIT, b"DPUB t 31536000001\n", b"E_INVALID DPUB timeout 31536000001 out of range 0-31536000000"),
    (INIT, b"DPUB t 18446744073709551617\n", b"E_INVALID DPUB timeout 18446744073709551616 out of range 0-31536000000"),
    # counts, delays, ids
    (SUBSCRIBED, b"RDY x\n", b"E_INVALID RDY could not parse count x"),
    (SUBSCRIBED, b"RDY -1\n", b"E_INVALID RDY could not parse count -1"),
    (SUBSCRIBED, b"RDY +1\n", b"E_INVALID RDY could not parse count +1"),
    (SUBSCRIBED, b"RDY 1_0\n", b"E_INVALID RDY could not parse count 1_0"),
    (SUBSCRIBED, b"RDY \xc2\xb2\n", b"E_INVALID RDY could not parse count \xc2\xb2"),
    (SUBSCRIBED, b"RDY 2501\n", b"E_INVALID RDY count 2501 out of range 0-2500"),
    (SUBSCRIBED, b"RDY 99999999999999999999\n", b"E_INVALID RDY count 18446744073709551616 out of range 0-2500"),
    (SUBSCRIBED, b"RDY " + b"9" * 9999 + b"\n", b"E_INVALID RDY count 18446744073709551616 out of range 0-2500"),
    (SUBSCRIBED, b"REQ x y\n", b"E_INVALID invalid message ID"),
    (SUBSCRIBED, b"REQ " + ID + b" y\n", b"E_INVALID REQ could not parse timeout y"),
    (SUBSCRIBED, b"REQ " + ID + b" -1\n", b"E_INVALID REQ could not parse timeout -1"),
    (SUBSCRIBED, b"REQ  " + ID + b" 1\n", b"E_INVALID invalid message ID"),
    (SUBSCRIBED, b"FIN x\n", b"E_INVALID invalid message ID"),
    (SUBSCRIBED, b"FIN \n", b"E_INVALID invalid message ID"),
    (SUBSCRIBED, b"FIN " + ID + b"0\n", b"E_INVALID invalid message ID"),
    (SUBSCRIBED, b"TOUCH " + ID[1:] + b"\n", b"E_INVALID invalid message ID"),
    (SUBSCRIBED, b"TOUCH \n", b"E_INVALID invalid message ID"),
    # sizes, refused before any byte of the body
    (INIT, b"IDENTIFY\n" + int32(0), b"E_BAD_BODY IDENTIFY invalid body size 0"),
    (INIT, b"IDENTIFY\n" + int32(-1), b"E_BAD_BODY IDENTIFY invalid body size -1"),
    (INIT, b"IDENTIFY\n\x80\0\0\0", b"E_BAD_BODY IDENTIFY invalid body size -2147483648"),
    (INIT, b"IDENTIFY\n" + int32(65537), b"E_BAD_BODY IDENTIFY body too big 65537 > 65536"),
    (INIT, b"AUTH\n" + int32(0), b"E_BAD_BODY AUTH invalid body size 0"),
    (INIT, b"AUTH\n" + int32(-2), b"E_BAD_BODY AUTH invalid body size -2"),
    (INIT, b"AUTH\n" + int32(65537), b"E_BAD_BODY AUTH body too big 65537 > 65536"),
    (INIT, b"PUB t\n" + int32(0), b"E_BAD_MESSAGE PUB invalid message body size 0"),
    (INIT, b"PUB t\n" + int32(-1), b"E_BAD_MESSAGE PUB invalid message body size -1"),
    (INIT, b"PUB t\n\x80\0\0\0", b"E_BAD_MESSAGE PUB invalid message body size -2147483648"),
    (INIT, b"PUB t\n" + int32(1048577), b"E_BAD_MESSAGE PUB message too big 1048577 > 1048576"),
    (INIT, b"PUB t\n" + int32(2**31 - 1), b"E_BAD_MESSAGE PUB message too big 2147483647 > 1048576"),
    (INIT, b"DPUB t 1\n" + int32(0), b"E_BAD_MESSAGE DPUB invalid message body size 0"),
    (INIT, b"DPUB t 1\n" + int32(1048577), b"E_BAD_MESSAGE DPUB message too big 1048577 > 1048576"),
]  # fmt: skip


@pytest.mark.parametrize(("state", "wire", "error"), REFUSED)
def test_invalid_command_is_refused(state: State, wire: bytes, error: bytes) -> None:
    assert read_all(reader_in(state), [wire]) == [error]
    assert read_all(reader_in(state), single_bytes(wire)) == [error]
    # Commands before it are executed, and bytes after it change nothing.
    assert read_all(reader_in(state), [b"NOP\n" + wire + b"PUB t\n\0\0\0\1xNOP\n"]) == [NoOperation(), error]


@pytest.mark.parametrize(("state", "wire", "error"), REFUSED)
def test_protocol_errors_are_fatal(state: State, wire: bytes, error: bytes) -> None:
    reader = reader_in(state)
    reader.receive_data(wire)
    with pytest.raises(CommandError) as caught:
        reader.next_command()
    assert caught.value.fatal
    assert caught.value.code.encode() == error.split(b" ")[0]
    assert not isinstance(caught.value, LineTooLong)


def test_sub_without_heartbeats_is_refused_after_the_state_and_before_the_parameters() -> None:
    reader = reader_in(State.INIT)
    reader.heartbeats = False
    assert read_all(reader, [b"SUB\n"]) == [b"E_INVALID cannot SUB with heartbeats disabled"]
    reader = reader_in(State.SUBSCRIBED)
    reader.heartbeats = False
    assert read_all(reader, [b"SUB\n"]) == [b"E_INVALID cannot SUB in current state"]


@pytest.mark.parametrize("name", [b"a", b".", b"..", b"-_.aZ9", NAME_64, EPHEMERAL_64, b".#ephemeral"])
def test_valid_names(name: bytes) -> None:
    found = read_all(reader_in(State.INIT), [b"SUB " + name + b" " + name + b"\n"])
    assert found == [Subscribe(name.decode(), name.decode())]


@pytest.mark.parametrize(
    ("word", "count"),
    [
        (b" 0", 0),
        (b" 1", 1),
        (b" 2500", 2500),
        (b"", 1),
        (b" ", 0),
        (b" 007", 7),
        (b" " + b"0" * 5000 + b"9", 9),
    ],
)
def test_valid_ready_counts(word: bytes, count: int) -> None:
    assert read_all(reader_in(State.SUBSCRIBED), [b"RDY" + word + b"\n"]) == [Ready(count)]


@pytest.mark.parametrize(
    ("word", "delay_ms"),
    [
        (b"0", 0),
        (b"", 0),
        (b"3600000", 3600000),
        (b"3600001", 3600000),
        (b"9223372036854775808", 3600000),
        (b"9" * 10000, 3600000),
        (b"0" * 100 + b"5", 5),
    ],
)
def test_requeue_delays_are_limited_to_the_maximum(word: bytes, delay_ms: int) -> None:
    assert read_all(reader_in(State.SUBSCRIBED), [b"REQ " + ID + b" " + word + b"\n"]) == [
        Requeue(ID, delay_ms)
    ]


@pytest.mark.parametrize("more", [b"uncounted", b"uncounted x", b"x", b"Uncounted"])
def test_requeues_count_unless_the_client_has_negotiated_otherwise(more: bytes) -> None:
    wire = b"REQ " + ID + b" 5 " + more + b"\n"
    reader = reader_in(State.SUBSCRIBED)
    assert read_all(reader, [wire]) == [Requeue(ID, 5, counts_attempt=more != b"uncounted")]
    reader = reader_in(State.SUBSCRIBED)
    reader.uncounted_requeues = False
    assert read_all(reader, [wire]) == [Requeue(ID, 5)]


@pytest.mark.parametrize(("verb", "extra"), [(b"PUB t", b""), (b"DPUB t 0", b""), (b"MPUB t", b"")])
def test_bodies_of_exactly_the_maximum_size(verb: bytes, extra: bytes) -> None:
    limits = Limits(max_msg_size=100, max_body_size=108)
    body = b"x" * 100
    wire = verb + b"\n" + (mpub_body(body) if verb.startswith(b"MPUB") else int32(100) + body)
    (found,) = read_all(reader_in(State.INIT, limits), [wire])
    assert isinstance(found, Publish)
    assert found.messages == messages(body)


def test_limits_are_per_reader() -> None:
    limits = Limits(
        max_msg_size=10, max_body_size=20, max_rdy_count=3, max_req_timeout_ms=50, max_defer_ms=50
    )
    assert read_all(reader_in(State.INIT, limits), [b"PUB t\n" + int32(11)]) == [
        b"E_BAD_MESSAGE PUB message too big 11 > 10"
    ]
    assert read_all(reader_in(State.INIT, limits), [b"AUTH\n" + int32(21)]) == [
        b"E_BAD_BODY AUTH body too big 21 > 20"
    ]
    assert read_all(reader_in(State.SUBSCRIBED, limits), [b"RDY 4\n"]) == [
        b"E_INVALID RDY count 4 out of range 0-3"
    ]
    assert read_all(reader_in(State.INIT, limits), [b"DPUB t 51\n"]) == [
        b"E_INVALID DPUB timeout 51 out of range 0-50"
    ]
    assert read_all(reader_in(State.SUBSCRIBED, limits), [b"REQ " + ID + b" 51\n"]) == [Requeue(ID, 50)]


# ---------------------------------------------------------------------- lines


@pytest.mark.parametrize("state", [State.INIT, State.SUBSCRIBED])
@pytest.mark.parametrize("start", [b"NOP ", b"FIN ", b"PUB t "])
def test_longest_line_has_16_kib_with_its_line_feed(state: State, start: bytes) -> None:
    longest = start + b"x" * (16383 - len(start))
    for pieces in ([longest + b"\n"], single_bytes(longest + b"\n")):
        reader = reader_in(state)
        found: list[Command | CommandError] = []
        for piece in pieces:
            reader.receive_data(piece)
            found += drain(reader)
        assert not any(isinstance(command, LineTooLong) for command in found)
    for wire in (longest + b"x\n", longest + b"x", longest + b"x" * 100_000 + b"\n"):
        for pieces in ([wire], [wire[:16000], wire[16000:]], single_bytes(wire[:16400])):
            reader = reader_in(state)
            found = []
            for piece in pieces:
                reader.receive_data(piece)
                found += drain(reader)
                if found:
                    break
            assert [type(command) for command in found] == [LineTooLong]


def test_too_long_line_is_refused_at_once() -> None:
    """It ends at the 16384th byte, if that is not a line feed."""
    reader = reader_in(State.INIT)
    reader.receive_data(b"x" * 16383)
    assert reader.next_command() is None
    reader.receive_data(b"x")
    with pytest.raises(LineTooLong):
        reader.next_command()


# ---------------------------------------------------------------------- the end of the input


def _truncations(wire: bytes, spans: list[tuple[int, bytes | None]]) -> list[tuple[bytes, bytes | None]]:
    """Return (prefix, error) for every prefix of `wire`; `spans` gives the error for each range of lengths."""
    found = []
    for size in range(len(wire)):
        error = next(error for end, error in spans if size <= end)
        found.append((wire[:size], error))
    return found


TRUNCATED = [
    *_truncations(b"NOP\n", [(4, None)]),
    *_truncations(b"SUB t c\n", [(8, None)]),
    *_truncations(b"FIN " + ID + b"\n", [(21, None)]),
    *_truncations(
        b"PUB t\n\0\0\0\3abc",
        [
            (5, None),
            (9, b"E_BAD_MESSAGE PUB failed to read message body size"),
            (13, b"E_BAD_MESSAGE PUB failed to read message body"),
        ],
    ),
    *_truncations(
        b"DPUB t 5\n\0\0\0\3abc",
        [
            (8, None),
            (12, b"E_BAD_MESSAGE DPUB failed to read message body size"),
            (16, b"E_BAD_MESSAGE DPUB failed to read message body"),
        ],
    ),
    *_truncations(
        b"IDENTIFY\n\0\0\0\2{}",
        [
            (8, None),
            (12, b"E_BAD_BODY IDENTIFY failed to read body size"),
            (15, b"E_BAD_BODY IDENTIFY failed to read body"),
        ],
    ),
    *_truncations(
        b"AUTH\n\0\0\0\2xx",
        [
            (4, None),
            (8, b"E_BAD_BODY AUTH failed to read body size"),
            (11, b"E_BAD_BODY AUTH failed to read body"),
        ],
    ),
    *_truncations(
        b"MPUB t\n" + mpub_body(b"a", b"bc"),
        [
            (6, None),
            (10, b"E_BAD_BODY MPUB failed to read body size"),
            (14, b"E_BAD_BODY MPUB failed to read message count"),
            (18, b"E_BAD_MESSAGE MPUB failed to read message(0) body size"),
            (19, b"E_BAD_MESSAGE MPUB failed to read message body"),
            (23, b"E_BAD_MESSAGE MPUB failed to read message(1) body size"),
            (26, b"E_BAD_MESSAGE MPUB failed to read message body"),
        ],
    ),
]


@pytest.mark.parametrize(("wire", "error"), TRUNCATED)
def test_truncated_input(wire: bytes, error: bytes | None) -> None:
    state = State.SUBSCRIBED if wire.startswith(b"FIN") else State.INIT
    expected = [] if error is None else [error]
    for pieces in ([wire], single_bytes(wire)):
        assert read_all(reader_in(state), pieces) == []  # before the end of the input, more could follow
        assert read_all(reader_in(state), pieces, eof=True) == expected
    assert read_all(reader_in(state), [b"NOP\n" + wire], eof=True) == [NoOperation(), *expected]


def test_end_after_a_complete_command_is_not_an_error() -> None:
    for case in CASES:
        assert read_all(reader_in(case.state), [case.wire], eof=True) == [case.command]


# ---------------------------------------------------------------------- unread bytes for an upgrade


def test_unread_bytes_are_handed_over_once() -> None:
    reader = reader_in(State.INIT)
    reader.receive_data(b"NOP\nNOP\n\x16\x03\x01")
    assert reader.next_command() == NoOperation()
    assert reader.take_buffered() == b"NOP\n\x16\x03\x01"
    assert reader.take_buffered() == b""
    assert reader.next_command() is None
    reader.receive_data(b"NOP\n")  # data from the upgraded connection
    assert reader.next_command() == NoOperation()


def test_handover_within_a_line_resets_the_search() -> None:
    reader = reader_in(State.INIT)
    reader.receive_data(b"x" * 100)
    assert reader.next_command() is None
    assert reader.take_buffered() == b"x" * 100
    reader.receive_data(b"NOP\n")
    assert reader.next_command() == NoOperation()


@pytest.mark.parametrize("verb", ["PUB", "MPUB"])
def test_large_body_knows_its_missing_bytes_and_is_joined_once(verb: str) -> None:
    reader = reader_in(State.INIT)
    content = b"".join(int32(1000) + bytes([n % 256]) * 1000 for n in range(100))
    if verb == "MPUB":
        line, body = b"MPUB t\n" + int32(4 + len(content)) + int32(100), content
    else:
        line, body = b"PUB t\n", int32(len(content)) + content
    reader.receive_data(line + body[:1500])
    assert reader.next_command() is None
    for start in range(1500, len(body), 10_000):
        assert reader.missing_bytes == len(body) - start
        reader.receive_data(body[start : start + 10_000])
        if start + 10_000 < len(body):
            assert reader.next_command() is None
    assert reader.missing_bytes == 0
    tracemalloc.start()
    try:
        command = reader.next_command()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(command, Publish)
    assert command.messages.data == body
    assert peak < len(body) / 2, "it is copied again"
    assert command.messages.sizes == ([1000] * 100 if verb == "MPUB" else [len(content)])
    assert reader.next_command() is None
    reader.receive_data(b"NOP\n")
    assert reader.next_command() == NoOperation()


@pytest.mark.parametrize("verb", ["PUB", "MPUB"])
def test_large_body_is_released_after_it_is_read(verb: str) -> None:
    reader = reader_in(State.INIT)
    content = int32(1) + int32(500_000) + bytes(500_000)
    if verb == "PUB":
        content = content[8:]
    tracemalloc.start()
    try:
        reader.receive_data(verb.encode() + b" t\n" + int32(len(content)))
        assert reader.next_command() is None
        for start in range(0, len(content), 10_000):
            reader.receive_data(content[start : start + 10_000])
            command = reader.next_command()
        assert isinstance(command, Publish)
        del command
        assert reader.next_command() is None
        assert tracemalloc.get_traced_memory()[0] < 50_000
    finally:
        tracemalloc.stop()


def test_commands_after_a_large_body_are_read_and_a_small_body_is_not_awaited() -> None:
    reader = reader_in(State.INIT)
    body = int32(100_000) + b"x" * 100_000
    reader.receive_data(b"PUB t\n" + body[:10])
    assert reader.next_command() is None
    assert reader.missing_bytes == len(body) - 10
    reader.receive_data(body[10:] + b"PUB t\n" + body[:90_000])
    assert isinstance(reader.next_command(), Publish)
    assert reader.next_command() is None
    assert reader.missing_bytes == 0  # small bodies are read normally
    reader.receive_data(body[90_000:] + b"NOP\n")
    assert isinstance(reader.next_command(), Publish)
    assert reader.next_command() == NoOperation()


@pytest.mark.parametrize(
    ("size", "received", "text"),
    [
        (1000, 99 * 1004 + 4, "MPUB failed to read message(99) body size"),
        (1000, 99 * 1004 + 8, "MPUB failed to read message body"),
        (0, 99 * 1004, "MPUB invalid message(1) body size 0"),
    ],
)
def test_end_within_a_large_body(size: int, received: int, text: str) -> None:
    reader = reader_in(State.INIT)
    sizes = [1000, size, *[1000] * 98]
    body = int32(100) + b"".join(int32(each) + bytes(each) for each in sizes)
    reader.receive_data(b"MPUB t\n" + int32(100 * 1004 + 4) + body[:600])
    assert reader.next_command() is None
    reader.receive_data(body[600:received])
    reader.receive_eof()
    with pytest.raises(CommandError) as caught:
        reader.next_command()
    assert (caught.value.code, caught.value.text) == ("E_BAD_MESSAGE", text)


@pytest.mark.parametrize("size", [3, 100_000])
def test_reader_is_empty_only_between_commands(size: int) -> None:
    data = b"PUB t\n" + int32(size) + bytes(size)
    for first in (*range(1, 11), len(data) - 1):
        reader = reader_in(State.INIT)
        assert reader.is_empty
        reader.receive_data(data[:first])
        assert reader.next_command() is None
        assert not reader.is_empty
        reader.receive_data(data[first:])
        assert not reader.is_empty
        assert reader.next_command() is not None
        assert reader.is_empty


@pytest.mark.parametrize(
    ("step", "size"), [(1, 75_000), (100, 300_000), (4095, 300_000), (4096, 300_000), (60_000, 300_000)]
)
def test_large_body_in_small_parts_is_kept_in_few_pieces(step: int, size: int) -> None:
    reader = reader_in(State.INIT)
    body = int32(size) + bytes(range(250)) * (size // 250)
    reader.receive_data(b"PUB t\n" + body[:10])
    assert reader.next_command() is None
    tracemalloc.start()
    try:
        for start in range(10, len(body), step):
            assert tracemalloc.get_traced_memory()[0] < 1.2 * start + 10_000
            assert reader.next_command() is None
            reader.receive_data(body[start : start + step])
    finally:
        tracemalloc.stop()
    command = reader.next_command()
    assert isinstance(command, Publish)
    assert command.messages.data == body


def test_handover_within_a_large_body() -> None:
    reader = reader_in(State.INIT)
    reader.receive_data(b"PUB t\n" + int32(100_000) + b"x" * 10)
    assert reader.next_command() is None
    reader.receive_data(b"y" * 10)
    assert reader.take_buffered() == int32(100_000) + b"x" * 10 + b"y" * 10
