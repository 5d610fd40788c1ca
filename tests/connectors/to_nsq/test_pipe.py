"""How the copying of one source ends."""

from typing import cast

import pytest
import trio
import trio.testing

from trio_nsq.connectors.host_pool import HostPool
from trio_nsq.connectors.source.batch import Position, SourceBatch
from trio_nsq.connectors.to_nsq.copies import Copies
from trio_nsq.connectors.to_nsq.loops import LoopCheck
from trio_nsq.connectors.to_nsq.parts import Part
from trio_nsq.connectors.to_nsq.pipe import STOP_S, Pipe
from trio_nsq.connectors.to_nsq.progress import SourceProgress
from trio_nsq.filters.bodies import Filter


class OneBatch:
    """A log with one batch. Further ones are waited for, in a nursery or not."""

    topic, broker, is_log, log = "t", "b", True, "b"

    def __init__(self, *, in_nursery: bool) -> None:
        self._is_new = True
        self._in_nursery = in_nursery

    async def receive(self) -> SourceBatch:
        if self._is_new:
            self._is_new = False
            return SourceBatch("t", "b", [b"x"], [b"0" * 16], [0], [0], range(1), [0], Position(1, None))
        if self._in_nursery:  # as while it connects
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
        await trio.sleep_forever()
        raise AssertionError

    def commit(self, position: Position) -> None: ...

    def is_starved(self) -> bool:
        return False

    def next_sequence(self) -> int | None:
        return 0

    def lag(self) -> int | None:
        return None


class Refused(Copies):
    """Copies to a destination that stores nothing for a long time."""

    async def publish(self, part: Part) -> None:
        await trio.sleep(1000)


@pytest.mark.parametrize("in_nursery", [False, True])
async def test_a_publish_that_takes_long_does_not_delay_the_end(
    autojump_clock: trio.testing.MockClock, in_nursery: bool
) -> None:
    source, copies = OneBatch(in_nursery=in_nursery), Refused("t", [], cast("HostPool", None))
    pipe = Pipe(
        source,
        Filter(),
        copies,
        copies,
        SourceProgress("t", "b"),
        None,
        lambda: 1000,
        cast("LoopCheck", None),
    )
    with trio.move_on_after(1):
        await pipe.run()
    assert trio.current_time() == pytest.approx(1 + STOP_S)
