"""Test of what consumers find at discovery services when the leader of a cluster is gone, and when it leads again."""

import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from broker.support import PATIENCE_S
from cluster.engines import etcd_engine
from cluster.links import Gateway, Link, owner_of
from cluster.members import CLIENTS as OWN_CLIENTS
from cluster.members import Cluster, Member
from faults.scenario import http
from interop.peers import CLIENTS, Broker, Child, nsqlookupd, qcli_lookupd
from lookup.support import until

pytestmark = pytest.mark.interop

TOPIC = "t"
BODIES = {f"message {number}".encode() for number in range(10)}


class Discovery:
    """A cluster, and the discovery services at which its members register.

    Attributes:
        services: NSQ's own, and ours.
    """

    def __init__(self, services: Sequence[Broker], cluster: Cluster) -> None:
        self.services = services
        self.cluster = cluster
        self._generation = 0

    def link_of(self, port: int, to_port: int) -> Link:
        """Return the link of a new connection to a service."""
        pids = {each.pid: each for each in self.cluster.members if each.pid is not None}
        owner = owner_of(port, to_port, pids)
        return self._link(pids[owner] if owner is not None else OWN_CLIENTS)

    def _link(self, member: Member | str) -> Link:
        return self.cluster.link(member, f"lookupd {self._generation}")

    def hold_connections(self, member: Member) -> None:
        """Let the services not notice what happens to a member's connections, as if its machine had no power.

        Later connections are not affected.
        """
        self._link(member).stall()
        self._generation += 1

    async def until_found(self, member: Member) -> None:
        """Wait until consumers of the topic find this member, and no other."""

        async def is_found() -> bool:
            found = [await get(service, "/lookup", topic=TOPIC) for service in self.services]
            ports = [{each["tcp_port"] for each in answer.get("producers") or ()} for answer in found]
            return ports == [{port_of(member)}] * len(self.services)

        with self.cluster.patience(f"consumers do not find only {member.name}"):
            await until(is_found)


async def get(service: Broker, path: str, **query: str) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        response = await client.get(f"http://{service.http_address}{path}", params=query)
    found: dict[str, Any] = response.json() if response.status_code == 200 else {}
    return found


def port_of(member: Member) -> int:
    return member.gateways[0].port


async def tombstones(service: Broker) -> dict[int, bool]:
    """Return the ports of all brokers that have the topic, and whether they have a tombstone."""
    registered = (await get(service, "/debug"))[f"topic:{TOPIC}:"]
    return {each["tcp_port"]: each["tombstoned"] for each in registered}


@asynccontextmanager
async def discovery(folder: Path) -> AsyncIterator[Discovery]:
    """Run a cluster of two members, which have a topic with messages, and discovery services."""
    with nsqlookupd() as theirs, qcli_lookupd() as ours, etcd_engine(folder / "etcd") as engine:
        async with trio.open_nursery() as nursery:
            gateways = [
                Gateway(each.tcp_address, lambda port, to: there.link_of(port, to)) for each in (theirs, ours)
            ]
            for gateway in gateways:
                await nursery.start(gateway.serve)
            flags = [f"--lookupd-tcp-address={gateway.address}" for gateway in gateways]
            there = Discovery([theirs, ours], Cluster(engine, *flags))
            async with there.cluster.serving([folder / "m0", folder / "m1"]):
                leader = await there.cluster.wait_in_sync()
                await leader.ask("POST", "/topic/create", topic=TOPIC)
                for channel in ("go-nsq", "pynsq"):
                    await leader.ask("POST", "/channel/create", topic=TOPIC, channel=channel)
                for body in sorted(BODIES):
                    status, _ = await http(leader.http_address, "POST", "/pub", body, topic=TOPIC)
                    assert status == 200
                yield there
            nursery.cancel_scope.cancel()


def by_go_nsq(lookupd: str) -> set[bytes]:
    """Consume all messages with go-nsq."""
    go_nsq = next(client for client in CLIENTS if client.name == "go-nsq")
    asking = [f"--lookupd={lookupd}"]
    with go_nsq.subscribe("", TOPIC, "go-nsq", len(BODIES), connection=asking) as subscriber:
        return {delivery.body for delivery in subscriber.rest()}


def by_pynsq(lookupd: str) -> set[bytes]:
    """Consume all messages with pynsq."""
    with closing(Child([sys.executable, "-m", "cluster.pynsq_tail", lookupd, TOPIC, "pynsq", "1"])) as child:
        found: set[bytes] = set()
        while found < BODIES and (line := child.stdout.next(time.monotonic() + PATIENCE_S)) is not None:
            found.add(line.encode())
        return found


async def test_consumers_find_only_the_new_leader(tmp_path: Path) -> None:
    async with discovery(tmp_path) as there:
        cluster = there.cluster
        theirs, ours = there.services
        old = await cluster.wait_in_sync()
        await there.until_found(old)

        # No service notices that it is gone, and what connects to it waits.
        there.hold_connections(old)
        old.signal(signal.SIGSTOP)
        new = await cluster.wait_for_leader(old)
        await there.until_found(new)
        assert await tombstones(theirs) == {port_of(old): True, port_of(new): False}
        assert await tombstones(ours) == {port_of(old): False, port_of(new): False}
        for service, consume in ((theirs, by_go_nsq), (ours, by_pynsq)):
            cluster.link(OWN_CLIENTS, old).stall()
            assert await trio.to_thread.run_sync(consume, service.http_address) == BODIES
            assert cluster.link(OWN_CLIENTS, old).connections == 0

        # It leads again. Its former registrations are still there, and no tombstone hides the new ones.
        cluster.link(OWN_CLIENTS, old).mend()
        old.signal(signal.SIGCONT)
        await cluster.wait_in_sync(old, new)
        await there.until_found(new)
        await new.ask("POST", "/cluster/switch", to=old.folder_id)
        assert await cluster.wait_for_leader(new) is old
        await there.until_found(old)
