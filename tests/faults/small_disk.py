"""Small disks, and clients that fill them, with a ledger of the broker's answers.

`python -m faults.small_disk DATA_PATH BYTES ADDRESSES OPTIONS`: a broker on a simulated disk of that size,
which needs no root: operations fail as on a full disk. OPTIONS, of `BrokerOptions`, are a JSON object. The
broker writes its addresses to the file ADDRESSES; then it prints "ready".
"""

import errno
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from struct import pack, unpack_from
from subprocess import run
from threading import Lock

import pytest
import trio

from broker.support import mpub
from faults.load import Gone, connection
from interop.peers import Broker, Child
from log.support import HastyFiles
from trio_nsq.broker import BrokerOptions, serve
from trio_nsq.log.files import Space

_BLOCK_BYTES = 4096
_MOUNT_S = 30.0
_START_S = 60.0
_PAUSE_S = 0.002
"""Retry delay of a refused producer."""


@contextmanager
def small_disk(folder: Path, size: str, kind: str = "tmpfs") -> Iterator[None]:
    """Mount a `tmpfs` or `ext4` file system; skip the test if that is not permitted, also in CI."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
    image = folder.with_name(f"{folder.name}.image")
    if kind != "tmpfs":
        _or_skip(["truncate", f"--size={size}", image])
        _or_skip([f"mkfs.{kind}", "-q", image])
        options = ["-o", "loop", str(image)]
    _or_skip(["mount", *options, folder])
    try:
        yield
    finally:
        deadline = time.monotonic() + _MOUNT_S
        while run(["umount", folder], check=False, capture_output=True).returncode:
            assert time.monotonic() < deadline, f"{folder} stays in use"
            time.sleep(0.1)  # a killed broker may still be exiting
        image.unlink(missing_ok=True)


def _or_skip(command: Sequence[str | Path]) -> None:
    try:
        done = run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as exc:
        pytest.skip(f"a small file system cannot be made here: {exc}")
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")


class SmallFiles(HastyFiles):
    """Real files in one folder, on a simulated disk of limited size: writes fail as on a full disk.

    As on a real disk, a deleted file uses space until it is closed.

    Attributes:
        disk_bytes: Bytes of the disk; it may be changed.
    """

    def __init__(self, folder: Path, disk_bytes: int) -> None:
        self.disk_bytes = disk_bytes
        self._lock = Lock()
        self._open: Counter[int] = Counter()  # number of descriptors, by inode
        self._nameless: set[int] = set()  # inodes of open files
        self._blocks = {
            path.stat().st_ino: self._blocks_of(path.stat().st_size) for path in folder.rglob("*")
        }

    @staticmethod
    def _blocks_of(size: int) -> int:
        return -(-size // _BLOCK_BYTES)

    @property
    def free_bytes(self) -> int:
        """The free bytes."""
        return self.disk_bytes - sum(self._blocks.values()) * _BLOCK_BYTES

    def space(self, path: Path) -> Space:
        with self._lock:
            return Space(self.free_bytes, self.disk_bytes)

    def _grow(self, fd: int, size: int) -> bool:
        """Allocate space for a file of this size; False if there is not enough."""
        inode = os.fstat(fd).st_ino
        blocks = max(self._blocks.get(inode, 0), self._blocks_of(size))
        if (blocks - self._blocks.get(inode, 0)) * _BLOCK_BYTES > self.free_bytes:
            return False
        self._blocks[inode] = blocks
        return True

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        data = b"".join(parts)
        with self._lock:
            while not self._grow(fd, offset + len(data)):
                data = data[: len(data) // 2]  # a part is written
            super().write(fd, offset, [data])
        if len(data) < sum(map(len, parts)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def allocate(self, fd: int, size: int) -> None:
        with self._lock:
            if not self._grow(fd, size):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().allocate(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        with self._lock:
            super().truncate(fd, size)
            self._blocks[os.fstat(fd).st_ino] = self._blocks_of(size)

    def create(self, path: Path) -> int:
        return self._opened(super().create(path))

    def open(self, path: Path) -> int:
        return self._opened(super().open(path))

    def open_read_only(self, path: Path) -> int:
        return self._opened(super().open_read_only(path))

    def create_or_empty(self, path: Path) -> int:
        with self._lock:
            fd = super().create_or_empty(path)
            self._blocks[os.fstat(fd).st_ino] = 0
        return self._opened(fd)

    def _opened(self, fd: int) -> int:
        with self._lock:
            self._open[os.fstat(fd).st_ino] += 1
        return fd

    def close(self, fd: int) -> None:
        with self._lock:
            inode = os.fstat(fd).st_ino
            super().close(fd)
            self._open[inode] -= 1
            if not self._open[inode]:
                del self._open[inode]
                if inode in self._nameless:
                    self._nameless.remove(inode)
                    self._blocks.pop(inode, None)

    def create_folder(self, path: Path) -> None:
        with self._lock:
            if self.free_bytes < _BLOCK_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().create_folder(path)
            self._blocks[path.stat().st_ino] = 1

    def rename(self, path: Path, to: Path) -> None:
        with self._lock:
            replaced = to.stat() if to.exists() else None
            super().rename(path, to)
            if replaced is not None:
                self._lose_name(replaced)

    def unlink(self, path: Path) -> None:
        with self._lock:
            unlinked = path.stat()
            super().unlink(path)
            self._lose_name(unlinked)

    def _lose_name(self, file: os.stat_result) -> None:
        if file.st_nlink > 1:
            return
        if self._open[file.st_ino]:
            self._nameless.add(file.st_ino)
        else:
            self._blocks.pop(file.st_ino, None)


class FullDiskLedger:
    """The answers to producers and the messages of consumers, by number. Every attempt uses new numbers.

    Attributes:
        acknowledged, refused: The answers to publishers. Other messages may or may not be stored.
        received: The messages from each channel.
        refusals: The texts of the refusals.
    """

    def __init__(self) -> None:
        self.acknowledged: dict[int, str] = {}
        self.refused: set[int] = set()
        self.received: dict[tuple[str, str], set[int]] = {}
        self.refusals: set[bytes] = set()
        self._next = 0

    def number(self) -> int:
        """Return an unused number."""
        self._next += 1
        return self._next

    def judge(self) -> list[str]:
        """Return the errors, after all channels are empty and all producers have ended."""
        wrong = []
        for (topic, channel), received in self.received.items():
            due = {number for number, where in self.acknowledged.items() if where == topic}
            if lost := due - received:
                wrong.append(
                    f"{topic}/{channel}: {len(lost)} acknowledged messages are lost, such as {min(lost)}"
                )
            if made_up := received & self.refused:
                wrong.append(
                    f"{topic}/{channel}: {len(made_up)} refused messages came, such as {min(made_up)}"
                )
        return wrong


async def publish_for_ever(
    address: Callable[[], str], ledger: FullDiskLedger, topic: str, body_bytes: int, messages: int
) -> None:
    """Publish batches of this many messages, with retries; runs until cancelled."""
    while True:
        try:
            async with connection(address()) as client:
                while True:
                    numbers = [ledger.number() for _ in range(messages)]
                    bodies = [pack(">Q", number) + bytes(body_bytes) for number in numbers]
                    await client.send(mpub(topic, *bodies))
                    (frame,) = await client.frames()
                    if frame == (0, b"OK"):
                        ledger.acknowledged.update(dict.fromkeys(numbers, topic))
                    else:
                        ledger.refused.update(numbers)
                        ledger.refusals.add(frame[1])
                        await trio.sleep(_PAUSE_S)
        except Gone:
            await trio.sleep(0.01)


async def consume_for_ever(
    address: Callable[[], str], ledger: FullDiskLedger, topic: str, channel: str
) -> None:
    """Finish all messages from a channel; runs until cancelled."""
    received = ledger.received.setdefault((topic, channel), set())
    while True:
        try:
            async with connection(address()) as client:
                await client.send(b"SUB %s %s\nRDY 200\n" % (topic.encode(), channel.encode()))
                while True:
                    for frame_type, data in await client.frames():
                        if frame_type == 2:
                            received.add(unpack_from(">Q", data, 26)[0])
                            await client.send(b"FIN %s\n" % data[10:26])
        except Gone:
            await trio.sleep(0.01)


@asynccontextmanager
async def meanwhile(*tasks: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run tasks while the block runs."""
    async with trio.open_nursery() as nursery:
        for task in tasks:
            nursery.start_soon(task)
        yield
        nursery.cancel_scope.cancel()


async def main(data_path: Path, size: int, addresses: Path, options: str) -> None:
    """Run a broker until it is killed."""
    made = BrokerOptions(
        data_path=data_path, tcp_address="127.0.0.1:0", http_address="127.0.0.1:0", **json.loads(options)
    )
    async with trio.open_nursery() as nursery:
        files = SmallFiles(data_path, size)
        bound = await nursery.start(lambda task_status: serve(made, files=files, task_status=task_status))
        addresses.write_text(json.dumps([bound.tcp_address, bound.http_address]))
        print("ready", flush=True)


@contextmanager
def on_small_disk(folder: Path, disk_bytes: int, **options: object) -> Iterator[Broker]:
    """Run a broker on a simulated disk of this size; it is killed at the end of the block."""
    told = folder.with_name(f"{folder.name}.addresses")
    child = Child(
        [sys.executable, "-m", "faults.small_disk", folder, str(disk_bytes), told, json.dumps(options)]
    )
    try:
        if child.stdout.next(time.monotonic() + _START_S) != "ready":
            child.fail("did not start")
        tcp_address, http_address = json.loads(told.read_text())
        yield Broker(tcp_address, http_address, child)
    finally:
        child.close()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
