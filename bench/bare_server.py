"""Run `bare.c`: what no server of one thread can be faster than, over the same connections."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.contenders import process_cpu_s
from bench.loads import goload, reading, writing

from interop.peers import free_ports

_SOURCE = Path(__file__).with_name("bare.c")


@dataclass(frozen=True)
class _Bare:
    """The running server: a `bench.loads.Target`."""

    tcp_address: str
    pid: int

    def log(self) -> list[str]:
        return []


def bare_singles(folder: Path, seconds: float, connections: int, *, synced: bool) -> dict[str, float]:
    """Publish to it with PUB; as `publish_singles`.

    Args:
        folder: The parent of its file.
        synced: It syncs the file before it answers.

    Raises:
        RuntimeError: There is no C compiler.
    """
    with _running(folder, synced=synced) as bare:
        before_s = process_cpu_s(bare.pid)
        told = goload("pub", bare.tcp_address, connections=connections, runfor=f"{seconds}s")
        return _figures(bare, before_s, told["messages"] / told["seconds"], told["messages"])


def bare_batches(
    folder: Path, seconds: float, connections: int, batch: int, size: int, *, synced: bool
) -> dict[str, float]:
    """Publish to it with MPUB; as `publish_batches`. Arguments and errors as `bare_singles`."""
    with _running(folder, synced=synced) as bare:
        before_s = process_cpu_s(bare.pid)
        rates = writing(bare, seconds, connections, batch=batch, size=size).finish()
        return _figures(bare, before_s, rates.rate, rates.messages)


def bare_consume(folder: Path, seconds: float) -> dict[str, float]:
    """Consume from it; as `read_fast`. Arguments and errors as `bare_singles`."""
    with _running(folder, synced=False) as bare:
        before_s = process_cpu_s(bare.pid)
        rates = reading(bare, seconds).finish()
        return _figures(bare, before_s, rates.rate, rates.messages)


def _figures(bare: _Bare, before_s: float, rate: float, messages: float) -> dict[str, float]:
    return {"rate": rate, "cpu_us": 1e6 * (process_cpu_s(bare.pid) - before_s) / messages}


@contextmanager
def _running(folder: Path, *, synced: bool) -> Iterator[_Bare]:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise RuntimeError(f"there is no C compiler for {_SOURCE}; set CC")
    with TemporaryDirectory(prefix="bench-", dir=folder) as data:
        program, file = Path(data, "bare"), Path(data, "file")
        subprocess.run([compiler, "-O2", "-o", program, _SOURCE], check=True)
        (port,) = free_ports(1)
        process = subprocess.Popen([program, str(port), file, *(["sync"] if synced else [])])
        try:
            while not _listens(port):
                if process.poll() is not None:
                    raise RuntimeError(f"{_SOURCE} has ended")
            yield _Bare(f"127.0.0.1:{port}", process.pid)
        finally:
            process.kill()
            process.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True
