"""Tests for kills and power cuts of outputs at any moment: after each, a new process continues, exactly once.

An output is used at random while all operations on its files are recorded. `FAULT_COMPLETE=1` tests all moments.
"""

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from connectors.to_file.outputs import (
    BROKER,
    CHANNEL,
    CHECKPOINTS,
    HOUR,
    NOON,
    TOPIC,
    content,
    crash,
    lines_in,
    numbered,
    open_output,
    settings,
)
from faults.disk import Image, Operation, RecordingFiles, disk_at, write_image
from log.support import HastyFiles
from trio_nsq.connectors.to_file.checkpoint import CheckpointFile
from trio_nsq.connectors.to_file.file_series import OutputSettings

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
SEED = int(os.environ.get("FAULT_SEED", "7"))
STEPS = 40
CUTS = 40
LAST = 400


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder in memory if the machine has one."""
    memory = Path("/dev/shm")
    folder = (memory if memory.is_dir() else tmp_path) / f"to-file-{os.getpid()}-{tmp_path.name}"
    folder.mkdir()
    return folder


def record(root: Path, to: OutputSettings, chance: random.Random) -> list[Operation]:
    """Use an output at random."""
    files = RecordingFiles(root, sync_takes_s=0)
    output = open_output(to, files=files)
    now, sequence = NOON, 0
    for _ in range(STEPS):
        match chance.choice(("write", "write", "write", "sync", "tick", "close")):
            case "write":
                count = chance.randint(1, 12)
                output.write([numbered(sequence, count)], now)
                sequence += count
            case "sync":
                output.sync(now)
            case "tick":
                now += chance.choice((1, HOUR))
                output.tick(now)
            case "close":
                output.close_file(now)
    output.close_file(now)
    crash(output)
    assert sequence < LAST
    return files.journal


def restore(image: Image, root: Path) -> None:
    """Put a state of the disk there. An image has no inodes and hard links, so both are put back."""
    shutil.rmtree(root)
    write_image(image, root)
    if not (root / "d" / CHECKPOINTS).is_dir():
        return
    store = CheckpointFile(root / "d", TOPIC, CHANNEL, HastyFiles())
    file = store.saved.file
    if file is not None:
        names = [Path(file.path), Path(file.final)]
        first, *others = [name for name in names if name.exists()] or names
        if first.exists():
            for other in others:
                if other != first and other.exists() and file.finishing:
                    other.unlink()
                    other.hardlink_to(first)
            store.save(replace(store.saved, file=replace(file, inode=first.stat().st_ino)))
    store.close()


def continue_after(to: OutputSettings, root: Path) -> list[str]:
    """Read on where the checkpoint says, as a new process does, and return what is wrong."""
    wrong = []
    for path in root.glob("d/clicks*"):
        if to.compressor and not path.name.endswith(".part"):
            try:
                content(path)
            except Exception as error:
                wrong.append(f"{path.name} is finished, and not complete: {error!r}")
    output = open_output(to)
    position = output.position(BROKER)
    first = position.sequence if position else 0
    output.write([numbered(first, LAST - first)], NOON)
    output.close_file(NOON)
    crash(output)
    lines = sorted(line for line in lines_in(root / "d"))
    expected = [b"%010d" % n for n in range(LAST)]
    if lines != expected:
        missing = len(set(expected) - set(lines))
        wrong.append(
            f"{missing} missing, {len(lines) - len(set(lines))} repeated, {len(set(lines) - set(expected))} torn"
        )
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lines", "lines, rotated by size", "gzip"])
def test_every_message_is_in_the_files_once_after_a_crash(root: Path, kind: str) -> None:
    chance = random.Random(SEED)
    folder = root / "d"
    changes = {} if kind == "lines" else {"rotate_size": 150}
    compression = "gzip" if kind == "gzip" else "none"
    to = settings(folder, compression=compression, **changes)
    later = settings(folder, compression=compression, **dict.fromkeys(changes, 10**6))
    journal = record(root, to, chance)
    moments = range(1, len(journal) + 1)
    checked = 0
    for now, disk in disk_at(journal, moments if COMPLETE else sorted(chance.sample(moments, CUTS))):
        cuts = list(disk.power_cuts(chance))
        for name, image in [("killed", disk.image()), *(cuts if COMPLETE else chance.sample(cuts, 3))]:
            restore(image, root)
            wrong = continue_after(later, root)
            checked += 1
            assert not wrong, f"at {now}, {name}: {wrong}; {journal[max(0, now - 6) : now + 1]}"
    shutil.rmtree(root)
    print(f"{len(journal)} operations, {checked} crashes")
