"""Tests for segments of another topic, swapped while no broker ran, and for folders of an older format."""

import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from broker.support import connected, running_broker
from faults.scenario import stats
from log.support import FIRST, HastyFiles, segment_files
from soak import some
from trio_nsq.log.inspection.verify import verify_log

OLD = Path(__file__).parent / "folders" / "format-1.zip"
"""A data folder of version 0.1.0 with segments of format 1; each message begins with TOPIC NUMBER.

small: 31 messages in three segments; channel c has finished 1, 2 and 3, has received 0, 4, 5 and 6 once, and
30 is deferred.
other: 30 messages in segments with the same names, and no channel.
carried: 31 messages, of which only 0 and 5 are unfinished: they were carried forward, and the first segment
is deleted.
indexed: 110 messages in two segments, the first with an index; channel c has received none of them.
"""
OLD_MESSAGES = {
    "small": {*range(30)} - {1, 2, 3},
    "other": {*range(30)},
    "carried": {0, 5},
    "indexed": {*range(110)},
}


def numbers(topic: str, bodies: Sequence[bytes]) -> list[int]:
    """Return the numbers of messages, which must be of this topic."""
    words = [body.split() for body in bodies]
    assert {word[0].decode() for word in words} <= {topic}
    return [int(word[1]) for word in words]


async def publish(address: str, topic: str, *which: int) -> None:
    async with connected(address) as client:
        await client.publish(topic, *[b"%s %d" % (topic.encode(), number) for number in which])


async def consume(address: str, topic: str, expected: set[int], *, finish: bool = True) -> None:
    """Consume everything ready in channel c, which must be exactly these messages."""
    bodies = []
    async with connected(address) as client:
        await client.subscribe(topic, "c", ready_count=2500)
        for _ in expected:
            message = await client.message()
            bodies.append(message.body)
            if finish:
                await client.send(b"FIN %s\n" % message.id)
        await client.nothing_more()
        await client.send(b"CLS\n")
        assert await client.frame() == (0, b"CLOSE_WAIT")
    assert sorted(numbers(topic, bodies)) == sorted(expected)


async def make_topics(data_path: Path, *, segments: int, consumed: int = 0) -> None:
    """Create topics a and b with this many segments of three messages, and a channel each."""
    async with running_broker(data_path, files=HastyFiles(), max_bytes_per_file=200) as bound:
        for topic in ("a", "b"):
            for start in range(0, 3 * segments, 3):
                await publish(bound.tcp_address, topic, start, start + 1, start + 2)
            async with connected(bound.tcp_address) as client:
                await client.subscribe(topic, "c", ready_count=1)
                for _ in range(consumed):
                    await client.send(b"FIN %s\n" % (await client.message()).id)


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("consumed", [0, 2])
@pytest.mark.parametrize("which", [0, -1])
async def test_swapped_segments_of_two_topics(
    tmp_path: Path, segments: int, consumed: int, which: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No topic delivers a message of the other, both continue, and no sequence is reused."""
    data_path = tmp_path / "d"
    await make_topics(data_path, segments=segments, consumed=consumed)
    folders = {topic: data_path / "topics" / f"{topic}.topic" for topic in ("a", "b")}
    paths = {topic: segment_files(folder)[which] for topic, folder in folders.items()}
    whole = {topic: path.read_bytes() for topic, path in paths.items()}
    swap(paths["a"], paths["b"])
    lost = set(range(int(paths["a"].stem), int(paths["a"].stem) + 3))
    left = set(range(consumed, 3 * segments)) - lost
    end = 3 * segments
    for number in (1000, 1001):  # it is started twice
        async with running_broker(data_path, files=HastyFiles(), max_bytes_per_file=200) as bound:
            assert bound.http_address is not None
            for topic, other in (("a", "b"), ("b", "a")):
                await publish(bound.tcp_address, topic, number)
                await consume(bound.tcp_address, topic, {*left, number})
                foreign = paths[topic].with_name(paths[topic].name + ".foreign")
                assert foreign.read_bytes() == whole[other]
                if number == 1000:
                    said = f"{paths[topic]}: set aside as {foreign.name}: it belongs to another topic, whose log is "
                    assert said + str(folders[other]) in caplog.messages
                topics = await stats(bound.http_address)
                assert topics[topic]["channels"]["c"]["depth"] == 0
        left = set()
        assert all(verify_log(folder).next_sequence > end for folder in folders.values())
        end = max(verify_log(folder).next_sequence for folder in folders.values())


async def test_segment_of_a_deleted_topic_is_not_used_by_the_next(tmp_path: Path) -> None:
    data_path = tmp_path / "d"
    await make_topics(data_path, segments=1)
    folder = data_path / "topics" / "a.topic"
    old = (folder / FIRST).read_bytes()
    shutil.rmtree(folder)
    async with running_broker(data_path) as bound:
        await publish(bound.tcp_address, "a", 7)
    (folder / FIRST).write_bytes(old)
    async with running_broker(data_path) as bound:
        await publish(bound.tcp_address, "a", 8)
        await consume(bound.tcp_address, "a", {8})


# ---------------------------------------------------------------------- format 1


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the folder of format 1."""
    with zipfile.ZipFile(OLD) as archive:
        archive.extractall(tmp_path / "old")
    return tmp_path / "old"


async def all_of(data_path: Path, new: int, *, finish: bool, expected: dict[str, set[int]]) -> None:
    """Start a broker, publish a message to every topic, and check the messages."""
    async with running_broker(data_path, files=HastyFiles(), max_bytes_per_file=3000) as bound:
        assert bound.http_address is not None
        for topic, left in expected.items():
            await publish(bound.tcp_address, topic, new)
            async with connected(bound.tcp_address) as client:
                await client.subscribe(topic, "c")
            about = (await stats(bound.http_address))[topic]["channels"]["c"]
            # The deferred one is due by now, if the machine's clock is right.
            is_due = topic == "small" and not about["deferred_count"]
            await consume(bound.tcp_address, topic, {*left, new, *([30] if is_due else [])}, finish=finish)


async def test_folder_of_format_1_is_converted(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = {path.relative_to(old): path.read_bytes() for path in old.rglob("*.log")}
    await all_of(old, 1000, finish=False, expected=OLD_MESSAGES)
    for path, content in before.items():
        assert (old / path).read_bytes().startswith(content), "a segment of format 1 was changed"
    expected = {topic: {*left, 1000} for topic, left in OLD_MESSAGES.items()}
    await all_of(old, 1001, finish=True, expected=expected)
    assert [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []
    for folder in (old / "topics").iterdir():
        assert not verify_log(folder).findings


async def test_swapped_segment_of_format_1_is_detected_after_the_first_start(old: Path) -> None:
    async with running_broker(old, files=HastyFiles()):
        pass
    small, other = (old / "topics" / f"{topic}.topic" for topic in ("small", "other"))
    swap(small / FIRST, other / FIRST)
    expected = {"small": set(range(12, 30)), "other": set(range(12, 30))}
    await all_of(old, 1000, finish=True, expected=expected)
    assert (small / f"{FIRST}.foreign").exists()
    assert (other / f"{FIRST}.foreign").exists()


async def test_segment_of_format_1_is_not_used_by_a_topic_without_such_segments(
    tmp_path: Path, old: Path
) -> None:
    folder = tmp_path / "d" / "topics" / "small.topic"
    async with running_broker(tmp_path / "d") as bound:
        await publish(bound.tcp_address, "small", 1000)
    shutil.copy(old / "topics" / "small.topic" / FIRST, folder / FIRST)
    async with running_broker(tmp_path / "d") as bound:
        await publish(bound.tcp_address, "small", 1001)
        await consume(bound.tcp_address, "small", {1001})
    assert (folder / f"{FIRST}.foreign").exists()


@pytest.mark.parametrize("at", some(range(32)))
@pytest.mark.parametrize("started", [False, True])
async def test_damaged_header_of_format_1_costs_nothing(old: Path, at: int, started: bool) -> None:
    if started:
        async with running_broker(old, files=HastyFiles()):
            pass
    folder = old / "topics" / "small.topic"
    for path in segment_files(folder):
        content = bytearray(path.read_bytes())
        content[at] ^= 255
        path.write_bytes(content)
    await all_of(old, 1000, finish=True, expected={"small": OLD_MESSAGES["small"]})


@pytest.mark.parametrize("at", some(range(8, 40)))
async def test_damage_before_carried_forward_messages_of_format_1_costs_nothing(old: Path, at: int) -> None:
    path = old / "topics" / "carried.topic" / "stragglers"
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)
    await all_of(old, 1000, finish=True, expected={"carried": {0, 5}})
