"""Messages with keys: they are published and consumed while the broker is killed, and their order is checked.

A producer publishes messages with a key and their number within the key, in idempotent batches. Two consumers in one
process finish them, and return one in a thousand. A message may come again after a kill or a return. It is wrong if

- it comes before the previous one of its key has been delivered,
- it comes while another one of its key is in flight,
- it or a later one of its key was finished since the broker's last start,
- it never comes.
"""

import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path
from struct import Struct

from interop.peers import Broker, qcli_serve

ORDER_BY = "json:user.id"
TOPIC, CHANNEL = "orders", "ledger"
BATCH = 500
RDY = 2500
CONSUMERS = 2
_BODY = b'{"user":{"id":"%06d"},"n":%7d,"text":"%s"}'
_KEY_AT, _NUMBER_AT = 15, 28
_TEXT = b"x" * 60
_HEAD = Struct(">ii")
_FRAME_HEAD_BYTES = 34
_REFUSALS = (b"E_FIN_FAILED", b"E_REQ_FAILED")


@dataclass
class Ledger:
    """What was published and delivered, by key.

    Attributes:
        published: The number of messages that the broker has acknowledged.
        delivered: The highest number that was delivered.
        here, finished: The last number that was delivered, and finished, since the broker's last start.
        in_flight: The keys with a message in flight.
        refused: The number of answers that the broker refused, as of a message that was no longer in flight.
    """

    published: list[int]
    delivered: list[int]
    here: list[int]
    finished: list[int]
    in_flight: set[int] = field(default_factory=set)
    deliveries: int = 0
    again: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, keys: int) -> "Ledger":
        """Return an empty ledger."""
        return cls([0] * keys, [-1] * keys, [-1] * keys, [-1] * keys)

    def restarted(self) -> None:
        """All connections are lost: the broker was killed."""
        self.in_flight.clear()
        self.here = [-1] * len(self.here)
        self.finished = [-1] * len(self.finished)

    def deliver(self, key: int, number: int) -> None:
        """Check a delivery."""
        self.deliveries += 1
        last, here = self.delivered[key], self.here[key]
        self.here[key] = number
        if number > last + 1 or 0 <= here < number - 1:
            self.wrong.append(f"{key}: {number} came after {here} and {last}")
        elif number <= self.finished[key]:
            self.wrong.append(f"{key}: {number} came after {self.finished[key]} was finished")
        if key in self.in_flight:
            self.wrong.append(f"{key}: {number} came while another one was in flight")
        self.in_flight.add(key)
        if number <= last:
            self.again += 1
        else:
            self.delivered[key] = number

    @property
    def lost(self) -> int:
        """Number of acknowledged messages that were never delivered."""
        return sum(
            max(0, there - 1 - last) for there, last in zip(self.published, self.delivered, strict=True)
        )


class Consumer:
    """One connection.

    Attributes:
        count: The number of messages that have come.
        refused: The number of answers that the broker refused.
    """

    def __init__(self, address: str, ledger: Ledger | None, chance: random.Random) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10)
        self.socket.sendall(b"  V2SUB %s %s\nRDY %d\n" % (TOPIC.encode(), CHANNEL.encode(), RDY))
        self.count = self.refused = 0
        self._data = b""
        self._ledger = ledger
        self._chance = chance

    def receive(self) -> None:
        """Read, check and answer messages. Raises OSError: the connection is lost."""
        got = self.socket.recv(1 << 20)
        if not got:
            raise ConnectionResetError
        data = self._data + got
        at, end, answers = 0, len(data), list[bytes]()
        ledger, keys = self._ledger, list[int]()
        while end - at >= _HEAD.size:
            size, kind = _HEAD.unpack_from(data, at)
            after = at + 4 + size
            if after > end:
                break
            if kind == 2:
                message_id = data[at + 18 : at + _FRAME_HEAD_BYTES]
                answers.append(self._answer(message_id, data, at + _FRAME_HEAD_BYTES, keys))
            elif data[at + 8 : after] == b"_heartbeat_":
                answers.append(b"NOP\n")
            elif kind == 1 and data.startswith(_REFUSALS, at + 8):
                self.refused += 1
            elif kind == 1:
                raise RuntimeError(data[at + 8 : after])
            at = after
        self._data = data[at:]
        if answers:
            self.socket.sendall(b"".join(answers))
        if ledger is not None:
            ledger.in_flight.difference_update(keys)

    def _answer(self, message_id: bytes, data: bytes, at: int, keys: list[int]) -> bytes:
        self.count += 1
        ledger = self._ledger
        if ledger is None:
            return b"FIN %s\n" % message_id
        key, number = (
            int(data[at + _KEY_AT : at + _KEY_AT + 6]),
            int(data[at + _NUMBER_AT : at + _NUMBER_AT + 7]),
        )
        ledger.deliver(key, number)
        keys.append(key)
        if self._chance.random() < 0.001:
            return b"REQ %s %d\n" % (message_id, self._chance.choice((0, 0, 50)))
        ledger.finished[key] = number
        return b"FIN %s\n" % message_id


@contextmanager
def consumers(broker: Broker, ledger: Ledger | None, chance: random.Random) -> Iterator[list[Consumer]]:
    """Connect the consumers."""
    made: list[Consumer] = []
    try:
        for _ in range(CONSUMERS):
            made.append(Consumer(broker.tcp_address, ledger, chance))
        yield made
    finally:
        for each in made:
            each.socket.close()
            if ledger is not None:
                ledger.refused += each.refused


def consume(made: list[Consumer], until_s: float, is_over: Callable[[], bool]) -> None:
    """Consume until this time, or until it is over and nothing comes any more. Raises OSError: a connection is lost."""
    with selectors.DefaultSelector() as selector:
        for each in made:
            selector.register(each.socket, selectors.EVENT_READ, each)
        while time.monotonic() < until_s:
            ready = selector.select(0.2)
            for key, _ in ready:
                key.data.receive()
            if not ready and is_over():
                return


def batches(messages: int, keys: int, chance: random.Random) -> Iterator[tuple[list[int], bytes]]:
    """Yield the keys and the bodies of batches, the bodies as `/mpub` takes them in binary form."""
    numbers = [0] * keys
    for start in range(0, messages, BATCH):
        chosen = [chance.randrange(keys) for _ in range(min(BATCH, messages - start))]
        parts = []
        for key in chosen:
            body = _BODY % (key, numbers[key], _TEXT)
            numbers[key] += 1
            parts.append(len(body).to_bytes(4, "big") + body)
        yield chosen, len(parts).to_bytes(4, "big") + b"".join(parts)


class Producer(threading.Thread):
    """Publishes batches to the broker that runs."""

    def __init__(self, ledger: Ledger, messages: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._ledger = ledger
        self._batches = batches(messages, len(ledger.published), random.Random(seed))
        self.broker: Broker | None = None
        self.over = False

    def run(self) -> None:
        """Publish all batches, each exactly once."""
        for number, (chosen, body) in enumerate(self._batches):
            while not self._publish(body, number):
                time.sleep(0.02)
            for key in chosen:
                self._ledger.published[key] += 1
        self.over = True

    def _publish(self, body: bytes, number: int) -> bool:
        with suppress(OSError, HTTPException):
            if self.broker is not None:
                self.broker.post("/mpub", body, topic=TOPIC, binary="true", producer="p", number=number)
                return True
        return False


def under_kills(
    data_path: Path,
    flags: Sequence[str],
    *,
    messages: int,
    keys: int,
    kills: int,
    seed: int,
    life_s: tuple[float, float] = (1, 4),
) -> Ledger:
    """Publish and consume while the broker is killed; afterwards, consume all that is left."""
    ledger, chance = Ledger.of(keys), random.Random(seed)
    producer = Producer(ledger, messages, seed)
    for number in range(kills + 1):
        with qcli_serve(data_path, *flags) as broker:
            if not number:
                broker.create(TOPIC, CHANNEL)
                set_order(broker, ORDER_BY)
                producer.start()
            producer.broker = broker
            is_last = number == kills
            until_s = time.monotonic() + (600 if is_last else chance.uniform(*life_s))
            is_over = partial(is_drained, producer, broker) if is_last else lambda: False
            with consumers(broker, ledger, chance) as made:
                consume(made, until_s, is_over)
                if not is_last:
                    producer.broker = None
                    broker.process.kill()
                    broker.process.wait()
        ledger.restarted()
    return ledger


def is_drained(producer: Producer, broker: Broker) -> bool:
    """Whether all messages are published and finished."""
    return producer.over and broker.is_drained(TOPIC, CHANNEL)


def set_order(broker: Broker, order_by: str) -> None:
    """Set the order of the channel."""
    broker.put("/channel/settings", f'{{"order_by": "{order_by}"}}'.encode(), topic=TOPIC, channel=CHANNEL)
