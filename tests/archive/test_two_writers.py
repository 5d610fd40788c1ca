"""A former leader that was paused while it wrote: what it writes when it wakes is never restored."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copy
from threading import Event

import pytest
import trio

from archive.folders import PATIENCE_S, restore, until_archived, writer_of
from replication.leader import RandomChanges, tree_of
from trio_nsq.archive import OWNER_FILE
from trio_nsq.archive.manifest import MANIFEST
from trio_nsq.protocol.errors import NSQError
from trio_nsq.storage import Lease, LeaseLost, LocalStorage


class _Taken(Lease):
    """A lease that another process may have taken."""

    def __init__(self) -> None:
        self.is_lost = False

    def check(self) -> None:
        if self.is_lost:
            raise LeaseLost("another process has taken over")


class PausedStorage(LocalStorage):
    """A folder whose writer stops in the middle of a write, until it is woken; its lease ends meanwhile.

    Attributes:
        where: Words in the name of the object; empty: it goes on.
        skipped: So many writes of it are not stopped.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.where, self.skipped = "", 0
        self.lease = _Taken()
        self.is_paused, self.woken, self.is_done = Event(), Event(), Event()

    @contextmanager
    def hold(self, name: str, if_held: Callable[[str], NSQError]) -> Iterator[Lease]:
        if self.lease.is_lost:
            raise if_held("another process has taken over")
        yield self.lease

    def _pause(self, name: str) -> None:
        if self.where and self.where in name and not self.is_paused.is_set():
            self.skipped -= 1
            if self.skipped < 0:
                self.is_paused.set()
                self.woken.wait(PATIENCE_S)

    def replace(self, name: str, data: bytes, version: str | None) -> str:
        self._pause(name)
        try:
            return super().replace(name, data, version)
        finally:
            if self.woken.is_set():
                self.is_done.set()

    def put_new(self, name: str, data: bytes) -> bool:
        self._pause(name)
        done = super().put_new(name, data)
        if self.woken.is_set():
            self.is_done.set()
        return done

    def put(self, name: str, data: bytes) -> None:
        if name != MANIFEST:  # `replace` has compared its version, in one step with the write in a bucket
            self._pause(name)
        super().put(name, data)
        if self.woken.is_set():
            self.is_done.set()


@pytest.mark.parametrize(
    ("where", "skipped"),
    [
        ("@stream/", 0),
        ("@checkpoints/0000000002/0", 0),
        ("@checkpoints/0000000002/segments", 0),
        (MANIFEST, 0),
        (MANIFEST, 1),  # it has checked its lease, and would add its checkpoint
    ],
)
async def test_a_writer_that_wakes_after_another_one_has_begun(
    tmp_path: Path, where: str, skipped: int
) -> None:
    archive = tmp_path / "archive"
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    storage = PausedStorage(archive)
    former, next_one = writer_of(storage, one), writer_of(LocalStorage(archive), two)
    changes = RandomChanges(former.files, one, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(former.run)
        await until_archived(former)
        copy(one / OWNER_FILE, two)  # as the members of a cluster have it
        storage.where, storage.skipped = where, skipped
        with trio.fail_after(PATIENCE_S):
            while not storage.is_paused.is_set():
                changes.step()
                await trio.sleep(0.001)
        storage.lease.is_lost = True
        nursery.start_soon(next_one.run)
        others = RandomChanges(next_one.files, two, 2)
        for _ in range(50):
            others.step()
        await until_archived(next_one)
        storage.woken.set()
        with trio.fail_after(PATIENCE_S):
            while not storage.is_done.is_set() or "another" not in former.status().error:
                changes.step()
                await trio.sleep(0.005)
        for _ in range(50):
            others.step()
        changes.close()
        others.close()
        former.finish(0)
        next_one.finish(PATIENCE_S)
    restore(archive, tmp_path / "restored")
    assert tree_of(tmp_path / "restored") == tree_of(two)
