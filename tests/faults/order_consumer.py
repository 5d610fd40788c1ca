"""A consumer process for `order_operations`: `python -m faults.order_consumer TOPIC CHANNEL SEED ADDRESS...`.

It consumes from all addresses, answers each message after a few milliseconds, and writes what happens to stdout, a line
each, before it answers: kind, monotonic nanoseconds, number of the connection, key, number of the message.

| kind | meaning |
|---|---|
| `D` | a message was delivered |
| `F`, `R`, `W` | it will be finished, requeued, requeued with a delay |
| `E` | the broker has not accepted the answer: the message was not in flight |
| `X` | the connection is lost or closed |

A process that was suspended closes its connections, and looks at nothing that has come meanwhile: others may have it.
"""

import json
import os
import random
import selectors
import socket
import sys
import time
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from struct import Struct

RDY = 30
MSG_TIMEOUT_S = 3.0
SUSPENDED_S = 1.0
POISON = 211
"""One in so many messages of a key is always requeued."""
_HEAD = Struct(">ii")
_numbers = count(1)


class Suspended(Exception):
    """The process did not run for a while."""


class Connection:
    """One connection, and the answers that are due later."""

    def __init__(self, address: str, topic: str, channel: str, chance: random.Random) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=5)
        self.number = next(_numbers)
        self._chance, self._data = chance, b""
        self._due: list[tuple[float, bytes, int, int]] = []
        self._sent: dict[bytes, tuple[int, int]] = {}  # answered messages by id
        identify = json.dumps({"msg_timeout": int(MSG_TIMEOUT_S * 1000)}).encode()
        self.socket.sendall(
            b"  V2IDENTIFY\n%s%sSUB %s %s\nRDY %d\n"
            % (len(identify).to_bytes(4, "big"), identify, topic.encode(), channel.encode(), RDY)
        )

    @property
    def next_s(self) -> float | None:
        return self._due[0][0] if self._due else None

    def tell(self, kind: str, key: int = 0, number: int = 0) -> None:
        os.write(1, b"%s %d %d %d %d\n" % (kind.encode(), time.monotonic_ns(), self.number, key, number))

    def receive(self, begun_s: float) -> None:
        """Read messages. Raises OSError: the connection is lost; Suspended: what was read may be old."""
        got = self.socket.recv(1 << 16)
        if not got:
            raise ConnectionResetError
        now_s = time.monotonic()
        if now_s - begun_s > SUSPENDED_S:
            raise Suspended
        data, at = self._data + got, 0
        while len(data) - at >= _HEAD.size:
            size, kind = _HEAD.unpack_from(data, at)
            if (after := at + 4 + size) > len(data):
                break
            if kind == 2:
                body = json.loads(data[at + 34 : after])
                self.tell("D", body["k"], body["n"])
                due_s = now_s + self._chance.choice((0, 0, 0.003, 0.01, 0.03))
                heappush(self._due, (due_s, data[at + 18 : at + 34], body["k"], body["n"]))
            elif kind == 1:
                words = data[at + 8 : after].split()
                if words[0] not in (b"E_FIN_FAILED", b"E_REQ_FAILED"):
                    raise ConnectionResetError
                self.tell("E", *self._sent[words[2]])
            elif data[at + 8 : after] == b"_heartbeat_":
                self.socket.sendall(b"NOP\n")
            at = after
        self._data = data[at:]

    def answer(self, begun_s: float) -> None:
        """Send the answers that are due. Raises as `receive`."""
        while self._due and self._due[0][0] <= begun_s:
            _, message_id, key, number = heappop(self._due)
            self._sent[message_id] = key, number
            kind, line = "F", b"FIN %s\n"
            if number % POISON == POISON // 2 or self._chance.random() < 0.02:
                kind, line = "R", b"REQ %s 0\n"
            elif self._chance.random() < 0.01:
                kind, line = "W", b"REQ %%s %d\n" % self._chance.randrange(50, 300)
            if time.monotonic() - begun_s > SUSPENDED_S:
                raise Suspended
            self.tell(kind, key, number)
            self.socket.sendall(line % message_id)


def main() -> None:
    """Consume until killed."""
    topic, channel, seed, *addresses = sys.argv[1:]
    chance = random.Random(seed)
    connections: dict[str, Connection] = {}
    while True:
        begun_s = time.monotonic()
        for address in addresses:
            if address not in connections:
                with suppress(OSError):
                    connections[address] = Connection(address, topic, channel, chance)
        with selectors.DefaultSelector() as selector:
            for address, connection in connections.items():
                selector.register(connection.socket, selectors.EVENT_READ, address)
            due = [each.next_s for each in connections.values() if each.next_s is not None]
            ready = selector.select(min([0.05, *(max(0.0, at_s - time.monotonic()) for at_s in due)]))
        readable = {key.data for key, _ in ready}
        for address, connection in list(connections.items()):
            try:
                now_s = time.monotonic()
                if now_s - begun_s > SUSPENDED_S:
                    raise Suspended
                if address in readable:
                    connection.receive(now_s)
                connection.answer(now_s)
            except (OSError, Suspended):
                connection.tell("X")  # before another consumer can get its messages
                connection.socket.close()
                del connections[address]


if __name__ == "__main__":
    main()
