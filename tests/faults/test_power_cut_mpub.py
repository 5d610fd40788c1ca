"""Tests for power cuts while large MPUBs, each of several records, are stored: all of one is there, or
nothing.
"""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from broker.support import connected, running_broker
from faults.disk import RecordingFiles, disk_at, write_image
from log.support import HastyFiles
from trio_nsq.log import DiskLog

COUNT = 3000
"""More messages than a record has."""


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_mpub_survives_whole_or_not_at_all(tmp_path: Path, sync: str) -> None:
    (tmp_path / "recorded").mkdir()
    files = RecordingFiles(tmp_path / "recorded")
    acknowledged: dict[int, int] = {}
    async with (
        running_broker(tmp_path / "recorded" / "d", files=files, sync=sync) as bound,
        connected(bound.tcp_address) as client,
    ):
        await client.publish("t", b"-1")
        begin = files.position
        for number in range(3):
            await client.publish("t", *[b"%d" % number] * COUNT)
            acknowledged[number] = files.position
        end = files.position
    chance = random.Random(1)
    seen: set[int] = set()
    for now, disk in disk_at(files.journal, range(begin, end + 1)):
        for what, image in disk.power_cuts(chance):
            shutil.rmtree(tmp_path / "left", ignore_errors=True)
            write_image(image, tmp_path / "left")
            found = messages(tmp_path / "left" / "d" / "topics" / "t.topic")
            assert all(found[number] in (0, COUNT) for number in acknowledged), (now, what, found)
            if sync == "always":
                assert all(found[number] for number, at in acknowledged.items() if at <= now), (now, what)
            seen.add(len(found))
    assert len(seen) > 1


def messages(folder: Path) -> Counter[int]:
    """Return the number of messages of each MPUB that a broker finds at its start."""
    found: Counter[int] = Counter()
    for _ in range(2):  # the same when it starts again
        log = DiskLog(folder, files=HastyFiles())
        before, found = found, Counter()
        sequence = log.first_sequence
        while records := log.read(sequence):
            for record in records:
                found.update(map(int, record.messages.bodies()))
            sequence = records[-1].next_sequence
        log.close()
    assert before == found
    return found
