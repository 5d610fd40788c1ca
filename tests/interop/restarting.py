"""A broker in a process that can be killed and started again at the same address."""

import json
from contextlib import ExitStack
from pathlib import Path

from interop.peers import Broker, qcli_serve


class Restarting:
    """Attributes:
    broker: The last process.
    address: `host:port` of all of them.
    """

    def __init__(self, path: Path, stack: ExitStack, *flags: str) -> None:
        self._path = path
        self._stack = stack
        self._flags = flags
        self.broker: Broker = stack.enter_context(qcli_serve(path, *flags))
        self.address = self.broker.tcp_address

    def kill(self) -> None:
        """Kill the broker; returns when the process has ended."""
        self.broker.process.kill()
        self.broker.process.wait()

    def start(self) -> None:
        """Start it again, with its data."""
        opening = qcli_serve(self._path, f"--tcp-address={self.address}", *self._flags)
        self.broker = self._stack.enter_context(opening)

    def stored(self, topic: str) -> list[str]:
        """Return the bodies in the log of a topic, in order; empty without the topic."""
        try:
            answer = self.broker.http("GET", "/topic/read", topic=topic)
        except RuntimeError as error:
            if "TOPIC_NOT_FOUND" in str(error):
                return []
            raise
        return [json.loads(line)["body"] for line in answer.decode().splitlines()]
