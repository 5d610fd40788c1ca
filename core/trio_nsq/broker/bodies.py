"""Room for large bodies of which a part is still to come, over all clients: each is in memory until it is whole."""

import logging
from collections import deque
from typing import NamedTuple, Protocol

import trio

from ..protocol.limits import MIB

logger = logging.getLogger("trio_nsq.broker")

ROOM_BYTES = 64 * MIB
PATIENCE_S = 30.0
"""So long a body may take to arrive while other clients wait for room."""


class _Client(Protocol):
    peer: str

    def close(self) -> None:
        """End the connection soon."""


class _Room(NamedTuple):
    """What one body of a client takes."""

    size: int
    body: int
    until_s: float  # by trio's clock; then the client may be closed


class Bodies:
    """Lets so many bytes of bodies come at a time. A client without room waits: its socket is not read.

    One body may always come, however large it is. A client that takes too long with its body is closed as soon as
    another waits, so that those who wait get room in any case. Its next body needs room of its own.

    Args:
        most: Bytes, as the bodies' sizes say, and not as they arrive.
    """

    def __init__(self, most: int = ROOM_BYTES) -> None:
        self._free = most
        self._coming: dict[_Client, _Room] = {}  # oldest first
        self._waiting: deque[tuple[_Client, int, int, trio.Event]] = deque()

    def admit(self, client: _Client, missing: int, body: int = 0) -> bool:
        """Whether a client may send on.

        Args:
            client: It keeps its room until this is called with 0 or for another body, or `leave`.
            missing: Bytes that are still to come of its body, or may come; 0 if there are none.
            body: Which of the client's bodies, if the next can begin before this is called with 0.
        """
        room = self._coming.get(client)
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
        """Wait for room, which the client then has. Arguments as for `admit`."""
        entry = client, missing, body, trio.Event()
        self._waiting.append(entry)
        self._let_waiting_in()
        try:
            while not entry[3].is_set():
                with trio.move_on_at(next(iter(self._coming.values())).until_s):
                    await entry[3].wait()
                self._close_overdue()
        finally:
            if not entry[3].is_set():
                self._waiting.remove(entry)
                self._let_waiting_in()  # those behind it may be smaller

    def leave(self, client: _Client) -> None:
        """A client's body is whole, or the client is gone."""
        if (room := self._coming.pop(client, None)) is not None:
            self._free += room.size
            self._let_waiting_in()

    def _fits(self, missing: int) -> bool:
        return missing <= self._free or not self._coming

    def _let_in(self, client: _Client, missing: int, body: int) -> None:
        self._free -= missing
        self._coming[client] = _Room(missing, body, trio.current_time() + PATIENCE_S)

    def _let_waiting_in(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            client, missing, body, event = self._waiting.popleft()
            self._let_in(client, missing, body)
            event.set()

    def _close_overdue(self) -> None:
        now_s = trio.current_time()
        while self._waiting and self._coming:
            client, room = next(iter(self._coming.items()))
            if room.until_s > now_s:
                return
            logger.warning("%s: closed, others wait for the room that its body takes", client.peer)
            client.close()
            self.leave(client)
