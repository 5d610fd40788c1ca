"""The recent rates of topics and channels, for small charts."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from .columns import RATES
from .rows import Row, RowKey, published

LENGTH = 60
"""Reports that are kept, for a quarter of a wide screen."""

Series = Mapping[str, Sequence[float | None]]
"""Numbers by the key of a rate, the newest last."""


class History:
    """Remembers the rates of the rows of successive reports. Does no IO."""

    def __init__(self) -> None:
        self._series: dict[RowKey, dict[str, deque[float | None]]] = {}

    def add(self, rows: Iterable[Row]) -> None:
        """Remember a report. Forgets the rows that it does not have."""
        before, self._series = self._series, {}
        for row in rows:
            kept = before.get(row.key) or {column.key: deque(maxlen=LENGTH) for column in RATES}
            for column in RATES:
                kept[column.key].append(row.values.get(column.key))
            self._series[row.key] = kept

    def of(self, row: Row) -> Series:
        """Return the rates of a row; nothing if it is new."""
        found = self._series.get(row.key, {})
        return {key: tuple(series) for key, series in found.items()}

    def total(self, rows: Sequence[Row]) -> Series:
        """Return the total rates of these rows."""
        series = {}
        for column, counted in zip(RATES, (published(rows), rows), strict=True):
            each = [self._series[row.key][column.key] for row in counted if row.key in self._series]
            # Aligned at the end: new rows have fewer numbers.
            columns = zip_longest(*map(reversed, each))
            sums = [[value for value in values if value is not None] for values in columns]
            series[column.key] = [sum(known) if known else None for known in reversed(sums)]
        return series
