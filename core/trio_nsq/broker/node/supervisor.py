"""Runs the processes of a node: forks them, starts them again, and ends them together.

It is synchronous and has one thread, so that forks are safe: it waits for signals, and for nothing else.
"""

import ctypes
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from ...event_loop.retries import Delays

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

READY: Final = signal.SIGUSR2
"""A process sends it to the supervisor when it is ready."""
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)
_PASSED_ON: Final = (signal.SIGHUP, signal.SIGUSR1)
_AWAITED: Final = {*_ENDING, *_PASSED_ON, READY, signal.SIGCHLD}
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 10.0
_PR_SET_PDEATHSIG: Final = 1
_prctl = ctypes.CDLL(None).prctl


class Node(Protocol):
    """What the supervisor tells, and asks."""

    def is_ready(self, index: int) -> bool:
        """Whether a process serves clients."""

    def ended(self, index: int) -> None:
        """A process has ended."""

    def all_ready(self) -> None:
        """All processes serve clients for the first time."""

    def reloading(self) -> None:
        """The processes were told to read their files again."""

    def stopping(self) -> None:
        """The processes were told to end."""

    def alive(self) -> None:
        """The supervisor works."""


class _Process:
    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.pid = 0  # 0: it does not run
        self.code = 0
        self.began_s = 0.0
        self.due_s = 0.0  # when it is started again
        self.was_ready = False
        self.owed: list[signal.Signals] = []  # sent as soon as it is ready: before, they would end it
        self.delays = Delays(_FIRST_DELAY_S, _LONGEST_DELAY_S)


class Supervisor:
    """Runs processes until a signal ends it.

    Args:
        names: Of the processes, for the log. The last ones may be no brokers.
        brokers: How many are brokers: the others get no SIGUSR1.
        alive_interval_s: How often to tell the node that the supervisor works; None: never.

    Attributes:
        code: The exit code, after `run`: 0, or that of a process that failed.
        stopped_by: The second signal that ended the processes at once; None: there was none.
    """

    def __init__(
        self, names: Sequence[str], brokers: int, node: Node, alive_interval_s: float | None = None
    ) -> None:
        self.code: int = 0
        self.stopped_by: signal.Signals | None = None
        self._processes = [_Process(index, name) for index, name in enumerate(names)]
        self._brokers = brokers
        self._node = node
        self._mask: set[signal.Signals] | None = None
        self._is_up = False
        self._is_stopping = False
        self._alive_interval_s = alive_interval_s
        self._alive_due_s = math.inf if alive_interval_s is None else 0.0

    def run(self) -> int | None:
        """Run the processes. Returns None when all have ended; in each process, its number, at once."""
        self._mask = {signal.Signals(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)}
        try:
            while True:
                if (index := self._start_due()) is not None:
                    return index
                if self._is_stopping and not any(process.pid for process in self._processes):
                    return None
                self._wait()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    # ------------------------------------------------------------------ processes

    def _start_due(self) -> int | None:
        now_s = time.monotonic()
        for process in self._processes:
            if not (process.pid or self._is_stopping) and process.due_s <= now_s:
                parent = os.getpid()
                _flush_output()
                process.began_s = now_s
                process.pid = os.fork()
                if not process.pid:
                    _begin_process(parent)
                    return process.index
        return None

    def _reap(self) -> None:
        for process in self._processes:
            if process.pid:
                pid, status = os.waitpid(process.pid, os.WNOHANG)
                if pid:
                    self._ended(process, status)

    def _ended(self, process: _Process, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        pid, process.pid = process.pid, 0
        self._node.ended(process.index)
        if self._is_stopping:
            if process.was_ready:  # otherwise the signal has interrupted its start
                self.code = self.code or (code if code >= 0 else 1)
            return
        if not self._is_up:
            # As one broker that cannot start: the process itself has said why.
            self.code = code if code > 0 else 1
            self._stop()
            return
        lasted_s = time.monotonic() - process.began_s
        process.delays.connection_lasted(lasted_s)
        delay_s = process.delays.next_s()
        process.due_s = time.monotonic() + delay_s
        ending = f"exit status {code}" if code >= 0 else f"signal {-code}"
        logger.error(
            "%s (PID %d) has ended (%s); it starts again in %g s", process.name, pid, ending, delay_s
        )

    def _note_ready(self) -> None:
        for process in self._processes:
            is_ready = bool(process.pid) and self._node.is_ready(process.index)
            if is_ready and not process.was_ready and self._is_up:
                logger.info("%s (PID %d) is ready again", process.name, process.pid)
            process.was_ready = is_ready
            if is_ready and process.owed:
                for number in process.owed:
                    os.kill(process.pid, number)
                process.owed.clear()
        if not self._is_up and not self._is_stopping and all(each.was_ready for each in self._processes):
            self._is_up = True
            self._node.all_ready()

    # ------------------------------------------------------------------ signals

    def _wait(self) -> None:
        """Wait for a signal, or until a process is to be started or the node is to be told."""
        now_s = time.monotonic()
        if self._alive_interval_s is not None and self._alive_due_s <= now_s:
            self._node.alive()
            self._alive_due_s = now_s + self._alive_interval_s
        starts_s = [process.due_s for process in self._processes if not (process.pid or self._is_stopping)]
        due_s = min([*starts_s, self._alive_due_s])
        if due_s < math.inf:
            arrived = signal.sigtimedwait(_AWAITED, max(0.0, due_s - now_s))
        else:
            arrived = signal.sigwaitinfo(_AWAITED)
        number = signal.Signals(arrived.si_signo) if arrived is not None else None
        if number in _ENDING:
            if self._is_stopping:
                self.stopped_by = number
            self._stop()
        elif number in _PASSED_ON:
            for process in self._processes if number == signal.SIGHUP else self._processes[: self._brokers]:
                if number not in process.owed:
                    process.owed.append(number)
            if number == signal.SIGHUP:
                self._node.reloading()
        # Whatever the signal is: several of one kind can arrive as one.
        self._reap()
        self._note_ready()

    def _stop(self) -> None:
        """End all processes; called again: at once."""
        if not self._is_stopping:
            self._is_stopping = True
            self._node.stopping()
        for process in self._processes:
            if process.pid:
                os.kill(process.pid, signal.SIGTERM)


def _flush_output() -> None:
    """Write what is buffered; otherwise both processes write it. A closed output must not end the node."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # None: the descriptor was closed at the start
            stream.flush()


def _begin_process(parent: int) -> None:
    """In a new process: end with the supervisor, whatever ends that, and get no signals of its terminal."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setpgid(0, 0)
    os.environ.pop("NOTIFY_SOCKET", None)  # the supervisor tells the service manager
