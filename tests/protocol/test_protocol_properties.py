"""Properties: data arrives unchanged however it is split, and any other input ends in a protocol error."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.support import (
    LIMITS,
    finish,
    flattened,
    int32,
    message_frame,
    mpub_body,
    read_all,
    read_frames,
    reader_in,
    split_at,
)
from soak import examples
from trio_nsq.protocol import CommandError, FrameError, Limits, MessageSet, is_valid_name, pack_messages
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
    encode_mpub,
    encode_nop,
    encode_pub,
    encode_rdy,
    encode_requeue,
    encode_sub,
    encode_touch,
)
from trio_nsq.protocol.frames import ErrorFrame, FrameReader, ResponseFrame, encode_error, encode_response
from trio_nsq.protocol.limits import MAGIC_V2
from trio_nsq.protocol.messages import walk_messages
from trio_nsq.protocol.states import LEGAL_STATES, State

CUTS = st.lists(st.integers(0, 2**16), max_size=8)
IDS = st.binary(min_size=8, max_size=8).map(lambda raw: raw.hex().encode())
NAMES = st.sampled_from(["t", "a.b", "-_.9Z", "..", "t#ephemeral", "x" * 64, "x" * 54 + "#ephemeral"])
BODIES = st.one_of(st.binary(min_size=1, max_size=40), st.sampled_from([b"\nCLS\n", b"x" * 300, b"\0\0\0\1"]))


def encode(command: Command) -> bytes:
    """Return the bytes that a client sends for a command."""
    match command:
        case Identify(body):
            return b"IDENTIFY\n" + int32(len(body)) + body
        case Auth(secret):
            return encode_auth(secret)
        case Subscribe(topic, channel):
            return encode_sub(topic, channel)
        case Claim(topic):
            return encode_claim(topic)
        case Publish("PUB", topic, messages):
            return encode_pub(topic, messages.bodies()[0], number_of(command))
        case Publish("DPUB", topic, messages, defer_ms):
            return encode_dpub(topic, defer_ms, messages.bodies()[0], number_of(command))
        case Publish(_, topic, messages):
            return encode_mpub(topic, messages, number_of(command))
        case Ready(count):
            return encode_rdy(count)
        case Finish(lines):
            return lines
        case Requeue(message_id, delay_ms, counts_attempt):
            return encode_requeue(message_id, delay_ms, counts_attempt=counts_attempt)
        case Touch(message_id):
            return encode_touch(message_id)
        case StartClose():
            return encode_cls()
        case NoOperation():
            return encode_nop()


def number_of(publish: Publish) -> int | None:
    return None if publish.first < 0 else publish.first


NUMBERS = st.one_of(st.just(-1), st.integers(0, 2**62 - 1))
PUBLISHES = st.one_of(
    st.builds(lambda t, b, n: Publish("PUB", t, pack_messages([b]), first=n), NAMES, BODIES, NUMBERS),
    st.builds(
        lambda t, b, d, n: Publish("DPUB", t, pack_messages([b]), d, first=n),
        NAMES,
        BODIES,
        st.integers(0, 3_600_000),
        NUMBERS,
    ),
    st.builds(
        lambda t, b, n: Publish("MPUB", t, pack_messages(b), first=n),
        NAMES,
        st.lists(BODIES, min_size=1, max_size=20),
        NUMBERS,
    ),
)
ANY_TIME = st.one_of(PUBLISHES, st.builds(Claim, NAMES), st.just(NoOperation()))
BEFORE_SUB = st.one_of(ANY_TIME, st.builds(Identify, BODIES), st.builds(Auth, BODIES))
ANSWERS = st.one_of(
    st.builds(finish, st.lists(IDS, min_size=1, max_size=5)),
    st.builds(lambda message_id, count: finish([message_id] * count), IDS, st.integers(1, 100)),
    st.builds(Requeue, IDS, st.integers(0, 3_600_000)),
    st.builds(Touch, IDS),
)
AFTER_SUB = st.one_of(ANY_TIME, ANSWERS, ANSWERS, st.builds(Ready, st.integers(0, 2500)))
AFTER_CLS = st.one_of(ANY_TIME, ANSWERS)
CONVERSATIONS = st.builds(
    lambda before, sub, after, closing: [*before, sub, *after, StartClose(), *closing],
    st.lists(BEFORE_SUB, max_size=4),
    st.builds(Subscribe, NAMES, NAMES),
    st.lists(AFTER_SUB, max_size=10),
    st.lists(AFTER_CLS, max_size=3),
)


@settings(max_examples=examples(100))
@given(CONVERSATIONS, CUTS)
def test_any_conversation_is_decoded(commands: Sequence[Command], cuts: Sequence[int]) -> None:
    wire = MAGIC_V2 + b"".join(map(encode, commands))
    expected: list[object] = []
    for command in commands:
        if isinstance(command, Finish) and expected and isinstance(expected[-1], Finish):
            expected[-1] = Finish(expected[-1].lines + command.lines)
        else:
            expected.append(command)
    reader = CommandReader(LIMITS)
    reader.numbered = True
    assert read_all(reader, split_at(wire, cuts)) == expected


NONSENSE = st.lists(
    st.one_of(
        st.binary(max_size=30),
        st.sampled_from([verb + end for verb in LEGAL_STATES for end in (b"", b" ", b"\n", b" t\n", b" t c\n")]),
        st.sampled_from([b"  V2", b"FIN 0123456789abcdef\n", b"RDY 1\n", b"REQ 0123456789abcdef 1\n", b"\r\n"]),
        st.sampled_from([b"PUB t\n\0\0\0\1x", b"MPUB t\n" + mpub_body(b"a", b"b"), b"DPUB t 5\n", b"#ephemeral"]),
        st.integers(-3, 40).map(int32),
        st.sampled_from([int32(2**31 - 1), b"\x80\0\0\0", b"x" * 17_000]),
    ),
    max_size=12,
).map(b"".join)  # fmt: skip


@settings(max_examples=examples(200))
@given(NONSENSE, CUTS, st.sampled_from(State), st.booleans())
def test_any_bytes_give_commands_or_a_command_error(
    data: bytes, cuts: Sequence[int], state: State, eof: bool
) -> None:
    """The result does not depend on the pieces, and each command consumes bytes."""
    limits = Limits(max_msg_size=20, max_body_size=50)
    whole = read_all(reader_in(state, limits), [data], eof=eof)
    assert read_all(reader_in(state, limits), split_at(data, cuts), eof=eof) == whole
    assert len(whole) <= len(data) + 1
    for command in whole:
        if isinstance(command, Publish):
            check_set(command.messages, limits)
            assert is_valid_name(command.topic)


@settings(max_examples=examples(200))
@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_from_the_start(data: bytes, eof: bool) -> None:
    reader = CommandReader(LIMITS)
    reader.receive_data(data)
    if eof:
        reader.receive_eof()
    try:
        while reader.next_command() is not None:
            pass
    except LineTooLong:
        raise AssertionError("there are not so many bytes") from None
    except CommandError:
        pass


def check_set(messages: MessageSet, limits: Limits) -> None:
    """Check that a set is consistent."""
    assert messages.bodies()
    assert [len(body) for body in messages.bodies()] == messages.sizes
    assert all(1 <= size <= limits.max_msg_size for size in messages.sizes)
    assert b"".join(int32(len(body)) + body for body in messages.bodies()) == messages.data


@settings(max_examples=examples(50))
@given(st.lists(BODIES, min_size=1, max_size=30), CUTS)
def test_walk_in_steps_equals_one_walk(bodies: Sequence[bytes], cuts: Sequence[int]) -> None:
    packed = pack_messages(bodies)
    assert packed.bodies() == list(bodies)
    sizes: list[int] = []
    at = 0
    for end in [*sorted(cut % (len(packed.data) + 1) for cut in cuts), len(packed.data)]:
        at = walk_messages(packed.data, at, end, len(bodies), LIMITS, sizes)
    assert at == len(packed.data)
    assert sizes == packed.sizes


# ---------------------------------------------------------------------- frames

MESSAGES = st.tuples(IDS, st.binary(max_size=100), st.integers(-(2**63), 2**63 - 1), st.integers(0, 65535))
CODES = st.sampled_from(["E_INVALID", "E_FIN_FAILED", ""])
TEXTS = st.text("a é\n\0\U0001f600", max_size=10)
EVENTS = st.lists(
    st.one_of(
        MESSAGES,
        MESSAGES,
        st.builds(ResponseFrame, st.binary(max_size=50)),
        st.builds(ErrorFrame, CODES, TEXTS),
    ),
    max_size=30,
)


def encode_event(event: object) -> bytes:
    """Return the frame that a broker sends for an event."""
    match event:
        case ResponseFrame(data):
            return encode_response(data)
        case ErrorFrame():
            return encode_error(str(event).encode())
        case (bytes() as message_id, bytes() as body, int() as timestamp_ns, int() as attempts):
            return message_frame(body, message_id=message_id, timestamp_ns=timestamp_ns, attempts=attempts)
        case _:
            raise AssertionError(event)


@settings(max_examples=examples(100))
@given(EVENTS, CUTS)
def test_any_frames_are_decoded(events: Sequence[object], cuts: Sequence[int]) -> None:
    wire = b"".join(map(encode_event, events))
    assert read_frames(FrameReader(), split_at(wire, cuts)) == events


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.integers(-2, 60).map(int32),
            st.sampled_from([message_frame(b""), message_frame(b"abc")]),
            st.sampled_from([encode_response(b"OK"), encode_error(b"E_X y")]),
        ),
        max_size=10,
    ).map(b"".join),
    CUTS,
)  # fmt: skip
def test_any_bytes_give_frames_or_a_frame_error(data: bytes, cuts: Sequence[int]) -> None:
    whole = read_frames(FrameReader(50), [data])
    assert read_frames(FrameReader(50), split_at(data, cuts)) == whole
    assert len(whole) <= len(data) // 8 + 1
    reader = FrameReader(50)
    reader.receive_data(data)
    found: list[object] = []
    try:
        while (event := reader.next_event()) is not None:
            found += flattened(event)
    except FrameError as exc:
        found.append(str(exc))
    assert found == whole
