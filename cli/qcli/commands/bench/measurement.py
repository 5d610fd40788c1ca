"""What a measurement counts. Pure: time is a parameter."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from .histogram import Histogram


@dataclass(slots=True)
class Tally:
    """The messages of one connection to the broker at `address`."""

    address: str
    messages: int = 0


class Counter:
    """Messages by the second of a measurement.

    Attributes:
        begun_s, last_s: When the measurement began, and when messages were counted last, on the caller's clock.
        total: All messages.
        by_second: The messages of each second since the beginning.
    """

    def __init__(self) -> None:
        self.total = 0
        self.begin(0.0)

    def begin(self, now_s: float) -> None:
        self.begun_s = self.last_s = now_s
        self.by_second: list[int] = []

    def add(self, count: int, now_s: float) -> None:
        second = int(now_s - self.begun_s)
        while len(self.by_second) <= second:
            self.by_second.append(0)
        self.by_second[second] += count
        self.total += count
        self.last_s = now_s


@dataclass(slots=True)
class Measurement:
    """The result of a measurement.

    Attributes:
        tallies: The connections that the messages were counted on.
        body_bytes: All bodies.
        seconds: The time that rates refer to.
        by_second: The messages of each whole second.
        times: Distributions by what was measured, such as `acknowledged`.
        missing: Messages that were published and not received.
        afterwards: Messages that were finished after the end of the measurement; the others do not include them.
        cpu_s: The processor time of this process.
        interrupted: A signal ended the measurement.
    """

    tallies: Sequence[Tally]
    body_bytes: int = 0
    seconds: float = 0.0
    by_second: Sequence[int] = ()
    times: dict[str, Histogram] = field(default_factory=dict)
    missing: int = 0
    afterwards: int = 0
    cpu_s: float = 0.0
    interrupted: bool = False

    @property
    def messages(self) -> int:
        return sum(tally.messages for tally in self.tallies)

    def per_second(self, count: float) -> float:
        """Return a count as a rate; 0 if the measurement took no time."""
        return count / self.seconds if self.seconds > 0 else 0.0

    def connection_rates(self) -> dict[str, float]:
        """Return minimum, mean, maximum and standard deviation of the connections' messages per second."""
        rates = [self.per_second(tally.messages) for tally in self.tallies]
        found = {"min": min(rates), "avg": statistics.fmean(rates), "max": max(rates)}
        return {name: round(rate, 1) for name, rate in found.items()} | {
            "stddev": round(statistics.pstdev(rates), 1)
        }
