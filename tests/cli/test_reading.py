"""Tests for reading input and for the rate limiter."""

import os
from pathlib import Path

import pytest
import trio
import trio.testing

from qcli.commands.pub.input import Input, open_input
from qcli.commands.shared.rate_limiter import RateLimiter
from qcli.framework.errors import Failure


async def test_pipe_is_read_without_blocking_the_loop() -> None:
    reader, writer = os.pipe()
    source = Input(reader, "pipe")
    got: list[bytes] = []
    try:
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                while chunk := await source.read():
                    got.append(chunk)

            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            os.write(writer, b"one")
            await trio.testing.wait_all_tasks_blocked(0.01)
            os.write(writer, b"two")
            await trio.testing.wait_all_tasks_blocked(0.01)
            os.close(writer)
        assert got == [b"one", b"two"]
    finally:
        source.close()


async def test_cancelled_read_loses_nothing() -> None:
    reader, writer = os.pipe()
    source = Input(reader, "pipe")
    with trio.move_on_after(0.01):
        await source.read()
    os.write(writer, b"kept")
    assert await source.read() == b"kept"
    os.close(writer)
    source.close()


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero"])
async def test_files_without_readiness_events(path: str) -> None:
    source = await open_input(path, 10)
    assert await source.read() == (b"" if path == "/dev/null" else bytes(10))
    source.close()


async def test_nonblocking_descriptor_stays_nonblocking(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    source = Input(reader, "pipe")
    os.write(writer, b"x")
    assert await source.read() == b"x"
    assert not os.get_blocking(reader)
    os.close(writer)
    source.close()


async def test_read_errors_are_reported(tmp_path: Path) -> None:
    source = await open_input(str(tmp_path))  # open succeeds for a folder
    with pytest.raises(Failure, match=r"Cannot read .*: Is a directory\."):
        await source.read()
    source.close()
    with pytest.raises(Failure, match="No such file"):
        await open_input(str(tmp_path / "missing"))


async def passes(pace: RateLimiter, count: int) -> float:
    await pace.wait()
    pace.take(count)
    return trio.current_time()


async def test_rate_is_even(autojump_clock: trio.testing.MockClock) -> None:
    begun = trio.current_time()
    pace = RateLimiter(10, begun)
    assert pace.max_messages == 1
    assert [round(await passes(pace, 1) - begun, 6) for _ in range(4)] == [0, 0.1, 0.2, 0.3]


async def test_high_rate_passes_slices(autojump_clock: trio.testing.MockClock) -> None:
    begun = trio.current_time()
    pace = RateLimiter(10_000, begun)
    assert pace.max_messages == 500
    assert [round(await passes(pace, 500) - begun, 6) for _ in range(4)] == [0, 0.05, 0.1, 0.15]


async def test_pause_is_partly_caught_up(autojump_clock: trio.testing.MockClock) -> None:
    pace = RateLimiter(100, trio.current_time())
    await passes(pace, 1)
    await trio.sleep(60)
    begun = trio.current_time()
    for _ in range(100):
        await passes(pace, 1)
    assert trio.current_time() - begun == pytest.approx(99 / 100 - RateLimiter.MAX_CREDIT_S)


async def test_rate_below_one_per_second(autojump_clock: trio.testing.MockClock) -> None:
    begun = trio.current_time()
    pace = RateLimiter(0.25, begun)
    assert [await passes(pace, 1) - begun for _ in range(3)] == pytest.approx([0, 4, 8])
