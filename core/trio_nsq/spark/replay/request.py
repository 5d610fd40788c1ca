"""What a replay of files is asked for. It does not need pyarrow, so that qcli can check options without it."""

import re
from dataclasses import asdict, dataclass

JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
"""The name of a producer, which has at most 64 characters, is this with a suffix."""
DEFAULT_MAX_MSG_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Files to replay. A job that continues must have the same request.

    Attributes:
        source: A folder or a file: an absolute path, or a URI.
        topic: The topic to publish to.
        address: The HTTP address of the broker.
        from_topics: Of our own exports, the topics to replay; empty: the only one.
        body_column, time_column: See `open_files`.
        since, until: The time range as it was given; the next run compares it.
        first_ns, end_ns: The same in Unix nanoseconds, resolved when the job was begun.
        where: A condition in Spark SQL.
        match: A regular expression.
        ordered: Replay in the order of time.
        rate: Maximum messages per second.
        speed: Keep the pace of the original messages, so many times faster; requires `ordered`.
        max_msg_bytes: Longer messages are not published.
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

    def differs_from(self, other: "ReplayRequest") -> list[str]:
        """The names of the attributes that differ, except those resolved from others."""
        mine, theirs = asdict(self), asdict(other)
        return [name for name in mine if name not in ("first_ns", "end_ns") and mine[name] != theirs[name]]
