"""The result of one piece of a replay, which its task writes to a file, and the result of a whole job.

The field names of `PieceResult` are the keys of that file; those of `ReplayResult` are printed by qcli.
"""

import json
from dataclasses import asdict, dataclass, field, replace

from ..storage import Storage

MAX_EXAMPLES = 5


@dataclass(slots=True)
class PieceResult:
    """The result of a piece so far. Counts are messages, of all attempts unless said otherwise.

    Attributes:
        piece: The number of the piece.
        published: Published by this attempt.
        published_bytes: Bytes of their bodies.
        repeated: Published by an earlier attempt, and not again.
        repeated_bytes: Bytes of their bodies.
        maybe_twice: Those of `published` that were sent again because the first response was lost.
        unmatched: Left out by the regular expression.
        without_body: Rows whose body is null or empty; NSQ has no empty messages.
        too_long: Longer than allowed, and not published.
        examples: Where the first of these are.
        batches: The number of the next batch.
        remembered: Whether the broker recognises batches that are sent again; None: unknown.
        complete: Whether the whole piece is done.
    """

    piece: int
    published: int = 0
    published_bytes: int = 0
    repeated: int = 0
    repeated_bytes: int = 0
    maybe_twice: int = 0
    unmatched: int = 0
    without_body: int = 0
    too_long: int = 0
    examples: list[str] = field(default_factory=list)
    batches: int = 0
    remembered: bool | None = None
    complete: bool = False

    def save(self, storage: Storage) -> None:
        """Write its file. Raises OSError."""
        storage.write(_path(self.piece), json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, storage: Storage, piece: int) -> "PieceResult | None":
        """Read the file of a piece; None: there is none, or it is damaged, and the piece starts again."""
        data = storage.read(_path(piece))
        if data is None:
            return None
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None

    def as_repeated(self) -> "PieceResult":
        """The result of an earlier run as this run counts it: everything was published before."""
        return replace(
            self,
            published=0,
            published_bytes=0,
            repeated=self.published + self.repeated,
            repeated_bytes=self.published_bytes + self.repeated_bytes,
        )


def _path(piece: int) -> str:
    return f"done/{piece:06d}.json"


@dataclass(slots=True)
class ReplayResult:
    """The result of a job so far. Counts are messages unless said otherwise.

    Attributes:
        published, published_bytes: Published by this run.
        before, before_bytes: Published by an earlier run or attempt, and not again.
        maybe_twice, unmatched, without_body, too_long, examples: See `PieceResult`.
        left_out: Rows outside of the time range, or not selected by `--where`.
        rows: Rows of all files.
        files, pieces: How many there are.
        pieces_done: How many pieces are complete.
        remembered: See `PieceResult`.
    """

    published: int = 0
    published_bytes: int = 0
    before: int = 0
    before_bytes: int = 0
    maybe_twice: int = 0
    unmatched: int = 0
    without_body: int = 0
    too_long: int = 0
    examples: list[str] = field(default_factory=list)
    left_out: int = 0
    rows: int = 0
    files: int = 0
    pieces: int = 0
    pieces_done: int = 0
    remembered: bool | None = None

    def add(self, piece: PieceResult) -> None:
        """Add a piece."""
        self.published += piece.published
        self.published_bytes += piece.published_bytes
        self.before += piece.repeated
        self.before_bytes += piece.repeated_bytes
        self.maybe_twice += piece.maybe_twice
        self.unmatched += piece.unmatched
        self.without_body += piece.without_body
        self.too_long += piece.too_long
        self.examples = (self.examples + piece.examples)[:MAX_EXAMPLES]
        self.pieces_done += piece.complete
        if piece.remembered is not None:
            self.remembered = piece.remembered and self.remembered is not False

    def count_left_out(self) -> None:
        """Set `left_out`, once all pieces are done."""
        replayed = self.published + self.before + self.unmatched + self.without_body + self.too_long
        self.left_out = self.rows - replayed
