"""Tests for `Broker.publishable`: the topics to which publishes need not wait, after any steps."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import trio
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from broker.support import PATIENCE_S, HeldFiles, settle
from soak import examples
from trio_nsq.broker import BrokerOptions
from trio_nsq.broker.errors import PublishRefused
from trio_nsq.broker.ingest.publication import Publication
from trio_nsq.broker.server import Server
from trio_nsq.broker.state.broker import Broker
from trio_nsq.broker.state.settings import TopicSettings
from trio_nsq.broker.state.topic import Topic
from trio_nsq.broker.storage.data_folder import DataFolder
from trio_nsq.log import Files
from trio_nsq.protocol.messages import pack_messages

NAMES = ("a", "b", "c#ephemeral")
FULL = 100
SAVED_S = 10
"""A step may wait for a disk."""
STEPS = (
    "publish",
    "publish too much",
    "create",
    "subscribe",
    "delete",
    "delete slowly",
    "go on",
    "answer",
    "drain",
)


class HeldRemovals(HeldFiles):
    """Files of which only the removal of a topic's folder is held: topics are saved meanwhile."""

    def rename(self, path: Path, to: Path) -> None:
        if path.suffix == ".topic":
            super().rename(path, to)
        else:
            Files.rename(self, path, to)


class HeldLookup:
    """Tells which channels a new topic has on other brokers, none; of topic `a` when the test says so.

    Attributes:
        asked: The topics that wait for it.
    """

    addresses = ("elsewhere",)

    def __init__(self, broker: Broker) -> None:
        self.asked: dict[Topic, trio.Event] = {}
        self._broker = broker

    async def channels(self, name: str) -> list[str]:
        if name != "a":
            return []
        topic = self._broker.topics[name]
        answer = self.asked[topic] = trio.Event()
        await answer.wait()
        del self.asked[topic]
        return []

    def set_draining(self, draining: bool) -> None: ...


class Run:
    """A broker, and what a test has done to it.

    Attributes:
        deleting: Names of topics whose deletion has begun, and not ended.
    """

    def __init__(
        self, server: Server, files: HeldRemovals, lookup: HeldLookup, nursery: trio.Nursery
    ) -> None:
        self.server = server
        self.deleting: set[str] = set()
        self._files = files
        self._lookup = lookup
        self._nursery = nursery

    async def do(self, step: str, name: str) -> None:
        """Begin a step, and wait until it has ended or waits for another one."""
        topics = self.server.topics
        if step.startswith("publish"):
            bodies = [b"x"] * (FULL + 1 if step == "publish too much" else 1)
            self._start(partial(topics.publish, name, [Publication([pack_messages(bodies)])]))
        elif step == "create":
            self._start(partial(topics.create, name))
        elif step == "subscribe":
            self._start(partial(topics.create, name, "channel"))
        elif step.startswith("delete") and (topic := self.server.broker.topics.get(name)) is not None:
            if step == "delete slowly" and not self.deleting:
                self._files.hold("rename")
            self._start(partial(self._delete, topic))
        elif step == "go on":
            self._files.release()
        elif step == "answer":
            self._answer(name)
        elif step == "drain":
            self._start(partial(self.server.drain_mode.set, not self.server.broker.draining))
        await settle()

    def _answer(self, name: str) -> None:
        for topic, answer in self._lookup.asked.items():
            if topic.name == name:
                answer.set()

    def _start(self, work: Any) -> None:
        async def run() -> None:
            try:
                await work()
            except PublishRefused:
                pass

        self._nursery.start_soon(run)

    async def _delete(self, topic: Any) -> None:
        self.deleting.add(topic.name)
        await self.server.topics.delete_topic(topic)
        self.deleting.discard(topic.name)

    def publishable(self) -> set[str]:
        """Return the names of the topics to which publishes need not wait, by what the test has done."""
        broker = self.server.broker
        if broker.draining:
            return set()
        there = [name for name, topic in broker.topics.items() if topic not in self._lookup.asked]
        return set(there) - self.deleting

    async def end(self) -> None:
        """End everything that waits."""
        self._files.release()
        while self._lookup.asked or self.deleting:
            for name in NAMES:
                self._answer(name)
            await settle()


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Run]:
    files = HeldRemovals()
    data_folder = DataFolder(folder / "d", files)
    options = BrokerOptions(
        data_path=folder / "d", sync="interval", topic_defaults=TopicSettings(max_messages=FULL)
    )
    async with trio.open_nursery() as nursery:
        server = Server(options, data_folder, nursery)
        lookup = HeldLookup(server.broker)
        server.topics.lookup = cast(Any, lookup)
        run = Run(server, files, lookup, nursery)
        yield run
        await run.end()
        await server.stop()
        assert not any(map(server.broker.publishable, NAMES))
    data_folder.close()


@settings(max_examples=examples(25), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@example([("create", "b"), ("delete slowly", "b"), ("go on", "b"), ("create", "b")])
@example(
    [
        ("publish", "a"),
        ("delete slowly", "a"),
        ("answer", "a"),
        ("go on", "a"),
        ("create", "a"),
        ("answer", "a"),
    ]
)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(NAMES)), min_size=5, max_size=25))
def test_publishable_are_the_topics_that_nothing_makes_wait(steps: list[tuple[str, str]]) -> None:
    async def check() -> None:
        with TemporaryDirectory() as folder, trio.fail_after(PATIENCE_S):
            async with running(Path(folder)) as run:
                for step, name in steps:
                    if step == "publish too much" and run.deleting:
                        continue  # the removal of the new topic would wait unseen
                    await run.do(step, name)
                    broker = run.server.broker
                    with trio.fail_after(SAVED_S):
                        while {name for name in NAMES if broker.publishable(name)} != run.publishable():
                            await settle()
                    assert all(broker.publishable(name) in (None, broker.topics.get(name)) for name in NAMES)

    trio.run(check)
