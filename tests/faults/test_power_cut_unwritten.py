"""A power cut while two publishes wait for their sync: the disk has the second, and no page of the first."""

import shutil
from pathlib import Path

import pytest

from broker.support import HeldFiles, connected, mpub, running_broker, settle
from faults.scenario import stats
from log.support import HastyFiles
from trio_nsq.broker.storage.verify import verify_topic

PAGE = 4096


@pytest.mark.parametrize("is_saved", [True, False], ids=["after a checkpoint", "before the first checkpoint"])
async def test_first_of_two_waiting_publishes_is_missing(tmp_path: Path, is_saved: bool) -> None:
    files = HeldFiles()
    async with (
        running_broker(tmp_path / "d", files=files, checkpoint_interval_ms=3_600_000) as bound,
        connected(bound.tcp_address) as one,
        connected(bound.tcp_address) as two,
    ):
        await one.publish("t", b"acknowledged")
        if is_saved:
            await one.subscribe("t", "c")  # saves the topic
        segment = next((tmp_path / "d").glob("topics/t.topic/*.log"))
        stable_bytes = segment.stat().st_size
        files.hold("sync")
        await two.send(mpub("t", b"x" * 3 * PAGE))
        await files.reached()
        waiting_bytes = segment.stat().st_size
        async with connected(bound.tcp_address) as three:
            await three.send(mpub("t", b"second"))
            await settle()
            while segment.stat().st_size == waiting_bytes:
                await settle()
            shutil.copytree(tmp_path / "d", tmp_path / "cut")
            files.release()
    path = tmp_path / "cut" / segment.relative_to(tmp_path / "d")
    data = path.read_bytes()
    assert b"second" in data
    begin, end = stable_bytes, waiting_bytes // PAGE * PAGE
    path.write_bytes(data[:begin] + bytes(end - begin) + data[end:])
    report = verify_topic(path.parent)
    assert (report.damaged, report.lost_messages, report.messages) == (False, 0, 1)
    async with running_broker(tmp_path / "cut", files=HastyFiles()) as bound:
        assert bound.http_address is not None
        topic = (await stats(bound.http_address))["t"]
        assert (topic["channels"]["c"] if is_saved else topic)["depth"] == 1
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c", ready_count=10)
            assert (await client.message()).body == b"acknowledged"
            await client.publish("t", b"later")
            assert (await client.message()).body == b"later"
    assert not verify_topic(path.parent).findings
