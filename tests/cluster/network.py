"""A network of namespaces, in which packets between two members can get lost. Only root can create it.

Each member has a namespace with an address of its own, on a bridge. A packet is lost if the sender takes another
Ethernet address for the receiver's.

No interface outside of these namespaces gets an address; routes make this process's addresses local instead. Browsers
that watch the machine's addresses end their requests with ``ERR_NETWORK_CHANGED`` when one comes or goes.
"""

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from cluster.links import BOTH, Link, Way

_NOBODY = "02:00:00:00:00:ff"


class Network:
    """See `network`.

    Attributes:
        host: The address of this process.
        clients: The prefix of addresses that clients may connect from; two numbers follow.
    """

    def __init__(self, stack: ExitStack) -> None:
        number = os.getpid() % 100
        self._prefix = f"10.{100 + number}.0"
        self._name = f"qcli{number}"
        self._stack = stack
        self._numbers = itertools.count(2)
        self.host = f"{self._prefix}.1"
        self.clients = f"10.{100 + number}"
        _ip("link", "add", self._name, "type", "bridge")
        stack.callback(_ip, "link", "del", self._name)
        self._be(f"{self.host}/32")
        self._be(f"{self.clients}.128.0/17")
        _up(self._name)
        _ip("route", "add", f"{self._prefix}.0/24", "dev", self._name, "src", self.host)

    def _be(self, addresses: str) -> None:
        """Make addresses this process's."""
        route = ("local", addresses, "dev", "lo")
        _ip("route", "add", *route)
        self._stack.callback(_ip, "route", "del", *route)

    def add(self) -> "Place":
        """Add a namespace."""
        number = next(self._numbers)
        place = Place(f"{self._name}-{number}", f"{self._prefix}.{number}")
        outside = f"{self._name}v{number}"
        _ip("netns", "add", place.namespace)
        self._stack.callback(_ip, "netns", "del", place.namespace)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", place.namespace)
        self._stack.callback(_ip, "link", "del", outside)
        _ip("link", "set", outside, "master", self._name)
        _up(outside)
        place.ip("addr", "add", f"{place.host}/24", "dev", "eth0")
        place.ip("link", "set", "lo", "up")
        place.ip("link", "set", "eth0", "up")
        place.ip("route", "add", f"{self.clients}.128.0/17", "via", self.host)
        return place


class Place:
    """A namespace.

    Attributes:
        namespace: Its name.
        host: Its address.
    """

    def __init__(self, namespace: str, host: str) -> None:
        self.namespace = namespace
        self.host = host

    def ip(self, *words: str) -> None:
        _ip("-netns", self.namespace, *words)

    def lose(self, to: "Place") -> None:
        """Lose all packets that are sent to another place."""
        self.ip("neigh", "replace", to.host, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")

    def find(self, to: "Place") -> None:
        """Lose no packet to another place any longer."""
        with suppress(subprocess.CalledProcessError):  # none is lost
            self.ip("neigh", "del", to.host, "dev", "eth0")


class LossyLink(Link):
    """A link between members, as `Link`, which loses packets instead of holding data back.

    If packets of one direction are lost, so are the acknowledgements of the data of the other one. It is never slow,
    because that needs a part of the kernel that may be missing.
    """

    def __init__(self, source: Place, target: Place) -> None:
        super().__init__(f"from {source.host} to {target.host}")
        self._ends = {Way.THERE: (source, target), Way.BACK: (target, source)}

    def stall(self, *ways: Way) -> None:
        for way in ways or BOTH:
            sender, receiver = self._ends[way]
            sender.lose(receiver)

    def cut(self) -> None:
        self.stall()

    def reset(self) -> None:
        """Do nothing: connections are the kernel's."""

    def mend(self) -> None:
        for sender, receiver in self._ends.values():
            sender.find(receiver)


@contextmanager
def network() -> Iterator[Network]:
    """Create a network, until the end of the block; skips the test if this cannot be done."""
    with ExitStack() as stack:
        try:
            made = Network(stack)
            made.add()
        except (OSError, subprocess.CalledProcessError) as exc:
            pytest.skip(f"network namespaces cannot be created here: {exc}")
        yield made


def _up(interface: str) -> None:
    """Start an interface without an address."""
    _ip("link", "set", interface, "addrgenmode", "none")
    _ip("link", "set", interface, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)
