"""Writing the audit log to real files: modes, rotation, files that cannot be written, and the end of the server."""

import json
import logging
import math
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from trio_nsq.access.audit import MAX_REFUSALS_OF_CLIENT, WINDOW_S, AuditLog
from trio_nsq.access.audit_writer import RETRY_S, AuditFile, AuditWriter
from trio_nsq.protocol.errors import StartupError


@asynccontextmanager
async def running_writer(target: Path | str, close_timeout_s: float = math.inf) -> AsyncIterator[AuditWriter]:
    """A writer; closed at the end. By default it waits: a clock that jumps does so while a thread writes, too."""
    writer = AuditWriter(str(target), close_timeout_s=close_timeout_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        yield writer
        await writer.aclose()
        nursery.cancel_scope.cancel()


def act(log: AuditLog, number: int) -> None:
    log.record("action", "127.0.0.1:1", None, topic=f"t{number}")


def topics(*paths: Path) -> list[str]:
    return [json.loads(line)["topic"] for path in paths for line in path.read_bytes().splitlines()]


async def test_new_file_is_private_and_an_old_one_is_appended_to(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text('{"topic":"before"}\n')
    old.chmod(0o640)
    for path in (new, old):
        async with running_writer(path) as writer:
            act(writer.log, 1)
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert topics(new) == ["t1"]
    assert topics(old) == ["before", "t1"]


async def test_line_is_in_the_file_without_waiting_for_others(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "audit"
    async with running_writer(path) as writer:
        for number in range(3):
            act(writer.log, number)
            while len(path.read_bytes().splitlines()) <= number:
                await trio.lowlevel.checkpoint()


def test_empty_target_is_no_audit_log() -> None:
    writer = AuditWriter("")
    trio.run(writer.run)
    trio.run(writer.aclose)
    assert not writer.log.enabled


def test_target_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--audit-log: cannot write .*: Is a directory"):
        AuditWriter(str(tmp_path))
    with pytest.raises(StartupError, match="No such file or directory"):
        AuditWriter(str(tmp_path / "no" / "audit"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StartupError, match="No such device or address"):  # and it does not wait for a reader
        AuditWriter(str(tmp_path / "pipe"))


async def test_rotation_while_lines_arrive_loses_none(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    async with running_writer(path) as writer:
        for number in range(2000):
            act(writer.log, number)
            if number % 100 == 50:
                path.rename(tmp_path / f"audit.{number:04}")
                await writer.reopen()
            if number % 7 == 0:
                await trio.lowlevel.checkpoint()
            if number % 100 == 0:
                while not path.exists():  # the earlier rotation has not taken place
                    await trio.lowlevel.checkpoint()
    rotated = sorted(tmp_path.glob("audit.*"))
    assert len(rotated) == 20
    assert topics(*rotated, path) == [f"t{number}" for number in range(2000)]


async def test_rotation_to_a_place_that_cannot_be_opened_keeps_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit"
    async with running_writer(path) as writer:
        path.rename(tmp_path / "old")
        path.mkdir()
        await writer.reopen()
        act(writer.log, 1)
    assert topics(tmp_path / "old") == ["t1"]
    assert f"cannot open the audit log {path} again: Is a directory; the previous file stays" in caplog.text


async def test_failed_writes_are_logged_once_and_made_up_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    caplog.set_level(logging.WARNING)
    path = tmp_path / "audit"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    async with running_writer(path) as writer:
        os.close(reader)  # from now on, writes fail
        act(writer.log, 1)
        while not writer.error:
            await trio.lowlevel.checkpoint()
        act(writer.log, 2)
        await trio.sleep(5.5 * RETRY_S)
        assert writer.error == "Broken pipe"
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        while writer.error:
            await trio.sleep(RETRY_S)
        act(writer.log, 3)
    lines = os.read(reader, 65536).splitlines()
    os.close(reader)
    assert [json.loads(line)["topic"] for line in lines] == ["t1", "t2", "t3"]
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot write the audit log {path}: Broken pipe; trying again",
        f"the audit log {path} can be written again",
    ]


def test_torn_line_is_completed_or_written_whole_to_the_next_file(tmp_path: Path) -> None:
    """A pipe that is almost full takes a part of a line, as a full disk does."""
    path = tmp_path / "audit"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = AuditFile(str(path))
    line = b"x" * 9999 + b"\n"
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.set_blocking(writer, False)
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.path.samestat(os.fstat(fd), path.stat()):
                os.set_blocking(fd, False)
        except OSError:
            pass  # the descriptor of the listing
    file.put(10 * line)
    with pytest.raises(BlockingIOError):
        file.write()
    left = file.unwritten_lines
    assert 0 < left < 10
    received = os.read(reader, 1 << 20)
    assert not received.endswith(b"\n"), "no line is torn: this test does not test what it should"
    file.write()
    assert received + os.read(reader, 1 << 20) == 10 * line
    file.put(10 * line)
    with pytest.raises(BlockingIOError):
        file.write()
    assert not os.read(reader, 1 << 20).endswith(b"\n")
    path.unlink()
    file.reopen()
    left = file.unwritten_lines
    file.write()
    assert path.read_bytes() == left * line
    file.close()
    os.close(writer)
    os.close(reader)


async def test_suppressed_refusals_are_written_at_the_end_of_their_minute(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "audit"
    async with running_writer(path) as writer:
        for _ in range(MAX_REFUSALS_OF_CLIENT + 5):
            writer.log.record("refused", "10.0.0.1:5", None)
        await trio.sleep(WINDOW_S / 2)
        assert b"suppressed" not in path.read_bytes()
        await trio.sleep(WINDOW_S / 2 + 1)
        with trio.fail_after(1000):
            while b"suppressed" not in path.read_bytes():
                await trio.sleep(0.1)
    *_, last = path.read_bytes().splitlines()
    assert json.loads(last)["count"] == 5


async def test_end_waits_for_a_write_that_was_cancelled(tmp_path: Path) -> None:
    """The thread of a cancelled write still uses the file."""
    path = tmp_path / "audit"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = AuditWriter(str(path))
    for number in range(5000):  # more than a pipe holds
        act(writer.log, number)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        await trio.lowlevel.wait_readable(reader)  # the thread writes
        nursery.cancel_scope.cancel()
    received = b""
    closed = trio.Event()

    async def close() -> None:
        await writer.aclose()
        closed.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(close)
        await trio.testing.wait_all_tasks_blocked()
        assert not closed.is_set()
        with trio.fail_after(20):
            while True:
                await trio.lowlevel.wait_readable(reader)
                if not (piece := os.read(reader, 65536)):
                    break
                received += piece
    os.close(reader)
    assert received.count(b"\n") == 5000


async def test_end_at_any_moment_loses_no_line(tmp_path: Path) -> None:
    for turns in range(8):
        path = tmp_path / f"audit{turns}"
        writer = AuditWriter(str(path))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            act(writer.log, 1)
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await writer.aclose()
        assert topics(path) == ["t1"]


async def test_hanging_file_does_not_stop_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    async with running_writer(path, close_timeout_s=0.05) as writer:
        for number in range(5000):  # more than a pipe holds
            act(writer.log, number)
    assert "the last lines could not be written in time" in caplog.text
    os.close(reader)
