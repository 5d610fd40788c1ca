"""The follower's side of the link to its leader."""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import trio

from .catch_up import Operations
from .frame_socket import FrameSocket, run_in_thread
from .link import (
    VERSION,
    FrameKind,
    LinkError,
    decode_json,
    decode_piece,
    encode_frame,
    encode_json,
    encode_number,
)
from .plain_socket import plain_socket
from .replica import Replica

_ENTRIES: Final = 64
TOGETHER_S = 0.2
"""So many entries of an inventory, or what is read of the folder in this time, are sent together: by that it is noticed
that the connection has ended."""
INSTANCE: Final = secrets.token_hex(8)
"""Of this process: a leader tells its connections from those of a copy of its folder."""


class StaleLeader(LinkError):
    """The leader has a lower epoch than this folder has followed: another one has replaced it."""


async def follow(
    stream: trio.abc.Stream,
    replica: Replica,
    *,
    cluster: str,
    member: str,
    addresses: Sequence[str] = (),
    least_epoch: int = 0,
    timeout_s: float = 10.0,
    alive_s: float = 1.0,
    free_bytes: Callable[[], int | None] = lambda: None,
) -> None:
    """Follow a leader until the connection ends. The caller closes the replica and the stream.

    One thread does it all. It uses the replica until this returns, also if it is cancelled.

    Args:
        replica: The opened data folder; nothing else may use it meanwhile.
        cluster, member: The names of the cluster, and of this folder.
        addresses: Where this member is reached, as URLs.
        least_epoch: A leader of a lower epoch is not followed.
        timeout_s: Limit for the leader to send anything.
        alive_s: The interval of ALIVE, which is also sent while the disk or something else takes long.
        free_bytes: Returns how much of this folder's disk is free, at once; None: unknown.

    Raises:
        LinkError: The leader refuses, has ended the connection, or does not answer; StaleLeader.
        InvalidOperation, ReplicaError: What it sent cannot be done, or not be stored.
        trio.BrokenResourceError: The connection is broken.
    """
    async with plain_socket(stream) as sock:
        frames = FrameSocket(sock, timeout_s)
        about = {"versions": [VERSION], "cluster": cluster, "member": member}
        about |= {"instance": INSTANCE, "addresses": list(addresses)}
        await run_in_thread(frames, alive_s, _Following(frames, replica, about, least_epoch).run, free_bytes)


def _welcomed(kind: FrameKind, payload: memoryview) -> tuple[int, bool]:
    """Return the epoch, and whether the leader continues where this folder is. Raises LinkError."""
    content: dict[str, Any] = decode_json(kind, payload)
    if kind is FrameKind.REFUSED:
        raise LinkError(f"the leader refuses: {content.get('reason')}")
    match content:
        case {"version": 1, "epoch": int(epoch), "resumes": bool(resumes)} if kind is FrameKind.WELCOME:
            if 0 <= epoch < 1 << 63:
                return epoch, resumes
    raise LinkError(f"the leader answers with a frame {kind.name} that this version does not understand")


class _Following:
    """What the thread does.

    Args:
        about: What HELLO says, without the position.
        least_epoch: As of `follow`.
    """

    def __init__(
        self, frames: FrameSocket, replica: Replica, about: dict[str, Any], least_epoch: int
    ) -> None:
        self._frames = frames
        self._replica = replica
        self._about = about
        self._least_epoch = least_epoch

    def run(self) -> None:
        """Follow until the connection ends, which is an error."""
        waiting: Sequence[tuple[FrameKind, memoryview]] = self._begin()
        while True:
            if self._replica.position is None:
                waiting = self._copy(waiting)
            if waiting:
                self._follow(waiting)
            waiting = self._frames.receive()

    def _begin(self) -> list[tuple[FrameKind, memoryview]]:
        """Agree with the leader on how to go on; returns frames that came with its answer."""
        replica, position = self._replica, self._replica.position
        at = None if position is None else position._asdict()
        self._frames.send(encode_json(FrameKind.HELLO, self._about | {"position": at}))
        first, *others = self._frames.receive()
        epoch, resumes = _welcomed(*first)
        least_epoch = max(self._least_epoch, position.epoch if position is not None else 0)
        if epoch < least_epoch:
            raise StaleLeader(
                f"the leader has epoch {epoch}, and this folder has followed epoch {least_epoch}: another one has "
                "replaced that leader, or the cluster has begun anew. If the messages of this folder are not needed, "
                "move its content away"
            )
        if resumes and position is None:
            raise LinkError("the leader wants to continue, and this folder has no position")
        if resumes and position is not None and position.epoch != epoch:
            replica.go_on(epoch)
        if not resumes:
            self._send_inventory()
            replica.catch_up(epoch)
        return others

    def _send_inventory(self) -> None:
        """Tell the leader what this folder has."""
        waiting: list[bytes | memoryview] = []
        sent_s = time.monotonic()
        for count, entry in enumerate(self._replica.inventory(), 1):
            waiting += encode_frame(FrameKind.INVENTORY, entry)
            if count % _ENTRIES == 0 or time.monotonic() - sent_s >= TOGETHER_S:
                self._frames.send(waiting)
                waiting, sent_s = [], time.monotonic()
        self._frames.send([*waiting, *encode_frame(FrameKind.INVENTORY_END)])

    def _copy(self, frames: Sequence[tuple[FrameKind, memoryview]]) -> Sequence[tuple[FrameKind, memoryview]]:
        """Take pieces of a copy of the folder; returns its last frame and the frames after it."""
        for index, (kind, payload) in enumerate(frames):
            if kind is not FrameKind.ALIVE:
                self._replica.add(decode_piece(kind, payload))
                if self._replica.position is not None:
                    return [(FrameKind.ALIVE, payload), *frames[index + 1 :]]  # this is answered with STORED
        return []

    def _follow(self, frames: Iterable[tuple[FrameKind, memoryview]]) -> None:
        """Store the operations in these frames together, and do them."""
        operations: list[bytes | memoryview] = []
        for kind, payload in frames:
            if kind is FrameKind.ALIVE:
                continue
            piece = decode_piece(kind, payload)
            if not isinstance(piece, Operations):
                raise LinkError(f"the leader has sent a frame {kind.name}")
            operations.append(piece.data)
        if operations:
            self._replica.store(*operations)
        assert self._replica.position is not None
        self._frames.send(encode_number(FrameKind.STORED, self._replica.position.number))
        if operations:
            self._replica.apply()
