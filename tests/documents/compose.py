"""Runs the services of a Compose file as processes on loopback: their commands, environments and health checks."""

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from interop.peers import Child, etcd_program, free_ports

PATIENCE_S = 120.0
_ADDRESS = re.compile(r"\b([a-z][a-z0-9]*|0\.0\.0\.0|127\.0\.0\.1):(\d+)\b")


class Compose:
    """The services of a Compose file. A port of a service is a free one here, a volume a folder.

    Args:
        services: As in the file.
        root: Gets the volumes.
    """

    def __init__(self, services: Mapping[str, Any], root: Path) -> None:
        self._services = services
        self._root = root
        self._ports: dict[tuple[str, str], int] = {}

    def port(self, service: str, port: str | int) -> int:
        """Return the port that stands for one in a container."""
        key = service, str(port)
        if key not in self._ports:
            (self._ports[key],) = free_ports(1)
        return self._ports[key]

    def here(self, service: str, text: str) -> str:
        """Return a word of a service's command, or a value of its environment, for a process on this machine."""

        def address(found: re.Match[str]) -> str:
            host, port = found.groups()
            return f"127.0.0.1:{self.port(host if host in self._services else service, port)}"

        text = _ADDRESS.sub(address, text)
        for mount in self._services[service].get("volumes", ()):
            volume, _, path = mount.partition(":")
            text = re.sub(rf"(^|=){re.escape(path)}$", rf"\g<1>{self._root / volume}", text)
        return re.sub(rf"=({'|'.join(self._services)})$", "=127.0.0.1", text)

    @contextmanager
    def running(self) -> Iterator[dict[str, Child]]:
        """Run all services until the end of the block."""
        with ExitStack() as stack:
            children: dict[str, Child] = {}
            for name, service in self._services.items():
                for mount in service.get("volumes", ()):
                    (self._root / mount.partition(":")[0]).mkdir(exist_ok=True)
                environment = {
                    key: self.here(name, value) for key, value in service.get("environment", {}).items()
                }
                command = [self.here(name, word) for word in service["command"]]
                if command[0] == "etcd":
                    # Of one member; the ports for others are in no Compose file.
                    peer = f"http://127.0.0.1:{self.port(name, 2380)}"
                    command[0] = str(etcd_program())
                    command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
                    command += [f"--initial-cluster=default={peer}"]
                else:
                    command = [sys.executable, "-m", "qcli", *command]
                children[name] = Child(command, environment)
                stack.callback(children[name].close)
            yield children

    def is_healthy(self, service: str) -> bool:
        """Run the health check of a service."""
        kind, program, *words = self._services[service]["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "python3")
        words = [self.here(service, word) for word in words]
        return subprocess.run([sys.executable, *words], capture_output=True, check=False).returncode == 0

    def get(self, service: str, port: int, path: str, body: bytes | None = None) -> Any:
        """Make an HTTP request, and return the JSON or the text of the answer; None: there is none."""
        url = f"http://127.0.0.1:{self.port(service, port)}{path}"
        try:
            with urllib.request.urlopen(url, body, timeout=30) as answer:
                content = answer.read().decode()
        except (OSError, urllib.error.HTTPError):
            return None
        return json.loads(content) if content.startswith(("{", "[")) else content


def until(holds: Callable[[], bool], children: Mapping[str, Child]) -> None:
    """Wait until something holds; fails if a process ends, with what it has said."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        for name, child in children.items():
            if child.process.poll() is not None:
                child.fail(f"{name} has ended")
        if time.monotonic() > deadline:
            list(children.values())[-1].fail("the services are not ready in time")
        time.sleep(0.1)
