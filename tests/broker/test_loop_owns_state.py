"""Tests that only the event loop changes logs, topics and channels, whatever threads do meanwhile."""

import errno
import importlib
import pkgutil
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio

import trio_nsq.broker.state
import trio_nsq.log
from broker.support import connected, identify, mpub
from faults.power_cut import EVERY_OK_SYNCED, broker, carry_forward_early
from log.support import HastyFiles
from trio_nsq.broker.state.settings import TopicSettings

pytestmark = pytest.mark.uncompiled

TOPICS = [f"t{number}" for number in range(5)]
CACHES = {
    ("Segment", "index"),
    ("Segment", "newest_ns"),
}
"""What readers in threads remember of a file's content, which never changes: see `Segment`."""
FILES = {"Files", "LogFile", "OpenFiles", "WriteAheadFile", "DamageReports"}
"""Classes with locks of their own, which are neither logs, topics nor channels."""


def modules(package: ModuleType) -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(found.name)


def state_classes() -> Iterator[type]:
    """Yield the classes of logs, topics, channels and their parts."""
    for package in (trio_nsq.log, trio_nsq.broker.state):
        for module in modules(package):
            for each in vars(module).values():
                if isinstance(each, type) and each.__module__ == module.__name__:
                    frozen = getattr(getattr(each, "__dataclass_params__", None), "frozen", False)
                    if not (frozen or issubclass(each, tuple | Exception) or each.__name__ in FILES):
                        yield each


class Guard:
    """Notes changes of attributes by other threads than that of the event loop.

    A thread may create an object and change it, until the event loop has changed it.

    Attributes:
        violations: How often a thread changed an attribute, by class and attribute.
        changes: How often the event loop did, by class.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.violations: Counter[tuple[str, str]] = Counter()
        self.changes: Counter[str] = Counter()
        self._owner = threading.get_ident()
        self._of_threads: set[int] = set()  # objects
        for each in state_classes():
            monkeypatch.setattr(each, "__setattr__", self._guarded(each), raising=False)

    def _guarded(self, of: type) -> Callable[[Any, str, object], None]:
        change: Any = of.__setattr__

        def guarded(thing: object, name: str, value: object) -> None:
            if threading.get_ident() == self._owner:
                self._of_threads.discard(id(thing))
                self.changes[of.__name__] += 1
            elif not hasattr(thing, name):
                self._of_threads.add(id(thing))
            elif id(thing) not in self._of_threads and (of.__name__, name) not in CACHES:
                self.violations[of.__name__, name] += 1
            change(thing, name, value)

        return guarded


class FailingSyncs(HastyFiles):
    """Every seventh sync of a segment fails, so that writes are taken back, and bytes written again."""

    def __init__(self) -> None:
        self._syncs = 0

    def sync(self, fd: int) -> None:
        self._syncs += 1
        if self._syncs % 7 == 0 and Path(f"/proc/self/fd/{fd}").readlink().suffix == ".log":
            raise OSError(errno.EIO, "broken")
        super().sync(fd)


@pytest.mark.parametrize("sync", [*EVERY_OK_SYNCED, "interval"])
async def test_threads_change_no_log_topic_or_channel(
    tmp_path: Path, sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_forward_early(monkeypatch)
    guard = Guard(monkeypatch)
    keep = TopicSettings(retention_time_ms=1)

    async def publish(topic: str) -> None:
        chosen = random.Random(topic)
        async with connected(bound.tcp_address) as client:
            await client.send(identify(survive_refusals=True))
            await client.ok()
            for _ in range(60):
                await client.send(mpub(topic, *[bytes(chosen.randrange(1, 200)) for _ in range(4)]))
                assert await client.frame() is not None  # OK, or a refusal

    async def consume(topic: str) -> None:
        """Finish most messages, and requeue some with a delay: these are carried forward."""
        chosen = random.Random(topic)
        async with connected(bound.tcp_address) as client:
            await client.subscribe(topic, "c", 10)
            while True:
                message_id = (await client.message()).id
                is_rare = chosen.random() < 0.05
                await client.send(b"REQ %s 60000\n" % message_id if is_rare else b"FIN %s\n" % message_id)

    async with broker(tmp_path / "d", FailingSyncs(), sync, checkpoint_interval_ms=1, keep=keep) as bound:
        async with trio.open_nursery() as nursery:
            for topic in TOPICS:
                nursery.start_soon(consume, topic)
            async with trio.open_nursery() as publishers:
                for topic in TOPICS:
                    publishers.start_soon(publish, topic)
            nursery.cancel_scope.cancel()
    assert not guard.violations
    assert {"DiskLog", "SegmentWriter", "Segment", "Topic", "Channel"} <= guard.changes.keys()
