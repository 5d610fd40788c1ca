"""Tests for the second copy of a broker's saved files: when it exists, when it is used, and when it must not
exist.
"""

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio.testing

from broker.support import RawClient, connected, running_broker, settle, threads_done, until
from faults.scenario import http
from log.support import HastyFiles, segment_files
from trio_nsq.broker.storage.data_folder import decode_state


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


async def receive(client: RawClient, count: int) -> list[bytes]:
    """Receive this many messages and finish them."""
    bodies = []
    for _ in range(count):
        message = await client.message()
        await client.send(b"FIN %s\n" % message.id)
        bodies.append(message.body)
    return bodies


async def finish(client: RawClient, count: int) -> None:
    """Receive and finish this many messages, and wait until the broker has processed that."""
    await receive(client, count)
    await client.send(b"CLS\n")
    assert await client.frame() == (0, b"CLOSE_WAIT")


@pytest.mark.parametrize("damaged", ["state.json", "state.json.previous"])
async def test_channel_survives_damage_when_both_copies_have_it(
    tmp_path: Path, clock: trio.testing.MockClock, damaged: str
) -> None:
    async with running_broker(tmp_path / "d", checkpoint_interval_ms=1000) as bound:
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c")
        clock.jump(1.5)
        folder = tmp_path / "d" / "topics" / "t.topic"
        await until((folder / "state.json.previous").exists)
        async with connected(bound.tcp_address) as client:
            await client.publish("t", b"for c")
        shutil.copytree(tmp_path / "d", tmp_path / "killed")
    damage(tmp_path / "killed" / "topics" / "t.topic" / damaged)
    async with running_broker(tmp_path / "killed") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "d")
        await client.publish("t", b"for both")
    async with running_broker(tmp_path / "killed") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        assert await receive(client, 2) == [b"for c", b"for both"]


async def test_files_deleted_after_the_last_save_are_not_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The previous state needed messages that were finished in the damaged one."""
    folder = tmp_path / "d" / "topics" / "t.topic"
    async with running_broker(tmp_path / "d", max_bytes_per_file=1000) as bound:
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c")
            for number in range(10):
                await client.publish("t", b"%d" % number * 500)
            assert bound.http_address is not None
            await http(bound.http_address, "POST", "/channel/pause", topic="t", channel="c")
            await http(bound.http_address, "POST", "/channel/unpause", topic="t", channel="c")
            await client.send(b"RDY 10\n")
            await finish(client, 10)
    assert len(segment_files(folder)) == 1
    assert decode_state((folder / "state.json.previous").read_bytes())["channels"][0]["cursor"] == 0
    damage(folder / "state.json")
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        assert f"{folder / 'state.json'} is damaged: " in caplog.text
        assert "missing" not in caplog.text
        await client.subscribe("t", "c", ready_count=1)
        assert await receive(client, 1) == [b"9" * 500]
        await client.publish("t", b"new")
        assert await receive(client, 1) == [b"new"]
    assert decode_state((folder / "state.json").read_bytes())["end"] == 11
    assert (folder / "state.json.damaged").exists()


async def test_state_ahead_of_its_log_is_never_used_again(tmp_path: Path) -> None:
    """After a power cut it would treat new messages with the sequences of lost ones as finished."""
    folder = tmp_path / "d" / "topics" / "t.topic"
    async with (
        running_broker(tmp_path / "d", sync="interval") as bound,
        connected(bound.tcp_address) as client,
    ):
        await client.subscribe("t", "c", ready_count=10)
        await client.publish("t", b"stays")
        size = segment_files(folder)[0].stat().st_size
        await client.publish("t", b"lost", b"lost", b"lost")
        await finish(client, 4)
    os.truncate(segment_files(folder)[0], size)
    async with (
        running_broker(tmp_path / "d", sync="interval") as bound,
        connected(bound.tcp_address) as client,
    ):
        await client.publish("t", b"new", b"new", b"new")
        shutil.copytree(tmp_path / "d", tmp_path / "killed")
    left = tmp_path / "killed" / "topics" / "t.topic"
    assert not (left / "state.json.previous").exists()
    assert decode_state((left / "state.json").read_bytes())["end"] == 1
    damage(folder / "state.json")
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        assert await receive(client, 3) == [b"new"] * 3


async def test_both_copies_are_complete_after_a_clean_stop(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    """Also of topics without a change since a checkpoint."""
    folder = tmp_path / "d" / "topics" / "t.topic"
    async with running_broker(tmp_path / "d", checkpoint_interval_ms=1000) as bound:
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c", ready_count=10)
            await client.publish("t", b"1", b"2")
            await finish(client, 2)
        await settle()
        clock.jump(1)
        await until(lambda: decode_state((folder / "state.json").read_bytes())["end"] == 2)
        await threads_done()
    damage(folder / "state.json")
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.publish("t", b"new")
        await client.subscribe("t", "c", ready_count=10)
        assert await receive(client, 1) == [b"new"]


class Refusing(HastyFiles):
    """A file system that refuses chosen operations."""

    def __init__(self) -> None:
        self.refuses: Callable[[str, Path], int | None] = lambda operation, path: None

    def _pass(self, operation: str, path: Path) -> None:
        if code := self.refuses(operation, path):
            raise OSError(code, os.strerror(code))

    def link(self, path: Path, to: Path) -> None:
        self._pass("link", path)
        super().link(path, to)

    def replace(self, path: Path, content: bytes) -> None:
        self._pass("replace", path)
        super().replace(path, content)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        self._pass("read", Path(f"/proc/self/fd/{fd}").readlink())
        return super().read(fd, size, offset)


async def save_twice(address: str | None) -> Sequence[int]:
    assert address is not None
    return [
        (await http(address, "POST", f"/channel/{what}", topic="t", channel="c"))[0]
        for what in ("pause", "unpause")
    ]


async def test_file_system_without_links_has_no_copy(tmp_path: Path) -> None:
    files = Refusing()
    files.refuses = lambda operation, path: errno.EPERM if operation == "link" else None
    async with running_broker(tmp_path / "d", files=files) as bound:
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c")
        assert await save_twice(bound.http_address) == [200, 200]
    names = {path.name for path in (tmp_path / "d" / "topics" / "t.topic").iterdir()}
    assert names == {"state.json"}


async def test_on_a_full_disk_a_state_uses_the_space_of_the_copy(tmp_path: Path) -> None:
    files = Refusing()
    folder = tmp_path / "d" / "topics" / "t.topic"
    async with running_broker(tmp_path / "d", files=files) as bound:
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c")
        assert await save_twice(bound.http_address) == [200, 200]
        assert {path.name for path in folder.iterdir()} == {"state.json", "state.json.previous"}
        files.refuses = lambda operation, path: (
            errno.ENOSPC
            if operation == "replace" and (path.parent / "state.json.previous").exists()
            else None
        )
        assert await save_twice(bound.http_address) == [200, 200]
        assert {path.name for path in folder.iterdir()} == {"state.json", "state.json.previous"}
        files.refuses = lambda operation, path: errno.ENOSPC if operation == "replace" else None
        assert await save_twice(bound.http_address) == [503, 503]
        assert {path.name for path in folder.iterdir()} == {"state.json"}


@pytest.mark.parametrize("unreadable", ["broker.json", "state.json"])
async def test_copy_is_used_if_the_state_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, unreadable: str
) -> None:
    files = Refusing()
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c")
        await client.publish("t", b"kept")
    files.refuses = lambda operation, path: (
        errno.EIO if operation == "read" and path.name == unreadable else None
    )
    async with running_broker(tmp_path / "d", files=files) as bound, connected(bound.tcp_address) as client:
        assert f"{unreadable}: Input/output error" in caplog.text
        await client.subscribe("t", "c", ready_count=1)
        assert await receive(client, 1) == [b"kept"]


async def test_state_of_another_topic_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c")
        await client.publish("t", b"kept")
        await client.publish("other", b"not this")
    topics = tmp_path / "d" / "topics"
    shutil.copy(topics / "other.topic" / "state.json", topics / "t.topic" / "state.json")
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        assert "t.topic/state.json is damaged: it is the state of topic other" in caplog.text
        await client.subscribe("t", "c", ready_count=1)
        assert await receive(client, 1) == [b"kept"]


async def test_leftovers_of_unfinished_writes_are_harmless(tmp_path: Path) -> None:
    """A kill leaves them; the next start and the next save replace or remove them."""
    async with running_broker(tmp_path / "d") as bound:
        async with connected(bound.tcp_address) as client:
            await client.subscribe("t", "c")
            await client.publish("t", b"kept")
        assert await save_twice(bound.http_address) == [200, 200]
    folder = tmp_path / "d" / "topics" / "t.topic"
    left = [tmp_path / "d" / name for name in ("broker.json.tmp", "broker.json.copy.tmp")]
    left += [
        folder / f"{name}.tmp" for name in ("state.json", "state.json.previous", "stragglers", "0.index")
    ]
    for path in left:
        path.write_bytes(b"half of some")
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        assert await save_twice(bound.http_address) == [200, 200]
        await client.subscribe("t", "c", ready_count=1)
        assert await receive(client, 1) == [b"kept"]
    assert [path for path in left if path.exists()] == []
    assert decode_state((folder / "state.json.previous").read_bytes())["name"] == "t"


async def test_state_of_gigabytes_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "d" / "topics" / "t.topic"
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c")
    shutil.copy(folder / "state.json", folder / "state.json.previous")
    os.truncate(folder / "state.json", 2**33)  # a sparse file
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        assert "state.json: it has 8,589,934,592 bytes; the maximum is 1,073,741,824" in caplog.text
        await client.subscribe("t", "c")
