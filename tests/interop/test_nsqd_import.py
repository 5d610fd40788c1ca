"""Compare `qcli log import` of a real nsqd's files with the messages that nsqd itself delivers after a restart."""

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
from soak import in_soak
from trio_nsq.client import Consumer, MessageBatch, Producer

DEFERRAL_NOTE = (
    "Note: nsqd does not store the times of deferred messages: the broker delivers them at once.\n"
)

pytestmark = pytest.mark.interop

IDLE_S = 1.0
"""After this time without a message, the channel counts as empty."""


class Copy(NamedTuple):
    """A message in a channel, as a consumer receives it."""

    id: bytes
    timestamp_ns: int
    attempts: int
    body: bytes


Contents = dict[tuple[str, str], Counter[Copy]]
"""The messages of each channel, by topic and channel."""


class Outcome(NamedTuple):
    """Exit code and output of `qcli log import`."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """Return the JSON lines of stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


def run_import(source: Path, data_path: Path, *flags: str) -> Outcome:
    """Run `qcli log import` with a report in JSON."""
    arguments = ["log", "import", str(source), f"--data-path={data_path}", "--format=json", *flags]
    done = subprocess.run(
        [sys.executable, "-m", "qcli", *arguments], capture_output=True, text=True, timeout=PATIENCE_S
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


async def receive(
    broker: Broker, topic: str, channel: str, count: int, *, finish: Callable[[int], bool] | None = None
) -> list[Copy]:
    """Receive `count` messages and finish them, or only those for whose number `finish` returns true."""
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
    """Return the `/stats` entries of the topics, by name."""
    topics = json.loads(broker.http("GET", "/stats", format="json"))["topics"] or []
    return {topic["topic_name"]: topic for topic in topics}


def shape(broker: Broker) -> dict[str, Any]:
    """Return names, pauses and depths of the topics and channels, as they are directly after the broker starts."""
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
    """Receive and return all messages of a broker. Unpause paused topics and channels."""
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
            # nsqd moves the messages of a topic to its channels gradually.
            while depth := waiting(broker, name, channel_name):
                taken.update(await receive(broker, name, channel_name, depth))
            contents[name, channel_name] = taken
    return contents


def waiting(broker: Broker, topic: str, channel: str) -> int:
    """Return the depth of a channel, as soon as its topic is empty."""
    while True:
        found = stats(broker)[topic]
        (own,) = [each for each in found["channels"] if each["channel_name"] == channel]
        if not found["depth"]:
            return int(own["depth"])


@pytest.fixture(params=["in memory", "on disk"])
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Return nsqd's flags: messages wait in memory, or all go through many small files."""
    if request.param == "in memory":
        return ()
    return ("--mem-queue-size=0", "--max-bytes-per-file=20000")


def bodies(name: str, count: int) -> list[bytes]:
    """Return distinct bodies of many sizes, with every byte value."""
    return [b"%s %d " % (name.encode(), number) + bytes(range(256)) * (number % 3) for number in range(count)]


async def fill(broker: Broker) -> None:
    """Create topics and channels in every state that they can have when nsqd stops."""
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
            await producer.publish("clicks", b"deferred %d" % number, defer_s=600)
    await receive(broker, "orders", "only", 50)
    await receive(broker, "clicks", "archive", 200)
    # In two passes, leave some messages unfinished: their attempts rise, and nsqd requeues them behind the others.
    await receive(broker, "clicks", "alerts", 100, finish=lambda number: number % 4 == 0)
    await wait_until_returned(broker, "clicks", "alerts")
    await receive(broker, "clicks", "alerts", 595, finish=lambda number: number % 5 == 0)
    await wait_until_returned(broker, "clicks", "alerts")


async def distributed(broker: Broker, topic: str) -> None:
    """Wait until the topic is empty."""
    while stats(broker)[topic]["depth"]:
        await trio.sleep(0.01)


async def wait_until_returned(broker: Broker, topic: str, channel: str) -> None:
    """Wait until nothing is in flight: a consumer requeues its unfinished messages when it closes."""
    with trio.fail_after(PATIENCE_S):
        while broker.channel_stats(topic, channel)["in_flight_count"]:
            await trio.sleep(0.01)


async def requeue_and_hold(broker: Broker, stop: Callable[[], None]) -> None:
    """Requeue some messages with a delay, and stop the broker while others are in flight."""
    await distributed(broker, "clicks")
    # Without a queue in memory, nsqd may lose the delay of messages that their publisher deferred.
    deferred = broker.channel_stats("clicks", "archive")["deferred_count"]
    async with Consumer(
        "clicks", "archive", nsqd_tcp_addresses=[broker.tcp_address], max_in_flight=60
    ) as consumer:
        held = 0
        async for message in consumer:
            if held < 20:
                message.requeue(delay_s=600, backoff=False)
            held += 1
            if held >= 60:
                break
        while broker.channel_stats("clicks", "archive")["deferred_count"] < deferred + 20:
            await trio.sleep(0.01)
        assert broker.channel_stats("clicks", "archive")["in_flight_count"] >= 40
        stop()


async def test_import_gives_every_channel_the_messages_it_has_in_nsqd(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
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
    # nsqd writes files for a durable channel of an ephemeral topic, but ignores them after a restart.
    (note,) = reported.pop(None)["findings"]
    assert Path(note["file"]).name.startswith("gone#ephemeral:kept.")
    assert {record["outcome"] for record in reported.values()} == {"imported"}
    for record in reported.values():
        # nsqd itself may rename a file that it has read to its end.
        assert {finding["kind"] for finding in record["findings"]} <= {"note"}, record
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before

    # The expected contents: nsqd delivers the messages of a copy of its files.
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

    # The contents are exactly the messages that were published and not finished.
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
    assert reported["clicks"]["messages"] == 630  # each is counted once, although three channels have it
    assert reported["waiting"]["waiting"] == 40


# ---------------------------------------------------------------------- damaged files


def last_data_file(folder: Path) -> Path:
    """Return the last file of the channel's queue."""
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
    """Make the metadata stale, as after kill -9: nsqd wrote more to the last file and read further."""
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
    """Make the metadata name a write position beyond the end of the last file."""
    path = folder / "topic:channel.diskqueue.meta.dat"
    depth, read, write = path.read_text().splitlines()
    number, position = write.split(",")
    path.write_text(f"{int(depth) + 2}\n{read}\n{number},{int(position) + 100}\n")


@pytest.mark.parametrize(
    ("damage", "damaged"),
    [
        *((break_size, True), (lose_file, True), (break_meta, True), (older_meta, False)),
        *in_soak((cut, True), (small_size, True), (lose_meta, True)),
        *in_soak((older_meta_and_cut, True), (longer_meta, True)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_import_of_damaged_files_matches_nsqd_and_names_them(
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
    # The findings name every file that nsqd renames to *.bad.
    put_aside = {path.name.removesuffix(".bad") for path in source.glob("topic:channel.*.bad")}
    assert put_aside <= {Path(finding["file"]).name for finding in record["findings"]}


async def receive_all(broker: Broker, channel: str = "channel") -> list[Copy]:
    """Return all messages that nsqd still delivers. Its depth is wrong after a kill, or if files are damaged."""
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


async def test_import_after_nsqd_was_killed(tmp_path: Path) -> None:
    """The import contains all messages that nsqd wrote to disk. Messages in memory are lost, to nsqd as well."""
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


# ---------------------------------------------------------------------- refusals


async def test_import_refuses_the_folder_of_a_running_nsqd(tmp_path: Path) -> None:
    with nsqd(tmp_path / "nsqd"):
        refused = run_import(tmp_path / "nsqd", tmp_path / "ours")
    assert (refused.code, refused.out) == (1, "")
    assert "in use by a running nsqd: stop it first" in refused.err
    assert not (tmp_path / "ours").exists()


async def test_broker_refuses_the_folder_of_nsqd_and_suggests_the_import(tmp_path: Path) -> None:
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
