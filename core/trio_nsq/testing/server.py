"""A broker for tests, in a process of its own."""

import json
import os
import pickle
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

PATIENCE_S = 60
"""How long the broker's process may take for an answer, on a machine that does much else."""
_LOG_CHARACTERS = 2000


class ServerFailed(Exception):
    """The broker of a test did not start, or its process ended."""


class ServerProcess:
    """The process in which brokers run. It begins to import them when it is created, and then waits for commands.

    Attributes:
        pid: The id of the process; each broker has another one.
    """

    def __init__(self) -> None:
        # A process that measures coverage, or makes an error of each warning, would do so in the broker.
        unwanted = ("COV", "PYTHONWARNINGS")
        env = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trio_nsq.testing.server_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=env,
            start_new_session=True,  # Ctrl+C is for the tests, which may want the broker for their last steps
        )
        self.pid: int = self._process.pid
        self._lock = Lock()
        self._addresses: tuple[str, str] | None = None
        self._received = b""
        self._unread = 0  # commands whose answers were not read

    @property
    def addresses(self) -> tuple[str, str]:
        """The addresses of TCP and HTTP, which all brokers of this process have."""
        with self._lock:
            if self._addresses is None:
                tcp, http = self._next_answer()["addresses"]
                self._addresses = tcp, http
            return self._addresses

    def start(self, folder: Path, options: Mapping[str, Any]) -> str:
        """Start a broker with a folder unless one runs. Return why it does not run; empty: it does.

        Raises ServerFailed.
        """
        return str(self._ask("start", pickle.dumps((folder, dict(options))))["failure"])

    def do(self, command: str) -> bool:
        """Execute `stop`, `kill`, `hang`, `resume` or `look`. Return whether a broker runs. Raises ServerFailed."""
        return bool(self._ask(command)["is_running"])

    def _ask(self, command: str, data: bytes = b"") -> dict[str, Any]:
        _ = self.addresses  # its first answer
        with self._lock:  # a test may kill the broker in another thread
            self._unread += 1
            self._send(command.encode() + b"\n" + data)
            while True:  # late answers to commands that were given up or interrupted come first
                answer = self._next_answer()
                self._unread -= 1
                if not self._unread:
                    return answer

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
        except OSError:
            pass  # the process has ended, which the missing answer tells with its reason

    def _next_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        while b"\n" not in self._received:
            if not ready.poll(PATIENCE_S * 1000):
                raise ServerFailed(f"the process of the broker did not answer for {PATIENCE_S} s")
            data = os.read(descriptor, 65536)
            if not data:
                self._process.kill()
                _, errors = self._process.communicate()
                raise ServerFailed(f"the process of the broker ended: {errors.decode(errors='replace')}")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process, and its broker without saving anything. May be called again."""
        process = self._process
        if process.stdin is not None and not process.stdin.closed:
            self._send(b"exit\n")  # forks of this process may keep the pipe open
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class NSQServer:
    """A broker in a process of its own, on free ports of the loopback interface; a context manager.

    It has the same addresses after each start. Its messages are in files, so a broker that is killed has them after a
    restart. The process ends with the block, or with this process, however that ends.

    Args:
        folder: An existing folder for the data and the log of the broker. Leaving the block removes the data.
        options: Fields of `BrokerOptions`, `TopicSettings` and `Limits`, for example `{"msg_timeout_ms": 1000}`. The
            broker listens to TCP and HTTP only; its `sync` is `interval`, and it keeps all messages, if not set.
        process: A process that was created before; None: a new one.

    Attributes:
        folder: The folder.
        tcp_address, http_address: `host:port`.
    """

    def __init__(
        self, folder: Path, options: Mapping[str, Any] | None = None, *, process: ServerProcess | None = None
    ) -> None:
        self.folder: Path = Path(folder)
        self.tcp_address: str = ""
        self.http_address: str = ""
        self._options = options or {}
        self._process = process

    def __enter__(self) -> Self:
        """Start the broker. Raises ServerFailed."""
        self._process = self._process or ServerProcess()
        try:
            self.tcp_address, self.http_address = self._process.addresses
            self.start()
        except BaseException:
            self._process.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()
        shutil.rmtree(self.folder / "data", ignore_errors=True)

    @property
    def log(self) -> str:
        """The last lines of the broker's log."""
        try:
            return (self.folder / "broker.log").read_text(errors="replace")[-_LOG_CHARACTERS:]
        except FileNotFoundError:
            return ""

    @property
    def is_running(self) -> bool:
        """Whether the broker runs; one that hangs does."""
        return self._running.do("look")

    def start(self) -> None:
        """Start the broker after `stop` or `kill`. Does nothing if it runs. Raises ServerFailed."""
        if failure := self._running.start(self.folder, self._options):
            raise ServerFailed(f"the broker did not start: {failure}\n{self.log}")

    def stop(self) -> None:
        """Stop the broker gracefully: it saves its state and closes its connections."""
        self._running.do("stop")

    def kill(self) -> None:
        """Kill the broker (SIGKILL), also one that hangs. Until `start`, clients cannot connect."""
        self._running.do("kill")

    def restart(self) -> None:
        """Stop the broker gracefully unless it was killed, and start it with the same addresses and data.

        Raises ServerFailed.
        """
        self.stop()
        self.start()

    def hang(self) -> None:
        """Suspend the broker (SIGSTOP): its connections stay open, clients can connect, and it answers nothing."""
        self._running.do("hang")

    def resume(self) -> None:
        """Let a broker that hangs go on. Does nothing if it does not hang."""
        self._running.do("resume")

    @property
    def _running(self) -> ServerProcess:
        if self._process is None:
            raise RuntimeError("an NSQServer runs only inside its `with` block")
        return self._process
