"""An engine that runs tasks in several processes on this machine, so that an export without Spark uses several cores.

A process is a fresh Python that gets tasks over a socket, because forking a process with threads is not safe. It ends
when this process ends, also if this process is killed.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from ...protocol.errors import NSQError
from ...storage import known_access
from .engine import Advance, Done, Task

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from {module} import serve; serve(int(sys.argv[1]))"
_PROGRESS_S = 0.1
"""The interval of progress reports."""
_SHORT_OF_MEMORY = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT)
"""How processes end without memory: the kernel kills one, or a library in C fails to allocate."""


class ProcessDied(NSQError):
    """A process that ran a task has ended; the text has the reason."""


class ProcessEngine:
    """An `Engine` with several processes. They are started when they are needed, and end with the block.

    Args:
        jobs: The maximum number of processes.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._workers: list[_Worker] = []

    def __enter__(self) -> "ProcessEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, also those that run a task."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def __call__(self, tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance) -> None:
        """Run all tasks; see `Engine`. After a failure, the other tasks are killed.

        Raises:
            NSQError, OSError: A task failed.
            ProcessDied: A process was killed.
        """
        while len(self._workers) < min(self._jobs, len(tasks)):
            self._workers.append(_Worker())
        try:
            self._run(deque(tasks), finish, advance)
        except BaseException:
            self.close()
            raise

    def _run(self, waiting: "deque[Task[Done]]", finish: Callable[[Done], None], advance: Advance) -> None:
        busy: dict[Connection, _Worker] = {}
        idle = list(self._workers)
        while waiting or busy:
            while waiting and idle:
                worker = idle.pop()
                worker.start(waiting.popleft())
                busy[worker.connection] = worker
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                kind, found = busy[connection].receive()
                if kind == "progress":
                    advance(*found)
                    continue
                idle.append(busy.pop(connection))
                if kind == "failed":
                    raise found
                finish(found)


class _Worker:
    """A process, as this process sees it."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        # Its end tells the process that this one has ended.
        alive, self._alive = os.pipe()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _BOOT.format(module=__name__),
                    str(theirs.fileno()),
                    json.dumps(sys.path),
                ],
                stdin=alive,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C interrupts this process, which ends the others
            )
        os.close(alive)

    def start(self, task: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # `receive` tells
            self.connection.send((known_access(), task))

    def receive(self) -> tuple[str, Any]:
        """Return the next message of the process. Raises ProcessDied."""
        try:
            found: tuple[str, Any] = self.connection.recv()
            return found
        except (EOFError, ConnectionResetError):
            code = self._process.wait()
            reason = f"signal {-code}" if code < 0 else f"exit code {code}"
            hint = ", perhaps because memory is short: use fewer --jobs" if code in _SHORT_OF_MEMORY else ""
            raise ProcessDied(f"a process of this command ended with {reason}{hint}") from None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.connection.close()
        os.close(self._alive)


# ---------------------------------------------------------------------- in the process


def serve(fd: int) -> None:
    """Run tasks from a socket until it is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.getLogger().addHandler(logging.NullHandler())  # the other process has shown the same warnings
    with Connection(fd) as connection, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            access, task = connection.recv()
            access.keep()
            progress = _Progress(connection)
            try:
                result = task.run(progress.advance)
            except Exception as exc:
                connection.send(("failed", exc))
            else:
                progress.report()
                connection.send(("done", result))


def _end_with_parent() -> None:
    """Exit when the parent process does, even in the middle of a task. Unfinished files stay, as after a kill."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


class _Progress:
    """Reports progress now and then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._next_s = 0.0
        self._messages = self._bytes = 0

    def advance(self, messages: int, size: int) -> None:
        self._messages += messages
        self._bytes += size
        if (now_s := time.monotonic()) >= self._next_s:
            self._next_s = now_s + _PROGRESS_S
            self.report()

    def report(self) -> None:
        self._connection.send(("progress", (self._messages, self._bytes)))
        self._messages = self._bytes = 0
