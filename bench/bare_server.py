"""Run `bare.c`: what no server of one thread can be faster than, at single publishes over the same connections."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.contenders import process_cpu_s
from bench.loads import goload

from interop.peers import free_ports

_SOURCE = Path(__file__).with_name("bare.c")


def bare_publishes(folder: Path, seconds: float, connections: int, *, synced: bool) -> dict[str, float]:
    """Publish to it with PUB; as `publish_singles`.

    Args:
        folder: The parent of its file.
        synced: It syncs the file before it answers.

    Raises:
        RuntimeError: There is no C compiler.
    """
    with _running(folder, synced=synced) as (pid, address):
        before_s = process_cpu_s(pid)
        told = goload("pub", address, connections=connections, runfor=f"{seconds}s")
        cpu_us = 1e6 * (process_cpu_s(pid) - before_s) / told["messages"]
    return {"rate": told["messages"] / told["seconds"], "cpu_us": cpu_us}


@contextmanager
def _running(folder: Path, *, synced: bool) -> Iterator[tuple[int, str]]:
    """Yield its process id and its address."""
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
            yield process.pid, f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True
