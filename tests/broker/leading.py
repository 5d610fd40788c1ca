"""A broker that leads a cluster, in the test's trio run, and its followers."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from broker.support import PATIENCE_S, RawClient, until
from log.support import HastyFiles
from trio_nsq.broker import BoundAddresses, BrokerOptions, serve
from trio_nsq.broker.replication import Replication, record_nothing
from trio_nsq.broker.storage.data_folder import end_following
from trio_nsq.client import TopicReader
from trio_nsq.log.files import Files
from trio_nsq.log.records import RecordBatch
from trio_nsq.protocol.errors import NSQError
from trio_nsq.replication.follower import follow
from trio_nsq.replication.replica import Replica


class Leading:
    """A broker in the test's trio run that accepts followers.

    Attributes:
        port: Where followers connect.
    """

    def __init__(self, replication: Replication) -> None:
        self.replication = replication
        self.addresses: BoundAddresses
        self.port: int
        self._scope = trio.CancelScope()
        self._stopped = trio.Event()

    async def serve(self, options: BrokerOptions, task_status: Any) -> None:
        """Run the broker until `stop`."""
        with self._scope:
            await serve(options, replication=self.replication, task_status=task_status)
        self._stopped.set()

    def stop(self) -> None:
        """Begin to stop the broker."""
        self._scope.cancel()

    async def stopped(self) -> None:
        """Wait until the broker has stopped."""
        with trio.fail_after(PATIENCE_S):
            await self._stopped.wait()

    async def follow(self, folder: Path, member: str, files: Files | None = None) -> None:
        """Follow with a folder until the connection ends."""
        folder.mkdir(exist_ok=True)
        replica = await trio.to_thread.run_sync(Replica.open, files or HastyFiles(), folder, 20_000)
        try:
            async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
                await follow(stream, replica, cluster="prod", member=member)
        finally:
            replica.close()

    async def until_in_sync(self, *members: str) -> None:
        """Wait until OKs wait for exactly these followers."""
        await until(lambda: self.replication.in_sync == set(members))


@asynccontextmanager
async def leading(
    data_path: Path,
    epoch: int = 1,
    record: Callable[[frozenset[str]], Awaitable[None]] = record_nothing,
    stall_s: float = PATIENCE_S,
    most_lag_s: float = PATIENCE_S,
    pause_s: float = 5.0,
    certain_until: Callable[[], float | None] = lambda: inf,
    stop_s: float = PATIENCE_S,
    min_in_sync: int = 1,
    expected: frozenset[str] = frozenset(),
    join_s: float = PATIENCE_S,
    **options: Any,
) -> AsyncIterator[Leading]:
    """Run a leader on free loopback ports; it is stopped cleanly at the end."""
    addresses = dict.fromkeys(("tcp_address", "http_address", "https_address"), "127.0.0.1:0")
    settings = BrokerOptions(data_path=data_path, **(addresses | options))
    replication = Replication(
        *(data_path, "prod", "one", epoch),
        record=record,
        certain_until=certain_until,
        stall_s=stall_s,
        most_lag_s=most_lag_s,
        pause_s=pause_s,
        stop_s=stop_s,
        min_in_sync=min_in_sync,
        expected=expected,
        join_s=join_s,
    )
    leader = Leading(replication)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(3 * PATIENCE_S):
            listeners = await nursery.start(partial(trio.serve_tcp, replication.accept, 0, host="127.0.0.1"))
            leader.port = listeners[0].socket.getsockname()[1]
            leader.addresses = await nursery.start(lambda task_status: leader.serve(settings, task_status))
            yield leader
            leader.stop()
            await leader.stopped()
        nursery.cancel_scope.cancel()


def promote(folder: Path) -> None:
    """Make a follower's folder one that a broker opens, as after the loss of the leader."""
    replica = Replica.open(Files(), folder)
    assert replica.position is not None
    replica.end()
    end_following(Files(), folder)


class Record:
    """Which followers are in sync, as it is recorded outside.

    Attributes:
        members: As last recorded.
        fails: Whether recording fails; with `is_lost`, after it was done.
        hangs: Whether recording never ends.
    """

    def __init__(self) -> None:
        self.members: frozenset[str] = frozenset()
        self.fails = self.is_lost = self.hangs = False
        self.attempts = 0

    async def __call__(self, members: frozenset[str]) -> None:
        self.attempts += 1
        await (trio.sleep_forever() if self.hangs else trio.sleep(0))
        if not self.fails or self.is_lost:
            self.members = members
        if self.fails:
            raise NSQError("it does not answer")


async def bodies_in(addresses: BoundAddresses, topic: str) -> list[tuple[bytes, bytes]]:
    """Return the id and the body of each message in a topic, by reading it from the beginning."""
    found: list[tuple[bytes, bytes]] = []
    async with TopicReader(str(addresses.http_address), topic) as reader:
        while some := await reader.receive():
            for batch in some:
                assert isinstance(batch, RecordBatch)
                found += zip(batch.ids(), batch.messages.bodies(), strict=True)
    return found


async def post(addresses: BoundAddresses, path: str) -> None:
    """Send a POST; its answer does not matter."""
    async with httpx.AsyncClient(base_url=f"http://{addresses.http_address}", timeout=PATIENCE_S) as client:
        await client.post(path)


async def no_answer(client: RawClient) -> None:
    """Check that a client has no answer yet to what it has published: a follower that may lead lacks it."""
    with trio.move_on_after(0.2):
        await client.frame()
        pytest.fail("there is an answer before each follower that may lead has the message")
