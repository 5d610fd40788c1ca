"""Run etcd for the tests, with one member or several."""

import json
import os
import signal
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interop.peers import Child, etcd_program, free_ports
from spark.support import until


@dataclass
class Member:
    """A member of etcd. It keeps its ports and its data when it is started again."""

    command: list[str | Path]
    port: int
    scheme: str = "http"
    child: Child | None = None

    @property
    def address(self) -> tuple[str, int]:
        return ("127.0.0.1", self.port)

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.child = Child(self.command)

    def kill(self) -> None:
        if self.child is not None:
            self.child.close()
            self.child = None

    def signal(self, number: int) -> None:
        assert self.child is not None
        os.kill(self.child.process.pid, number)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process, which keeps its sockets, until the end of the block."""
        self.signal(signal.SIGSTOP)
        assert self.child is not None
        tasks = Path(f"/proc/{self.child.process.pid}/task")
        until(lambda: all(_is_stopped(task) for task in tasks.iterdir()))
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Make a request to the gateway, as an administrator."""
        request = urllib.request.Request(f"{self.endpoint}{path}", json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.loads(answer.read())
        assert isinstance(found, dict)
        return found

    def status(self) -> dict[str, Any]:
        """Return what it says about itself and the others."""
        return self.ask("/v3/maintenance/status", {})

    def leads(self) -> bool:
        """Whether it leads the others, as it says."""
        status = self.status()
        return bool(status["header"]["member_id"] == status.get("leader"))

    def answers(self) -> bool:
        with suppress(OSError):
            self.ask("/v3/kv/range", {"key": "YQ=="})
            return True
        return False

    def remove(self, prefix: str) -> None:
        """Remove all keys with a prefix."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        self.ask("/v3/kv/deleterange", {"key": text(prefix), "range_end": text(end)})

    def revoke_leases(self) -> None:
        """End all leases, as an administrator may."""
        for lease in self.ask("/v3/lease/leases", {}).get("leases", ()):
            self.ask("/v3/lease/revoke", {"ID": lease["ID"]})


def _is_stopped(task: Path) -> bool:
    with suppress(FileNotFoundError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    return True  # the thread has ended


def text(key: str) -> str:
    """Return a key as the gateway wants it."""
    return b64encode(key.encode()).decode()


@contextmanager
def etcd(
    folder: Path, members: int = 1, *flags: str, scheme: str = "http", program: Path | None = None
) -> Iterator[list[Member]]:
    """Run etcd with its data below a folder."""
    program = program or etcd_program()
    ports = free_ports(2 * members)
    peers = ",".join(f"m{n}=http://127.0.0.1:{ports[2 * n + 1]}" for n in range(members))
    found = []
    for number in range(members):
        client, peer = ports[2 * number], ports[2 * number + 1]
        command: list[str | Path] = [
            program,
            f"--name=m{number}",
            f"--data-dir={folder / f'm{number}'}",
            f"--listen-client-urls={scheme}://127.0.0.1:{client}",
            f"--advertise-client-urls={scheme}://127.0.0.1:{client}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster={peers}",
            "--log-level=error",
            *flags,
        ]
        found.append(Member(command, client, scheme))
    try:
        for member in found:
            member.start()
        if scheme == "http":
            until(lambda: all(member.answers() for member in found))
        yield found
    finally:
        for member in found:
            if member.child is not None:
                with suppress(ProcessLookupError):
                    member.signal(signal.SIGCONT)
                member.kill()
