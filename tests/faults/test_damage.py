"""Damaged, cut and missing files: the broker says which and where and loses no more, or says why it does not start.

A sample of all bits and sizes by default; every byte with `FAULT_COMPLETE=1`.
"""

import logging
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio.testing

from broker.support import connected, dpub, running_broker
from faults.disk import Image, read_image, write_image
from faults.ledger import ChannelName, body_of
from faults.power_cut import carry_forward_early
from faults.scenario import HOUR_MS, PROBE, http, look
from log.support import FILE_HEADER_BYTES, HastyFiles, segment_files
from trio_nsq.broker import StartupError
from trio_nsq.broker.storage import data_folder
from trio_nsq.log import DiskLog

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
SEED = int(os.environ.get("FAULT_SEED", "7"))
SAMPLES = 7
CHANNEL = ChannelName("t", "c")
FINISHED = (1, 2, 3)
DEFERRED = 30
NEW = 1000


@dataclass(frozen=True)
class Record:
    """The position of some messages."""

    path: Path
    offset: int
    end: int
    numbers: frozenset[int]


@dataclass(frozen=True)
class Data:
    """The data folder of a stopped broker.

    Attributes:
        path: Its path.
        image: Its content.
        records: Those of its only topic, in order.
    """

    path: Path
    image: Image
    records: Sequence[Record]

    @property
    def folder(self) -> Path:
        """The folder of the topic."""
        return self.path / "topics" / "t.topic"

    @property
    def segments(self) -> list[Path]:
        """The segments of the topic, oldest first."""
        return segment_files(self.folder)

    def lost(self, path: Path, start: int, end: int) -> set[int]:
        """Return the unfinished messages in these bytes of a file, or partly in them."""
        touched = [r.numbers for r in self.records if r.path == path and r.offset < end and r.end > start]
        return set().union(*touched) - set(FINISHED)

    def restore(self) -> None:
        """Restore the folder."""
        shutil.rmtree(self.path)
        write_image(self.image, self.path)


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


@pytest.fixture
async def data(fast_folder: Path) -> Data:
    """A folder with thirty messages and a deferred one in four segments. The first message is unfinished,
    some after it are finished.
    """
    path = fast_folder / "d"
    async with running_broker(path, files=HastyFiles(), max_bytes_per_file=3000) as bound:
        async with connected(bound.tcp_address) as client:
            await client.subscribe(*CHANNEL)
        async with connected(bound.tcp_address) as client:
            for start in range(0, DEFERRED, 3):
                await client.publish("t", *map(body_of, range(start, start + 3)))
            await client.send(dpub("t", HOUR_MS, body_of(DEFERRED)))
            await client.ok()
            await client.subscribe(*CHANNEL, ready_count=4)
            for _ in range(4):
                message = await client.message()
                if int(message.body[:9]) in FINISHED:
                    await client.send(b"FIN %s\n" % message.id)
            await client.send(b"RDY 0\nCLS\n")
            while await client.frame() != (0, b"CLOSE_WAIT"):
                pass
    return Data(path, read_image(path), list(records_in(path / "topics" / "t.topic")))


def records_in(folder: Path) -> Iterator[Record]:
    """Return the positions of the messages of a topic; their numbers are their sequences."""
    log = DiskLog(folder)
    segments = {int(path.stem): path for path in segment_files(folder)}
    offset, path = FILE_HEADER_BYTES, segments[0]
    for header in log.headers(0):
        if header.base_sequence in segments:
            offset, path = FILE_HEADER_BYTES, segments[header.base_sequence]
        numbers = frozenset(range(header.base_sequence, header.next_sequence))
        yield Record(path, offset, offset + header.record_bytes, numbers)
        offset += header.record_bytes
    log.close()


async def missing_after(data: Data, clock: trio.testing.MockClock) -> set[int] | str:
    """Start a broker; return the messages that it does not deliver, or why it does not start, or serve the
    topic.
    """
    try:
        async with running_broker(data.path, files=HastyFiles(), max_bytes_per_file=3000) as bound:
            assert bound.http_address is not None
            _, content = await http(bound.http_address, "GET", "/ping")
            if content != b"OK":
                return content.decode().removeprefix("NOK - topic t is unavailable: ")
            found = await look(bound, clock, {"t": NEW})
            assert found.wrong == []
    except ExceptionGroup as group:
        (error,) = leaves(group)
        if not isinstance(error, StartupError):
            raise
        return str(error)
    channel = CHANNEL if CHANNEL in found.at_once else ChannelName("t", PROBE)
    came = found.at_once[channel] + found.later[channel]
    assert len(came) == len(set(came))
    assert NEW in came
    return set(range(DEFERRED + 1)) - set(came) - set(FINISHED)


def leaves(group: ExceptionGroup[Exception]) -> Iterator[Exception]:
    """Return the exceptions in nested groups."""
    for error in group.exceptions:
        if isinstance(error, ExceptionGroup):
            yield from leaves(error)
        else:
            yield error


def sampled(choices: Sequence[int], salt: str) -> Sequence[int]:
    """Return some of them, or all."""
    count = min(SAMPLES, len(choices))
    return choices if COMPLETE else sorted(random.Random(f"{SEED} {salt}").sample(choices, count))


def flip(path: Path, at: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


async def test_undamaged_folder_loses_nothing(data: Data, clock: trio.testing.MockClock) -> None:
    assert len(data.segments) >= 4
    assert [len(record.numbers) for record in data.records] == [3] * 10 + [1]
    assert await missing_after(data, clock) == set()


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1, -1])
async def test_flipped_bit_in_a_segment(
    data: Data, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture, which: int
) -> None:
    path = data.segments[which]
    for at in sampled(range(path.stat().st_size), str(which)):
        flip(path, at, at % 8)
        caplog.clear()
        lost = await missing_after(data, clock)
        if at < FILE_HEADER_BYTES:
            assert lost == set()
            assert f"{path}: its header is damaged; its records are still readable" in caplog.messages
        else:
            (record,) = (r for r in data.records if r.path == path and r.offset <= at < r.end)
            assert lost == data.lost(path, at, at + 1), at
            where = [
                text for text in caplog.messages if str(path) in text and f"byte {record.offset}" in text
            ]
            assert len(where) == 1, caplog.messages
        data.restore()


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1, -1])
async def test_truncated_segment(
    data: Data, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture, which: int
) -> None:
    path = data.segments[which]
    size = path.stat().st_size
    boundaries = {r.offset for r in data.records if r.path == path}
    for left in sorted({0, 1, FILE_HEADER_BYTES - 1, *boundaries, *sampled(range(size), str(which))}):
        os.truncate(path, left)
        caplog.clear()
        assert await missing_after(data, clock) == data.lost(path, left, size), left
        end = max([FILE_HEADER_BYTES, *(at for at in boundaries if at <= left)])
        if left < FILE_HEADER_BYTES:
            assert f"{path}: removed, it holds no record" in caplog.text
        if left > end:
            assert any(str(path) in text and f"byte {end}" in text for text in caplog.messages), (
                caplog.messages
            )
        else:
            assert missing_messages(caplog) >= data.lost(path, left, size) - {DEFERRED}, caplog.messages
        data.restore()


@pytest.mark.parametrize("which", [0, 1, -1])
async def test_missing_segment(
    data: Data, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture, which: int
) -> None:
    path = data.segments[which]
    lost = data.lost(path, 0, 10**9)
    path.unlink()
    assert await missing_after(data, clock) == lost
    assert missing_messages(caplog) >= lost
    assert str(data.folder) in caplog.text


def missing_messages(caplog: pytest.LogCaptureFixture) -> set[int]:
    """Return the messages that the broker has reported as missing."""
    said: set[int] = set()
    for record in caplog.records:
        if "missing" in record.getMessage() and record.levelno == logging.ERROR:
            words = record.getMessage().split()
            first, last = words[words.index("messages") + 1], words[words.index("to") + 1]
            said |= set(range(int(first), int(last) + 1))
    return said


STATES = {
    "broker.json": "broker.json.copy",
    "topics/t.topic/state.json": "topics/t.topic/state.json.previous",
}
"""The saved files of a broker, and the copies that it uses if they are damaged."""


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
async def test_flipped_bit_in_a_state_loses_no_message(
    data: Data, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    path = data.path / name
    accepted = 0
    for at in sampled(range(path.stat().st_size), name):
        caplog.clear()
        flip(path, at, at % 8)
        assert await missing_after(data, clock) == set()
        said = [text for text in caplog.messages if text.startswith(f"{path} is damaged: ")]
        accepted += not said
        assert len(said) < 2
        assert (data.folder / "state.json.damaged").exists() == (bool(said) and "state.json" in name)
        data.restore()
    assert accepted <= len("crc32")  # in the name of the checksum itself: the rest is undamaged


@pytest.mark.parametrize("name", STATES)
async def test_truncated_state_loses_no_message(
    data: Data, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    path = data.path / name
    size = len(path.read_bytes().rstrip())
    for left in sampled(range(size), name)[:: 1 if COMPLETE else 2]:
        caplog.clear()
        os.truncate(path, left)
        assert await missing_after(data, clock) == set()
        assert f"{path} is damaged: " in caplog.text
        data.restore()


@pytest.mark.parametrize("name", STATES)
async def test_truncated_state_with_a_truncated_copy_is_refused(
    data: Data, clock: trio.testing.MockClock, name: str
) -> None:
    for each in (name, STATES[name]):
        os.truncate(data.path / each, 10)
    lost = await missing_after(data, clock)
    assert isinstance(lost, str)
    assert lost.startswith(f"{data.path / name} is damaged: ")
    assert "away, " in lost
    assert not (data.folder / "state.json.damaged").exists()


async def test_ids_continue_from_the_copy_of_broker_json(
    data: Data, clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the machine's clock says: a repeated id would finish another message."""
    past = SimpleNamespace(time=lambda: 1_000_000, time_ns=time.time_ns)
    monkeypatch.setattr(data_folder, "time", past)
    (data.path / "broker.json").write_bytes(b"")
    async with running_broker(data.path, files=HastyFiles()) as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "another", ready_count=1)
        await client.publish("t", b"new")
        assert int((await client.message()).id, 16) > max(ids_in(data.folder))


def ids_in(folder: Path) -> list[int]:
    """Return the ids of the first messages of all records except the last one."""
    log = DiskLog(folder)
    found = [header.first_id for header in log.headers(0)][:-1]
    log.close()
    return found


# ---------------------------------------------------------------------- messages that were carried forward


CARRIED = {0, 5}


@pytest.fixture
async def carried(fast_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    """A folder with thirty messages, of which all but two are finished, and these two were carried forward."""
    carry_forward_early(monkeypatch)
    path = fast_folder / "d"
    async with running_broker(path, files=HastyFiles(), max_bytes_per_file=3000) as bound:
        async with connected(bound.tcp_address) as client:
            await client.subscribe(*CHANNEL, ready_count=DEFERRED)
            await client.publish("t", *map(body_of, range(DEFERRED)))
            for _ in range(DEFERRED):
                message = await client.message()
                if int(message.body[:9]) not in CARRIED:
                    await client.send(b"FIN %s\n" % message.id)
            await client.publish("t", body_of(DEFERRED))  # in a new segment
            await client.send(b"FIN %s\n" % (await client.message()).id)
            await client.send(b"CLS\n")
            assert await client.frame() == (0, b"CLOSE_WAIT")
        assert bound.http_address is not None
        await http(bound.http_address, "POST", "/topic/pause", topic="t")  # saves it
        await http(bound.http_address, "POST", "/topic/unpause", topic="t")
    assert (path / "topics" / "t.topic" / "stragglers").exists()
    return Data(path, read_image(path), ())


async def came_of(data: Data, clock: trio.testing.MockClock) -> set[int]:
    """Return which of the two messages a broker delivers."""
    async with running_broker(data.path, files=HastyFiles()) as bound:
        found = await look(bound, clock, {})
    assert found.wrong == []
    return set(found.at_once[CHANNEL])


@pytest.mark.slow
async def test_damage_in_the_carried_forward_segment(
    carried: Data, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    path = carried.folder / "stragglers"
    size = path.stat().st_size
    assert await came_of(carried, clock) == CARRIED
    for at in sampled(range(size), "stragglers"):
        carried.restore()
        caplog.clear()
        flip(path, at, at % 8)
        came = await came_of(carried, clock)
        (said,) = [text for text in caplog.messages if str(path) in text]
        if "its beginning is damaged; its records are still readable" in said:
            assert came == CARRIED
        else:
            assert len(came) == 1
            assert "the record at byte " in said


async def test_missing_carried_forward_segment(
    carried: Data, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    (carried.folder / "stragglers").unlink()
    assert await came_of(carried, clock) == set()
    assert missing_messages(caplog) >= CARRIED


async def test_topic_without_its_state_keeps_its_messages(
    data: Data, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    path = data.folder / "state.json"
    path.unlink()
    assert await missing_after(data, clock) == set()
    assert f"{path} is missing: the previous state is used" in caplog.text
    data.restore()
    path.unlink()
    (data.folder / "state.json.previous").unlink()
    assert await missing_after(data, clock) == set()
    assert f"{path} is missing: the topic has no channels" in caplog.text


async def test_ids_without_broker_json_continue_from_the_clock(
    data: Data,
    clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later = SimpleNamespace(time=lambda: time.time() + 2, time_ns=time.time_ns)  # ids count in seconds
    monkeypatch.setattr(data_folder, "time", later)
    path = data.path / "broker.json"
    path.unlink()
    (data.path / "broker.json.copy").unlink()
    assert await missing_after(data, clock) == set()
    assert f"{path} is missing: ids continue from the machine's clock" in caplog.text


async def test_unknown_files_are_not_changed(data: Data, clock: trio.testing.MockClock) -> None:
    for stray in (data.path / "notes.txt", data.path / "topics" / "README", data.folder / "copy.bak"):
        stray.write_text("mine")
    assert await missing_after(data, clock) == set()
    assert (data.folder / "copy.bak").read_text() == "mine"
