"""What the tests of the programs in examples/ share."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 60.0


class Program:
    """A program of examples/ in a process that can be killed and started again."""

    def __init__(
        self, *arguments: str, output: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """Start it: the name of the file, or options of Python, and the arguments. A file gets what it prints."""
        self._arguments = arguments
        self._output = output
        self._env = {**os.environ, **(env or {})}
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self._output or os.devnull, "ab") as output:
            return subprocess.Popen(
                [sys.executable, *self._arguments], cwd=EXAMPLES, env=self._env, stdout=output
            )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self._process = self._start()

    def stop(self) -> int:
        """Stop it in order, with SIGTERM; return its exit code."""
        self._process.terminate()
        return self._process.wait(PATIENCE_S)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "nothing happened for 60 s"
        time.sleep(0.01)
