"""Download a range of a broker's log as JSON lines, as the broker sends them."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import trio

from ...api.broker import log
from ...http import CutOff
from ..upstream.client import Upstream, UpstreamError

MAX_MESSAGES = 100_000
MAX_BYTES = 256 * 1024 * 1024
SILENCE_S = 30.0
_SILENT = f"no answer within {SILENCE_S:g} s"


async def download(
    upstream: Upstream, address: str, topic: str, first: int, end: int
) -> AsyncGenerator[bytes, None]:
    """Yield nothing once the broker answers, then the messages of a range of sequences; the end is excluded.

    Raises:
        UpstreamError: The broker does not answer.
        CutOff: It breaks off. Clients report it, as the answer is not complete.
    """
    request = log(topic, first, end, max_messages=MAX_MESSAGES, max_bytes=MAX_BYTES)
    begun = False
    try:
        async with AsyncExitStack() as stack:
            with trio.move_on_after(SILENCE_S) as silence:
                answer = await stack.enter_async_context(upstream.open(address, request))
            if silence.cancelled_caught:
                raise UpstreamError(address, _SILENT)
            begun = True
            yield b""
            while True:
                with trio.move_on_after(SILENCE_S) as silence:
                    piece = await answer.receive()
                if silence.cancelled_caught:
                    raise CutOff(_SILENT)
                if not piece:
                    return
                yield piece
    except UpstreamError as exc:
        if begun:
            raise CutOff(str(exc)) from exc
        raise
