"""Archives whose clock steps, whose store fails, or that two brokers write: each restore has one consistent history."""

import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import trio

from archive.folders import Remembered, copy_archive, number_of, restore, writer_of
from broker.support import PATIENCE_S, running_broker
from replication.leader import RandomChanges, Tree, tree_of, trees_of
from soak import some
from storage.stores import Fault, Store, proxy
from trio_nsq.archive.examination import checkpoints_of, verify
from trio_nsq.archive.manifest import CHECKPOINTS, MANIFEST, list_stream
from trio_nsq.archive.pruning import prune
from trio_nsq.archive.restore import RestorePlan, Restorer, find_restore_point
from trio_nsq.archive.writer import ArchiveStatus, ArchiveWriter
from trio_nsq.broker.restoring import restore_folder
from trio_nsq.event_loop.pacing import Pacing
from trio_nsq.protocol.errors import NSQError
from trio_nsq.storage import Lease, LeaseLost, LocalStorage, Patience, StorageError, storage_at


def _shared(tree: Tree) -> Tree:
    """Leave out deleted topics: their removal is not one moment."""
    return {path: content for path, content in tree.items() if b"-deleted-" not in path}


def _findings(archive: Path) -> list[object]:
    return list(verify(LocalStorage(archive), lambda size: None, all_checkpoints=True))


async def _until(writer: ArchiveWriter, holds: Callable[[ArchiveStatus], bool]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not holds(writer.status()):
            await trio.sleep(0.002)


def _is_archived(status: ArchiveStatus) -> bool:
    return status.state == "archiving" and not status.lag_operations


# ---------------------------------------------------------------------- clock steps


@pytest.mark.parametrize("seed", some(range(2)))
async def test_times_of_an_archive_never_go_back(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    data, archive = tmp_path / "data", tmp_path / "archive"
    data.mkdir()
    now_s = 1_800_000_000.0
    monkeypatch.setattr("trio_nsq.archive.checkpoints.time", SimpleNamespace(time=lambda: now_s))
    states: list[tuple[int, str, int]] = []
    for checkpoint_bytes in (1 << 30, 2000, 1 << 30, 2000):
        writer = writer_of(LocalStorage(archive), data, checkpoint_bytes=checkpoint_bytes)
        changes = RandomChanges(writer.files, data, seed)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            for _ in range(30):
                changes.step()
                await _until(writer, _is_archived)
                now_s += chance.choice((1, 1, 1, 60, -60, 7200, -7200))
            changes.close()
            writer.finish(PATIENCE_S)
        now_s -= 86_400
    storage = LocalStorage(archive)
    for extent in checkpoints_of(storage):
        run = extent.checkpoint.run
        states.append((extent.checkpoint.time_ms, run, extent.checkpoint.number))
        stream = list_stream(storage, extent.checkpoint).objects
        states += [(each.about.time_ms, run, each.about.last) for each in stream]
    times = [time_ms for time_ms, _, _ in states]
    assert times == sorted(times)
    for time_ms in sorted(set(times)):
        found = find_restore_point(storage, time_ms)
        last = [state for state in states if state[0] <= time_ms][-1]
        assert (found.time_ms, found.checkpoint.run, number_of(found)) == last
    from_ms = times[len(times) // 2]
    kept = prune(storage, from_ms).from_ms
    assert kept <= from_ms
    for time_ms, run, number in states:
        if time_ms >= kept and [each[0] for each in states].count(time_ms) == 1:
            found = find_restore_point(storage, time_ms)
            assert (found.checkpoint.run, number_of(found)) == (run, number)
    assert not _findings(archive)


# ---------------------------------------------------------------------- lost answers


class _LosesAnswers(LocalStorage):
    """A folder some of whose writes fail; most of these were done nevertheless."""

    def __init__(self, folder: Path, chance: random.Random, share: float = 0.3) -> None:
        super().__init__(folder)
        self._chance = chance
        self.share = share
        self.loses: Callable[[str], bool] = lambda name: self._chance.random() < self.share

    @contextmanager
    def _lost(self, name: str) -> Iterator[None]:
        if (is_lost := self.loses(name)) and self._chance.random() < 0.3:
            raise StorageError("the request is lost")
        yield
        if is_lost:
            raise StorageError("the answer is lost")

    def put_new(self, name: str, data: bytes) -> bool:
        with self._lost(name):
            return super().put_new(name, data)

    def put(self, name: str, data: bytes) -> None:
        with self._lost(name):
            super().put(name, data)

    def replace(self, name: str, data: bytes, version: str | None) -> str:
        with self._lost(name):
            return super().replace(name, data, version)


@pytest.mark.parametrize("steps_s", [0.0, 0.001], ids=["the clock stands still", "it goes on"])
async def test_lost_answers_cost_no_copy_of_the_folder(
    tmp_path: Path, steps_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    data.mkdir()
    now_s = 1_800_000_000.0
    monkeypatch.setattr("trio_nsq.archive.checkpoints.time", SimpleNamespace(time=lambda: now_s))
    monkeypatch.setattr("trio_nsq.archive.writer.FIRST_RETRY_S", 0.001)
    monkeypatch.setattr("trio_nsq.archive.writer.MAX_RETRY_S", 0.01)
    storage = _LosesAnswers(archive, random.Random(5), share=0.0)
    writer = writer_of(storage, data, checkpoint_bytes=1 << 30)
    changes = RandomChanges(writer.files, data, 5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        await _until(writer, _is_archived)
        storage.share = 0.5
        for step in range(200):
            changes.step()
            now_s += steps_s
            if step % 5 == 0:
                await trio.sleep(0.001)
        changes.close()
        await _until(writer, _is_archived)
        writer.finish(PATIENCE_S)
    assert writer.status().checkpoints == 1
    point = restore(archive, tmp_path / "restored")
    assert number_of(point) == writer.operations.last_number
    assert _shared(tree_of(tmp_path / "restored")) == _shared(tree_of(data))
    assert not _findings(archive)


async def test_a_lost_answer_of_the_manifest_does_not_end_checkpoints(tmp_path: Path) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    data.mkdir()
    storage = _LosesAnswers(archive, random.Random(5), share=0.0)
    writer = writer_of(storage, data, checkpoint_bytes=1000)
    changes = RandomChanges(writer.files, data, 5)
    lost: list[str] = []

    def loses(name: str) -> bool:
        if name == MANIFEST and writer.status().checkpoints == 2 and len(lost) < 4:
            lost.append(name)
            return True
        return False

    storage.loses = loses
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        with trio.fail_after(PATIENCE_S):
            while writer.status().checkpoints < 5:
                changes.step()
                await trio.sleep(0.002)
        changes.close()
        writer.finish(PATIENCE_S)
    assert len(lost) == 4
    restore(archive, tmp_path / "restored")
    assert _shared(tree_of(tmp_path / "restored")) == _shared(tree_of(data))
    assert not _findings(archive)


# ---------------------------------------------------------------------- two writers


class _Holder:
    """Which storage has the lease, and a lock that makes `replace` atomic for two writers."""

    def __init__(self) -> None:
        self.storage: object = None
        self.lock = threading.Lock()


class _OfOneWriter(LocalStorage):
    """The archive as a writer has it; the lease can be taken over, and the writer paused before a write."""

    def __init__(self, folder: Path, holder: _Holder, *, takes_over: bool = False) -> None:
        super().__init__(folder)
        self._holder = holder
        self._takes_over = takes_over
        self.pauses: Callable[[str], bool] = lambda name: False
        self.is_paused, self.goes_on = threading.Event(), threading.Event()

    @contextmanager
    def hold(self, name: str, if_held: Callable[[str], NSQError]) -> Iterator[Lease]:
        if self._holder.storage is not None and not self._takes_over:
            raise if_held("another process")
        self._holder.storage = self
        try:
            yield _TakenLease(self._holder, self)
        finally:
            if self._holder.storage is self:
                self._holder.storage = None

    def _pause(self, name: str) -> None:
        if self.pauses(name):
            self.is_paused.set()
        if self.is_paused.is_set():  # all threads of a process stop
            assert self.goes_on.wait(PATIENCE_S)

    def put_new(self, name: str, data: bytes) -> bool:
        self._pause(name)
        return super().put_new(name, data)

    def put(self, name: str, data: bytes) -> None:
        self._pause(name)
        super().put(name, data)

    def replace(self, name: str, data: bytes, version: str | None) -> str:
        self._pause(name)
        with self._holder.lock:
            return super().replace(name, data, version)


class _TakenLease(Lease):
    def __init__(self, holder: _Holder, storage: object) -> None:
        self._holder = holder
        self._storage = storage

    def check(self) -> None:
        if self._holder.storage is not self._storage:
            raise LeaseLost("another process has taken over")


@pytest.mark.parametrize(
    ("where", "behind"),
    [
        *(("@stream/", ""), ("/0000000001", ""), ("/segments", ""), (CHECKPOINTS, "/segments")),
        *((MANIFEST, ""), (MANIFEST, f"{CHECKPOINTS}/")),
    ],
    ids=["operations", "a part", "segments", "a record", "a checkpoint's begin", "a checkpoint's end"],
)
@pytest.mark.parametrize("after", [1, 2], ids=["early", "later"])
async def test_a_writer_that_wakes_after_another_one_took_over_changes_no_restore(
    tmp_path: Path, where: str, behind: str, after: int
) -> None:
    """The first one stops just before a write, after it has checked the lease; the second one is restored."""
    archive, holder = tmp_path / "archive", _Holder()
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    first_storage = _OfOneWriter(archive, holder)
    first = writer_of(first_storage, one)
    written = [""]

    def pauses(name: str) -> bool:
        if "@stream/" not in name:
            written.append(name)
        return where in name and (behind in written[-2]) and first.status().checkpoints >= after

    first_storage.pauses = pauses
    remembered = Remembered(first)
    changes = RandomChanges(first.files, one, 3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.run)
        with trio.fail_after(PATIENCE_S):
            while not first_storage.is_paused.is_set():
                changes.step()
                await trio.sleep(0.001)
        takeover = restore(archive, two)
        second = writer_of(_OfOneWriter(archive, holder, takes_over=True), two)
        later = RandomChanges(second.files, two, 4)
        nursery.start_soon(second.run)
        await _until(second, _is_archived)
        for step in range(60):
            if step == 20:
                first_storage.goes_on.set()
            if step < 40:
                changes.step()
            later.step()
            if step % 10 == 0:
                await _until(second, _is_archived)
        await _until(first, lambda status: bool(status.error))
        assert "another" in first.status().error
        await _until(second, _is_archived)
        changes.close()
        later.close()
        first.finish(0)
        second.finish(PATIENCE_S)
    restore(archive, tmp_path / "restored")
    assert _shared(tree_of(tmp_path / "restored")) == _shared(tree_of(two))
    assert not _findings(archive)
    without = copy_archive(archive, tmp_path / "without")
    (without / MANIFEST).unlink()
    restore(without, tmp_path / "restored-without")
    assert tree_of(tmp_path / "restored-without") == tree_of(tmp_path / "restored")
    trees, storage = trees_of(remembered.stream()), LocalStorage(archive)
    runs = [each.checkpoint.run for each in checkpoints_of(storage)]
    assert len(list(groupby(runs))) == 2, "no checkpoint of the first one is behind one of the second"
    of_first = [each for each in checkpoints_of(storage) if each.checkpoint.run == takeover.checkpoint.run]
    assert of_first
    for index, extent in enumerate(of_first):
        to = tmp_path / f"then-{index}"
        point = restore(archive, to, extent.checkpoint.time_ms)
        if point.checkpoint.run == takeover.checkpoint.run:
            assert _shared(tree_of(to)) == _shared(trees[number_of(point)])


# ---------------------------------------------------------------------- stores that fail


STORES = ["s3", "moto_s3"] if "FAULT_COMPLETE" in os.environ else ["s3"]


@pytest.mark.parametrize("kind", STORES)
async def test_a_store_with_storms_of_conflicts_and_slow_downs(
    tmp_path: Path,
    kind: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store: Store = request.getfixturevalue(kind)
    monkeypatch.setattr("trio_nsq.archive.writer.FIRST_RETRY_S", 0.001)
    monkeypatch.setattr("trio_nsq.archive.writer.MAX_RETRY_S", 0.1)
    monkeypatch.setattr("trio_nsq.storage.objects.CONFLICT_S", 0.001)
    monkeypatch.setattr("trio_nsq.storage.calls.BACKOFF_S", 0.001)
    chance, data = random.Random(11), tmp_path / "data"
    data.mkdir()
    storm = True

    def judge(method: str, path: str) -> Fault | None:
        if not storm or chance.random() > 0.4:
            return None
        if method != "PUT":
            return Fault(status=503)
        status = chance.choice((409, 412, 503, 500, None))
        return Fault(is_sent=status not in (409, 412) and chance.random() < 0.5, status=status)

    with proxy(store) as running, store.behind(running.endpoint).here():
        running.judge = judge
        place = store.new_place()
        writer = writer_of(storage_at(place, patience=Patience(5.0, 0.1)), data)
        changes = RandomChanges(writer.files, data, 11)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            with trio.fail_after(PATIENCE_S):
                while len(running.requests) < 50:
                    changes.step()
                    await trio.sleep(0.01)
            storm = False
            await _until(writer, _is_archived)
            changes.close()
            writer.finish(PATIENCE_S)
        storage = storage_at(place)
        assert not list(verify(storage, lambda size: None, all_checkpoints=True))
        restored = tmp_path / "restored"
        _copy_to(restored, place)
        assert _shared(tree_of(restored)) == _shared(tree_of(data))
    assert not [each.message for each in caplog.records if each.levelname == "ERROR"], "an internal error"


async def test_a_store_that_is_away_costs_no_memory(tmp_path: Path) -> None:
    """More changes come than are kept: the folder is copied when the store is back."""
    data, archive = tmp_path / "data", tmp_path / "archive"
    data.mkdir()
    storage = _LosesAnswers(archive, random.Random(5), share=0.0)
    writer = ArchiveWriter(storage, data, interval_s=0.001, kept_bytes=20_000)
    changes = RandomChanges(writer.files, data, 5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        await _until(writer, _is_archived)
        archived = writer.operations.last_number
        storage.share = 1.0
        while writer.operations.last_number == archived:
            changes.step()
        await _until(writer, lambda status: " is lost" in status.error)
        while writer.operations.has_after(archived):
            changes.step()
            assert writer.operations.kept_bytes <= 20_000
        assert writer.status().lag_operations > 10
        storage.share = 0.0
        await _until(writer, _is_archived)
        assert (writer.status().error, writer.status().checkpoints) == ("", 2)
        changes.close()
        writer.finish(PATIENCE_S)
    restore(archive, tmp_path / "restored")
    assert _shared(tree_of(tmp_path / "restored")) == _shared(tree_of(data))
    assert not _findings(archive)


@pytest.mark.parametrize("loss", ["the manifest is gone", "the manifest is an older one"])
async def test_ids_of_checkpoints_are_not_used_twice(tmp_path: Path, loss: str) -> None:
    """Otherwise, a restore would find the operations of an earlier run behind a checkpoint."""
    data, archive = tmp_path / "data", tmp_path / "archive"
    data.mkdir()
    old = b""
    for run in range(3):
        writer = writer_of(LocalStorage(archive), data, checkpoint_bytes=500)
        changes = RandomChanges(writer.files, data, run)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            with trio.fail_after(PATIENCE_S):
                while writer.status().checkpoints < 3:
                    changes.step()
                    await trio.sleep(0.001)
                    old = old or ((archive / MANIFEST).read_bytes() if (archive / MANIFEST).exists() else b"")
            changes.close()
            writer.finish(PATIENCE_S)
        restore(archive, tmp_path / f"restored-{run}")
        assert _shared(tree_of(tmp_path / f"restored-{run}")) == _shared(tree_of(data))
        if loss == "the manifest is gone":
            (archive / MANIFEST).unlink()
        else:
            (archive / MANIFEST).write_bytes(old)


async def test_a_bucket_that_is_away_has_publishes_refused_and_accepted_later(
    s3: Store, tmp_path: Path
) -> None:
    pacing = Pacing(archive_late_s=0.1, archive_stop_s=5)
    with proxy(s3) as running, s3.behind(running.endpoint).here():
        place = s3.new_place()
        options: Any = {"archive": place, "archive_before_ok": True, "pacing": pacing}
        async with running_broker(tmp_path / "data", **options) as bound:
            url = f"http://{bound.http_address}"
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

                async def publish(body: str) -> httpx.Response:
                    return await client.post("/pub?topic=t", content=body)

                async def until_ping(expected: str) -> None:
                    with trio.fail_after(PATIENCE_S):
                        while expected not in (await client.get("/ping")).text:
                            await trio.sleep(0.02)

                await until_ping("OK")
                assert (await publish("one")).text == "OK"
                running.judge = lambda method, path: Fault(status=503)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(publish, "two")  # it waits
                    await until_ping("the archive is late")
                    refused = await publish("refused")
                    assert (refused.status_code, "the archive is late" in refused.text) == (503, True)
                    running.judge = lambda method, path: None
                await until_ping("OK")
                assert (await publish("three")).text == "OK"
        restore_folder(place, tmp_path / "restored")
    async with running_broker(tmp_path / "restored") as bound:
        url = f"http://{bound.http_address}/topic/read?topic=t&from=0&count=9"
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            lines = map(json.loads, (await client.get(url)).text.splitlines())
            assert [each["body"] for each in lines if "body" in each] == ["one", "two", "three"]


def _copy_to(folder: Path, place: str) -> None:
    storage = storage_at(place)
    folder.mkdir()
    Restorer(storage, folder).restore(RestorePlan(storage).point)
