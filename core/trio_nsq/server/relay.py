"""Passes the bytes of a client's connection on to the server that serves it, and back."""

import math
from typing import Final

import trio

PIECE_BYTES: Final = 64 * 1024
STALL_S: Final = 300.0
"""A client that takes no piece for this long is closed: it would be kept after the server has closed it. Servers close
a client that does not read earlier, after a heartbeat or 120 s."""
LINGER_S: Final = 5.0
"""After the server has ended the connection, the client may take this long to end it, too."""


async def relay(client: trio.abc.Stream, server: trio.abc.Stream) -> None:
    """Pass bytes between two streams until the connection ends, and close both. The end of one side is passed on.

    At most a piece of each direction is held, so a peer that does not read stops its sender, and nobody else.
    """
    async with client, server, trio.open_nursery() as nursery:
        nursery.start_soon(_pass_on, client, server, nursery.cancel_scope, math.inf)
        if await _pass_on(server, client, nursery.cancel_scope, STALL_S):
            nursery.cancel_scope.deadline = trio.current_time() + LINGER_S


async def _pass_on(
    source: trio.abc.Stream, target: trio.abc.Stream, both: trio.CancelScope, patience_s: float
) -> bool:
    """Pass on one direction until its end. Returns False if the connection is lost, and then ends both directions."""
    try:
        while piece := await source.receive_some(PIECE_BYTES):
            with trio.fail_after(patience_s):
                await target.send_all(piece)
        if isinstance(target, trio.abc.HalfCloseableStream):
            await target.send_eof()
    except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
        both.cancel()
        return False
    return True
