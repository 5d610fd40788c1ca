"""A cluster of `qcli serve --cluster` processes on loopback, with links between them, and from each to the engine."""

import itertools
import json
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import trio

from broker.support import PATIENCE_S
from cluster.clocks import Clock
from cluster.engines import CLUSTER, Engine
from cluster.links import Gateway, Link, owner_of
from cluster.network import LossyLink, Network, Place
from faults.scenario import http
from interop.peers import Child, free_ports

CLIENTS = "clients"
ENGINE = "engine"
CHECKPOINT_INTERVAL_MS = 200
_FLAGS = (
    f"--checkpoint-interval={CHECKPOINT_INTERVAL_MS}ms",
    "--max-bytes-per-file=200000",
)
_NEW_CLIENT = re.compile(r"(\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+) INFO: TCP: new client\(([^:]*):\d+\)")
_ASK_S = 2.0
_LAG_S = 3.0
"""A member in sync that does not acknowledge for this time is about to be recorded as not in sync."""
_POLL_S = 0.05
_PATIENCE_S = 2 * PATIENCE_S


class NoAnswer(Exception):
    """A member does not answer, or with an error. The text says how."""


class Member:
    """A data folder, and the process that serves it, if one runs.

    Args:
        flags: Returns further options of `qcli serve`, when it is started.
        environment: Further variables.
        place: Where it runs; None: in the same network as the tests.
        clock: Its clock; None: that of the machine.

    Attributes:
        name: `m0`, `m1`...
        tcp_address, http_address: Its own, which clients of the tests use.
        folder_id: The id of its data folder; empty: not known yet.
        folder_ids: Those that it has had.
    """

    def __init__(
        self,
        name: str,
        data_path: Path,
        flags: Callable[[], list[str]],
        environment: dict[str, str],
        place: Place | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.clock = clock
        self.data_path = data_path
        self.place = place
        self.host = "127.0.0.1" if place is None else place.host
        self._ports = free_ports(2)
        self.tcp_address, self.http_address = (f"{self.host}:{port}" for port in self._ports)
        self.gateways: list[Gateway] = []
        self.folder_id = ""
        self.folder_ids: set[str] = set()
        self.log_lines: list[str] = []
        self._flags = flags
        self._environment = environment
        self._child: Child | None = None
        self._is_ending = self._must_end_well = False

    def __str__(self) -> str:
        return self.name

    @property
    def announced_http(self) -> str:
        """Where other members reach its HTTP port."""
        return self.gateways[1].address if self.gateways else self.http_address

    @property
    def pid(self) -> int | None:
        """The process; None: none runs."""
        child = self._child
        return child.process.pid if child is not None and child.process.poll() is None else None

    @property
    def is_running(self) -> bool:
        """Whether a process runs that is not to end."""
        return self.pid is not None and not self._is_ending

    def check(self) -> None:
        """Fail if the process has ended by itself."""
        if self._child is not None and self.pid is None and not self._is_ending:
            self._child.fail(f"{self.name} ended with exit code {self._child.process.returncode}")

    def start(self) -> None:
        """Start the process. It need not answer yet."""
        assert self.pid is None
        self.end()
        tcp, web = [gateway.port for gateway in self.gateways] or self._ports
        inside = [] if self.place is None else ["ip", "netns", "exec", self.place.namespace]
        self._child = Child(
            [
                *inside,
                *(sys.executable, "-m", "qcli", "serve", f"--cluster={CLUSTER}"),
                f"--data-path={self.data_path}",
                f"--tcp-address={self.tcp_address}",
                f"--http-address={self.http_address}",
                f"--broadcast-address={self.host}",
                f"--broadcast-tcp-port={tcp}",
                f"--broadcast-http-port={web}",
                *self._flags(),
            ],
            self._environment,
        )

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self._child is not None:
            self._child.process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to the process, if it runs."""
        self.signal(signal.SIGKILL)
        self._is_ending, self._must_end_well = True, False

    def terminate(self) -> None:
        """Send SIGTERM to the process, if it runs; its exit code must be 0."""
        if self.is_running:
            self.signal(signal.SIGTERM)
            self._is_ending = self._must_end_well = True

    async def has_ended(self, patience_s: float) -> bool:
        """Wait until the process has ended, for some time: a hanging disk prevents it."""
        with trio.move_on_after(patience_s):
            while self.pid is not None:
                await trio.sleep(_POLL_S)  # another process: there is no event
        return self.pid is None

    def end(self) -> None:
        """Kill the process if it still runs, and collect what it has written."""
        child, self._child = self._child, None
        if child is None:
            return
        if self._must_end_well and child.process.poll():
            child.fail(f"{self.name}: SIGTERM ended it with exit code {child.process.returncode}")
        child.close()
        self.log_lines += child.stderr.seen
        self._is_ending = self._must_end_well = False

    def log(self) -> list[str]:
        """Return the lines that its processes have printed to stderr."""
        running = [] if self._child is None else self._child.stderr.seen
        return [*self.log_lines, *running]

    async def ask(self, method: str, path: str, **query: str) -> bytes:
        """Make an HTTP request at its own address, and return the content. Raises NoAnswer."""
        with trio.move_on_after(_ASK_S if method == "GET" else PATIENCE_S):
            try:
                status, content = await http(self.http_address, method, path, b"", **query)
            except (OSError, trio.BrokenResourceError, ValueError, IndexError) as exc:
                raise NoAnswer(f"{self.name}: {path}: {exc!r}") from exc
            if status != 200:
                raise NoAnswer(f"{self.name}: {path}: {status} {content!r}")
            return content
        raise NoAnswer(f"{self.name}: {path}: no answer in time")

    async def about(self) -> dict[str, Any]:
        """Return `/cluster/member`. Raises NoAnswer."""
        found: dict[str, Any] = json.loads(await self.ask("GET", "/cluster/member"))
        self.folder_id = found["id"]
        self.folder_ids.add(self.folder_id)
        return found


class Cluster:
    """Members, and what they can reach.

    Args:
        engine: Coordinates them.
        flags: Further options of `qcli serve`.
        network: Where members have namespaces; None: their links are proxies.
        clocks: The folder for the clocks of members; None: they have that of the machine.

    Attributes:
        members: Those that clients use.
        guests: Others.
        every: All that there were.
    """

    def __init__(
        self, engine: Engine, *flags: str, network: Network | None = None, clocks: Path | None = None
    ) -> None:
        self.engine = engine
        self.members: list[Member] = []
        self.every: list[Member] = []
        self.guests: list[Member] = []
        self._served_by: dict[str, tuple[str, Member]] = {}
        self._names = itertools.count()
        self._flags = flags
        self._links: dict[tuple[str, str], Link] = {}
        self._network = network
        self._clocks = clocks
        self._looked: dict[Member, int] = {}
        self._addresses = itertools.count()
        self._nursery: trio.Nursery

    # ------------------------------------------------------------------ members

    async def add(self, data_path: Path) -> Member:
        """Add a member with a data folder, which may be missing, and do not start it."""
        name = f"m{next(self._names)}"
        clock = None if self._clocks is None else Clock(self._clocks / f"{name}.clock")
        environment = {} if clock is None else clock.environment
        addresses: list[str] = []
        for each in self.engine.addresses:
            host = "127.0.0.1" if self._network is None else self._network.host
            gateway = Gateway(each, lambda port, to: self.link(name, ENGINE), host=host)
            await self._nursery.start(gateway.serve)
            addresses.append(gateway.address)
        environment |= self.engine.environment(addresses)

        def flags() -> list[str]:
            others = [each.announced_http for each in self.members if each.name != name]
            return [f"--coordinator={self.engine.url(addresses, others)}", *_FLAGS, *self._flags]

        place = None if self._network is None else self._network.add()
        member = Member(name, data_path, flags, environment, place, clock)
        for target in (member.tcp_address, member.http_address) if place is None else ():
            gateway = Gateway(target, self._finder(member), self._forwards_to(member))
            await self._nursery.start(gateway.serve)
            member.gateways.append(gateway)
        self.members.append(member)
        self.every.append(member)
        return member

    def _finder(self, target: Member) -> Callable[[int, int], Link]:
        def find(port: int, to_port: int) -> Link:
            known = [*self.members, *self.guests]
            pids = {each.pid: each for each in known if each.pid is not None}
            owner = owner_of(port, to_port, pids)
            return self.link(CLIENTS if owner is None else pids[owner], target)

        return find

    def _forwards_to(self, target: Member) -> Callable[[str, int], None]:
        return lambda address, number: self._note_server(address, f"{number:09}", target)

    def link(self, source: Member | str, target: Member | str) -> Link:
        """Return the link from a member, or `CLIENTS`, to a member, or `ENGINE`."""
        ends = str(source), str(target)
        if ends not in self._links:
            self._links[ends] = self._make_link(source, target)
        return self._links[ends]

    def _make_link(self, source: Member | str, target: Member | str) -> Link:
        if self._network is not None and isinstance(source, Member) and isinstance(target, Member):
            assert source.place is not None
            assert target.place is not None
            return LossyLink(source.place, target.place)
        return Link(f"from {source} to {target}")

    def links(self, one: Member, other: Member) -> tuple[Link, Link]:
        """Return the links between two members."""
        return self.link(one, other), self.link(other, one)

    def mend(self) -> None:
        """Let all links pass everything."""
        for link in self._links.values():
            link.mend()

    def new_address(self) -> str:
        """Return an IP address for one connection of a client, so that `server_of` knows it."""
        number = next(self._addresses)
        if self._network is not None:
            return f"{self._network.clients}.{128 + number // 250 % 125}.{1 + number % 250}"
        return f"127.{1 + number // 250**2}.{number // 250 % 250}.{1 + number % 250}"

    def server_of(self, member: Member, address: str) -> str:
        """Return the name of the member that serves a client, which has connected to a member from an address.

        In a network of namespaces this is known somewhat later: the leader logs its clients.
        """
        if self._network is not None:
            self._read_logs()
        return self._served_by.get(address, ("", member))[1].name

    def _read_logs(self) -> None:
        for member in self.every:
            lines = member.log()
            for line in lines[self._looked.get(member, 0) :]:
                if found := _NEW_CLIENT.search(line):
                    self._note_server(found[2], found[1], member)
            self._looked[member] = len(lines)

    def _note_server(self, address: str, order: str, member: Member) -> None:
        if order > self._served_by.get(address, ("", member))[0]:
            self._served_by[address] = order, member

    def names(self) -> dict[str, set[str]]:
        """Return the names of the members that have run on each data folder, by its id."""
        found: dict[str, set[str]] = {}
        for member in self.every:
            for folder_id in member.folder_ids:
                found.setdefault(folder_id, set()).add(member.name)
        return found

    @property
    def running(self) -> list[Member]:
        return [member for member in self.members if member.is_running]

    # ------------------------------------------------------------------ what they say

    async def leader(self) -> Member | None:
        """Return the member that says that it leads, of the highest epoch; None: none does."""
        found: dict[int, Member] = {}

        async def look(member: Member) -> None:
            with suppress(NoAnswer):
                about = await member.about()
                if about["role"] == "leader":
                    found[about["epoch"]] = member

        for member in self.members:
            member.check()
        async with trio.open_nursery() as nursery:
            for member in self.running:
                nursery.start_soon(look, member)
        return found[max(found)] if found else None

    async def wait_for_leader(self, *besides: Member) -> Member:
        """Wait until a member leads that is none of these."""
        with self.patience("no member leads"):
            while True:
                leader = await self.leader()
                if leader is not None and leader not in besides:
                    return leader
                await trio.sleep(_POLL_S)  # another process: only its answers show progress

    async def status(self, leader: Member) -> dict[str, Any]:
        """Return `/cluster`. Raises NoAnswer."""
        found: dict[str, Any] = json.loads(await leader.ask("GET", "/cluster"))
        return found

    async def stats(self, leader: Member) -> dict[str, Any]:
        """Return `/stats`. Raises NoAnswer."""
        query = {"format": "json", "include_clients": "false", "include_mem": "false"}
        found: dict[str, Any] = json.loads(await leader.ask("GET", "/stats", **query))
        return found

    async def wait_in_sync(self, *members: Member) -> Member:
        """Wait until members, or all that run, are in sync, but for what was just published; returns the leader."""
        said: object = None
        with self.patience("not in sync", lambda: said):
            while True:
                leader = await self.leader()
                with suppress(NoAnswer):
                    said = "no leader"
                    if leader is not None:
                        status = await self.status(leader)
                        said = status
                        complete = {
                            each["id"]
                            for each in status["members"]
                            if each["state"] == "leading"
                            or (each["state"] == "in sync" and each["in_sync"] and each["lag_s"] < _LAG_S)
                        }
                        for member in members or self.running:
                            await member.about()
                        if {member.folder_id for member in members or self.running} <= complete:
                            return leader
                await trio.sleep(_POLL_S)  # another process: only its answers show progress

    async def promote(self, member: Member) -> None:
        """Let a member lead, as an administrator decides if no engine does."""
        reason = ""
        with self.patience(f"{member.name} cannot be promoted", lambda: reason):
            while True:
                try:
                    await member.ask("POST", "/cluster/promote")
                    return
                except NoAnswer as exc:
                    reason = str(exc)
                    await trio.sleep(_POLL_S)  # another process: only its answers show progress

    async def wait_not_in_sync(self, member: Member) -> None:
        """Wait until a member that does not run may not lead."""
        with self.patience(f"{member.name} is still in sync"):
            while True:
                leader = await self.leader()
                with suppress(NoAnswer):
                    if leader is not None:
                        found = {each["id"]: each for each in (await self.status(leader))["members"]}
                        if not found.get(member.folder_id, {"in_sync": False})["in_sync"]:
                            return
                await trio.sleep(_POLL_S)  # another process: only its answers show progress

    @contextmanager
    def patience(self, what: str, more: Callable[[], object] = lambda: "") -> Iterator[None]:
        """Fail with the members' logs if a block takes too long."""
        with trio.move_on_after(_PATIENCE_S) as scope:
            yield
        if scope.cancelled_caught:
            raise AssertionError(f"{what} after {_PATIENCE_S} s: {more()}\n{self.said()}")

    def said(self, lines: int = 25) -> str:
        """Return the end of what each member has logged."""
        return "\n".join(
            f"--- {member.name} {member.folder_id} ({'runs' if member.is_running else 'is down'})\n"
            + "\n".join([line for line in member.log() if " GET /" not in line][-lines:])
            for member in self.members
        )

    @asynccontextmanager
    async def serving(self, data_paths: Iterable[Path], logs: Path | None = None) -> AsyncIterator[None]:
        """Run a member for each data folder, until the end of the block; their logs are in a folder then.

        Args:
            data_paths: The data folders.
            logs: The folder for the logs; None: that in which a data folder is.
        """
        async with trio.open_nursery() as self._nursery:
            for data_path in data_paths:
                await self.add(data_path)
            for member in self.members:
                member.start()
            try:
                if self.engine.kind == "static":
                    await self.promote(self.members[0])
                await self.wait_in_sync()
                yield
            finally:
                for member in self.every:
                    member.kill()
                    member.end()
                    ((logs or member.data_path.parent) / f"{member.name}.log").write_text(
                        "\n".join(member.log())
                    )
                self._nursery.cancel_scope.cancel()
