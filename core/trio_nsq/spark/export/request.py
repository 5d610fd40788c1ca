"""The request and the result of an export."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from ...log.gaps import Span
from ...protocol.limits import MIB
from ..bodies.schema import SchemaSource
from ..schemas.column_types import ColumnType, JsonType
from ..schemas.contracts import SchemaContract
from ..schemas.promotions import Promotion
from ..tables.target import TableKind, TableTarget
from .layout import Layout
from .manifest import RangeResult
from .path_counts import sum_of_counts


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """A topic to export, and the options.

    Attributes:
        place: The folder to export to, see `storage_at`.
        first, end: Positions, see docs/how-to/read-and-replay.md. With a channel, `first` is
            ignored: the channel has a position.
        channel: Export the messages that this channel has not consumed, then move the channel past them; None: no
            channel.
        channel_only_keeps: The channel has no position of its own: it keeps messages from retention until they are in
            the place. What is exported is what the place does not have, from `first` on, so that a new place gets all
            retained messages.
        layout: The layout of the files. `json_columns` is ignored: the columns are those of `json_fields`. With
            `keep_rest` these are a schema: other fields are in the column `rest`, and may become columns.
        json_fields: Fields of JSON bodies that become columns. A type of None is inferred from a sample. If empty, all
            fields of the sample become columns.
        contract: What to do with values that the columns of JSON bodies do not have; None: new fields become columns of
            a table, and stay in `rest` in a folder of files; what does not fit is in `unparsed`.
        dead_letter_topic: Messages whose bodies would be in `unparsed` are published to this topic of their broker, at
            least once, and left out; None: they are not.
        event_time_type: The type of the column of `Layout.event_time`, if `json_fields` gives none.
        compression: A Parquet codec, in lower case.
        compression_level: None: the default of the codec.
        row_group_bytes: The approximate size of the rows in a row group, before compression.
        target_bytes: The approximate size of a range in the log; at least 1.
        max_age_s: Export fewer messages than a range has only when the oldest was published this long ago; None: at
            once.
        min_ranges: Split each broker's log into at least this many ranges, so that every worker has work.
        schemas: Where the schemas of bodies come from, if the layout's format needs them.
        table: The table to commit the files to; None: no table.
        compact: Merge small files of the table.
    """

    topic: str
    place: str
    first: str = "earliest"
    end: str = "latest"
    channel: str | None = None
    channel_only_keeps: bool = False
    layout: Layout = field(default_factory=Layout)
    json_fields: Sequence[tuple[str, ColumnType | None]] = ()
    contract: SchemaContract | None = None
    dead_letter_topic: str | None = None
    event_time_type: ColumnType = JsonType.TIMESTAMP
    compression: str = "zstd"
    compression_level: int | None = 1
    row_group_bytes: int = 32 * MIB
    target_bytes: int = 256 * MIB
    max_age_s: float | None = None
    min_ranges: int = 1
    schemas: SchemaSource | None = None
    table: TableTarget | None = None
    compact: bool = False

    @property
    def has_position_of_channel(self) -> bool:
        """Whether the export begins where its channel is."""
        return self.channel is not None and not self.channel_only_keeps

    @property
    def evolves(self) -> bool:
        """Whether the columns of the place follow the messages."""
        return self.contract is SchemaContract.EVOLVE

    @property
    def adds_columns(self) -> bool:
        """Whether new fields become columns."""
        return self.evolves or (self.table is not None and self.contract is None)

    @property
    def promotion(self) -> Promotion | None:
        """How columns get wider types; None: they do not, as those of Delta tables, which deltalake cannot widen."""
        if not self.evolves:
            return None
        if self.table is None:
            return Promotion.FILES
        return Promotion.ICEBERG if self.table.kind is TableKind.ICEBERG else None


@dataclass(slots=True)
class ExportResult:
    """The result of an export so far; counts are of this process unless noted. qcli prints these fields.

    Attributes:
        messages, body_bytes, files, file_bytes, ranges: Exported.
        planned_bytes: The estimated size of the planned part of the log.
        skipped_messages: Requested, but exported before.
        missing: Messages that are no longer retained.
        damaged: Whether some of the missing messages are damaged.
        for_one_channel, filtered, unparsed, without_column, misfits, milliseconds: See `RangeResult`.
        discarded, discarded_rows, dead_letters, masked: See `RangeResult`.
        widened: JSON fields whose columns have wider types now, in all files.
        new_columns: JSON fields that have columns now, with their types.
        repeated: Messages that a channel redelivered; they are not exported again.
        compacted: Small files of the table that were merged into larger ones.
        upserted, deleted, outdated: See `MergeCounts`.
        gaps: `(broker, first, end, reason)` of missing messages.
        unread: Why newer messages of an archive were not read, a sentence for each damaged object.
    """

    messages: int = 0
    body_bytes: int = 0
    files: int = 0
    file_bytes: int = 0
    ranges: int = 0
    planned_bytes: int = 0
    skipped_messages: int = 0
    missing: int = 0
    damaged: bool = False
    for_one_channel: int = 0
    filtered: int = 0
    unparsed: int = 0
    without_column: int = 0
    misfits: dict[str, int] = field(default_factory=dict)
    milliseconds: dict[str, int] = field(default_factory=dict)
    discarded: dict[str, int] = field(default_factory=dict)
    discarded_rows: int = 0
    dead_letters: int = 0
    masked: dict[str, int] = field(default_factory=dict)
    widened: list[str] = field(default_factory=list)
    new_columns: dict[str, str] = field(default_factory=dict)
    repeated: int = 0
    compacted: int = 0
    upserted: int = 0
    deleted: int = 0
    outdated: int = 0
    gaps: list[tuple[str, int, int, str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def add(self, done: RangeResult) -> None:
        self.ranges += 1
        self.messages += done.messages
        self.body_bytes += done.body_bytes
        self.files += len(done.files)
        self.file_bytes += done.file_bytes
        self.for_one_channel += done.for_one_channel
        self.filtered += done.filtered
        self.unparsed += done.unparsed
        self.without_column += done.without_column
        self.misfits = sum_of_counts(self.misfits, done.misfits)
        self.milliseconds = sum_of_counts(self.milliseconds, done.milliseconds)
        self.discarded = sum_of_counts(self.discarded, done.discarded)
        self.discarded_rows += done.discarded_rows
        self.dead_letters += done.dead_letters
        self.masked = sum_of_counts(self.masked, done.masked)
        for first, end, reason in done.gaps:
            self.add_gap(done.broker, Span(first, end), reason)

    def add_gap(self, broker: str, span: Span, reason: str) -> None:
        self.missing += span.length
        self.damaged |= reason == "damaged"
        self.gaps.append((broker, *span, reason))

    def merge(self, other: "ExportResult") -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if each.name == "new_columns":
                self.new_columns = {**mine, **theirs}
            elif each.name == "unread":
                self.unread = sorted({*mine, *theirs})
            elif isinstance(mine, dict):
                setattr(self, each.name, sum_of_counts(mine, theirs))
            else:
                setattr(self, each.name, mine or theirs if isinstance(mine, bool) else mine + theirs)
