"""What an export is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...client.connection.tls import TLSFiles
from ...client.http.retry import PATIENCE_S
from .layout import JsonType, Layout

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How Parquet files are written; may differ from one run to the next.

    Attributes:
        compression: A Parquet codec, in lower case.
        compression_level: None: the default of the codec.
        row_group_bytes: Bytes of bodies in a row group, about.
    """

    compression: str = "zstd"
    compression_level: int | None = 1
    row_group_bytes: int = 64 * MIB


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """A topic to be exported.

    Attributes:
        topic: Its name.
        place: The folder to export to, see `storage_at`.
        first, end: Positions, see docs/reading.md. With a channel, `first` is ignored: the channel has a position.
        channel: Export what this channel has not consumed, and move it past the exported messages; None: no channel.
        layout: The layout of the files. `json_columns` is ignored: the columns are those of `json_fields`.
        json_fields: Fields of JSON bodies that become columns. A type of None is inferred from a sample. If empty, all
            fields of the sample become columns.
        options: How files are written.
        target_bytes: Bytes of the log in a range, about; at least 1.
        min_ranges: Split each broker's log into at least this many ranges, so that every worker has work.
        tls: Certificates for https.
        patience_s: How long to wait for a broker that is unreachable.
        spool: The folder of a spool to export from instead of brokers' logs; it requires a channel. None: no spool.
    """

    topic: str
    place: str
    first: str = "earliest"
    end: str = "latest"
    channel: str | None = None
    layout: Layout = field(default_factory=Layout)
    json_fields: Sequence[tuple[str, JsonType | None]] = ()
    options: FileOptions = field(default_factory=FileOptions)
    target_bytes: int = 256 * MIB
    min_ranges: int = 1
    tls: TLSFiles = field(default_factory=TLSFiles)
    patience_s: float = PATIENCE_S
    spool: Path | None = None
