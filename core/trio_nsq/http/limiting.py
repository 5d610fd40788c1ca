"""Limits what large answers cost: the time until others are served, and the memory for clients that do not read."""

from collections.abc import AsyncGenerator, Awaitable, Callable

import trio

from ..server.body_memory import ROOM_BYTES, BodyMemoryLimit, Client
from .messages import Response


class AnswerLimiter:
    """Lets the routes that share it compute one answer at a time, and hold a limited number of bytes of answers.

    Other requests wait; those of an address that holds little go first. Meanwhile the event loop is free for other
    clients, also between two answers, and between two pieces of a generated one. An answer is held until its client has
    accepted it. If there are too many bytes, no further answer is computed, and clients that are slow to read are
    disconnected; see `BodyMemoryLimit`. Each address has a share for each path.

    Args:
        most: Maximum bytes held at a time. A single answer may be larger.
    """

    def __init__(self, most: int = ROOM_BYTES) -> None:
        self._turn = trio.Lock()  # held for each computation; never while waiting for a client
        self._held = BodyMemoryLimit(most, late="it reads its answer too slowly")

    async def answer(self, client: Client, path: str, compute: Callable[[], Awaitable[Response]]) -> Response:
        """Compute an answer, and reserve its memory until `leave`."""
        await self._held.wait(client, None, kind=path)
        try:
            async with self._turn:
                response = await compute()
        except BaseException:
            self._held.leave(client)
            raise
        size = len(response.body) if isinstance(response.body, bytes) else response.held_bytes
        self._held.resize(client, size)
        return response

    async def next_piece(self, body: AsyncGenerator[bytes, None]) -> bytes | None:
        """Compute the next piece of a generated answer; None at its end."""
        async with self._turn:
            return await anext(body, None)

    def note_sent(self, client: Client, count: int) -> None:
        """Note that a client has accepted bytes of its answer."""
        self._held.note_progress(client, count)

    def leave(self, client: Client) -> None:
        """Release the memory of a client's answer: it is sent, or the client is gone."""
        self._held.leave(client)
