"""A consumer that can process nothing."""

import socket
from struct import unpack


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        assert piece, "the broker closed the connection"
        data += piece
    return data


def fail_messages(tcp_address: str, topic: str, channel: str, count: int) -> None:
    """Send back so many messages of a channel, as they come."""
    host, _, port = tcp_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(f"  V2SUB {topic} {channel}\nRDY 1\n".encode())
        while count:
            size, frame_type = unpack(">ii", _read_exactly(sock, 8))
            data = _read_exactly(sock, size - 4)
            if frame_type == 2:
                sock.sendall(b"REQ %s 0\n" % data[10:26])
                count -= 1
        sock.sendall(b"CLS\n")
        while _read_exactly(sock, unpack(">ii", _read_exactly(sock, 8))[0] - 4) != b"CLOSE_WAIT":
            pass
