"""Bodies of requests: limited before anything parses them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from starlette.types import Receive

from ...protocol.limits import MIB
from .incoming import Refused

MAX_BODY_BYTES = 8 * MIB
"""A message of 2 MiB, percent-encoded."""
SMALL_BODY_BYTES = 64 * 1024
MAX_LARGE_BODIES = 8
ARRIVAL_S = 60.0


class Bodies:
    """Reads bodies. Only so many large ones are in memory at the same time."""

    def __init__(self) -> None:
        self._large = trio.CapacityLimiter(MAX_LARGE_BODIES)

    @asynccontextmanager
    async def read(
        self, receive: Receive, announced: str, limit: int = MAX_BODY_BYTES
    ) -> AsyncIterator[bytes]:
        """Read a body, for as long as the block runs.

        Args:
            announced: The Content-Length header; empty without one.
            limit: The largest size.

        Raises:
            Refused: It is too large or too slow, or the client has disconnected.
        """
        if announced.isdecimal() and int(announced[:20]) > limit:
            raise _too_large(limit)
        body, me, is_large = bytearray(), object(), False
        try:
            with trio.move_on_after(ARRIVAL_S) as waiting:
                more = True
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise Refused(400, "INVALID_REQUEST", "The client has disconnected.")
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise _too_large(limit)
                    if len(body) > SMALL_BODY_BYTES and not is_large:
                        await self._large.acquire_on_behalf_of(me)
                        is_large = True
                    more = message.get("more_body", False)
            if waiting.cancelled_caught:
                raise Refused(408, "REQUEST_TIMEOUT", "The body of the request has not arrived in time.")
            yield bytes(body)
        finally:
            if is_large:
                self._large.release_on_behalf_of(me)


def _too_large(limit: int) -> Refused:
    return Refused(413, "BODY_TOO_BIG", f"The body of this request has at most {limit // 1024} KiB.")
