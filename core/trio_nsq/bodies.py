"""A limit on the memory for large request bodies that are still arriving, over all clients."""

import logging
from collections import deque
from typing import NamedTuple, Protocol

import trio

from .protocol.limits import MIB

logger = logging.getLogger("trio_nsq.broker")

ROOM_BYTES = 64 * MIB
PATIENCE_S = 30.0
"""If other clients wait for room, a body that takes longer than this to arrive ends its connection."""


class _Client(Protocol):
    peer: str

    def close(self) -> None:
        """End the connection soon."""


class _Room(NamedTuple):
    """The room reserved for one body of a client."""

    size: int
    body: int
    until_s: float  # deadline by trio's clock; after it the client may be closed


class Bodies:
    """Reserves memory for bodies that are still arriving. A client without a reservation waits: its socket is not read.

    A single body is always admitted, however large it is. If other clients wait, a client whose body takes longer than
    `PATIENCE_S` is closed, so every client that waits gets room in the end. Each body needs a reservation of its own.

    Args:
        most: Maximum bytes reserved at a time. Until a body is complete, it counts with the bytes missing at its start.
    """

    def __init__(self, most: int = ROOM_BYTES) -> None:
        self._free = most
        self._reserved: dict[_Client, _Room] = {}  # oldest first
        self._waiting: deque[tuple[_Client, int, int, trio.Event]] = deque()

    def admit(self, client: _Client, missing: int, body: int = 0) -> bool:
        """Reserve room for a client's body. Returns whether the client may send on.

        Args:
            client: It keeps its room until a call with 0 or for another body, or until `leave`.
            missing: Maximum bytes of the body that have not arrived; 0 if the body is complete.
            body: Number of the client's body, to distinguish two bodies without a call with 0 between them.
        """
        room = self._reserved.get(client)
        if missing and room is not None and room.body == body:
            return True
        self.leave(client)
        if not missing:
            return True
        if self._waiting or not self._fits(missing):
            return False
        self._let_in(client, missing, body)
        return True

    async def wait(self, client: _Client, missing: int, body: int = 0) -> None:
        """Wait for room and reserve it for the client. Arguments as for `admit`."""
        entry = client, missing, body, trio.Event()
        self._waiting.append(entry)
        self._let_waiting_in()
        try:
            while not entry[3].is_set():
                with trio.move_on_at(next(iter(self._reserved.values())).until_s):
                    await entry[3].wait()
                self._close_overdue()
        finally:
            if not entry[3].is_set():
                self._waiting.remove(entry)
                self._let_waiting_in()  # a smaller body behind it may fit now

    def leave(self, client: _Client) -> None:
        """Release a client's room: its body is complete, or the client is gone."""
        if (room := self._reserved.pop(client, None)) is not None:
            self._free += room.size
            self._let_waiting_in()

    def _fits(self, missing: int) -> bool:
        return missing <= self._free or not self._reserved

    def _let_in(self, client: _Client, missing: int, body: int) -> None:
        self._free -= missing
        self._reserved[client] = _Room(missing, body, trio.current_time() + PATIENCE_S)

    def _let_waiting_in(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            client, missing, body, event = self._waiting.popleft()
            self._let_in(client, missing, body)
            event.set()

    def _close_overdue(self) -> None:
        now_s = trio.current_time()
        while self._waiting and self._reserved:
            client, room = next(iter(self._reserved.items()))
            if room.until_s > now_s:
                return
            logger.warning(
                "%s: closed: its body did not arrive within %g s, and other clients wait to send theirs",
                client.peer, PATIENCE_S,
            )  # fmt: skip
            client.close()
            self.leave(client)
