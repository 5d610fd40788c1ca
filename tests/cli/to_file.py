"""Runs `qcli to-file` for tests, and waits for what it has written."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.support import DEADLINE_S, Cli, Running
from interop.peers import Broker


class Writing:
    """A running `qcli to-file`."""

    def __init__(self, running: Running, folder: Path) -> None:
        self.running = running
        self.folder = folder

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition on its files holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if self.running.process.poll() is not None:
                assert self.running.process.stderr is not None
                raise AssertionError(self.running.process.stderr.read().decode())
            assert time.monotonic() < deadline, list(self.folder.rglob("*"))
            time.sleep(0.02)  # another process writes them

    def until_lines(self, count: int, pattern: str = "*") -> None:
        """Wait until the files have so many line feeds."""
        self.until(lambda: sum(_lines(path) for path in self.folder.glob(pattern)) >= count)

    def send(self, number: signal.Signals) -> None:
        self.running.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """End it by a signal; return the exit code and what it wrote to stderr."""
        self.send(number)
        assert self.running.process.stderr is not None
        text = self.running.process.stderr.read().decode()
        return self.running.process.wait(DEADLINE_S), text


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@contextmanager
def to_file(qcli: Cli, topic: str, folder: Path, *args: str) -> Iterator[Writing]:
    """Run `qcli to-file TOPIC` into a folder; it is killed at the end of the block."""
    with qcli.running(
        "to-file", topic, "--output-dir", str(folder), "--filename-format", "<TOPIC><REV>.log", *args
    ) as (running):
        yield Writing(running, folder)


def depth_of(broker: Broker, topic: str, channel: str = "nsq_to_file") -> tuple[int, int]:
    """Return the depth of a channel, and its messages in flight; -1: it does not exist."""
    for found in json.loads(broker.http("GET", "/stats", format="json", topic=topic))["topics"] or ():
        for each in found["channels"] or ():
            if each["channel_name"] == channel:
                return each["depth"], each["in_flight_count"]
    return -1, -1
