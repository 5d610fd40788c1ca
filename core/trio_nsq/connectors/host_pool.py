"""Choose one of several hosts for each request. No IO; the time and random numbers are parameters.

The modes are those of go-hostpool, which nsq_to_http and nsq_to_nsq use:

- hostpool: in turn, without hosts that failed. A failed host gets one request after 30 s, then after 60 s, and so on
  up to 15 minutes, until a request succeeds. If all hosts have failed, all are used again.
- epsilon-greedy: as hostpool, but most requests go to the hosts that were fast in the last five minutes.
- round-robin: in turn, whatever fails.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Protocol

from ..event_loop.retries import Delays

MIN_RETRY_S = 30.0
MAX_RETRY_S = 15 * 60.0

_EPSILON, _MIN_EPSILON, _EPSILON_DECAY = 0.3, 0.01, 0.9
"""The share of requests that explore: which host is fast may have changed."""
_BUCKETS = 120
_BUCKET_S = 5 * 60.0 / _BUCKETS
_MIN_RESPONSE_S = 1e-6
"""A clock may not see a short response time; its host must not have infinite weight."""


class Mode(StrEnum):
    """How to choose a host; the values are the names in command lines."""

    HOSTPOOL = "hostpool"
    ROUND_ROBIN = "round-robin"
    EPSILON_GREEDY = "epsilon-greedy"


class HostPool(Protocol):
    """Chooses hosts, which are numbers from 0. Times are seconds of one monotonic clock."""

    def pick(self, now_s: float) -> int:
        """Return the host for a request. Report its outcome with `succeeded` or `failed`."""
        ...

    def succeeded(self, host: int, response_s: float, now_s: float) -> None:
        """Record a request that succeeded after `response_s`."""
        ...

    def failed(self, host: int, now_s: float) -> None:
        """Record a request that failed."""
        ...


def make_pool(mode: Mode, hosts: int, random: Callable[[], float]) -> HostPool:
    """Return a pool of `hosts` hosts, at least 1.

    Args:
        random: Returns numbers in [0, 1).
    """
    if hosts < 1:
        raise ValueError("a pool needs a host")
    match mode:
        case Mode.HOSTPOOL:
            return LivePool(hosts)
        case Mode.ROUND_ROBIN:
            return RoundRobin(hosts)
        case Mode.EPSILON_GREEDY:
            return EpsilonGreedy(hosts, random)


class RoundRobin:
    """Each host in turn."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._next = 0

    def pick(self, now_s: float) -> int:
        host = self._next
        self._next = (host + 1) % self._hosts
        return host

    def succeeded(self, host: int, response_s: float, now_s: float) -> None:
        """Do nothing."""

    def failed(self, host: int, now_s: float) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Health:
    """Whether a host is in use. `retry_at_s`: when a failed host gets a request; None: it has not failed."""

    retry_at_s: float | None = None
    _delays: Delays = field(default_factory=lambda: Delays(MIN_RETRY_S, MAX_RETRY_S))

    def is_usable(self, now_s: float) -> bool:
        return self.retry_at_s is None or self.retry_at_s <= now_s

    def use(self, now_s: float) -> None:
        """If this is a retry, delay the next one."""
        if self.retry_at_s is not None:
            self.retry_at_s = now_s + self._delays.next_s()

    def fail(self, now_s: float) -> None:
        if self.retry_at_s is None:
            self._delays.reset()
            self.retry_at_s = now_s + self._delays.next_s()


class LivePool:
    """Each host in turn, without failed ones."""

    def __init__(self, hosts: int) -> None:
        self._health = [_Health() for _ in range(hosts)]
        self._next = 0

    def pick(self, now_s: float) -> int:
        hosts = len(self._health)
        for host in (*range(self._next, hosts), *range(self._next)):
            if self._health[host].is_usable(now_s):
                break
        else:
            for health in self._health:
                health.retry_at_s = None
            host = 0
        self._next = (host + 1) % hosts
        return self.use(host, now_s)

    def use(self, host: int, now_s: float) -> int:
        """Return this host for a request. The turn of the others does not change."""
        self._health[host].use(now_s)
        return host

    def succeeded(self, host: int, response_s: float, now_s: float) -> None:
        self._health[host].retry_at_s = None

    def failed(self, host: int, now_s: float) -> None:
        self._health[host].fail(now_s)

    def usable(self, now_s: float) -> list[int]:
        """Return the hosts that have not failed, or may be retried."""
        return [host for host, health in enumerate(self._health) if health.is_usable(now_s)]


@dataclass(slots=True)
class _Bucket:
    """The response times of one host in 2.5 seconds."""

    number: int
    count: int = 0
    total_s: float = 0.0

    @property
    def average_s(self) -> float:
        return self.total_s / self.count


@dataclass(slots=True)
class _ResponseTimes:
    """The response times of one host in the last five minutes.

    The score is the sum over all buckets of the average, weighted from 1/120 for the oldest to 1 for the newest. A
    bucket without requests counts as the one before it.
    """

    _buckets: deque[_Bucket] = field(default_factory=deque)
    _older: float = 0.0  # the score of all buckets before the newest; it changes only with the newest bucket
    _newest: int = -1

    def add(self, response_s: float, now_s: float) -> None:
        number = self._advance(now_s)
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(_Bucket(number))
        bucket = self._buckets[-1]
        bucket.count += 1
        bucket.total_s += max(response_s, _MIN_RESPONSE_S)

    def score(self, now_s: float) -> float:
        """Return the score; 0: there were no requests."""
        self._advance(now_s)
        return self._older + self._buckets[-1].average_s if self._buckets else 0.0

    def _advance(self, now_s: float) -> int:
        """Make the bucket of `now_s` the newest, and return its number."""
        number = int(now_s // _BUCKET_S)
        if number != self._newest:
            self._newest = number
            while self._buckets and self._buckets[0].number <= number - _BUCKETS:
                self._buckets.popleft()
            ends = [*(bucket.number for bucket in self._buckets), number][1:]
            self._older = sum(
                bucket.average_s * _weights(bucket.number - number, end - number)
                for bucket, end in zip(self._buckets, ends, strict=True)
            )
        return number


def _weights(first: int, end: int) -> float:
    """Return the sum of the weights of buckets; 0 is the newest."""
    return sum(range(first + _BUCKETS, end + _BUCKETS)) / _BUCKETS


class EpsilonGreedy:
    """Mostly the fast hosts, at random with weights; sometimes each in turn, to learn about the others."""

    def __init__(self, hosts: int, random: Callable[[], float]) -> None:
        self._live = LivePool(hosts)
        self._times = [_ResponseTimes() for _ in range(hosts)]
        self._random = random
        self._epsilon = _EPSILON

    def pick(self, now_s: float) -> int:
        if self._random() < self._epsilon:
            self._epsilon = max(self._epsilon * _EPSILON_DECAY, _MIN_EPSILON)
            return self._live.pick(now_s)
        scores = {host: self._times[host].score(now_s) for host in self._live.usable(now_s)}
        weights = {host: 1 / score for host, score in scores.items() if score}
        if not weights:
            return self._live.pick(now_s)
        ends = list(accumulate(weights.values()))
        host = list(weights)[bisect_right(ends, self._random() * ends[-1], hi=len(ends) - 1)]
        return self._live.use(host, now_s)

    def succeeded(self, host: int, response_s: float, now_s: float) -> None:
        self._live.succeeded(host, response_s, now_s)
        self._times[host].add(response_s, now_s)

    def failed(self, host: int, now_s: float) -> None:
        self._live.failed(host, now_s)
