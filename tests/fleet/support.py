"""A fleet for tests: brokers of ours, a real nsqd, and two discovery services where all of them are registered.

- `running_fleet` starts a fleet, with all its processes at the same time.
- `hung` stops a broker with SIGSTOP for a block, `service_hung` a discovery service; `take_down` ends one.
- `wrecked_fleet` starts one, and breaks some of its brokers.
- `subscribed` is a consumer.
- `refusing_broker` runs a broker that refuses all requests; `read_only_broker` one that refuses changes.
"""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from struct import pack, unpack
from typing import IO, Any

from access.support import ALL_ROLES, AuthFile, everything
from cli.support import Cli
from interop.peers import Broker, nsqd, nsqlookupd, qcli_lookupd, qcli_serve

DEADLINE_S = 60.0
"""Far above the time of any step: only a hanging process reaches it."""

SECRET = "operator-secret"
"""The secret that a `refusing_broker` accepts."""


@dataclass(frozen=True)
class Fleet:
    """Running brokers and discovery services.

    Attributes:
        ours: The brokers that `qcli serve` runs.
        nsqd: The real nsqd.
        lookupds: `qcli lookupd`, then the real nsqlookupd.
    """

    ours: tuple[Broker, ...]
    nsqd: Broker
    lookupds: tuple[Broker, ...]

    @property
    def brokers(self) -> tuple[Broker, ...]:
        """All brokers: ours, then nsqd."""
        return *self.ours, self.nsqd

    @property
    def http_addresses(self) -> list[str]:
        """The HTTP addresses of all brokers."""
        return [broker.http_address for broker in self.brokers]

    @property
    def lookupd_addresses(self) -> list[str]:
        """The HTTP addresses of the discovery services."""
        return [lookupd.http_address for lookupd in self.lookupds]

    @property
    def cli(self) -> Cli:
        """Runs commands that have the addresses of all brokers, and no discovery service."""
        return cli_of(*self.brokers)

    @property
    def discovering(self) -> Cli:
        """Runs commands that have the addresses of the discovery services only."""
        return Cli("", "", {"QCLI_LOOKUPD_HTTP_ADDRESS": ",".join(self.lookupd_addresses)})

    def create(self, topic: str, *channels: str) -> None:
        """Create a topic and its channels on all brokers, and wait until all services know that."""
        for broker in self.brokers:
            broker.create(topic, *channels)
        self.await_registered(topic, *channels)

    def await_registered(self, topic: str, *channels: str, count: int | None = None) -> None:
        """Wait until each service knows the topic's channels, and `count` brokers of it (default: all)."""
        wanted = len(self.brokers) if count is None else count
        for lookupd in self.lookupds:
            wait_until(
                partial(_knows, lookupd, topic, channels, wanted),
                f"{lookupd.http_address} knows {wanted} brokers of {topic}",
            )


def cli_of(*brokers: Broker) -> Cli:
    """Return what runs commands with the addresses of these brokers."""
    return Cli(
        ",".join(broker.tcp_address for broker in brokers),
        ",".join(broker.http_address for broker in brokers),
    )


def lookupd_flags(lookupds: Sequence[Broker]) -> list[str]:
    """Return the flags of a broker that registers with these services."""
    return [f"--lookupd-tcp-address={lookupd.tcp_address}" for lookupd in lookupds]


@contextmanager
def running_fleet(
    folder: Path, *flags: str, ours: int = 3, nsqd_flags: Sequence[str] = ()
) -> Iterator[Fleet]:
    """Run a fleet on free loopback ports until the block exits. Its data is in `folder`.

    `flags` are further flags of our brokers. The block may end processes itself.
    """
    with together([qcli_lookupd, nsqlookupd]) as lookupds:
        register = lookupd_flags(lookupds)
        starts: list[Callable[[], AbstractContextManager[Broker]]] = [
            partial(qcli_serve, folder / f"broker{number}", f"--node-id={number}", *register, *flags)
            for number in range(1, ours + 1)
        ]
        starts.append(partial(nsqd, folder / "nsqd", "--node-id=1000", *register, *nsqd_flags))
        with together(starts) as brokers:
            for broker in brokers:
                await_peers(broker, lookupds)
            yield Fleet(tuple(brokers[:-1]), brokers[-1], tuple(lookupds))


@dataclass(frozen=True)
class Wreck:
    """A fleet in which some servers do not work; the others are `well` and `nsqd`.

    Attributes:
        silent: A broker that is hung.
        down: A broker that has ended.
        refusing: A broker that requires a secret.
        lookupds: Discovery services; all brokers but `down` are registered there.
    """

    well: Broker
    nsqd: Broker
    silent: Broker
    down: Broker
    refusing: Broker
    lookupds: tuple[Broker, ...]

    @property
    def failing(self) -> tuple[Broker, ...]:
        """The brokers that do not work."""
        return self.silent, self.down, self.refusing

    @property
    def cli(self) -> Cli:
        """Runs commands that have the addresses of all brokers."""
        return cli_of(self.well, self.nsqd, *self.failing)

    @property
    def discovering(self) -> Cli:
        """Runs commands that have the addresses of the discovery services, and those of all brokers over TCP."""
        lookupds = ",".join(lookupd.http_address for lookupd in self.lookupds)
        return Cli(self.cli.tcp_address, "", {"QCLI_LOOKUPD_HTTP_ADDRESS": lookupds})


@contextmanager
def wrecked_fleet(folder: Path, prepare: Callable[[Sequence[Broker]], None]) -> Iterator[Wreck]:
    """Run a fleet, and break three of its brokers until the block exits.

    Args:
        prepare: Called with all brokers while all of them work.
    """
    with running_fleet(folder) as fleet, refusing_broker(folder / "refusing", fleet.lookupds) as refusing:
        prepare([*fleet.brokers, refusing])
        well, silent, down = fleet.ours
        take_down(down)
        with hung(silent):
            for lookupd in fleet.lookupds:
                await_nodes(lookupd, 4)
            yield Wreck(well, fleet.nsqd, silent, down, refusing, fleet.lookupds)


@contextmanager
def together(starts: Sequence[Callable[[], AbstractContextManager[Broker]]]) -> Iterator[list[Broker]]:
    """Enter context managers at the same time, and leave them together at the end of the block."""
    with ExitStack() as stack, ThreadPoolExecutor(len(starts)) as threads:
        entering = [threads.submit(_entered, start) for start in starts]
        failures: list[BaseException] = []
        brokers: list[Broker] = []
        for each in entering:
            if error := each.exception():
                failures.append(error)
                continue
            manager, broker = each.result()
            stack.push(manager)
            brokers.append(broker)
        if failures:
            raise failures[0]
        yield brokers


def _entered(
    start: Callable[[], AbstractContextManager[Broker]],
) -> tuple[AbstractContextManager[Broker], Broker]:
    manager = start()
    return manager, manager.__enter__()


def await_peers(broker: Broker, lookupds: Sequence[Broker]) -> None:
    """Wait until the broker is registered at these services: its log says so."""
    deadline = time.monotonic() + DEADLINE_S

    def missing() -> set[str]:
        log = broker.log()
        return {
            lookupd.tcp_address
            for lookupd in lookupds
            if not any(f"LOOKUPD({lookupd.tcp_address}): peer info" in line for line in log)
        }

    while missing():
        if broker.child.stderr.next(deadline) is None:
            broker.child.fail("ended before it was registered")


@contextmanager
def hung(*servers: Broker) -> Iterator[None]:
    """Stop servers with SIGSTOP for a block: they accept connections and never answer."""
    with ExitStack() as stack:
        for server in servers:
            server.process.send_signal(signal.SIGSTOP)
            stack.callback(server.process.send_signal, signal.SIGCONT)
        for server in servers:
            _await_stopped(server.process)
        yield


@contextmanager
def service_hung(fleet: Fleet, lookupd: Broker) -> Iterator[None]:
    """Stop a discovery service as `hung` does. At the end, wait until all brokers are registered there again.

    nsqd disconnects from a service that does not answer its ping. It connects again with the next one, 15 s later.
    """
    with hung(lookupd):
        yield
    await_nodes(lookupd, len(fleet.brokers))


def _await_stopped(process: subprocess.Popen[bytes]) -> None:
    """Wait until SIGSTOP took effect, which this process is told as the parent."""
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def take_down(server: Broker) -> None:
    """End a server at once. Its address refuses connections afterwards."""
    server.process.kill()
    server.process.wait(DEADLINE_S)


@contextmanager
def refusing_broker(folder: Path, lookupds: Sequence[Broker] = (), *flags: str) -> Iterator[Broker]:
    """Run a broker of ours that refuses all requests but `/ping` without `SECRET`; the yielded one sends it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = AuthFile(folder / "auth.toml")
    file.add_token("operator", everything(*ALL_ROLES), secret=SECRET)
    path = file.write()
    with qcli_serve(folder / "data", f"--auth-file={path}", *lookupd_flags(lookupds), *flags) as broker:
        await_peers(broker, lookupds)
        yield replace(broker, secret=SECRET)


@contextmanager
def read_only_broker(folder: Path, lookupds: Sequence[Broker] = (), *flags: str) -> Iterator[Broker]:
    """Run a broker of ours that refuses all changes over HTTP."""
    folder.mkdir(parents=True, exist_ok=True)
    with qcli_serve(folder / "data", "--http-read-only", *lookupd_flags(lookupds), *flags) as broker:
        await_peers(broker, lookupds)
        yield broker


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Ask a server until the condition is met: often at first, and then less often, so that the server can work."""
    deadline = time.monotonic() + DEADLINE_S
    pause_s = 0.005
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)


@contextmanager
def subscribed(
    broker: Broker, topic: str, channel: str, *, ready: int = 0, **identity: str | int
) -> Iterator[str]:
    """Subscribe to a channel, as the agent `tests/1`, until the block exits; yield the client's address.

    The client takes `ready` messages, finishes none, and stays connected. `identity` replaces or adds to what it sends
    in IDENTIFY.
    """
    host, _, port = broker.tcp_address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=DEADLINE_S) as sock,
        sock.makefile("rb") as frames,
    ):
        default = {"client_id": "tester", "hostname": "here", "user_agent": "tests/1"}
        sent = json.dumps(default | identity).encode()
        sock.sendall(b"  V2IDENTIFY\n" + pack(">I", len(sent)) + sent)
        assert _frame(frames) == b"OK"
        sock.sendall(f"SUB {topic} {channel}\nRDY {ready}\n".encode())
        assert _frame(frames) == b"OK"
        stopping = threading.Event()
        beating = threading.Thread(target=_beat, args=(sock, stopping))
        beating.start()
        try:
            yield "%s:%d" % sock.getsockname()[:2]
        finally:
            stopping.set()
            beating.join()


def _beat(sock: socket.socket, stopping: threading.Event) -> None:
    """Send what answers a heartbeat, so that the broker keeps the connection."""
    with suppress(OSError):  # the broker has ended
        while not stopping.wait(10):
            sock.sendall(b"NOP\n")


def _frame(frames: IO[bytes]) -> bytes:
    """Read a response, and return it without its type."""
    (size,) = unpack(">I", frames.read(4))
    return frames.read(size)[4:]


def nodes(lookupd: Broker) -> list[dict[str, Any]]:
    """Return the brokers that a service has registered, with their topics and tombstones."""
    found: list[dict[str, Any]] = json.loads(lookupd.http("GET", "/nodes"))["producers"]
    return found


def _knows(lookupd: Broker, topic: str, channels: Sequence[str], count: int) -> bool:
    try:
        known = json.loads(lookupd.http("GET", "/lookup", topic=topic))
    except RuntimeError:  # 404: no broker has registered it yet
        return count == 0
    return len(known["producers"]) == count and set(channels) <= set(known["channels"])


def await_nodes(lookupd: Broker, count: int) -> None:
    """Wait until a service has this many brokers registered."""
    wait_until(lambda: len(nodes(lookupd)) == count, f"{lookupd.http_address} has {count} brokers")
