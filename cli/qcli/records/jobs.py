"""Records of jobs and measurements: `to-parquet`, `replay`, `to-nsq`, `bench`."""

from typing import Any, TypedDict

from .brokers import OfBroker


class _OfSeveralTopics(TypedDict, total=False):
    error: str | None
    exit_code: int


class ExportRecord(_OfSeveralTopics):
    """The export of a topic. Counts are of this run.

    Attributes:
        folder: The folder, URL or table.
        engine: null: nothing was exported.
        messages, body_bytes, files, file_bytes, ranges: Exported.
        skipped_messages: Requested, but exported before.
        missing: Messages that are no longer retained.
        damaged: Whether some of the missing messages are damaged.
        for_one_channel: Copies for one channel, left out.
        filtered: Left out by --where.
        unparsed: Messages whose bodies are in the column unparsed.
        without_column: Messages whose headers have no column.
        misfits: By field: values that did not fit the types of their columns.
        milliseconds: By field: numbers that seem to be milliseconds, in a column of seconds.
        discarded, discarded_rows: By field: values, and rows, that the schema contract left out.
        dead_letters: Published to the dead-letter topic.
        masked: By field: values that --mask has hidden.
        widened: Fields whose columns have wider types now.
        new_columns: Types by field that has a column now.
        repeated: Repeated deliveries, left out.
        compacted: Small files of the table that were merged.
        upserted, deleted, outdated: Rows of a table with --key.
        unread: Why newer messages of an archive were not read: a sentence for each damaged object.
        unavailable: Brokers that were not available.
        elapsed_s: Seconds.
        error, exit_code: Of one of several topics; the error is null if there is none.
    """

    topic: str
    folder: str
    engine: str | None
    messages: int
    body_bytes: int
    files: int
    file_bytes: int
    ranges: int
    skipped_messages: int
    missing: int
    damaged: bool
    for_one_channel: int
    filtered: int
    unparsed: int
    without_column: int
    misfits: dict[str, int]
    milliseconds: dict[str, int]
    discarded: dict[str, int]
    discarded_rows: int
    dead_letters: int
    masked: dict[str, int]
    widened: list[str]
    new_columns: dict[str, str]
    repeated: int
    compacted: int
    upserted: int
    deleted: int
    outdated: int
    unread: list[str]
    unavailable: list[str]
    elapsed_s: float


class TopicReplayRecord(OfBroker):
    """The replay of a topic.

    Attributes:
        source, topic: From where, and to where.
        published, published_bytes: Published, or to be published with --dry-run, and the size of their bodies.
        left_out: Do not match.
        missing: Messages that are no longer retained.
        damaged: Whether some of the missing messages are damaged.
        first_sequence, next_sequence, end_sequence: Where it began, how far it is, and where it ends.
        elapsed_s: Seconds.
    """

    source: str | None
    topic: str | None
    dry_run: bool
    published: int
    published_bytes: int
    left_out: int
    missing: int
    damaged: bool
    first_sequence: int
    next_sequence: int
    end_sequence: int
    elapsed_s: float


class FilesReplayRecord(TypedDict):
    """The replay of files.

    Attributes:
        job: The name that --job takes; null with --dry-run.
        published, published_bytes: Published by this run, and the size of their bodies.
        before, before_bytes: Published by an earlier run or attempt, and not published again.
        maybe_twice: Those of `published` that were sent again because the first response was lost.
        unmatched: Not matched by the regular expression.
        without_body: Rows whose body is null or empty.
        too_long: Longer than the limit, and not published.
        remembered: Whether the broker deduplicates; null: unknown.
        left_out: Rows outside of the time range, or not selected by --where.
        pieces, pieces_done: The parts of the files, and those that are complete.
        elapsed_s: Seconds.
    """

    job: str | None
    source: str
    topic: str
    engine: str | None
    dry_run: bool
    published: int
    published_bytes: int
    before: int
    before_bytes: int
    maybe_twice: int
    unmatched: int
    without_body: int
    too_long: int
    remembered: bool | None
    left_out: int
    rows: int
    files: int
    pieces: int
    pieces_done: int
    elapsed_s: float


class CopyRecord(TypedDict):
    """The status of a topic that `to-nsq` copies.

    Attributes:
        time_ns: Unix nanoseconds.
        broker: Empty: all of them.
        copied, copied_bytes: Messages, and the size of their bodies.
        dropped: Left out by --where.
        not_json: Bodies that are not JSON objects.
        per_second: Messages per second since the record before.
        lag: Messages that are not copied yet; null: unknown.
        exactly_once: Whether each message is copied exactly once.
    """

    time_ns: int
    topic: str
    broker: str
    copied: int
    copied_bytes: int
    dropped: int
    not_json: int
    per_second: float
    lag: int | None
    exactly_once: bool


class BenchConnection(TypedDict):
    """A connection of a measurement."""

    broker: str
    messages: int
    messages_per_second: float


class TimeClass(TypedDict):
    """A class of a histogram; null: without an upper limit."""

    up_to_ms: float | None
    count: int


BenchTimes = TypedDict(
    "BenchTimes",
    {
        "count": int,
        "mean_ms": float,
        "p50_ms": float,
        "p90_ms": float,
        "p99_ms": float,
        "p99.9_ms": float,
        "max_ms": float,
        "histogram": list[TimeClass],
    },
    total=False,
)
"""The distribution of times; without percentiles if there are no times."""


class BenchSubject(TypedDict):
    """What is measured.

    Attributes:
        brokers: TCP addresses.
        channel: null: nothing is consumed.
        settings: The options of the measurement.
    """

    benchmark: str
    brokers: list[str]
    topic: str
    channel: str | None
    settings: dict[str, Any]


class BenchRecord(BenchSubject):
    """A measurement.

    Attributes:
        interrupted: Whether a signal ended it early.
        messages_by_second: One number per second.
        connection_rates: Messages per second: min, avg, max and stddev of connections.
        missing: Messages that did not arrive, or too late.
        finished_afterwards: Messages that were on their way at the end, and are not counted.
        client_cpu_seconds: Processor time of this client.
        times: By what was measured, such as acknowledged.
    """

    interrupted: bool
    messages: int
    bytes: int
    seconds: float
    messages_per_second: float
    bytes_per_second: float
    messages_by_second: list[float]
    connections: list[BenchConnection]
    connection_rates: dict[str, float]
    missing: int
    finished_afterwards: int
    client_cpu_seconds: float
    times: dict[str, BenchTimes]
