"""Tests for power cuts of a broker at any moment, with many possible states of the disk.

A broker is used at random while all operations on its files are recorded. Then another one is started on a
possible state after each power cut, and must have everything that was acknowledged by then. Some random cuts
by default; all of them with `FAULT_COMPLETE=1`. `FAULT_SEED` chooses another scenario.
"""

import copy
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio.testing

from broker.support import settle
from faults.disk import Disk, Image, Operation, RecordingFiles, disk_at, write_image
from faults.power_cut import AHEAD, EVERY_OK_SYNCED, broker, carry_forward_early, numbers_in
from faults.scenario import HOUR_MS, NEVER, Expectation, Scenario, Told, judge, look
from log.support import HastyFiles
from trio_nsq.broker.storage import data_folder

SEED = int(os.environ.get("FAULT_SEED", "7"))
COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
STEPS = 150 if COMPLETE else 80
CUTS = 6
_NEW = {"one": 900_000_000, "two": 900_000_001}


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


@pytest.fixture(autouse=True)
def _clock_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's clock starts at the same time after each power cut: ids must not depend on it."""
    frozen = SimpleNamespace(time=lambda: 1_700_000_000, time_ns=lambda: 1_700_000_000 * 10**9)
    monkeypatch.setattr(data_folder, "time", frozen)


@pytest.fixture(autouse=True)
def _carry_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    carry_forward_early(monkeypatch)


async def record(
    root: Path, sync: str, clock: trio.testing.MockClock, chance: random.Random
) -> tuple[Sequence[Operation], Told]:
    """Use a broker at random; its data is in `root`/d."""
    root.mkdir()
    files = RecordingFiles(root)
    async with broker(root / "d", files, sync) as bound:
        scenario = Scenario(bound, files, clock, chance)
        await scenario.run(STEPS)
    promise(scenario.told, files.journal, sync)
    return files.journal, scenario.told


def promise(told: Told, journal: Sequence[Operation], sync: str) -> None:
    """Record from when each message must survive: from its OK, or from the sync of its file."""
    if sync in EVERY_OK_SYNCED:
        told.keep_what_is_acknowledged()
    else:
        told.promised = synced(journal)


def synced(journal: Sequence[Operation]) -> dict[int, int]:
    """Return when the file of each message was synced, by the message's number."""
    waiting: dict[int, list[int]] = {}
    syncing: dict[int, list[int]] = {}
    found: dict[int, int] = {}
    for position, operation in enumerate(journal):
        handle = operation.handle
        if operation.kind == "write" and operation.path == () and operation.offset:
            waiting.setdefault(handle, []).extend(numbers_in(operation.data))
        elif operation.kind == "sync":
            syncing[handle] = waiting.pop(handle, [])
        elif operation.kind == "synced":
            found.update(dict.fromkeys(syncing.pop(handle), position + 1))
    return found


def with_later(expected: Expectation, later: Told, now: int) -> Expectation:
    """The expectations at a broker's start, and the answers of a later one."""
    expected = copy.deepcopy(expected)
    for topic in _NEW:  # created again if it was deleted
        expected.settings.pop(("topic", topic), None)
    for message in later.messages:
        if message.sent_ns <= now:
            expected.add(message, promised=later.promised.get(message.number, NEVER) <= now)
    return expected


class Survivors:
    """Starts brokers on a disk after a power cut.

    Args:
        folder: For their data.
        sync: Their mode.
        clock: Their clock.
    """

    def __init__(self, folder: Path, sync: str, clock: trio.testing.MockClock) -> None:
        self.count = 0
        self._folder = folder
        self._sync = sync
        self._clock = clock

    def _make(self, image: Image) -> Path:
        root = self._folder / "after"
        if root.exists():
            shutil.rmtree(root)
        write_image(image, root)
        return root

    async def check(self, image: Image, expected: Expectation) -> list[str]:
        """Start a broker, and let it deliver all its messages; returns the errors."""
        self.count += 1
        root = self._make(image)
        async with broker(root / "d", HastyFiles(), self._sync) as bound:
            found = await look(bound, self._clock, _NEW)
        return judge(expected, found, _NEW)

    async def record_later(self, disk: Disk, chance: random.Random) -> tuple[Sequence[Operation], Told, int]:
        """Start a broker on the visible files of a disk, and publish; also return when it was ready."""
        root = self._make(disk.image())
        files = RecordingFiles(root, sync_takes_s=0)
        # Its messages are synced without a checkpoint, so they must be consistent with the state that an
        # earlier broker saved.
        async with broker(root / "d", files, self._sync, HOUR_MS) as bound:
            ready = files.position
            scenario = Scenario(bound, files, self._clock, chance, first_number=800_000_000)
            for topic in _NEW:
                await scenario.publish(topic)
            self._clock.jump(2)
            await settle()
        promise(scenario.told, files.journal, self._sync)
        return files.journal, scenario.told, ready

    async def check_later_cuts(
        self, disk: Disk, expected: Expectation, chance: random.Random, cuts: int, *, killed: bool = False
    ) -> list[str]:
        """Start a broker, publish, and cut the power at random moments; return the errors.

        Args:
            disk: The disk that the first broker left.
            expected: Includes the later messages.
            chance: Chooses the moments.
            cuts: The number of cuts.
            killed: Whether the first one was killed. Once the next one is ready, everything visible then must
                stay.
        """
        disk = copy.deepcopy(disk)
        journal, told, ready = await self.record_later(disk, chance)
        wrong: list[str] = []
        first = ready if killed else 0
        moments = {first, *chance.sample(range(first, len(journal) + 1), cuts)}
        for now in range(len(journal) + 1):
            if now:
                disk.apply(journal[now - 1])
            if now in moments:
                name, image = chance.choice(list(disk.power_cuts(chance)))
                found = await self.check(image, with_later(expected, told, now))
                wrong += [f"and later at {now}, {name}: {text}" for text in found]
        return wrong


@pytest.mark.slow
@pytest.mark.parametrize("sync", [*EVERY_OK_SYNCED, "interval"])
async def test_power_cuts_lose_nothing_guaranteed(
    fast_folder: Path, clock: trio.testing.MockClock, sync: str
) -> None:
    chance = random.Random(SEED)
    journal, told = await record(fast_folder / "before", sync, clock, chance)
    survivors = Survivors(fast_folder, sync, clock)
    chosen = range(len(journal) + 1) if COMPLETE else sorted(chance.sample(range(len(journal) + 1), CUTS))
    again = set(chance.sample(chosen, len(chosen) // 10 if COMPLETE else 1))
    wrong: list[str] = []
    for now, disk in disk_at(journal, chosen):
        expected = told.by(now)
        cuts = list(disk.power_cuts(chance))
        for name, image in cuts if COMPLETE else chance.sample(cuts, 2):
            wrong += [f"at {now}, {name}: {text}" for text in await survivors.check(image, expected)]
            if now in again:
                found = await survivors.check_later_cuts(Disk(image), expected, chance, 1)
                wrong += [f"at {now}, {name}: {text}" for text in found]
        if now in again:  # the broker is killed, and later the power is cut
            expected = told.by(now, killed=True)
            found = await survivors.check_later_cuts(disk, expected, chance, 2, killed=True)
            wrong += [f"killed at {now}: {text}" for text in found]
        assert not wrong, "\n".join([*wrong[:20], *map(str, journal[max(0, now - 5) : now + 1])])
    if sync == AHEAD:
        ahead = [operation.kind for operation in journal if "write-ahead" in "".join(operation.path)]
        assert ahead.count("create") >= 3 <= ahead.count("unlink")
    replaced = sum(operation.to[-1:] == ("stragglers",) for operation in journal)
    what = f"{len(journal)} operations, stragglers carried {replaced} times, {len(told.messages)} messages"
    print(f"{what}, {survivors.count} cuts")
    assert replaced or not COMPLETE


@pytest.mark.slow
async def test_kill_while_files_are_created_and_then_a_power_cut(
    fast_folder: Path, clock: trio.testing.MockClock
) -> None:
    """Files created by a killed broker exist, but may not be durable: the next broker must sync them."""
    chance = random.Random(SEED)
    root = fast_folder / "before"
    root.mkdir()
    files = RecordingFiles(root, sync_takes_s=0)
    async with broker(root / "d", files, "always") as bound:
        scenario = Scenario(bound, files, clock, chance)
        await scenario.publish("one")
    promise(scenario.told, files.journal, "always")
    survivors = Survivors(fast_folder, "always", clock)
    disk = Disk({})
    for now, operation in enumerate(files.journal, 1):
        disk.apply(operation)
        later, told, _ = await survivors.record_later(disk, chance)
        stored = told.promised[told.messages[0].number]  # before anything else is written
        after = copy.deepcopy(disk)
        for following in later[:stored]:
            after.apply(following)
        name, image = next(after.power_cuts(chance))
        expected = with_later(scenario.told.by(now, killed=True), told, stored)
        wrong = await survivors.check(image, expected)
        assert not wrong, f"killed at {now}, then {name}: {wrong}"
