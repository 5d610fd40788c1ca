"""Reads JSON lines from a broker: bounded, whatever it sends."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import trio

from ...protocol.limits import MIB
from .client import Upstream, UpstreamError, decode_answer

MAX_BYTES = 16 * MIB


@dataclass(slots=True)
class Lines:
    """The first JSON objects of an answer.

    Attributes:
        address: The broker, for errors.
        at_most, max_bytes: The limits. The first object may have any size up to the second.
        is_cut: Whether more lines follow, which were not read.
    """

    address: str
    at_most: int
    max_bytes: int
    objects: list[dict[str, Any]] = field(default_factory=list)
    is_cut: bool = False
    _size: int = 0
    _rest: bytearray = field(default_factory=bytearray)

    def add(self, piece: bytes) -> bool:
        """Take a piece of the answer; return whether to read on. Raises UpstreamError."""
        self._size += len(piece)
        self._rest += piece
        if b"\n" in piece:
            *whole, last = bytes(self._rest).split(b"\n")
            self._rest = bytearray(last)
            for line in filter(None, whole):
                self._add_line(line)
        self.is_cut |= self._size > self.max_bytes and (
            bool(self.objects) or len(self._rest) > self.max_bytes
        )
        return not self.is_cut

    def end(self) -> None:
        """Take the last line, if the answer did not end with a line feed. Raises UpstreamError."""
        if self._rest and not self.is_cut:
            self._add_line(bytes(self._rest))

    def _add_line(self, line: bytes) -> None:
        if len(self.objects) == self.at_most:
            self.is_cut = True
            return
        try:
            found = decode_answer(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise UpstreamError(self.address, "its answer is not JSON lines")
        self.objects.append(found)


async def read_lines(
    upstream: Upstream,
    address: str,
    path: str,
    params: Mapping[str, str],
    token: str | None,
    *,
    at_most: int,
    max_bytes: int = MAX_BYTES,
) -> Lines:
    """Return the JSON objects of an answer, one on each line.

    Args:
        at_most: Read no more lines.
        max_bytes: Stop reading at about this size.

    Raises:
        UpstreamError: There is no answer in time, it is a refusal, or not JSON lines.
    """
    limit_s = upstream.request_timeout_s
    lines = Lines(address, at_most, max_bytes)
    try:
        with trio.fail_after(limit_s):
            async with upstream.stream("GET", address, path, params, token=token) as response:
                await _receive(response, lines)
    except trio.TooSlowError:
        raise UpstreamError(address, f"no complete answer within {limit_s:g} s") from None
    return lines


async def _receive(response: httpx.Response, lines: Lines) -> None:
    """Read an answer until its end, or until the lines are enough. Raises UpstreamError."""
    invalid: UpstreamError | None = None
    # The cancellation ends the loop, so that the nested generators finish. The library would not close them after a
    # `break` or an exception.
    with trio.CancelScope() as reading:
        async for piece in response.aiter_raw():
            try:
                if not lines.is_cut and not lines.add(piece):
                    reading.cancel()
            except UpstreamError as exc:
                invalid = exc
                reading.cancel()
    if invalid is not None:
        raise invalid
    lines.end()
