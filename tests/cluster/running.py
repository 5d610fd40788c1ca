"""Members of a cluster in the test's trio run."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import trio

from broker.support import PATIENCE_S
from trio_nsq.broker import BoundAddresses, BrokerOptions
from trio_nsq.cluster.member import serve_member
from trio_nsq.cluster.options import ClusterOptions

NAME = "prod"


@dataclass
class RunningMember:
    """A member that runs; `bound` has its addresses."""

    folder: Path
    bound: BoundAddresses
    scope: trio.CancelScope
    ended: trio.Event
    client: httpx.AsyncClient = field(repr=False)

    async def stop(self) -> None:
        """End it gracefully. Then another one may have its addresses and its folder."""
        self.scope.cancel()
        with trio.fail_after(PATIENCE_S):
            await self.ended.wait()

    async def about(self) -> dict[str, Any]:
        """Return what it says about itself."""
        answer = await self.client.get("/cluster/member")
        assert answer.status_code == 200, answer.text
        about: dict[str, Any] = answer.json()
        return about

    async def status(self) -> dict[str, Any]:
        """Return what the leader says, whichever member this is."""
        answer = await self.client.get("/cluster")
        assert answer.status_code == 200, answer.text
        status: dict[str, Any] = answer.json()
        return status

    async def until(self, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until it says something about itself."""
        with trio.fail_after(PATIENCE_S):
            while not what(about := await self.about()):
                await trio.sleep(0.02)
        return about

    async def leads(self) -> dict[str, Any]:
        """Wait until it leads."""
        return await self.until(lambda about: bool(about["role"] == "leader"))

    async def in_sync(self, members: int) -> None:
        """Wait until the leader, which this one reaches, has so many members in sync."""
        with trio.fail_after(PATIENCE_S):
            while True:
                found = (await self.status())["members"]
                if (
                    sum(each["in_sync"] and each["state"] in ("leading", "in sync") for each in found)
                    == members
                ):
                    return
                await trio.sleep(0.02)

    async def publish(self, topic: str, body: bytes) -> httpx.Response:
        """Publish over HTTP."""
        return await self.client.post("/pub", params={"topic": topic}, content=body)

    async def bodies(self, topic: str) -> list[str]:
        """Return the bodies of all messages in a topic's log."""
        answer = await self.client.get("/topic/read", params={"topic": topic, "from": "0", "count": "10000"})
        assert answer.status_code == 200, answer.text
        messages = [json.loads(line) for line in answer.text.splitlines()]
        return [each["body"] for each in messages if "body" in each]


class Members:
    """Starts members of one cluster, each in a folder of its own.

    Args:
        coordinator: The URL of the coordinator.
        root: Has their data folders.
    """

    def __init__(self, nursery: trio.Nursery, root: Path, coordinator: str, cluster: str = NAME) -> None:
        self._nursery = nursery
        self._root = root
        self._coordinator = coordinator
        self._cluster = cluster
        self._clients: list[httpx.AsyncClient] = []

    async def start(
        self,
        name: str,
        *,
        coordinator: str | None = None,
        member: dict[str, Any] | None = None,
        **options: Any,
    ) -> RunningMember:
        """Start a member in the folder of a name."""
        folder = self._root / name
        addresses = dict.fromkeys(("tcp_address", "http_address", "https_address"), "127.0.0.1:0")
        settings = BrokerOptions(data_path=folder, broadcast_address="127.0.0.1", **(addresses | options))
        about = ClusterOptions(
            self._cluster,
            coordinator or self._coordinator,
            **({"cluster_auth_secret_file": self._secret()} if "auth_file" in options else {})
            | (member or {}),
        )
        scope, ended, bound = await self._nursery.start(_serve, settings, about)
        # A new connection for each request: a follower passes all of a connection on.
        client = httpx.AsyncClient(
            base_url=f"http://{bound.http_address}",
            timeout=PATIENCE_S,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._clients.append(client)
        return RunningMember(folder, bound, scope, ended, client)

    def _secret(self) -> Path:
        """Return a file with a token that the members do not know."""
        path = self._root / "secret"
        path.write_text("secret\n")
        return path

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


async def _serve(options: BrokerOptions, cluster: ClusterOptions, *, task_status: Any) -> None:
    class Started:
        def started(self, bound: BoundAddresses) -> None:
            task_status.started((scope, ended, bound))

    ended = trio.Event()
    with trio.CancelScope() as scope:
        status: Any = Started()
        try:
            await serve_member(options, cluster=cluster, task_status=status)
        finally:
            ended.set()


@asynccontextmanager
async def running_members(root: Path, coordinator: str, cluster: str = NAME) -> AsyncIterator[Members]:
    """Run members until the end of the block."""
    async with trio.open_nursery() as nursery:
        members = Members(nursery, root, coordinator, cluster)
        try:
            yield members
        finally:
            with trio.CancelScope(shield=True):
                await members.close()
            nursery.cancel_scope.cancel()
