"""A limit on the memory for large bodies of requests that arrive, and of answers that are sent, over all clients."""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Protocol, TypeVar

import trio

from ..protocol.address import host_of, network_of
from ..protocol.limits import MIB

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

ROOM_BYTES = 64 * MIB
PATIENCE_S = 30.0
"""If other clients wait for its room, a body that takes longer than this to transfer ends its connection."""
STALL_S = 2.0
"""If other clients wait, a body that moves by less than `LEAST_BYTES_PER_S` for this long ends its connection."""
LEAST_STALL_S = 0.25
"""The same, if many clients of its share wait, so that one behind many stalled ones gets room within seconds."""
LEAST_BYTES_PER_S = 64 * 1024

SMALL_PIECE_BYTES = 2 * MIB
"""A piece that takes less memory needs no room, unless clients hold `SMALL_PIECES_BYTES` of such pieces."""
SMALL_PIECES_BYTES = 64 * MIB

_MANY_WAIT_S: Final = 3.0  # about the time in which all that wait get room, if no body of their share moves
_CHECK_S: Final = 0.25
_SMALL_BYTES: Final = MIB


class Client(Protocol):
    """A connected client."""

    peer: str

    def close(self) -> None:
        """End the connection soon."""


_T = TypeVar("_T")
_Share = tuple[str, str]
"""Who shares room: clients of one address, with bodies of one kind."""


class _Room:
    """The room reserved for one body of a client.

    Attributes:
        size: The bytes reserved.
        missing: The bytes that had not moved when the client was served last; None if no client is waited for: the
            body is not computed yet, or complete.
        since_s: When the transfer began, by trio's clock.
        seen_missing, seen_s: The last check of its progress, and how far it was.
    """

    __slots__ = ("body", "missing", "seen_missing", "seen_s", "share", "since_s", "size")

    def __init__(self, share: _Share, size: int, missing: int | None, body: int) -> None:
        self.share = share
        self.size = size
        self.missing = missing
        self.body = body
        self.seen_missing = 0
        self.since_s = self.seen_s = 0.0
        self.begin()

    def begin(self) -> None:
        """Note that the transfer begins now."""
        self.since_s = trio.current_time()
        self.note(self.since_s)

    def note(self, now_s: float) -> None:
        """Note how far the transfer is."""
        self.seen_missing, self.seen_s = self.missing or 0, now_s

    def is_slow(self, now_s: float, stall_s: float) -> bool:
        """Whether the transfer takes too long for others to wait for it."""
        if self.missing is None:
            return False
        if now_s - self.since_s >= PATIENCE_S:
            return True
        passed_s = now_s - self.seen_s
        if passed_s < stall_s:
            return False
        if self.seen_missing - self.missing < LEAST_BYTES_PER_S * passed_s:
            return True
        self.note(now_s)
        return False


class _Waiter:
    """A client that waits for room. `woken`: it has room, or is to watch the others."""

    __slots__ = ("admitted", "body", "client", "missing", "share", "since_s", "woken")

    def __init__(self, share: _Share, client: Client, missing: int | None, body: int) -> None:
        self.share = share
        self.client = client
        self.missing = missing
        self.body = body
        self.since_s = trio.current_time()
        self.admitted = False
        self.woken = trio.Event()


class BodyMemoryLimit:
    """Reserves memory for bodies that are being transferred. A client without a reservation waits: it is not read.

    Each address has a share for bodies up to 1 MiB, and one for larger ones. A share may hold as much as is then still
    free, so others find room. A single body of a share is admitted if it fits, and the only body of all in any case.
    Free room goes to the share that holds least, and within a share to the client that waits longest.

    While clients wait, the bodies of their shares, and of shares that hold more, must move: a body that takes longer
    than `PATIENCE_S`, or stalls for `STALL_S`, ends its connection. So every client gets room in the end, and to keep
    it from others costs bandwidth. Each body needs a reservation of its own.

    Args:
        most: Maximum bytes reserved at a time. Until a body is complete, it counts with the bytes missing at its start.
        late: What the log says of a client that is closed.
    """

    def __init__(self, most: int = ROOM_BYTES, *, late: str = "its body arrives too slowly") -> None:
        self._late = late
        self._free = most
        self._reserved: dict[Client, _Room] = {}
        self._held: dict[_Share, int] = {}  # bytes reserved; no share without a reservation
        self._counts: dict[_Share, int] = {}  # of reservations
        self._waiting: dict[_Share, deque[_Waiter]] = {}  # oldest first; no empty ones
        self._watcher: _Waiter | None = None
        self._small_bytes = 0

    def needs_room(self, size: int) -> bool:
        """Whether room must be reserved for a piece."""
        return size > SMALL_PIECE_BYTES or self._small_bytes + size > SMALL_PIECES_BYTES

    def take_small(self, size: int) -> None:
        """Count a piece for which no room is reserved, until `leave_small`."""
        self._small_bytes += size

    def leave_small(self, size: int) -> None:
        """Stop counting a piece: it is sent, or its client is gone."""
        self._small_bytes -= size

    def admit(self, client: Client, missing: int, body: int = 0) -> bool:
        """Reserve room for a client's body, or note its progress. Returns whether the client may go on.

        Args:
            client: It keeps its room until a call with 0 or for another body, or until `leave`.
            missing: Maximum bytes of the body that have not been transferred; 0 if the body is complete.
            body: Number of the client's body, to distinguish two bodies without a call with 0 between them.
        """
        room = self._reserved.get(client)
        if missing and room is not None and room.body == body:
            room.missing = missing
            return True
        self.leave(client)
        if not missing:
            return True
        share = _share_of(client, missing)
        if self._waiting or not self._fits(share, missing):
            return False
        self._let_in(share, client, missing, body)
        return True

    async def wait(self, client: Client, missing: int | None, body: int = 0, *, kind: str = "") -> None:
        """Wait for room and reserve it for the client. Arguments as for `admit`.

        Args:
            missing: None if the size is not known yet: all free room is reserved, until `resize`.
            kind: Bodies of one kind have a share of their own; by default the kind is small or large.
        """
        waiter = _Waiter(_share_of(client, missing, kind), client, missing, body)
        if not self._waiting:
            self._note_all()
        self._waiting.setdefault(waiter.share, deque()).append(waiter)
        self._let_waiting_in()
        try:
            while not waiter.admitted:
                if self._watcher is None:
                    await self._watch(waiter)
                else:
                    await waiter.woken.wait()
        finally:
            if not waiter.admitted:
                self._remove(waiter)
                self._let_waiting_in()  # a smaller body behind it may fit now

    def hold(self, client: Client) -> None:
        """Note that a client's body is still to be computed: until `resize`, the client is not slow."""
        self._reserved[client].missing = None

    def resize(self, client: Client, size: int) -> None:
        """Set the size of a body that is computed now. Its transfer begins."""
        room = self._reserved[client]
        self._free += room.size - size
        self._held[room.share] += size - room.size
        room.size = room.missing = size
        room.begin()
        self._let_waiting_in()

    def note_progress(self, client: Client, moved: int) -> None:
        """Note that bytes of a client's body have moved."""
        room = self._reserved.get(client)
        if room is not None and room.missing is not None:
            room.missing -= moved

    def leave(self, client: Client) -> None:
        """Release a client's room: its body is complete, or the client is gone."""
        if (room := self._reserved.pop(client, None)) is None:
            return
        self._free += room.size
        self._held[room.share] -= room.size
        self._counts[room.share] -= 1
        if not self._counts[room.share]:
            del self._counts[room.share], self._held[room.share]
        self._let_waiting_in()

    # ------------------------------------------------------------------ room

    def _fits(self, share: _Share, missing: int | None) -> bool:
        if not self._reserved:
            return True
        least = 1 if missing is None else missing
        if least > self._free:
            return False
        return share not in self._held or self._held[share] + least <= self._free - least

    def _let_in(self, share: _Share, client: Client, missing: int | None, body: int) -> None:
        room = _Room(share, self._free if missing is None else missing, missing, body)
        self._free -= room.size
        self._held[share] = self._held.get(share, 0) + room.size
        self._counts[share] = self._counts.get(share, 0) + 1
        self._reserved[client] = room

    def _let_waiting_in(self) -> None:
        while self._waiting and (waiter := self._next()) is not None:
            self._remove(waiter)
            self._let_in(waiter.share, waiter.client, waiter.missing, waiter.body)
            waiter.admitted = True
            waiter.woken.set()

    def _next(self) -> _Waiter | None:
        """Return the client that gets room next; None if there is no room for one."""
        first = [waiters[0] for waiters in self._waiting.values()]
        first.sort(key=lambda waiter: (self._held.get(waiter.share, 0), waiter.since_s))
        for waiter in first:
            if self._fits(waiter.share, waiter.missing):
                return waiter
            if waiter.share not in self._held and trio.current_time() - waiter.since_s > STALL_S:
                return None  # others must not take the room that this one needs, again and again
        return None

    def _remove(self, waiter: _Waiter) -> None:
        waiters = self._waiting[waiter.share]
        waiters.remove(waiter)
        if not waiters:
            del self._waiting[waiter.share]

    # ------------------------------------------------------------------ slow ones

    async def _watch(self, waiter: _Waiter) -> None:
        """Close slow clients until the client that watches has room. One watches for all."""
        self._watcher = waiter
        try:
            while not waiter.admitted:
                due_s = trio.current_time() + _CHECK_S
                with trio.move_on_at(due_s):
                    await waiter.woken.wait()
                if not waiter.admitted:
                    self._close_slow(trio.current_time() - due_s)
        finally:
            self._watcher = None
            for waiters in self._waiting.values():
                waiters[0].woken.set()
                waiters[0].woken = trio.Event()
                break

    def _note_all(self) -> None:
        now_s = trio.current_time()
        for room in self._reserved.values():
            room.note(now_s)

    def _close_slow(self, late_s: float) -> None:
        """Close the slow clients. `late_s`: for so long the event loop was busy, and served no client."""
        now_s = trio.current_time()
        stall_s = dict(self._stalls_s())
        least = min(self._held.get(share, 0) for share in self._waiting)
        slow = []
        for client, room in self._reserved.items():
            room.seen_s += late_s if late_s > _CHECK_S else 0.0
            matters = room.share in stall_s or self._held[room.share] > least
            if matters and room.is_slow(now_s, stall_s.get(room.share, STALL_S)):
                slow.append(client)
        for client in slow:
            if not self._waiting:
                return
            logger.warning(
                "%s: closed: %s, and other clients wait for the memory", client.peer, self._late
            )  # fmt: skip
            client.close()
            self.leave(client)

    def _stalls_s(self) -> Iterator[tuple[_Share, float]]:
        """Return how long a body may stall, for each share in which clients wait."""
        for share, waiters in self._waiting.items():
            count = self._counts.get(share, 0)
            limit_s = _MANY_WAIT_S * count / (count + len(waiters))
            yield share, max(LEAST_STALL_S, min(STALL_S, limit_s))


def _share_of(client: Client, missing: int | None, kind: str = "") -> _Share:
    return network_of(host_of(client.peer)), kind or (
        "small" if missing and missing <= _SMALL_BYTES else "large"
    )


class PieceRoom:
    """The memory for the pieces of one generated answer, one at a time. Its generator reads them with it.

    Attributes:
        size: The bytes reserved; 0 for a small piece.
    """

    def __init__(self, held: BodyMemoryLimit, client: Client, kind: str) -> None:
        self.size: int = 0
        self._expected = 0
        self._small = 0  # as counted by `take_small`
        self._held = held
        self._client = client
        self._kind = kind

    async def read(
        self, read: Callable[[], Awaitable[Sequence[_T]]], held: Callable[[_T], int]
    ) -> Sequence[_T]:
        """Read the next items, after the last ones were sent, with room for as much as those took.

        If they take more, release them, wait for room, and read them again: no client holds large items without room.

        Args:
            held: Returns the memory that an item takes until the client has it.
        """
        while True:
            self.leave()
            if self._held.needs_room(self._expected):
                await self._held.wait(self._client, self._expected, kind=self._kind)
                self._held.hold(self._client)
                self.size = self._expected
            found = await read()
            self._expected = sum(map(held, found))
            if self._expected <= self.size:
                return found
            if not self._held.needs_room(self._expected):
                self._small = self._expected
                self._held.take_small(self._small)
                return found
            del found

    def begin(self) -> None:
        """Note that the piece is computed, and its client must read it."""
        if self.size:
            self._held.resize(self._client, self.size)

    def note_sent(self, count: int) -> None:
        """Note that the client has accepted bytes of the piece."""
        self._held.note_progress(self._client, count)

    def leave(self) -> None:
        """Release the memory: the piece is sent, or the client is gone."""
        self._held.leave_small(self._small)
        self._small = 0
        if self.size:
            self.size = 0
            self._held.leave(self._client)
