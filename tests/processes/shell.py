"""Let scripts of the shell start processes of `qcli` as `processes.popen` does.

`serving` listens on a socket. `client.py` asks there for the process of a command, with its own standard streams,
environment and folder. It forwards signals, and ends as the process ends. If it is killed, the process is killed, too.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from processes import popen
from processes.server import read_exactly

CLIENT = Path(__file__).with_name("client.py")


@contextmanager
def serving() -> Iterator[Path]:
    """Start processes for clients of a socket, until the block exits. Yields the socket's path, which is short."""
    with socket.socket(socket.AF_UNIX) as listener, TemporaryDirectory(prefix="processes-") as folder:
        path = Path(folder) / "socket"
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=_accept, args=(listener,))
        thread.start()
        try:
            yield path
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # `accept` returns
            thread.join()


def _accept(listener: socket.socket) -> None:
    threads: list[threading.Thread] = []
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            break
        threads.append(threading.Thread(target=_serve, args=(connection,)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _serve(connection: socket.socket) -> None:
    """Start a process, deliver the signals that its client forwards, and tell the client its exit code."""
    with connection:
        head, fds, _, _ = socket.recv_fds(connection, 4, 3)
        try:
            request = json.loads(read_exactly(connection, int.from_bytes(head, "big")))
            process = popen(
                [sys.executable, "-m", "qcli", *request["arguments"]],
                env=request["environment"],
                cwd=request["folder"],
                **dict(zip(("stdin", "stdout", "stderr"), fds, strict=True)),
            )
        finally:
            for fd in fds:
                os.close(fd)
        forwarding = threading.Thread(target=_forward, args=(connection, process))
        forwarding.start()
        code = process.wait()
        try:
            connection.sendall(code.to_bytes(2, "big", signed=True))
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the client was killed
        forwarding.join()


def _forward(connection: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """Send the process each signal that arrives as a byte, and SIGKILL when the client is gone."""
    try:
        while number := connection.recv(1):
            process.send_signal(number[0])
    except OSError:
        pass
    process.send_signal(signal.SIGKILL)  # nothing happens if it has ended
