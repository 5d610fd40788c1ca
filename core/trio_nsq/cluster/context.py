"""What the two roles of a member share."""

import json
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from ..access.secret import Secret
from ..broker.storage.data_folder import RESERVE_FILE
from ..broker.storage.disk_reserve import RESERVE_BYTES, can_allocate, probe_beside
from ..coordination.interface import Coordinator, CoordinatorError, LeadershipLost, Observation
from ..coordination.state import Candidate, ClusterState, StateError
from ..log import Files
from ..platform.boot_clock import boot_time_s
from ..replication.earlier import DivergedFolder, diverged_folders, diverged_names
from ..replication.follower import INSTANCE
from .membership import Membership
from .options import ClusterOptions

_T = TypeVar("_T")

RETRY_S: Final = 1.0
"""The pause before a coordinator that does not answer is asked again."""
OPENING_S: Final = 600.0
"""A member that does not open its folder in this time loses its lease."""
_MEASURE_S: Final = 1.0
WAIT_S: Final = 5.0
"""The longest wait for a change at the coordinator."""


class MemberContext:
    """The member, its data folder, and its coordinator.

    Args:
        options: Of the member.
        coordinator: Nothing else uses it.
        files, path: The data folder, which this process has locked.
        membership: What the folder says.
        is_saved: Whether that is already in the folder.
        addresses: Where this member is reached, as URLs.
        record_bytes: No record of a segment is larger, see `Replica`.
        secret, tls: For connections to other members; without `tls` they are in plain text.

    Attributes:
        state: What the coordinator said last; None: nothing.
        coordinator_error: Why it did not answer last; empty: it did.
        times_led: How often this member became the leader, since its start.
        times_full: How often it has let another member lead because its disk was full.
        led_position: The last operation when this process led last; 0: it did not.
        diverged: What catch-ups have kept in the data folder.
        free_bytes: How much of its disk is free; None: unknown. 0 after a disk that was full, until it can be written.
    """

    def __init__(
        self,
        options: ClusterOptions,
        coordinator: Coordinator,
        files: Files,
        path: Path,
        membership: Membership,
        *,
        is_saved: bool,
        addresses: tuple[str, ...],
        record_bytes: int,
        secret: Secret,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.options = options
        self.coordinator = coordinator
        self.files = files
        self.path = path
        self.membership: Membership = membership
        self.addresses = addresses
        self.record_bytes = record_bytes
        self.secret = secret
        self.tls = tls
        self.state: ClusterState | None = None
        self.coordinator_error = ""
        self.times_led = self.times_full = 0
        self.free_bytes: int | None = None
        self.was_full: bool = False
        self.led_position = 0
        self.diverged: list[DivergedFolder] = []
        self._diverged_names: list[str] = []
        self.is_saved: bool = is_saved
        self._limiter = trio.CapacityLimiter(1)
        self._calls = threading.Lock()  # held during each call of the coordinator
        self._opened = threading.Event()

    @property
    def folder(self) -> str:
        """The id of the data folder."""
        return self.membership.folder

    @property
    def candidate(self) -> Candidate:
        """This member as one that would lead."""
        about = self.membership
        return Candidate(self.folder, self.addresses, about.epoch, about.instances, about.cluster_id)

    @property
    def led_id(self) -> str:
        """The id of the cluster that this member leads; of the one that it was in, if it leads none."""
        led = self.coordinator.led
        return (led.id if led is not None else "") or self.membership.cluster_id

    def save(self, **changes: Any) -> None:
        """Change what the folder says about the member, durably; in any thread. Raises OSError."""
        instances = self.membership.instances
        if INSTANCE not in instances:
            changes = {"instances": (*instances, INSTANCE), **changes}
        changed = replace(self.membership, **changes)
        if changed != self.membership or not self.is_saved:
            changed.save(self.files, self.path)
            self.membership, self.is_saved = changed, True

    async def measure(self) -> None:
        """Keep `free_bytes` and `diverged` up to date; runs until cancelled."""
        while True:
            await trio.to_thread.run_sync(self._measure, abandon_on_cancel=True)
            await trio.sleep(_MEASURE_S)

    def _measure(self) -> None:
        self.free_bytes = self._free_bytes()
        with suppress(OSError):
            if (names := diverged_names(self.path)) != self._diverged_names:
                self.diverged, self._diverged_names = diverged_folders(self.path), names

    def _free_bytes(self) -> int | None:
        try:
            free_bytes = self.files.space(self.path).free_bytes
        except OSError:
            return None
        if self.was_full:  # a quota does not show in the free space
            probe = probe_beside(self.path / RESERVE_FILE)
            self.was_full = not can_allocate(self.files, probe, RESERVE_BYTES)
        return 0 if self.was_full else free_bytes

    def learn(self, state: ClusterState) -> None:
        """Save what the coordinator says about this member, durably; in any thread. Raises OSError."""
        epoch, instances = max(state.epoch, self.membership.epoch), self.membership.instances
        if (recorded := state.instances.get(self.folder)) in instances:
            # Earlier ones are not needed any more; the present one is recorded later.
            instances = tuple(dict.fromkeys((recorded, INSTANCE)))
        changes = {
            "epoch": epoch,
            "instances": instances,
            "cluster_id": self.membership.cluster_id or state.id,
        }
        if any(getattr(self.membership, name) != value for name, value in changes.items()):
            self.save(**changes)

    async def ask(self, call: Callable[..., _T], *args: Any, **named: Any) -> _T:
        """Call the coordinator in a thread, one call at a time. A cancellation waits for the answer."""

        def ask() -> _T:
            with self._calls:
                return call(*args, **named)

        return await trio.to_thread.run_sync(ask, limiter=self._limiter)

    def keep_lease(self) -> None:
        """Renew the lease in a thread until `end_keeping`: the event loop opens many topics, which may take long."""
        self._opened = opened = threading.Event()
        coordinator, until_s = self.coordinator, boot_time_s() + OPENING_S

        def renew() -> None:
            while not opened.wait(coordinator.renew_every_s) and boot_time_s() < until_s:
                with self._calls:
                    try:
                        if not opened.is_set():
                            coordinator.renew()
                    except LeadershipLost:
                        return  # the next call of the leader finds out, too
                    except (CoordinatorError, StateError):
                        pass  # it is tried again

        threading.Thread(target=renew, name="trio_nsq lease", daemon=True).start()

    def end_keeping(self) -> None:
        """End the thread of `keep_lease`, if there is one."""
        self._opened.set()

    async def wait_for_change(self, seen: Observation | None) -> Observation:
        """Return what the coordinator says when it has changed, or after some seconds; at once without `seen`.

        After a cancellation the coordinator may only be closed.
        """
        coordinator = self.coordinator
        if seen is None:
            return await self.ask(coordinator.read)
        wait = partial(coordinator.wait_for_change, seen, min(WAIT_S, coordinator.renew_every_s))
        return await trio.to_thread.run_sync(wait, limiter=self._limiter, abandon_on_cancel=True)


def about_member(
    context: MemberContext, role: str, epoch: int, leader: str | None, leader_addresses: Sequence[str]
) -> dict[str, Any]:
    """Return what `GET /cluster/member` answers, of a leader; a follower changes some of it."""
    return {
        "cluster": context.membership.cluster,
        "id": context.folder,
        "role": role,
        "epoch": epoch,
        "leader": leader,
        "leader_addresses": list(leader_addresses),
        "addresses": list(context.addresses),
        "is_copy": context.membership.is_copy,
        "diverged": [each._asdict() for each in context.diverged],
        "is_following": False,
        "in_sync": False,
        "position": 0,
        "reason": "",
        "coordinator": context.coordinator.shown,
        "coordinator_error": context.coordinator_error,
        "state": None if context.state is None else json.loads(context.state.encode()),
    }
