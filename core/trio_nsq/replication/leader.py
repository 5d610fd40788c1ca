"""The leader's side of the links to its followers."""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import trio

from ..event_loop.reactor import Poller
from ..protocol.errors import NSQError, leaves_of
from .answer_times import AnswerTimes
from .catch_up import CatchUp, CaughtUp
from .frame_socket import FrameSocket, run_in_thread
from .frame_stream import FrameStream
from .inventory import Inventory
from .journal import Position
from .link import (
    MAX_ADDRESS_CHARACTERS,
    MAX_ADDRESSES,
    VERSION,
    FrameKind,
    LinkError,
    decode_json,
    encode_json,
    encode_piece,
)
from .live_link import LiveLink
from .pace import Pace
from .plain_socket import plain_socket
from .recorder import RecordingFiles
from .stream import OperationStream, TooFarBehind

logger: logging.Logger = logging.getLogger("trio_nsq.replication")

_MOST_VERSIONS: Final = 64
_ADDRESS: Final = re.compile(rf"(?=.{{1,{MAX_ADDRESS_CHARACTERS}}}\Z)(tcp|https?)://[A-Za-z0-9._:%\[\]-]+")
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(eq=False, slots=True)
class Follower:
    """A connected follower.

    Attributes:
        member: The id of its data folder.
        instance: A random name of its process.
        addresses: Where it is reached, as URLs.
        stored: The number of the last operation that it has durably.
        is_caught_up: It has the whole folder; otherwise it is catching up.
        is_connected: Its connection has not ended.
        since_s: When it connected or, if later, came in sync; Unix seconds.
        free_bytes: How much of its disk is free; None: it has not told. 0 also if it was full, and cannot be written.
        answers: How long it takes to store operations.
        copy: The catch-up, while there is one.
    """

    member: str
    instance: str = ""
    addresses: tuple[str, ...] = ()
    stored: int = 0
    is_caught_up: bool = False
    is_connected: bool = True
    since_s: int = field(default_factory=lambda: int(time.time()))
    free_bytes: int | None = None
    answers: AnswerTimes = field(default_factory=AnswerTimes)
    copy: CatchUp | None = None
    _scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def disconnect(self) -> None:
        """End its connection."""
        self._scope.cancel()


class Leader:
    """Serves the followers of one epoch.

    Args:
        cluster, member: The names of the cluster, and of this folder.
        epoch: Of this leader.
        files: Has recorded all changes since the start; `stream` has them.
        poller: Serves the followers that have caught up.
        on_progress: Called when a follower has stored more, was caught up, or has left.
        alive_s: Pause after which something is sent in any case.
        timeout_s: Limit for a follower to send anything, and to accept what is sent.
        catch_up_bytes_per_s: How fast this folder is read for a follower that catches up; 0: no limit.

    Attributes:
        followers: Those connected, by member.
        catch_up_count: How often one began to copy the folder.
    """

    def __init__(
        self,
        cluster: str,
        member: str,
        epoch: int,
        files: RecordingFiles,
        stream: OperationStream,
        poller: Poller,
        on_progress: Callable[[Follower], None],
        *,
        alive_s: float = 1.0,
        timeout_s: float = 10.0,
        catch_up_bytes_per_s: float = 0,
    ) -> None:
        self.followers: dict[str, Follower] = {}
        self.catch_up_count: int = 0
        self._cluster = cluster
        self._member = member
        self._epoch = epoch
        self._files = files
        self._stream = stream
        self._on_progress = on_progress
        self._alive_s = alive_s
        self._timeout_s = timeout_s
        self._catch_up_bytes_per_s = catch_up_bytes_per_s
        self._poller = poller
        self._links: set[LiveLink] = set()
        self._is_told = False
        stream.on_append.append(self._tell)

    # ------------------------------------------------------------------ new operations

    def _tell(self) -> None:
        """Have new operations sent soon; any thread may call it."""
        if not self._is_told:
            self._is_told = True
            self._poller.call_in_round(self._send)

    def _send(self) -> None:
        self._is_told = False
        for link in self._links:
            link.send()

    # ------------------------------------------------------------------ one follower

    async def serve(self, stream: trio.abc.Stream) -> None:
        """Serve a follower until its connection ends, whatever it sends; logs why that ended. Closes the stream."""
        frames = FrameStream(stream, self._timeout_s)
        who = "a follower"
        try:
            hello = await self._hello(frames)
            follower = Follower(hello.member, hello.instance, hello.addresses)
            who = f"follower {hello.member}"
            if (before := self.followers.get(hello.member)) is not None:
                self._leave(before)  # its connection is broken, and this side has not noticed
                before.disconnect()
            self.followers[hello.member] = follower
            try:
                with follower._scope:
                    await self._serve(stream, frames, follower, hello)
            finally:
                if follower.is_connected:
                    self._leave(follower)
            logger.info("%s: disconnected by this member", who)
        except* (NSQError, trio.BrokenResourceError, OSError, TooFarBehind) as group:
            for exc in leaves_of(group):
                reason = "it is too far behind" if isinstance(exc, TooFarBehind) else str(exc)
                logger.warning("%s: disconnected: %s", who, reason or "the connection is broken")
        finally:
            with trio.CancelScope(shield=True) as closing:
                closing.cancel()
                await stream.aclose()

    def _leave(self, follower: Follower) -> None:
        follower.is_connected = False
        del self.followers[follower.member]
        self._on_progress(follower)

    async def _hello(self, frames: FrameStream) -> "_Hello":
        """Read the first frame. Raises LinkError; then the follower is told so."""
        kind, payload = await frames.receive_one()
        if kind is not FrameKind.HELLO:
            raise LinkError("it does not begin with a frame HELLO")
        try:
            hello = _Hello.read(decode_json(kind, payload))
            if VERSION not in hello.versions:
                raise LinkError(
                    f"it speaks versions {hello.versions} of the link, the leader speaks {VERSION}: upgrade the older "
                    "one"
                )
            if hello.cluster != self._cluster:
                raise LinkError(f"it belongs to cluster {hello.cluster!r}, the leader to {self._cluster!r}")
            if hello.member == self._member:
                raise LinkError(
                    f"its data folder has the leader's identity {hello.member}: it is a copy. Remove its "
                    "content, so that it becomes a new member"
                )
            before = self.followers.get(hello.member)
            if before is not None and before.instance != hello.instance:
                raise LinkError(
                    f"another process with the identity {hello.member} is connected. If that was an earlier process of "
                    "this member, its connection ends soon; if its data folder was copied, remove the content of "
                    "the copy, so that it becomes a new member"
                )
        except LinkError as exc:
            await frames.send(encode_json(FrameKind.REFUSED, {"reason": str(exc)}))
            raise
        return hello

    async def _serve(
        self, stream: trio.abc.Stream, frames: FrameStream, follower: Follower, hello: "_Hello"
    ) -> None:
        position = hello.position
        resumes = position is not None and self._has_after(position)
        welcome = {"version": VERSION, "epoch": self._epoch, "resumes": resumes}
        await frames.send(encode_json(FrameKind.WELCOME, welcome))
        if resumes and position is not None:
            number = position.number
            logger.info("follower %s: continues after operation %d", follower.member, number)
        else:
            logger.info("follower %s: catches up", follower.member)
            self.catch_up_count += 1
            number = 0
        if resumes:
            follower.stored = number
            follower.is_caught_up = True
            self._on_progress(follower)
        reader, received = frames.leave()

        def on_stored(number: int) -> None:
            self._store(follower, number)

        def on_alive(free_bytes: int) -> None:
            follower.free_bytes = free_bytes

        async with plain_socket(stream) as sock:
            if not resumes:
                copying = FrameSocket(sock, self._timeout_s, reader, received)
                pace = Pace(self._catch_up_bytes_per_s)
                sending = _SendingCopy(copying, self._files, self._stream, follower, pace, self._alive_s)
                number = await run_in_thread(copying, self._alive_s, sending.run)
                reader, received = copying.leave()
                logger.info("follower %s: has caught up", follower.member)
            link = LiveLink(
                *(sock, self._poller, self._stream, reader, number, on_stored, follower.answers, on_alive),
                alive_s=self._alive_s,
                timeout_s=self._timeout_s,
            )
            self._links.add(link)
            try:
                await link.run(received)
            finally:
                self._links.remove(link)

    def _has_after(self, position: Position) -> bool:
        """Whether a follower at a position lacks only operations that are kept."""
        former = self._stream.former
        is_known = position.epoch == self._epoch or (
            former is not None and position.epoch == former.epoch and position.number <= former.number
        )
        return is_known and self._stream.has_after(position.number)

    def _store(self, follower: Follower, number: int) -> None:
        """Record what a follower has stored. Raises LinkError."""
        last = self._stream.last_number
        if not follower.stored <= number <= last:
            raise LinkError(
                f"it has stored operation {number} after {follower.stored}; the last one is {last}"
            )
        follower.stored = number
        follower.is_caught_up = True
        self._on_progress(follower)


class _SendingCopy:
    """Sends a copy of the folder to a follower, in a thread: the event loop goes on serving clients.

    Args:
        look_s: How often it looks what the follower sends meanwhile.
    """

    def __init__(
        self,
        frames: FrameSocket,
        files: RecordingFiles,
        stream: OperationStream,
        follower: Follower,
        pace: Pace,
        look_s: float,
    ) -> None:
        self._frames = frames
        self._files = files
        self._stream = stream
        self._follower = follower
        self._pace = pace
        self._look_s = look_s

    def run(self) -> int:
        """Receive the follower's inventory, and send the copy; returns the number of its last operation."""
        with Inventory(self._files.root) as inventory:
            self._receive_inventory(inventory)
            copy = CatchUp(self._files, self._stream, inventory, self._wait)
            self._follower.copy = copy
            try:
                return self._send(copy)
            finally:
                self._follower.copy = None

    def _send(self, copy: CatchUp) -> int:
        looked_s = time.monotonic()
        number = 0
        for piece in copy.pieces():
            if time.monotonic() - looked_s >= self._look_s or isinstance(piece, CaughtUp):
                self._look()  # not after CAUGHT_UP, which the follower answers
                looked_s = time.monotonic()
            self._frames.send(encode_piece(piece))
            if isinstance(piece, CaughtUp):
                number = piece.number
        return number

    def _receive_inventory(self, inventory: Inventory) -> None:
        is_ended = False
        while not is_ended:
            entries: list[bytes] = []
            for kind, payload in self._frames.receive():
                if kind is FrameKind.INVENTORY and not is_ended:
                    entries.append(bytes(payload))
                elif kind is FrameKind.INVENTORY_END and not is_ended:
                    is_ended = True
                elif kind is not FrameKind.ALIVE:
                    raise LinkError(f"it has sent a frame {kind.name} instead of its inventory")
            inventory.add(entries)

    def _look(self) -> None:
        """Notice that the follower is gone. Raises LinkError."""
        for kind, _ in self._frames.receive_now():
            if kind is not FrameKind.ALIVE:
                raise LinkError(f"it has sent a frame {kind.name} during its catch-up")

    def _wait(self, size: int) -> None:
        if (wait_s := self._pace.wait_s(time.monotonic(), size)) > 0:
            self._frames.pause(wait_s)


@dataclass(frozen=True, slots=True)
class _Hello:
    versions: list[int]
    cluster: str
    member: str
    position: Position | None
    instance: str
    addresses: tuple[str, ...]

    @classmethod
    def read(cls, content: dict[str, Any]) -> "_Hello":
        """Raises LinkError: a field is missing, or has a wrong value."""
        match {"instance": "", "addresses": [], **content}:
            case {
                "versions": [*versions],
                "cluster": str(cluster),
                "member": str(member),
                "instance": str(instance),
                "addresses": [*addresses],
            } if (
                all(type(each) is int for each in versions[:_MOST_VERSIONS])
                and _ID.fullmatch(member)
                and _ID.fullmatch(cluster)
                and len(addresses) <= MAX_ADDRESSES
                and all(type(each) is str and _ADDRESS.fullmatch(each) for each in addresses)
            ):
                hello = cls(versions, cluster, member, None, instance, tuple(addresses))
            case _:
                raise LinkError("its frame HELLO lacks valid versions, cluster, member or addresses")
        match content.get("position"):
            case None:
                return hello
            case {"epoch": int(epoch), "number": int(number)} if epoch >= 0 and number >= 0:
                return replace(hello, position=Position(epoch, number))
        raise LinkError("its frame HELLO has a position that is none")
