"""Read a topic's log on one broker in bounded pieces, forwards or backwards. Nothing is taken from any channel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...client.reading.batches import has_gaps
from ...log.errors import LogError
from ...log.records import RecordBatch
from ..upstream.client import Upstream, UpstreamError
from .message import decode_records

PIECE_BYTES = 1024 * 1024
"""The size of one answer, unless a single message is larger."""
PIECE_MESSAGES = 4000
_SHRINK = 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a log.

    Attributes:
        first: The oldest sequence.
        end: The sequence of the next publish.
        at: The sequence of the position that was asked for.
        mean_bytes: The mean size of a message on disk, at least 1.
    """

    first: int
    end: int
    at: int
    mean_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The records of a range of sequences; what they lack is missing in the log.

    Attributes:
        first, end: The range.
        kept_from: The oldest sequence of the log.
        size: Bytes that were read.
    """

    records: list[RecordBatch]
    first: int
    end: int
    kept_from: int
    size: int


@dataclass(frozen=True, slots=True)
class TopicLog:
    """The log of a topic on one broker.

    Attributes:
        address: The broker's HTTP address.
        token: As for `Upstream.request`.
    """

    upstream: Upstream
    address: str
    topic: str
    token: str | None = None

    async def bounds(self, at: str = "latest") -> Bounds:
        """Return the bounds, and the sequence of a position. Raises UpstreamError."""
        params = {"topic": self.topic, "at": at}
        found = await self.upstream.json("GET", self.address, "/topic/bounds", params, token=self.token)
        first, end = self._whole(found, "first_sequence"), self._whole(found, "next_sequence")
        size = self._whole(found, "bytes")
        position = min(max(first, self._whole(found, "at_sequence")), end)
        return Bounds(first, end, position, max(1, size // max(1, end - first)))

    async def read(self, first: int, end: int, max_bytes: int = PIECE_BYTES) -> Piece:
        """Read the messages from `first` on, up to `end` or as many as have `max_bytes`; at least one record.

        Raises:
            UpstreamError: The broker does not answer, or not with records.
        """
        params = {
            "topic": self.topic,
            "format": "raw",
            "from": str(first),
            "until": str(end),
            "max_bytes": str(max_bytes),
        }
        answer = await self.upstream.request("GET", self.address, "/topic/read", params, token=self.token)
        try:
            kept_from = int(answer.headers["x-nsq-first-sequence"])
            log_end = int(answer.headers["x-nsq-end-sequence"])
            records = decode_records(answer.body, first, end)
        except (KeyError, ValueError):
            raise UpstreamError(self.address, "its answer is not that of a broker with a log") from None
        except LogError as exc:
            raise UpstreamError(self.address, f"its answer is damaged: {exc}") from exc
        reached = min(records[-1].next_sequence, end) if records else end
        if log_end < end and not records:
            raise UpstreamError(
                self.address,
                f"topic {self.topic} ends before message {end}: it was deleted and created again",
            )
        if has_gaps(records, first) or (not records and first < end):
            kept_from = max(
                kept_from, (await self.bounds()).first
            )  # retention may have deleted them meanwhile
        return Piece(records, first, reached, kept_from, len(answer.body))

    def _whole(self, found: Any, name: str) -> int:
        value = found.get(name) if isinstance(found, Mapping) else None
        if type(value) is not int or not 0 <= value < 2**63:
            raise UpstreamError(self.address, "its answer is not that of a broker with a log")
        return value


class Walk:
    """Goes through a log piece by piece, in one direction.

    Attributes:
        position: Where the next piece begins; backwards: where it ends.
        bounds: Of the log, when the walk began.
        size: Bytes that were read.
    """

    def __init__(self, log: TopicLog, bounds: Bounds, position: int, *, backwards: bool) -> None:
        self.position = position
        self.bounds = bounds
        self.size = 0
        self._log = log
        self._backwards = backwards
        self._step = max(1, min(PIECE_BYTES // bounds.mean_bytes, PIECE_MESSAGES))

    @property
    def is_done(self) -> bool:
        """Whether there is no further piece."""
        if self._backwards:
            return self.position <= self.bounds.first
        return self.position >= self.bounds.end

    async def next(self, wanted: int) -> Piece:
        """Return the next piece, with at most `wanted` sequences. Not if `is_done`. Raises UpstreamError."""
        if not self._backwards:
            end = min(self.position + min(wanted, PIECE_MESSAGES), self.bounds.end)
            piece = await self._log.read(self.position, end)
            self.size += piece.size
            self.position = piece.end
            return piece
        while True:
            step = min(wanted, self._step)
            found = await self._read_whole(max(self.bounds.first, self.position - step), self.position, step)
            if found is not None:
                self.position = found.first
                if not found.records:
                    self._step = min(self._step * _SHRINK, 2**62)  # a large range is missing
                elif self._step < PIECE_MESSAGES and found.size < PIECE_BYTES // _SHRINK:
                    self._step *= 2
                return found
            self._step = max(1, step // _SHRINK)

    async def _read_whole(self, first: int, end: int, step: int) -> Piece | None:
        """Read all of a range; None if that is too much at once."""
        whole = Piece([], first, first, 0, 0)
        while whole.end < end:
            if whole.size >= PIECE_BYTES and step > 1:
                return None
            piece = await self._log.read(whole.end, end)
            self.size += piece.size
            whole = Piece(
                whole.records + piece.records,
                first,
                piece.end,
                max(whole.kept_from, piece.kept_from),
                whole.size + piece.size,
            )
        return whole
