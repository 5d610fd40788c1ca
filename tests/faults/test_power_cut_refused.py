"""Refused messages and power cuts: once the disk works again, no power cut brings back what was refused.

Operations on files fail while messages are published. The broker removes what it has refused, and syncs that by itself:
nothing is published afterwards.
"""

import errno
import os
import random
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from broker.support import connected, mpub, running_broker, settle, threads_done
from faults.disk import RecordingFiles, disk_at, write_image
from faults.power_cut import AHEAD, sync_options
from log.support import HastyFiles
from soak import in_soak
from trio_nsq.log import DiskLog

TOPICS = ("one", "two", "three")


class FailingDisk(RecordingFiles):
    """A disk on which operations fail on request: a failing write writes a part, and a failing sync may store all.

    Attributes:
        failing: How often each operation on segments and write-ahead files still fails, and its error number.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root, sync_takes_s=0)
        self.failing: dict[str, tuple[int, int]] = {}

    def _fails(self, name: str) -> OSError | None:
        times, code = self.failing.get(name, (0, 0))
        if not times:
            return None
        self.failing[name] = times - 1, code
        return OSError(code, os.strerror(code))

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        data = b"".join(parts)
        if offset and (error := self._fails("write")):
            super().write(fd, offset, [data[: len(data) * 2 // 3]])
            raise error
        super().write(fd, offset, [data])

    def truncate(self, fd: int, size: int) -> None:
        if error := self._fails("truncate"):
            raise error
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        if error := self._fails("sync"):
            raise error
        super().sync(fd)


async def bodies_after(data_path: Path) -> dict[str, list[bytes]]:
    """Start a broker on a data folder, stop it, and return what the logs have."""
    async with running_broker(data_path, files=HastyFiles()):
        pass
    found: dict[str, list[bytes]] = {}
    for topic in TOPICS:
        log = DiskLog(data_path / "topics" / f"{topic}.topic", files=HastyFiles())
        found[topic] = [body for record in log.read(0) for body in record.messages.bodies()]
        log.close()
    return found


FAILING: dict[str, dict[str, tuple[int, int]]] = {
    "a sync": {"sync": (3, errno.EIO)},
    "a sync, and then the cut": {"sync": (3, errno.EIO), "truncate": (5, errno.EIO)},
    "many syncs": {"sync": (30, errno.EIO)},
    "a write": {"write": (3, errno.ENOSPC)},
    "a write, and then the cut": {"write": (3, errno.ENOSPC), "truncate": (6, errno.EIO)},
    "a write, the cut, and its sync": {
        "write": (3, errno.EIO), "truncate": (3, errno.EIO), "sync": (9, errno.EIO),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "stops"),
    [*[(what, False) for what in FAILING], ("a sync, and then the cut", True), ("a write", True)],
)
@pytest.mark.parametrize("sync", ["always", AHEAD, *in_soak("interval")])
async def test_refused_messages_do_not_come_back(
    tmp_path: Path,
    mock_clock: trio.testing.MockClock,
    sync: str,
    what: str,
    stops: bool,
) -> None:
    root = tmp_path / "before"
    root.mkdir()
    files = FailingDisk(root)
    stored: dict[str, list[bytes]] = {topic: [] for topic in TOPICS}

    async def publish(*mpubs: list[int]) -> None:
        """Publish these MPUBs of bodies of these sizes to each topic, all at once."""
        async with AsyncExitStack() as stack:
            clients = {
                topic: await stack.enter_async_context(connected(bound.tcp_address)) for topic in TOPICS
            }
            for topic, client in clients.items():
                bodies = [[topic.encode() * size for size in sizes] for sizes in mpubs]
                await client.send(b"".join(mpub(topic, *some) for some in bodies))
            for topic, client in clients.items():
                for sizes in mpubs:
                    if await client.frame() == (0, b"OK"):  # a refusal ends the connection
                        stored[topic] += [topic.encode() * size for size in sizes]

    options: dict[str, Any] = {"checkpoint_interval_ms": 1000, **sync_options(sync)}
    async with running_broker(root / "d", files=files, **options) as bound:
        await publish([1])
        await publish([2])
        files.failing = dict(FAILING[what])
        await publish([3], [4] * 3000, [5])  # the second has more messages than one record has
        files.failing = {name: (0 if stops else times, code) for name, (times, code) in files.failing.items()}
        for _ in range(0 if stops else 12):
            await settle()
            await threads_done()
            mock_clock.jump(10)
        await settle()
        await threads_done()
        now = files.position
    assert all(len(some) in (2, 3004) for some in stored.values())
    chance = random.Random(1)
    for _, disk in disk_at(files.journal, [files.position if stops else now]):
        for cut, image in disk.power_cuts(chance):
            shutil.rmtree(tmp_path / "after", ignore_errors=True)
            write_image(image, tmp_path / "after")
            found = await bodies_after(tmp_path / "after" / "d")
            for topic in TOPICS:
                if stored[topic] != found[topic]:
                    sizes = len(stored[topic]), len(found[topic])
                    raise AssertionError((cut, topic, sizes))
