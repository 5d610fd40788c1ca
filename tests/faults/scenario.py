"""A broker in the test's process, and clients that record the journal position at which they got each answer.

Time is the position in the journal of `RecordingFiles`: answers up to a position must hold after a power cut there.
"""

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import trio
import trio.testing

from broker.support import RawClient, connected, dpub, mpub, pub, settle, threads_done
from faults.ledger import ChannelName, Drop, Published, body_of
from trio_nsq.broker import BoundAddresses

HOUR_MS = 3_600_000
NEVER = 10**9
PROBE = "probe"
"""A first channel, created at the end, for a topic that has none."""
_TOPICS = ("one", "two")


async def http(address: str, method: str, path: str, body: bytes = b"", **query: str) -> tuple[int, bytes]:
    """Send an HTTP request; return the status and the body of the answer.

    It has a secret, for brokers with an auth server; others ignore it.
    """
    host, _, port = address.rpartition(":")
    parameters = "&".join(f"{name}={value}" for name, value in query.items())
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await stream.send_all(
            f"{method} {path}?{parameters} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Authorization: Bearer hush\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        answer = b"".join([part async for part in stream])
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), content


async def stats(address: str) -> dict[str, dict[str, Any]]:
    """Return the `/stats` of each topic, by name, with its channels by name."""
    _, content = await http(
        address, "GET", "/stats", format="json", include_clients="false", include_mem="false"
    )
    topics = {topic["topic_name"]: topic for topic in json.loads(content)["topics"]}
    for topic in topics.values():
        topic["channels"] = {channel["channel_name"]: channel for channel in topic["channels"]}
    return topics


@dataclass(slots=True)
class Request:
    """A request to create, delete, pause or unpause.

    Attributes:
        key: ("topic", NAME), ("channel", NAME) or ("paused", NAME); NAME is of a topic or a `ChannelName`.
        value: The requested state.
        sent, done: When it was sent, and when it was answered.
        refused: Whether it was refused, so that the running broker keeps its state.
    """

    key: tuple[str, Any]
    value: bool
    sent: int
    done: int = NEVER
    refused: bool = False


@dataclass
class Expectation:
    """The guarantees after a power cut at some moment.

    Attributes:
        may: Messages that may be delivered, by topic.
        must: Messages that must be delivered, by channel.
        must_not: Messages that were dropped permanently, by channel.
        together: Messages of which all or none must be delivered, if they were not finished.
        settings: The certain states of topics and channels.
        ids: The ids that were seen by then, with their messages.
        deferred: Messages that must not be delivered at once.
        had_channels: Topics that have, or may have, had a channel; messages of other topics wait for the
            first one.
    """

    may: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    must: dict[ChannelName, set[int]] = field(default_factory=dict)
    must_not: dict[ChannelName, set[int]] = field(default_factory=lambda: defaultdict(set))
    together: dict[ChannelName, list[set[int]]] = field(default_factory=dict)
    settings: dict[tuple[str, Any], bool] = field(default_factory=dict)
    ids: dict[bytes, int] = field(default_factory=dict)
    deferred: set[int] = field(default_factory=set)
    had_channels: set[str] = field(default_factory=set)

    def add(self, message: Published, *, promised: bool) -> None:
        """Also expect a message of a later run, in every channel that exists."""
        self.may[message.topic].add(message.number)
        if message.due_ns:
            self.deferred.add(message.number)
        if message.topic not in self.had_channels:
            self.must.setdefault(ChannelName(message.topic, PROBE), set())
        for name, numbers in self.must.items():
            if promised and name.topic == message.topic:
                numbers.add(message.number)


@dataclass
class Told:
    """The actions of the clients of one run of a broker, and the answers, with their times."""

    messages: list[Published] = field(default_factory=list)
    promised: dict[int, int] = field(default_factory=dict)
    """The moment from which each message must survive."""
    finished: dict[ChannelName, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """When the FIN was sent."""
    requests: list[Request] = field(default_factory=list)
    drops: dict[ChannelName, list[Drop]] = field(default_factory=lambda: defaultdict(list))
    since: dict[ChannelName, int] = field(default_factory=dict)
    """The moment from which a channel must get published messages; 0 for a topic's first channel."""
    ids: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Message and when it was seen."""
    refused: set[int] = field(default_factory=set)
    """Messages that the broker reported as not stored."""

    def keep_what_is_acknowledged(self) -> None:
        """Require every message from its OK on."""
        for message in self.messages:
            if message.acknowledged_ns is not None:
                self.promised[message.number] = message.acknowledged_ns

    def by(self, now: int, *, killed: bool = False) -> Expectation:
        """Return the guarantees after a power cut now, or after only the broker is killed."""
        if killed:
            told = replace(self, promised={})
            told.keep_what_is_acknowledged()
            return told.by(now)
        expected = Expectation()
        for request in self.requests:
            if request.done <= now:
                expected.settings[request.key] = request.value
            elif request.sent <= now:
                expected.settings.pop(request.key, None)
        for message in self.messages:
            if message.sent_ns <= now and message.number not in self.refused:
                expected.may[message.topic].add(message.number)
                if message.due_ns:
                    expected.deferred.add(message.number)
        for name, since in self.since.items():
            if expected.settings.get(("channel", name)):
                self._expect(expected, name, since, now)
        expected.had_channels = {
            request.key[1].topic
            for request in self.requests
            if request.key[0] == "channel" and request.sent <= now
        }
        for topic in expected.may.keys() - expected.had_channels:
            self._expect(expected, ChannelName(topic, PROBE), 0, now)
        expected.ids = {message_id: number for message_id, (number, seen) in self.ids.items() if seen <= now}
        return expected

    def _expect(self, expected: Expectation, name: ChannelName, since: int, now: int) -> None:
        drops = [drop for drop in self.drops[name] if drop.sent_ns <= now]
        done = [drop for drop in drops if drop.done_ns is not None and drop.done_ns <= now]
        must = expected.must[name] = set()
        commands: dict[int, set[int]] = defaultdict(set)
        for message in self.messages:
            if message.topic != name.topic or message.sent_ns > now:
                continue
            acknowledged = message.acknowledged_ns if message.acknowledged_ns is not None else NEVER
            if any(acknowledged < drop.sent_ns for drop in done):
                expected.must_not[name].add(message.number)
            dropped = any(drop not in done or message.sent_ns <= (drop.done_ns or 0) for drop in drops)
            if dropped or message.sent_ns < since or self.finished[name].get(message.number, NEVER) <= now:
                continue
            commands[message.command].add(message.number)
            if self.promised.get(message.number, NEVER) <= now:
                must.add(message.number)
        expected.together[name] = [numbers for numbers in commands.values() if len(numbers) > 1]


class HasPosition(Protocol):
    """Counts operations."""

    @property
    def position(self) -> int: ...


class Scenario:
    """Random use of a broker.

    Args:
        bound: The broker's addresses.
        files: Counts the operations on files.
        clock: Moves only by the scenario's steps.
        chance: The source of all random choices.
        first_number: The number of the first message.

    Attributes:
        refusals: Refused publishes, subscriptions and requests, with their texts; they are errors, unless
            `may_refuse`.
        may_refuse: The disk has faults.
    """

    def __init__(
        self,
        bound: BoundAddresses,
        files: "HasPosition",
        clock: trio.testing.MockClock,
        chance: random.Random,
        first_number: int = 0,
    ) -> None:
        self.told = Told()
        self.refusals: list[str] = []
        self.may_refuse = False
        assert bound.http_address is not None
        self._tcp, self._http = bound.tcp_address, bound.http_address
        self._files = files
        self._clock = clock
        self._chance = chance
        self._next_number = first_number
        self._commands = 0

    async def run(self, steps: int) -> None:
        """Run a number of operations in sequence; some of them by several clients at once."""
        actions = [self._publish] * 9 + [self._consume] * 4 + [self._let_time_pass] * 3 + [self._operate] * 4
        for _ in range(steps):
            await self._chance.choice(actions)()

    # ------------------------------------------------------------------ publishing

    async def _publish(self) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(self._chance.randint(1, 3)):
                nursery.start_soon(self.publish, self._chance.choice(_TOPICS))

    async def publish(self, topic: str) -> None:
        """Send one command from a new client; returns when it is answered."""
        kind = self._chance.choice(("pub", "dpub", "mpub", "mpub", "http"))
        messages = self._new(
            topic, self._chance.randint(2, 6) if kind == "mpub" else 1, deferred=kind == "dpub"
        )
        bodies = [body_of(message.number) for message in messages]
        made = Request(("topic", topic), True, self._files.position)
        if not self._value(made.key):
            self._note(made)
        if await self._send(kind, topic, bodies):
            made.done = self._files.position
            for message in messages:
                message.acknowledged_ns = self._files.position
        else:
            self.told.refused.update(message.number for message in messages)

    async def _send(self, kind: str, topic: str, bodies: list[bytes]) -> bool:
        """Publish messages; return whether the broker stored them."""
        if kind == "http":
            status, content = await http(self._http, "POST", "/pub", bodies[0], topic=topic)
            return status == 200 or self._refused(status, content)
        make: Callable[..., bytes] = {
            "pub": pub,
            "dpub": lambda topic, body: dpub(topic, HOUR_MS, body),
            "mpub": mpub,
        }[kind]
        async with connected(self._tcp) as client:
            await client.send(make(topic, *bodies))
            frame = await client.frame()
        return frame == (0, b"OK") or self._refused(503, frame[1] if frame is not None else b"nothing")

    def _refused(self, status: int, content: bytes) -> bool:
        """Return False if the refusal is allowed."""
        assert self.may_refuse, content
        assert status == 503, content
        self.refusals.append(content.decode())
        return False

    def _new(self, topic: str, count: int, *, deferred: bool) -> list[Published]:
        self._commands += 1
        new = [
            Published(self._next_number + n, topic, self._files.position, int(deferred), self._commands)
            for n in range(count)
        ]
        self._next_number += count
        self.told.messages += new
        return new

    # ------------------------------------------------------------------ consuming

    async def _consume(self) -> None:
        ready = [
            (ChannelName(topic, name), min(channel["depth"], self._chance.choice((3, 30))))
            for topic, described in (await stats(self._http)).items()
            for name, channel in described["channels"].items()
            if channel["depth"] and not channel["paused"]
        ]
        if not ready:
            return
        name, count = self._chance.choice(ready)
        async with connected(self._tcp) as client:
            await client.send(b"SUB %s %s\n" % (name.topic.encode(), name.channel.encode()))
            frame = await client.frame()
            if frame != (0, b"OK"):
                self._refused(503, frame[1] if frame is not None else b"nothing")
                return
            await client.send(b"RDY %d\n" % count)
            for _ in range(count):
                await self._answer(client, name)
            await client.send(b"CLS\n")
            while await client.frame() != (0, b"CLOSE_WAIT"):
                pass

    async def _answer(self, client: RawClient, name: ChannelName) -> None:
        message = await client.message()
        number = int(message.body[:9])
        assert message.body == body_of(number)
        assert self.told.ids.setdefault(message.id, (number, self._files.position))[0] == number
        kind = self._chance.random()
        if kind < 0.7:
            self.told.finished[name].setdefault(number, self._files.position)
            await client.send(b"FIN %s\n" % message.id)
        elif kind < 0.9:
            await client.send(b"REQ %s %d\n" % (message.id, self._chance.choice((0, HOUR_MS))))

    # ------------------------------------------------------------------ time and operators

    async def _let_time_pass(self) -> None:
        """Run checkpoints and scheduled syncs, at times to their end before the next operation."""
        self._clock.jump(1)
        if self._chance.random() < 0.5:
            await settle()

    async def _operate(self) -> None:
        name = ChannelName(self._chance.choice(_TOPICS), self._chance.choice("ab"))
        there = self._value(("channel", name))
        if not there:
            await self._make(name)
            return
        paused = self._value(("paused", name))
        topic_paused = self._value(("paused", name.topic))
        names = name._asdict()
        kinds = ["pause", "pause", "topic"]
        if not self.may_refuse:
            kinds.append("delete topic")
            if not topic_paused:  # otherwise messages wait in the topic, and get to the channel later
                kinds += ["empty", "delete channel"]
        match self._chance.choice(kinds):
            case "pause":
                path = "/channel/unpause" if paused else "/channel/pause"
                await self._ask(Request(("paused", name), not paused, self._files.position), path, **names)
            case "topic":
                path = "/topic/unpause" if topic_paused else "/topic/pause"
                request = Request(("paused", name.topic), not topic_paused, self._files.position)
                await self._ask(request, path, topic=name.topic)
            case "empty":
                await self._drop([name], None, "/channel/empty", **names)
            case "delete channel":
                await self._forget([name])
                gone = Request(("channel", name), False, self._files.position)
                await self._drop([name], gone, "/channel/delete", **names)
            case "delete topic":
                both = [ChannelName(name.topic, channel) for channel in "ab"]
                await self._forget(both, name.topic)
                gone = Request(("topic", name.topic), False, self._files.position)
                for channel in both:
                    self._note(Request(("channel", channel), False, self._files.position))
                await self._drop(both, gone, "/topic/delete", topic=name.topic)

    async def _forget(self, names: Iterable[ChannelName], topic: str | None = None) -> None:
        """Unpause first: a topic or channel created again under this name is not paused."""
        for key, path, query in [
            *((("paused", name), "/channel/unpause", name._asdict()) for name in names),
            *([(("paused", topic), "/topic/unpause", {"topic": topic})] if topic else []),
        ]:
            if self._value(key):
                await self._ask(Request(key, False, self._files.position), path, **query)

    def _value(self, key: tuple[str, Any]) -> bool:
        """Return the state after the last request that was not refused."""
        made = (request for request in reversed(self.told.requests) if not request.refused)
        return next((request.value for request in made if request.key == key), False)

    async def _make(self, name: ChannelName) -> None:
        first = not any(self._value(("channel", ChannelName(name.topic, other))) for other in "ab")
        request = Request(("topic", name.topic), True, self._files.position)
        if not await self._ask(request, "/topic/create", topic=name.topic):
            return
        request = Request(("channel", name), True, self._files.position)
        if await self._ask(request, "/channel/create", **name._asdict()):
            # The topic may have given its messages to an earlier channel.
            whole = first and not any(self.told.drops[ChannelName(name.topic, other)] for other in "ab")
            self.told.since[name] = 0 if whole else self._files.position

    async def settle_requests(self) -> None:
        """Check the effect of refused requests."""
        there = await stats(self._http)
        last = {request.key: request for request in self.told.requests}
        for key, request in last.items():
            if request.done == NEVER:
                now = self._files.position
                self._note(Request(key, is_so(there, key), now, now))
                if key[0] == "channel":
                    self.told.since.setdefault(key[1], now)

    def _note(self, request: Request) -> None:
        self.told.requests.append(request)

    async def _ask(self, request: Request | None, path: str, **query: Any) -> bool:
        """Return whether the request succeeded; if not, its effect is unknown."""
        if request is not None:
            self._note(request)
        status, content = await http(self._http, "POST", path, **query)
        if status != 200 and not self._refused(status, content):
            if request is not None:
                request.refused = True
            return False
        if request is not None:
            request.done = self._files.position
        return True

    async def _drop(
        self, names: Iterable[ChannelName], request: Request | None, path: str, **query: str
    ) -> None:
        drops = [Drop(self._files.position) for _ in names]
        for name, drop in zip(names, drops, strict=True):
            self.told.drops[name].append(drop)
        if await self._ask(request, path, **query):
            for drop in drops:
                drop.done_ns = self._files.position


# ---------------------------------------------------------------------- after a restart


@dataclass
class Found:
    """The messages of a broker after a restart.

    Attributes:
        topics: The result of `stats` directly after the start.
        at_once, later: Delivered messages by channel: those that were ready, and those two hours later.
        ids: Of all delivered messages.
        wrong: Errors that do not depend on the expectation.
    """

    topics: dict[str, dict[str, Any]]
    at_once: dict[ChannelName, list[int]] = field(default_factory=dict)
    later: dict[ChannelName, list[int]] = field(default_factory=dict)
    ids: dict[bytes, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


async def look(bound: BoundAddresses, clock: trio.testing.MockClock, new: dict[str, int]) -> Found:
    """Let a broker deliver all its messages, and a new one for every topic.

    Args:
        bound: The broker's addresses.
        clock: Is moved by two hours.
        new: The new messages' numbers, by topic.
    """
    assert bound.http_address is not None
    found = Found(await stats(bound.http_address))
    for topic, described in found.topics.items():
        if described["paused"]:
            await http(bound.http_address, "POST", "/topic/unpause", topic=topic)
        for channel, about in described["channels"].items():
            if about["paused"]:
                await http(bound.http_address, "POST", "/channel/unpause", topic=topic, channel=channel)
        if not described["channels"]:
            await http(bound.http_address, "POST", "/channel/create", topic=topic, channel=PROBE)
    async with connected(bound.tcp_address) as client:
        for topic, number in new.items():
            if topic in found.topics:
                await client.publish(topic, body_of(number))
    found.at_once = await _receive_all(bound, found)
    clock.jump(2 * HOUR_MS / 1000)  # the first broker's clock may have been ahead
    await settle()
    found.later = await _receive_all(bound, found)
    left = [
        f"{topic}/{name}: {channel}"
        for topic, described in (await stats(bound.http_address)).items()
        for name, channel in described["channels"].items()
        if channel["depth"] or channel["in_flight_count"] or channel["deferred_count"]
    ]
    found.wrong += [f"there is still something in {text}" for text in left]
    return found


async def _receive_all(bound: BoundAddresses, found: Found) -> dict[ChannelName, list[int]]:
    assert bound.http_address is not None
    received: dict[ChannelName, list[int]] = {}
    for topic, described in (await stats(bound.http_address)).items():
        for channel, about in described["channels"].items():
            received[ChannelName(topic, channel)] = []
            if about["depth"]:
                async with connected(bound.tcp_address) as client:
                    await _receive(client, ChannelName(topic, channel), found, received)
    return received


async def _receive(
    client: RawClient, name: ChannelName, found: Found, received: dict[ChannelName, list[int]]
) -> None:
    """Receive and finish all messages of a channel: fewer than its depth if some are damaged."""
    await client.subscribe(*name, ready_count=2500)
    silent = 0
    while silent < 2:  # the first answer may come before the messages
        await threads_done()  # the consumer reads them
        await client.send(b"TOUCH %s\n" % bytes(16).hex().encode()[:16])
        silent += 1
        while (frame := await client.frame()) is not None and frame[0] == 2:
            silent = 0
            message_id, body = frame[1][10:26], frame[1][26:]
            await client.send(b"FIN %s\n" % message_id)
            number = int(body[:9])
            received[name].append(number)
            if body != body_of(number):
                found.wrong.append(f"{name}: {body!r} came")
            if found.ids.setdefault(message_id, number) != number:
                found.wrong.append(f"id {message_id!r} is of {number} and {found.ids[message_id]}")
        assert frame is not None
        assert frame[1].startswith(b"E_TOUCH_FAILED"), frame
    await client.send(b"CLS\n")
    assert await client.frame() == (0, b"CLOSE_WAIT")


def is_so(topics: dict[str, dict[str, Any]], key: tuple[str, Any]) -> bool:
    """Return the stats value for the key of a `Request`."""
    kind, name = key
    if isinstance(name, ChannelName):
        about = topics.get(name.topic, {"channels": {}})["channels"].get(name.channel)
    else:
        about = topics.get(name)
    return about is not None and (kind != "paused" or bool(about["paused"]))


def judge(expected: Expectation, found: Found, new: dict[str, int]) -> list[str]:
    """Return the violated guarantees, as sentences."""
    wrong = found.wrong.copy()
    for key, value in expected.settings.items():
        if is_so(found.topics, key) != value:
            wrong.append(f"{key} is {not value}, was {value}")
    for name, at_once in found.at_once.items():
        came = at_once + found.later.get(name, [])
        complain = partial("{}: {} {}".format, name)
        wrong += [complain("twice:", number) for number in sorted({n for n in came if came.count(n) > 1})]
        allowed = expected.may[name.topic] | {new.get(name.topic, -1)}
        if made_up := set(came) - allowed:
            wrong.append(complain("never sent:", made_up))
        if back := set(came) & expected.must_not[name]:
            wrong.append(complain("dropped, and back:", back))
        if early := set(at_once) & expected.deferred:
            wrong.append(complain("early:", early))
        for numbers in expected.together.get(name, []):
            if not numbers <= set(came) and numbers & set(came):
                wrong.append(complain("a part of", numbers))
        if name.topic in new and new[name.topic] not in came:
            wrong.append(complain("the new message is lost:", new[name.topic]))
    for name, must in expected.must.items():
        if lost := must - set(found.at_once.get(name, [])) - set(found.later.get(name, [])):
            wrong.append(f"{name}: lost: {sorted(lost)}")
    for message_id, number in found.ids.items():
        if expected.ids.get(message_id, number) != number:
            wrong.append(f"id {message_id!r} was {expected.ids[message_id]}'s, is {number}'s")
    return wrong
