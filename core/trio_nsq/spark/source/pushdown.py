"""Which messages the filters of a query leave, as far as a log can be asked for them: the option `pushFilters`.

Spark 4.0 has no filters for data sources: nothing imports this there.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from .batch import NsqReader
from .restriction import Restriction

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_NS_PER_US = 1000


class FilteredNsqReader(NsqReader):
    """Reads a batch, and of the logs only what filters of the query can leave.

    It is another class because Spark fails each read of one with `pushFilters`, unless
    `spark.sql.python.filterPushdown.enabled` is set.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Note what filters leave. Returns all of them: Spark filters the rows, too."""
        self.restriction = restriction_of(filters)
        return filters


def restriction_of(filters: Iterable[Filter]) -> Restriction:
    """Return what filters leave that all have to hold: it may have more messages, never fewer.

    Filters of other columns and kinds restrict nothing.
    """
    topics: frozenset[str] | None = None
    brokers: frozenset[str] | None = None
    firsts, ends = [0], list[int]()
    froms, untils = list[int](), list[int]()
    for each in filters:
        column, values = _column_and_values(each)
        if column == "topic":
            topics = _both(topics, values)
        elif column == "broker":
            brokers = _both(brokers, values)
        elif column in ("seq", "ts_ns", "ts"):
            if (bounds := _bounds(each, values, is_time=column == "ts")) is None:
                continue
            low, high = bounds  # both included
            is_seq = column == "seq"
            if low is not None:
                (firsts if is_seq else froms).append(low)
            if high is not None:
                (ends if is_seq else untils).append(high + is_seq)
    return Restriction(
        topics,
        brokers,
        max(firsts),
        min(ends, default=None),
        max(froms, default=None),
        min(untils, default=None),
    )


def _column_and_values(found: Filter) -> tuple[str, tuple[Any, ...]]:
    """Return the column, and the values that a filter allows or compares with; empty for one that is not used."""
    if isinstance(found, In):
        column, values = found.attribute, tuple(found.value)
    elif isinstance(
        found, EqualTo | EqualNullSafe | GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual
    ):
        column, values = found.attribute, (found.value,)
    else:
        return "", ()
    is_equality = isinstance(found, In | EqualTo | EqualNullSafe)
    name = column[0].casefold() if len(column) == 1 else ""
    return ("" if name in ("topic", "broker") and not is_equality else name), values


def _both(before: frozenset[str] | None, values: tuple[Any, ...]) -> frozenset[str]:
    now = frozenset(values)
    return now if before is None else before & now


def _bounds(found: Filter, values: tuple[Any, ...], *, is_time: bool) -> tuple[int | None, int | None] | None:
    """Return the least and the greatest number that a filter leaves; None for both: it restricts nothing."""
    numbers = [_number(value, is_time=is_time) for value in values]
    known = [number for number in numbers if number is not None]
    if not known or len(known) < len(numbers):
        return None
    low, high = min(known), max(known)
    # A time of microseconds stands for all nanoseconds in it.
    last = high + (_NS_PER_US - 1 if is_time else 0)
    match found:
        case GreaterThan():
            return last + 1, None
        case GreaterThanOrEqual():
            return low, None
        case LessThan():
            return None, low - 1
        case LessThanOrEqual():
            return None, last
        case _:
            return low, last


def _number(value: Any, *, is_time: bool) -> int | None:
    """Return a sequence or nanoseconds; None: another type, such as null."""
    if is_time:
        if not isinstance(value, datetime):
            return None
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return (moment - _EPOCH) // _MICROSECOND * _NS_PER_US
    return value if isinstance(value, int) and not isinstance(value, bool) else None
