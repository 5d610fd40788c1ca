"""Sending and receiving frames in a thread."""

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pytest

from trio_nsq.replication.frame_socket import FrameSocket
from trio_nsq.replication.link import FrameKind, FrameReader, LinkError, encode_frame, encode_number

PATIENCE_S = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets, as trio makes them."""
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        yield near, far


def test_another_side_that_sends_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    frames = FrameSocket(pair[0], 0.05)
    with pytest.raises(LinkError, match=r"the other side has sent nothing for 0\.05 s"):
        frames.receive()


def test_another_side_that_sends_the_beginning_of_a_frame(pair: tuple[socket.socket, socket.socket]) -> None:
    frames = FrameSocket(pair[0], 0.05)
    pair[1].sendall(b"".join(encode_number(FrameKind.ALIVE, 1))[:-1])
    with pytest.raises(LinkError, match="the other side has sent nothing"):
        frames.receive()


@pytest.mark.parametrize("size", [1_000, 10_000_000])
def test_another_side_that_accepts_nothing(pair: tuple[socket.socket, socket.socket], size: int) -> None:
    with pytest.raises(LinkError, match=r"the other side has accepted nothing for 0\.05 s"):
        _send_endlessly(FrameSocket(pair[0], 0.05), encode_frame(FrameKind.OPERATIONS, bytes(size)))


def _send_endlessly(frames: FrameSocket, frame: Sequence[bytes | memoryview]) -> NoReturn:
    while True:
        frames.send(frame)


@pytest.mark.parametrize("size", [10, 10_000_000])
def test_a_frame_arrives_whole(pair: tuple[socket.socket, socket.socket], size: int) -> None:
    near, far = pair
    far.setblocking(False)
    reader, payload = FrameReader(), bytes(range(256)) * (size // 256 + 1)
    with ThreadPoolExecutor(1) as threads:
        parts = (payload[:7], memoryview(payload)[7:])
        sent = threads.submit(FrameSocket(near, PATIENCE_S).send, encode_frame(FrameKind.OPERATIONS, *parts))
        (received,) = FrameSocket(far, PATIENCE_S, reader).receive()
        sent.result()
    assert (received[0], bytes(received[1])) == (FrameKind.OPERATIONS, payload)


def test_another_thread_ends_it(pair: tuple[socket.socket, socket.socket]) -> None:
    frames = FrameSocket(pair[0], PATIENCE_S * 10)
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(frames.receive)
        frames.end()
        with pytest.raises(LinkError, match="the other side has ended the connection"):
            receiving.result(PATIENCE_S)


def test_it_leaves_a_socket_that_does_not_block(pair: tuple[socket.socket, socket.socket]) -> None:
    near, _ = pair
    FrameSocket(near, PATIENCE_S).leave()
    assert not near.getblocking()
    with pytest.raises(BlockingIOError):
        near.recv(1)
