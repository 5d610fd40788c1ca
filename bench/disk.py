"""Measure the disk: how long a sync takes, and how much it takes while it is synced on schedule.

The first is the lower limit for any broker that syncs before its OK, the second one for `--sync=interval`.
"""

import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROBE_S = 0.5
LEAST_SYNCS = 5
SYNC_MESSAGES, SYNC_BYTES, SYNC_S = 2500, 16 * 2**20, 2.0
"""When `--sync=interval` syncs: after so many messages, bytes or seconds."""
_OK = b"\0\0\0\6\0\0\0\0OK"


def sync_times(folder: Path, size: int, seconds: float = PROBE_S) -> list[float]:
    """Append `size` bytes to a file and sync it (fdatasync) repeatedly; return the seconds of each sync."""
    data = os.urandom(size)
    took_s: list[float] = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        until_s = time.perf_counter() + seconds
        while len(took_s) < LEAST_SYNCS or time.perf_counter() < until_s:
            began_s = time.perf_counter()
            file.write(data)
            os.fdatasync(file.fileno())
            took_s.append(time.perf_counter() - began_s)
    return took_s


def most_messages(folder: Path, connections: int, batch: int, size: int) -> float:
    """Return the maximum synced messages per second if every connection waits for the OK of one request.

    At best one sync serves the requests of all connections, so this is the bytes of one sync divided by its time.
    """
    together = connections * batch
    return together / statistics.median(sync_times(folder, together * (4 + size)))


class SyncedFile:
    """A temporary file that a thread syncs on the schedule of `--sync=interval`, beside the writes.

    Args:
        folder: Where the file is.
        batch, size: The messages of a write, and the bytes of a body.
    """

    def __init__(self, folder: Path, batch: int, size: int) -> None:
        self.write_bytes = 4 + batch * (4 + size)
        self._folder = folder
        self._batch = batch
        self._fd = -1
        self._changed = threading.Condition()
        self._writes = 0
        self._is_over = False

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Open the file, and sync it until the block exits."""
        with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
            self._fd = file.fileno()
            thread = threading.Thread(target=self._sync)
            thread.start()
            try:
                yield
            finally:
                with self._changed:
                    self._is_over = True
                    self._changed.notify()
                thread.join()

    def write(self, data: bytes | memoryview) -> None:
        """Append `write_bytes` bytes. Thread-safe."""
        with self._changed:
            offset = self._writes * self.write_bytes
            self._writes += 1
            self._changed.notify()
        os.pwrite(self._fd, data, offset)

    def _sync(self) -> None:
        synced = 0

        def is_due() -> bool:
            writes = self._writes - synced
            return (
                self._is_over
                or writes * self._batch >= SYNC_MESSAGES
                or writes * self.write_bytes >= SYNC_BYTES
            )

        while True:
            with self._changed:
                self._changed.wait_for(is_due, SYNC_S)
                if self._is_over:
                    return
                synced = self._writes
            os.fdatasync(self._fd)


def written_messages(folder: Path, seconds: float, batch: int, size: int) -> float:
    """Return the messages per second that one thread can write, without any other load."""
    file = SyncedFile(folder, batch, size)
    data = os.urandom(file.write_bytes)
    writes = 0
    with file.syncing():
        began_s = time.perf_counter()
        while time.perf_counter() < began_s + seconds:
            file.write(data)
            writes += 1
        return writes * batch / (time.perf_counter() - began_s)


@dataclass(frozen=True)
class Receiver:
    """What load generators need to know of a broker."""

    tcp_address: str

    def log(self) -> list[str]:
        return []


@contextmanager
def receiver(folder: Path, batch: int, size: int) -> Iterator[Receiver]:
    """Serve publishers that send only MPUBs of this kind to one topic.

    It receives each request into a buffer, writes the buffer to a `SyncedFile` and answers. It does nothing else: no
    broker can take more of the same load on the same cores.
    """
    file = SyncedFile(folder, batch, size)

    def serve(client: socket.socket) -> None:
        with client:
            client.recv(len("  V2"), socket.MSG_WAITALL)
            command = _line(client)
            if command.startswith(b"IDENTIFY"):
                client.recv(int.from_bytes(client.recv(4, socket.MSG_WAITALL)), socket.MSG_WAITALL)
                client.sendall(_OK)
                command = _line(client)
            # From now on, all requests are the same.
            request = memoryview(bytearray(len(command) + 4 + file.write_bytes))
            body = request[len(command) + 4 :]
            wanted = request[len(command) :]
            while client.recv_into(wanted, 0, socket.MSG_WAITALL) == len(wanted):
                file.write(body)
                client.sendall(_OK)
                wanted = request

    def accept() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:  # the server is shut down
                return
            clients.append(threading.Thread(target=serve, args=(client,)))
            clients[-1].start()

    clients: list[threading.Thread] = []
    with file.syncing(), socket.create_server(("127.0.0.1", 0)) as server:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield Receiver(f"127.0.0.1:{server.getsockname()[1]}")
        finally:
            server.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in clients:
                thread.join()


def _line(client: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (byte := client.recv(1)):
        line += byte
    return line
