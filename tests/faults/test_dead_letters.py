"""Tests for dead letters with a power cut or a kill of the broker at any moment: each message is there once.

A broker whose consumers fail is used at random while all operations on its files are recorded. Then another
broker is started on a possible state after a crash or a power cut. Every acknowledged message that was
neither finished nor dropped by then must be either in its channel or a dead letter, never both and never
twice. `FAULT_COMPLETE=1` tries every moment, `FAULT_SEED` chooses another scenario, `FAULT_KILLS` is the
number of kills of a real process.
"""

import base64
import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from broker.support import PATIENCE_S, RawClient, connected, mpub, running_broker, settle
from faults.disk import Disk, Image, Operation, RecordingFiles, disk_at, write_image
from faults.ledger import body_of
from faults.load import Gone, connection
from faults.power_cut import numbers_in
from faults.scenario import NEVER, http, stats
from interop.peers import Broker, qcli_serve
from log.support import HastyFiles
from trio_nsq.broker import BoundAddresses
from trio_nsq.broker.storage.data_folder import decode_state
from trio_nsq.log import Files

SEED = int(os.environ.get("FAULT_SEED", "7"))
COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
KILLS = int(os.environ.get("FAULT_KILLS", "2"))
STEPS = 120 if COMPLETE else 35
CUTS = 4
_SOURCES = ("one", "two")
_CHANNEL, _DEAD = "c", "dead"


@dataclass
class Fate:
    """The history of a message, as positions in the journal.

    Attributes:
        topic: The topic of its publish.
        sent, acknowledged: Its publish.
        synced: When it was certainly on stable storage.
        finished: When the first FIN was sent.
        dropped: When dropping it was requested, and when that was answered.
        requeued: The same for each requeue of its dead letter.
    """

    topic: str
    sent: int
    acknowledged: int = NEVER
    synced: int = NEVER
    finished: int = NEVER
    dropped: tuple[int, int] = (NEVER, NEVER)
    requeued: list[tuple[int, int]] = field(default_factory=list)

    def copies(self, now: int, stored: int) -> range:
        """Return the allowed numbers of copies if the broker ends now; `stored`: from when it must have the
        message.
        """
        if self.sent > now or self.dropped[1] <= now:
            return range(1)
        least = stored <= now and self.finished > now and self.dropped[0] > now
        # Only a requeue may leave two copies: see docs/how-to/dead-letters.md.
        most = 1 + sum(sent <= now < done for sent, done in self.requeued)
        return range(int(least), most + 1)


class SlowLetters(RecordingFiles):
    """Files in which operations on the dead-letter topic are slow, so that other operations happen meanwhile."""

    def sync(self, fd: int) -> None:
        if f"{_DEAD}.topic" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            time.sleep(0.008)
        super().sync(fd)


class Scenario:
    """Random use of a broker by consumers who fail often, and an operator of their dead letters."""

    def __init__(
        self,
        bound: BoundAddresses,
        files: RecordingFiles,
        clock: trio.testing.MockClock,
        chance: random.Random,
    ) -> None:
        assert bound.http_address is not None
        self.fates: dict[int, Fate] = {}
        self.buried = 0
        self._tcp, self._http = bound.tcp_address, bound.http_address
        self._files, self._clock, self._chance = files, clock, chance

    async def run(self, steps: int) -> None:
        """Run this many operations in sequence; the broker's own tasks may run meanwhile."""
        for topic in _SOURCES:
            await http(self._http, "POST", "/topic/create", topic=topic)
            await http(self._http, "POST", "/channel/create", topic=topic, channel=_CHANNEL)
            await self._set(topic, 2)
        actions = [self._publish] * 4 + [self._consume] * 7 + [self._let_time_pass] * 4
        actions += [self._operate] * 2 + [self._change] + [settle]
        for _ in range(steps):
            await self._chance.choice(actions)()
        await self._operate()

    async def _set(self, topic: str, max_attempts: int) -> None:
        changes = json.dumps({"max_attempts": max_attempts, "dead_letter_topic": _DEAD}).encode()
        status, _ = await http(self._http, "PUT", "/channel/settings", changes, topic=topic, channel=_CHANNEL)
        assert status == 200

    async def _change(self) -> None:
        await self._set(self._chance.choice(_SOURCES), self._chance.randint(1, 3))

    async def _publish(self) -> None:
        topic, start = self._chance.choice(_SOURCES), len(self.fates)
        numbers = range(start, start + self._chance.randint(1, 6))
        self.fates |= {number: Fate(topic, self._files.position) for number in numbers}
        async with connected(self._tcp) as client:
            await client.publish(topic, *map(body_of, numbers))
        for number in numbers:
            self.fates[number].acknowledged = self._files.position

    async def _consume(self) -> None:
        await settle()  # the previous consumer has disconnected
        topic = self._chance.choice(_SOURCES)
        count = min(await self._ready(topic), self._chance.randint(1, 5))
        if not count:
            return
        async with connected(self._tcp) as client:
            await client.subscribe(
                topic, _CHANNEL, count
            )  # no more: they would be held back while time stands still
            for _ in range(count):
                message = await client.message()
                number = int(message.body[:9])
                kind = self._chance.random()
                if kind < 0.3:
                    fate = self.fates[number]
                    fate.finished = min(fate.finished, self._files.position)
                    await client.send(b"FIN %s\n" % message.id)
                elif kind < 0.9:
                    await client.send(b"REQ %s 0\n" % message.id)
                else:
                    break  # its connection was lost
            if self._chance.random() < 0.6:
                self._clock.jump(1)  # a checkpoint while letters are being moved

    async def _ready(self, topic: str) -> int:
        """Return how many messages are certainly delivered, without those being moved to the dead-letter
        topic.
        """
        path, state = "/channel/peek", "fresh,requeued"
        return len(
            json_lines(await http(self._http, "GET", path, topic=topic, channel=_CHANNEL, state=state))
        )

    async def _let_time_pass(self) -> None:
        self._clock.jump(1)
        if self._chance.random() < 0.5:
            await settle()

    async def _operate(self) -> None:
        letters = await dead_letters(self._http)
        self.buried = max(self.buried, len(letters))
        if not letters:
            return
        chosen = self._chance.sample(letters, self._chance.randint(1, min(3, len(letters))))
        ids = ",".join(letter["id"] for letter in chosen)
        fates = [self.fates[int(letter["body"][:9])] for letter in chosen]
        sent = self._files.position
        if self._chance.random() < 0.7:
            for fate in fates:
                fate.requeued.append((sent, NEVER))
            status, content = await http(self._http, "POST", "/dead_letters/requeue", topic=_DEAD, id=ids)
            assert (status, json.loads(content)["requeued"]) == (200, len(chosen))
            for fate in fates:
                fate.requeued[-1] = sent, self._files.position
        else:
            for fate in fates:
                fate.dropped = sent, NEVER
            status, content = await http(self._http, "POST", "/dead_letters/drop", topic=_DEAD, id=ids)
            assert (status, json.loads(content)["dropped"]) == (200, len(chosen))
            for fate in fates:
                fate.dropped = sent, self._files.position


async def dead_letters(address: str) -> list[dict[str, Any]]:
    """Return the messages in the dead-letter topic."""
    return json_lines(await http(address, "GET", "/dead_letters/messages", topic=_DEAD))


def json_lines(answer: tuple[int, bytes]) -> list[dict[str, Any]]:
    """Return the messages of a chunked answer with whole lines in each chunk; none if it is an error."""
    return [as_text(json.loads(line)) for line in answer[1].splitlines() if line.startswith(b'{"topic"')]


def as_text(letter: dict[str, Any]) -> dict[str, Any]:
    """Replace the body by the message's number, with which it begins."""
    if "body_base64" in letter:
        letter["body"] = base64.b64decode(letter.pop("body_base64")).decode("latin-1")
    return letter


def note_syncs(journal: Sequence[Operation], fates: dict[int, Fate]) -> None:
    """Record when each message became stable: at the first sync of its file."""
    waiting: dict[int, list[int]] = {}
    syncing: dict[int, list[int]] = {}
    for position, operation in enumerate(journal):
        if operation.kind == "write" and operation.path == () and operation.offset:
            waiting.setdefault(operation.handle, []).extend(numbers_in(operation.data))
        elif operation.kind == "sync":
            syncing[operation.handle] = waiting.pop(operation.handle, [])
        elif operation.kind == "synced":
            for number in syncing.pop(operation.handle):
                fates[number].synced = min(fates[number].synced, position + 1)


class Survivors:
    """Starts brokers on a disk after a power cut, and counts their messages."""

    def __init__(self, folder: Path, sync: str, clock: trio.testing.MockClock) -> None:
        self._folder, self._sync, self._clock = folder, sync, clock

    def broker(self, root: Path, files: Files) -> Any:
        """Run a broker that makes checkpoints only when the clock is moved."""
        return running_broker(
            root / "d", files=files, sync=self._sync, node_id=1, checkpoint_interval_ms=1000
        )

    def _make(self, image: Image) -> Path:
        root = self._folder / "after"
        if root.exists():
            shutil.rmtree(root)
        write_image(image, root)
        return root

    async def count(self, image: Image) -> Counter[int]:
        """Return the number of copies of each message in its channel and among the dead letters."""
        found: Counter[int] = Counter()
        async with self.broker(self._make(image), HastyFiles()) as bound:
            self._clock.jump(3600)  # the first broker's clock was ahead
            while waiting := await self._waiting(bound):
                for topic in waiting:
                    async with connected(bound.tcp_address) as client:
                        await client.subscribe(topic, _CHANNEL, ready_count=2500)
                        found.update(await receive_all(client))
            for letter in await dead_letters(bound.http_address):
                number, origin = int(letter["body"][:9]), letter["origin"]
                assert letter["body"].encode("latin-1") == body_of(number)
                assert origin["topic"] in _SOURCES
                assert (origin["channel"], origin["attempts"] >= 1) == (_CHANNEL, True), letter
                found[number] += 1
        return found

    async def _waiting(self, bound: BoundAddresses) -> list[str]:
        """Return the topics whose channel has messages, including those being moved to the dead-letter topic."""
        await settle()
        kinds = "depth", "in_flight_count", "deferred_count"
        found = await stats(bound.http_address or "")
        return [
            name
            for name in found.keys() & set(_SOURCES)
            if (channel := found[name]["channels"].get(_CHANNEL)) and any(channel[kind] for kind in kinds)
        ]

    async def record(self, image: Image) -> Sequence[Operation]:
        """Start a broker on this image, let it move dead letters, and make checkpoints."""
        root = self._make(image)
        files = RecordingFiles(root, sync_takes_s=0)
        async with self.broker(root, files):
            await settle()
            self._clock.jump(1)
            await settle()
        return files.journal


async def receive_all(client: RawClient) -> list[int]:
    """Finish all messages; return their numbers."""
    numbers: list[int] = []
    silent = 0
    while silent < 2:  # the first answer may come before the messages
        await client.send(b"TOUCH 0000000000000000\n")
        silent += 1
        while (frame := await client.frame()) is not None and frame[0] == 2:
            silent = 0
            await client.send(b"FIN %s\n" % frame[1][10:26])
            numbers.append(int(frame[1][26:35]))
        assert frame is not None
        assert frame[1].startswith(b"E_TOUCH_FAILED"), frame
    return numbers


def judge(fates: dict[int, Fate], found: Counter[int], now: int, stored: Callable[[Fate], int]) -> list[str]:
    """Return the violated guarantees."""
    return [
        f"message {number}: {found[number]} copies, not {list(fate.copies(now, stored(fate)))}; {fate}"
        for number, fate in fates.items()
        if found[number] not in fate.copies(now, stored(fate))
    ]


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


def _since_ok(fate: Fate) -> int:
    return fate.acknowledged


def _since_sync(fate: Fate) -> int:
    return fate.synced


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_crash_neither_loses_nor_duplicates_a_message(
    fast_folder: Path, clock: trio.testing.MockClock, sync: str
) -> None:
    chance = random.Random(SEED)
    root = fast_folder / "before"
    root.mkdir()
    files = SlowLetters(root)
    survivors = Survivors(fast_folder, sync, clock)
    async with survivors.broker(root, files) as bound:
        scenario = Scenario(bound, files, clock, chance)
        await scenario.run(STEPS)
    journal, fates = files.journal, scenario.fates
    note_syncs(journal, fates)
    assert scenario.buried, "no message failed"
    moments = range(len(journal) + 1) if COMPLETE else sorted(chance.sample(range(len(journal) + 1), CUTS))
    since_power = _since_ok if sync == "always" else _since_sync
    for now, disk in disk_at(journal, moments):
        wrong = judge(fates, await survivors.count(disk.image()), now, _since_ok)
        name, image = chance.choice(list(disk.power_cuts(chance)))
        wrong += judge(fates, await survivors.count(image), now, since_power)
        # Another power cut, during the work of the next broker.
        later, then = Disk(image), await survivors.record(image)
        for operation in then[: chance.randint(0, len(then))]:
            later.apply(operation)
        again, image = chance.choice(list(later.power_cuts(chance)))
        wrong += judge(fates, await survivors.count(image), now, since_power)
        assert not wrong, f"at {now} of {len(journal)}, {name}, then {again}:\n" + "\n".join(wrong[:10])


class Window(Enum):
    """How far a disk has the only dead letter, from its failure on."""

    FAILED = "only its channel has it"
    STORED = "the dead-letter topic has it, too"
    FINISHED = "its channel is saved without it; the next start checks the letter again"
    CONFIRMED = "the dead-letter topic is saved, and says that nothing is to be checked"


def window_of(image: Any) -> Window:
    """Return how far an image of a data folder has the message with number 0."""
    topics = image["d"]["topics"]
    source, dead = topics["one.topic"], topics.get(f"{_DEAD}.topic", {})
    if not any(body_of(0) in content for name, content in dead.items() if name.endswith(".log")):
        return Window.FAILED
    channel = decode_state(source["state.json"])["channels"][0]
    if channel["cursor"] == 0 or channel["unfinished"]:
        return Window.STORED
    state = decode_state(dead["state.json"])
    return Window.CONFIRMED if state["settled"] == 1 else Window.FINISHED


@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_each_window_of_a_move_has_the_letter_once(
    fast_folder: Path, clock: trio.testing.MockClock, sync: str
) -> None:
    chance = random.Random(SEED)
    root = fast_folder / "before"
    root.mkdir()
    files = RecordingFiles(root)
    survivors = Survivors(fast_folder, sync, clock)
    async with survivors.broker(root, files) as bound:
        scenario = Scenario(bound, files, clock, chance)
        await scenario.run(0)
        async with connected(bound.tcp_address) as client:
            await client.publish("one", body_of(0))
            await client.subscribe("one", _CHANNEL, 1)
            for attempt in range(2):
                message = await client.message()
                if attempt:
                    clock.jump(10)  # all before the failure is synced and saved
                    await settle()
                    start = files.position
                await client.send(b"REQ %s 0\n" % message.id)
        while not await dead_letters(bound.http_address or ""):
            await settle()
        changes = json.dumps({"max_messages": 1000}).encode()  # saves the dead-letter topic before its origin
        await http(bound.http_address or "", "PUT", "/topic/settings", changes, topic=_DEAD)
        for _ in range(3):
            clock.jump(1)
            await settle()
    moments: dict[Window, list[int]] = {}
    for now, disk in disk_at(files.journal, range(start, len(files.journal) + 1)):
        moments.setdefault(window_of(disk.image()), []).append(now)
    assert list(moments) == list(Window)
    chosen = {each[at] for each in moments.values() for at in (0, len(each) // 2, -1)}
    for now, disk in disk_at(files.journal, sorted(chosen)):
        name, cut = chance.choice(list(disk.power_cuts(chance)))
        for how, image in (("killed", disk.image()), (name, cut)):
            window = window_of(image)
            assert await survivors.count(image) == {0: 1}, (now, how, window)


# ---------------------------------------------------------------------- with a process


class Killed:
    """Producers and failing consumers of a broker that is killed, and their observations.

    Attributes:
        acknowledged, finished: Numbers of messages.
        letters: The ids of letters that were known at the start of this life of the broker.
        wrong: Violations, as sentences.
    """

    def __init__(self, chance: random.Random) -> None:
        self.acknowledged: set[int] = set()
        self.finished: set[int] = set()
        self.letters: set[str] = set()
        self.wrong: list[str] = []
        self._chance = chance
        self._next = 0
        self._left = 0
        self._enough = trio.Event()

    async def live(self, broker: Broker) -> None:
        """Use it for this many messages, and kill it."""
        self.look(broker)
        self._left, self._enough = self._chance.randint(200, 2000), trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_gone, self._publish, broker.tcp_address)
            for _ in range(2):
                nursery.start_soon(self._until_gone, self._consume, broker.tcp_address)
            with trio.fail_after(PATIENCE_S):
                await self._enough.wait()
            broker.process.kill()
            await trio.to_thread.run_sync(broker.process.wait)

    def look(self, broker: Broker) -> list[dict[str, Any]]:
        """Read the dead letters; each message must be there once."""
        try:
            content = broker.http("GET", "/dead_letters/messages", topic=_DEAD)
        except RuntimeError:
            return []  # the topic does not exist yet
        found = [as_text(json.loads(line)) for line in content.splitlines()]
        twice = Counter(letter["origin"]["id"] for letter in found)
        self.wrong += [f"{count} letters of {each}" for each, count in twice.items() if count > 1]
        self.letters = set(twice)
        return found

    async def _until_gone(self, work: Callable[[str], Any], address: str) -> None:
        try:
            while True:
                await work(address)
        except Gone:
            pass

    async def _publish(self, address: str) -> None:
        async with connection(address) as client:
            while True:
                numbers = range(self._next, self._next + 20)
                self._next += 20
                await client.send(mpub("one", *map(body_of, numbers)))
                assert await client.frames() == [(0, b"OK")]
                self.acknowledged.update(numbers)

    async def _consume(self, address: str) -> None:
        """Fail at most messages, and disconnect now and then."""
        async with connection(address) as client:
            await client.send(b"SUB one c\n")
            await client.frames()
            await client.send(b"RDY 100\n")
            for _ in range(self._chance.randint(5, 50)):
                for _, data in await client.frames():
                    await client.send(self.answer(data, failing=self._chance.random() < 0.6))
                    self._left -= 1
                    if not self._left:
                        self._enough.set()

    def answer(self, data: bytes, *, failing: bool) -> bytes:
        """Answer a message frame."""
        message_id = data[10:26]
        if message_id.decode() in self.letters:
            self.wrong.append(f"{message_id!r} is a dead letter, and came again")
        if failing:
            return b"REQ %s 0\n" % message_id
        self.finished.add(int(data[26:35]))
        return b"FIN %s\n" % message_id

    async def drain(self, broker: Broker) -> set[int]:
        """Finish the remaining messages; return the numbers of the dead letters."""
        self.look(broker)
        async with connection(broker.tcp_address) as client:
            await client.send(b"SUB one c\n")
            await client.frames()
            await client.send(b"RDY 2500\n")
            async with trio.open_nursery() as nursery:

                async def finish_all() -> None:
                    while True:
                        for _, data in await client.frames():
                            await client.send(self.answer(data, failing=False))

                nursery.start_soon(finish_all)
                with trio.fail_after(PATIENCE_S):
                    while any(
                        broker.channel_stats("one", "c")[kind] for kind in ("depth", "in_flight_count")
                    ):
                        await trio.sleep(0.02)  # another process, without any notification
                nursery.cancel_scope.cancel()
        return {int(letter["body"][:9]) for letter in self.look(broker)}


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["always", "interval"] if COMPLETE else ["always"])
async def test_killed_while_consumers_fail(tmp_path: Path, sync: str) -> None:
    chance = random.Random(SEED)
    killed = Killed(chance)
    flags = f"--sync={sync}", "--checkpoint-interval=1s"
    changes = json.dumps({"max_attempts": 2, "dead_letter_topic": _DEAD}).encode()
    for life in range(KILLS):
        with qcli_serve(tmp_path / "d", *flags) as broker:
            if not life:
                broker.create("one", _CHANNEL)
                path = "/channel/settings"
                assert (await http(broker.http_address, "PUT", path, changes, topic="one", channel="c"))[
                    0
                ] == 200
            await killed.live(broker)
    with qcli_serve(tmp_path / "d", *flags) as broker:
        letters = await killed.drain(broker)
    assert not killed.wrong, killed.wrong[:10]
    assert killed.acknowledged - killed.finished - letters == set()
    assert letters
    print(f"{len(killed.acknowledged)} messages acknowledged, {len(letters)} dead letters")
