"""The request of a replay, the results of its pieces, and the result of the whole job.

The field names of `PieceResult` are the keys of the file that its task writes; qcli prints those of `ReplayResult`.
This module does not import pyarrow, so that qcli can check options without it.
"""

import json
import re
from dataclasses import asdict, dataclass, field, fields, replace

from ...storage import Storage
from ..tables.target import TableKind, TableVersion

JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
"""The name of a producer is this with a suffix, and has at most 64 characters."""
DEFAULT_MAX_MSG_BYTES = 1024 * 1024
MAX_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Files to replay, and the options. A job that is continued must have the same request.

    Attributes:
        source: A folder or a file: an absolute path, or a URI; or an Iceberg table, `CATALOG/NAMESPACE.TABLE`.
        address: The HTTP address of the broker.
        from_topics: The topics of qcli's exports to replay; empty: the only one.
        body_column, time_column: See `open_files`.
        since, until: The time range as the user gave it; the next run compares it.
        first_ns, end_ns: The time range in Unix nanoseconds, resolved when the job was started.
        where: A condition in SQL: DuckDB's, or Spark's if Spark evaluates it.
        match: A regular expression.
        ordered: Replay in the order of time.
        rate: The maximum messages per second.
        speed: Keep the original pace, multiplied by this factor; requires `ordered`.
        max_msg_bytes: Longer messages are not published.
        table: The kind of the table that `source` is, see `TableKind`; None: it is not a table.
        table_version, as_of_ns: The version of the table, see `TableVersion`, determined when the job is planned.
        as_of: The time of the version as the user gave it; the next run compares it.
    """

    source: str
    topic: str
    address: str
    from_topics: tuple[str, ...] = ()
    body_column: str | None = None
    time_column: str | None = None
    since: str | None = None
    until: str | None = None
    first_ns: int | None = None
    end_ns: int | None = None
    where: str | None = None
    match: str | None = None
    ordered: bool = False
    rate: float | None = None
    speed: float | None = None
    max_msg_bytes: int = DEFAULT_MAX_MSG_BYTES
    table: str | None = None
    table_version: int | None = None
    as_of: str | None = None
    as_of_ns: int | None = None

    @property
    def version(self) -> TableVersion | None:
        """The version of the table to replay; None: the source is not a table."""
        if self.table is None:
            return None
        return TableVersion(TableKind(self.table), self.table_version, self.as_of_ns)

    def differs_from(self, other: "ReplayRequest") -> list[str]:
        """Return the names of the attributes that differ, except those resolved from others."""
        mine, theirs = asdict(self), asdict(other)
        resolved = ("first_ns", "end_ns", "as_of_ns")
        return [name for name in mine if name not in resolved and mine[name] != theirs[name]]


@dataclass(slots=True)
class ReplayCounts:
    """Numbers of messages.

    Attributes:
        published, published_bytes: Published by this run, and the size of their bodies.
        before, before_bytes: Published by an earlier run or attempt, and not published again.
        maybe_twice: Those of `published` that were sent again because the first response was lost.
        unmatched: Not matched by the regular expression.
        without_body: Rows whose body is null or empty; NSQ has no empty messages.
        too_long: Longer than the limit, and not published.
        examples: The locations of the first of these.
        remembered: Whether the broker deduplicates; None: unknown.
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
    remembered: bool | None = None


@dataclass(slots=True)
class PieceResult(ReplayCounts):
    """The result of a piece so far.

    Attributes:
        batches: The number of the next batch.
    """

    piece: int = 0
    batches: int = 0
    complete: bool = False

    def save(self, storage: Storage) -> None:
        """Write the file of the piece, unless an earlier or concurrent attempt is ahead.

        A repeated attempt begins with the first batch again, and its end may be as sudden: a broker that does not
        deduplicate would get the batches between once more.
        """
        there = self.load(storage, self.piece)
        if there is not None and (there.complete, there.batches) > (self.complete, self.batches):
            return
        storage.put(_path(self.piece), json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, storage: Storage, piece: int) -> "PieceResult | None":
        """Read the file of a piece; None if it is missing or damaged: the piece then restarts."""
        found = storage.read(_path(piece))
        if found is None:
            return None
        try:
            return cls(**json.loads(found.data))
        except (ValueError, TypeError):
            return None

    def forget(self, storage: Storage) -> None:
        """Remove the file: the piece restarts after the batches that the broker has."""
        storage.remove([_path(self.piece)])

    def as_before(self) -> "PieceResult":
        """Convert the result of an earlier run for this run: all its messages were published before."""
        before, before_bytes = self.before + self.published, self.before_bytes + self.published_bytes
        return replace(self, published=0, published_bytes=0, before=before, before_bytes=before_bytes)


def _path(piece: int) -> str:
    return f"done/{piece:06d}.json"


@dataclass(slots=True)
class ReplayResult(ReplayCounts):
    """The result of a job so far.

    Attributes:
        left_out: Rows outside of the time range, or not selected by `--where`.
        files, pieces: The number of files and pieces.
        pieces_done: The number of complete pieces.
    """

    left_out: int = 0
    rows: int = 0
    files: int = 0
    pieces: int = 0
    pieces_done: int = 0

    def add(self, piece: PieceResult) -> None:
        for each in fields(ReplayCounts):
            if each.name != "remembered":
                setattr(self, each.name, getattr(self, each.name) + getattr(piece, each.name))
        del self.examples[MAX_EXAMPLES:]
        self.pieces_done += piece.complete
        if piece.remembered is not None:
            self.remembered: bool = piece.remembered and self.remembered is not False

    def count_left_out(self) -> None:
        """Set `left_out` after all pieces are complete."""
        replayed = self.published + self.before + self.unmatched + self.without_body + self.too_long
        self.left_out = self.rows - replayed
