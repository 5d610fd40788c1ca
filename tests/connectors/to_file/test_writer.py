"""Tests for the writer of one topic: what it commits to its sources."""

import errno
from pathlib import Path

import pytest
import trio
import trio.testing

from connectors.to_file.outputs import BROKER, NOON, TOPIC, numbered, open_output, settings
from trio_nsq.connectors.source.batch import Position, SourceBatch
from trio_nsq.connectors.to_file.topic_writer import TopicWriter, WriteFailures, WriterLimits, retried


class IdleLog:
    """The source of a log that begins at this sequence and has no messages.

    Attributes:
        commits: The committed positions.
    """

    topic = TOPIC
    broker = log = BROKER
    is_log = True

    def __init__(self, begin: int, lag: int | None = None) -> None:
        self.commits: list[Position] = []
        self._begin = begin
        self._lag = lag

    async def receive(self) -> SourceBatch:
        await trio.sleep_forever()
        raise AssertionError

    def commit(self, position: Position) -> None:
        self.commits.append(position)

    def is_starved(self) -> bool:
        return False

    def next_sequence(self) -> int | None:
        return self._begin

    def lag(self) -> int | None:
        return self._lag


@pytest.mark.parametrize(
    ("begin", "moves"),
    [
        pytest.param(10, True, id="the log continues"),
        pytest.param(20, False, id="the channel is ahead"),
        pytest.param(0, False, id="the log is another one"),
    ],
)
async def test_stored_position_is_committed_to_its_log(tmp_path: Path, begin: int, moves: bool) -> None:
    output = open_output(settings(tmp_path))
    output.write([numbered(0, 10)], NOON)
    output.sync(NOON)
    source = IdleLog(begin)
    writer = TopicWriter(TOPIC, output, WriterLimits(), 1.0, lambda: NOON)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.consume, source)
        await trio.testing.wait_all_tasks_blocked()
        writer.stop()
        await writer.run()
        nursery.cancel_scope.cancel()
    assert {each.sequence for each in source.commits} == ({10} if moves else set())


@pytest.mark.parametrize(("lags", "sum_of_known"), [((None,), None), ((None, 3), 3), ((0, 0), 0), ((), None)])
async def test_lag_is_unknown_if_no_source_knows_it(
    tmp_path: Path, lags: tuple[int | None, ...], sum_of_known: int | None
) -> None:
    writer = TopicWriter(TOPIC, open_output(settings(tmp_path)), WriterLimits(), 1.0, lambda: NOON)
    async with trio.open_nursery() as nursery:
        for lag in lags:
            nursery.start_soon(writer.consume, IdleLog(0, lag))
        await trio.testing.wait_all_tasks_blocked()
        assert writer.lag == sum_of_known
        writer.stop()
        await writer.run()
        nursery.cancel_scope.cancel()


async def test_failed_attempts_are_counted(autojump_clock: trio.testing.MockClock) -> None:
    """`/metrics` has their number, and `/healthz` the last error until an attempt succeeds."""
    failures = WriteFailures()
    seen: list[tuple[int, str]] = []

    def work() -> str:
        seen.append((failures.attempts, failures.error))
        if len(seen) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return "done"

    threads = trio.CapacityLimiter(1)
    assert await retried(TOPIC, work, threads, trio.Event(), failures) == "done"
    said = f"topic {TOPIC}: cannot write its files: No space left on device"
    assert seen == [(0, ""), (1, said), (2, said)]
    assert (failures.attempts, failures.error) == (2, "")
