"""The follower's side of the link to its leader."""

import logging
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Final

import trio

from .catch_up import Operations
from .frame_stream import FrameStream
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
from .replica import Replica

logger = logging.getLogger("trio_nsq.replication")

_WAITING: Final = 16
"""How many received frames, or groups of them, may wait for the disk; then the leader waits, too."""
_ENTRIES: Final = 64
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
) -> None:
    """Follow a leader until the connection ends. The caller closes the replica and the stream.

    Args:
        replica: The opened data folder; nothing else may use it meanwhile.
        cluster, member: The names of the cluster, and of this folder.
        addresses: Where this member is reached, as URLs.
        least_epoch: A leader of a lower epoch is not followed.
        timeout_s: Limit for the leader to send anything.

    Raises:
        LinkError: The leader refuses, has ended the connection, or does not answer; StaleLeader.
        InvalidOperation, ReplicaError: What it sent cannot be done, or not be stored.
        trio.BrokenResourceError: The connection is broken.
    """
    frames = FrameStream(stream, timeout_s)
    position = replica.position
    await frames.send(
        encode_json(
            FrameKind.HELLO,
            {
                "versions": [VERSION],
                "cluster": cluster,
                "member": member,
                "instance": INSTANCE,
                "addresses": list(addresses),
                "position": None if position is None else position._asdict(),
            },
        )
    )
    epoch, resumes = _welcomed(*await frames.receive_one())
    least_epoch = max(least_epoch, position.epoch if position is not None else 0)
    if epoch < least_epoch:
        raise StaleLeader(f"the leader has epoch {epoch}, and this folder has followed epoch {least_epoch}")
    if resumes and position is None:
        raise LinkError("the leader wants to continue, and this folder has no position")
    following = _Following(frames, replica)
    send, receive = trio.open_memory_channel[Sequence[tuple[FrameKind, bytes]]](_WAITING)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(frames.stay_alive, alive_s)
        if not resumes:
            await following.send_inventory()
            await trio.to_thread.run_sync(replica.catch_up, epoch)
        nursery.start_soon(following.receive, send)
        await following.run(receive)


def _welcomed(kind: FrameKind, payload: bytes) -> tuple[int, bool]:
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
    def __init__(self, frames: FrameStream, replica: Replica) -> None:
        self._frames = frames
        self._replica = replica

    async def send_inventory(self) -> None:
        """Tell the leader what this folder has."""
        entries = self._replica.inventory()
        while found := await trio.to_thread.run_sync(_some, entries):
            await self._frames.send(
                [piece for entry in found for piece in encode_frame(FrameKind.INVENTORY, entry)]
            )
        await self._frames.send(encode_frame(FrameKind.INVENTORY_END))

    async def receive(self, send: trio.MemorySendChannel[Sequence[tuple[FrameKind, bytes]]]) -> None:
        """Read frames while others wait for the disk."""
        while True:
            await send.send(await self._frames.receive())

    async def run(self, receive: trio.MemoryReceiveChannel[Sequence[tuple[FrameKind, bytes]]]) -> None:
        """Do what arrives. What waits is stored together."""
        async for frames in receive:
            together = list(frames)
            try:
                while True:
                    together += receive.receive_nowait()
            except trio.WouldBlock:
                pass
            if self._replica.position is None:
                together = await trio.to_thread.run_sync(self._copy, together)
            if together:
                await self._follow(together)

    def _copy(self, frames: Sequence[tuple[FrameKind, bytes]]) -> list[tuple[FrameKind, bytes]]:
        """Take pieces of a copy of the folder, in a thread; returns its last frame and the frames after it."""
        for index, (kind, payload) in enumerate(frames):
            if kind is not FrameKind.ALIVE:
                self._replica.add(decode_piece(kind, payload))
                if self._replica.position is not None:
                    return [(FrameKind.ALIVE, b""), *frames[index + 1 :]]  # this is answered with STORED
        return []

    async def _follow(self, frames: Iterable[tuple[FrameKind, bytes]]) -> None:
        operations: list[bytes] = []
        for kind, payload in frames:
            if kind is FrameKind.ALIVE:
                continue
            piece = decode_piece(kind, payload)
            if not isinstance(piece, Operations):
                raise LinkError(f"the leader has sent a frame {kind.name}")
            operations.append(piece.data)
        if operations:
            await trio.to_thread.run_sync(self._replica.store, b"".join(operations))
        assert self._replica.position is not None
        await self._frames.send(encode_number(FrameKind.STORED, self._replica.position.number))
        if operations:
            await trio.to_thread.run_sync(self._replica.apply)


def _some(entries: Iterable[bytes]) -> list[bytes]:
    """Return the next entries of an inventory; in a thread."""
    found: list[bytes] = []
    for entry in entries:
        found.append(entry)
        if len(found) >= _ENTRIES:
            break
    return found
