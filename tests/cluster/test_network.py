"""Tests for the network of namespaces: each direction of packets can get lost, and clients have many addresses."""

import socket
import subprocess
import sys
import time
from contextlib import closing

from broker.support import PATIENCE_S
from cluster.links import Way
from cluster.network import LossyLink, Place, network
from interop.peers import Child

_SERVER = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
while True:
    with server.accept()[0] as connection:
        connection.sendall(connection.getpeername()[0].encode())
"""
_CLIENT = """
import socket, sys
try:
    print(socket.create_connection((sys.argv[1], 5000), float(sys.argv[2])).recv(100).decode())
except TimeoutError:
    print("lost")
"""


def ask(place: Place, host: str, patience_s: float) -> str:
    """Return what the server says to a client in a namespace."""
    command = ["ip", "netns", "exec", place.namespace, sys.executable, "-c", _CLIENT, host, str(patience_s)]
    with closing(Child(command)) as child:
        child.wait(2 * PATIENCE_S)
        return child.stdout.next(time.monotonic() + PATIENCE_S) or "nothing"


def test_packets_are_lost_in_each_direction() -> None:
    with network() as net:
        one, other = net.add(), net.add()
        link = LossyLink(one, other)
        with closing(
            Child(["ip", "netns", "exec", other.namespace, sys.executable, "-c", _SERVER])
        ) as server:
            assert server.stdout.next(time.monotonic() + PATIENCE_S) == "ready"
            assert ask(one, other.host, PATIENCE_S) == one.host
            for way in (*Way, None):
                link.stall(*[way] if way else [])
                assert ask(one, other.host, 0.3) == "lost"
                link.mend()
                assert ask(one, other.host, PATIENCE_S) == one.host
            client = f"{net.clients}.130.7"
            with socket.create_connection((other.host, 5000), PATIENCE_S, (client, 0)) as connection:
                assert connection.recv(100).decode() == client


def test_the_machine_gets_no_address() -> None:
    def addresses() -> list[str]:
        shown = subprocess.run(["ip", "-o", "address"], check=True, capture_output=True, text=True).stdout
        return sorted(" ".join(line.split()[1:4]) for line in shown.splitlines())

    before = addresses()
    with network() as net:
        one, other = net.add(), net.add()
        with closing(
            Child(["ip", "netns", "exec", other.namespace, sys.executable, "-c", _SERVER])
        ) as server:
            assert server.stdout.next(time.monotonic() + PATIENCE_S) == "ready"
            assert ask(one, other.host, PATIENCE_S) == one.host
            assert addresses() == before
