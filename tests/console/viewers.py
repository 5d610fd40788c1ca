"""Many viewers of a page's live updates, without a browser: each is a connection that reads server-sent events."""

import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from urllib.parse import quote

DEADLINE_S = 60.0


class LiveViewer:
    """A viewer of one page.

    Attributes:
        received: All bytes so far.
    """

    def __init__(self, http_address: str, path: str, *, receive_buffer: int = 0) -> None:
        host, _, port = http_address.rpartition(":")
        self.received = bytearray()
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect((host, int(port)))
        request = f"GET /live?path={quote(path, safe='')} HTTP/1.1\r\nHost: {http_address}\r\n\r\n"
        self.socket.sendall(request.encode())

    @property
    def updates(self) -> int:
        """The number of blocks that arrived."""
        return self.received.count(b"event: update\n")

    @property
    def rounds(self) -> int:
        """The number of events: one for each snapshot, unless the viewer reads slowly."""
        return self.received.count(b"event: ")

    def has_rounds(self, count: int) -> bool:
        """Return whether there were this many events."""
        return self.rounds >= count

    def shows(self, text: str) -> bool:
        """Return whether the newest block has this text."""
        return text.encode() in self.received[self.received.rfind(b"event: update\n") :]


@contextmanager
def live_viewers(http_address: str, path: str, count: int) -> Iterator[list[LiveViewer]]:
    """Connect viewers of a page until the block exits."""
    with ExitStack() as stack:
        viewers = []
        for _ in range(count):
            viewer = LiveViewer(http_address, path)
            stack.callback(viewer.socket.close)
            viewers.append(viewer)
        yield viewers


def read_until(viewers: Sequence[LiveViewer], condition: Callable[[], bool], what: str) -> None:
    """Read what the viewers get until the condition is met."""
    deadline = time.monotonic() + DEADLINE_S
    with selectors.DefaultSelector() as selector:
        for viewer in viewers:
            selector.register(viewer.socket, selectors.EVENT_READ, viewer)
        while not condition():
            assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
            for key, _ in selector.select(1.0):
                data = key.data.socket.recv(1 << 20)
                assert data, f"the console closed a connection: {bytes(key.data.received[-500:])!r}"
                key.data.received += data
