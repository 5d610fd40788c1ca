"""Room for large bodies of which a part is still to come, over all clients: each is in memory until it is whole."""

import logging
from collections import deque
from typing import Protocol

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


class Bodies:
    """Lets so many bytes of bodies come at a time. A client without room waits: its socket is not read.

    One body may always come, however large it is. A client that takes too long with its body is closed as soon as
    another waits, so that those who wait get room in any case.

    Args:
        most: Bytes, as the bodies' sizes say, and not as they arrive.
    """

    def __init__(self, most: int = ROOM_BYTES) -> None:
        self._free = most
        self._coming: dict[_Client, tuple[int, float]] = {}  # bytes, and until when; oldest first
        self._waiting: deque[tuple[_Client, int, trio.Event]] = deque()

    def admit(self, client: _Client, missing: int) -> bool:
        """Whether a client may send on.

        Args:
            client: It keeps its room until this is called with 0, or `leave`.
            missing: Bytes that are still to come of its body, or may come; 0 if there are none.
        """
        if not missing:
            self.leave(client)
            return True
        if client not in self._coming:
            if self._waiting or not self._fits(missing):
                return False
            self._let_in(client, missing)
        return True

    async def wait(self, client: _Client, missing: int) -> None:
        """Wait for room, which the client then has."""
        entry = client, missing, trio.Event()
        self._waiting.append(entry)
        self._let_waiting_in()
        try:
            while not entry[2].is_set():
                overdue_s = next(iter(self._coming.values()))[1]
                with trio.move_on_at(overdue_s):
                    await entry[2].wait()
                self._close_overdue()
        finally:
            if not entry[2].is_set():
                self._waiting.remove(entry)

    def leave(self, client: _Client) -> None:
        """A client's body is whole, or the client is gone."""
        if (room := self._coming.pop(client, None)) is not None:
            self._free += room[0]
            self._let_waiting_in()

    def _fits(self, missing: int) -> bool:
        return missing <= self._free or not self._coming

    def _let_in(self, client: _Client, missing: int) -> None:
        self._free -= missing
        self._coming[client] = missing, trio.current_time() + PATIENCE_S

    def _let_waiting_in(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            client, missing, event = self._waiting.popleft()
            self._let_in(client, missing)
            event.set()

    def _close_overdue(self) -> None:
        now_s = trio.current_time()
        while self._waiting and self._coming:
            client, (_, until_s) = next(iter(self._coming.items()))
            if until_s > now_s:
                return
            logger.warning("%s: closed, others wait for the room that its body takes", client.peer)
            client.close()
            self.leave(client)
