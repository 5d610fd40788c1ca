"""The connections of a load generator, and the loop that serves them in one thread.

trio switches tasks for each read and each write, which costs more than the rest of the work on a batch: a broker would
wait for its clients. So trio only connects; afterwards a thread waits for all sockets with epoll and answers at once.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from trio_nsq.client import ConnectionFailed
from trio_nsq.client.connection.connection import connect
from trio_nsq.client.connection.options import OFF, ConnectionSettings
from trio_nsq.client.errors import BrokerError, ConnectionLost
from trio_nsq.protocol.encode import encode_nop
from trio_nsq.protocol.frames import ErrorFrame, Event, ResponseFrame

from ...broker.failures import connection_failure
from ...framework.errors import reason_of
from ...framework.params import Source

if TYPE_CHECKING:
    from trio_nsq.client.connection.connection import Connection

    from ...broker.connection_options import ConnectOptions


RECEIVE_BYTES = 256 * 1024
FIN_FAILED = "E_FIN_FAILED"
"""The message has timed out: the broker delivers it again."""


class Link:
    """A connection to a broker.

    Args:
        connection: A connection after its handshake; the link takes its socket.

    Attributes:
        address: The broker's TCP address.
        max_rdy_count: The highest RDY count that the broker accepts.
        handle: Called with each event except heartbeats and errors; with the error `FIN_FAILED`.
        ended: The broker has closed the connection after `finish`.
    """

    def __init__(self, connection: Connection) -> None:
        self.address = connection.address
        self.max_rdy_count = connection.max_rdy_count
        self.handle: Callable[[Event], None] = lambda event: None
        self.ended = False
        self._sock, self._codecs, self._reader = connection.detach()
        self._unsent = b""
        self._is_full = False
        self._poll: select.epoll | None = None
        self._finishing = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def watch(self, poll: select.epoll) -> None:
        """Have this epoll report data, and space for unsent data."""
        self._poll = poll
        poll.register(self._sock, select.EPOLLIN)

    def send(self, data: bytes) -> None:
        """Send data; what the socket does not accept now is sent by `flush`."""
        waiting = bool(self._unsent)
        self._unsent += self._codecs.encode(data)
        if not waiting:
            self.flush()

    def flush(self) -> None:
        """Send unsent data. If the connection is lost, the data is dropped: reading tells why."""
        data = self._unsent
        try:
            self._unsent = data[self._sock.send(data) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""
        if bool(self._unsent) is not self._is_full and self._poll is not None:
            self._is_full = not self._is_full
            self._poll.modify(self._sock, select.EPOLLIN | (select.EPOLLOUT if self._is_full else 0))
        if self._finishing and not self._unsent:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def receive(self) -> None:
        """Read once, and handle all complete events.

        Raises:
            BrokerError: The broker answered with an error.
            ConnectionLost: The connection is lost.
            NSQError: The bytes are not those of a broker.
        """
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLost(self.address, reason_of(error)) from error
        reader = self._reader
        for piece in self._codecs.decode(data):
            reader.receive_data(piece)
        while (event := reader.next_event()) is not None:
            if isinstance(event, ErrorFrame) and event.code != FIN_FAILED:
                raise BrokerError(self.address, event.code, event.text)
            if isinstance(event, ResponseFrame) and event.is_heartbeat:
                if not self._unsent:  # else that is an answer, too
                    self.send(encode_nop())
            else:
                self.handle(event)
        if not data or self._codecs.ended:
            if not self._finishing:
                raise ConnectionLost(self.address, "the broker closed the connection")
            self.close()

    def finish(self) -> None:
        """End the connection after all data is sent: the broker reads it, then closes. `receive` notices that."""
        self._finishing = True
        self._unsent += self._codecs.end()
        self.flush()

    def close(self) -> None:
        self.ended = True
        self._sock.close()


class Loop:
    """Waits for the data of links, and has it handled."""

    def __init__(self, links: Iterable[Link]) -> None:
        self._poll = select.epoll()
        self._links = {link.fileno(): link for link in links}
        for link in self._links.values():
            link.watch(self._poll)

    def turn(self, timeout_s: float) -> None:
        """Wait for data at most this long, to the millisecond, and handle it. Raises as `Link.receive`."""
        for fd, events in self._poll.poll(timeout_s):
            link = self._links[fd]
            if events & select.EPOLLOUT:
                link.flush()
            if events & ~select.EPOLLOUT:
                link.receive()

    def turn_until(self, timeout_s: float) -> None:
        """Do the same, to the microsecond: epoll's own timeout has whole milliseconds."""
        select.select([self._poll], [], [], timeout_s)
        self.turn(0)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._poll.close()


async def open_links(
    addresses: Sequence[str],
    count: int,
    connecting: ConnectOptions,
    source: Source | None = None,
    *,
    buffered: bool = True,
) -> list[Link]:
    """Connect to every broker.

    Args:
        addresses: The brokers' TCP addresses.
        count: The connections to each of them.
        source: Subscribe to this channel; None: do not.
        buffered: Let the broker buffer messages before it sends them, by its defaults.

    Raises:
        Failure: A broker is unreachable or refuses.
    """
    settings = ConnectionSettings(**connecting.options())
    if not buffered:
        settings = replace(settings, output_buffer_size=OFF)
    links: list[Link] = []
    try:
        for address in addresses:
            for _ in range(count):
                connection = await connect(address, settings)
                if source is not None:
                    assert source.channel is not None
                    await connection.subscribe(source.topic, source.channel)
                links.append(Link(connection))
    except BaseException as error:
        for link in links:
            link.close()
        if isinstance(error, ConnectionFailed):
            raise connection_failure(error) from error
        raise
    return links
