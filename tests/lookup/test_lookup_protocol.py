"""Tests for the encoding of nsqlookupd's protocol V1."""

from dataclasses import replace

import pytest

from trio_nsq.lookup.protocol import (
    MAX_RESPONSE_BYTES,
    Leadership,
    LookupdError,
    PeerInfo,
    Register,
    ResponseReader,
    Unregister,
    encode_command,
    encode_identify,
    encode_response,
)

INFO = PeerInfo("broker.example", "b1", 4151, 4150, "1.3.0")
INFO_JSON = b'{"broadcast_address":"broker.example","hostname":"b1","http_port":4151,"tcp_port":4150,"version":"1.3.0"}'

LEADER = replace(INFO, cluster=Leadership("prod", "f1", 2**62))


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (Register("t"), b"REGISTER t\n"),
        (Register("t", "c#ephemeral"), b"REGISTER t c#ephemeral\n"),
        (Unregister("t"), b"UNREGISTER t\n"),
        (Unregister("t", "c"), b"UNREGISTER t c\n"),
    ],
)
def test_commands(command: Register | Unregister, line: bytes) -> None:
    assert encode_command(command) == line


def test_identify() -> None:
    assert encode_identify(INFO) == b"IDENTIFY\n\x00\x00\x00\x69" + INFO_JSON


@pytest.mark.parametrize(
    ("body", "info"),
    [
        (INFO_JSON, INFO),
        (b"{}", PeerInfo("", "", 0, 0, "")),
        (b'{"Broadcast_Address":"a","http_port":null,"more":[]}', PeerInfo("a", "", 0, 0, "")),
        (b'{"cluster":null}', PeerInfo("", "", 0, 0, "")),
        (b'{"cluster":{}}', PeerInfo("", "", 0, 0, "")),
        (LEADER.encode(), LEADER),
    ],
)
def test_peer_info(body: bytes, info: PeerInfo) -> None:
    assert PeerInfo.parse(body) == info


def test_a_leader_names_its_cluster() -> None:
    added = b',"cluster":{"name":"prod","member":"f1","epoch":4611686018427387904}}'
    assert LEADER.encode() == INFO_JSON.removesuffix(b"}") + added


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"OK", b"[]", b'{"http_port":"1"}', b'{"tcp_port":1.0}', b'{"version":1}'),
        b'{"cluster":"prod"}',
        b'{"cluster":{"name":"prod","epoch":1}}',
        b'{"cluster":{"name":"a b","member":"f1","epoch":1}}',
        b'{"cluster":{"name":"prod","member":"f1"}}',
        b'{"cluster":{"name":"prod","member":"f1","epoch":-1}}',
        b'{"cluster":{"name":"prod","member":"f1","epoch":4611686018427387905}}',
        b'{"cluster":{"name":"%s","member":"f1","epoch":1}}' % (b"x" * 65),
    ],
)
def test_invalid_peer_info(body: bytes) -> None:
    with pytest.raises(ValueError):
        PeerInfo.parse(body)


RESPONSES = [b"OK", b"", INFO_JSON, b"E_INVALID client must IDENTIFY", b"x" * MAX_RESPONSE_BYTES]


@pytest.mark.parametrize("piece_size", [1, 7, 10**9])
def test_responses_in_any_pieces(piece_size: int) -> None:
    stream = b"".join(encode_response(response) for response in RESPONSES)
    reader = ResponseReader()
    read = []
    for start in range(0, len(stream), piece_size):
        reader.receive_data(stream[start : start + piece_size])
        while (response := reader.next_response()) is not None:
            read.append(response)
    assert read == RESPONSES


@pytest.mark.parametrize("size", [-1, -(2**31), MAX_RESPONSE_BYTES + 1])
def test_size_out_of_range_is_refused_before_its_data(size: int) -> None:
    reader = ResponseReader()
    reader.receive_data(size.to_bytes(4, "big", signed=True))
    with pytest.raises(LookupdError, match=rf"\({size}\)"):
        reader.next_response()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it answers in HTTP: use the TCP port of nsqlookupd"),
        (b"\0\0\0\x12\0\0\0\1E_BAD_PROTOCOL", "it answers as a broker: use the TCP port of nsqlookupd"),
    ],
)
def test_response_of_another_server_names_the_right_port(data: bytes, reason: str) -> None:
    reader = ResponseReader()
    reader.receive_data(data)
    with pytest.raises(LookupdError, match=reason):
        reader.next_response()
