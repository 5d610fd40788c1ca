"""The write side of a connection: what is to be sent, sent at once while the socket takes it.

Sending needs no task switch: whoever has frames for a client hands them over and flushes, in its own turn. Only
when the socket is full does the connection's own task wait for it; until it is empty again the client is given
no more messages.
"""

import logging
import math
import socket
from collections import deque

import trio

from ...protocol import NSQError
from ...protocol.compression import Codec

logger = logging.getLogger("trio_nsq.broker")

_MAX_PARTS = 256
_CONGESTED_BYTES = 4 * 1024 * 1024


class SendBuffer:
    """Bytes for one non-blocking socket.

    Attributes:
        patience_s: How long the socket may take nothing at all before the connection is given up; math.inf is
            for ever.
        full: The socket took less than there is; set until `drain` has sent the rest.
        broken: The connection is lost; what is put here goes nowhere.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.patience_s = math.inf
        self.full = False
        self.broken = False
        self._sock = sock
        self._codecs: list[Codec] = []  # what is put goes through the first of them first
        self._wire: deque[bytes | memoryview] = deque()
        # What is still to be encoded, when there is a codec; until then it is what goes over the wire.
        self._plain: deque[bytes | memoryview] = self._wire
        self._late_bytes = 0
        self._became_full = trio.Event()
        self._emptied = trio.Event()

    def put(self, data: bytes | memoryview) -> None:
        """Add data to be sent by the next flush."""
        self._plain.append(data)
        if self.full:
            self._late_bytes += len(data)

    def put_encoded(self, data: bytes) -> None:
        """Add data that no codec is to see, such as what TLS says by itself; it goes before what is not encoded yet."""
        if data:
            self._wire.append(data)
            if self.full:
                self._late_bytes += len(data)

    def add_codec(self, codec: Codec) -> None:
        """Encode all that is put from now on, before the codecs that there are already see it."""
        self.encode()
        self._codecs.insert(0, codec)
        self._plain = deque()

    @property
    def congested(self) -> bool:
        """A lot has come since the socket is full: time to stop doing what makes more of it."""
        return self._late_bytes > _CONGESTED_BYTES

    def flush(self) -> None:
        """Send what there is, as much as the socket takes without waiting."""
        if (self._plain or self._wire) and not self.full:
            self._send()
            if self._plain or self._wire:
                self.full = True
                self._emptied = trio.Event()
                self._became_full.set()

    def encode(self) -> None:
        """Let the codecs see now, not at the next flush, what was put."""
        if not self._codecs or not self._plain:
            return
        data = b"".join(self._plain)
        self._plain.clear()
        try:
            for codec in self._codecs:
                data = codec.encode(data)
        except NSQError as exc:
            logger.info("nothing more can be sent: %s", exc)
            self.abandon()
        else:
            self._wire.append(data)

    def _send(self) -> None:
        if self._codecs:
            self.encode()
        parts = self._wire
        while parts:
            try:
                if len(parts) == 1:
                    sent = self._sock.send(parts[0])
                else:
                    sent = self._sock.sendmsg([parts[i] for i in range(min(len(parts), _MAX_PARTS))])
            except BlockingIOError:
                return
            except OSError:
                self.abandon()
                return
            if len(parts) == 1 and sent == len(parts[0]):
                parts.clear()
                return
            while parts and sent >= len(parts[0]):
                sent -= len(parts.popleft())
            if sent:
                parts[0] = memoryview(parts[0])[sent:]

    async def drain(self) -> bool:
        """Wait until the socket is full, then until it has taken everything.

        Returns:
            False if the connection is lost, or the socket took nothing for `patience_s`.
        """
        await self._became_full.wait()
        while self._plain or self._wire:
            with trio.move_on_after(self.patience_s) as scope:
                try:
                    await trio.lowlevel.wait_writable(self._sock)
                except (OSError, trio.ClosedResourceError):
                    self.abandon()
            if scope.cancelled_caught or self.broken:
                return False
            self._send()
        if self.broken:
            return False
        self.full = False
        self._late_bytes = 0
        self._became_full = trio.Event()
        self._emptied.set()
        return True

    async def emptied(self) -> None:
        """Wait, while `drain` runs in another task, until nothing is left to be sent or the connection is lost."""
        if self.full:
            await self._emptied.wait()

    def abandon(self) -> None:
        """Give up the connection: drop what there is, and whatever comes."""
        self.broken = self.full = True
        self._plain.clear()
        self._wire.clear()
        self._became_full.set()
        self._emptied.set()
