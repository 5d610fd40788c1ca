"""Choose the broker of the next publish. No IO; time is a parameter."""

from collections import deque
from collections.abc import Callable, Collection
from functools import partial

from trio_nsq.event_loop.retries import reconnect_delays

from ...event_loop.retries import Delays


class BrokerRotation:
    """Round robin over the available brokers.

    A broker that fails is excluded for a time that grows with each failure. A silent broker, which leaves publishes
    unanswered, is used only if no other is available. A new broker is excluded and due to be tried.

    All times are in seconds of one clock.

    Args:
        min_s: The exclusion time after a first failure, before jitter.
        max_s: The longest exclusion time.
        random: Returns numbers in [0, 1), for the jitter.

    Raises:
        ValueError: The times are not above 0 and in order.
    """

    def __init__(self, min_s: float, max_s: float, random: Callable[[], float]) -> None:
        self._new_delays = partial(reconnect_delays, min_s, max_s, random)
        self._new_delays()  # checks the times
        self._delays: dict[str, Delays] = {}
        self._usable_since: dict[str, float] = {}  # brokers that are not excluded
        self._order: deque[str] = deque()  # the next broker first
        self._excluded_until: dict[str, float] = {}
        self._silent: set[str] = set()

    @property
    def has_available(self) -> bool:
        """Whether some broker is neither excluded nor silent."""
        return any(a not in self._excluded_until and a not in self._silent for a in self._order)

    def add(self, address: str) -> None:
        """Add a broker, which is not in the rotation."""
        self._delays[address] = self._new_delays()
        self._order.append(address)
        self._excluded_until[address] = float("-inf")

    def remove(self, address: str) -> None:
        self._order.remove(address)
        del self._delays[address]
        self._excluded_until.pop(address, None)
        self._usable_since.pop(address, None)
        self._silent.discard(address)

    def record_usable(self, address: str, now: float) -> None:
        """End the exclusion of a broker: a connection was opened, or one that is open is to be tried again."""
        self._usable_since[address] = now
        self._excluded_until.pop(address, None)
        self._silent.discard(address)

    def record_failure(self, address: str, now: float) -> float:
        """Exclude a broker: connecting failed or the connection was lost. Return when to try it again."""
        delays = self._delays[address]
        if (since := self._usable_since.pop(address, None)) is not None:
            delays.connection_lasted(now - since)
        self._silent.discard(address)
        until = self._excluded_until[address] = now + delays.next_s()
        return until

    def record_refusal(self, address: str, now: float) -> float | None:
        """Exclude a broker that refuses publishes. Return when to try it again; None if it is excluded already."""
        if address in self._excluded_until:
            return None  # it refuses all publishes that were in flight
        return self.record_failure(address, now)

    def record_silence(self, address: str) -> bool:
        """Mark a broker as silent: publishes are unanswered for too long. Return False if it was silent before."""
        if address in self._silent:
            return False
        self._silent.add(address)
        return True

    def record_answer(self, address: str) -> None:
        """End the silence of a broker."""
        self._silent.discard(address)

    def choose(self, without: Collection[str] = ()) -> str | None:
        """Return the next broker that is not in `without`, and move it to the end; None if there is none.

        If no broker is available, return a silent one. If all are excluded, return the one that is due first: trying is
        better than failing at once.
        """
        excluded_until, silent = self._excluded_until, self._silent
        for chosen in self._order:
            if chosen not in excluded_until and chosen not in silent and chosen not in without:
                break
        else:
            others = [address for address in self._order if address not in without]
            if not others:
                return None
            chosen = min(others, key=lambda address: excluded_until.get(address, float("-inf")))
        self._order.remove(chosen)
        self._order.append(chosen)
        return chosen

    def due(self, now: float) -> list[str]:
        """Return the excluded brokers that are due to be tried, until they are usable or fail."""
        return [address for address, until in self._excluded_until.items() if until <= now]
