"""`qcli log import` of what a real nsqd left, compared with what that nsqd itself makes of it after a restart."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio

from interop.our_client import PATIENCE_S
from interop.peers import Broker, nsqd, qcli_serve
from trio_nsq.client import Consumer, MessageBatch, Producer

DEFERRAL_NOTE = (
    "Note: nsqd does not store the times of deferred messages: the broker delivers them at once.\n"
)

pytestmark = pytest.mark.interop

IDLE_S = 1.0
"""After so long without a message there is none."""


class Copy(NamedTuple):
    """A message in a channel, as a consumer gets it."""

    id: bytes
    timestamp_ns: int
    attempts: int
    body: bytes


Contents = dict[tuple[str, str], Counter[Copy]]
"""What each channel has, by topic and channel."""


class Outcome(NamedTuple):
    """What became of `qcli log import`."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """The JSON lines of standard output."""
        return [json.loads(line) for line in self.out.splitlines()]


def run_import(source: Path, data_path: Path, *flags: str) -> Outcome:
    """Run it, with a report in JSON."""
    arguments = ["log", "import", str(source), f"--data-path={data_path}", "--format=json", *flags]
    done = subprocess.run(
        [sys.executable, "-m", "qcli", *arguments], capture_output=True, text=True, timeout=PATIENCE_S
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


async def receive(
    broker: Broker, topic: str, channel: str, count: int, *, finish: Callable[[int], bool] | None = None
) -> list[Copy]:
    """Take so many messages, and finish them, or those by number that `finish` says."""
    found: list[Copy] = []

    def take(batch: MessageBatch) -> None:
        for message in batch:
            if len(found) < count:
                found.append(Copy(message.id, message.timestamp_ns, message.attempts, message.body))
                if finish is None or finish(len(found) - 1):
                    message.finish()

    if count:
        async with Consumer(
            topic, channel, nsqd_tcp_addresses=[broker.tcp_address], max_in_flight=min(count, 500)
        ) as consumer:
            async for batch in consumer.batches():
                take(batch)
                if len(found) >= count:
                    break
    return found


def stats(broker: Broker) -> dict[str, dict[str, Any]]:
    """What `/stats` says of each topic, by name."""
    topics = json.loads(broker.http("GET", "/stats", format="json"))["topics"] or []
    return {topic["topic_name"]: topic for topic in topics}


def shape(broker: Broker) -> dict[str, Any]:
    """Names, pauses and depths of topics and channels: what a broker has right after its start."""
    return {
        name: (
            topic["paused"],
            {
                channel["channel_name"]: (channel["paused"], channel["depth"])
                for channel in topic["channels"] or []
            },
        )
        for name, topic in stats(broker).items()
    }


async def drain(broker: Broker) -> Contents:
    """Take everything out of a broker. Topics and channels go on if they were paused."""
    contents: Contents = {}
    for name, topic in stats(broker).items():
        if topic["paused"]:
            broker.http("POST", "/topic/unpause", topic=name)
        if not topic["channels"]:
            broker.http("POST", "/channel/create", topic=name, channel="first")
        for channel in stats(broker)[name]["channels"]:
            channel_name = channel["channel_name"]
            if channel["paused"]:
                broker.http("POST", "/channel/unpause", topic=name, channel=channel_name)
            taken: Counter[Copy] = Counter()
            # nsqd moves what waits in a topic to the channels bit by bit.
            while depth := waiting(broker, name, channel_name):
                taken.update(await receive(broker, name, channel_name, depth))
            contents[name, channel_name] = taken
    return contents


def waiting(broker: Broker, topic: str, channel: str) -> int:
    """Messages in a channel, once none is left in its topic."""
    while True:
        found = stats(broker)[topic]
        (own,) = [each for each in found["channels"] if each["channel_name"] == channel]
        if not found["depth"]:
            return int(own["depth"])


@pytest.fixture(params=["in memory", "on disk"])
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """nsqd's flags: messages wait in memory, or all of them go through files, of which there are then many."""
    if request.param == "in memory":
        return ()
    return ("--mem-queue-size=0", "--max-bytes-per-file=20000")


def bodies(name: str, count: int) -> list[bytes]:
    """All different, of many sizes, with every byte in them."""
    return [b"%s %d " % (name.encode(), number) + bytes(range(256)) * (number % 3) for number in range(count)]


async def fill(broker: Broker) -> None:
    """Topics and channels in every state an nsqd may be stopped in."""
    broker.create("clicks", "archive", "alerts", "idle")
    broker.create("orders", "only")
    broker.create("paused", "a", "b")
    broker.create("waiting")
    broker.create("empty", "channel")
    broker.create("dots.and-dashes_", "c.d-e_f")
    broker.create("gone#ephemeral", "kept")
    broker.http("POST", "/channel/pause", topic="clicks", channel="idle")
    async with Producer(broker.tcp_address) as producer:
        await producer.publish_many("clicks", bodies("clicks", 600))
        for body in bodies("single", 20):
            await producer.publish("clicks", body)
        await producer.publish_many("orders", bodies("orders", 50))
        await producer.publish_many("paused", bodies("before", 30))
        await producer.publish_many("waiting", bodies("waiting", 40))
        await producer.publish_many("dots.and-dashes_", bodies("odd", 5))
        await producer.publish_many("gone#ephemeral", bodies("ephemeral", 5))
        for topic in ("clicks", "orders", "paused"):
            await distributed(broker, topic)
        broker.http("POST", "/topic/pause", topic="paused")
        await producer.publish_many("paused", bodies("after", 30))
        for number in range(10):
            await producer.publish("clicks", b"deferred %d" % number, defer_ms=600_000)
    await receive(broker, "orders", "only", 50)
    await receive(broker, "clicks", "archive", 200)
    # Two times over some are not finished; their attempts rise, and they go behind the others.
    await receive(broker, "clicks", "alerts", 100, finish=lambda number: number % 4 == 0)
    await wait_until_returned(broker, "clicks", "alerts")
    await receive(broker, "clicks", "alerts", 595, finish=lambda number: number % 5 == 0)
    await wait_until_returned(broker, "clicks", "alerts")


async def distributed(broker: Broker, topic: str) -> None:
    """Wait until nothing waits in the topic any more."""
    while stats(broker)[topic]["depth"]:
        await trio.sleep(0.01)


async def wait_until_returned(broker: Broker, topic: str, channel: str) -> None:
    """Wait until nothing is in flight: what a consumer did not finish, it hands back when it is closed."""
    with trio.fail_after(PATIENCE_S):
        while broker.channel_stats(topic, channel)["in_flight_count"]:
            await trio.sleep(0.01)


async def requeue_and_hold(broker: Broker, stop: Callable[[], None]) -> None:
    """Requeue some messages for later, and stop the broker while others are in flight."""
    await distributed(broker, "clicks")
    # Without a queue in memory nsqd may have forgotten that some were deferred by their publisher.
    deferred = broker.channel_stats("clicks", "archive")["deferred_count"]
    async with Consumer(
        "clicks", "archive", nsqd_tcp_addresses=[broker.tcp_address], max_in_flight=60
    ) as consumer:
        held = 0
        async for message in consumer:
            if held < 20:
                message.requeue(600_000, backoff=False)
            held += 1
            if held >= 60:
                break
        while broker.channel_stats("clicks", "archive")["deferred_count"] < deferred + 20:
            await trio.sleep(0.01)
        assert broker.channel_stats("clicks", "archive")["in_flight_count"] >= 40
        stop()


async def test_every_channel_gets_what_it_would_have_in_nsqd(tmp_path: Path, flags: tuple[str, ...]) -> None:
    source = tmp_path / "nsqd"
    with trio.fail_after(PATIENCE_S), nsqd(source, *flags) as broker:
        await fill(broker)

        def stop() -> None:
            broker.process.terminate()
            broker.child.wait(PATIENCE_S)

        await requeue_and_hold(broker, stop)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    assert sum(".diskqueue." in name for name in before) > (20 if flags else 10)

    planned = run_import(source, tmp_path / "ours", "--dry-run")
    assert not (tmp_path / "ours").exists()
    done = run_import(source, tmp_path / "ours")
    assert (planned.code, planned.err) == (done.code, done.err) == (0, DEFERRAL_NOTE)
    reported = {record["topic"]: record for record in done.records}
    assert {record["topic"]: record for record in planned.records} == {
        topic: record | ({"outcome": "planned"} if topic else {}) for topic, record in reported.items()
    }
    # nsqd writes files for a durable channel of an ephemeral topic, and does not know of them afterwards.
    (note,) = reported.pop(None)["findings"]
    assert Path(note["file"]).name.startswith("gone#ephemeral:kept.")
    assert {record["outcome"] for record in reported.values()} == {"imported"}
    for record in reported.values():
        # nsqd itself may put a file aside that it has read to its end.
        assert {finding["kind"] for finding in record["findings"]} <= {"note"}, record
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before

    # nsqd's own opinion, of a copy.
    shutil.copytree(source, tmp_path / "copy")
    with trio.fail_after(PATIENCE_S):
        with nsqd(tmp_path / "copy", *flags) as broker:
            expected_shape, expected = shape(broker), await drain(broker)
        with qcli_serve(tmp_path / "ours") as broker:
            assert shape(broker) == expected_shape
            contents = await drain(broker)
    assert contents.keys() == expected.keys()
    for name, copies in expected.items():
        assert contents[name] == copies, name

    # And the ledger: what was published and not finished, no more and no less.
    found = {name: Counter(copy.body for copy in copies.elements()) for name, copies in contents.items()}
    deferred = [b"deferred %d" % number for number in range(10)]
    clicks = [*bodies("clicks", 600), *bodies("single", 20), *deferred]
    assert found["clicks", "idle"] == Counter(clicks)
    assert found["waiting", "first"] == Counter(bodies("waiting", 40))
    assert (
        found["paused", "a"] == found["paused", "b"] == Counter([*bodies("before", 30), *bodies("after", 30)])
    )
    assert found["orders", "only"] == found["empty", "channel"] == Counter()
    assert found["clicks", "archive"].total() == 430
    assert {copy.attempts for copy in contents["clicks", "archive"]} == {1, 2}
    assert {copy.attempts for copy in contents["clicks", "alerts"]} == {1, 2, 3}
    assert found["clicks", "alerts"].total() == 630 - 25 - 119
    assert reported["clicks"]["messages"] == 630  # each once, though three channels have them
    assert reported["waiting"]["waiting"] == 40


# ---------------------------------------------------------------------- what nsqd makes of damage


def last_data_file(folder: Path) -> Path:
    """The last file of the channel's queue."""
    return sorted(folder.glob("topic:channel.diskqueue.0*.dat"))[-1]


def cut(folder: Path) -> None:
    path = last_data_file(folder)
    path.write_bytes(path.read_bytes()[:-7])


def break_size(folder: Path) -> None:
    path = sorted(folder.glob("topic:channel.diskqueue.0*.dat"))[1]
    content = bytearray(path.read_bytes())
    message = 4 + int.from_bytes(content[:4], "big")
    content[5 * message : 5 * message + 4] = b"\x7f\0\0\0"
    path.write_bytes(content)


def small_size(folder: Path) -> None:
    path = last_data_file(folder)
    content = bytearray(path.read_bytes())
    content[:4] = b"\0\0\0\5"
    path.write_bytes(content)


def lose_file(folder: Path) -> None:
    sorted(folder.glob("topic:channel.diskqueue.0*.dat"))[2].unlink()


def lose_meta(folder: Path) -> None:
    (folder / "topic:channel.diskqueue.meta.dat").unlink()


def break_meta(folder: Path) -> None:
    (folder / "topic:channel.diskqueue.meta.dat").write_text("garbage\n")


def older_meta(folder: Path) -> None:
    """As after kill -9: the last file is longer than is known, and it was read further."""
    path = folder / "topic:channel.diskqueue.meta.dat"
    depth, read, _ = path.read_text().splitlines()
    last = last_data_file(folder)
    number = int(last.name.split(".")[-2])
    message = 4 + int.from_bytes(last.read_bytes()[:4], "big")
    path.write_text(f"{int(depth) - 3}\n{read}\n{number},{message}\n")


def older_meta_and_cut(folder: Path) -> None:
    older_meta(folder)
    cut(folder)


def longer_meta(folder: Path) -> None:
    """The file was not on disk as far as the meta file says."""
    path = folder / "topic:channel.diskqueue.meta.dat"
    depth, read, write = path.read_text().splitlines()
    number, position = write.split(",")
    path.write_text(f"{int(depth) + 2}\n{read}\n{number},{int(position) + 100}\n")


@pytest.mark.parametrize(
    ("damage", "damaged"),
    [
        (cut, True),
        (break_size, True),
        (small_size, True),
        (lose_file, True),
        (lose_meta, True),
        (break_meta, True),
        (older_meta, False),
        (older_meta_and_cut, True),
        (longer_meta, True),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_damaged_files_give_what_nsqd_gets_out_of_them_and_are_named(
    tmp_path: Path, damage: Callable[[Path], None], damaged: bool
) -> None:
    flags = ("--mem-queue-size=0", "--max-bytes-per-file=5000")
    source = tmp_path / "nsqd"
    with trio.fail_after(PATIENCE_S):
        with nsqd(source, *flags) as broker:
            broker.create("topic", "channel")
            async with Producer(broker.tcp_address) as producer:
                await producer.publish_many("topic", [b"%0100d" % number for number in range(200)])
            await distributed(broker, "topic")
            await receive(broker, "topic", "channel", 10)
        damage(source)
        done = run_import(source, tmp_path / "ours")
        (record,) = done.records
        note = DEFERRAL_NOTE if record["messages"] else ""
        assert (done.code, done.err) == (5 if damaged else 0, note)
        assert record["findings"]
        with nsqd(source, *flags) as broker:
            expected = Counter(await receive_all(broker))
        with qcli_serve(tmp_path / "ours") as broker:
            contents = await drain(broker)
    assert contents["topic", "channel"] == expected
    # What nsqd puts aside, it names.
    put_aside = {path.name.removesuffix(".bad") for path in source.glob("topic:channel.*.bad")}
    assert put_aside <= {Path(finding["file"]).name for finding in record["findings"]}


async def receive_all(broker: Broker, channel: str = "channel") -> list[Copy]:
    """All that nsqd can still deliver. Its depth is not to be trusted once it was killed, or has met damage."""
    found: list[Copy] = []
    with trio.move_on_after(IDLE_S) as idle:
        async with Consumer(
            "topic", channel, nsqd_tcp_addresses=[broker.tcp_address], max_in_flight=500
        ) as consumer:
            async for batch in consumer.batches():
                found += [Copy(each.id, each.timestamp_ns, each.attempts, each.body) for each in batch]
                batch.finish()
                idle.deadline = trio.current_time() + IDLE_S
    return found


async def test_an_nsqd_that_was_killed(tmp_path: Path) -> None:
    """Everything that it had written is imported; what it had in memory is lost, as it is to nsqd itself."""
    flags = ("--mem-queue-size=0", "--sync-every=1000", "--sync-timeout=1h")
    source = tmp_path / "nsqd"
    with trio.fail_after(PATIENCE_S):
        with nsqd(source, *flags) as broker:
            broker.create("topic", "channel", "other")
            async with Producer(broker.tcp_address) as producer:
                await producer.publish_many("topic", [b"%d" % number for number in range(1500)])
            for channel in ("channel", "other"):
                while broker.channel_stats("topic", channel)["depth"] < 1500:
                    await trio.sleep(0.01)
            broker.process.kill()
            broker.child.wait(PATIENCE_S)
        shutil.copytree(source, tmp_path / "copy")
        done = run_import(source, tmp_path / "ours")
        assert (done.code, done.err) == (0, DEFERRAL_NOTE)
        with nsqd(tmp_path / "copy", *flags) as broker:
            expected = {
                channel: Counter(await receive_all(broker, channel)) for channel in ("channel", "other")
            }
        with qcli_serve(tmp_path / "ours") as broker:
            contents = await drain(broker)
    for channel, copies in expected.items():
        assert contents["topic", channel] == copies
        assert {copy.body for copy in copies} == {b"%d" % number for number in range(1500)}


# ---------------------------------------------------------------------- what is refused


async def test_a_running_nsqd_is_left_alone(tmp_path: Path) -> None:
    with nsqd(tmp_path / "nsqd"):
        refused = run_import(tmp_path / "nsqd", tmp_path / "ours")
    assert (refused.code, refused.out) == (1, "")
    assert "in use by a running nsqd: stop it first" in refused.err
    assert not (tmp_path / "ours").exists()


async def test_our_broker_does_not_start_over_nsqds_folder_and_says_what_to_do(tmp_path: Path) -> None:
    with nsqd(tmp_path / "nsqd") as broker:
        broker.create("topic")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "qcli",
            "serve",
            f"--data-path={tmp_path / 'nsqd'}",
            "--tcp-address=127.0.0.1:0",
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert re.search(
        r"holds the queues of an nsqd.*'qcli log import \S+/nsqd --data-path ANOTHER'", done.stderr
    )
