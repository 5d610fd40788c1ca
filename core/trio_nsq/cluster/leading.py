"""A member as the leader: it keeps its lease, and records which followers are in sync."""

import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Final

import trio

from ..archive.writer import ArchiveStatus
from ..broker.errors import ClusterRefusal
from ..broker.replication import FollowerStatus, Replication
from ..broker.storage.disk_reserve import StorageFailure
from ..coordination.interface import CoordinatorError, LeadershipLost
from ..coordination.state import ClusterState, RecordedArchive, StateError
from ..coordination.static import StaticCoordinator
from ..platform.boot_clock import boot_time_s
from ..replication.journal import Position
from ..replication.replica import Replica, ReplicaError
from ..replication.stream import FormerOperations
from ..storage import canonical_place
from .context import RETRY_S, MemberContext, about_member
from .room import FailingDisk, with_room

logger: logging.Logger = logging.getLogger("trio_nsq.cluster")

MARGIN_S: Final = 2.0
"""The leader stops this long before its leadership is no longer certain: a slow member of etcd may end leases early."""
_CHECK_S: Final = 0.5
_FIGURES: Final = {"since": "since_s"} | {
    name: name
    for name in (
        *("lag_operations", "lag_bytes", "lag_s", "ok_wait_s", "is_slow"),
        *("copied_bytes", "copy_bytes", "free_bytes"),
    )
}
"""What `GET /cluster` tells of a connected follower, and the attributes of `FollowerStatus`."""
LATE_S: Final = 10.0
"""No member is restored from an archive that lacks what is so old."""
_HUNG_S: Final = 5.0
"""A leader whose disk has not answered for this time does not renew its lease."""


class Leading:
    """One time as the leader.

    Args:
        context: The member, which has just been elected.
        epoch: The number of this leadership.
        operations: See `Replication`.

    Attributes:
        has_served: Set by the caller when the broker serves clients.
        replication: For the broker.
    """

    def __init__(
        self, context: MemberContext, epoch: int, operations: FormerOperations | None = None
    ) -> None:
        self.epoch = epoch
        self.has_served = False
        self.since_s: int = int(time.time())
        self.replication: Replication = Replication(
            context.path,
            context.membership.cluster,
            context.folder,
            epoch,
            record=self._record,
            certain_until=self._certain_until_s,
            min_in_sync=context.options.min_in_sync,
            operations=operations,
            expected=context.state.followers_besides(context.folder)
            if context.state is not None
            else frozenset(),
            catch_up_bytes_per_s=context.options.catch_up_rate,
            former=context.state.in_sync_besides(context.folder) if context.state is not None else (),
        )
        self.replication.control = self
        self._context = context
        context.times_led += 1
        self._renew_now = trio.Event()
        self._successor: str | None = None
        self._serving = trio.CancelScope()
        self._lost = ""
        self._is_replaceable = False  # perhaps recorded at the coordinator

    async def run(self, serve: Callable[[], Awaitable[None]]) -> None:
        """Lead until cancelled, told to stop, or no longer certain to lead. Then another member may.

        Args:
            serve: Runs the broker until it is cancelled.
        """
        async with trio.open_nursery() as nursery:
            keeping: trio.CancelScope = await nursery.start(self._keep_lease)
            nursery.start_soon(self._watch_fence)
            nursery.start_soon(self._watch_time)
            nursery.start_soon(self._watch_room)
            if self._context.options.restore_from:
                nursery.start_soon(self._watch_archive)
            is_stopped = False
            try:
                with self._serving:
                    await serve()
                is_stopped = True
            except trio.Cancelled:
                is_stopped = True
                raise
            finally:
                self._context.led_position = self.replication.operations.last_number
                self._context.end_keeping()
                keeping.cancel()
                with trio.CancelScope(shield=True):
                    if is_stopped and self.has_served and not self.replication.fenced_because:
                        await trio.to_thread.run_sync(self._keep_place)
                    await self._resign()
            nursery.cancel_scope.cancel()

    def _keep_place(self) -> None:
        """Write durably where the folder is, so that this member, as a follower, goes on from there.

        The broker has stopped in good order: all that it has recorded is on stable storage.
        """
        context, replication = self._context, self.replication
        if not replication.files.is_exact:
            return
        replica = Replica(context.files, context.path)
        try:
            replica.begin(Position(self.epoch, replication.operations.last_number))
        except ReplicaError as exc:
            logger.warning("this member will have to catch up: %s", exc)
        finally:
            replica.close()

    async def _watch_fence(self) -> None:
        await self.replication.until_fenced()
        self._lose(self.replication.fenced_because)

    async def _watch_time(self) -> None:
        """Stop to lead before another member can; also while a request to the coordinator takes long."""
        while boot_time_s() < (self._certain_until_s() or 0.0):
            await trio.sleep(_CHECK_S)
        self._lose("the coordinator does not answer, and members in sync are not connected")

    async def _watch_room(self) -> None:
        """If the disk is full or fails, let a member that has room lead. Then this one follows when it can."""
        context, replication = self._context, self.replication
        disk = FailingDisk(context.times_full)
        while True:
            await trio.sleep(_CHECK_S)
            failure = replication.storage_failure
            if not disk.look(_CHECK_S, fails=failure is not None) or failure is None:
                continue
            successor, kept = self._with_room(failure)
            if successor is not None:
                logger.warning("the member %s, which has room, shall lead: %s", successor, failure.reason)
                context.was_full, context.times_full = True, context.times_full + 1
                self._hand_over(successor)
                return
            if kept != replication.keeps_leading_because:
                logger.warning("%s: %s", kept, failure.reason)
                replication.keeps_leading_because = kept

    async def _watch_archive(self) -> None:
        """Record whether the archive has all but the last seconds, so that a member may be restored from it.

        From before it is recorded until it certainly no longer is, this member needs its lease to acknowledge.
        """
        recorded: bool | None = False  # None: unknown
        while True:
            status = self.replication.archive()
            is_current = status is not None and status.state == "archiving" and status.lag_s < LATE_S
            if is_current != recorded:
                recorded, self._is_replaceable = None, True
                if await self._record_archive(status, is_current=is_current):
                    recorded = self._is_replaceable = is_current
            await trio.sleep(_CHECK_S)

    async def _record_archive(self, status: ArchiveStatus | None, *, is_current: bool) -> bool:
        """Record whether a member may be restored; returns False if it is unknown whether that is done."""
        archive, recorded = canonical_place(self._context.options.restore_from), None
        if status is not None and is_current:
            recorded = RecordedArchive(archive, status.owner)
        try:
            await self._change(lambda state: state.archived(recorded))
        except (CoordinatorError, StateError) as exc:
            logger.warning("cannot record whether a member may be restored from %s: %s", archive, exc)
            return False
        if is_current:
            logger.info(
                "if this member is lost while it is alone in sync, another one is restored from %s", archive
            )
        else:
            logger.warning("no member may be restored from %s: it is behind", archive)
        return True

    def _with_room(self, failure: StorageFailure) -> tuple[str | None, str]:
        """Return the member that can lead instead of this one; otherwise why there is none."""
        if isinstance(self._context.coordinator, StaticCoordinator):
            return None, "without an engine, no other member leads by itself"
        least = self._context.options.min_in_sync
        own_bytes = (self._context.free_bytes or 0) if failure.is_full else 0  # no use if the disk fails
        found = with_room(self.replication.followers(), self._able, least, own_bytes)
        return found, "too few other members are in sync and have room, so this one goes on to lead"

    async def _resign(self) -> None:
        """Free the lease, also one that this member could not renew; nothing is served any longer."""
        context = self._context
        coordinator = context.coordinator
        for successor in dict.fromkeys((None if self._lost else self._successor, None)):
            try:
                await context.ask(coordinator.resign, successor)
            except (CoordinatorError, StateError) as exc:
                logger.warning("another member can lead when the lease is over: %s", exc)
            if coordinator.led is None:
                return

    # ------------------------------------------------------------------ the lease

    async def _keep_lease(self, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        """Renew the lease, also while the broker stops, until it is lost."""
        coordinator = self._context.coordinator
        pause_s = coordinator.renew_every_s
        with trio.CancelScope(shield=True) as scope:
            task_status.started(scope)
            while not self._lost:
                with trio.move_on_after(pause_s):
                    await self._renew_now.wait()
                self._renew_now = trio.Event()
                pause_s = coordinator.renew_every_s
                if (hung_s := self.replication.files.hung_s) < _HUNG_S:
                    try:
                        await self._context.ask(coordinator.renew)
                    except LeadershipLost as exc:
                        self._lose(str(exc))
                        return
                    except (CoordinatorError, StateError) as exc:
                        self._report(str(exc))
                        pause_s = RETRY_S
                    else:
                        self._report("")
                else:
                    self._report(f"the disk of {self._context.path} has not answered for {hung_s:.0f} s")
                    pause_s = RETRY_S
                    if boot_time_s() >= (coordinator.certain_until_s or 0.0) - MARGIN_S:
                        self._lose("its disk does not answer")

    def _certain_until_s(self) -> float | None:
        """Return until when this member leads for certain; infinite as long as the followers in sync stay connected.

        Only a member in sync can be elected, and none that follows this one tries. So the lease matters only if one of
        them is not connected, or if this member is alone, and another one may be restored from the archive.
        """
        replication = self.replication
        if replication.has_all_connected and not (self._is_replaceable and replication.is_alone):
            return math.inf
        until_s = self._context.coordinator.certain_until_s
        return None if until_s is None else until_s - MARGIN_S

    def _lose(self, reason: str) -> None:
        if not self._lost:
            self._lost = reason
            self.replication.fence(reason)  # logs it
            self._serving.cancel()

    def _report(self, error: str) -> None:
        if error and error != self._context.coordinator_error:
            logger.warning("cannot renew the lease: %s", error)
        elif not error and self._context.coordinator_error:
            logger.info("the lease is renewed again")
        self._context.coordinator_error = error

    # ------------------------------------------------------------------ the members

    async def _record(self, followers: frozenset[str]) -> None:
        """Record which followers are in sync, with their addresses."""
        await self._change(lambda state: self._with_in_sync(state, followers))

    def _with_in_sync(self, state: ClusterState, followers: frozenset[str]) -> ClusterState:
        # First: one that is gone may be replaced by one that joins.
        for member in state.in_sync - followers - {state.leader}:
            state = state.unsynced(member)
        for follower in self.replication.followers():
            if follower.member in followers:
                state = state.joined(follower.member, follower.addresses)
                state = state.synced(follower.member, follower.instance)
        return state

    async def _change(self, change: Callable[[ClusterState], ClusterState]) -> None:
        """Change the value at the coordinator. Raises CoordinatorError, StateError."""
        coordinator = self._context.coordinator

        def write() -> None:
            if (state := coordinator.led) is None:
                raise LeadershipLost("this member no longer leads")
            if (changed := change(state)) != state:
                coordinator.replace(changed, state)

        try:
            await self._context.ask(write)
        except LeadershipLost:
            self._renew_now.set()
            raise
        self._context.state = coordinator.led

    # ------------------------------------------------------------------ for the API

    @property
    def times_led(self) -> int:
        """See `ClusterControl`."""
        return self._context.times_led

    def status(self) -> dict[str, Any]:
        """See `ClusterControl`."""
        context, replication = self._context, self.replication
        archive = replication.archive()
        state = context.coordinator.led or context.state
        followers = {each.member: each for each in replication.followers()}
        addresses = dict(state.members) if state is not None else {}
        addresses |= {member: each.addresses for member, each in followers.items()}
        members: list[dict[str, Any]] = []
        for member in sorted(addresses.keys() | {context.folder}):
            about: dict[str, Any] = {
                "id": member,
                "addresses": list(addresses.get(member, context.addresses)),
            }
            each = followers.get(member)
            if member == context.folder:
                about |= {"state": "leading", "in_sync": True, "since": self.since_s}
                about["free_bytes"] = context.free_bytes
            else:
                about["in_sync"] = member in replication.in_sync
                about["state"] = each.state if each is not None else "disconnected"
            figures = each or FollowerStatus(member, (), "", "catching up")
            members.append({name: getattr(figures, field) for name, field in _FIGURES.items()} | about)
        return {
            "cluster": context.membership.cluster,
            "epoch": self.epoch,
            "leader": context.folder,
            "since": self.since_s,
            "coordinator": context.coordinator.shown,
            "coordinator_error": context.coordinator_error,
            "min_in_sync": context.options.min_in_sync,
            "refuses_because": replication.refuses_because,
            "members": members,
        } | ({} if archive is None else {"archive": asdict(archive)})

    def member(self) -> dict[str, Any]:
        """See `ClusterControl`."""
        context = self._context
        return about_member(context, "leader", self.epoch, context.folder, context.addresses) | {
            "in_sync": True,
            "position": self.replication.operations.last_number,
            "reason": context.coordinator_error,
        }

    def switch(self, to: str = "") -> str:
        """See `ClusterControl`."""
        in_sync = self._able
        if to and to not in in_sync:
            raise ClusterRefusal(f"the member {to[:64]} is not connected and in sync")
        if not in_sync:
            raise ClusterRefusal("no other member is connected and in sync")
        successor = to or min(in_sync)
        logger.info("the member %s shall lead", successor)
        self._hand_over(successor)
        return successor

    def _hand_over(self, to: str) -> None:
        self._successor = to
        self._serving.cancel()

    @property
    def _able(self) -> frozenset[str]:
        """The followers that could be elected, and follow now."""
        return self.replication.in_sync & self.replication.connected

    async def remove(self, member: str) -> None:
        """See `ClusterControl`."""
        if member in self.replication.connected:
            raise ClusterRefusal(f"the member {member[:64]} is connected: stop it first")
        try:
            await self._change(lambda state: state.removed(member))
        except StateError as exc:
            raise ClusterRefusal(str(exc)) from exc
