"""A broker as the leader of a cluster: its file operations, and the followers that its OKs wait for.

Where the next leader is elected, it is recorded which followers are in sync: only they may win. So these are always
among those that OKs wait for: a follower is waited for before it is recorded, until it is recorded no longer. Nothing
is acknowledged before the followers of the leader before are recorded no longer.
"""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import trio

from ..event_loop.reactor import Poller
from ..protocol.errors import NSQError
from ..replication.barrier import ReplicationBarrier
from ..replication.leader import Follower, Leader
from ..replication.recorder import RecordingFiles
from ..replication.stream import OperationStream

logger = logging.getLogger("trio_nsq.broker")

_KEPT_BYTES: Final = 256 * 1024 * 1024
_STALL_S: Final = 3.0
_RETRY_S: Final = 0.5
_EARLIER: Final = ""
"""Stands for the followers that are recorded from the leader before; no member has this id."""


async def record_nothing(members: frozenset[str]) -> None:
    """Record nowhere: there is no election."""


class Replication:
    """Records the operations of a broker's data folder, and serves its followers. For one run of `serve`.

    Args:
        data_path: The data folder, as in `BrokerOptions`.
        cluster: The name of the cluster.
        member: The id of the data folder.
        epoch: The number of this leadership, higher than all before.
        record: Records which followers are in sync. When it returns, that is certain; after an NSQError it is
            unknown, and `record` is called again.
        kept_bytes: Memory for operations that a slow follower lacks; one that lacks older ones catches up anew.
        stall_s: A follower that stores nothing for this time, although there is something, is disconnected.

    Attributes:
        files: The file layer of the broker.
        operations: What it has recorded.
    """

    def __init__(
        self,
        data_path: Path,
        cluster: str,
        member: str,
        epoch: int,
        *,
        record: Callable[[frozenset[str]], Awaitable[None]] = record_nothing,
        kept_bytes: int = _KEPT_BYTES,
        stall_s: float = _STALL_S,
    ) -> None:
        self.operations = OperationStream(kept_bytes)
        self.files = RecordingFiles(data_path, self.operations)
        self._about = cluster, member, epoch
        self._record = record
        self._stall_s = stall_s
        self._members: ReplicationBarrier[Any]
        self._leader: Leader | None = None
        self._present: dict[str, Follower] = {}  # those connected that have all that was acknowledged
        # Those that OKs wait for, and that may lack what was acknowledged before: the operation that they must have.
        self._joining: dict[Follower, int] = {}
        self._recorded: frozenset[str] | None = None  # None: unknown
        self._changed = trio.Event()

    def begin(self, members: ReplicationBarrier[Any], poller: Poller) -> None:
        """Serve followers; those that have caught up are members that OKs wait for."""
        self._members = members
        members.add(_EARLIER, 0)
        self._leader = Leader(*self._about, self.files, self.operations, poller, self._progress)

    def end(self) -> None:
        """Serve no follower any longer."""
        leader, self._leader = self._leader, None
        for follower in list(leader.followers.values()) if leader is not None else ():
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
    def waited_for(self) -> frozenset[str]:
        """The followers that OKs wait for."""
        return frozenset(self._members.stored) - {_EARLIER}

    def _progress(self, follower: Follower) -> None:
        member, stored, members = follower.member, follower.stored, self._members
        if not follower.is_connected:
            self._joining.pop(follower, None)
            if self._present.get(member) is follower:
                del self._present[member]
            self._changed.set()
        elif self._present.get(member) is follower:
            members.store(member, stored)
        elif follower.is_caught_up:
            if member in members.stored:
                members.store(member, stored)
            else:
                members.add(member, stored)
            # What is acknowledged from now on has waited for it.
            if stored >= self._joining.setdefault(follower, self.operations.last_number):
                del self._joining[follower]
                self._present[member] = follower
                self._changed.set()

    async def run(self) -> None:
        """Record which followers are in sync, and disconnect those that store nothing; runs until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_stalls)
            while True:
                self._changed = trio.Event()
                present = frozenset(self._present)
                if present != self._recorded:
                    await self._record_present(present)
                elif self._release():
                    await self._changed.wait()

    async def _record_present(self, present: frozenset[str]) -> None:
        try:
            await self._record(present)
        except NSQError as exc:
            if self._recorded is not None:
                logger.warning("cannot record which followers are in sync: %s", exc)
            self._recorded = None
            await trio.sleep(_RETRY_S)
        else:
            self._recorded = present
            logger.info("in sync: %s", ", ".join(sorted(present)) or "this member alone")

    def _release(self) -> bool:
        """Wait no longer for followers that are gone and not recorded; returns False if the followers have changed."""
        joining = {follower.member for follower in self._joining}
        for member in [each for each in self._members.stored if each not in self._present.keys() | joining]:
            if self._recorded is None or member in self._recorded:
                return False
            self._members.remove(member)
        return True

    async def _end_stalls(self) -> None:
        progress: dict[Follower, tuple[int, float]] = {}
        while True:
            await trio.sleep(self._stall_s / 4)
            now_s, before, progress = trio.current_time(), progress, {}
            for follower in (*self._present.values(), *self._joining):
                stored = follower.stored
                number, since_s = before.get(follower, (-1, now_s))
                if stored != number or stored >= self.operations.last_number:
                    since_s = now_s
                progress[follower] = stored, since_s
                if now_s - since_s >= self._stall_s:
                    logger.warning(
                        "follower %s: disconnected: it has stored nothing for %g s, and lacks %d operations",
                        *(follower.member, self._stall_s, self.operations.last_number - stored),
                    )
                    follower.disconnect()
