"""A broker as the leader of a cluster: its file operations, and the followers that its OKs wait for."""

from pathlib import Path
from typing import Any

import trio

from ..replication.barrier import ReplicationBarrier
from ..replication.leader import Follower, Leader
from ..replication.recorder import RecordingFiles
from ..replication.stream import OperationStream

_KEPT_BYTES = 256 * 1024 * 1024


class Replication:
    """Records the operations of a broker's data folder, and serves its followers. For one run of `serve`.

    Args:
        data_path: The data folder, as in `BrokerOptions`.
        cluster: The name of the cluster.
        member: The id of the data folder.
        epoch: The number of this leadership, higher than all before.
        kept_bytes: Memory for operations that a slow follower lacks; one that lacks older ones catches up anew.

    Attributes:
        files: The file layer of the broker.
        operations: What it has recorded.
    """

    def __init__(
        self, data_path: Path, cluster: str, member: str, epoch: int, *, kept_bytes: int = _KEPT_BYTES
    ) -> None:
        self.operations = OperationStream(kept_bytes)
        self.files = RecordingFiles(data_path, self.operations)
        self._about = cluster, member, epoch
        self._members: ReplicationBarrier[Any] | None = None
        self._leader: Leader | None = None

    def begin(self, members: ReplicationBarrier[Any]) -> None:
        """Serve followers; those that have caught up are members that OKs wait for."""
        self._members = members
        self._leader = Leader(*self._about, self.files, self.operations, self._progress)

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
        """The followers that OKs wait for."""
        return frozenset(self._members.stored if self._members is not None else ())

    def _progress(self, follower: Follower) -> None:
        members = self._members
        assert members is not None
        if not follower.is_connected:
            members.remove(follower.member)
        elif follower.member in members.stored:
            members.store(follower.member, follower.stored)
        elif follower.is_caught_up:
            members.add(follower.member, follower.stored)
