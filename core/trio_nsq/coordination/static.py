"""A coordinator for two machines without an engine: a file in the data folder says who leads, and people change it.

There are no elections. If the leader's machine is lost, an administrator promotes the other member, and makes sure that
the old leader no longer runs: this cannot be checked here.
"""

from collections.abc import Sequence
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any

from ..platform.boot_clock import boot_time_s
from ..protocol.address import format_address
from ..storage import PRIVATE_MODE, ChangedMeanwhile, LocalStorage
from .interface import Clock, Coordinator, CoordinatorError, Observation, Reading, ValueChanged
from .state import Candidate, ClusterState, StateError, decode

STATE_FILE = "cluster-state.json"
_POLL_S = 1.0
_FOLDER_BITS = 16


class StaticCoordinator(Coordinator):
    """See `Coordinator`. The lease never ends.

    Each data folder has its own file, so the last bits of an epoch are a hash of the id of the leader's folder: two
    leaders that know nothing of each other have different epochs.

    Args:
        folder: The data folder, which this process has locked.
        cluster: The name of the cluster.
        peers: The addresses of the other members. Nothing is asked here: `learn` is told.

    Attributes:
        peers: See the argument.
    """

    def __init__(
        self, folder: Path, cluster: str, peers: Sequence[tuple[str, int]] = (), *, clock: Clock = boot_time_s
    ) -> None:
        shown = ",".join(format_address(*each) for each in peers)
        super().__init__(f"static:{shown}", cluster, inf, _POLL_S, clock)
        self.peers: tuple[tuple[str, int], ...] = tuple(peers)
        self._storage = LocalStorage(folder, PRIVATE_MODE)

    def campaign(self, candidate: Candidate, *, found: bool = False, after: int | None = None) -> int | None:
        state = self._read().state
        if not found and (state is None or candidate.folder not in (state.leader, state.successor)):
            self._forget()
            return None
        return super().campaign(candidate, found=found, after=after)

    def promote(self, candidate: Candidate) -> int:
        """Let this member lead, instead of the one that led before, and return its epoch.

        An administrator has confirmed that no other member leads, or has more messages.
        """
        epoch = self.campaign(candidate, found=True)
        if epoch is None:
            raise CoordinatorError(f"the file {self._shown_file()} was changed meanwhile")
        return epoch

    def learn(self, state: ClusterState) -> None:
        """Store the value of the leader that this member follows."""
        reading = self._read()
        if reading.state is not None and reading.state.epoch > state.epoch:
            raise StateError(
                f"epoch {state.epoch} is older than {reading.state.epoch} of {self._shown_file()}"
            )
        self._write(state, reading.version)

    def _first_epoch(self, floor: int, candidate: Candidate) -> int:
        return self._epoch_above(floor, candidate)

    def _epoch_above(self, epoch: int, candidate: Candidate) -> int:
        folder = int.from_bytes(blake2b(candidate.folder.encode(), digest_size=_FOLDER_BITS // 8).digest())
        return (((epoch >> _FOLDER_BITS) + 1) << _FOLDER_BITS) + folder

    def _shown_file(self) -> str:
        return self._storage.url_of(STATE_FILE)

    def _read(self) -> Reading:
        try:
            found = self._storage.read(STATE_FILE)
        except OSError as exc:
            raise CoordinatorError(f"{self._shown_file()} cannot be read: {exc.strerror}") from exc
        if found is None:
            return Reading(None, None, is_held=False)
        return Reading(decode(found.data), found.version, is_held=False)

    def read(self) -> Observation:
        """Return what the file says. The lease is always held: there are no elections."""
        return super().read()._replace(is_held=True)

    def _win(self, reading: Reading, state: ClusterState) -> tuple[ClusterState, Any] | None:
        try:
            version = self._write(state, reading.version)
        except ValueChanged:
            return None
        self._sent_s = self._clock()
        return state, version

    def _renew(self) -> Reading | None:
        return self._read()

    def _write(self, state: ClusterState, version: Any) -> Any:
        try:
            return self._storage.replace(STATE_FILE, state.encode(), version)
        except ChangedMeanwhile as exc:
            raise ValueChanged("the value was changed meanwhile") from exc
        except OSError as exc:
            raise CoordinatorError(f"{self._shown_file()} cannot be written: {exc.strerror}") from exc

    def _release(self) -> None:
        """Do nothing: this member leads again after a restart, unless it has handed over."""

    def _await_change(self, timeout_s: float) -> None:
        self._ending.wait(min(_POLL_S, timeout_s))
