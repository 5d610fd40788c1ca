"""Fuzz targets for clients' data: `CommandReader`, and the JSON of IDENTIFY."""

import dataclasses
import json
from random import Random
from struct import pack

from fuzz.engine import ways
from trio_nsq.protocol import CommandError, Limits, is_valid_name
from trio_nsq.protocol.command_reader import CommandReader
from trio_nsq.protocol.commands import (
    Auth,
    Command,
    Finish,
    Identify,
    LineTooLong,
    Publish,
    Ready,
    Requeue,
    StartClose,
    Subscribe,
)
from trio_nsq.protocol.headers import decode_headers, encode_headers
from trio_nsq.protocol.identify import IdentifyRequest, IdentifySettings, negotiate, parse_identify
from trio_nsq.protocol.limits import MAGIC_V2, MAX_LINE_BYTES
from trio_nsq.protocol.messages import MessageSet
from trio_nsq.protocol.states import State

CODES = frozenset(
    {
        "E_BAD_HEADERS",  # not of NSQ
        *("E_BAD_PROTOCOL", "E_INVALID", "E_BAD_TOPIC", "E_BAD_CHANNEL", "E_BAD_BODY", "E_BAD_MESSAGE"),
        *("E_IDENTIFY_FAILED", "E_PUB_FAILED", "E_MPUB_FAILED", "E_DPUB_FAILED", "E_SUB_FAILED"),
        *("E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED"),
        *("E_AUTH_DISABLED", "E_AUTH_FIRST", "E_AUTH_FAILED", "E_UNAUTHORIZED", "E_AUTH_ERROR"),
    }
)
"""All error codes."""

LIMITS = Limits(
    max_msg_size=64, max_body_size=300, max_rdy_count=100, max_req_timeout_ms=1000, max_defer_ms=2000
)
"""Small limits, so that short inputs reach them."""

LONGEST_ERROR = 100 + 4 * MAX_LINE_BYTES
"""An error may quote a line, with each byte as `\\xNN`."""

NAMES = (b"t", b"a.b-c_D", b"t#ephemeral", b"x" * 64, b"x" * 65, b"", b"a|b", b"#ephemeral", b"\xff", b'"\\')
IDS = (b"0123456789abcdef", b"ffffffffffffffff", b"0123456789abcde", b"x" * 16)
TIMES = (b"0", b"1", b"1000", b"1001", b"", b"x")
TEXTS = (b"", b"a:1\n", b"a:1\n", b"a:1\nb:\xc3\xbc\n", b"a:1\na:2\n", b"A:1\n", b"a:1", b"a:\xff\n")
FIELDS = {
    "client_id": ("", "it", 5, None),
    "feature_negotiation": (True, False, None, 1),
    "heartbeat_interval": (-1, 0, 1000, 60000, 999, 60001, 2**63, 1.5, "1"),
    "output_buffer_size": (-1, 0, 64, 65536, 63, 65537),
    "output_buffer_timeout": (-1, 0, 25, 30000, 24, 30001),
    "tls_v1": (True, False),
    "snappy": (True, False),
    "deflate": (True, False),
    "deflate_level": (0, 6, 9, -1),
    "sample_rate": (0, 99, 100, -1),
    "message_headers": (True, False, None, 1),
    "msg_timeout": (0, 1000, 900000, 999, 900001),
    "MSG_TIMEOUT": (2000, None),
    "unknown": ([[[]]], {"x": 1}),
}


def sized(data: bytes) -> bytes:
    return pack(">i", len(data)) + data


def body(rng: Random) -> bytes:
    return rng.choice((b"x", b"NOP\n", b"\0\0\0\1", rng.randbytes(rng.randrange(1, 65)), b"y" * 64))


def identify(rng: Random) -> bytes:
    chosen = rng.sample(sorted(FIELDS), rng.randrange(5))
    text = json.dumps({name: rng.choice(FIELDS[name]) for name in chosen}).encode()
    return b"IDENTIFY\n" + sized(text)


def publish(rng: Random) -> bytes:
    topic = rng.choice(NAMES[:5])
    match rng.randrange(4):
        case 3:
            messages = [pack(">H", len(text)) + text + body(rng)[:20] for text in rng.choices(TEXTS, k=3)]
            defer = rng.choice((b"", b"", b" " + rng.choice(TIMES)))
            content = pack(">i", len(messages)) + b"".join(map(sized, messages))
            return b"HPUB " + topic + defer + b"\n" + sized(content)
        case 0:
            return b"PUB " + topic + b"\n" + sized(body(rng))
        case 1:
            return b"DPUB " + topic + b" " + rng.choice(TIMES) + b"\n" + sized(body(rng))
        case _:
            bodies = [body(rng)[:20] for _ in range(rng.randrange(1, 6))]
            return b"MPUB " + topic + b"\n" + sized(pack(">i", len(bodies)) + b"".join(map(sized, bodies)))


def answer(rng: Random) -> bytes:
    message_id = rng.choice(IDS[:2])
    match rng.randrange(5):
        case 0:
            return b"REQ " + message_id + b" " + rng.choice(TIMES) + b"\n"
        case 1:
            return b"TOUCH " + message_id + b"\n"
        case 2:
            return b"RDY " + rng.choice((b"0", b"1", b"100", b"101", b"")) + b"\n"
        case _:
            return b"".join(
                b"FIN " + rng.choice(IDS[:2]) + b"\n" for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 40)))
            )


def conversation(rng: Random) -> list[bytes]:
    """Return a legal sequence of commands of a client that publishes, subscribes and closes."""
    end = rng.choice((b"\n", b"\n", b"\n", b"\r\n"))
    pieces = [MAGIC_V2]
    if rng.random() < 0.7:
        pieces.append(identify(rng))
    if rng.random() < 0.2:
        pieces.append(b"AUTH\n" + sized(body(rng)))
    pieces += [publish(rng) for _ in range(rng.randrange(4))]
    if rng.random() < 0.7:
        pieces.append(b"SUB " + rng.choice(NAMES[:4]) + b" " + rng.choice(NAMES[:4]) + end)
        pieces += [rng.choice((answer, answer, publish))(rng) for _ in range(rng.randrange(6))]
        if rng.random() < 0.5:
            pieces += [b"CLS" + end, answer(rng)]
    return [*pieces, b"NOP" + end]


class Commands:
    """The reader of commands."""

    name = "commands"
    # The buffer, a copy of the data, and per FIN of 21 bytes an id of 16 with Python's 33 bytes of overhead,
    # in a list.
    memory_per_byte = 6
    memory_bytes = 8_000

    def valid(self, rng: Random) -> list[bytes]:
        return conversation(rng)

    def check(self, data: bytes, rng: Random) -> None:
        eof = rng.random() < 0.5
        whole = read([data], eof=eof)
        assert len(whole) <= len(data) + 2, "commands out of nothing"
        for pieces in ways(data, rng):
            again = read(pieces, eof=eof)
            assert again == whole, f"in pieces of {[*map(len, pieces)][:9]}: {again}; whole: {whole}"

    def read(self, data: bytes) -> None:
        reader = CommandReader(LIMITS)
        reader.receive_data(data)
        try:
            while reader.next_command() is not None:
                pass
        except CommandError:
            pass


def read(pieces: list[bytes], *, eof: bool) -> list[object]:
    """Read as a broker does. Return the commands, with adjacent FINs and PUBs joined, and the error if there is one."""
    reader = CommandReader(LIMITS)
    found: list[object] = []
    try:
        for piece in pieces:
            reader.receive_data(piece)
            _obey_all(reader, found)
        if eof:
            reader.receive_eof()
            _obey_all(reader, found)
    except CommandError as error:
        _check_error(error)
        found.append(error.wire)
    return found


def _obey_all(reader: CommandReader, found: list[object]) -> None:
    while (command := reader.next_command()) is not None:
        _obey(reader, command)
        _add(found, command)


def _check_error(error: CommandError) -> None:
    assert error.code in CODES, f"{error.code} is no code of NSQ's"
    assert error.fatal, "only executed commands can fail without ending the connection"
    assert isinstance(error, LineTooLong) or len(error.wire) <= LONGEST_ERROR


def _obey(reader: CommandReader, command: Command) -> None:
    """Execute a command as a broker would, and check that it is valid in this state."""
    if isinstance(command, Subscribe):
        assert reader.state is State.INIT
        assert is_valid_name(command.topic)
        assert is_valid_name(command.channel)
        reader.state = State.SUBSCRIBED
    elif isinstance(command, StartClose):
        assert reader.state is State.SUBSCRIBED
        reader.state = State.CLOSING
    elif isinstance(command, Publish):
        sizes = command.messages.sizes
        assert is_valid_name(command.topic)
        assert sizes
        assert all(1 <= size <= LIMITS.max_msg_size for size in sizes)
        bodies = command.messages.bodies()
        assert [*map(len, bodies)] == sizes
        assert b"".join(map(sized, bodies)) == command.messages.data
        assert command.commands == (len(sizes) if command.verb == "PUB" else 1)
        assert 0 <= command.defer_ms <= LIMITS.max_defer_ms
        assert len(command.headers) == (len(sizes) if command.verb == "HPUB" else 0)
        assert all(encode_headers(decode_headers(text)) == text for text in command.headers)
    elif isinstance(command, Finish):
        assert reader.state is not State.INIT
        assert command.ids
        assert all(len(message_id) == 16 for message_id in command.ids)
    elif isinstance(command, Ready):
        assert 0 <= command.count <= LIMITS.max_rdy_count
    elif isinstance(command, Requeue):
        assert len(command.id) == 16
        assert 0 <= command.delay_ms <= LIMITS.max_req_timeout_ms
    elif isinstance(command, Auth):
        assert 1 <= len(command.secret) <= LIMITS.max_body_size
    elif isinstance(command, Identify):
        assert 1 <= len(command.body) <= LIMITS.max_body_size


def _add(found: list[object], command: Command) -> None:
    """FIN lines and PUBs to a topic are joined, because their grouping depends on how they arrive."""
    last = found[-1] if found else None
    if isinstance(command, Finish) and isinstance(last, Finish):
        found[-1] = Finish(last.lines + command.lines)
    elif (
        isinstance(command, Publish)
        and isinstance(last, Publish)
        and command.verb == last.verb == "PUB"
        and command.topic == last.topic
    ):
        messages = MessageSet(
            last.messages.data + command.messages.data, last.messages.sizes + command.messages.sizes
        )
        found[-1] = Publish("PUB", last.topic, messages, commands=last.commands + command.commands)
    else:
        found.append(command)


class Identities:
    """The JSON of IDENTIFY."""

    name = "identify"
    memory_per_byte = 400  # a two-byte number in a list needs an object of 32 bytes and a list entry
    memory_bytes = 20_000

    def valid(self, rng: Random) -> list[bytes]:
        fields = [
            f"{json.dumps(name)}:{json.dumps(rng.choice(FIELDS[name]))}".encode() for name in sorted(FIELDS)
        ]
        chosen = rng.sample(fields, rng.randrange(6))
        return [b"{", *(piece for field in chosen for piece in (field, b",")), b'"x":0', b"}"]

    def check(self, data: bytes, rng: Random) -> None:
        try:
            request = parse_identify(data)
        except CommandError as error:
            _check_error(error)
            return
        for field in dataclasses.fields(IdentifyRequest):
            value = getattr(request, field.name)
            assert type(value) is type(field.default), f"{field.name} is {value!r}"
            if isinstance(value, str):
                value.encode()  # it is part of /stats
        try:
            settings = negotiate(request, LIMITS, IdentifySettings.default(LIMITS))
        except CommandError as error:
            _check_error(error)
            return
        _check_settings(settings)

    def read(self, data: bytes) -> None:
        try:
            parse_identify(data)
        except CommandError:
            pass


def _check_settings(settings: IdentifySettings) -> None:
    assert settings.heartbeat_interval_ms == 0 or 1000 <= settings.heartbeat_interval_ms <= 60000
    assert settings.output_buffer_size == 1 or 64 <= settings.output_buffer_size <= 65536
    assert settings.output_buffer_timeout_ms == 0 or 25 <= settings.output_buffer_timeout_ms <= 30000
    assert 0 <= settings.sample_rate <= 99
    assert 1000 <= settings.msg_timeout_ms <= 900000
