"""Import qcli's modules, and then fork a process of `qcli` for each request: see `processes`.

With the argument `jobs`, also the modules of commands that use Arrow, DuckDB, tables and Spark. Until they are used,
these libraries have no threads but those of an allocator, jemalloc, which expects forks.
"""

import atexit
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

MODULES = (
    "qcli.app",
    "qcli.commands.admin.command",
    "qcli.commands.bench.command",
    "qcli.commands.channel",
    "qcli.commands.drain.command",
    "qcli.commands.lookupd",
    "qcli.commands.peek",
    "qcli.commands.pub.command",
    "qcli.commands.pub.run",
    "qcli.commands.replay.command",
    "qcli.commands.serve.command",
    "qcli.commands.stat.command",
    "qcli.commands.stat.live",
    "qcli.commands.tail.command",
    "qcli.commands.tail.consume",
    "qcli.commands.tail.read_log",
    "qcli.commands.to_file.command",
    "qcli.commands.to_file.run",
    "qcli.commands.to_http.command",
    "qcli.commands.to_nsq.command",
    "qcli.commands.to_nsq.run",
    "qcli.commands.topic",
    "qcli.framework.daemon.run",
    "qcli.framework.signals",
    "trio_nsq.broker",
    "trio_nsq.broker.startup_check",
    "trio_nsq.connectors.to_http.run",
    "trio_nsq.console.server",
    "trio_nsq.lookup.service.server",
)
"""Modules that commands import when they run, and what these import."""
JOB_MODULES = (
    "qcli.commands.pipeline.command",
    "qcli.commands.pipeline.run",
    "qcli.commands.pipeline.status",
    "qcli.commands.replay.files",
    "qcli.commands.to_parquet.command",
    "qcli.commands.to_parquet.export",
    "trio_nsq.spark.replay.job",
    "trio_nsq.spark.runtime.spark_engine",
    "trio_nsq.spark.tables.delta",
    "trio_nsq.spark.tables.iceberg",
    "duckdb",
    "pyiceberg.catalog.sql",
    "pyspark.sql",
)
"""The same for exports, replays and pipelines."""


def serve(connection: socket.socket) -> dict[str, Any]:
    """Fork a process for each request, and return the request in the process. Ends with the connection."""
    while True:
        head, fds, _, _ = socket.recv_fds(connection, 4, 3)
        if not head:
            os._exit(0)
        head += read_exactly(connection, 4 - len(head))
        request: dict[str, Any] = json.loads(read_exactly(connection, int.from_bytes(head, "big")))
        told, telling = os.pipe()
        if (middle := os.fork()) == 0:
            if os.fork():
                os._exit(0)
            connection.close()
            os.close(told)
            _take(request, fds, telling)
            return request
        os.waitpid(middle, 0)  # from now on, the process that asked is the parent
        os.close(telling)
        connection.sendall(os.read(told, 4) or bytes(4))  # its pid, when it is complete; nothing if it failed
        for fd in (told, *fds):
            os.close(fd)


def _take(request: dict[str, Any], fds: list[int], telling: int) -> None:
    """Make this process one that has just started, and write its pid."""
    if request["new_session"]:
        os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        unbuffered = number > 0 and bool(os.environ.get("PYTHONUNBUFFERED"))
        binary = open(  # noqa: SIM115 (until the process ends)
            number, "wb" if number else "rb", buffering=0 if unbuffered else -1, closefd=False
        )
        stream = io.TextIOWrapper(
            binary,
            encoding=before.encoding,
            errors=before.errors,
            newline="\n",
            line_buffering=number == 2 or binary.isatty(),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
        before.detach()
    sys.path[0] = str(Path.cwd())
    sys.argv = ["qcli", *request["arguments"]]
    os.write(telling, os.getpid().to_bytes(4, "big"))
    os.closerange(3, max(telling, *fds) + 1)


codes: list[int] = []
"""The exit code, once the command has ended with one."""


def end_at_once() -> None:
    """End the process as Python would after this, but do not free its objects first: that would copy the memory.

    If what was printed cannot be written, or the command ended otherwise, Python does the rest.
    """
    if codes:
        with suppress(OSError, ValueError):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(codes[0])


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Read this many bytes."""
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError("the other end has closed the connection")
        data += piece
    return data


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt is for the tests
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # else numpy's import starts a thread for each core
    for module in MODULES + JOB_MODULES * ("jobs" in sys.argv):
        with suppress(ModuleNotFoundError):  # a test reports it; without it, processes only start later
            importlib.import_module(module)
    # Objects that exist now are not examined in the processes: that, and freeing them, would copy their memory.
    gc.collect()
    gc.freeze()
    atexit.register(end_at_once)  # the first one registered is the last one called
    serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        runpy.run_module("qcli", run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        if isinstance(ending.code, int):
            codes.append(ending.code)
        raise
