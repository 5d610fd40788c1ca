"""Tests for numbered batches that are sent again after a power cut at any moment, or after a kill: each is
stored once.

Some random moments by default; all of them with `FAULT_COMPLETE=1`.
"""

import json
import os
import random
import signal
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from struct import pack

import httpx
import pytest
import trio.testing

from broker.support import connected, settle
from faults.disk import Operation, RecordingFiles, disk_at, write_image
from faults.power_cut import broker
from faults.scenario import NEVER
from interop.peers import START_DEADLINE_S, Child, qcli_serve
from log.support import HastyFiles
from trio_nsq.broker import BoundAddresses
from trio_nsq.client.http.idempotent_producer import IdempotentProducer, PublishOutcome
from trio_nsq.log import DiskLog

SEED = int(os.environ.get("FAULT_SEED", "7"))
COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
CUTS = 8
BATCHES = 30
KILLED_AT = 4


@dataclass(slots=True)
class Batch:
    """A sent batch, and the journal positions at which it was sent and answered."""

    producer: str
    number: int
    bodies: list[bytes]
    sent: int
    done: int = NEVER


class Producer:
    """Publishes batches to one broker, and consumes some of them."""

    def __init__(self, bound: BoundAddresses) -> None:
        self._tcp = bound.tcp_address
        self._http = httpx.AsyncClient(base_url=f"http://{bound.http_address}", timeout=20)

    async def __aenter__(self) -> "Producer":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def send(self, batch: Batch) -> PublishOutcome:
        """Send a batch, possibly again."""
        content = pack(">i", len(batch.bodies)) + b"".join(pack(">i", len(b)) + b for b in batch.bodies)
        params: dict[str, str | int] = {
            "topic": "t",
            "binary": "true",
            "producer": batch.producer,
            "number": batch.number,
        }
        answer = await self._http.post("/mpub", params=params, content=content)
        assert answer.status_code == 200, answer.text
        return PublishOutcome(answer.headers["NSQ-Batch"])

    async def make_channel(self) -> None:
        for path in ("/topic/create", "/channel/create"):
            answer = await self._http.post(path, params={"topic": "t", "channel": "c"})
            assert answer.status_code == 200, answer.text

    async def consume(self, count: int) -> None:
        """Finish this many messages, so that their files are deleted."""
        async with connected(self._tcp) as client:
            await client.subscribe("t", "c", ready_count=1)
            for _ in range(count):
                await client.send(b"FIN %s\n" % (await client.message()).id)
            await client.send(b"CLS\n")
            while await client.frame() != (0, b"CLOSE_WAIT"):
                pass

    async def end(self) -> int:
        """Return how many messages the topic has ever had."""
        bounds = (await self._http.get("/topic/bounds", params={"topic": "t"})).json()
        assert isinstance(bounds["next_sequence"], int), bounds
        return bounds["next_sequence"]

    async def kept(self) -> list[bytes]:
        """Return the bodies that can be read."""
        text = (await self._http.get("/topic/read", params={"topic": "t"})).text
        lines = [json.loads(line) for line in text.splitlines()]
        return [line["body"].encode() for line in lines if "gap" not in line]


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


async def record(
    root: Path, sync: str, clock: trio.testing.MockClock, chance: random.Random
) -> tuple[list[Operation], list[Batch]]:
    """Publish to a broker with its data in `root`/d, and let it save and delete files."""
    root.mkdir()
    files, batches = RecordingFiles(root, sync_takes_s=0), []
    numbers: dict[str, int] = defaultdict(int)
    async with broker(root / "d", files, sync) as bound, Producer(bound) as producer:
        await producer.make_channel()
        waiting = 0
        for at in range(BATCHES):
            name = chance.choice("ab")
            numbers[name] += chance.randint(1, 3)
            bodies = [
                b"%d/%d " % (at, n) + b"x" * chance.randint(40, 120) for n in range(chance.randint(1, 6))
            ]
            batches.append(batch := Batch(name, numbers[name], bodies, files.position))
            assert await producer.send(batch) is PublishOutcome.PUBLISHED
            batch.done = files.position
            waiting += len(bodies)
            if chance.random() < 0.25:
                await producer.consume(waiting)
                waiting = 0
            if chance.random() < 0.3:
                clock.jump(1)
                await settle()
    return files.journal, batches


@pytest.mark.slow
async def test_sent_again_after_a_power_cut(fast_folder: Path, clock: trio.testing.MockClock) -> None:
    chance = random.Random(SEED)
    journal, batches = await record(fast_folder / "before", "always", clock, chance)
    gone = sum(each.kind == "unlink" and each.path[-1].endswith(".log") for each in journal)
    assert gone >= 2
    moments = range(1, len(journal) + 1)
    # Most moments are during a batch.
    under_way = [now for now in moments if any(b.sent < now < b.done for b in batches)]
    chosen = (
        moments if COMPLETE else sorted({*chance.sample(under_way, CUTS), *chance.sample(moments, CUTS // 3)})
    )
    outcomes: dict[tuple[PublishOutcome, bool], int] = defaultdict(int)
    for now, disk in disk_at(journal, chosen):
        name, image = chance.choice(list(disk.power_cuts(chance)))
        after = fast_folder / f"after-{now}"
        write_image(image, after)
        sent = [batch for batch in batches if batch.sent < now]
        async with broker(after / "d", HastyFiles(), "always") as bound, Producer(bound) as producer:
            for batch in sent:
                outcome = await producer.send(batch)
                outcomes[outcome, batch.done <= now] += 1
                what = f"at {now}, {name}: batch {batch} was {outcome}"
                assert outcome is PublishOutcome.REPEATED or batch.done > now, what
            if sent:
                bodies = [body for batch in sent for body in batch.bodies]
                kept = await producer.kept()
                assert await producer.end() == len(bodies), f"at {now}, {name}"
                assert kept == bodies[len(bodies) - len(kept) :], f"at {now}, {name}"
    print(f"{len(journal)} operations, {gone} files went, {len(chosen)} cuts, {dict(outcomes)}")
    assert outcomes[PublishOutcome.PUBLISHED, False]
    assert outcomes[PublishOutcome.REPEATED, False] or not COMPLETE  # the test below covers that


@pytest.mark.slow
async def test_unsynced_batches_are_not_duplicated(fast_folder: Path, clock: trio.testing.MockClock) -> None:
    """A power cut may then lose whole batches, and no saved state may have the number of a lost batch."""
    chance = random.Random(SEED)
    journal, batches = await record(fast_folder / "before", "interval", clock, chance)
    moments = range(1, len(journal) + 1)
    chosen = moments if COMPLETE else sorted(chance.sample(moments, CUTS))
    for now, disk in disk_at(journal, chosen):
        image = chance.choice(list(disk.power_cuts(chance)))[1]
        after = fast_folder / f"after-{now}"
        write_image(image, after)
        sent = [batch for batch in batches if batch.sent < now]
        async with broker(after / "d", HastyFiles(), "interval") as bound, Producer(bound) as producer:
            for batch in sent:
                await producer.send(batch)
            kept = await producer.kept() if sent else []
        assert len(set(kept)) == len(kept), f"twice, at {now}"
        for batch in sent:
            there = [body for body in batch.bodies if body in kept]
            assert there in ([], batch.bodies), f"a part, at {now}: {batch}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["unwritten", "written", "synced"] if COMPLETE else ["unwritten", "synced"]
)
def test_sent_again_after_a_kill(tmp_path: Path, moment: str) -> None:
    data_path, address = tmp_path / "d", f"{tmp_path}/http.sock"
    bodies = [[b"%d/%d" % (number, n) for n in range(3)] for number in range(2 * KILLED_AT)]

    def publish() -> list[PublishOutcome]:
        with IdempotentProducer(address, "t", "p") as publisher:
            return [publisher.publish(each, number) for number, each in enumerate(bodies)]

    argv = (sys.executable, "-m", "faults.dying_broker", data_path, address, moment, str(KILLED_AT))
    with ThreadPoolExecutor() as executor:
        dying = Child(argv)
        try:
            assert dying.stdout.next(time.monotonic() + START_DEADLINE_S) == "ready"
            told = executor.submit(publish)
            assert dying.wait(START_DEADLINE_S) == -signal.SIGKILL
        finally:
            dying.close()
        with qcli_serve(data_path, f"--http-address={address}"):
            expected = [PublishOutcome.PUBLISHED] * len(bodies)
            if moment != "unwritten":
                expected[KILLED_AT - 1] = PublishOutcome.REPEATED
            assert told.result(START_DEADLINE_S) == expected
    log = DiskLog(data_path / "topics" / "t.topic")
    stored = [record.messages.bodies() for record in log.read(0)]
    log.close()
    assert stored == bodies
