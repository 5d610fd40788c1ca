"""Reads JSON lines from a broker: bounded, whatever it sends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from ...api.request import Decoder, Request
from ...protocol.limits import MIB
from ...protocol.untrusted_json import decode_json
from .client import Upstream, UpstreamError

MAX_BYTES = 16 * MIB


@dataclass(slots=True)
class Lines:
    """The first JSON objects of an answer.

    Attributes:
        address: The broker, for errors.
        read: Checks a line.
        at_most, max_bytes: The limits. The first object may have any size up to the second.
        is_cut: Whether more lines follow, which were not read.
    """

    address: str
    read: Callable[[bytes, Decoder], list[dict[str, Any]]]
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
            self.objects += self.read(line, decode_json)
        except ValueError as exc:
            raise UpstreamError(self.address, f"its answer is not valid: {exc}") from exc


async def read_lines(
    upstream: Upstream,
    address: str,
    request: Request[list[dict[str, Any]]],
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
    lines = Lines(address, request.read, at_most, max_bytes)
    try:
        with trio.fail_after(limit_s):
            async with upstream.open(address, request) as answer:
                while (piece := await answer.receive()) and lines.add(piece):
                    pass
                lines.end()
    except trio.TooSlowError:
        raise UpstreamError(address, f"no complete answer within {limit_s:g} s") from None
    return lines
