"""Start processes of `qcli` as users do, in a tenth of the processor time.

`popen` starts a process as `subprocess.Popen` does, and `run` waits for its end. For `python -m qcli` it is a copy (a
fork) of a Python that has imported qcli's modules already. It is a child of the process that asks, with its own pipes,
environment, folder and session: it gets real signals, and ends with a real exit code.

`TEST_PROCESSES=new` in the environment starts a new Python for each, as `make soak` does. Tests that read the command
line or environment of a process in `/proc` need it: in a fork, they are those of the first Python.
"""

import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from processes.server import read_exactly

_PROGRAM = Path(__file__).with_name("server.py")
_QCLI = [sys.executable, "-m", "qcli"]
_JOBS = {"pipeline", "replay", "to-parquet"}
"""Commands that need modules of Arrow, which take longer to import than all of qcli."""
_FORKABLE = {"stdin", "stdout", "stderr", "cwd", "start_new_session"}
"""Arguments of `Popen` that the server implements."""
_PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None).prctl
_lock = threading.Lock()
_servers: "dict[bool, _Server]" = {}
"""By whether it has imported the modules for `_JOBS`."""


def popen(
    argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **arguments: Any
) -> "subprocess.Popen[bytes]":
    """Start a process. The arguments are those of `Popen`."""
    words = [str(word) for word in argv]
    environment = dict(os.environ if env is None else env)
    if (
        words[:3] == _QCLI
        and arguments.keys() <= _FORKABLE
        and environment.get("TEST_PROCESSES") != "new"
        and _at_start(environment) == _server_for(words).at_start
    ):
        return _Forked(words, env=environment, **arguments)
    return subprocess.Popen(words, env=environment, **arguments)


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    data: bytes | None = None,
    timeout: float | None = None,
    **arguments: Any,
) -> "subprocess.CompletedProcess[bytes]":
    """Run a process to its end. `data` is its input, and the other arguments are those of `Popen`.

    A pipe takes each stream that the arguments leave out.
    """
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with popen(argv, env=env, **(streams | arguments)) as process:
        try:
            out, err = process.communicate(data, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Python and the C library read when a process starts."""
    prefixes = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "GLIBC_")
    found = {name: value for name, value in environment.items() if name.startswith(prefixes)}
    found.pop("PYTHONUNBUFFERED", None)  # the server implements it
    return found


class _Forked(subprocess.Popen[bytes]):
    """A process of `qcli`, forked by the server."""

    def _execute_child(
        self,
        args: list[str],
        _executable: object,
        _preexec_fn: object,
        _close_fds: object,
        _pass_fds: object,
        cwd: str | Path | None,
        env: dict[str, str],
        _startupinfo: object,
        _creationflags: object,
        _shell: object,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        *more: Any,
    ) -> None:
        start_new_session = more[5]
        request = {
            "arguments": args[3:],
            "environment": env,
            "folder": str(cwd or Path.cwd()),
            "new_session": start_new_session,
        }
        streams = [fd if fd != -1 else number for number, fd in enumerate((p2cread, c2pwrite, errwrite))]
        server = _server_for(args)
        with _lock:
            self.pid = server.fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _server_for(words: Sequence[str]) -> "_Server":
    """Return the server for a command line of `qcli`, which the first call starts."""
    is_job = not _JOBS.isdisjoint(words[3:4])
    with _lock:
        if is_job not in _servers:
            _servers[is_job] = _Server(["jobs"] if is_job else [])
        return _servers[is_job]


class _Server:
    """A Python that has imported qcli's modules.

    Args:
        more: Further arguments of `server.py`.

    Attributes:
        at_start: What Python and the C library have read from the environment.
    """

    def __init__(self, more: list[str]) -> None:
        self.at_start = _at_start(os.environ)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(theirs.fileno()), *more],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def fork(self, request: dict[str, Any], streams: Sequence[int]) -> int:
        """Return the pid of a new process with these streams as its standard ones."""
        data = json.dumps(request).encode()
        # The server's child forks the process and ends. This makes the process a child of the nearest process that
        # adopts: this one, but only for the moment, because what other processes leave behind would stay a zombie here.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._socket, [len(data).to_bytes(4, "big")], streams)
            self._socket.sendall(data)
            if pid := int.from_bytes(read_exactly(self._socket, 4), "big"):
                return pid
            raise OSError("the process could not be prepared: see standard error")
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        self._process.wait()
