"""The process in which the brokers of tests run: it imports the broker once, and forks for each start.

Python needs 0.5 s to import a broker, and a fork that has imported it starts within 0.03 s. `ServerProcess` sends
commands, one in a line, and reads an answer in JSON for each. The process ends, and its broker with it, when its
standard input ends, however the test run ended.
"""

import ctypes
import gc
import json
import logging
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import trio

from ..broker import BoundAddresses, BrokerOptions, StartupError, serve
from ..broker.state.settings import TopicSettings
from ..protocol.limits import Limits
from ..text.arguments import check_options

_HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl
_STARTED = b"started"


class Brokers:
    """Runs one broker at a time, always at the same addresses.

    Sockets that are bound and do not listen keep the ports from other programs while no broker runs: a client is
    refused then, as by a machine whose broker was killed.
    """

    def __init__(self) -> None:
        self._kept = [_bound_socket(), _bound_socket()]
        self.addresses: list[str] = [f"{_HOST}:{each.getsockname()[1]}" for each in self._kept]
        self._pid = 0

    def start(self, folder: Path, options: Mapping[str, Any]) -> str:
        """Start a broker unless one runs. Return why it did not start; empty: it runs."""
        if self.is_running():
            return ""
        reading, writing = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(reading)
            self._serve(folder, options, writing)
        os.close(writing)
        with open(reading, "rb") as pipe:
            report = pipe.read()  # ends when the broker has reported, or has ended
        if report == _STARTED:
            return ""
        self._wait()
        return report.decode(errors="replace") or "its process ended"

    def _serve(self, folder: Path, options: Mapping[str, Any], writing: int) -> NoReturn:
        """Be the broker; in the fork. `writing` is closed after the report, and its number is another file's then."""
        code = 1
        has_reported = False

        def report(what: bytes) -> None:
            nonlocal has_reported
            if not has_reported:
                has_reported = True
                os.write(writing, what)
                os.close(writing)

        try:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            with open(os.devnull, "r+b") as null:  # otherwise it keeps the pipes of this process open
                for descriptor in (0, 1):
                    os.dup2(null.fileno(), descriptor)
            with open(folder / "broker.log", "ab") as log:
                os.dup2(log.fileno(), 2)
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
            logging.root.handlers[0].addFilter(_is_not_of_request)
            trio.run(_serve, options_of(folder, self.addresses, options), lambda: report(_STARTED))
            code = 0
        except BaseException as raised:
            error = raised
            while isinstance(error, BaseExceptionGroup):  # of the nursery
                error = error.exceptions[0]
            if not isinstance(error, StartupError):
                traceback.print_exc()
            report(f"{type(error).__name__}: {error}".encode())
        finally:
            sys.stderr.flush()
            os._exit(code)

    def kill(self) -> None:
        """Kill the broker, also one that is suspended. Does nothing if none runs."""
        self._signal(signal.SIGKILL)
        self._wait()

    def stop(self) -> None:
        """Stop the broker gracefully. Does nothing if none runs."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        self._wait()

    def hang(self) -> None:
        """Suspend the broker: connections stay open, and it does nothing."""
        self._signal(signal.SIGSTOP)
        if self._pid:
            os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Continue the broker."""
        self._signal(signal.SIGCONT)

    def is_running(self) -> bool:
        """Whether there is a broker, also one that is suspended."""
        if self._pid and os.waitpid(self._pid, os.WNOHANG) != (0, 0):
            self._pid = 0
        return bool(self._pid)

    def _signal(self, number: signal.Signals) -> None:
        if self._pid:
            os.kill(self._pid, number)

    def _wait(self) -> None:
        if self._pid:
            os.waitpid(self._pid, 0)
            self._pid = 0


def _is_not_of_request(record: logging.LogRecord) -> bool:
    """Leave the line of each HTTP request out of the log: a test that waits makes many."""
    return record.levelno > logging.INFO or record.module != "serving"


def _bound_socket() -> socket.socket:
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that a broker can bind the port, too
    kept.bind((_HOST, 0))
    return kept


def options_of(folder: Path, addresses: list[str], options: Mapping[str, Any]) -> BrokerOptions:
    """Return the options of a broker for tests: with those of its topics and limits, by their names.

    Raises TypeError, ValueError: there is no such option, or its value is invalid.
    """
    given = {
        "sync": "interval",
        "broadcast_address": _HOST,
        "retention_time_ms": -1,  # so that all published messages can be read
        **options,
        "data_path": folder / "data",
        "tcp_address": addresses[0],
        "http_address": addresses[1],
    }
    parts: dict[type, dict[str, Any]] = {TopicSettings: {}, Limits: {}, BrokerOptions: {}}
    for name, value in given.items():
        kinds = [kind for kind in parts if name in {each.name for each in fields(kind)}]
        if not kinds:
            raise TypeError(f"a broker has no option {name!r}")
        parts[kinds[0]][name] = value
    topics, limits = TopicSettings(**parts[TopicSettings]), Limits(**parts[Limits])
    check_options(limits)
    return BrokerOptions(**{"topic_defaults": topics, "limits": limits, **parts[BrokerOptions]})


async def _serve(options: BrokerOptions, started: Callable[[], None]) -> None:
    options.data_path.mkdir(parents=True, exist_ok=True)
    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            await nursery.start(_serve_alone, options)
            started()
            async for _ in signals:
                nursery.cancel_scope.cancel()
                break


async def _serve_alone(options: BrokerOptions, *, task_status: trio.TaskStatus[BoundAddresses]) -> None:
    await serve(options, task_status=task_status)


def main() -> None:
    """Execute the commands of standard input until it ends."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # for the test run, which ends this process after its last test
    gc.freeze()  # forks share what is imported
    brokers = Brokers()
    commands = {"stop": brokers.stop, "kill": brokers.kill, "hang": brokers.hang, "resume": brokers.resume}
    _answer(addresses=brokers.addresses)
    try:
        while command := sys.stdin.buffer.readline():
            name = command.strip().decode()
            if name == "exit":
                break
            failure = ""
            if name == "start":
                folder, options = pickle.load(sys.stdin.buffer)
                failure = brokers.start(folder, options)
            elif name != "look":
                commands[name]()
            _answer(failure=failure, is_running=brokers.is_running())
    finally:
        brokers.kill()


def _answer(**answer: object) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
