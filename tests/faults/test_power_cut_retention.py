"""Tests for power cuts while files are deleted for age or size, and while messages in them are carried
forward.

Like `test_power_cut`, but with one topic, one message per record, and a consumer that leaves some unfinished.
So the test knows for each message whether it must be readable. The channel seeks back in between.
"""

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio.testing

from broker.support import connected, pub, settle
from faults.disk import Operation, RecordingFiles, disk_at, write_image
from faults.ledger import ChannelName, Published, body_of
from faults.power_cut import broker, carry_forward_early
from faults.scenario import HOUR_MS, Request, Told, http, judge, look, stats
from log.support import HastyFiles
from trio_nsq.broker.state.settings import TopicSettings
from trio_nsq.broker.storage.verify import verify_topic

KEEP = TopicSettings(retention_bytes=9000)
FILE_BYTES = 3000
RECORD_BYTES = 56 + 4
NAME = ChannelName("one", "a")
NEW = {"one": 900_000_000}
CUTS = 5


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    carry_forward_early(monkeypatch)


@dataclass
class Use:
    """The actions of a client, and their journal positions.

    Attributes:
        told: Everything except finished messages.
        moments: When the channel had been moved back, and everything was saved.
        events: For each message, by its number, which is its sequence: (when, whether it must be delivered
            from then on).
    """

    told: Told = field(default_factory=Told)
    events: list[list[tuple[int, bool]]] = field(default_factory=list)
    moments: list[int] = field(default_factory=list)

    def by(self, now: int) -> Told:
        """Return everything known by then."""
        done = {
            number: now
            for number, events in enumerate(self.events)
            if [must for when, must in events if when <= now][-1:] != [True]
        }
        return replace(self.told, finished={NAME: done})

    def kept(self, now: int) -> set[int]:
        """Return the messages that retention must keep, with a tolerance of one file."""
        room, kept = KEEP.retention_bytes - FILE_BYTES, set()
        for message in reversed([each for each in self.told.messages if each.sent_ns <= now]):
            room -= RECORD_BYTES + len(body_of(message.number))
            if room < 0:
                break
            if message.acknowledged_ns is not None and message.acknowledged_ns <= now:
                kept.add(message.number)
        return kept


class Client:
    """Uses a broker sequentially."""

    def __init__(self, tcp: str, http: str, files: RecordingFiles, use: Use) -> None:
        self._tcp = tcp
        self._http = http
        self._files = files
        self._use = use

    async def make(self) -> None:
        """Create the topic and its channel."""
        for key, path, query in (
            (("topic", "one"), "/topic/create", {"topic": "one"}),
            (("channel", NAME), "/channel/create", NAME._asdict()),
        ):
            request = Request(key, True, self._files.position)
            self._use.told.requests.append(request)
            assert (await http(self._http, "POST", path, **query))[0] == 200
            request.done = self._files.position
        self._use.told.since[NAME] = 0

    async def publish(self, count: int) -> None:
        """Publish messages, each in its own record."""
        told, events = self._use.told, self._use.events
        async with connected(self._tcp) as client:
            for _ in range(count):
                message = Published(len(told.messages), "one", self._files.position, 0, len(told.messages))
                told.messages.append(message)
                events.append([])
                await client.send(pub("one", body_of(message.number)))
                await client.ok()
                message.acknowledged_ns = self._files.position
                events[-1].append((self._files.position, True))
        told.keep_what_is_acknowledged()

    async def consume(self, chance: random.Random, left: float) -> None:
        """Receive all messages; finish all except this part, which is deferred."""
        depth = (await stats(self._http))["one"]["channels"]["a"]["depth"]
        async with connected(self._tcp) as client:
            await client.subscribe(*NAME, ready_count=1)
            for _ in range(depth):
                message = await client.message()
                number = int(message.body[:9])
                if chance.random() >= left:
                    self._use.events[number].append((self._files.position, False))
                    await client.send(b"FIN %s\n" % message.id)
                else:
                    await client.send(b"REQ %s %d\n" % (message.id, HOUR_MS))
            await client.send(b"RDY 0\nCLS\n")
            while await client.frame() != (0, b"CLOSE_WAIT"):
                pass

    async def move_back(self) -> None:
        """Seek to the beginning: retained messages are delivered again; deferred ones not retained stay deferred."""
        query = f"{NAME.topic}&channel={NAME.channel}"
        status, answer = await http(self._http, "POST", "/channel/seek", topic=query, to="earliest")
        assert status == 200, answer
        now = self._files.position
        self._use.moments.append(now)
        for events in self._use.events[json.loads(answer)["to_sequence"] :]:
            events.append((now, True))


async def record(
    root: Path, clock: trio.testing.MockClock, chance: random.Random
) -> tuple[list[Operation], Use]:
    """Use a broker whose data is in `root`/d."""
    root.mkdir()
    files, use = RecordingFiles(root, sync_takes_s=0), Use()
    async with broker(root / "d", files, "always", keep=KEEP) as bound:
        assert bound.http_address is not None
        client = Client(bound.tcp_address, bound.http_address, files, use)
        await client.make()
        for turn in range(7):
            await client.publish(14)
            await client.consume(chance, 0.1 if turn > 1 else 0)
            if turn == 4:
                await client.move_back()
            clock.jump(1)
            await settle()
            use.moments.append(files.position)
    return files.journal, use


@pytest.mark.slow
async def test_power_cuts_lose_nothing_that_channels_or_retention_need(
    fast_folder: Path,
    clock: trio.testing.MockClock,
) -> None:
    chance = random.Random(5)
    journal, use = await record(fast_folder / "before", clock, chance)
    changes = {
        now + 1
        for now, operation in enumerate(journal)
        if operation.kind in ("unlink", "rename") and "state.json" not in operation.to
    }
    assert sum(operation.to[-1:] == ("stragglers",) for operation in journal) >= 2
    assert sum(operation.kind == "unlink" for operation in journal) >= 4
    chosen = sorted(changes | {*use.moments, *chance.sample(range(len(journal)), CUTS)})
    for now, disk in disk_at(journal, chosen):
        name, image = chance.choice(list(disk.power_cuts(chance)))
        after = fast_folder / f"after-{now}"
        write_image(image, after)
        wrong = await look_after(after / "d", use, now, clock)
        assert not wrong, "\n".join(
            [f"at {now}, {name}:", *wrong[:20], *map(str, journal[max(0, now - 3) : now + 1])]
        )


async def look_after(data_path: Path, use: Use, now: int, clock: trio.testing.MockClock) -> list[str]:
    """Return the errors in the state after a power cut."""
    wrong: list[str] = []
    if (folder := data_path / "topics" / "one.topic").exists():
        # The last record may have been acknowledged or not if its beginning is missing: this is unknown.
        wrong += [
            str(finding)
            for finding in verify_topic(folder).findings
            if finding.kind == "damage" and not finding.what.endswith("start of the broker cuts it off")
        ]
    async with broker(data_path, HastyFiles(), "always", keep=KEEP) as bound:
        assert bound.http_address is not None
        _, content = await http(bound.http_address, "GET", "/topic/read", topic="one")
        # Lines of chunk sizes are between the pieces.
        lines = [json.loads(line) for line in content.splitlines() if line.startswith(b"{")]
        lines = lines if use.kept(now) else []
        wrong += [f"not to be read: {line}" for line in lines if "gap" in line]
        read = [line["sequence"] for line in lines]
        if lost := use.kept(now) - set(read):
            wrong.append(f"not kept: {sorted(lost)}; there are {read}")
        wrong += judge(use.by(now).by(now), await look(bound, clock, NEW), NEW)
    return wrong
