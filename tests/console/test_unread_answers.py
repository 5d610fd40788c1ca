"""Viewers that do not read their answers, and those that go: they keep neither the console nor its sockets."""

import os
import signal
import socket
import time
from pathlib import Path

from interop.peers import qcli_admin, qcli_serve

REQUEST = b"GET /counter HTTP/1.1\r\nHost: localhost\r\n\r\n"
DEADLINE_S = 20


def connected(address: str) -> socket.socket:
    """Connect with a small receive buffer."""
    host, _, port = address.rpartition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.settimeout(DEADLINE_S)
    sock.connect((host, int(port)))
    return sock


def test_viewers_that_do_not_read_do_not_keep_a_console_that_stops(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        with qcli_admin(f"--nsqd-http-address={broker.http_address}") as console:
            address = console.url.removeprefix("http://").rstrip("/")
            viewer = connected(address)
            viewer.settimeout(1)
            try:
                while True:  # until its answers fill all buffers
                    viewer.sendall(REQUEST * 100)
            except TimeoutError:
                pass
            console.process.send_signal(signal.SIGTERM)
            assert console.process.wait(DEADLINE_S) == 0
            viewer.close()


def test_a_connection_that_the_viewer_closes_is_closed_at_once(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        with qcli_admin(f"--nsqd-http-address={broker.http_address}") as console:
            address = console.url.removeprefix("http://").rstrip("/")
            folder = f"/proc/{console.process.pid}/fd"
            before = len(os.listdir(folder))
            viewers = [connected(address) for _ in range(50)]
            viewers[-1].sendall(REQUEST)
            assert viewers[-1].recv(12) == b"HTTP/1.1 200"
            assert len(os.listdir(folder)) >= before + 50
            for viewer in viewers:
                viewer.close()
            until_s = time.monotonic() + DEADLINE_S
            while len(os.listdir(folder)) > before + 10:
                assert time.monotonic() < until_s, "connections are still open"
                time.sleep(0.05)
