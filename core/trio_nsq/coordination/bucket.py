"""A coordinator in an object store: the lease is an object (`ObjectLease`), and the value is another one.

`CLUSTER/leader`   the lease
`CLUSTER/state`    the value, see `ClusterState`

Both are only written on the condition that they are still the version that was read. So a former leader cannot change
the value after the next one has won.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..platform.boot_clock import boot_time_s
from ..storage import ChangedMeanwhile, LeaseLost, Storage, StorageError
from ..storage.lease import RENEW_S, ObjectLease, check_conditions
from .interface import Clock, Coordinator, CoordinatorError, Reading, ValueChanged
from .state import ClusterState, decode

TTL_S = 13.0
"""Shorter than the lease of an export, which may last: a failover takes a second or two more than this."""
_POLL_S = 1.0
_PROMPT_S = 1.0


class BucketCoordinator(Coordinator):
    """See `Coordinator`.

    Args:
        storage: A place in an object store.
        cluster: The name of the cluster.
        ttl_s: The time of the lease.
        poll_s: How often `wait_for_change` reads.
    """

    def __init__(
        self,
        storage: Storage,
        cluster: str,
        *,
        ttl_s: float = TTL_S,
        renew_every_s: float = RENEW_S,
        poll_s: float = _POLL_S,
        clock: Clock = boot_time_s,
    ) -> None:
        super().__init__(storage.shown, cluster, ttl_s, renew_every_s, clock)
        self._storage = storage
        self._poll_s = poll_s
        self._lease_name, self._state_name = f"{cluster}/leader", f"{cluster}/state"
        self._lease = ObjectLease(storage, self._lease_name, ttl_s, clock)
        self._is_checked = False

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Convert errors of the storage."""
        try:
            yield
        except StorageError as exc:
            raise CoordinatorError(str(exc)) from exc

    def _read(self) -> Reading:
        with self._failures():
            # A leader finds itself; `find_holder` is for the others, and remembers what they have seen.
            is_held = self._led is not None or self._lease.find_holder() is not None
            found = self._storage.read(self._state_name)
        if found is None:
            return Reading(None, None, is_held)
        return Reading(decode(found.data), found.version, is_held)

    def _win(self, reading: Reading, state: ClusterState) -> tuple[ClusterState, Any] | None:
        with self._failures():
            if not self._lease.take():
                return None
            try:
                if not self._is_checked:
                    check_conditions(self._storage, self._lease_name)
                    self._is_checked = True
                version = self._storage.replace(self._state_name, state.encode(), reading.version)
            except ChangedMeanwhile:
                self._lease.free()
                return None
        self._sent_s = self._lease.sent_s
        return state, version

    def _renew(self) -> Reading | None:
        with self._failures():
            try:
                self._lease.renew()
            except LeaseLost as exc:
                raise self._lost("another process has taken the lease") from exc
        self._sent_s = self._lease.sent_s
        # To read the value is not urgent: in a slow store, it would delay the next renewal.
        return self._read() if self._clock() - self._sent_s < _PROMPT_S else None

    def _write(self, state: ClusterState, version: Any) -> Any:
        with self._failures():
            try:
                return self._storage.replace(self._state_name, state.encode(), version)
            except ChangedMeanwhile as exc:
                raise ValueChanged("the value was changed meanwhile") from exc

    def _release(self) -> None:
        with self._failures():
            self._lease.free()

    def _await_change(self, timeout_s: float) -> None:
        self._ending.wait(min(self._poll_s, timeout_s))
