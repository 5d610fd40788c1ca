"""What a replay of files is asked for. It needs pyarrow for nothing, and so is known before that is."""

import re
from dataclasses import asdict, dataclass

JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
"""With what is put behind it, it is the name of a producer, which has at most 64 characters."""
DEFAULT_MAX_MSG_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What is wanted. A job that is gone on with has the same.

    Attributes:
        source: A folder or a file: an absolute path, or a URI.
        topic: Where to.
        address: Of the broker's HTTP.
        from_topics: Of our own exports: whose messages. None: of the only one there is.
        body_column, time_column: See `open_files`.
        since, until: The bounds of time as they were asked for, to be compared with.
        first_ns, end_ns: What they came to when the job was begun.
        where: A condition in Spark SQL.
        match: A regular expression.
        ordered: In order of time.
        rate: Messages per second.
        speed: Times between messages, so many times shorter; it is ordered then.
        max_msg_bytes: Longer messages are not sent.
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
        """The names of what differs, but for what follows from the rest."""
        mine, theirs = asdict(self), asdict(other)
        return [name for name in mine if name not in ("first_ns", "end_ns") and mine[name] != theirs[name]]
