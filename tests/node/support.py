"""Runs `qcli serve --processes` for tests."""

import http.client
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cli.support import Running, lines_until_ready, serving

PATIENCE_S = 60.0


class Node:
    """A running node.

    Attributes:
        folder: Its data folder.
        tcp, http, https: The shared addresses.
        processes: The addresses of each process, by `tcp_address` and `http_address`.
        lookupd: The HTTP address of its discovery service; empty without one.
    """

    def __init__(self, running: Running, folder: Path, addresses: dict[str, Any]) -> None:
        self.running = running
        self.folder = folder
        self.tcp: str = addresses["tcp_address"]
        self.http: str = addresses["http_address"]
        self.processes: list[dict[str, str]] = addresses["processes"]
        self.https: str = addresses["https_address"] or ""
        self.lookupd: str = addresses["lookupd_http_address"]

    @property
    def pids(self) -> list[int]:
        """The processes of the node that run, without the supervisor."""
        pid = self.running.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(each) for each in children.split()]

    def pid_of(self, index: int) -> int:
        """Return the PID of a process: the one that has locked its data folder. 0: none has."""
        return lock_holder(self.folder / f"process-{index}")

    def kill(self, index: int) -> int:
        """Kill a process with SIGKILL, and return its PID."""
        pid = self.pid_of(index)
        os.kill(pid, signal.SIGKILL)
        return pid

    def until_restarted(self, index: int, before: int) -> None:
        """Wait until another process has taken the place of one that ended, and serves clients."""

        def is_there() -> bool:
            return (
                self.pid_of(index) not in (0, before)
                and self.get("/ping", self.processes[index]["http_address"])[0] == 200
            )

        wait_until(is_there)

    def request(
        self, method: str, target: str, body: bytes = b"", *, at: str = "", token: str = ""
    ) -> tuple[int, bytes]:
        """Make a request to the shared address, or to another one; return status and body."""
        connection = http.client.HTTPConnection(at or self.http, timeout=PATIENCE_S)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            connection.request(method, target, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, target: str, at: str = "") -> tuple[int, bytes]:
        """GET from the shared address, or from another one."""
        return self.request("GET", target, at=at)

    def post(self, target: str, body: bytes = b"", at: str = "") -> tuple[int, bytes]:
        """POST to the shared address, or to another one."""
        return self.request("POST", target, body, at=at)

    def publish_at(self, index: int, topic: str, *bodies: str) -> None:
        """Publish to a process alone."""
        for body in bodies:
            answer = self.post(f"/pub?topic={topic}", body.encode(), self.processes[index]["http_address"])
            assert answer == (200, b"OK")

    def stats(self, index: int | None = None) -> dict[str, Any]:
        """Return the statistics: of the node, or of a process."""
        at = "" if index is None else self.processes[index]["http_address"]
        status, body = self.get("/stats?format=json", at)
        assert status == 200, body
        found: dict[str, Any] = json.loads(body)
        return found

    def channel(self, topic: str, channel: str, index: int | None = None) -> dict[str, Any]:
        """Return the statistics of a channel; empty if there is none."""
        for each in self.stats(index)["topics"] or ():
            for found in each["channels"]:
                if (each["topic_name"], found["channel_name"]) == (topic, channel):
                    return dict(found)
        return {}

    def stop(self) -> tuple[int, str]:
        """End it with SIGTERM; return the exit code and the log."""
        self.running.process.send_signal(signal.SIGTERM)
        result = self.running.end()
        return result.code, result.err


@contextmanager
def running_node(tmp_path: Path, count: int | str = 2, *flags: str) -> Iterator[Node]:
    """Run a node on free ports; at the end it is killed. Its data is in `tmp_path`."""
    addresses = tmp_path / "addresses.json"
    fixed = ("--processes", str(count), "--address-file", str(addresses), "--log-level", "warn")
    with serving(tmp_path, *fixed, *flags) as running:
        try:
            lines_until_ready(running)
        except EOFError:
            pytest.fail(running.end().err)
        node = Node(running, tmp_path / "data", json.loads(addresses.read_text()))
        pids = node.pids
        try:
            yield node
        finally:
            with suppress(FileNotFoundError):
                pids = [*pids, *node.pids]
            running.process.kill()
            wait_until(
                lambda: not any(map(is_alive, pids))
            )  # they would keep ports and folders of the next node


def lock_holder(folder: Path) -> int:
    """Return the PID of the process that has locked a folder; 0: none has."""
    status = folder.stat()
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino} "
    locks = Path("/proc/locks").read_text()
    found = re.findall(r"FLOCK\s+ADVISORY\s+WRITE\s+(\d+)\s+" + re.escape(place), locks)
    return int(found[0]) if found else 0


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a process that is suspended was sent a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)$", status, re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return _state_of(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def suspend(pid: int) -> None:
    """Suspend a process. Before that has taken effect, it may still accept a client, or get another signal."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _state_of(pid) == "T")


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with suppress(OSError, http.client.HTTPException):
            if condition():
                return
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
