"""Tests for outputs whose disk fails: nothing is lost or written twice, and memory is bounded."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from connectors.to_file.outputs import (
    BROKER,
    HOUR,
    NOON,
    FailingFiles,
    channel_batch,
    crash,
    files_in,
    lines_in,
    numbered,
    open_output,
    settings,
)

KINDS = ("write", "sync", "sync_folder", "replace", "link", "create")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Driver:
    """Writes numbered messages at random, on a disk that fails at random, and sometimes as a new process."""

    def __init__(self, folder: Path, compression: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.files = FailingFiles(*KINDS)
        self.folder = folder
        self.settings = settings(folder, compression=compression, rotate_size=300)
        self.output = open_output(self.settings, files=self.files)
        self.now = NOON
        self.next = 0  # the next message to publish
        self.failures = 0

    def repeat(self, work: Callable[[], None]) -> None:
        """Do work until it succeeds, with a disk that fails at first."""
        self.files.kinds = tuple(self.chance.sample(KINDS, self.chance.randint(1, 3)))
        while True:
            self.files.error = FULL if self.chance.random() < 0.5 else None
            try:
                return work()
            except OSError:
                self.failures += 1

    def step(self) -> None:
        """Do something at random."""
        output = self.output
        match self.chance.choice(("write", "write", "write", "sync", "tick", "close", "restart")):
            case "write":
                batches = [numbered(self.next, self.chance.randint(1, 30))]
                self.next += len(batches[0].bodies)

                def write() -> None:
                    taken = batches[:]
                    batches.clear()
                    output.write(taken, self.now)

                self.repeat(write)
            case "sync":
                self.repeat(lambda: output.sync(self.now))
            case "tick":
                self.now += self.chance.choice((1, HOUR))
                self.repeat(lambda: output.tick(self.now))
            case "close":
                self.repeat(lambda: output.close_file(self.now))
            case "restart":
                crash(output)
                self.files.error = None
                self.output = open_output(self.settings, files=self.files)
                position = self.output.position(BROKER)
                self.next = position.sequence if position else 0


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("seed", range(6))
def test_failing_disk_loses_and_repeats_nothing(tmp_path: Path, compression: str, seed: int) -> None:
    driver = Driver(tmp_path, compression, seed)
    for _ in range(60):
        driver.step()
    driver.files.error = None
    driver.output.close_file(driver.now)
    assert driver.failures > 10
    assert sorted(lines_in(tmp_path)) == [b"%010d" % n for n in range(driver.next)]
    assert b"" not in files_in(tmp_path).values()


def test_part_of_a_write_is_removed(tmp_path: Path) -> None:
    files = FailingFiles("write")
    output = open_output(settings(tmp_path), files=files)
    output.write([numbered(0, 2)], NOON)
    output.sync(NOON)
    files.error = FULL
    with pytest.raises(OSError, match="No space"):
        output.write([numbered(2, 2)], NOON)
    assert files_in(tmp_path) == {"clicks.12.log": b"0000000000\n0000000001\n"}
    assert output.unsynced_bytes == 0


def test_bytes_of_a_failed_sync_are_written_again(tmp_path: Path) -> None:
    files = FailingFiles("sync")
    output = open_output(settings(tmp_path), files=files)
    output.write([numbered(0, 2)], NOON)
    files.error = OSError(errno.EIO, os.strerror(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        output.sync(NOON)
    path = tmp_path / "clicks.12.log"
    assert (
        path.read_bytes() == b""
    )  # the kernel may have dropped them: a later sync would succeed without them
    files.error = None
    output.sync(NOON)
    assert path.read_bytes() == b"0000000000\n0000000001\n"


def test_synced_bytes_stay_if_the_checkpoint_cannot_be_written(tmp_path: Path) -> None:
    """The new checkpoint may be on disk although writing it failed, so the bytes that it describes must stay."""
    files = FailingFiles("replace")
    output = open_output(settings(tmp_path), files=files)
    batch = channel_batch([b"a"])
    output.write([batch], NOON)
    files.error = FULL
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            output.sync(NOON)
        assert files_in(tmp_path) == {"clicks.12.log": b"a\n"}
        assert output.take_finished() == []
    files.error = None
    output.write([], NOON)
    assert output.take_finished() == [batch]


def test_files_that_cannot_be_begun_do_not_pile_up(tmp_path: Path) -> None:
    files = FailingFiles("replace")
    output = open_output(settings(tmp_path, compression="gzip"), files=files)
    files.error = FULL
    output_batches = [[numbered(0, 1)], [], []]
    for batches in output_batches:
        with pytest.raises(OSError, match="No space"):
            output.write(batches, NOON)
    assert list(tmp_path.glob("clicks*")) == []
    files.error = None
    output.write([], NOON)
    output.close_file(NOON)
    assert files_in(tmp_path) == {"clicks-000000.12.log.gz": b"0000000000\n"}


def test_position_is_not_moved_past_discarded_messages(tmp_path: Path) -> None:
    files = FailingFiles("write")
    output = open_output(settings(tmp_path), files=files)
    output.write([numbered(0, 2)], NOON)
    output.sync(NOON)
    files.error = FULL
    with pytest.raises(OSError, match="No space"):
        output.write([numbered(2, 2)], NOON)
    output.discard()
    files.error = None
    output.close_file(NOON)
    position = output.position(BROKER)
    assert position is not None
    assert position.sequence == 2
    assert lines_in(tmp_path) == [b"0000000000", b"0000000001"]


def test_discarded_messages_are_not_written(tmp_path: Path) -> None:
    files = FailingFiles("write")
    output = open_output(settings(tmp_path), files=files)
    files.error = FULL
    with pytest.raises(OSError, match="No space"):
        output.write([channel_batch([b"a"])], NOON)
    output.discard()
    files.error = None
    output.close_file(NOON)
    assert lines_in(tmp_path) == []
    assert output.take_finished() == []
