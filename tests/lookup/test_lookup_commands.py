"""Tests for parsing the commands of brokers, whole and in pieces."""

from dataclasses import replace
from struct import pack

import pytest

from lookup.support import auth, identify
from trio_nsq.lookup.protocol import (
    MAX_SECRET_BYTES,
    Auth,
    Command,
    CommandReader,
    Identify,
    PeerInfo,
    Ping,
    Register,
    Unregister,
)
from trio_nsq.protocol import CommandError
from trio_nsq.protocol.limits import MAX_HANDSHAKE_BYTES, MAX_LINE_BYTES

MAGIC = b"  V1"
I = Identify(PeerInfo("b", "h", 4151, 4150, "1.3.0"))  # noqa: E741


def read(pieces: list[bytes], *, eof: bool = False) -> list[Command | bytes]:
    """Return the commands, and the error if there is one."""
    reader = CommandReader()
    found: list[Command | bytes] = []
    try:
        for piece in [*filter(None, pieces), *([b""] if eof else [])]:
            reader.receive_data(piece)
            while (command := reader.next_command()) is not None:
                found.append(command)
    except CommandError as error:
        found.append(error.wire)
    return found


CASES: list[tuple[bytes, list[Command | bytes]]] = [
    (b"", []),
    (b"  V", []),
    (b"  V2", [b"E_BAD_PROTOCOL"]),
    (MAGIC + b"PING\nPING\r\n PING \n", [Ping(), Ping(), Ping()]),
    (MAGIC + b"PING", []),
    (
        MAGIC + identify() + b"REGISTER t\nREGISTER t c#ephemeral x\nUNREGISTER t c\nUNREGISTER t\n",
        [I, Register("t"), Register("t", "c#ephemeral"), Unregister("t", "c"), Unregister("t")],
    ),
    (MAGIC + identify() + identify(), [I, b"E_INVALID cannot IDENTIFY again"]),
    (
        MAGIC + auth(b"one") + auth(b"") + b"PING\n" + identify() + auth(b"x"),
        [Auth(b"one"), Auth(b""), Ping(), I, b"E_INVALID cannot AUTH after IDENTIFY"],
    ),
    (MAGIC + auth(b"x" * MAX_SECRET_BYTES), [Auth(b"x" * MAX_SECRET_BYTES)]),
    (MAGIC + b"AUTH\n" + pack(">i", MAX_SECRET_BYTES + 1), [b"E_BAD_BODY AUTH body too big 4097 > 4096"]),
    (MAGIC + b"AUTH\n" + pack(">i", -1), [b"E_BAD_BODY AUTH invalid body size -1"]),
    (MAGIC + b"REGISTER t\n", [b"E_INVALID client must IDENTIFY"]),
    (MAGIC + identify() + b"REGISTER\n", [I, b"E_INVALID REGISTER insufficient number of params"]),
    (MAGIC + identify() + b"REGISTER \xff\n", [I, b"E_BAD_TOPIC REGISTER topic name '\xff' is not valid"]),
    (MAGIC + b"\xff x\n", [b"E_INVALID invalid command \xff"]),
    (MAGIC + b"IDENTIFY\n" + pack(">i", -1), [b"E_BAD_BODY IDENTIFY invalid body size -1"]),
    (
        MAGIC + b"IDENTIFY\n" + pack(">i", MAX_HANDSHAKE_BYTES + 1),
        [b"E_BAD_BODY IDENTIFY body too big 65537 > 65536"],
    ),
    (MAGIC + b"IDENTIFY\n\0\0\0\2{}", [b"E_BAD_BODY IDENTIFY missing fields"]),
    (MAGIC + identify(tcp_port=-1), [b"E_BAD_BODY IDENTIFY invalid port"]),
    (MAGIC + identify(http_port=65536), [b"E_BAD_BODY IDENTIFY invalid port"]),
    (MAGIC + identify(broadcast_address="\r\nX: y"), [b"E_BAD_BODY IDENTIFY invalid broadcast_address"]),
    (MAGIC + identify(broadcast_address="a b"), [b"E_BAD_BODY IDENTIFY invalid broadcast_address"]),
    (
        MAGIC + identify(broadcast_address="fe80::1%eth0", tcp_port=65535),
        [Identify(replace(I.info, broadcast_address="fe80::1%eth0", tcp_port=65535))],
    ),
    (MAGIC + b"PING" + b" " * (MAX_LINE_BYTES - 5) + b"\n", [Ping()]),
    (MAGIC + b"PING" + b" " * (MAX_LINE_BYTES - 4) + b"\n", [b"E_INVALID line longer than 16384 bytes"]),
    (MAGIC + b"x" * MAX_LINE_BYTES, [b"E_INVALID line longer than 16384 bytes"]),
]


@pytest.mark.parametrize(("data", "expected"), CASES)
def test_commands_in_any_pieces(data: bytes, expected: list[Command | bytes]) -> None:
    assert read([data]) == expected
    assert read([data[i : i + 1] for i in range(len(data))]) == expected
    if not expected or not isinstance(expected[-1], bytes):
        assert read([data + b"\n"])[: len(expected)] == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"IDENTIFY\n\0\0", [b"E_BAD_BODY IDENTIFY failed to read body size"]),
        (identify()[:-1], [b"E_BAD_BODY IDENTIFY failed to read body"]),
        (identify(), [I]),
        (b"PIN", []),
    ],
)
def test_truncated_commands(data: bytes, expected: list[Command | bytes]) -> None:
    assert read([MAGIC + data], eof=True) == expected
    assert read([MAGIC + data]) == [each for each in expected if not isinstance(each, bytes)]
