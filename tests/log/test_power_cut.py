"""Tests for power cuts at any time, with any unsynced data lost: acknowledged messages must be there."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from log.support import HastyFiles, SimulatedDisk, batch, contents, copied, link
from trio_nsq.log import DiskLog, LogWriteError, RecordBatch


class Ledger:
    """A log on a simulated disk, and the expectations.

    Attributes:
        kept: Batches that a power cut must not lose: appended with sync, or synced afterwards.
        possible: All batches passed to `append`, by sequence.
        unsynced: Appended, but not synced yet.
    """

    def __init__(self, tmp_path: Path, segment_bytes: int) -> None:
        self.disk = SimulatedDisk()
        self.folder = tmp_path / "log"
        self._after = tmp_path / "after"
        self._segment_bytes = segment_bytes
        self.log = DiskLog(self.folder, segment_bytes=segment_bytes, files=self.disk)
        self.kept: list[RecordBatch] = []
        self.unsynced: list[RecordBatch] = []
        self.possible: dict[int, list[RecordBatch]] = {}
        self.linked: list[list[RecordBatch]] = []
        self.cuts = 0

    def append_linked(self, *bodies: Sequence[bytes], sync: bool) -> None:
        """Append one batch of messages with this many records."""
        first = self.log.next_sequence
        self.append(*bodies, sync=sync, linked=True)
        self.linked.append([one[-1] for sequence, one in self.possible.items() if sequence >= first])

    def append(self, *bodies: Sequence[bytes], sync: bool, linked: bool = False) -> None:
        batches: list[RecordBatch] = []
        sequence = self.log.next_sequence
        for some in bodies:
            batches.append(batch(sequence, *some))
            sequence += len(some)
        if linked:
            batches = link(batches)
        for one in batches:
            self.possible.setdefault(one.base_sequence, []).append(one)
        try:
            self.log.append(batches, sync=sync)
        except LogWriteError:
            self.check()
            return
        self.unsynced += batches
        if sync:
            self.all_kept()
        self.check()

    def sync(self) -> None:
        try:
            self.log.sync()
        except LogWriteError:
            pass
        else:
            self.all_kept()
        self.check()

    def all_kept(self) -> None:
        self.kept += self.unsynced
        self.unsynced.clear()

    def discard_before(self, sequence: int) -> None:
        self.log.discard_before(sequence)
        self.kept = [one for one in self.kept if one.next_sequence > sequence]
        self.check()

    def kill_and_open(self) -> None:
        """Simulate a kill of the process."""
        self.log = DiskLog(self.folder, segment_bytes=self._segment_bytes, files=self.disk)
        self.all_kept()  # what is visible after opening stays
        self.check()

    def check(self) -> None:
        """Cut the power now in every possible way, and check the log."""
        for left in self.disk.power_cuts():
            self.cuts += 1
            if self._after.exists():
                for path in self._after.iterdir():
                    path.unlink()
            else:
                self._after.mkdir()
            for name, content in left.items():
                (self._after / name).write_bytes(content)
            self._check_what_is_left()

    def _check_what_is_left(self) -> None:
        log = DiskLog(self._after, segment_bytes=self._segment_bytes, files=HastyFiles())
        found = contents(log)
        for one in found:
            assert one in self.possible[one.base_sequence], "something that was never appended"
        sequences = [one.base_sequence for one in found]
        assert sequences == sorted(set(sequences))
        for before, after in pairwise(found):
            assert before.next_sequence <= after.base_sequence
        for records in self.linked:
            assert len({one in found for one in records}) == 1, "a part of one append"
        for one in self.kept:
            assert one in found, "something that was acknowledged is lost"
        if self.kept:
            assert log.next_sequence >= self.kept[-1].next_sequence
        following = batch(log.next_sequence, b"after the power cut")
        log.append([following], sync=True)
        assert contents(log) == [*found, following]
        log.close()


@pytest.mark.parametrize("segment_bytes", [1, 250, 10**6])
def test_everything_is_synced(tmp_path: Path, segment_bytes: int) -> None:
    ledger = Ledger(tmp_path, segment_bytes)
    ledger.append([b"a"], sync=True)
    ledger.append([b"b", b"cd"], [b"e"], sync=True)
    ledger.append([b"f" * 100], sync=True)
    ledger.append([b"g"], sync=True)
    ledger.discard_before(4)
    ledger.append([b"h"], sync=True)
    assert [one.base_sequence for one in contents(ledger.log)][-3:] == [4, 5, 6]
    assert ledger.cuts == 6 * 12


@pytest.mark.parametrize("segment_bytes", [1, 250, 10**6])
def test_sometimes_synced(tmp_path: Path, segment_bytes: int) -> None:
    ledger = Ledger(tmp_path, segment_bytes)
    ledger.append([b"a"], sync=False)
    ledger.append([b"b", b"cd"], sync=False)
    ledger.sync()
    ledger.append([b"e" * 50], sync=False)
    ledger.append([b"f"], [b"g"], sync=False)
    ledger.append([b"h"], sync=True)
    ledger.append([b"i"], sync=False)
    ledger.kill_and_open()
    ledger.append([b"j"], sync=False)
    ledger.discard_before(6)
    ledger.sync()


@pytest.mark.parametrize("segment_bytes", [1, 250, 10**6])
def test_failing_syncs(tmp_path: Path, segment_bytes: int) -> None:
    ledger = Ledger(tmp_path, segment_bytes)
    ledger.append([b"a"], sync=True)
    ledger.append([b"b"], sync=False)
    ledger.disk.sync_fails = True
    ledger.append([b"c" * 30], [b"d"], sync=True)
    ledger.sync()
    ledger.disk.sync_fails = False
    ledger.append([b"e"], sync=True)
    ledger.disk.sync_fails = True
    ledger.append([b"f"], sync=True)
    ledger.append([b"g"], sync=False)
    ledger.disk.sync_fails = False
    ledger.sync()
    ledger.append([b"h"], sync=True)
    assert b"f" not in [body for one in contents(ledger.log) for body in one.messages.bodies()]


@pytest.mark.parametrize("segment_bytes", [1, 250, 10**6])
def test_linked_records_are_recovered_together_or_not_at_all(tmp_path: Path, segment_bytes: int) -> None:
    ledger = Ledger(tmp_path, segment_bytes)
    ledger.append([b"a"], sync=True)
    ledger.append_linked([b"b", b"cd"], [b"e"], [b"f" * 50], sync=False)
    ledger.append([b"g"], sync=False)
    ledger.append_linked([b"h"], [b"i"], sync=False)
    ledger.append_linked([b"j"], [b"k"], sync=True)
    ledger.append_linked([b"l" * 30], [b"m"], [b"n"], [b"o"], sync=False)
    ledger.sync()
    assert len(contents(ledger.log)) == 13


def test_ledger_detects_a_wrong_log(tmp_path: Path) -> None:
    """A log that reports unsynced data as synced."""
    ledger = Ledger(tmp_path, 10**6)
    ledger.append([b"a"], sync=True)
    ledger.log.append([batch(1, b"b")], sync=False)
    ledger.possible[1] = ledger.unsynced = [batch(1, b"b")]
    ledger.check()
    ledger.all_kept()
    with pytest.raises(AssertionError, match="acknowledged is lost"):
        ledger.check()


def test_records_of_a_failed_append_do_not_reappear_after_others(tmp_path: Path) -> None:
    """Killed after each of several failures and successes, in a file that was longer at times."""
    ledger = Ledger(tmp_path, 10**6)
    ledger.append([b"a"], sync=True)
    for n in range(4):
        ledger.disk.sync_fails = True
        ledger.append([b"x"] * (n + 1), [b"y"], [b"z"], sync=True)
        ledger.disk.sync_fails = False
        ledger.append([b"%d" % n], sync=True)
        killed = DiskLog(copied(ledger.folder, tmp_path / "killed"), files=HastyFiles())
        assert [body for one in contents(killed) for body in one.messages.bodies()] == [
            b"a",
            *[b"%d" % i for i in range(n + 1)],
        ]
        killed.close()
