"""Clients of a cluster, which record what they see in a ledger: through any member's address, with retries."""

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from struct import pack, unpack

import trio

from broker.support import dpub, identify, mpub, pub
from cluster.ledger import Attachment, Channel, Ledger, Producer
from cluster.members import Cluster
from faults.ledger import MS, body_of
from faults.load import Client, Gone, connection
from faults.scenario import http

_ANSWER_S = 4.0
"""How long a client waits before it tries another member."""
_RETRY_S = 0.05
_OPERATOR_S = 0.3
_READY_COUNT = 2000
_MOST_WAITING = 50_000
_HEARTBEAT_MS = 1000
_SILENCE_NS = 4 * _HEARTBEAT_MS * MS
_MSG_TIMEOUT_MS = 15 * 60_000
"""Longer than a test: no message is delivered again because its time is over."""


def short_body_of(number: int) -> bytes:
    """Return the body of a small message by its number, as `body_of` does for others."""
    return b"%09d small" % number


@dataclass(eq=False)
class _Turn:
    """Connections of the consumers of a channel, until they are to end."""

    ending: trio.Event = field(default_factory=trio.Event)
    attached: set[Attachment] = field(default_factory=set)


class Clients:
    """The clients.

    Args:
        cluster: The members.
        ledger: Records what the clients see.
        chance: The source of all random choices.
        pause_s: How long a publisher waits after an OK, so that a busy machine is not only busy with publishes.
        largest: The number of messages of a large batch.
    """

    def __init__(
        self, cluster: Cluster, ledger: Ledger, chance: random.Random, pause_s: float, largest: int
    ) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._chance = chance
        self._pause_s = pause_s
        self._largest = largest
        self._ending = trio.Event()
        self._publishing = 0
        self._turns: dict[Channel, _Turn] = {}

    # ------------------------------------------------------------------ publishers

    def end_publishing(self) -> None:
        """Let publishers end. Those that wait for an answer get it, or give up."""
        self._ending.set()
        self._ledger.notify()

    async def publishers_ended(self) -> None:
        await self._ledger.until(lambda: not self._publishing)

    async def publish(self, topic: str) -> None:
        """Publish single messages and batches, until `end_publishing`."""
        await self._publish(self._ledger.new_producer(topic), (1, 1, 2, self._largest))

    async def publish_much(self, topic: str) -> None:
        """Publish batches of many small messages, as fast as consumers get them, until `end_publishing`."""
        await self._publish(self._ledger.new_producer(topic, short_body_of), range(100, 201), _MOST_WAITING)

    async def _publish(
        self, producer: Producer, sizes: Sequence[int], most_waiting: float = math.inf
    ) -> None:
        self._publishing += 1
        try:
            while not self._ending.is_set():
                member, address = self._chance.choice(self._cluster.members), self._cluster.new_address()
                try:
                    async with connection(member.tcp_address, address) as client:
                        server = partial(self._cluster.server_of, member, address)
                        await self._publish_by(client, server, producer, sizes, most_waiting)
                except Gone:
                    await trio.sleep(_RETRY_S)
        finally:
            self._publishing -= 1
            self._ledger.notify()

    async def _publish_by(
        self,
        client: Client,
        server: Callable[[], str],
        producer: Producer,
        sizes: Sequence[int],
        most_waiting: float,
    ) -> None:
        for _ in range(self._chance.choice((5, 50, 1000))):
            await self._ledger.until(
                lambda: self._ending.is_set() or self._ledger.waiting_in(producer.topic) <= most_waiting
            )
            if self._ending.is_set():
                return
            numbers = producer.take(self._chance.choice(sizes))
            bodies = [producer.body(number) for number in numbers]
            command = mpub(producer.topic, *bodies)
            if len(bodies) == 1:
                defer_ms = self._chance.choice((0, 0, 0, 500))
                command = pub(producer.topic, bodies[0])
                if defer_ms:
                    command = dpub(producer.topic, defer_ms, bodies[0])
            sent_s = time.monotonic()
            with trio.move_on_after(_ANSWER_S):
                await client.send(command)
                (frame,) = await client.frames()
                if frame == (0, b"OK"):
                    producer.acknowledge(numbers, sent_s, server)
                    await trio.sleep(self._pause_s)
                    continue
                self._ledger.refusals[frame[1].decode(errors="replace")] += 1
                await trio.sleep(_RETRY_S)
                continue
            return  # no answer

    async def publish_once(self, topic: str, name: str) -> None:
        """Publish numbered batches over HTTP, each again until it is acknowledged, until `end_publishing`.

        The messages keep their numbers, so the ledger finds each one that is stored twice.
        """
        producer = self._ledger.new_producer(topic)
        self._publishing += 1
        try:
            batch = 0
            while not self._ending.is_set():
                batch += 1
                numbers = producer.take(3)
                bodies = [body_of(number) for number in numbers]
                content = pack(">i", len(bodies)) + b"".join(pack(">i", len(body)) + body for body in bodies)
                while not await self._send_once(producer, name, batch, numbers, content):
                    await trio.sleep(_RETRY_S)
                await trio.sleep(self._pause_s)
        finally:
            self._publishing -= 1
            self._ledger.notify()

    async def _send_once(
        self, producer: Producer, name: str, batch: int, numbers: range, content: bytes
    ) -> bool:
        member = self._chance.choice(self._cluster.members)
        sent_s = time.monotonic()
        with trio.move_on_after(_ANSWER_S):
            try:
                status, answer = await http(
                    member.http_address, "POST", "/mpub", content,
                    topic=producer.topic, binary="true", producer=name, number=str(batch),
                )  # fmt: skip
            except (OSError, trio.BrokenResourceError, IndexError, ValueError):
                return False  # there is no answer, or a part of one
            if status == 200:
                producer.acknowledge(numbers, sent_s, str)
                return True
            self._ledger.refusals[answer.decode(errors="replace")] += 1
        return False

    # ------------------------------------------------------------------ operators

    async def operate(self) -> None:
        """Create topics, and delete most of them, until `end_publishing`."""
        topics = self._ledger.topics
        self._publishing += 1
        try:
            for number in itertools.count():
                if self._ending.is_set():
                    return
                await self._decide(f"made{number}", "/topic/create", exists=True)
                # A request to create it that was not answered may still be carried out.
                if topics.get(f"made{number - 3}") and self._chance.random() < 0.8:
                    await self._decide(f"made{number - 3}", "/topic/delete", exists=False)
                await trio.sleep(_OPERATOR_S)
        finally:
            self._publishing -= 1
            self._ledger.notify()

    async def _decide(self, topic: str, path: str, *, exists: bool) -> None:
        self._ledger.topics[topic] = None
        member = self._chance.choice(self._cluster.members)
        with trio.move_on_after(_ANSWER_S):
            try:
                status, answer = await http(member.http_address, "POST", path, topic=topic)
            except (OSError, trio.BrokenResourceError, IndexError, ValueError):
                await trio.sleep(_RETRY_S)
                return
            if status == 200:
                self._ledger.topics[topic] = exists
            else:
                self._ledger.refusals[answer.decode(errors="replace")] += 1

    # ------------------------------------------------------------------ consumers

    async def consume(self, channel: Channel) -> None:
        """Finish all messages of a channel, until cancelled."""
        while True:
            member = self._chance.choice(self._cluster.members)
            turn = self._turns.setdefault(channel, _Turn())
            address = self._cluster.new_address()
            by = Attachment(partial(self._cluster.server_of, member, address))
            turn.attached.add(by)
            try:
                async with connection(member.tcp_address, address) as client:
                    await self._consume_by(client, channel, by, turn.ending)
            except Gone:
                await trio.sleep(_RETRY_S)
            finally:
                by.ended_s = time.monotonic()
                self._ledger.notify()

    async def leave(self, channel: Channel) -> set[Attachment]:
        """Let all consumers of a channel close their connections, and connect again; returns those that could."""
        turn = self._turns.pop(channel)
        turn.ending.set()
        await self._ledger.until(lambda: all(each.ended_s is not None for each in turn.attached))
        return {each for each in turn.attached if each.read_until_s}

    async def _consume_by(self, client: Client, channel: Channel, by: Attachment, ending: trio.Event) -> None:
        words = b"SUB %s %s\nRDY %d\n" % (channel.topic.encode(), channel.name.encode(), _READY_COUNT)
        hello = identify(msg_timeout=_MSG_TIMEOUT_MS, heartbeat_interval=_HEARTBEAT_MS)
        await client.send(hello + words)
        closing_s = 0.0
        while True:
            frames: list[tuple[int, bytes]] = []
            with trio.move_on_after(_HEARTBEAT_MS / 4000):
                frames = await client.frames()
            answers: list[bytes] = []
            for frame_type, data in frames:
                if frame_type == 2:
                    answers.append(self._answer(channel, data, by))
                elif data == b"CLOSE_WAIT":
                    by.read_until_s = closing_s
                elif frame_type == 1:
                    self._ledger.refusals[data.decode(errors="replace")] += 1
                    raise Gone
            if answers:
                self._ledger.delivered(by, len(answers))
                await client.send(b"".join(answers))
            if by.read_until_s:
                return
            if ending.is_set() and not closing_s:
                closing_s = time.monotonic()
                await client.send(b"CLS\n")
            if time.time_ns() - client.heard_ns > _SILENCE_NS:
                raise Gone

    def _answer(self, channel: Channel, data: bytes, by: Attachment) -> bytes:
        stamp_ns, attempts, message_id = unpack(">qH16s", data[:26])
        number = channel.deliver(data[26:], message_id, attempts, stamp_ns, by)
        if number >= 0 and attempts == 1 and self._chance.random() < 0.01:
            channel.requeue(number)
            return b"REQ %s 0\n" % message_id
        if number >= 0:
            channel.finish(number)
        return b"FIN %s\n" % message_id
