"""Slows down failed logins, by the client's address, and counts them."""

from collections import OrderedDict
from heapq import heappop, heappush
from itertools import product
from typing import Literal, get_args

from ..event_loop.retries import doubled_s
from ..protocol.address import network_of

MAX_ADDRESSES = 10_000
FORGET_S = 60.0
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 3.0
"""Less than the timeout of HTTP clients: that of NSQ's tools is 5 s."""
MAX_DELAYED = 256
"""Answers that are delayed at the same time. More are not delayed: each holds a connection and its memory."""

Protocol = Literal["tcp", "http"]
Reason = Literal["token", "auth_server"]
"""Why a login failed: the token is unknown, expired or revoked; or the auth servers refused it."""


class FailedAttempts:
    """Counts failed logins by address.

    Each failure within a minute doubles the time before the next one is answered. A valid login is never delayed, so
    an attacker cannot lock out others behind the same address. The addresses of an IPv6 network (64 bits) count as one,
    because one client can use all of them.

    Attributes:
        totals: Failed logins since the start.
    """

    def __init__(self) -> None:
        self.totals: dict[tuple[Protocol, Reason], int] = dict.fromkeys(
            product(get_args(Protocol), get_args(Reason)), 0
        )
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()  # least recent first
        self._delayed_until_s: list[float] = []  # a heap

    @property
    def total(self) -> int:
        """All failed logins since the start."""
        return sum(self.totals.values())

    def count(self, protocol: Protocol, reason: Reason) -> None:
        """Count a failed login whose answer is not delayed."""
        self.totals[protocol, reason] += 1

    def record_failure(
        self, host: str, now_s: float, protocol: Protocol = "tcp", reason: Reason = "token"
    ) -> float:
        """Record a failed login at a time of any clock. Returns how long to delay its answer, in seconds."""
        self.count(protocol, reason)
        network = network_of(host)
        count, last_s = self._failures.pop(network, (0, now_s))
        count = 1 if now_s - last_s > FORGET_S else count + 1
        self._failures[network] = count, now_s
        if len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)
        while self._delayed_until_s and self._delayed_until_s[0] <= now_s:
            heappop(self._delayed_until_s)
        if len(self._delayed_until_s) >= MAX_DELAYED:
            return 0.0
        delay_s = doubled_s(FIRST_DELAY_S, count - 1, MAX_DELAY_S)
        heappush(self._delayed_until_s, now_s + delay_s)
        return delay_s

    def __len__(self) -> int:
        """Return the number of addresses that are remembered."""
        return len(self._failures)
