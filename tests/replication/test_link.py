"""Leader and followers over real sockets."""

import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import trio

from broker.support import HeldFiles
from log.support import HastyFiles
from replication.leader import RandomChanges, tree_of
from trio_nsq.event_loop.reactor import Poller
from trio_nsq.protocol.errors import NSQError
from trio_nsq.replication import follower as follower_module
from trio_nsq.replication.catch_up import Block, CaughtUp, FileBegin, FileEnd, Folder, Operations, Piece
from trio_nsq.replication.follower import INSTANCE, StaleLeader, follow
from trio_nsq.replication.inventory import FileDigest
from trio_nsq.replication.journal import Position
from trio_nsq.replication.leader import Follower, Leader
from trio_nsq.replication.link import (
    FrameKind,
    FrameReader,
    LinkError,
    decode_piece,
    encode_frame,
    encode_json,
    encode_number,
    encode_operations,
    encode_piece,
)
from trio_nsq.replication.operations import Kind, encode
from trio_nsq.replication.recorder import RecordingFiles
from trio_nsq.replication.replica import Replica
from trio_nsq.replication.stream import FormerOperations, OperationStream

EPOCH = 3
PATIENCE_S = 60.0


class HastyRecordingFiles(RecordingFiles, HastyFiles):
    """Records, and syncs nothing."""


class Cluster:
    """A leader that listens, and a folder that changes at random."""

    def __init__(
        self,
        tmp_path: Path,
        seed: int,
        most_bytes: int = 1 << 30,
        timeout_s: float = PATIENCE_S,
        epoch: int = EPOCH,
        former: FormerOperations | None = None,
    ) -> None:
        self.root = tmp_path / "leader"
        self.root.mkdir(exist_ok=True)
        self.stream = OperationStream(most_bytes, former)
        self.files = HastyRecordingFiles(self.root, self.stream)
        self.changes = RandomChanges(self.files, self.root, seed)
        self.poller = Poller()
        self.leader = Leader(
            *("prod", "one", epoch, self.files, self.stream, self.poller, self._progress),
            alive_s=timeout_s / 10,
            timeout_s=timeout_s,
        )
        self.stored: dict[str, int] = {}
        self.replicas: dict[str, Replica] = {}
        self.port = 0
        self._progressed = trio.Event()

    def _progress(self, follower: Follower) -> None:
        self.stored[follower.member] = max(self.stored.get(follower.member, 0), follower.stored)
        self._progressed.set()
        self._progressed = trio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until this is true after a follower's progress."""
        with trio.fail_after(PATIENCE_S):
            while not condition():
                await self._progressed.wait()

    def has_all(self, member: str) -> bool:
        return self.stored.get(member, -1) == self.stream.last_number

    async def follow(self, folder: Path, member: str, cluster: str = "prod", least_epoch: int = 0) -> None:
        """Follow with a folder until the connection ends."""
        folder.mkdir(exist_ok=True)
        replica = await trio.to_thread.run_sync(Replica.open, HastyFiles(), folder, 5000)
        if member in self.replicas:
            replica.keep(self.replicas[member].former)
        self.replicas[member] = replica
        try:
            if replica.position is not None:
                assert replica.position.number >= self.stored.get(member, 0)
            async with await trio.open_tcp_stream("127.0.0.1", self.port) as plain:
                # As a stream with TLS, one member has no socket that a thread could use.
                stream = trio.StapledStream(plain, plain) if member == "three" else plain
                await follow(stream, replica, cluster=cluster, member=member, least_epoch=least_epoch)
        finally:
            replica.close()


async def poll(poller: Poller) -> None:
    """Do what a broker's scheduler does with its poller."""
    poller.open()
    try:
        while True:
            await poller.sleep()
            while poller.poll():
                poller.in_round = True
                poller.serve()
                poller.in_round = False
                await trio.lowlevel.checkpoint()
    finally:
        poller.close()


@asynccontextmanager
async def running(cluster: Cluster) -> AsyncIterator[trio.Nursery]:
    """Serve followers in the block."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poll, cluster.poller)
        number = count()

        async def serve(stream: trio.SocketStream) -> None:
            # As a stream with TLS, that of every second connection has no socket that the poller could use.
            await cluster.leader.serve(stream if next(number) % 2 else trio.StapledStream(stream, stream))

        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        cluster.port = listeners[0].socket.getsockname()[1]
        yield nursery
        nursery.cancel_scope.cancel()
    cluster.changes.close()


async def test_two_followers_that_come_and_go(tmp_path: Path) -> None:
    """Each ends with the same files, whatever its folder had when its connection ended."""
    cluster = Cluster(tmp_path, 1)
    chance = random.Random(1)

    async def come_and_go(member: str) -> None:
        while True:
            with trio.move_on_after(chance.uniform(0.01, 0.2)):
                await cluster.follow(tmp_path / member, member)

    async with running(cluster) as nursery:
        for member in ("two", "three"):
            nursery.start_soon(come_and_go, member)
        for _ in range(400):
            cluster.changes.step()
            await trio.sleep(0.002 * chance.random())
        nursery.cancel_scope.cancel()
    async with running(cluster) as nursery:
        for member in ("two", "three"):
            nursery.start_soon(cluster.follow, tmp_path / member, member)
        await cluster.until(lambda: cluster.has_all("two") and cluster.has_all("three"))
        nursery.cancel_scope.cancel()
    for member in ("two", "three"):
        Replica.open(HastyFiles(), tmp_path / member).close()  # does what is only in the journal
        assert tree_of(tmp_path / member) == tree_of(cluster.root)


@asynccontextmanager
async def following(cluster: Cluster, folder: Path, member: str) -> AsyncIterator[None]:
    """Have a folder follow in the block; at its end it has all operations."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cluster.follow, folder, member)
        yield
        await cluster.until(lambda: cluster.has_all(member))
        nursery.cancel_scope.cancel()
    Replica.open(HastyFiles(), folder).close()  # does what is only in the journal


async def test_a_short_absence_needs_no_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(tmp_path, 2)
    caplog.set_level("INFO", "trio_nsq.replication")
    async with running(cluster):
        for _ in range(3):
            async with following(cluster, tmp_path / "two", "two"):
                for _ in range(20):
                    cluster.changes.step()
            assert tree_of(tmp_path / "two") == tree_of(cluster.root)
    texts = [record.getMessage() for record in caplog.records]
    assert sum("catches up" in text for text in texts) == 1
    assert sum("continues after" in text for text in texts) == 2


@pytest.mark.parametrize("seed", range(6))
async def test_a_follower_goes_on_with_the_next_leader(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The next leader has followed the one before, as this follower has, which lacks its last operations."""
    chance = random.Random(seed)
    first, second = Cluster(tmp_path, seed), tmp_path / "second" / "leader"
    second.parent.mkdir()
    async with running(first), following(first, second, "two"):
        await first.until(lambda: first.has_all("two"))
        async with following(first, tmp_path / "three", "three"):
            for _ in range(chance.randint(1, 60)):
                first.changes.step()
        for _ in range(chance.randint(0, 10)):
            first.changes.step()
    former = first.replicas["two"].former
    assert former is not None
    promoted = Replica.open(HastyFiles(), second)
    assert promoted.position == former.position
    promoted.end()

    caplog.set_level("INFO", "trio_nsq.replication")
    next_one = Cluster(second.parent, seed + 100, epoch=EPOCH + 1, former=former)
    async with running(next_one):
        for _ in range(2):
            async with following(next_one, tmp_path / "three", "three"):
                for _ in range(20):
                    next_one.changes.step()
            assert tree_of(tmp_path / "three") == tree_of(next_one.root)
    assert Replica.open(HastyFiles(), tmp_path / "three").position == Position(
        EPOCH + 1, next_one.stream.last_number
    )
    texts = [record.getMessage() for record in caplog.records]
    assert sum("continues after" in text for text in texts) == 2
    assert not any("catches up" in text for text in texts)


async def test_a_follower_with_more_operations_than_the_next_leader_catches_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They were not acknowledged, and others get their numbers."""
    first, second = Cluster(tmp_path, 1), tmp_path / "second" / "leader"
    second.parent.mkdir()
    async with running(first), following(first, tmp_path / "three", "three"):
        async with following(first, second, "two"):
            first.changes.step()
        number = first.stream.last_number
        while first.stream.last_number == number:
            first.changes.step()
    former = first.replicas["two"].former
    Replica.open(HastyFiles(), second).end()
    caplog.set_level("INFO", "trio_nsq.replication")
    next_one = Cluster(second.parent, 100, epoch=EPOCH + 1, former=former)
    async with running(next_one):
        async with following(next_one, tmp_path / "three", "three"):
            for _ in range(20):
                next_one.changes.step()
        assert tree_of(tmp_path / "three") == tree_of(next_one.root)
    assert any("catches up" in record.getMessage() for record in caplog.records)


async def test_a_follower_that_was_away_for_long_catches_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The leader's memory is limited."""
    cluster = Cluster(tmp_path, 3, most_bytes=20_000)
    caplog.set_level("INFO", "trio_nsq.replication")
    async with running(cluster):
        for _ in range(2):
            async with following(cluster, tmp_path / "two", "two"):
                pass
            assert tree_of(tmp_path / "two") == tree_of(cluster.root)
            for _ in range(300):
                cluster.changes.step()
            assert cluster.stream.kept_bytes <= 20_000
    assert caplog.text.count("catches up") == 2


async def test_a_follower_that_does_not_read_loses_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(tmp_path, 3, most_bytes=20_000)
    position = {"epoch": EPOCH, "number": cluster.stream.last_number}
    async with running(cluster):
        with trio.fail_after(PATIENCE_S):
            async with await trio.open_tcp_stream("127.0.0.1", cluster.port) as stream:
                await stream.send_all(b"".join(encode_json(FrameKind.HELLO, HELLO | {"position": position})))
                while "disconnected: it is too far behind" not in caplog.text:
                    cluster.stream.append(Kind.WRITE, b"f", data=[bytes(10_000)])
                    await trio.sleep(0)
    assert "two" not in cluster.leader.followers


async def test_a_follower_that_is_silent_is_disconnected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(tmp_path, 3, timeout_s=0.2)
    position = {"epoch": EPOCH, "number": cluster.stream.last_number}
    async with running(cluster):
        with trio.fail_after(PATIENCE_S):
            async with await trio.open_tcp_stream("127.0.0.1", cluster.port) as stream:
                await stream.send_all(b"".join(encode_json(FrameKind.HELLO, HELLO | {"position": position})))
                reader, kinds = FrameReader(), list[FrameKind]()
                with suppress(trio.BrokenResourceError):
                    while data := await stream.receive_some():
                        kinds += [kind for kind, _ in reader.receive(bytes(data))]
    assert kinds[:2] == [FrameKind.WELCOME, FrameKind.ALIVE]
    assert "disconnected: the other side has sent nothing for 0.2 s" in caplog.text
    assert "two" not in cluster.leader.followers


async def test_a_follower_that_accepts_nothing_is_disconnected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says that it is alive."""
    cluster = Cluster(tmp_path, 3, timeout_s=0.2)
    position = {"epoch": EPOCH, "number": cluster.stream.last_number}
    alive = b"".join(encode_frame(FrameKind.ALIVE))
    async with running(cluster):
        with trio.fail_after(PATIENCE_S):
            async with await trio.open_tcp_stream("127.0.0.1", cluster.port) as stream:
                await stream.send_all(b"".join(encode_json(FrameKind.HELLO, HELLO | {"position": position})))
                for _ in range(100):
                    cluster.stream.append(Kind.WRITE, b"f", data=[bytes(1_000_000)])
                with suppress(trio.BrokenResourceError):
                    while "disconnected" not in caplog.text:
                        await stream.send_all(alive)
                        await trio.sleep(0.01)
    assert "disconnected: the other side has accepted nothing for 0.2 s" in caplog.text


HELLO = {"versions": [1], "cluster": "prod", "member": "two", "position": None}
WRONG_FOLLOWERS: dict[str, tuple[bytes, str]] = {
    "other cluster": (
        b"".join(encode_json(FrameKind.HELLO, HELLO | {"cluster": "test"})),
        "belongs to cluster 'test'",
    ),
    "the leader's identity": (
        b"".join(encode_json(FrameKind.HELLO, HELLO | {"member": "one"})),
        "the leader's identity",
    ),
    "a later version": (
        b"".join(encode_json(FrameKind.HELLO, HELLO | {"versions": [2, 3]})),
        "versions [2, 3]",
    ),
    "no member": (b"".join(encode_json(FrameKind.HELLO, HELLO | {"member": ""})), "lacks"),
    "many addresses": (
        b"".join(encode_json(FrameKind.HELLO, HELLO | {"addresses": ["tcp://a:1"] * 17})),
        "lacks",
    ),
    "long address": (
        b"".join(encode_json(FrameKind.HELLO, HELLO | {"addresses": ["tcp://" + "a" * 250]})),
        "lacks",
    ),
    "line break": (b"".join(encode_json(FrameKind.HELLO, HELLO | {"addresses": ["tcp://a:1\n"]})), "lacks"),
    "no address": (b"".join(encode_json(FrameKind.HELLO, HELLO | {"addresses": ["a:1"]})), "lacks"),
    "a wrong position": (
        b"".join(encode_json(FrameKind.HELLO, HELLO | {"position": {"epoch": 1, "number": -1}})),
        "position",
    ),
    "not JSON": (b"".join(encode_frame(FrameKind.HELLO, b"{")), "no JSON"),
    "nested": (b"".join(encode_frame(FrameKind.HELLO, b"[" * 100_000)), "JSON"),
    "not HELLO": (b"".join(encode_number(FrameKind.STORED, 1)), "HELLO"),
    "unknown kind": (b"\0\0\0\2\x63x", "kind 99"),
    "too large": (b"\xff\xff\xff\xff\1", "maximum"),
    "empty": (b"\0\0\0\0\1", "0 bytes"),
    "HTTP": (b"GET / HTTP/1.1\r\n\r\n", "maximum"),
    "stored too much": (
        b"".join(encode_json(FrameKind.HELLO, HELLO))
        + b"".join(encode_frame(FrameKind.INVENTORY_END))
        + b"".join(encode_number(FrameKind.STORED, 1 << 60)),
        "STORED",
    ),
    "an inventory that is wrong": (
        b"".join(encode_json(FrameKind.HELLO, HELLO))
        + b"".join(encode_frame(FrameKind.INVENTORY, b"x" * 99)),
        "",
    ),
    "nothing": (b"", "ended the connection"),
}


@pytest.mark.parametrize(("sent", "logged"), WRONG_FOLLOWERS.values(), ids=WRONG_FOLLOWERS)
async def test_a_follower_that_sends_something_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sent: bytes, logged: str
) -> None:
    """It is disconnected, with a reason in the log, and others are served."""
    cluster = Cluster(tmp_path, 4)
    async with running(cluster) as nursery:
        with trio.fail_after(PATIENCE_S):
            async with await trio.open_tcp_stream("127.0.0.1", cluster.port) as stream:
                await stream.send_all(sent or b"\0")
                await stream.send_eof()
                with suppress(trio.BrokenResourceError):
                    while await stream.receive_some():
                        pass
        assert logged in caplog.text
        nursery.start_soon(cluster.follow, tmp_path / "three", "three")
        await cluster.until(lambda: cluster.has_all("three"))
        nursery.cancel_scope.cancel()


async def test_a_follower_that_claims_to_have_stored_what_does_not_exist(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(tmp_path, 5)
    position = {"epoch": EPOCH, "number": 0}
    async with running(cluster):
        with trio.fail_after(PATIENCE_S):
            async with await trio.open_tcp_stream("127.0.0.1", cluster.port) as stream:
                await stream.send_all(b"".join(encode_json(FrameKind.HELLO, HELLO | {"position": position})))
                await stream.send_all(
                    b"".join(encode_number(FrameKind.STORED, cluster.stream.last_number + 1))
                )
                with suppress(trio.BrokenResourceError):
                    while await stream.receive_some():
                        pass
    assert "the last one is" in caplog.text
    assert cluster.stored.get("two", 0) == 0


async def test_an_older_leader_is_not_followed(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 6)
    async with running(cluster):
        with pytest.raises(StaleLeader):
            await cluster.follow(tmp_path / "two", "two", least_epoch=EPOCH + 1)
        folder = tmp_path / "three"
        folder.mkdir()
        replica = Replica.open(HastyFiles(), folder)
        replica.begin(Position(EPOCH + 1, 0))
        replica.close()
        with pytest.raises(StaleLeader):
            await cluster.follow(folder, "three")
        assert tree_of(folder) == {}


async def test_an_inventory_is_sent_while_the_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file can take long. Only sending notices that the connection has ended."""
    monkeypatch.setattr(follower_module, "TOGETHER_S", 0.0)
    arrived = threading.Event()

    class SlowReplica(Replica):
        def inventory(self) -> Iterator[bytes]:
            for number in range(2):
                yield FileDigest(0, 0, b"").encode(b"%d" % number)
                assert arrived.wait(PATIENCE_S)

    async def lead(stream: trio.SocketStream) -> None:
        reader = FrameReader()
        async with stream:
            await stream.send_all(WELCOME)
            while data := await stream.receive_some(1000):
                if FrameKind.INVENTORY in [kind for kind, _ in reader.receive(data)]:
                    arrived.set()
                    return

    replica = SlowReplica.open(HastyFiles(), tmp_path)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, lead, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            with pytest.raises((LinkError, trio.BrokenResourceError)):
                await follow(stream, replica, cluster="prod", member="two")
        nursery.cancel_scope.cancel()
    replica.close()
    assert arrived.is_set()


async def test_a_refused_follower_says_why(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 7)
    async with running(cluster):
        with pytest.raises(LinkError, match="the leader refuses: it belongs to cluster 'test'"):
            await cluster.follow(tmp_path / "two", "two", cluster="test")


WELCOME = b"".join(encode_json(FrameKind.WELCOME, {"version": 1, "epoch": EPOCH, "resumes": False}))
WRONG_LEADERS: dict[str, bytes] = {
    "version": b"".join(encode_json(FrameKind.WELCOME, {"version": 2, "epoch": 1, "resumes": False})),
    "no epoch": b"".join(encode_json(FrameKind.WELCOME, {"version": 1, "resumes": False})),
    "continues from nowhere": b"".join(
        encode_json(FrameKind.WELCOME, {"version": 1, "epoch": EPOCH, "resumes": True})
    ),
    "not WELCOME": b"".join(encode_number(FrameKind.CAUGHT_UP, 1)),
    "above": WELCOME + b"".join(encode_piece(FileBegin(b"../f", is_whole=True))),
    "the identity": WELCOME + b"".join(encode_piece(FileBegin(b"cluster.json", is_whole=True))),
    "a folder above": WELCOME + b"".join(encode_piece(Folder(b"..", frozenset()))),
    "a folder without a path": WELCOME + b"".join(encode_frame(FrameKind.FOLDER)),
    "a name that is cut off": WELCOME + b"".join(encode_frame(FrameKind.FOLDER, b"\0\0\0\x09x")),
    "a block of nothing": WELCOME + b"".join(encode_piece(Block(b"g", 0, b"x"))),
    "a block far away": WELCOME + b"".join(encode_piece(Block(b"f", (1 << 63) - 1, b"x"))),
    "a block that is cut off": WELCOME + b"".join(encode_frame(FrameKind.BLOCK, b"x")),
    "operations that are none": WELCOME + b"".join(encode_operations(1, [b"x" * 100])),
    "operations without a number": WELCOME + b"".join(encode_frame(FrameKind.OPERATIONS, b"x")),
    "a lower number after the copy": WELCOME
    + b"".join(encode_number(FrameKind.CAUGHT_UP, 5))
    + b"".join(encode_operations(1, encode(1, Kind.CREATE, b"f"))),
    "a copy after the copy": WELCOME
    + b"".join(encode_number(FrameKind.CAUGHT_UP, 5))
    + b"".join(encode_number(FrameKind.CAUGHT_UP, 6)),
}


@pytest.mark.parametrize("sent", WRONG_LEADERS.values(), ids=WRONG_LEADERS)
async def test_a_leader_that_sends_something_else(tmp_path: Path, sent: bytes) -> None:
    """The follower ends the connection with a reason, and nothing outside of the shared part has changed."""
    folder = tmp_path / "two"
    folder.mkdir()
    for name in ("f", "cluster.json"):
        (folder / name).write_bytes(b"x")
    (tmp_path / "f").write_bytes(b"x")

    async def lead(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(sent)
            while await stream.receive_some():
                pass

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, lead, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        replica = Replica.open(HastyFiles(), folder)
        with trio.fail_after(PATIENCE_S):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                with pytest.raises(NSQError):
                    await follow(stream, replica, cluster="prod", member="two")
        replica.close()
        nursery.cancel_scope.cancel()
    assert (tmp_path / "f").read_bytes() == (folder / "cluster.json").read_bytes() == b"x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "two"]


async def test_a_follower_says_that_it_lives_while_it_reads_its_folder(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    files = HeldFiles()

    async def lead(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(WELCOME)
            reader = FrameReader()
            kinds: list[FrameKind] = []
            while FrameKind.ALIVE not in kinds:
                kinds += [kind for kind, _ in reader.receive(bytes(await stream.receive_some()))]
            assert FrameKind.INVENTORY not in kinds
            files.release()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, lead, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        replica = Replica.open(files, tmp_path)
        files.hold("read")
        with trio.fail_after(PATIENCE_S):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                with pytest.raises((LinkError, trio.BrokenResourceError)):
                    await follow(stream, replica, cluster="prod", member="two", alive_s=0.05)
        replica.close()
        nursery.cancel_scope.cancel()


async def test_a_second_connection_of_a_follower_ends_the_first(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 8)
    async with running(cluster) as nursery:
        with trio.fail_after(PATIENCE_S):
            async with await trio.open_tcp_stream("127.0.0.1", cluster.port) as first:
                hello = HELLO | {"instance": INSTANCE}
                await first.send_all(b"".join(encode_json(FrameKind.HELLO, hello)))
                assert await first.receive_some()
                nursery.start_soon(cluster.follow, tmp_path / "two", "two")
                await cluster.until(lambda: cluster.has_all("two"))
                with suppress(trio.BrokenResourceError):
                    while await first.receive_some():
                        pass
        nursery.cancel_scope.cancel()


async def test_a_copy_of_a_followers_folder_is_refused_while_the_follower_is_connected(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path, 8)
    async with running(cluster) as nursery:
        with trio.fail_after(PATIENCE_S):
            nursery.start_soon(cluster.follow, tmp_path / "two", "two")
            await cluster.until(lambda: cluster.has_all("two"))
            async with await trio.open_tcp_stream("127.0.0.1", cluster.port) as copy:
                await copy.send_all(b"".join(encode_json(FrameKind.HELLO, HELLO | {"instance": "another"})))
                answer = b""
                while data := await copy.receive_some():
                    answer += data
            assert b"remove the content of the copy" in answer
            assert "two" in cluster.leader.followers
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(20))
def test_frames_that_arrive_in_parts(seed: int) -> None:
    chance = random.Random(seed)
    sent = [
        (chance.choice(list(FrameKind)), chance.randbytes(chance.choice((0, 1, 100, 5000))))
        for _ in range(50)
    ]
    data = b"".join(b"".join(encode_frame(kind, payload)) for kind, payload in sent)
    reader, received = FrameReader(), []
    while data:
        size = chance.choice((1, 3, 1000))
        received += [(kind, bytes(payload)) for kind, payload in reader.receive(data[:size])]
        data = data[size:]
    assert received == sent


def test_a_large_frame_ends_with_what_is_received() -> None:
    """So nothing of the next one is moved."""
    chance = random.Random(7)
    sent = [(FrameKind.BLOCK, chance.randbytes(size)) for size in (3_000_000, 5, 2_500_000)]
    data = memoryview(b"".join(b"".join(encode_frame(kind, payload)) for kind, payload in sent))
    reader, received = FrameReader(), list[tuple[FrameKind, bytes]]()
    while data:
        room = reader.room_in_frame()
        count = min(len(room), len(data))
        room[:count] = data[:count]
        data = data[count:]
        found = [(kind, bytes(payload)) for kind, payload in reader.add(count)]
        if found and not received:
            assert len(data) == 2 * 5 + 5 + 2_500_000
        received += found
    assert received == sent


PIECES: list[Piece] = [
    Operations(b"data", 7),
    Folder(b"", frozenset()),
    Folder(b"a/b", frozenset({b"c", b"d"})),
    FileBegin(b"a/b", is_whole=False),
    FileBegin(b"a/b", is_whole=True),
    Block(b"a/b", 1 << 40, b"data"),
    FileEnd(b"a/b", 1 << 40),
    CaughtUp(1 << 40),
]


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: type(piece).__name__)
def test_pieces_come_back_from_frames(piece: Piece) -> None:
    ((kind, payload),) = FrameReader().receive(b"".join(encode_piece(piece)))
    assert decode_piece(kind, payload) == piece
