"""Choose the broker of the next publish. No IO; time is a parameter."""

from collections import deque
from collections.abc import Callable, Collection, Sequence

from ..connection.reconnect import ReconnectDelays


class BrokerRotation:
    """Round robin over the available brokers. A broker that fails is excluded for a time that grows with each failure.

    At first all brokers are excluded and due to be tried. All times are in seconds of one clock.

    Args:
        addresses: The brokers, at least one, without duplicates.
        min_s: The exclusion time after a first failure, before jitter.
        max_s: The longest exclusion time.
        random: Returns numbers in [0, 1), for the jitter.
    """

    def __init__(
        self, addresses: Sequence[str], min_s: float, max_s: float, random: Callable[[], float]
    ) -> None:
        self._delays = {address: ReconnectDelays(min_s, max_s, random) for address in addresses}
        self._connected_at: dict[str, float] = {}  # connected brokers only
        self._order = deque(addresses)  # the next broker first
        # Brokers that are not in here are available.
        self._excluded_until = dict.fromkeys(addresses, float("-inf"))

    def record_connected(self, address: str, now: float) -> None:
        """Mark a broker as available: a connection was opened."""
        self._connected_at[address] = now
        self._excluded_until.pop(address, None)

    def record_failure(self, address: str, now: float) -> float:
        """Exclude a broker: connecting failed or the connection was lost. Return when to try it again."""
        delays = self._delays[address]
        if (connected_at := self._connected_at.pop(address, None)) is not None:
            delays.connection_lasted(now - connected_at)
        until = self._excluded_until[address] = now + delays.next_s()
        return until

    def choose(self, without: Collection[str] = ()) -> str | None:
        """Return the next broker that is not in `without`, and move it to the end; None if there is none.

        If no broker is available, return the one that is due first: trying is better than failing at once.
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
        """Return the excluded brokers that are due to be tried, until they connect or fail."""
        return [address for address, until in self._excluded_until.items() if until <= now]
