"""Read a topic's log on one broker in bounded pieces, forwards or backwards. Nothing is taken from any channel."""

from dataclasses import dataclass

from ...api import broker as api
from ...client.reading.broker_log import Bounds
from ...client.reading.log_stream import LogStream, has_gaps
from ...log.errors import LogError
from ...log.gaps import Span
from ...log.records import RecordBatch
from ..upstream.client import Upstream, UpstreamError

PIECE_BYTES = 1024 * 1024
"""The size of one answer, unless a single message is larger."""
PIECE_MESSAGES = 4000
_SHRINK = 4


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
    """

    upstream: Upstream
    address: str
    topic: str

    async def bounds(self, at: str = "latest") -> Bounds:
        """Return the bounds, and the sequence of a position. Raises UpstreamError."""
        request = api.position(self.topic, at)
        found = Bounds.of(await self.upstream.ask(self.address, request))
        return found._replace(at=min(max(found.first, found.at), found.end))

    async def read(self, first: int, end: int, max_bytes: int = PIECE_BYTES) -> Piece:
        """Read the messages from `first` on, up to `end` or as many as have `max_bytes`; at least one record.

        Raises:
            UpstreamError: The broker does not answer, or not with records.
        """
        request = api.log(self.topic, first, end, "raw", max_bytes=max_bytes)
        answer = await self.upstream.fetch(self.address, request)
        try:
            stream = LogStream(self.topic, answer.headers.get, Span(first, end))
            records = stream.receive_records(answer.body)
            stream.finish()
        except ValueError:
            raise UpstreamError(self.address, "its answer is not that of a broker with a log") from None
        except LogError as exc:
            raise UpstreamError(self.address, f"its answer is damaged: {exc}") from exc
        reached = min(records[-1].next_sequence, end) if records else end
        if not records and stream.ends is not None and stream.ends < end:
            raise UpstreamError(
                self.address,
                f"topic {self.topic} ends before message {end}: it was deleted and created again",
            )
        if has_gaps(records, first) or (not records and first < end):
            await self.upstream.perform(self.address, stream.update_kept_from())
        return Piece(records, first, reached, stream.kept_from, len(answer.body))


class Walk:
    """Goes through a log piece by piece, in one direction.

    Attributes:
        position: Where the next piece begins; backwards: where it ends.
        bounds: Of the log, when the walk began.
        size: Bytes that were read.
    """

    def __init__(self, log: TopicLog, bounds: Bounds, position: int, *, backwards: bool) -> None:
        self.position: int = position
        self.bounds = bounds
        self.size: int = 0
        self._log = log
        self._backwards = backwards
        self._step = max(1, min(PIECE_BYTES // max(1, int(bounds.mean_bytes)), PIECE_MESSAGES))

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
