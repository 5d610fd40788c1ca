"""The interface of coordinators: engines that decide which member of a cluster leads.

A coordinator has two things of a cluster: a lease, which its leader renews, and the value (`ClusterState`), which
outlives the lease. A leader is elected by one conditional write of the value, so no epoch is won twice, and a member
that is no longer in sync cannot win: the value that it was in is another one.
"""

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from ..platform.boot_clock import boot_time_s
from ..protocol.errors import NSQError
from .state import Candidate, ClusterState, StateError, check_founder, check_name, founded

_T = TypeVar("_T")

_FIRST_EPOCHS: Final = 1 << 30
_NEXT_EPOCHS: Final = 1 << 16

Clock = Callable[[], float]


class CoordinatorError(NSQError):
    """A coordinator does not answer, or cannot be used."""


class LeadershipLost(CoordinatorError):
    """This process does not lead, or no longer."""


class ValueChanged(CoordinatorError):
    """The value is another one than expected. It stays as it is."""


class Observation(NamedTuple):
    """What a coordinator says about a cluster.

    Attributes:
        state: The value; None: there is none.
        is_held: Whether a leader holds the lease.
    """

    state: ClusterState | None
    is_held: bool


class Reading(NamedTuple):
    """The value of a cluster with its version in the engine.

    Attributes:
        state: The value; None: there is none.
        version: Changes with each write of the value.
        is_held: See `Observation`.
        floor: Values that were here before the reading, and were removed, had no higher epoch.
    """

    state: ClusterState | None
    version: Any
    is_held: bool
    floor: int = 0


class Coordinator(ABC):
    """One cluster in one engine, for one member. Calls block, and are made from one thread; `close` from any.

    Methods raise CoordinatorError if the engine does not answer in time; then it is unknown whether the call had an
    effect, and the next `renew`, `read` or `replace` finds out. They raise StateError for values that are not valid.

    Args:
        shown: The engine without secrets, for messages.
        cluster: The name of the cluster.
        ttl_s: How long the lease lasts after it was renewed.
        renew_every_s: How often to call `renew`.
        clock: A clock that also runs while the machine sleeps.
    """

    def __init__(
        self, shown: str, cluster: str, ttl_s: float, renew_every_s: float, clock: Clock = boot_time_s
    ) -> None:
        self.shown = shown
        self.cluster: str = check_name("the name of the cluster", cluster)
        self.ttl_s = ttl_s
        self.renew_every_s = renew_every_s
        self._clock = clock
        self._session = ""
        self._led: tuple[ClusterState, Any] | None = None
        self._sent_s: float | None = None
        self._handed_over: tuple[int, str] | None = None
        self._handed_over_s = 0.0
        self._ending = threading.Event()

    @property
    def led(self) -> ClusterState | None:
        """The value of the leadership that this process has, as last written; None: it does not lead."""
        return None if self._led is None else self._led[0]

    @property
    def certain_until_s(self) -> float | None:
        """The time of the clock until which no other member can lead; None: this process does not lead.

        It is the time at which the last successful renewal was sent, and the lease's time. Any thread may ask.
        """
        sent_s = self._sent_s  # other threads may ask
        return None if sent_s is None else sent_s + self.ttl_s

    def campaign(self, candidate: Candidate, *, found: bool = False, after: int | None = None) -> int | None:
        """Lead, unless another member does. A leadership that this process has had is forgotten.

        Args:
            candidate: This member.
            found: Lead with this member alone in sync, whatever the value says: an administrator has confirmed that no
                other member has more messages, or that these are lost. Not while another member leads.
            after: Only if the last leadership had this epoch; 0: only if there was none. None: after any.

        Returns:
            The epoch; None: another member leads, or has just won.

        Raises:
            NotInSync: This member may not lead.
            OutdatedState: It is unknown which members may.
        """
        self._forget()
        reading = self._read()
        if reading.is_held or self._is_for_another(reading.state, candidate.folder):
            return None
        stored = reading.state
        if after is not None and after != (0 if stored is None else stored.epoch):
            return None
        self._session = secrets.token_hex(8)
        if stored is None:
            if not found:
                check_founder(self.cluster, candidate)
            floor = max(candidate.epoch, reading.floor)
            state = founded(self.cluster, candidate, self._session, self._first_epoch(floor, candidate))
        else:
            epoch = self._epoch_above(
                max(stored.epoch, candidate.epoch) if found else stored.epoch, candidate
            )
            state = stored.elected(candidate, self._session, epoch, is_confirmed=found)
        won = self._win(reading, state)
        if won is None:
            self._forget()
            return None
        self._led = won
        return won[0].epoch

    def renew(self) -> None:
        """Keep the lease. Raises LeadershipLost."""
        reading = self._leading(self._renew)
        if reading is not None:
            self._led = self._leading(lambda: self._own(reading, is_held=True))

    def read(self) -> Observation:
        """Return what the engine says now."""
        reading = self._read()
        return Observation(reading.state, reading.is_held)

    def replace(self, state: ClusterState, expected: ClusterState) -> None:
        """Replace the value of the own leadership.

        Raises:
            LeadershipLost: This process does not lead, or no longer.
            ValueChanged: The value is not the expected one.
            StateError: The new value is one of another leadership.
        """
        led, version = self._current()
        if led != expected:
            raise ValueChanged(f"the value of the cluster {self.cluster} is not the expected one")
        if (state.epoch, state.leader, state.session) != (led.epoch, led.leader, led.session):
            raise StateError("the epoch, the leader and the session of a value stay until the next election")
        self._led = self._leading(lambda: self._replaced(state, version))

    def wait_for_change(self, seen: Observation, timeout_s: float) -> Observation:
        """Wait until the engine says something else than before, for at most a time.

        Returns:
            What it says now; `seen` if nothing has changed, or after `close`.

        Raises:
            CoordinatorError: The engine did not answer.
        """
        until_s = self._clock() + timeout_s
        while True:
            found = self.read()
            left_s = until_s - self._clock()
            if found != seen or left_s <= 0 or self._ending.is_set():
                return found
            self._await_change(left_s)

    def resign(self, to: str | None = None) -> None:
        """Stop to lead, so that others need not wait for the end of the lease. Without leadership, nothing happens.

        Args:
            to: The member that is to lead next: for the lease's time, only it can win.

        Raises:
            StateError: The member is not in sync. This process leads as before.
        """
        if self._led is None:
            return
        if to is not None:
            state, _ = self._current()
            self.replace(state.handed_over(to), state)
        try:
            self._release()
        finally:
            self._forget()

    def close(self) -> None:
        """End the waiting of another thread, and close connections. The lease ends by itself; see `resign`."""
        self._ending.set()

    def _current(self) -> tuple[ClusterState, Any]:
        if self._led is None:
            raise LeadershipLost(f"this process does not lead the cluster {self.cluster}")
        return self._led

    def _leading(self, call: Callable[[], _T]) -> _T:
        """Make a call that needs the leadership; forget the leadership if it is lost."""
        self._current()
        try:
            return call()
        except LeadershipLost:
            self._forget()
            raise

    def _replaced(self, state: ClusterState, version: Any) -> tuple[ClusterState, Any]:
        """Write a value. An engine recognizes its own write if the answer was lost."""
        try:
            return state, self._write(state, version)
        except ValueChanged:
            # It was removed or put back, or an earlier request without an answer has changed it.
            self._led = self._own(self._read(), is_held=False)
            raise

    def _own(self, reading: Reading, *, is_held: bool) -> tuple[ClusterState, Any]:
        """Return the value of the own leadership; write it again if a reading has another one.

        That one was removed, or is an earlier one that was put back, as from a backup, in which members may be in sync
        that have missed messages since. Or an earlier request without an answer has written it, and is made again.

        Args:
            is_held: This process has just renewed its lease, so that no other member has won.
        """
        state, _ = self._current()
        found = reading.state
        if found == state:
            return state, reading.version
        is_earlier = found is not None and is_held and found.epoch < state.epoch
        if found is not None and found.session != self._session and not is_earlier:
            raise self._lost(f"{found.leader} leads epoch {found.epoch}")
        return state, self._write(state, reading.version)

    def _lost(self, reason: str) -> LeadershipLost:
        return LeadershipLost(f"this process no longer leads the cluster {self.cluster}: {reason}")

    def _forget(self) -> None:
        self._led, self._sent_s = None, None

    def _is_for_another(self, state: ClusterState | None, folder: str) -> bool:
        """Whether the last leader has handed over to another member, which has had less than the lease's time."""
        handed_over = (state.epoch, state.successor) if state is not None and state.successor else None
        if handed_over != self._handed_over:
            self._handed_over, self._handed_over_s = handed_over, self._clock()
        if handed_over is None or handed_over[1] == folder:
            return False
        return self._clock() - self._handed_over_s <= self.ttl_s

    def _first_epoch(self, floor: int, candidate: Candidate) -> int:
        """Return an epoch to begin with.

        Otherwise a cluster that begins anew, because its value was lost, would take members of the former one, whose
        epoch is low, too, for its own.
        """
        return floor + 1 + secrets.randbelow(_FIRST_EPOCHS)

    def _epoch_above(self, epoch: int, candidate: Candidate) -> int:
        """Return the next epoch.

        It is random: an engine whose data was put back to an earlier state would give the same one twice.
        """
        return epoch + 1 + secrets.randbelow(_NEXT_EPOCHS)

    @abstractmethod
    def _read(self) -> Reading:
        """Read the value, and whether the lease is held."""

    @abstractmethod
    def _win(self, reading: Reading, state: ClusterState) -> tuple[ClusterState, Any] | None:
        """Take the lease, if it is free, and write the value, if it is still the one of the reading; set `_sent_s`.

        Returns:
            The value and its version; None: another member was faster, and the lease is not held by this process.
        """

    @abstractmethod
    def _renew(self) -> Reading | None:
        """Renew the lease, and set `_sent_s` to a time before the request. Raises LeadershipLost.

        Returns:
            The value, if it was read, too.
        """

    @abstractmethod
    def _write(self, state: ClusterState, version: Any) -> Any:
        """Replace the value of a version, while this process leads, and return the new version.

        Raises:
            ValueChanged: It has another version, or this process does not lead.
        """

    @abstractmethod
    def _release(self) -> None:
        """Free the lease."""

    @abstractmethod
    def _await_change(self, timeout_s: float) -> None:
        """Wait until there may be a change, for at most a time, or until `_ending` is set."""
