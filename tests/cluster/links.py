"""Links between processes, which a test cuts, stalls or slows down: proxies on loopback, one for each address.

Who connects is found in `/proc`, so that one address that all members know has a link for each of them.
"""

import functools
import itertools
import os
import re
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import trio

from interop.peers import free_ports

_READ_BYTES = 64 * 1024
# Of the kernel's <linux/sock_diag.h>.
_SOCK_DIAG, _BY_FAMILY, _ANY = 4, 20, 0xFFFFFFFF
_RESET = struct.pack("ii", 1, 0)
_FORWARD = re.compile(rb"GET /cluster/forward\?(\S*) HTTP/")
_accepted = itertools.count()
_CLIENT = re.compile(r"(?:^|&)client=([^&]*):\d+(?:&|$)")


class Way(Enum):
    """A direction of data."""

    THERE = "there"
    """From the process that has connected."""
    BACK = "back"


BOTH = tuple(Way)


class Link:
    """The connections of one process to the addresses of another.

    Attributes:
        name: Says who connects, and to whom.
        delay_s: How late data arrives.
        is_cut: New connections are refused.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.delay_s = 0.0
        self.is_cut = False
        self._gates: dict[Way, trio.Event] = {}
        self._passages: set[_Passage] = set()

    @property
    def connections(self) -> int:
        """The number of connections."""
        return len(self._passages)

    def stall(self, *ways: Way) -> None:
        """Pass nothing on in these directions, without an end and without loss. New connections wait."""
        for way in ways or BOTH:
            self._gates.setdefault(way, trio.Event())

    def cut(self) -> None:
        """End all connections with an error, and refuse new ones."""
        self.is_cut = True
        self.reset()

    def reset(self) -> None:
        """End all connections with an error."""
        for passage in self._passages:
            passage.reset()

    def mend(self) -> None:
        """Pass everything on at once, and what was held back."""
        self.delay_s = 0.0
        self.is_cut = False
        gates, self._gates = self._gates, {}
        for gate in gates.values():
            gate.set()

    async def flows(self, way: Way) -> None:
        """Wait until data may pass."""
        while (gate := self._gates.get(way)) is not None:
            await gate.wait()

    async def carry(self, stream: trio.SocketStream, target: str, seen: Callable[[bytes], None]) -> None:
        """Pass on the data of a connection, until it ends. `seen` gets the first piece of it."""
        if self.is_cut:
            _reset(stream)
            return
        passage = _Passage(self, stream, seen)
        self._passages.add(passage)
        try:
            await passage.run(target)
        finally:
            self._passages.remove(passage)


class _Passage:
    """One connection."""

    def __init__(self, link: Link, stream: trio.SocketStream, seen: Callable[[bytes], None]) -> None:
        self._link = link
        self._streams = [stream]
        self._seen = seen
        self._scope = trio.CancelScope()

    def reset(self) -> None:
        for stream in self._streams:
            _reset(stream)
        self._scope.cancel()

    async def run(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        with self._scope:
            await self._link.flows(Way.THERE)
            try:
                there = await trio.open_tcp_stream(host, int(port))
            except OSError:
                self.reset()
                return
            self._streams.append(there)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pass_on, self._streams[0], there, Way.THERE)
                    nursery.start_soon(self._pass_on, there, self._streams[0], Way.BACK)
            finally:
                there.socket.close()

    async def _pass_on(self, source: trio.SocketStream, target: trio.SocketStream, way: Way) -> None:
        link = self._link
        first = way is Way.THERE
        try:
            while True:
                await link.flows(way)
                data = await source.receive_some(_READ_BYTES)
                if first and data:
                    self._seen(bytes(data))
                    first = False
                await link.flows(way)
                if link.delay_s:
                    await trio.sleep(link.delay_s)
                if not data:
                    await target.send_eof()
                    return
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            await link.flows(way)
            self.reset()


def _reset(stream: trio.SocketStream) -> None:
    with suppress(OSError, trio.ClosedResourceError):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    stream.socket.close()


class Gateway:
    """Listens in front of one address of a process, on a port that it keeps.

    Args:
        target: `host:port` of the process.
        host: The address to listen on.
        link_of: Returns the link of a connection from this port of loopback to the gateway's own port.
        forwarded: Called with the IP address of a client whose connection another member forwards here, and with a
            number that ascends with the time of the forwarding: a link that was stalled passes it on later.

    Attributes:
        address: `host:port` of the gateway.
    """

    def __init__(
        self,
        target: str,
        link_of: Callable[[int, int], Link],
        forwarded: Callable[[str, int], None] = lambda address, number: None,
        host: str = "127.0.0.1",
    ) -> None:
        self.target = target
        (self.port,) = free_ports(1)
        self.host = host
        self.address = f"{host}:{self.port}"
        self._link_of = link_of
        self._forwarded = forwarded

    async def serve(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled."""
        await trio.serve_tcp(self._accept, self.port, host=self.host, task_status=task_status)

    async def _accept(self, stream: trio.SocketStream) -> None:
        number = next(_accepted)
        with suppress(OSError):
            link = self._link_of(stream.socket.getpeername()[1], self.port)
            await link.carry(stream, self.target, lambda data: self._look(data, number))

    def _look(self, data: bytes, number: int) -> None:
        if found := _FORWARD.match(data):
            client = _CLIENT.search(unquote(found[1].decode(errors="replace")))
            assert client is not None, data
            self._forwarded(client[1], number)


def owner_of(port: int, to_port: int, pids: Iterable[int]) -> int | None:
    """Return the process, of these, that has a connection on loopback from one port to another one."""
    inode = ask_kernel(port, to_port) if _kernel_tells() else _look_up(port, to_port)
    if inode is None:
        return None
    wanted = f"socket:[{inode}]"
    for pid in pids:
        with suppress(OSError):  # it has ended
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if os.readlink(entry) == wanted:  # noqa: PTH115 (it is no path)
                        return pid
    return None


@functools.cache
def _kernel_tells() -> bool:
    """Whether `ask_kernel` works on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        to_port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", to_port)) as client:
            return ask_kernel(client.getsockname()[1], to_port) is not None


def ask_kernel(port: int, to_port: int) -> int | None:
    """Return the inode of the socket with these ports on loopback; None: there is none, or the kernel does not tell."""
    loopback = socket.inet_aton("127.0.0.1") + bytes(12)
    ends = struct.pack(">HH", port, to_port) + loopback + loopback + struct.pack("=III", 0, _ANY, _ANY)
    request = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, _ANY) + ends
    with suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, 1, 0, 0) + request)
        answer = kernel.recv(_READ_BYTES)
        is_found = struct.unpack_from("=H", answer, 4)[0] == _BY_FAMILY
        if is_found and struct.unpack_from(">H", answer, 22)[0] == to_port:  # 0: a listening socket
            return int(struct.unpack_from("=I", answer, 84)[0])
    return None


def _look_up(port: int, to_port: int) -> str | None:
    """Return the inode from a file with all sockets. If there are many, this takes longer than links may stall."""
    local, remote = f":{port:04X}", f":{to_port:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(local) and fields[2].endswith(remote):
            return fields[9]
    return None
