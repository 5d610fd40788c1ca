"""Tests for a topic with unusable files: it is refused with the reason, its files do not change, and others
work.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import trio.testing

from broker.support import RawClient, connected, mpub, running_broker, settle, until
from faults.disk import read_image
from faults.scenario import http, stats
from log.support import HastyFiles, segment_files
from trio_nsq.broker import BoundAddresses
from trio_nsq.broker.storage.data_folder import decode_state

BLOCK = 4096


class BadBlocks(HastyFiles):
    """A disk that cannot read some blocks of a file, or all of it. As in Linux, the blocks before them are
    read first.
    """

    def __init__(self) -> None:
        self.bad: Callable[[Path, int], bool] = lambda path, block: False

    def read(self, fd: int, size: int, offset: int) -> bytes:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        end = offset
        while end < offset + size and not self.bad(path, end // BLOCK):
            end = (end // BLOCK + 1) * BLOCK
        if end == offset and size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(fd, min(size, end - offset), offset)


@pytest.fixture
async def data(tmp_path: Path) -> Path:
    """Two topics, each with a channel and some blocks of messages."""
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        for topic in ("bad", "good"):
            await client.publish(topic, *(b"%s %d" % (topic.encode(), n) + bytes(3000) for n in range(5)))
            assert await post(bound, "/channel/create", topic=topic, channel="c") == (200, "")
    return tmp_path / "d"


async def post(bound: BoundAddresses, path: str, body: bytes = b"", **query: str) -> tuple[int, str]:
    assert bound.http_address is not None
    status, content = await http(bound.http_address, "POST", path, body, **query)
    return status, content.decode()


async def get(bound: BoundAddresses, path: str, **query: str) -> tuple[int, str]:
    assert bound.http_address is not None
    status, content = await http(bound.http_address, "GET", path, b"", **query)
    return status, content.decode()


async def bodies(client: RawClient, count: int) -> list[bytes]:
    return [(await client.message()).body.rstrip(b"\0") for _ in range(count)]


async def check_good(bound: BoundAddresses) -> None:
    """Check that the other topic has all messages, and accepts more."""
    async with connected(bound.tcp_address) as client:
        await client.publish("good", b"new")
        await client.subscribe("good", "c", ready_count=100)
        assert await bodies(client, 6) == [*(b"good %d" % n for n in range(5)), b"new"]


async def check_refused(bound: BoundAddresses, reason: str) -> None:
    """Check that all requests about the topic are refused with the reason."""
    said = f"topic bad is unavailable: {reason}"
    for command, error in (
        (b"PUB bad\n" + (1).to_bytes(4, "big") + b"x", "E_PUB_FAILED PUB failed"),
        (mpub("bad", b"x", b"y"), "E_MPUB_FAILED MPUB failed"),
        (b"SUB bad c\n", "E_SUB_FAILED SUB failed"),
    ):
        async with connected(bound.tcp_address) as client:
            await client.send(command)
            assert await client.error() == f"{error} {said}"
    for path in ("/pub", "/mpub"):
        status, text = await post(bound, path, b"x", topic="bad")
        assert (status, json.loads(text)["message"]) == (503, said), path
    for path in ("/topic/create", "/topic/empty", "/topic/pause", "/channel/create", "/channel/pause"):
        status, text = await post(bound, path, topic="bad", channel="c")
        assert (status, json.loads(text)["message"]) == (503, said), path
    status, text = await get(bound, "/topic/bounds", topic="bad")
    assert (status, json.loads(text)["message"]) == (503, said)


async def check_reported(bound: BoundAddresses, reason: str) -> None:
    """Check that the broker's health and metrics report it."""
    assert await get(bound, "/ping") == (500, f"NOK - topic bad is unavailable: {reason}")
    assert bound.http_address is not None
    found = await stats(bound.http_address)
    assert list(found) == ["bad", "good"]
    assert (found["bad"]["unavailable"], found["bad"]["channels"]) == (reason, {})
    assert "unavailable" not in found["good"]
    _, text = await get(bound, "/stats", topic="bad")
    assert f"\n        unavailable: {reason}\n" in text
    assert f"\nHealth: NOK - topic bad is unavailable: {reason}\n" in text
    _, text = await get(bound, "/metrics")
    assert "\nnsq_unavailable_topics 1.0\n" in text
    assert "\nnsq_healthy 0.0\n" in text


async def test_unreadable_block_in_the_last_segment(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = data / "topics" / "bad.topic"
    (segment,) = segment_files(folder)
    files = BadBlocks()
    files.bad = lambda path, block: path == segment and block == 2
    before = read_image(folder)
    reason = f"cannot read {segment}: Input/output error"
    for _ in range(2):
        caplog.clear()
        async with running_broker(data, files=files, checkpoint_interval_ms=5) as bound:
            await check_refused(bound, reason)
            await check_reported(bound, reason)
        assert caplog.text.count("TOPIC(bad): unavailable: ") == 1
        assert read_image(folder) == before, "what may be repaired was changed"
    async with running_broker(data, files=files) as bound:
        await check_good(bound)
    files.bad = lambda path, block: False
    async with running_broker(data, files=files) as bound:
        assert await get(bound, "/ping") == (200, "OK")
        async with connected(bound.tcp_address) as client:
            await client.publish("bad", b"more")
            await client.subscribe("bad", "c", ready_count=100)
            assert await bodies(client, 6) == [*(b"bad %d" % n for n in range(5)), b"more"]


def unreadable_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("no folder")


def damaged_states(folder: Path) -> None:
    for path in folder.glob("state.json*"):
        path.write_bytes(b"{")


def state_of_a_later_version(folder: Path) -> None:
    (folder / "state.json").write_text('{"format":99,"end":5,"name":"bad"}')


def no_segment(folder: Path) -> None:
    (folder / "access.log").write_bytes(b"127.0.0.1 - - GET /index.html\n" * 3)


DAMAGE = [unreadable_folder, damaged_states, state_of_a_later_version, no_segment]


@pytest.mark.parametrize("damage", DAMAGE)
async def test_damage_of_any_kind_affects_no_other_topic(data: Path, damage: Callable[[Path], None]) -> None:
    folder = data / "topics" / "bad.topic"
    damage(folder)
    before = read_image(data / "topics")["bad.topic"]
    async with running_broker(data) as bound:
        status, text = await get(bound, "/ping")
        reason = text.removeprefix("NOK - topic bad is unavailable: ")
        assert status == 500
        assert str(folder) in reason
        await check_refused(bound, reason)
        await check_reported(bound, reason)
        await check_good(bound)
    assert read_image(data / "topics")["bad.topic"] == before


async def test_exception_while_a_topic_is_opened(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = BadBlocks()

    def bad(path: Path, block: int) -> bool:
        if path.parent.name == "bad.topic" and path.suffix == ".log":
            raise RuntimeError("never thought of")
        return False

    files.bad = bad
    async with running_broker(data, files=files) as bound:
        await check_refused(bound, "internal error: RuntimeError('never thought of')")
        await check_good(bound)
    assert "RuntimeError: never thought of" in caplog.text


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


async def until_it_is_well(bound: BoundAddresses) -> None:
    while await get(bound, "/ping") != (200, "OK"):
        pass


async def test_topic_is_opened_again_when_the_disk_works(
    data: Path, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    files = BadBlocks()
    reads = 0

    def bad(path: Path, block: int) -> bool:
        nonlocal reads
        reads += path.parent.name == "bad.topic" and path.suffix == ".log"
        return path.parent.name == "bad.topic" and path.suffix == ".log"

    files.bad = bad
    async with running_broker(data, files=files) as bound:
        before = reads
        await settle()  # the retrying task sleeps by now
        clock.jump(11)
        await until(lambda: reads > before)
        await settle()
        (segment,) = segment_files(data / "topics" / "bad.topic")
        await check_refused(bound, f"cannot read {segment}: Input/output error")
        assert caplog.text.count("TOPIC(bad): unavailable: ") == 1
        files.bad = lambda path, block: False
        clock.jump(21)
        await until_it_is_well(bound)
        assert "TOPIC(bad): available again" in caplog.text
        async with connected(bound.tcp_address) as client:
            await client.publish("bad", b"more")
            await client.subscribe("bad", "c", ready_count=100)
            assert await bodies(client, 6) == [*(b"bad %d" % n for n in range(5)), b"more"]
        await check_good(bound)
    async with running_broker(data) as bound:
        assert bound.http_address is not None
        assert (await stats(bound.http_address))["bad"]["channels"]["c"]["depth"] == 6


async def test_topic_that_is_opened_again_while_the_broker_drains(
    data: Path, clock: trio.testing.MockClock
) -> None:
    files = BadBlocks()
    files.bad = lambda path, block: path.parent.name == "bad.topic"
    async with running_broker(data, files=files) as bound:
        assert bound.http_address is not None
        assert await http(bound.http_address, "PUT", "/config/draining", b"true") == (200, b"true")
        await settle()  # the retrying task sleeps by now
        files.bad = lambda path, block: False
        clock.jump(11)
        await until_it_is_well(bound)
        async with connected(bound.tcp_address) as client:
            await client.send(mpub("bad", b"x"))
            assert (await client.error()).startswith("E_MPUB_FAILED MPUB failed DRAINING")
        async with connected(bound.tcp_address) as client:
            await client.subscribe("bad", "c", ready_count=100)
            assert await bodies(client, 5) == [b"bad %d" % n for n in range(5)]


async def test_unavailable_topic_can_be_deleted(data: Path) -> None:
    damaged_states(data / "topics" / "bad.topic")
    async with running_broker(data) as bound:
        assert await post(bound, "/topic/delete", topic="bad") == (200, "")
        assert await get(bound, "/ping") == (200, "OK")
        assert await post(bound, "/topic/delete", topic="bad") == (404, '{"message":"TOPIC_NOT_FOUND"}')
        assert not (data / "topics" / "bad.topic").exists()
        async with connected(bound.tcp_address) as client:
            await client.publish("bad", b"begins anew")
            await client.subscribe("bad", "c", ready_count=1)
            assert await bodies(client, 1) == [b"begins anew"]
        await check_good(bound)


class NoRenames(HastyFiles):
    def rename(self, path: Path, to: Path) -> None:
        if "deleted" in to.name:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        super().rename(path, to)


async def test_unavailable_topic_that_cannot_be_deleted_stays(data: Path) -> None:
    damaged_states(data / "topics" / "bad.topic")
    async with running_broker(data, files=NoRenames()) as bound:
        status, text = await post(bound, "/topic/delete", topic="bad")
        assert status == 503
        assert "cannot delete the files of topic bad: Read-only file system" in text
        assert (await get(bound, "/ping"))[0] == 500


async def test_many_unavailable_topics_are_reported_in_one_line(data: Path) -> None:
    for topic in ("bad", "good"):
        damaged_states(data / "topics" / f"{topic}.topic")
    async with running_broker(data) as bound:
        status, text = await get(bound, "/ping")
        assert status == 500
        assert text.endswith(" (and 1 more)")
        assert text.count("is unavailable") == 1


async def test_state_ahead_of_its_log_that_cannot_be_replaced(tmp_path: Path) -> None:
    """New messages would get sequences that the state treats as finished."""
    data = tmp_path / "d"
    folder = data / "topics" / "bad.topic"
    async with running_broker(data) as bound, connected(bound.tcp_address) as client:
        await client.publish("good", *(b"good %d" % n for n in range(5)))
        await client.publish("bad", b"x")
    async with running_broker(data) as bound:
        await post(bound, "/channel/create", topic="good", channel="c")
    (segment,) = segment_files(folder)
    os.truncate(segment, 40)

    class NoStates(HastyFiles):
        def replace(self, path: Path, content: bytes) -> None:
            if path.parent == folder:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            super().replace(path, content)

    async with running_broker(data, files=NoStates()) as bound:
        await check_refused(bound, f"cannot write to {folder}: Read-only file system")
        await check_good(bound)
    async with running_broker(data) as bound:
        assert await get(bound, "/ping") == (200, "OK")


# ---------------------------------------------------------------------- dead letters


@pytest.fixture
async def moved(tmp_path: Path) -> Path:
    """The files after a kill: a message is a dead letter, and still in its channel's state."""
    data = tmp_path / "running"
    async with running_broker(data, checkpoint_interval_ms=3_600_000, max_bytes_per_file=5000) as bound:
        await post(bound, "/topic/create", topic="bad")
        await post(bound, "/channel/create", topic="bad", channel="c")
        assert bound.http_address is not None
        settings = b'{"max_attempts":1,"dead_letter_topic":"dead"}'
        query = {"topic": "bad", "channel": "c"}
        assert (await http(bound.http_address, "PUT", "/channel/settings", settings, **query))[0] == 200
        async with connected(bound.tcp_address) as client, connected(bound.tcp_address) as reader:
            await client.publish("bad", b"once" + bytes(9000))
            await client.publish("bad", b"other")
            await client.subscribe("bad", "c", ready_count=1)
            message = await client.message()
            await post(bound, "/channel/pause", topic="bad", channel="c")  # saves it
            await post(bound, "/channel/unpause", topic="bad", channel="c")
            await client.send(b"REQ %s 0\n" % message.id)
            await reader.subscribe("dead", "dead-letters", ready_count=1)
            assert await bodies(reader, 1) == [b"once"]  # so it is in the other topic
            shutil.copytree(data, tmp_path / "d")
    return tmp_path / "d"


async def check_letters(bound: BoundAddresses) -> None:
    """Check that the message is a dead letter, once."""
    assert bound.http_address is not None
    assert (await stats(bound.http_address))["dead"]["channels"]["dead-letters"]["depth"] == 1


async def check_moved_once(bound: BoundAddresses, others: int) -> None:
    """Check that, and that this many others wait in its channel."""
    await check_letters(bound)
    assert bound.http_address is not None
    assert (await stats(bound.http_address))["bad"]["channels"]["c"]["depth"] == others


async def test_moved_message_is_known_when_its_topic_is_available_again(moved: Path) -> None:
    """Meanwhile the dead-letter topic must remember that the other topic's saved state still has the message."""
    files = BadBlocks()
    files.bad = lambda path, block: path.parent.name == "bad.topic" and path.suffix == ".log"
    for _ in range(2):
        async with running_broker(moved, files=files) as bound:
            assert (await get(bound, "/ping"))[0] == 500
            await post(bound, "/topic/pause", topic="dead")
            await post(bound, "/topic/unpause", topic="dead")
            await check_letters(bound)
    async with running_broker(moved) as bound:
        await check_moved_once(bound, 1)


async def test_moved_message_is_known_when_its_topic_is_opened_again(
    moved: Path, clock: trio.testing.MockClock
) -> None:
    files = BadBlocks()
    files.bad = lambda path, block: path.parent.name == "bad.topic" and path.suffix == ".log"
    async with running_broker(moved, files=files) as bound:
        files.bad = lambda path, block: False
        await settle()  # the retrying task sleeps by now
        clock.jump(11)
        await until_it_is_well(bound)
        await settle()
        await check_moved_once(bound, 1)


async def test_letters_of_a_deleted_topic_keep_no_files(moved: Path) -> None:
    damaged_states(moved / "topics" / "bad.topic")
    async with running_broker(moved) as bound:
        assert await post(bound, "/topic/delete", topic="bad") == (200, "")
    state = decode_state((moved / "topics" / "dead.topic" / "state.json").read_bytes())
    assert state["settled"] == state["end"] == 1


async def test_moved_message_that_cannot_be_checked_waits_for_the_next_start(
    moved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = BadBlocks()
    first = segment_files(moved / "topics" / "bad.topic")[0]
    files.bad = lambda path, block: path == first and block == 1
    async with running_broker(moved, files=files) as bound:
        assert await get(bound, "/ping") == (200, "OK")
        assert "bad/c: dead letters that have been moved may be moved again: cannot read " in caplog.text
        async with connected(bound.tcp_address) as client:
            await client.subscribe("bad", "c", ready_count=1)
            message = await client.message()
            assert message.body == b"other"
            await client.send(b"FIN %s\nCLS\n" % message.id)  # otherwise it would be the next dead letter
            assert await client.frame() == (0, b"CLOSE_WAIT")
    async with running_broker(moved) as bound:
        await check_moved_once(bound, 0)
