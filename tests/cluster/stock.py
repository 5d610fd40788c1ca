"""Clients of others, unchanged: go-nsq and pynsq publish through all members, and consume by a discovery service."""

import base64
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import trio

from interop.peers import Broker, Child, load_program, nsq_program, qcli_lookupd

TOPIC = "stock"
_RUNS_S = 24 * 3600


class StockPublisher:
    """A program that publishes each message until a member has accepted it.

    Attributes:
        acknowledged: The messages.
    """

    def __init__(self, name: str, child: Child) -> None:
        self.name = name
        self.acknowledged: list[bytes] = []
        self._child = child

    async def run(self, pause_s: float) -> None:
        """Publish until cancelled."""
        number = 0
        while True:
            number += 1
            body = f"{self.name} {number}".encode()
            self._child.stdin.write(base64.b64encode(body) + b"\n")
            self._child.stdin.flush()
            line = await trio.to_thread.run_sync(self._answer, abandon_on_cancel=True)
            json.loads(line)
            self.acknowledged.append(body)
            await trio.sleep(pause_s)

    def _answer(self) -> str:
        line = self._child.stdout.next(time.monotonic() + _RUNS_S)
        if line is None:
            self._child.fail("ended")
        return line


class StockClients:
    """Publishers and consumers of one topic, and their discovery service."""

    def __init__(self, lookupd: Broker, stack: ExitStack) -> None:
        self.lookupd = lookupd
        self.publishers: list[StockPublisher] = []
        self.consumers: dict[str, Child] = {}
        self._stack = stack

    @property
    def flags(self) -> list[str]:
        """The options of members."""
        return [f"--lookupd-tcp-address={self.lookupd.tcp_address}"]

    def start(self, addresses: list[str], poll_s: int) -> None:
        """Start publishers of members, which must run, and consumers that ask for brokers at an interval."""
        common = [f"--addr={','.join(addresses)}", f"--topic={TOPIC}", f"--timeout={_RUNS_S}"]
        publishers: dict[str, list[str | Path]] = {
            "go-nsq": [load_program("gopeer"), "fail-over", *common],
            "pynsq": [sys.executable, "-m", "interop.pynsq_peer", "fail-over", *common],
        }
        for name, command in publishers.items():
            self.publishers.append(StockPublisher(name, self._child(command)))
        consumers: dict[str, list[str | Path]] = {
            "go-nsq": [
                nsq_program("nsq_tail"),
                f"-topic={TOPIC}",
                "-channel=go-nsq",
                f"-lookupd-http-address={self.lookupd.http_address}",
                f"-consumer-opt=lookupd_poll_interval,{poll_s}s",
            ],
            "pynsq": [
                *(sys.executable, "-m", "cluster.pynsq_tail"),
                *(self.lookupd.http_address, TOPIC, "pynsq", f"{poll_s}"),
            ],
        }
        for name, command in consumers.items():
            self.consumers[name] = self._child(command)

    def _child(self, command: list[str | Path]) -> Child:
        child = Child(command)
        self._stack.callback(child.close)
        return child

    def missing(self) -> dict[str, set[bytes]]:
        """Return the acknowledged messages that each consumer has not got; fails if a consumer has ended."""
        for child in self.consumers.values():
            if child.process.poll() is not None:
                child.fail("ended")
        acknowledged = {body for publisher in self.publishers for body in publisher.acknowledged}
        return {
            name: acknowledged - {line.encode() for line in child.stdout.seen}
            for name, child in self.consumers.items()
        }

    def described(self) -> str:
        acknowledged = {publisher.name: len(publisher.acknowledged) for publisher in self.publishers}
        missing = {name: (len(bodies), sorted(bodies)[:5]) for name, bodies in self.missing().items()}
        return f"acknowledged {acknowledged}, missing {missing}"


@contextmanager
def stock_clients() -> Iterator[StockClients]:
    """Run a discovery service; the clients are started later, and killed at the end."""
    with qcli_lookupd() as lookupd, ExitStack() as stack:
        yield StockClients(lookupd, stack)
