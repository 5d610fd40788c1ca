"""A full or broken disk: producers get errors, no acknowledged message is lost, and the broker recovers."""

import errno
import os
import random
import shutil
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from itertools import product
from pathlib import Path

import pytest
import trio.testing

from broker.support import PATIENCE_S, RawClient, connected, mpub, running_broker, settle, threads_done
from faults.disk import read_image, write_image
from faults.power_cut import AHEAD, EVERY_OK_SYNCED, IN_LOOP, sync_options
from faults.scenario import Expectation, Scenario, http, judge, look
from faults.small_disk import small_disk
from interop.peers import Broker, qcli_serve
from log.support import HastyFiles
from trio_nsq.broker import BoundAddresses
from trio_nsq.broker.storage.disk_reserve import RESERVE_BYTES
from trio_nsq.log import Files

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
SEED = int(os.environ.get("FAULT_SEED", "7"))
SAMPLES = 3
OPERATIONS = (
    "create", "open", "write", "truncate", "sync", "sync_folder", "create_folder", "create_or_empty", "rename",
)  # fmt: skip
EACH_FAILURE = [
    *product(("always", "interval", AHEAD), (errno.ENOSPC, errno.EIO), OPERATIONS),
    *product((IN_LOOP,), (errno.EIO,), OPERATIONS),
]
SOME_FAILURES = [
    *product(("always",), (errno.ENOSPC,), OPERATIONS),
    # The other modes differ in how they write and sync, and the write-ahead log has files of its own.
    *product(("interval", IN_LOOP), (errno.EIO,), ("write", "sync")),
    *product((AHEAD,), (errno.EIO,), ("write", "sync", "create", "truncate")),
]
_NEW = {"one": 900_000_000, "two": 900_000_001}


class FaultyFiles(HastyFiles):
    """Real files with operations that fail on request.

    Attributes:
        position: The number of operations so far.
        failing: The error numbers of the operations that fail now, by name; a failing `write` writes a part.
        fail_at: The position of an operation that fails with EIO, whichever it is.
        failed: The operations that failed.
    """

    def __init__(self) -> None:
        self.position = 0
        self.failing: dict[str, int] = {}
        self.fail_at = -1
        self.failed: list[str] = []

    def _pass(self, name: str) -> None:
        self.position += 1
        code = errno.EIO if self.position == self.fail_at else self.failing.get(name)
        if code is not None:
            self.failed.append(name)
            raise OSError(code, os.strerror(code))

    def create(self, path: Path) -> int:
        self._pass("create")
        return super().create(path)

    def open(self, path: Path) -> int:
        self._pass("open")
        return super().open(path)

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        try:
            self._pass("write")
        except OSError:
            data = b"".join(parts)
            super().write(fd, offset, [data[: len(data) // 2]])
            raise
        super().write(fd, offset, parts)

    def truncate(self, fd: int, size: int) -> None:
        self._pass("truncate")
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._pass("sync")
        super().sync(fd)

    def sync_folder(self, path: Path) -> None:
        self._pass("sync_folder")
        super().sync_folder(path)

    def create_folder(self, path: Path) -> None:
        self._pass("create_folder")
        super().create_folder(path)

    def create_or_empty(self, path: Path) -> int:
        self._pass("create_or_empty")
        return super().create_or_empty(path)

    def rename(self, path: Path, to: Path) -> None:
        self._pass("rename")
        super().rename(path, to)

    def link(self, path: Path, to: Path) -> None:
        self._pass("link")
        super().link(path, to)

    def unlink(self, path: Path) -> None:
        self._pass("unlink")
        super().unlink(path)


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


def broker(
    data_path: Path, files: Files, sync: str = "always"
) -> AbstractAsyncContextManager[BoundAddresses]:
    """Run a broker with small files, which it begins and deletes often."""
    return running_broker(
        data_path,
        files=files,
        **sync_options(sync),
        max_bytes_per_file=2000,
        checkpoint_interval_ms=1000,
        sync_timeout_ms=1000,
    )


async def ping(bound: BoundAddresses) -> tuple[int, str]:
    """Return the status and the text of /ping."""
    assert bound.http_address is not None
    status, content = await http(bound.http_address, "GET", "/ping")
    return status, content.decode()


async def until_it_is_well(bound: BoundAddresses, scenario: Scenario, clock: trio.testing.MockClock) -> None:
    """Run checkpoints until everything is saved."""
    for _ in range(10):
        await scenario.publish("one")
        await scenario.publish("two")
        clock.jump(2)
        await settle()
        if await ping(bound) == (200, "OK"):
            return
    raise AssertionError(await ping(bound))


async def check(folder: Path, expected: Expectation, clock: trio.testing.MockClock) -> None:
    """Start a broker on a data folder, and compare."""
    async with broker(folder, HastyFiles()) as bound:
        found = await look(bound, clock, _NEW)
    wrong = judge(expected, found, _NEW)
    assert not wrong, "\n".join(wrong)


async def use(
    folder: Path, files: FaultyFiles, clock: trio.testing.MockClock, sync: str, *, failing: dict[str, int]
) -> tuple[Scenario, list[str]]:
    """Use a broker with a working disk, a failing one, and a working one again.

    Returns:
        The actions, and the answers of `/ping` after each refused publish.
    """
    said: list[str] = []
    async with broker(folder / "d", files, sync) as bound:
        scenario = Scenario(bound, files, clock, random.Random(SEED))
        scenario.may_refuse = files.fail_at > 0
        await scenario.run(15)
        scenario.may_refuse = True
        files.failing = failing
        for _ in range(25):
            refusals = len(scenario.refusals)
            await scenario.run(1)
            if len(scenario.refusals) > refusals:
                said.append((await ping(bound))[1])
        shutil.rmtree(folder / "killed", ignore_errors=True)
        await threads_done()  # one may be removing a file
        write_image(read_image(folder / "d"), folder / "killed")
        killed_at = files.position
        files.failing = {}
        await threads_done()  # one may be repeating a failed operation, and refuse publishes meanwhile
        scenario.may_refuse = files.fail_at > 0
        await until_it_is_well(bound, scenario, clock)
        await scenario.settle_requests()
        await scenario.run(15)
    scenario.told.keep_what_is_acknowledged()
    await check(folder / "killed", scenario.told.by(killed_at), clock)
    await check(folder / "d", scenario.told.by(files.position), clock)
    return scenario, said


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "code", "operation"), EACH_FAILURE if COMPLETE else SOME_FAILURES)
async def test_operation_that_fails_for_some_time(
    fast_folder: Path, clock: trio.testing.MockClock, sync: str, operation: str, code: int
) -> None:
    files = FaultyFiles()
    scenario, said = await use(fast_folder, files, clock, sync, failing={operation: code})
    assert all(os.strerror(code) in text for text in scenario.refusals), scenario.refusals
    bad = [text for text in said if text != "OK"]  # another publish may have succeeded in between
    assert all(text.startswith("NOK - ") and os.strerror(code) in text for text in bad), said
    if operation in ("write", "sync") and sync in EVERY_OK_SYNCED:
        assert bad


@pytest.mark.slow
@pytest.mark.parametrize("sync", EVERY_OK_SYNCED)
async def test_each_operation_fails_once(fast_folder: Path, clock: trio.testing.MockClock, sync: str) -> None:
    files = FaultyFiles()
    await use(fast_folder, files, clock, sync, failing={})
    first = 10  # until then the broker starts
    chance = random.Random(SEED)
    positions = range(first, files.position - 100)
    for position in positions if COMPLETE else sorted(chance.sample(positions, SAMPLES)):
        shutil.rmtree(fast_folder / "d")
        files = FaultyFiles()
        files.fail_at = position
        scenario, _ = await use(fast_folder, files, clock, sync, failing={})
        assert len(files.failed) == 1
        assert all("Input/output error" in text for text in scenario.refusals), scenario.refusals


class FullFiles(HastyFiles):
    """Real files on a full disk, except for the space that `spare` has reserved."""

    def __init__(self, spare: Path) -> None:
        self.full = False
        self._spare = spare

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        if self.full and self._spare.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, offset, parts)

    def allocate(self, fd: int, size: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, size)


async def test_finished_messages_can_be_saved_on_a_full_disk(tmp_path: Path) -> None:
    """Otherwise its messages could never be deleted, and the disk would stay full."""
    files = FullFiles(tmp_path / "d" / "spare-room")
    async with broker(tmp_path / "d", files) as bound:
        assert bound.http_address is not None
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c", ready_count=1)
            await client.publish("t", b"x" * 3000)
            await client.publish("t", b"y")
            files.full = True
            for _ in range(2):
                await client.send(b"FIN %s\n" % (await client.message()).id)
            await client.send(b"CLS\n")  # answered after the FINs are executed
            assert await client.frame() == (0, b"CLOSE_WAIT")
        assert len(list((tmp_path / "d" / "topics" / "t.topic").glob("*.log"))) == 2
        assert (await http(bound.http_address, "POST", "/channel/pause", topic="t", channel="c"))[0] == 200
        assert len(list((tmp_path / "d" / "topics" / "t.topic").glob("*.log"))) == 1
        assert not (tmp_path / "d" / "spare-room").exists()
        files.full = False
        with trio.fail_after(PATIENCE_S):
            while (await ping(bound))[0] != 200:
                await trio.lowlevel.checkpoint()
        assert (tmp_path / "d" / "spare-room").stat().st_size == RESERVE_BYTES


# ---------------------------------------------------------------------- with a real file system


async def fill(broker: Broker) -> list[bytes]:
    """Publish until not even a message of one byte is accepted; return the accepted ones."""
    stored: list[bytes] = []
    size = 250_000
    while size:
        async with connected(broker.tcp_address) as client:
            while True:
                body = b"%d" % len(stored) + bytes(size)
                await client.send(mpub("t", body))
                frame = await client.frame()
                if frame != (0, b"OK"):
                    break
                stored.append(body)
        assert frame is not None
        assert frame[1].startswith(b"E_MPUB_FAILED MPUB failed cannot write "), frame
        assert frame[1].endswith(b"No space left on device")
        size //= 4
    return stored


async def receive(client: RawClient, bodies: Sequence[bytes]) -> None:
    """Receive and finish exactly these."""
    for body in bodies:
        message = await client.message()
        assert message.body == body
        await client.send(b"FIN %s\n" % message.id)


def answer_of(broker: Broker, method: str, path: str, **query: str) -> str:
    """Return the status and the text of an answer that is not 200; OK otherwise."""
    try:
        broker.http(method, path, **query)
    except RuntimeError as exc:
        return str(exc)
    return "OK"


@pytest.mark.slow
async def test_full_file_system(tmp_path: Path) -> None:
    """It is filled to the last byte; finished messages alone make room for the broker."""
    disk = tmp_path / "disk"
    flags = ("--max-bytes-per-file=300000", "--checkpoint-interval=50ms")
    with small_disk(disk, "4m"):
        with qcli_serve(disk / "d", *flags) as broker:
            broker.create("t", "c")
            stored = await fill(broker)
            assert len(stored) > 10
            assert "500" in (text := answer_of(broker, "GET", "/ping"))
            assert "NOK - cannot write" in text
            assert "No space left on device" in text
            broker.process.kill()
            broker.process.wait()
        with qcli_serve(disk / "d", *flags) as broker:
            async with connected(broker.tcp_address) as client:
                await client.subscribe("t", "c", ready_count=5)
                await receive(client, stored)
                with trio.fail_after(PATIENCE_S):
                    while not await publishes(broker, b"again"):
                        await trio.sleep(0.05)  # another process does not notify when it has made room
                await receive(client, [b"again"])
                assert answer_of(broker, "GET", "/ping") == "OK"
        with qcli_serve(disk / "d", *flags) as broker:
            assert broker.channel_stats("t", "c")["depth"] == 0


async def publishes(broker: Broker, body: bytes) -> bool:
    """Return whether a message is accepted now."""
    async with connected(broker.tcp_address) as client:
        await client.send(mpub("t", body))
        return await client.frame() == (0, b"OK")
