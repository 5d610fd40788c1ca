"""Processes of a node are killed under publishers on the shared port: nothing that was acknowledged is lost.

Two kills by default; `NODE_KILLS` kills in `make soak`.
"""

import os
import random
from itertools import count
from pathlib import Path

import trio

from broker.support import RawClient, connected, pub
from node.support import PATIENCE_S, Node, running_node, wait_until

KILLS = int(os.environ.get("NODE_KILLS", "2"))
PUBLISHERS = 4
BETWEEN_KILLS = 100
"""So many publishes are acknowledged between two kills."""


class Load:
    """Publishers and consumers that connect again when their connection ends, and what they know.

    Attributes:
        acknowledged: Bodies whose publish was answered with OK.
        consumed: Bodies that a consumer has received.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.acknowledged: set[bytes] = set()
        self.consumed: set[bytes] = set()
        self.publishing = True
        self._numbers = count()

    async def publish(self) -> None:
        """Publish one by one until told to end."""
        while self.publishing:
            try:
                async with connected(self.node.tcp) as client:
                    while self.publishing:
                        body = b"%d" % next(self._numbers)
                        await client.send(pub("t", body))
                        if (frame := await client.frame()) is None:
                            break
                        if frame == (0, b"OK"):
                            self.acknowledged.add(body)
            except (OSError, trio.BrokenResourceError, AssertionError):
                await trio.sleep(0.01)  # the process has ended, perhaps inside a frame

    async def consume(self, address: str) -> None:
        """Consume `t/c` until cancelled."""
        while True:
            try:
                async with connected(address) as client:
                    await self._consume(client)
            except (OSError, trio.BrokenResourceError, AssertionError):
                await trio.sleep(0.01)

    async def _consume(self, client: RawClient) -> None:
        await client.subscribe("t", "c", 20)
        while (frame := await client.frame()) is not None:
            kind, data = frame
            if kind == 2:
                self.consumed.add(data[26:])
                await client.send(b"FIN %s\n" % data[10:26])
            elif data == b"_heartbeat_":
                await client.send(b"NOP\n")

    async def until_more_acknowledged(self) -> None:
        """Wait for more acknowledged publishes."""
        wanted = len(self.acknowledged) + BETWEEN_KILLS
        with trio.fail_after(PATIENCE_S):
            while len(self.acknowledged) < wanted:
                await trio.sleep(0.01)

    async def until_all_consumed(self) -> None:
        """Wait until consumers have received what was acknowledged."""
        with trio.fail_after(PATIENCE_S):
            while not self.acknowledged <= self.consumed:
                await trio.sleep(0.01)


async def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    chance = random.Random(1)
    with running_node(tmp_path) as node:
        assert (
            node.post("/topic/create?topic=t") == node.post("/channel/create?topic=t&channel=c") == (200, b"")
        )
        load = Load(node)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.consume, node.tcp)
            for each in node.processes:
                nursery.start_soon(load.consume, each["tcp_address"])  # as a consumer with discovery
            async with trio.open_nursery() as publishers:
                for _ in range(PUBLISHERS):
                    publishers.start_soon(load.publish)
                for number in range(KILLS):
                    await load.until_more_acknowledged()
                    index = number % 2 if KILLS < 4 else chance.randrange(2)
                    ended = node.kill(index)
                    await trio.to_thread.run_sync(node.until_restarted, index, ended)
                await load.until_more_acknowledged()
                load.publishing = False
            await load.until_all_consumed()
            nursery.cancel_scope.cancel()
        assert len(load.acknowledged) >= (KILLS + 1) * BETWEEN_KILLS


async def test_nothing_is_lost_with_the_supervisor(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        load = Load(node)
        assert (
            node.post("/topic/create?topic=t") == node.post("/channel/create?topic=t&channel=c") == (200, b"")
        )
        async with trio.open_nursery() as nursery:
            for _ in range(PUBLISHERS):
                nursery.start_soon(load.publish)
            await load.until_more_acknowledged()
            node.running.process.kill()
            load.publishing = False
            nursery.cancel_scope.cancel()
    with running_node(tmp_path) as node:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.consume, node.tcp)
            await load.until_all_consumed()
            nursery.cancel_scope.cancel()
        await trio.to_thread.run_sync(wait_until, lambda: node.channel("t", "c")["in_flight_count"] == 0)
