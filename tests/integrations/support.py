"""What the tests of frameworks share: patience, worker processes, and the ledgers that these write."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 60.0


def until(holds: Callable[[], bool]) -> None:
    """Wait until this is true; fail after a minute."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Ledger:
    """A file to which worker processes append lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[str]:
        """Return the complete lines so far."""
        text = self.path.read_text() if self.path.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    def wait_for(self, *lines: str) -> None:
        """Wait until it has each of these lines at least once."""
        wanted = set(lines)
        until(lambda: wanted <= set(self.lines()))


class Worker:
    """A process and its children, as a group of their own; their output is in a file."""

    def __init__(self, module: str, *words: str, env: Mapping[str, str], output: Path) -> None:
        self._output = output
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill all of them at once."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # they have ended
        self.process.wait()

    def stop(self) -> int:
        """Send SIGTERM to the first process and return its exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def output(self) -> str:
        return self._output.read_text()


@contextmanager
def running(module: str, *words: str, env: Mapping[str, str], output: Path) -> Iterator[Worker]:
    """Run a module with the tests' import path until the block exits, which kills what is left of it."""
    worker = Worker(module, *words, env=env, output=output)
    try:
        yield worker
    finally:
        worker.kill()
