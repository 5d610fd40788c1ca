"""Which of several brokers to publish to next. No IO; time is a parameter."""

from collections import deque
from collections.abc import Callable, Collection, Sequence

from ..connection.reconnect import ReconnectDelays


class BrokerRotation:
    """Round robin over the brokers that work. A broker that failed is left out for a while, longer with each failure.

    At first no broker is known to work, and all are to be tried. All times are in seconds, of one clock.

    Args:
        addresses: The brokers, at least one, each of them once.
        min_s: How long a broker is set aside after its first failure, before jitter.
        max_s: The longest.
        random: Returns numbers in [0, 1), for the jitter.
    """

    def __init__(
        self, addresses: Sequence[str], min_s: float, max_s: float, random: Callable[[], float]
    ) -> None:
        self._delays = {address: ReconnectDelays(min_s, max_s, random) for address in addresses}
        self._connected_at: dict[str, float] = {}  # of the brokers that are connected
        self._order = deque(addresses)  # whose turn it is, comes first
        # The others are in good standing.
        self._excluded_until = dict.fromkeys(addresses, float("-inf"))

    def record_connected(self, address: str, now: float) -> None:
        """A connection to it was made: it is in good standing."""
        self._connected_at[address] = now
        self._excluded_until.pop(address, None)

    def record_failure(self, address: str, now: float) -> float:
        """It could not be connected to, or its connection was lost; returns when it is to be tried again."""
        delays = self._delays[address]
        if (connected_at := self._connected_at.pop(address, None)) is not None:
            delays.connection_lasted(now - connected_at)
        until = self._excluded_until[address] = now + delays.next_s()
        return until

    def choose(self, without: Collection[str] = ()) -> str | None:
        """Return the broker whose turn it is, none of `without`, and move it to the end; None if there is none.

        If none is in good standing, it is the one to be tried again first: trying is better than failing at once.
        """
        excluded_until = self._excluded_until
        chosen = next((a for a in self._order if a not in excluded_until and a not in without), None)
        if chosen is None:
            chosen = min(
                (a for a in self._order if a not in without), key=excluded_until.__getitem__, default=None
            )
        if chosen is not None:
            self._order.remove(chosen)
            self._order.append(chosen)
        return chosen

    def due(self, now: float) -> list[str]:
        """Those set aside whose time has come; each is given again until it has connected or failed."""
        return [address for address, until in self._excluded_until.items() if until <= now]
