"""Kill brokers under a producer with a name: each message is stored once, in order, and none is in doubt."""

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from client.support.loops import Loop, run
from interop.restarting import Restarting
from trio_nsq import Producer
from trio_nsq.protocol import pack_messages

pytestmark = pytest.mark.slow

TOPICS = 3
FAULTS = 3


class Writer:
    """Publishes the numbers from 0 on to a topic, in every way; the next call begins before the last one ends."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self.topic = topic
        self.count = 0
        self.acknowledged = 0
        self._producer = producer

    async def run(self, until: Callable[[], bool]) -> None:
        while not until():
            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(self._publish, self._next(1)[0])
                tasks.start_soon(self._producer.publish_set, self.topic, pack_messages(self._next(20)))
            await self._producer.publish_many(self.topic, self._next(50))
            self.acknowledged = self.count

    async def _publish(self, body: bytes) -> None:
        await self._producer.publish(self.topic, body)

    def _next(self, count: int) -> list[bytes]:
        self.count += count
        return [b"%d" % number for number in range(self.count - count, self.count)]


@pytest.mark.parametrize(
    ("loop", "loses_disk"),
    [("trio", False), ("asyncio", False), ("trio", True)],
    ids=["trio", "asyncio", "archive"],
)
def test_each_message_is_stored_once(loop: Loop, loses_disk: bool, tmp_path: Path) -> None:
    """No call fails, and no message is stored twice, or missing. Each group of concurrent calls is complete before the
    next one, so the order of the groups is checked."""
    archive = tmp_path / "archive"
    flags = [f"--archive={archive}", f"--restore-from={archive}", "--archive-before-ok"] if loses_disk else []
    with ExitStack() as stack:
        restarting = Restarting(tmp_path / "data", stack, *flags)
        writers: list[Writer] = []

        async def main() -> None:
            done = False

            async def progress() -> None:
                before = [writer.acknowledged for writer in writers]
                while any(w.acknowledged == b for w, b in zip(writers, before, strict=True)):
                    await anyio.sleep(0.001)

            options: dict[str, Any] = {"name": "writer", "reconnect_max_s": 0.2, "patience_s": 60.0}
            async with Producer(restarting.address, max_in_flight_bytes=400, **options) as producer:
                writers.extend(Writer(producer, f"t{number}") for number in range(TOPICS))
                async with anyio.create_task_group() as tasks:
                    for writer in writers:
                        tasks.start_soon(writer.run, lambda: done)
                    for fault in range(FAULTS):
                        await progress()
                        if fault == 1:
                            os.kill(restarting.broker.process.pid, signal.SIGSTOP)  # and then killed
                        await anyio.to_thread.run_sync(restarting.kill)
                        if loses_disk:
                            shutil.rmtree(tmp_path / "data")
                        await anyio.to_thread.run_sync(restarting.start)
                    await progress()
                    done = True
                for writer in writers:
                    assert await producer.last_number(writer.topic) == writer.count - 1

        run(loop, main)
        for writer in writers:
            found = [int(body) for body in restarting.stored(writer.topic)]
            assert sorted(found) == list(range(writer.count))
            group = 75
            for start in range(0, writer.count, group):
                assert set(found[start : start + group]) == set(range(start, start + group))
                # The lists of the slower calls are in order.
                assert found[start + group - 50 : start + group] == list(
                    range(start + group - 50, start + group)
                )
