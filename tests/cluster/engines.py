"""The engines that coordinate a cluster in the tests: etcd, an S3 server, or files; and what can happen to them."""

import random
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from cluster.ledger import Epochs
from coordination.etcd_server import Member, etcd, text
from spark.support import until
from storage.stores import Fault, Proxy, Store, proxy, versitygw
from trio_nsq.coordination.bucket import BucketCoordinator
from trio_nsq.coordination.etcd import TTL_S, EtcdCoordinator
from trio_nsq.coordination.interface import Coordinator, CoordinatorError, Observation
from trio_nsq.coordination.state import StateError, decode
from trio_nsq.storage import Patience, StorageError, storage_at
from trio_nsq.storage.lease import LEASE_S

CLUSTER = "prod"
_VALUE = text(f"/trio-nsq/{CLUSTER}/state")
_PATIENCE = Patience(attempt_s=5.0, deadline_s=10.0)


class Engine(ABC):
    """An engine.

    Attributes:
        kind: `etcd`, `bucket` or `static`.
        addresses: Each `host:port` that members reach through a link; none: members need no engine.
        watch_s: How often it is asked who leads.
        lease_s: The time of the leader's lease.
    """

    kind: str
    addresses: Sequence[str] = ()
    watch_s = 0.05
    lease_s = 0.0

    @abstractmethod
    def url(self, addresses: Sequence[str], others: Sequence[str]) -> str:
        """Return the option `--coordinator` of a member.

        Args:
            addresses: Where it reaches those of the engine.
            others: Where it reaches the HTTP ports of the other members.
        """

    def environment(self, addresses: Sequence[str]) -> dict[str, str]:
        """Return the variables that such a member needs."""
        return {}

    @abstractmethod
    def observe(self) -> Observation:
        """Return what the engine says. Raises CoordinatorError, StateError or StorageError."""

    async def watch(self, epochs: Epochs) -> None:
        """Record who leads, until cancelled."""
        while True:
            asked_s = time.monotonic()
            with suppress(CoordinatorError, StateError, StorageError):
                found = await trio.to_thread.run_sync(self.observe, abandon_on_cancel=True)
                if (state := found.state) is not None:
                    epochs.see(state.epoch, state.leader, state.in_sync, asked_s)
            await trio.sleep(self.watch_s)


class Etcd(Engine):
    """etcd with one member or several.

    Attributes:
        servers: Its members.
    """

    kind = "etcd"
    lease_s = TTL_S

    def __init__(self, servers: Sequence[Member], data: Path) -> None:
        self.servers = servers
        self.addresses = ["%s:%d" % server.address for server in servers]
        self._data, self._lost = data, data.with_name("lost")
        self._coordinator: Coordinator = EtcdCoordinator(
            [server.address for server in servers], CLUSTER, patience=_PATIENCE
        )

    def url(self, addresses: Sequence[str], others: Sequence[str]) -> str:
        return f"etcd://{','.join(addresses)}"

    def close(self) -> None:
        self._coordinator.close()

    def observe(self) -> Observation:
        return self._coordinator.read()

    def revoke_leases(self) -> None:
        """End all leases, as an administrator may."""
        self.servers[0].revoke_leases()

    def remove_keys(self) -> None:
        """Remove all keys of the cluster."""
        self.servers[0].remove(f"/trio-nsq/{CLUSTER}/")

    def value(self) -> str:
        """Return the value of the cluster, as `put_back` takes it."""
        (found,) = self.servers[0].ask("/v3/kv/range", {"key": _VALUE})["kvs"]
        return str(found["value"])

    def put_back(self, value: str) -> None:
        """Replace the value of the cluster by an earlier one, as a restored backup does."""
        self.servers[0].ask("/v3/kv/put", {"key": _VALUE, "value": value})

    def leader(self) -> Member:
        """Return the member of etcd that leads the others."""
        until(self.has_leader)
        (leader,) = [each for each in self.servers if each.leads()]
        return leader

    def has_leader(self) -> bool:
        return sum(each.leads() for each in self.servers) == 1

    def move_leader(self) -> None:
        """Let another one of its members lead the others."""
        leader = self.leader()
        other = next(each for each in self.servers if each is not leader)
        leader.ask("/v3/maintenance/transfer-leadership", {"targetID": other.status()["header"]["member_id"]})

    def kill(self) -> None:
        """Kill all its members."""
        for server in self.servers:
            server.kill()

    def restart(self) -> None:
        """Start all its members, which were killed, again."""
        for server in self.servers:
            server.start()
        until(lambda: all(server.answers() for server in self.servers))

    def lose_data(self) -> None:
        """Start etcd without its data."""
        self.kill()
        self._data.rename(self._lost)
        self.restart()

    def restore_data(self) -> None:
        """Start etcd with the data that it has lost."""
        self.kill()
        shutil.rmtree(self._data)
        self._lost.rename(self._data)
        self.restart()


@contextmanager
def etcd_engine(folder: Path, members: int = 1) -> Iterator[Etcd]:
    """Run etcd."""
    with etcd(folder / "data", members) as servers:
        engine = Etcd(servers, folder / "data")
        try:
            yield engine
        finally:
            engine.close()


class Bucket(Engine):
    """An S3 server behind a proxy that injects faults."""

    kind = "bucket"
    watch_s = 0.2
    lease_s = LEASE_S

    def __init__(self, store: Store, between: Proxy) -> None:
        self._store = store
        self._between = between
        self._place = store.new_place()
        self.addresses = [between.endpoint.removeprefix("http://")]
        with store.here():
            self._coordinator: Coordinator = BucketCoordinator(
                storage_at(self._place, patience=_PATIENCE), CLUSTER
            )

    def url(self, addresses: Sequence[str], others: Sequence[str]) -> str:
        return self._place

    def environment(self, addresses: Sequence[str]) -> dict[str, str]:
        return self._store.behind(f"http://{addresses[0]}").env

    def close(self) -> None:
        self._coordinator.close()

    def observe(self) -> Observation:
        return self._coordinator.read()

    def fail(self) -> None:
        """Refuse all requests."""
        self._between.judge = lambda method, path: Fault(status=503)

    def lose_answers(self, share: float, chance: random.Random) -> None:
        """Do not answer a share of the requests that the store has done."""
        lock = threading.Lock()

        def judge(method: str, path: str) -> Fault | None:
            with lock:
                return Fault(is_sent=True) if chance.random() < share else None

        self._between.judge = judge

    def mend(self) -> None:
        self._between.judge = lambda method, path: None


@contextmanager
def bucket_engine(folder: Path) -> Iterator[Bucket]:
    """Run an S3 server."""
    with versitygw(folder) as store, proxy(store) as between:
        engine = Bucket(store, between)
        try:
            yield engine
        finally:
            engine.close()


class Static(Engine):
    """Files in the data folders. People decide who leads."""

    kind = "static"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def url(self, addresses: Sequence[str], others: Sequence[str]) -> str:
        return f"static:{','.join(others)}"

    def observe(self) -> Observation:
        """Return the newest value of all data folders."""
        states = []
        for file in self._folder.glob("*/cluster-state.json"):
            with suppress(FileNotFoundError):
                states.append(decode(file.read_bytes()))
        return Observation(max(states, key=lambda state: state.epoch, default=None), is_held=True)
