"""A machine with an empty disk takes over from the archive alone, when the only member in sync is lost."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import trio

from broker.support import PATIENCE_S
from cluster.members import Member as Process
from cluster.members import NoAnswer
from coordination.conftest import cluster, etcd_member  # noqa: F401 - fixtures
from coordination.etcd_server import Member as Etcd


class Standbys:
    """Processes of members with one archive; each has its own folder, which is its machine's disk."""

    def __init__(self, folder: Path, etcd: Etcd, cluster: str, *flags: str) -> None:  # noqa: F811 - the name
        archive = folder / "archive"
        self.etcd = etcd
        self._folder = folder
        self._flags = [
            f"--cluster={cluster}",
            f"--coordinator=etcd://127.0.0.1:{etcd.port}",
            f"--archive={archive}",
            f"--restore-from={archive}",
            "--restore-after=0s",
            *flags,
        ]
        self._running: list[Process] = []

    def start(self, name: str) -> Process:
        process = Process(name, self._folder / name, lambda: self._flags, {})
        process.start()
        self._running.append(process)
        return process

    def lose(self, process: Process) -> None:
        """End a process, and make known that it is gone; its disk is still there."""
        process.kill()
        process.end()
        self.etcd.revoke_leases()

    def close(self) -> None:
        for process in self._running:
            process.end()


@asynccontextmanager
async def standbys(folder: Path, etcd: Etcd, cluster: str, *flags: str) -> AsyncIterator[Standbys]:  # noqa: F811
    found = Standbys(folder, etcd, cluster, *flags)
    try:
        yield found
    finally:
        found.close()


async def leads(process: Process) -> None:
    """Wait until a process leads, and accepts messages."""
    with trio.fail_after(PATIENCE_S):
        while True:
            try:
                if (await process.about())["role"] == "leader" and b"OK" in await process.ask("GET", "/ping"):
                    return
            except NoAnswer:
                pass
            process.check()
            await trio.sleep(0.05)


async def publish(process: Process, body: str) -> bool:
    async with httpx.AsyncClient(base_url=f"http://{process.http_address}", timeout=PATIENCE_S) as client:
        return (await client.post("/pub", params={"topic": "t"}, content=body.encode())).text == "OK"


async def bodies(process: Process) -> list[str]:
    async with httpx.AsyncClient(base_url=f"http://{process.http_address}", timeout=PATIENCE_S) as client:
        lines = (await client.get("/topic/read?topic=t&from=0&count=10000")).text.splitlines()
    return [each["body"] for each in map(json.loads, lines) if "body" in each]


async def may_be_replaced(process: Process) -> None:
    """Wait until the leader has recorded that a member may be restored."""
    with trio.fail_after(PATIENCE_S):
        while not (await process.about())["state"].get("archive"):
            await trio.sleep(0.05)


async def test_an_empty_disk_takes_over_and_nothing_acknowledged_is_lost(
    tmp_path: Path,
    etcd_member: Etcd,  # noqa: F811
    cluster: str,  # noqa: F811
) -> None:
    async with standbys(tmp_path, etcd_member, cluster, "--archive-before-ok") as members:
        first = members.start("first")
        await leads(first)
        acknowledged: list[str] = []
        for number in range(10):
            assert await publish(first, str(number))
            acknowledged.append(str(number))
        await may_be_replaced(first)

        async def go_on() -> None:
            number = 10
            while True:
                try:
                    if await publish(first, str(number)):
                        acknowledged.append(str(number))
                except httpx.HTTPError:
                    return
                number += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(go_on)
            with trio.fail_after(PATIENCE_S):
                while len(acknowledged) < 30:
                    await trio.sleep(0.01)
            members.lose(first)
            nursery.cancel_scope.cancel()
        second = members.start("second")
        await leads(second)
        found = await bodies(second)
        assert found[: len(acknowledged)] == acknowledged
        assert len(found) <= len(acknowledged) + 1
        assert await publish(second, "after")
        # The lost leader comes back, with its disk: it follows.
        first.start()
        with trio.fail_after(PATIENCE_S):
            while len((await second.about())["state"]["in_sync"]) < 2:
                await trio.sleep(0.1)
        assert await bodies(first) == [*found, "after"]
