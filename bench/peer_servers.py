"""Servers of other projects: NATS JetStream, Redis and etcd, replicated for `cluster.py`, alone for `clients.py`.

Each of them runs on free ports of the loopback interface, with a folder for each member on the disk of the other
contenders. `bench/peers`, a Go program, publishes to them and to this broker.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from bench.loads import run_program

from interop.build import PeerUnavailable, etcd_of, go_module, installed_program
from interop.peers import Child, free_ports

MODULE = Path(__file__).parent / "peers"
NATS_SERVER = "github.com/nats-io/nats-server/v2"
ETCD_VERSION = "3.7"
SYNC_ALWAYS = {"sync_interval": "always"}
MEMBERS = 3
"""Of NATS and etcd: a majority of two copies has the message when it is acknowledged, as with our two members."""


@dataclass(frozen=True)
class Servers:
    """Running servers.

    Attributes:
        addresses: Where they serve, as the Go program wants it.
        pids: The processes.
    """

    addresses: Sequence[str]
    pids: Sequence[int]


@dataclass(frozen=True)
class Peer:
    """What is compared with our cluster.

    Attributes:
        name: The name in the tables.
        command: Of the Go program.
        start: Starts the servers, with their folders below a folder.
        check: Finds or builds the program. Raises PeerUnavailable.
        means: The number of copies, and what is synced before a message is acknowledged.
    """

    name: str
    command: str
    start: Callable[[Path], AbstractContextManager[Servers]]
    check: Callable[[], object]
    means: str


@cache
def _programs() -> Path:
    return go_module(MODULE, "peers", ".", NATS_SERVER)


def publish(command: str, servers: Servers, **flags: object) -> dict[str, float]:
    """Publish with the Go program; return its figures.

    Raises:
        PeerUnavailable: It cannot be built here.
        RuntimeError: It failed.
    """
    return run_program(_programs() / "peers", command, ",".join(servers.addresses), flags)


def _nats_server() -> Path:
    return _programs() / "nats-server"


@contextmanager
def _nats(
    folder: Path, members: int = MEMBERS, jetstream: Mapping[str, str] = SYNC_ALWAYS
) -> Iterator[Servers]:
    ports = free_ports(2 * members)
    clients, routes = ports[:members], ports[members:]
    with ExitStack() as stack:
        children = []
        for number in range(members):
            config = folder / f"n{number}.json"  # its configuration language includes JSON
            settings: dict[str, object] = {
                "server_name": f"n{number}",
                "listen": f"127.0.0.1:{clients[number]}",
                "jetstream": {"store_dir": str(folder / f"n{number}"), **jetstream},
            }
            if members > 1:
                settings["cluster"] = {
                    "name": "bench",
                    "listen": f"127.0.0.1:{routes[number]}",
                    "routes": [f"nats://127.0.0.1:{port}" for port in routes],
                }
            config.write_text(json.dumps(settings))
            children.append(stack.enter_context(closing(Child([_nats_server(), "--config", config]))))
        yield Servers([f"127.0.0.1:{port}" for port in clients], [child.process.pid for child in children])


def _redis_server() -> Path:
    try:
        return installed_program("redis-server")
    except PeerUnavailable:
        raise PeerUnavailable(
            "redis-server is not installed; as root: apt-get install redis-server"
        ) from None


@contextmanager
def _redis(folder: Path, copies: int = 2) -> Iterator[Servers]:
    ports = free_ports(copies)
    with ExitStack() as stack:
        children = []
        for number, port in enumerate(ports):
            data = folder / f"redis-{number}"
            data.mkdir()
            command = [
                *(_redis_server(), "--bind", "127.0.0.1", "--port", str(port), "--dir", data, "--save", ""),
                *("--appendonly", "yes", "--appendfsync", "always", "--repl-diskless-sync-delay", "0"),
                *(("--replicaof", "127.0.0.1", str(ports[0])) if number else ()),
            ]
            children.append(stack.enter_context(closing(Child(command))))
        yield Servers([f"127.0.0.1:{ports[0]}"], [child.process.pid for child in children])


def _etcd_server() -> Path:
    return etcd_of(ETCD_VERSION)


@contextmanager
def _etcd(folder: Path) -> Iterator[Servers]:
    from coordination.etcd_server import etcd  # imports the helpers of all tests of Spark

    with etcd(folder, MEMBERS, program=_etcd_server()) as members:
        yield Servers(
            [f"127.0.0.1:{member.port}" for member in members],
            [member.child.process.pid for member in members if member.child is not None],
        )


PEERS = [
    Peer(
        "NATS JetStream",
        "nats",
        _nats,
        _nats_server,
        "3 servers, a stream with 3 replicas in files, sync_interval: always; 2 have synced",
    ),
    Peer(
        "Redis",
        "redis",
        _redis,
        _redis_server,
        "primary and replica, appendfsync always; XADD and WAIT 1 0: both have the entry, the primary has synced",
    ),
    Peer(
        f"etcd {ETCD_VERSION}",
        "etcd",
        _etcd,
        _etcd_server,
        "3 members, a put of a new key; 2 have synced",
    ),
]


# NATS with its own interval of syncs: the clients are compared.
ALONE = {
    "nats": (_nats_server, partial(_nats, members=1, jetstream={})),
    "redis": (_redis_server, partial(_redis, copies=1)),
}
"""One server of each: what checks that it is there, which raises PeerUnavailable, and what starts it in a folder."""


def available() -> list[Peer]:
    """Return the peers that this machine can run. Says why others are skipped."""
    found = []
    for peer in PEERS:
        try:
            _programs()
            peer.check()
        except PeerUnavailable as reason:
            print(f"{peer.name} is skipped: {reason}")
        else:
            found.append(peer)
    return found
