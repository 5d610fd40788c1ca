"""Tests for moves to another broker while something fails: each message is there once per channel.

Brokers and `qcli drain` are killed at random moments, the power fails, publishers fail over, the target's disk is full.
More rounds with `FAULT_COMPLETE=1`.
"""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from broker.api import running_api
from broker.moving import Mover, waiting
from cli.support import Cli, Running
from faults.disk import RecordingFiles, disk_at, write_image
from faults.small_disk import on_small_disk
from interop.peers import Broker, qcli_serve
from log.support import HastyFiles
from trio_nsq.api.broker import bounds
from trio_nsq.client import RequestRefused
from trio_nsq.client.http.broker_http import BrokerHTTP

SEED = int(os.environ.get("FAULT_SEED", "7"))
COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
KILLS = 60 if COMPLETE else 5
CUTS = 200 if COMPLETE else 3
PATIENCE_S = 120
CHANNELS = ("all", "half", "late")
MESSAGES = 4000 if COMPLETE else 1000


class Life:
    """A broker that is killed and started again with the same data and addresses."""

    def __init__(self, start: Callable[[], AbstractContextManager[Broker]]) -> None:
        self._start = start
        self._stack = ExitStack()
        self.broker = self._stack.enter_context(start())

    def kill(self) -> None:
        """Kill it with SIGKILL, and start it again."""
        self.broker.process.kill()
        self.broker.process.wait()
        self._stack.close()
        self.broker = self._stack.enter_context(self._start())

    def close(self) -> None:
        """Stop it."""
        self._stack.close()


def bodies(broker: Broker, topic: str, channel: str) -> Counter[str]:
    """Return the bodies in a channel, with their numbers."""
    params = {"topic": topic, "channel": channel, "max_messages": "10000"}
    answer = BrokerHTTP(broker.http_address).request("GET", "/channel/peek", params)
    return Counter(json.loads(line)["body"] for line in answer.splitlines())


def stored_in(broker: Broker) -> int:
    """Return how many messages the topic has had."""
    try:
        return BrokerHTTP(broker.http_address).ask(bounds("t"))["next_sequence"]
    except RequestRefused:
        return 0  # there is no such topic yet


def fill(cli: Cli, broker: Broker) -> dict[str, Counter[str]]:
    """Fill three channels, and return what is left in each."""
    broker.create("t", *CHANNELS)
    numbered = [b"%05d " % number + b"x" * 200 for number in range(MESSAGES)]
    cli.publish("t", numbered, at_once=500)
    assert cli("tail", "t/half", "-n", str(MESSAGES // 2)).code == 0
    for number in range(20):
        broker.post("/pub", b"deferred %d" % number, topic="t", defer=3_600_000 + 1000 * (number % 7))
    cli.wait_until("t/half", lambda record: record["in_flight_count"] == 0)
    return {channel: bodies(broker, "t", channel) for channel in CHANNELS}


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["always", "interval"] if COMPLETE else ["always"])
def test_kills(tmp_path: Path, sync: str) -> None:
    """Kill qcli, the source and the target in turn, at random moments of a move."""
    chance = random.Random(SEED)
    addresses = {name: str(tmp_path / f"{name}.sock") for name in ("source", "target")}

    def life(name: str, *flags: str) -> Life:
        http = f"--http-address={addresses[name]}"
        return Life(lambda: qcli_serve(tmp_path / name, http, f"--sync={sync}", *flags))

    # A small limit makes many small batches.
    lives = {
        "source": life("source"),
        "target": life("target", "--max-body-size=4000", "--max-msg-size=4000"),
    }
    try:
        with qcli_serve(tmp_path / "plain") as plain:  # to fill over TCP and HTTP
            expected = fill(Cli(plain.tcp_address, plain.http_address), plain)
        # The source gets the files of the filled broker.
        lives["source"].close()
        (tmp_path / "source").rename(tmp_path / "unused")
        (tmp_path / "plain").rename(tmp_path / "source")
        lives["source"] = life("source")
        cli = Cli("127.0.0.1:1", addresses["source"])
        killed: Counter[str] = Counter()
        while killed.total() < KILLS:
            victim = chance.choice(["qcli", "source", "target"])
            more = stored_in(lives["target"].broker) + chance.randint(1, 9 * MESSAGES // 4 // KILLS)
            with cli.running("drain", "--move-to", addresses["target"]) as drain:
                while drain.process.poll() is None and stored_in(lives["target"].broker) < more:
                    pass
                if drain.process.poll() is not None:
                    break
                killed[victim] += 1
                if victim == "qcli":
                    drain.process.kill()
                    drain.process.wait()
                    continue
                lives[victim].kill()
                time.sleep(chance.uniform(0, 0.5))
        result = cli("drain", "--move-to", addresses["target"])
        assert result.code == 0, result.err
        print(f"killed: {dict(killed)}")
        assert killed.total() > KILLS // 2
        target = lives["target"].broker
        for channel in CHANNELS:
            found = bodies(target, "t", channel)
            assert found == expected[channel], _difference(expected[channel], found)
            assert not bodies(lives["source"].broker, "t", channel)
    finally:
        for each in lives.values():
            each.close()


@pytest.mark.slow
def test_several_programs_at_once(tmp_path: Path) -> None:
    """One of them is stopped for a while, and then sends a batch that another one has sent."""
    with (
        qcli_serve(tmp_path / "a") as source,
        qcli_serve(tmp_path / "b", "--max-body-size=4000", "--max-msg-size=4000") as target,
        ExitStack() as stack,
    ):
        cli = Cli(source.tcp_address, source.http_address)
        expected = fill(cli, source)
        drains = [
            stack.enter_context(cli.running("drain", "--move-to", target.http_address)) for _ in range(3)
        ]
        for number, drain in enumerate(drains[:2], 1):
            while stored_in(target) < MESSAGES // 4 * number and drain.process.poll() is None:
                pass
            drain.process.send_signal(signal.SIGSTOP)
        last = drains[2].end()
        assert last.code == 0, last.err
        for drain in drains[:2]:
            drain.process.send_signal(signal.SIGCONT)
            result = drain.end()
            assert result.code == 0, result.err
        for channel in CHANNELS:
            found = bodies(target, "t", channel)
            assert found == expected[channel], _difference(expected[channel], found)
            assert not bodies(source, "t", channel)


def _difference(expected: Counter[str], found: Counter[str]) -> str:
    return f"{len(expected - found)} lost, {(found - expected).total()} more than once"


# ---------------------------------------------------------------------- load


class Publisher:
    """Publishes to the first broker that accepts, as a client that fails over."""

    def __init__(self, brokers: list[Broker], first: int) -> None:
        self.accepted: Counter[str] = Counter()  # by broker
        self._brokers = brokers
        self._number = first
        self._ended = threading.Event()

    def run(self) -> list[str]:
        """Publish until `stop`, and return the acknowledged bodies."""
        done = []
        connections = [HTTPConnection(broker.http_address, timeout=PATIENCE_S) for broker in self._brokers]
        while not self._ended.is_set():
            body = f"message {self._number}"
            self._number += 1
            for connection in connections:
                connection.request("POST", "/pub?topic=t", body)
                answer = connection.getresponse()
                answer.read()
                if answer.status == 200:
                    done.append(body)
                    self.accepted[f"{connection.host}:{connection.port}"] += 1
                    break
        for connection in connections:
            connection.close()
        return done

    def stop(self) -> None:
        """End `run`."""
        self._ended.set()


@pytest.mark.slow
def test_publishers_and_consumers_meanwhile(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "a") as source, qcli_serve(tmp_path / "b") as target, ExitStack() as stack:
        for broker in (source, target):
            broker.create("t", "busy", "idle")
        cli = Cli(source.tcp_address, source.http_address)
        both = ["--nsqd-tcp-address", f"{source.tcp_address},{target.tcp_address}"]
        busy = stack.enter_context(cli.running("tail", "t/busy", *both))
        received: list[str] = []
        reader = threading.Thread(target=_read_lines, args=(busy, received))
        reader.start()
        publishers = [Publisher([source, target], number * 1_000_000) for number in range(3)]
        with ThreadPoolExecutor() as executor:
            runs = [executor.submit(each.run) for each in publishers]
            _until(lambda: sum(each.accepted[source.http_address] for each in publishers) > 300)
            drained = cli("drain", "--move-to", target.http_address)
            assert drained.code == 0, drained.err
            _until(lambda: sum(each.accepted[target.http_address] for each in publishers) > 150)
            for each in publishers:
                each.stop()
            published = [body for run in runs for body in run.result(PATIENCE_S)]
        assert all(each.accepted[source.http_address] for each in publishers)
        assert not json.loads(source.http("GET", "/stats", format="json", topic="t"))["topics"][0]["depth"]
        for channel in ("busy", "idle"):
            stats = source.channel_stats("t", channel)
            assert (stats["depth"], stats["in_flight_count"], stats["deferred_count"]) == (0, 0, 0)
        _until(lambda: len(received) >= len(published))
        busy.process.send_signal(signal.SIGINT)
        reader.join()
        assert Counter(received) == Counter(published)
        there = Cli(target.tcp_address, target.http_address)
        rest = there("tail", "t/idle", "-n", str(len(published)))
        assert Counter(rest.out.decode().splitlines()) == Counter(published)
        assert target.channel_stats("t", "idle")["depth"] == 0


def _read_lines(running: Running, into: list[str]) -> None:
    assert running.process.stdout is not None
    into.extend(line.decode().rstrip("\n") for line in running.process.stdout)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------------- a full disk at the target


@pytest.mark.slow
def test_full_disk_at_the_target(tmp_path: Path) -> None:
    size = 4 * 1024 * 1024
    options: dict[str, Any] = {"max_bytes_per_file": 200_000, "checkpoint_interval_ms": 50}
    with (
        qcli_serve(tmp_path / "a") as source,
        on_small_disk(tmp_path / "b", size, **options) as target,
    ):
        source.create("t", "c")
        cli = Cli(source.tcp_address, source.http_address)
        published = [b"%05d " % number + b"x" * 2000 for number in range(4000)]
        cli.publish("t", published, at_once=500)
        given_up_at_s = time.monotonic() + PATIENCE_S
        told = ""
        while "no space left on device" not in told.lower():
            assert time.monotonic() < given_up_at_s, told
            result = cli("drain", "--move-to", target.http_address, "--timeout", "3s")
            assert result.code == 4, result.err
            told = result.err
        received: list[bytes] = []
        there = Cli(target.tcp_address, target.http_address)
        with there.running("tail", "t/c", "-n", str(len(published))) as tail:
            reader = threading.Thread(target=lambda: received.extend(tail.process.stdout or ()))
            reader.start()
            result = cli("drain", "--move-to", target.http_address)
            assert result.code == 0, result.err
            reader.join(PATIENCE_S)
        assert Counter(line[:5] for line in received) == Counter(body[:5] for body in published)
        assert source.channel_stats("t", "c")["depth"] == 0


# ---------------------------------------------------------------------- power cuts


@pytest.mark.slow
@pytest.mark.parametrize("which", ["source", "target"])
async def test_power_cuts(tmp_path: Path, fast_folder: Path, which: str) -> None:
    """With `--sync=interval`, which may lose what is not synced: a move loses nothing that it has stored."""
    chance = random.Random(SEED)
    small: dict[str, Any] = {
        "sync": "interval",
        "sync_timeout_ms": 3_600_000,
        "max_bytes_per_file": 3000,
        "checkpoint_interval_ms": 50,
    }
    files = {name: RecordingFiles(fast_folder / name, sync_takes_s=0) for name in ("source", "target")}
    # Journal positions at the answers: to `begin`, and how far each stream was stored.
    begun = 0
    stored: list[tuple[int, str, int]] = []
    for name in files:
        (fast_folder / name).mkdir()
    async with (
        running_api(fast_folder / "source/d", files=files["source"], **small) as source,
        running_api(fast_folder / "target/d", files=files["target"], **small) as target,
    ):
        await source.post("/topic/create", topic="t")
        for channel in CHANNELS:
            await source.post("/channel/create", topic="t", channel=channel)
        for number in range(60):
            defer = 3_600_000 if number % 9 == 5 else 0
            await source.post("/pub", b"%05d" % number, topic="t", defer=defer)
        mover = Mover(source, target)
        await mover.drain()
        await mover.begin()
        begun = files[which].position
        for channel in CHANNELS:
            moved: int | None = None
            while True:
                batch = await mover.next(channel, moved, chance.choice([1, 20, 100]))
                if "NSQ-Move-Through" not in batch.headers:
                    break
                await mover.store(channel, batch.content)
                moved = int(batch.headers["NSQ-Move-Through"])
                stored.append((files[which].position, channel, moved))
        journal = files[which].journal
    moments = range(begun, len(journal) + 1)
    chosen = sorted(chance.sample(moments, min(CUTS, len(moments))))
    for now, disk in disk_at(journal, chosen):
        image = chance.choice(list(disk.power_cuts(chance)))[1]
        after = tmp_path / f"after-{now}"
        write_image(image, after)
        async with running_api(after / "d", files=HastyFiles(), **small) as api:
            for channel in CHANNELS:
                told = max((to for at, name, to in stored if name == channel and at <= now), default=-1)
                if which == "target":
                    mover.target = api
                    known = await mover.number(channel) if told >= 0 else None
                    if known is None:
                        assert told == -1, f"at {now}"
                        continue
                    assert known >= told, f"at {now}"
                    found = sorted(each["body"] for each in await waiting(api, "t", channel))
                    assert found == [f"{n:05}" for n in range(known + 1)], f"at {now}"
                else:
                    mover.source = api
                    await mover.drain()
                    batch = await mover.next(channel, told if told >= 0 else None)
                    assert batch.status_code == 200, f"at {now}: {batch.text}"
                    assert int(batch.headers["NSQ-Move-Messages"]) == 60 - (told + 1), f"at {now}"
