"""The columns of `stat`, in the order of the table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from ...framework.output import rate
from ...records.brokers import StatRecord
from ...terminal.figures import age, short_age, short_count, short_rate


def _count(number: float) -> str:
    return f"{number:,.0f}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers.

    Attributes:
        key: The name in JSON. For counts it is nsqd's.
        heading: The heading.
        short_heading: The heading on a narrow terminal, in the words of nsqd's own statistics.
        text: Formats a number.
        short_text: Formats a number in at most four characters.
        rare: Whether the column is shown only if a topic or channel has such a number.
    """

    key: str
    heading: str
    short_heading: str
    text: Callable[[float], str] = _count
    short_text: Callable[[float], str] = short_count
    rare: bool = False

    @property
    def name(self) -> str:
        """The name in `--sort` and `--filter`."""
        return self.heading.replace(" ", "-")

    @property
    def has_short_heading(self) -> bool:
        return self.short_heading != self.heading


AGE = Column("oldest_message_age_ms", "age", "age", age, short_age)
OWN_DEPTH = "depth"
"""The key of nsqd's depth: of a topic, only the messages that no channel has."""
DEPTH = Column("total_depth", "depth", "depth")
"""The depth of a topic with that of its channels, as the console shows it; of a channel, its depth."""
COUNTS = (
    DEPTH,
    Column("backend_depth", "backend", "be"),
    Column("in_flight_count", "in flight", "inflt"),
    Column("deferred_count", "deferred", "def"),
    Column("requeue_count", "requeued", "req"),
    Column("timeout_count", "timed out", "t-o"),
    Column("message_count", "messages", "msgs"),
    Column("client_count", "clients", "cl"),
)
"""nsqd's counts, except `DEPTH`. A topic has only depth, backend_depth and message_count."""
RATES = (
    Column("ingress_rate", "in/s", "in/s", rate, short_rate),
    Column("egress_rate", "out/s", "out/s", rate, short_rate),
)
RARE_COUNTS = (
    Column("expired_count", "expired", "exp", rare=True),
    Column("dropped_count", "dropped", "drop", rare=True),
    Column("dead_letter_count", "dead", "dead", rare=True),
    Column("given_up_count", "given up", "g-up", rare=True),
    Column("blocked_count", "blocked", "blkd", rare=True),
    Column("rate_limit_per_s", "limit/s", "lim", rare=True),
)
"""Only with some settings: messages that were removed unfinished, those that wait for their keys, and rate limits."""
PUBLISHED = tuple(column for column in (*COUNTS, *RATES) if column.key in ("message_count", "ingress_rate"))
"""Numbers of a topic that are not the sum of its channels' numbers: each channel gets a copy of a message."""
COLUMNS = (*COUNTS, *RATES, AGE, *RARE_COUNTS)
NUMBERS = (OWN_DEPTH, *(column.key for column in COLUMNS))
"""The keys of all numbers of a row."""
LEFT_OUT_FIRST = (
    *("backend", "timed out", "requeued", "messages", "deferred", "clients"),
    *(column.heading for column in RARE_COUNTS),
    *("in/s", "in flight", "out/s", "age"),
)
"""The headings of columns that a very narrow screen leaves out, in this order."""
RECORD_KEYS = tuple(StatRecord.__annotations__)

_BY_NAME = {
    text: each for each in COLUMNS for text in (each.name, each.heading, each.key, each.short_heading)
}


def column_named(name: str) -> Column | None:
    return _BY_NAME.get(name)


class ColumnName(click.Choice[str]):
    """The name of a column; also its key in JSON. None stands for the order by name."""

    def __init__(self) -> None:
        super().__init__(["name", *(column.name for column in COLUMNS)])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value is None or isinstance(value, Column):
            return value
        return column_named(value) or column_named(super().convert(value, param, ctx))
