"""End-to-end latencies of brokers, beside each other: percentiles of several brokers cannot be added. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_QUANTILES = 10


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """The latencies of one broker, in the order of the quantiles; None: it does not measure this one."""

    broker: str
    count: int
    values_ms: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Latencies:
    """The latencies of a topic or channel. Without quantiles, no broker measures them."""

    quantiles: Sequence[float] = ()
    rows: Sequence[LatencyRow] = ()

    @property
    def count(self) -> int:
        """The messages of all brokers."""
        return sum(row.count for row in self.rows)

    @property
    def highest_ms(self) -> list[float | None]:
        """The highest of all brokers, for each quantile."""
        columns = zip(*(row.values_ms for row in self.rows), strict=True)
        return [max((v for v in values if v is not None), default=None) for values in columns]


def latencies(raw: Mapping[str, Mapping[str, Any]]) -> Latencies:
    """Read the latencies of topics or channels, objects of `/stats` by broker. They are untrusted."""
    found = {broker: _percentiles(each.get("e2e_processing_latency")) for broker, each in raw.items()}
    quantiles = sorted({quantile for _, values in found.values() for quantile in values})[:_MAX_QUANTILES]
    rows = [
        LatencyRow(broker, count, [values.get(each) for each in quantiles])
        for broker, (count, values) in found.items()
        if values
    ]
    return Latencies(quantiles, rows)


def _percentiles(raw: Any) -> tuple[int, dict[float, float]]:
    """Return the number of messages, and milliseconds by quantile."""
    if not isinstance(raw, dict) or not isinstance(raw.get("percentiles"), list):
        return 0, {}
    count = raw.get("count")
    values = {
        float(each["quantile"]): each["value"] / 1_000_000
        for each in raw["percentiles"][:_MAX_QUANTILES]
        if isinstance(each, dict) and _is_number(each.get("quantile")) and _is_number(each.get("value"))
    }
    return count if type(count) is int else 0, values


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 2**63
