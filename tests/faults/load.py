"""Clients that load a broker with all kinds of requests, and record its answers in a ledger.

They work with this broker and with nsqd.
"""

import http.client
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from struct import unpack
from typing import Any

import trio

from broker.support import PATIENCE_S, dpub, identify, mpub, pub
from faults.ledger import MS, Act, ChannelName, Drop, Ledger, Published, Setting, body_of
from interop.peers import Broker

MSG_TIMEOUT_MS = 2000
TOPICS = ("one", "two", "three")
CHANNELS = ("a", "b")
_READY_COUNT = 300
_DRAIN_READY_COUNT = 2500
_DRAIN_S = 120
_RECEIVE_BYTES = 65536


class Gone(Exception):
    """The broker has closed the connection."""


class Client:
    """A connection that sends bytes and receives frames, many at a time.

    Attributes:
        emptied_ns: When everything that had been sent was last read: later frames were sent later.
        heard_ns: When data, or a heartbeat, was read last.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.emptied_ns = self.heard_ns = time.time_ns()
        self._next_emptied_ns = self.emptied_ns
        self._stream = stream
        self._buffer = b""

    async def send(self, data: bytes) -> None:
        """Send bytes unchanged. Raises Gone."""
        try:
            await self._stream.send_all(data)
        except trio.BrokenResourceError as exc:
            raise Gone from exc

    async def frames(self) -> list[tuple[int, bytes]]:
        """Receive the next frames (type, data), at least one, and answer heartbeats. Raises Gone.

        If cancelled, nothing is lost: the next call returns it.
        """
        while True:
            found, heartbeats = [], 0
            for frame in self._take_whole():
                if frame == (0, b"_heartbeat_"):
                    heartbeats += 1
                else:
                    found.append(frame)
            if heartbeats:
                with trio.CancelScope(shield=True):
                    await self.send(b"NOP\n" * heartbeats)
            if found:
                return found
            self.emptied_ns = self._next_emptied_ns
            try:
                data = await self._stream.receive_some(_RECEIVE_BYTES)
            except trio.BrokenResourceError as exc:
                raise Gone from exc
            if not data:
                raise Gone
            self.heard_ns = time.time_ns()
            if len(data) < _RECEIVE_BYTES:
                self._next_emptied_ns = self.heard_ns
            self._buffer += data

    def _take_whole(self) -> Iterator[tuple[int, bytes]]:
        offset = 0
        while len(self._buffer) - offset >= 8:
            size, frame_type = unpack(">ii", self._buffer[offset : offset + 8])
            if len(self._buffer) - offset < 4 + size:
                break
            yield frame_type, self._buffer[offset + 8 : offset + 4 + size]
            offset += 4 + size
        self._buffer = self._buffer[offset:]


@asynccontextmanager
async def connection(address: str, local_address: str | None = None) -> AsyncIterator[Client]:
    """Connect to `host:port`, from an address, and send the magic. Raises Gone if the connection is refused."""
    host, _, port = address.rpartition(":")
    try:
        stream = await trio.open_tcp_stream(host, int(port), local_address=local_address)
    except OSError as exc:
        raise Gone from exc
    async with stream:
        client = Client(stream)
        await client.send(b"  V2")
        yield client


class Load:
    """Producers, consumers and operators during one run of a broker.

    Args:
        broker: The broker.
        ledger: Records all answers.
        chance: The source of all random choices.
        operators: Whether channels are also paused, emptied, deleted and created.

    Attributes:
        ending: The broker is about to be stopped or killed: connections may end.
    """

    def __init__(self, broker: Broker, ledger: Ledger, chance: random.Random, *, operators: bool) -> None:
        self.ending = False
        self._broker = broker
        self._ledger = ledger
        self._chance = chance
        self._operators = operators

    async def run(self) -> None:
        """Run until the broker is gone."""
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(self._while_it_lives, self._publish)
            for name in self._ledger.channels:
                if name.topic in TOPICS:
                    nursery.start_soon(self._while_it_lives, partial(self._consume, name))
            if self._operators:
                nursery.start_soon(self._while_it_lives, self._operate)

    async def _while_it_lives(self, work: Callable[[], Any]) -> None:
        while not self.ending:
            try:
                await work()
            except Gone:
                assert self.ending or self._broker.process.poll() is not None, (
                    "the broker closed a connection for no reason; it said:\n"
                    + "\n".join(self._broker.log()[-20:])
                )

    # ------------------------------------------------------------------ publishers

    async def _publish(self) -> None:
        async with connection(self._broker.tcp_address) as client:
            while True:
                await self._publish_some(client)

    async def _publish_some(self, client: Client, topic: str = "", commands: int = 0) -> None:
        """Send a few commands at once, and wait for their answers."""
        sent = [
            self._command(topic or self._chance.choice(TOPICS))
            for _ in range(commands or self._chance.choice((1, 1, 1, 2, 5)))
        ]
        await client.send(b"".join(command for command, _ in sent))
        waiting = [messages for _, messages in sent]
        while waiting:
            for frame in await client.frames():
                if frame != (0, b"OK"):
                    assert self.ending, frame
                    assert b"exiting" in frame[1], frame
                    raise Gone
                self._ledger.acknowledge(waiting.pop(0), time.time_ns())

    def _command(self, topic: str) -> tuple[bytes, list[Published]]:
        kind = self._chance.random()
        send = partial(self._ledger.send, topic, sent_ns=time.time_ns())
        if kind < 0.15:
            defer_ms = self._chance.choice((20, 100, 500, 1500))
            messages = send(1, defer_ns=defer_ms * MS)
            return dpub(topic, defer_ms, body_of(messages[0].number)), messages
        if kind < 0.5:
            messages = send(1)
            return pub(topic, body_of(messages[0].number)), messages
        messages = send(self._chance.randint(1, 40))
        return mpub(topic, *[body_of(message.number) for message in messages]), messages

    # ------------------------------------------------------------------ consumers

    async def _consume(self, name: ChannelName) -> None:
        held: dict[bytes, int] = {}
        try:
            async with connection(self._broker.tcp_address) as client:
                await self._subscribe(client, name, _READY_COUNT)
                for _ in range(self._chance.choice((20, 1000, 10**9))):
                    await self._take(client, name, held, self._answer)
                # Some leave early, with messages in flight. After CLOSE_WAIT, all their answers have arrived:
                # closing a socket with unread data may destroy data sent before.
                await client.send(b"CLS\n")
                while await self._take(client, name, held, lambda *message: b""):
                    pass
        finally:
            self._ledger.depart(name, held.values(), time.time_ns())

    async def _subscribe(self, client: Client, name: ChannelName, ready_count: int) -> None:
        await client.send(
            identify(msg_timeout=MSG_TIMEOUT_MS) + b"SUB %s %s\n" % (name[0].encode(), name[1].encode())
        )
        answers: list[tuple[int, bytes]] = []
        while len(answers) < 2:
            answers += await client.frames()
        if answers != [(0, b"OK")] * 2:
            assert self.ending, answers
            raise Gone
        await client.send(b"RDY %d\n" % ready_count)

    async def _take(
        self,
        client: Client,
        name: ChannelName,
        held: dict[bytes, int],
        answer: Callable[[ChannelName, bytes, dict[bytes, int]], bytes],
    ) -> bool:
        """Receive some messages and answer them; `held` are the unanswered ones, number by id. False after CLS."""
        answers: list[bytes] = []
        open_for_more = True
        for frame_type, data in await client.frames():
            now_ns = time.time_ns()
            if frame_type == 2:
                stamp_ns, attempts, message_id = unpack(">qH16s", data[:26])
                number = self._ledger.deliver(
                    name,
                    data[26:],
                    message_id,
                    attempts,
                    stamp_ns,
                    sent_ns=client.emptied_ns,
                    at_ns=now_ns,
                )
                if number >= 0:
                    held[message_id] = number
                    answers.append(answer(name, message_id, held))
            elif data == b"CLOSE_WAIT":
                open_for_more = False
            else:
                self._note_refusal(name, frame_type, data, now_ns)
        if answers:
            await client.send(b"".join(answers))
        return open_for_more

    def _note_refusal(self, name: ChannelName, frame_type: int, data: bytes, now_ns: int) -> None:
        code, _, rest = data.partition(b" ")
        assert frame_type == 1, data
        assert code in (b"E_FIN_FAILED", b"E_REQ_FAILED", b"E_TOUCH_FAILED"), data
        number = self._ledger.number_of(name, rest.split()[1])
        self._ledger.answer(name, number, Act.REFUSED, now_ns)

    def _answer(self, name: ChannelName, message_id: bytes, held: dict[bytes, int]) -> bytes:
        """Return a consumer's answer to one message, usually FIN."""
        kind = self._chance.random()
        now_ns = time.time_ns()
        if kind < 0.02:
            return b""  # no answer: the message stays in flight until its timeout
        if kind < 0.05:
            return b"TOUCH %s\n" % message_id
        number = held.pop(message_id)
        if kind < 0.12:
            delay_ms = self._chance.choice((0, 0, 50, 1000))
            self._ledger.answer(name, number, Act.REQUEUED, now_ns, delay_ms * MS)
            return b"REQ %s %d\n" % (message_id, delay_ms)
        touched = b"TOUCH %s\n" % message_id if kind < 0.15 else b""
        self._ledger.answer(name, number, Act.FINISHED, now_ns)
        return touched + b"FIN %s\n" % message_id

    def _finish(self, name: ChannelName, message_id: bytes, held: dict[bytes, int]) -> bytes:
        self._ledger.answer(name, held.pop(message_id), Act.FINISHED, time.time_ns())
        return b"FIN %s\n" % message_id

    # ------------------------------------------------------------------ operators

    async def _ask(self, path: str, **names: str) -> None:
        """POST to the broker. Raises Gone."""
        try:
            await trio.to_thread.run_sync(partial(self._broker.http, "POST", path, **names))
        except (OSError, http.client.HTTPException) as exc:
            raise Gone from exc
        except RuntimeError as exc:
            if "EXITING" in str(exc) and self.ending:
                raise Gone from exc
            raise

    async def _settle(
        self, settings: dict[Any, Setting], key: Any, value: bool, path: str, **names: str
    ) -> None:
        """Request a setting, and record the answer."""
        setting = settings.setdefault(key, Setting(not value))
        setting.asked = value
        await self._ask(path, **names)
        setting.value, setting.asked = value, None

    async def make(self, name: ChannelName, *, whole: bool = True) -> None:
        """Create a channel and its topic. It must get later messages; a topic's first channel must get all."""
        topic = self._ledger.topics.get(name.topic)
        if topic is None or not topic.value:
            await self._settle(self._ledger.topics, name.topic, True, "/topic/create", topic=name.topic)
        paused = self._ledger.paused.setdefault(name, Setting(False))
        assert not paused.value
        await self._ask("/channel/create", topic=name.topic, channel=name.channel)
        self._ledger.channels.setdefault(name, 0 if whole else time.time_ns())

    async def _operate(self) -> None:
        """Create and delete topics, one after the other."""
        async with connection(self._broker.tcp_address) as client:
            while True:
                await self._one_topic(client)
                await trio.sleep(self._chance.uniform(0, 0.05))

    async def _one_topic(self, client: Client) -> None:
        name = ChannelName(f"passing{len(self._ledger.topics)}", "c")
        await self.make(name)
        await self._publish_some(client, name.topic, 6)
        names = name._asdict()
        match self._chance.choice(
            ("pause", "empty", "delete topic", "delete channel", "second channel", "keep")
        ):
            case "pause":
                await self._settle(self._ledger.paused, name, True, "/channel/pause", **names)
                if self._chance.random() < 0.5:
                    await self._settle(self._ledger.paused, name, False, "/channel/unpause", **names)
            case "empty":
                await self._drop(name, "/channel/empty", **names)
            case "delete topic":
                drop = self._begin_drop(name)
                await self._settle(self._ledger.topics, name.topic, False, "/topic/delete", topic=name.topic)
                drop.done_ns = time.time_ns()
                if self._chance.random() < 0.5:
                    return
                await self.make(name)  # a new topic with the old name
            case "delete channel":
                await self._drop(name, "/channel/delete", **names)
                await self.make(name)
            case "second channel":
                await self.make(ChannelName(name.topic, "d"), whole=False)
        await self._publish_some(client, name.topic, 3)

    def _begin_drop(self, name: ChannelName) -> Drop:
        drop = Drop(time.time_ns())
        self._ledger.drops[name].append(drop)
        return drop

    async def _drop(self, name: ChannelName, path: str, **names: str) -> None:
        drop = self._begin_drop(name)
        await self._ask(path, **names)
        drop.done_ns = time.time_ns()

    # ------------------------------------------------------------------ after a restart, and at the end

    async def check_settings(self) -> None:
        """Compare existing and paused topics with the ledger, and resolve its open requests."""
        stats = await self._stats()
        there = {topic["topic_name"]: topic for topic in stats["topics"]}
        for name, setting in self._ledger.topics.items():
            if not setting.allows(name in there):
                self._ledger.complain(f"topic {name} is {'there' if name in there else 'missing'}: {setting}")
            setting.value, setting.asked = name in there, None
        for channel_name in self._ledger.channels:
            if not self._ledger.topics[channel_name.topic].value:
                continue
            channels = {found["channel_name"]: found for found in there[channel_name.topic]["channels"]}
            if (found := channels.get(channel_name.channel)) is None:
                if not self._ledger.drops[channel_name]:
                    self._ledger.complain(f"{channel_name} is missing")
                continue
            paused = self._ledger.paused[channel_name]
            if not paused.allows(found["paused"]):
                self._ledger.complain(f"{channel_name}: paused is {found['paused']}: {paused}")
            paused.value, paused.asked = found["paused"], None

    async def _stats(self) -> dict[str, Any]:
        ask = partial(self._broker.http, "GET", "/stats", format="json", include_clients="false")
        stats: dict[str, Any] = json.loads(await trio.to_thread.run_sync(ask))
        return stats

    async def drain(self) -> None:
        """Let every channel deliver all its messages, and finish them."""
        stats = await self._stats()
        with trio.fail_after(_DRAIN_S):
            async with trio.open_nursery() as nursery:
                for topic in stats["topics"]:
                    for channel in topic["channels"]:
                        name = ChannelName(topic["topic_name"], channel["channel_name"])
                        if channel["paused"]:
                            await self._ask("/channel/unpause", **name._asdict())
                        nursery.start_soon(self._drain_one, name)
                while not await self._all_empty():
                    await trio.sleep(0.05)  # another process: only its answers show progress
                nursery.cancel_scope.cancel()

    async def _drain_one(self, name: ChannelName) -> None:
        async with connection(self._broker.tcp_address) as client:
            await self._subscribe(client, name, _DRAIN_READY_COUNT)
            held: dict[bytes, int] = {}
            while True:
                await self._take(client, name, held, self._finish)

    async def _all_empty(self) -> bool:
        stats = await self._stats()
        return not any(
            channel[kind]
            for topic in stats["topics"]
            for channel in topic["channels"]
            for kind in ("depth", "in_flight_count", "deferred_count")
        )


def mostly_short(chance: random.Random) -> float:
    """Duration of a run in seconds: often shorter than until the first checkpoint, sometimes for many of them."""
    return 3 if chance.random() < 0.25 else chance.uniform(0.1, 1.2)


async def live(
    broker: Broker, ledger: Ledger, chance: random.Random, life_s: float, *, operators: bool
) -> None:
    """Run a broker until SIGKILL: under full load, or shortly after a stop request."""
    load = Load(broker, ledger, chance, operators=operators)
    with trio.fail_after(life_s + 3 * PATIENCE_S):
        if operators:
            await load.check_settings()
        if not ledger.channels:
            for topic in TOPICS:
                for channel in CHANNELS:
                    await load.make(ChannelName(topic, channel))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            await trio.sleep(life_s)  # the moment is random: there is no condition to wait for
            load.ending = True
            if chance.random() < 0.2:
                broker.process.terminate()
                await trio.sleep(chance.uniform(0, 0.1))
            killed_ns = time.time_ns()
            broker.process.kill()
            await trio.to_thread.run_sync(broker.process.wait)
    ledger.kills.append(killed_ns)


async def run_and_kill(
    start: Callable[[], AbstractContextManager[Broker]],
    ledger: Ledger,
    kills: int,
    chance: random.Random,
    *,
    operators: bool,
    life_s: Callable[[random.Random], float] = mostly_short,
    killed_while_starting: Callable[[random.Random], None] | None = None,
) -> None:
    """Start and kill a broker repeatedly; then drain and stop it.

    Args:
        start: Runs it on the same data.
        ledger: Records all answers.
        kills: The number of kills.
        chance: The source of all random choices.
        operators: Whether channels are also paused, emptied, deleted and created.
        life_s: Returns the length of a life, in seconds.
        killed_while_starting: Starts a broker, and kills it before it is ready.
    """
    for _ in range(kills):
        if killed_while_starting is not None and ledger.kills and chance.random() < 0.2:
            killed_while_starting(chance)
        with start() as broker:
            await live(broker, ledger, chance, life_s(chance), operators=operators)
            complaints(broker, ledger)
    with start() as broker:
        load = Load(broker, ledger, chance, operators=operators)
        if operators:
            await load.check_settings()
        await load.drain()
        complaints(broker, ledger)


def complaints(broker: Broker, ledger: Ledger) -> None:
    """Record unexpected log lines of a broker."""
    for line in broker.log():
        if "Traceback" in line or "internal error" in line:
            ledger.complain("\n".join(broker.log()[-40:]))
            return
