"""Servers of other projects: NATS JetStream, Redis, RabbitMQ and etcd.

They are replicated for `cluster.py`, and alone for `peers.py` and `clients.py`. Each of them runs on free ports of the
loopback interface, with a folder for each member on the disk of the other contenders. `bench/peers`, a Go program,
publishes to them and to this broker, and consumes.
"""

import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
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
RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""Debian's. The program on PATH starts this one as another user, with the settings of the system."""
START_S = 180.0
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
    """What is compared with us.

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
def programs() -> Path:
    """Return the folder of the Go program and nats-server. Builds them the first time. Raises PeerUnavailable."""
    return go_module(MODULE, "peers", ".", NATS_SERVER)


def run_load(command: str, servers: Servers, **flags: object) -> dict[str, float]:
    """Publish or consume with the Go program; return its figures.

    Raises:
        PeerUnavailable: It cannot be built here.
        RuntimeError: It failed.
    """
    return run_program(programs() / "peers", command, ",".join(servers.addresses), flags)


def nats_server() -> Path:
    """Return the program, built from Go modules. Raises PeerUnavailable."""
    return programs() / "nats-server"


@contextmanager
def nats(
    folder: Path, members: int = MEMBERS, jetstream: Mapping[str, str] = SYNC_ALWAYS
) -> Iterator[Servers]:
    """Run a server with JetStream, or a cluster of them."""
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
            children.append(stack.enter_context(closing(Child([nats_server(), "--config", config]))))
        yield Servers([f"127.0.0.1:{port}" for port in clients], [child.process.pid for child in children])


def redis_server() -> Path:
    """Return the program. Raises PeerUnavailable."""
    return installed_program("redis-server")


@contextmanager
def redis(folder: Path, copies: int = 2, fsync: str = "always") -> Iterator[Servers]:
    """Run a server that appends to a file, and its replicas."""
    ports = free_ports(copies)
    with ExitStack() as stack:
        children = []
        for number, port in enumerate(ports):
            data = folder / f"redis-{number}"
            data.mkdir()
            command = [
                *(redis_server(), "--bind", "127.0.0.1", "--port", str(port), "--dir", data, "--save", ""),
                *("--appendonly", "yes", "--appendfsync", fsync, "--repl-diskless-sync-delay", "0"),
                *(("--replicaof", "127.0.0.1", str(ports[0])) if number else ()),
            ]
            children.append(stack.enter_context(closing(Child(command))))
        for port, child in zip(ports, children, strict=True):
            _await_port(port, child)
        yield Servers([f"127.0.0.1:{port}" for port in ports], [child.process.pid for child in children])


def rabbitmq_server() -> Path:
    """Return the program. Raises PeerUnavailable."""
    if not RABBITMQ.exists():
        raise PeerUnavailable("rabbitmq-server is not installed; as root: make peers")
    return RABBITMQ


@contextmanager
def rabbitmq(folder: Path, streams: bool = False) -> Iterator[Servers]:
    """Run a server with the plugin for streams.

    Args:
        folder: For all its files.
        streams: Return the address of the protocol of streams before that of AMQP 0-9-1.
    """
    epmd, node, amqp, stream = free_ports(4)
    (folder / "plugins").write_text("[rabbitmq_stream].\n")
    (folder / "rabbitmq.conf").write_text(
        f"listeners.tcp.1 = 127.0.0.1:{amqp}\n"
        f"stream.listeners.tcp.1 = 127.0.0.1:{stream}\n"
        f"stream.advertised_host = 127.0.0.1\n"
        f"stream.advertised_port = {stream}\n"
    )
    environment = {
        "HOME": str(folder),  # Erlang's cookie
        "ERL_CRASH_DUMP": str(folder / "crash"),
        "ERL_EPMD_PORT": str(epmd),
        "RABBITMQ_CONF_ENV_FILE": str(folder / "no-environment"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_DIST_PORT": str(node),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_NODENAME": f"bench{node}@localhost",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RUNNING_UNDER_SYSTEMD": "true",  # the process becomes Erlang's, and is not the parent of it
    }
    with (
        closing(Child(["epmd", "-port", str(epmd), "-address", "127.0.0.1"])),
        closing(Child([rabbitmq_server()], environment)) as child,
    ):
        for port in (amqp, stream):
            _await_port(port, child)
        ports = (stream, amqp) if streams else (amqp,)
        yield Servers([f"127.0.0.1:{port}" for port in ports], [child.process.pid])


def _await_port(port: int, child: Child) -> None:
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        if child.process.poll() is not None:
            child.fail(f"ended with exit code {child.process.returncode}")
        time.sleep(0.05)
    child.fail(f"port {port} does not accept connections after {START_S:g} s")


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
        nats,
        nats_server,
        "3 servers, a stream with 3 replicas in files, sync_interval: always; 2 have synced",
    ),
    Peer(
        "Redis",
        "redis",
        redis,
        redis_server,
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
    "nats": (nats_server, partial(nats, members=1, jetstream={})),
    "redis": (redis_server, partial(redis, copies=1)),
}
"""One server of each: what checks that it is there, which raises PeerUnavailable, and what starts it in a folder."""


def version(command: str) -> str:
    """Return the version of an available server.

    Args:
        command: The name of the server for the Go program.
    """
    if command == "rabbit":
        (folder,) = RABBITMQ.parents[1].glob("lib/rabbitmq_server-*")
        return folder.name.partition("-")[2]
    program = {"nats": nats_server, "redis": redis_server}[command]()
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return next(iter(re.findall(r"\d+\.\d+\.\d+", told)), told.strip())


def available(peers: Sequence[Peer] = PEERS) -> list[Peer]:
    """Return the peers that this machine can run. Says why others are skipped."""
    found = []
    for peer in peers:
        try:
            peer.check()
            programs()
        except PeerUnavailable as reason:
            print(f"{peer.name} is skipped: {reason}")
        else:
            found.append(peer)
    return found
