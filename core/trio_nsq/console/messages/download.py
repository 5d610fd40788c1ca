"""Download a range of a broker's log as JSON lines, as the broker sends them."""

import math

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..upstream.client import Upstream, UpstreamError

MAX_MESSAGES = 100_000
MAX_BYTES = 256 * 1024 * 1024
SILENCE_S = 30.0


class RangeDownload(Response):
    """Streams messages. If the broker fails, the answer breaks off, which clients report.

    Args:
        first, end: The range of sequences; the end is excluded.
        file_name: The name that browsers give to the file.
        token: As for `Upstream.request`.
    """

    def __init__(
        self,
        upstream: Upstream,
        address: str,
        topic: str,
        first: int,
        end: int,
        *,
        file_name: str,
        token: str | None,
    ) -> None:
        super().__init__(media_type="application/x-ndjson")
        del self.headers["content-length"]
        self.headers["Content-Disposition"] = f'attachment; filename="{file_name}"'
        self.headers["X-Content-Type-Options"] = "nosniff"
        self._upstream = upstream
        self._address = address
        self._token = token
        self._params = {
            "topic": topic,
            "from": str(first),
            "until": str(end),
            "max_messages": str(MAX_MESSAGES),
            "max_bytes": str(MAX_BYTES),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Raises UpstreamError before its beginning."""
        failed: UpstreamError | None = None

        async def wait_for_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_disconnect)
            failed = await self._send_all(send)
            nursery.cancel_scope.cancel()
        if failed is not None:
            raise failed

    async def _send_all(self, send: Send) -> UpstreamError | None:
        """Send what the broker sends. Returns why there is no answer; None if it began."""
        begun = False
        try:
            with trio.CancelScope() as silence:
                silence.deadline = trio.current_time() + SILENCE_S
                async with self._upstream.stream(
                    "GET", self._address, "/topic/read", self._params, token=self._token
                ) as answer:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    async for piece in answer.aiter_raw():
                        silence.deadline = math.inf  # a slow client is none of the broker's fault
                        # Cancelled here, the library's generators would not finish; the next piece is cancelled
                        # instead. The connection limits the time of a send.
                        with trio.CancelScope(shield=True):
                            await send({"type": "http.response.body", "body": piece, "more_body": True})
                        silence.deadline = trio.current_time() + SILENCE_S
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except UpstreamError as exc:
            return None if begun else exc
        if silence.cancelled_caught and not begun:
            return UpstreamError(self._address, f"no answer within {SILENCE_S:g} s")
        return None
