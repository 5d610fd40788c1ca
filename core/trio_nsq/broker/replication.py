"""A broker as the leader of a cluster: its file operations, and the followers that its OKs wait for.

Where the next leader is elected, it is recorded which followers are in sync: only they may win. So these are always
among those that OKs wait for: a follower is waited for before it is recorded, until it is recorded no longer. Nothing
is acknowledged before the followers of the leader before are recorded no longer.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import trio

from ..event_loop.reactor import Poller
from ..lookup.protocol import Leadership
from ..protocol.errors import NSQError
from ..replication.barrier import ReplicationBarrier
from ..replication.leader import Follower, Leader
from ..replication.recorder import RecordingFiles
from ..replication.stream import FormerOperations, OperationStream
from ..text.wording import is_or_are
from .cluster_control import ClusterControl
from .errors import NotLeading
from .slow_followers import SlowFollowers
from .storage.disk_reserve import StorageFailure

if TYPE_CHECKING:
    from ..archive.writer import ArchiveStatus

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_KEPT_BYTES: Final = 256 * 1024 * 1024
_STALL_S: Final = 3.0
_MOST_LAG_S: Final = 10.0
_PAUSE_S: Final = 5.0
_RETRY_S: Final = 0.5
_STOP_S: Final = 10.0
_STOP_STEPS: Final = 50
_JOIN_S: Final = 3.0
_EARLIER: Final = ""
"""Stands for the followers that are recorded from the leader before; no member has this id."""


async def record_nothing(members: frozenset[str]) -> None:
    """Record nowhere: there is no election."""


@dataclass(frozen=True, slots=True)
class FollowerStatus:
    """A connected follower, for people.

    Attributes:
        member: The id of its data folder.
        addresses: Where it is reached, as URLs.
        instance: The name of its process.
        state: `in sync`: it has all that was acknowledged; `catching up`.
        since_s: When it got into this state, Unix seconds.
        lag_operations, lag_bytes, lag_s: What it has not stored yet, and the age of the oldest of it.
        free_bytes: See `Follower`.
        ok_wait_s: In what time it stores operations, about; OKs wait for that.
        is_slow: It takes long.
        copied_bytes, copy_bytes: Of the leader's files, while it catches up: those that it has, and all.
    """

    member: str
    addresses: tuple[str, ...]
    instance: str
    state: Literal["in sync", "catching up"]
    since_s: int = 0
    lag_operations: int = 0
    lag_bytes: int = 0
    lag_s: float = 0.0
    free_bytes: int | None = None
    ok_wait_s: float = 0.0
    is_slow: bool = False
    copied_bytes: int = 0
    copy_bytes: int = 0


class Replication:
    """Records the operations of a broker's data folder, and serves its followers. For one run of `serve`.

    Args:
        data_path: The data folder, as in `BrokerOptions`.
        cluster: The name of the cluster.
        member: The id of the data folder.
        epoch: The number of this leadership, higher than all before.
        record: Records which followers are in sync. When it returns, that is certain; after an NSQError it is
            unknown, and `record` is called again. It is cancelled when this member no longer leads.
        certain_until: Returns the time of `boot_time_s` until which no other member can lead, as
            `Coordinator.certain_until_s`; None: this member does not lead. Without it, only `fence` ends the
            leadership.
        min_in_sync: Publishes are refused while fewer members than this, with this one, are in sync. What is written
            already waits.
        kept_bytes: Memory for operations that a slow follower lacks; one that lacks older ones catches up anew.
        stall_s: A follower that stores nothing for this time, although there is something, is disconnected.
        most_lag_s: So is a follower that lacks an operation for longer than this.
        pause_s: How long a follower is not waited for after that; each time twice as long.
        catch_up_bytes_per_s: How fast this folder is read for a follower that catches up; 0: no limit.
        stop_s: How long a stop waits for followers. After that, this member no longer leads.
        expected: The followers of the leader before, which probably live: for `join_s`, nothing is acknowledged before
            they have caught up, so that this member is not the only one with new messages.
        join_s: See above.
        operations: What this member knows of the operations of the leader before, which it followed: other followers
            of that one go on from there.
        former: The addresses, as URLs, of the members one of which led before: discovery services may still list it.
            Not those of all members: one that was lost long ago may have left its address to a broker that is none.

    Attributes:
        files: The file layer of the broker.
        operations: What it has recorded.
        members: The followers that OKs wait for.
        min_in_sync: See above.
        leadership: Identifies it.
        former: See above.
        control: Answers requests about the cluster; None: the caller does not.
        left_count: The followers that had all that was acknowledged, and left.
        archive: Returns how far the archive is; None: there is none.
        keeps_leading_because: Why this member leads although its disk is full or fails; empty: no reason is needed.
    """

    def __init__(
        self,
        data_path: Path,
        cluster: str,
        member: str,
        epoch: int,
        *,
        record: Callable[[frozenset[str]], Awaitable[None]] = record_nothing,
        certain_until: Callable[[], float | None] = lambda: inf,
        min_in_sync: int = 1,
        kept_bytes: int = _KEPT_BYTES,
        stall_s: float = _STALL_S,
        most_lag_s: float = _MOST_LAG_S,
        pause_s: float = _PAUSE_S,
        catch_up_bytes_per_s: int = 0,
        stop_s: float = _STOP_S,
        operations: FormerOperations | None = None,
        expected: frozenset[str] = frozenset(),
        join_s: float = _JOIN_S,
        former: Iterable[str] = (),
    ) -> None:
        self.operations: OperationStream = OperationStream(kept_bytes, operations)
        self.files: RecordingFiles = RecordingFiles(data_path, self.operations)
        self.members: ReplicationBarrier[Any] = ReplicationBarrier[Any](
            self.operations, self._end_leading, certain_until
        )
        self.leadership: Leadership = Leadership(cluster, member, epoch)
        self.former: tuple[str, ...] = tuple(former)
        self.control: ClusterControl | None = None
        self.left_count: int = 0
        self.archive: Callable[[], ArchiveStatus | None] = lambda: None
        self.keeps_leading_because = ""
        self._storage_failure: Callable[[], StorageFailure | None] = lambda: None
        self.min_in_sync = min_in_sync
        self._record = record
        self._expected = expected
        self._join_s = join_s
        self._slow = SlowFollowers(stall_s, most_lag_s, pause_s)
        self._look_s = min(stall_s, most_lag_s) / 4
        self._now_s = (
            0.0  # a clock that stands still while the event loop is held up: followers are not slow then
        )
        self._catch_up_bytes_per_s = catch_up_bytes_per_s
        self._stop_s = stop_s
        self._on_fenced: Callable[[NotLeading], None] = lambda error: None
        self._fenced = trio.Event()
        self._leader: Leader | None = None
        self._present: dict[str, Follower] = {}  # those connected that have all that was acknowledged
        # Those that OKs wait for, and that may lack what was acknowledged before: the operation that they must have.
        self._joining: dict[Follower, int] = {}
        self._recorded: frozenset[str] | None = None  # None: unknown
        self._surely_recorded = frozenset[str]()  # at least these are
        self._changed = trio.Event()
        self._is_stopping = self._lacks_members = False

    def begin(
        self,
        poller: Poller,
        on_fenced: Callable[[NotLeading], None],
        storage_failure: Callable[[], StorageFailure | None] = lambda: None,
    ) -> None:
        """Serve followers; those that have caught up are members that OKs wait for.

        Args:
            poller: Sends operations, and reads what is stored.
            on_fenced: Called once, when this member no longer leads, or now.
            storage_failure: Returns why messages cannot be stored on this disk; None: they can.
        """
        self._storage_failure = storage_failure
        self.members.add(_EARLIER, 0)
        self._hold()
        about = self.leadership
        self._leader = Leader(
            *(about.name, about.member, about.epoch, self.files, self.operations, poller, self._progress),
            catch_up_bytes_per_s=self._catch_up_bytes_per_s,
        )
        self._on_fenced = on_fenced
        if self.members.fenced_because:
            self._end_leading()

    def fence(self, reason: str) -> None:
        """End the leadership: from now on, nothing is acknowledged, committed, delivered or changed.

        Call it in the event loop, and cancel `serve`. The broker also fences itself, if the leadership may have ended
        by time.
        """
        self.members.fence(reason)

    @property
    def fenced_because(self) -> str:
        """Why this member no longer leads; empty while it does."""
        return self.members.fenced_because

    @property
    def storage_failure(self) -> StorageFailure | None:
        """Why messages cannot be stored on this disk; None: they can."""
        return self._storage_failure()

    @property
    def refuses_because(self) -> str:
        """Why publishes are refused; empty if they are not."""
        return self.fenced_because or self.members.held_because

    async def until_fenced(self) -> None:
        """Return when this member no longer leads."""
        await self._fenced.wait()

    def _end_leading(self) -> None:
        logger.warning("this member no longer leads: %s", self.fenced_because)
        self.end()
        self._fenced.set()
        self._on_fenced(NotLeading(self.fenced_because))

    def end(self) -> None:
        """Serve no follower any longer."""
        leader, self._leader = self._leader, None
        for follower in list(leader.followers.values()) if leader is not None else ():
            follower.disconnect()

    def disconnect(self, member: str) -> None:
        """End the connection of a follower, if there is one."""
        if self._leader is not None and (follower := self._leader.followers.get(member)) is not None:
            follower.disconnect()

    async def accept(self, stream: trio.abc.Stream) -> None:
        """Serve a follower until its connection ends. Closes the stream."""
        if self._leader is None:
            await stream.aclose()
        else:
            await self._leader.serve(stream)

    @property
    def in_sync(self) -> frozenset[str]:
        """The followers that are recorded as in sync, as far as known."""
        return self._recorded or frozenset()

    @property
    def is_alone(self) -> bool:
        """Whether this member is perhaps the only one that is recorded as in sync."""
        return not self._surely_recorded

    @property
    def waited_for(self) -> frozenset[str]:
        """The followers that OKs wait for."""
        return frozenset(self.members.stored) - {_EARLIER}

    @property
    def has_all_connected(self) -> bool:
        """Whether every member that is perhaps recorded as in sync is connected, or there is none."""
        return self.members.stored.keys() <= self._present.keys()

    @property
    def connected(self) -> frozenset[str]:
        """The followers that are connected, and have all that was acknowledged."""
        return frozenset(self._present)

    @property
    def catch_up_count(self) -> int:
        """How often a follower began to copy the folder."""
        return self._leader.catch_up_count if self._leader is not None else 0

    def followers(self) -> tuple[FollowerStatus, ...]:
        """Return the connected followers. Any thread may ask."""
        followers = list(self._leader.followers.values()) if self._leader is not None else ()
        return tuple(
            FollowerStatus(
                each.member,
                each.addresses,
                each.instance,
                "in sync" if self._present.get(each.member) is each else "catching up",
                each.since_s,
                lag_operations=self.operations.last_number - each.stored,
                lag_bytes=self.operations.bytes_after(each.stored),
                lag_s=self._slow.ages.age_s(self._now_s, each.stored),
                free_bytes=each.free_bytes,
                ok_wait_s=self._slow.answer_s(each),
                is_slow=self._slow.is_slow(each),
                copied_bytes=each.copy.done_bytes if each.copy is not None else 0,
                copy_bytes=max(each.copy.total_bytes, each.copy.done_bytes) if each.copy is not None else 0,
            )
            for each in followers
        )

    def _progress(self, follower: Follower) -> None:
        member, stored, members = follower.member, follower.stored, self.members
        if not follower.is_connected:
            self._joining.pop(follower, None)
            if self._present.get(member) is follower:
                del self._present[member]
                self.left_count += 1
                self._hold()
            self._changed.set()
        elif self._present.get(member) is follower:
            members.store(member, stored)
        elif follower.is_caught_up:
            members.store(member, stored)
            if follower not in self._joining and not self._slow.may_join(
                self._now_s, follower, is_needed=self._lacks_members
            ):
                return
            if member not in members.stored:
                members.add(member, stored)
            # What is acknowledged from now on has waited for it.
            if stored >= self._joining.setdefault(follower, self.operations.last_number):
                del self._joining[follower]
                self._present[member] = follower
                follower.since_s = int(time.time())
                self._hold()
                self._changed.set()

    @property
    def _count_in_sync(self) -> int:
        """How many members are in sync for sure, with this one: connected, and recorded."""
        return 1 + len(self._surely_recorded & self._present.keys())

    def _hold(self) -> None:
        """Let nothing be acknowledged while too few members are in sync."""
        count = self._count_in_sync
        reason = ""
        if count < self.min_in_sync:
            reason = f"only {count} of the cluster's members {is_or_are(count)} in sync"
            reason += f", and --min-in-sync is {self.min_in_sync}"
        self._lacks_members = bool(reason)
        if self.members.hold("members", reason):
            if reason:
                logger.warning("publishes are refused: %s", reason)
            else:
                logger.info("publishes are accepted: %d members are in sync", count)

    async def run(self) -> None:
        """Record which followers are in sync, and disconnect those that store nothing; runs while this member leads."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            nursery.start_soon(self._record_changes)
            await self._fenced.wait()
            nursery.cancel_scope.cancel()

    async def limit_waiting(self) -> None:
        """Fence when the followers have been waited for during `stop_s`, in all.

        Until then, none is disconnected because it is slow: it lacks nothing that was acknowledged, and shall lead.
        """
        self._is_stopping = True
        waited = 0
        while waited < _STOP_STEPS:
            await trio.sleep(self._stop_s / _STOP_STEPS)
            waited += self.members.is_waited_for
        self.fence("it stops, and followers lack operations")

    async def _await_expected(self) -> None:
        with trio.move_on_after(self._join_s):
            while not self._expected <= self._present.keys():
                self._changed = trio.Event()
                await self._changed.wait()

    async def _record_changes(self) -> None:
        await self._await_expected()
        # Those that `end` disconnects stay recorded, so that one of them can lead next.
        while self._leader is not None:
            self._changed = trio.Event()
            present = frozenset(self._present)
            if present != self._recorded:
                await self._record_present(present)
            elif self._release():
                await self._changed.wait()

    async def _record_present(self, present: frozenset[str]) -> None:
        self._surely_recorded &= present
        self._hold()
        try:
            await self._record(present)
        except NSQError as exc:
            if self._recorded is not None:
                logger.warning("cannot record which followers are in sync: %s", exc)
            self._recorded = None
            await trio.sleep(_RETRY_S)
        else:
            self._recorded = self._surely_recorded = present
            self._hold()
            logger.info("in sync: %s", ", ".join(sorted(present)) or "this member alone")

    def _release(self) -> bool:
        """Wait no longer for followers that are gone and not recorded; returns False if the followers have changed."""
        joining = {follower.member for follower in self._joining}
        for member in [each for each in self.members.stored if each not in self._present.keys() | joining]:
            if self._recorded is None or member in self._recorded:
                return False
            self.members.remove(member)
        return True

    async def _watch(self) -> None:
        """Disconnect followers that are too slow, and wait for them again when their pause is over."""
        while True:
            before_s = time.monotonic()
            await trio.sleep(self._look_s)
            self._now_s += min(time.monotonic() - before_s, 2 * self._look_s)
            too_slow = self._slow.find(
                self._now_s,
                self.operations.last_number,
                (*self._present.values(), *self._joining),
                spares_lag=1 < self._count_in_sync <= self.min_in_sync,
            )
            for follower, reason in () if self._is_stopping else list(too_slow):
                logger.warning("follower %s: disconnected: %s", follower.member, reason)
                follower.disconnect()
            for follower, text in self._slow.report(time.monotonic()):
                logger.warning("follower %s: %s", follower.member, text)
            for follower in list(self._leader.followers.values()) if self._leader is not None else ():
                self._progress(follower)
