"""A write path without a server around it, and clients that publish over it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from broker.support import until
from trio_nsq.broker import BrokerOptions
from trio_nsq.broker.errors import PublishRefused
from trio_nsq.broker.ingest.publication import Publication
from trio_nsq.broker.options import Sync
from trio_nsq.broker.server import Server
from trio_nsq.broker.storage.data_folder import DataFolder
from trio_nsq.event_loop.pacing import Pacing
from trio_nsq.log import DiskLog, Files
from trio_nsq.protocol import pack_messages


class Counted(Files):
    """A real file system that counts syncs."""

    syncs = 0

    def sync(self, fd: int) -> None:
        self.syncs += 1
        super().sync(fd)


class Busy:
    """A topic with a publisher, which publishes again when its message is stored, if `goes_on`."""

    def __init__(self, server: Server, name: str, *, goes_on: bool) -> None:
        self.stored = 0
        self.goes_on = goes_on
        self._publisher = server.write_path
        self.topic = server.broker.topic(name)
        if isinstance(self.topic.log, DiskLog):  # not of an ephemeral topic
            self.topic.log.rotate()

    def publish(self, size: int = 1) -> None:
        """Publish a message."""
        self._publisher.submit(self.topic, [Publication([pack_messages([b"x" * size])])], self._complete)

    def _complete(self, error: PublishRefused | None) -> None:
        assert error is None
        self.stored += 1
        if self.goes_on:
            self.publish()


class Running:
    """A broker's publisher, and its clients."""

    def __init__(self, server: Server, nursery: trio.Nursery) -> None:
        self.server = server
        self.write_path = server.write_path
        self.nursery = nursery
        self.busy: list[Busy] = []

    def add(self, name: str, *, goes_on: bool = False) -> Busy:
        """Add a client that publishes to its own topic; with `goes_on` until the end."""
        self.busy.append(Busy(self.server, name, goes_on=goes_on))
        return self.busy[-1]

    @property
    def threads(self) -> int:
        """Return the number of commit threads: each has a task that waits for it."""
        return len(self.nursery.child_tasks)

    @asynccontextmanager
    async def rounds(self) -> AsyncIterator[Callable[[], int]]:
        """Run poller rounds in which clients always have data; yields the number of rounds."""
        count = 0
        poller = self.server.poller

        def again() -> None:
            nonlocal count
            count += 1
            if not polling.cancel_scope.cancel_called:
                poller.call_soon(again)

        async with trio.open_nursery() as polling:
            polling.start_soon(self.server.scheduler.run)
            again()
            await until(lambda: count > 10)
            yield lambda: count
            polling.cancel_scope.cancel()


@asynccontextmanager
async def running_write_path(
    folder: Path, sync: Sync = "always", files: Files | None = None, **pacing: Any
) -> AsyncIterator[Running]:
    """Run a publisher, which is closed at the end unless its nursery is cancelled."""
    data_folder = DataFolder(folder / "d", files)
    options = BrokerOptions(data_path=folder / "d", sync=sync, pacing=Pacing(**pacing))
    async with trio.open_nursery() as nursery:
        running = Running(Server(options, data_folder, nursery), nursery)
        try:
            yield running
        finally:
            for one in running.busy:
                one.goes_on = False
        if not nursery.cancel_scope.cancel_called:
            await running.write_path.close()
    for one in running.busy:
        one.topic.log.close()
    data_folder.close()
