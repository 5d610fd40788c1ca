"""Kills `qcli to-nsq`, its source and its destination at random moments while messages are published: each message is
once at the destination, in order.

A few kills by default; `FAULT_KILLS` sets another number, `FAULT_SEED` other moments.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from interop.peers import Broker, Child, nsqd, qcli_serve
from soak import in_soak
from trio_nsq.client.http.idempotent_producer import IdempotentProducer

SEED = int(os.environ.get("FAULT_SEED", "7"))
KILLS = int(os.environ.get("FAULT_KILLS", "3"))
DEADLINE_S = 90.0
TOPIC = "clicks"
_AT_ONCE = 40


class Server:
    """A broker that can be killed and started again at the same addresses."""

    def __init__(
        self, data_path: Path, run: Callable[..., AbstractContextManager[Broker]] = qcli_serve
    ) -> None:
        self._run = run
        self._data_path = data_path
        self._flags: list[str] = []
        self._stack = ExitStack()
        self.broker = self._start()
        self._flags = [
            f"--tcp-address={self.broker.tcp_address}",
            f"--http-address={self.broker.http_address}",
        ]

    def _start(self) -> Broker:
        self.broker = self._stack.enter_context(self._run(self._data_path, *self._flags))
        return self.broker

    def kill_and_start(self) -> None:
        self.broker.process.kill()
        self.broker.process.wait()
        self._stack.close()
        self._start()

    def stop_and_start(self) -> None:
        self.broker.process.terminate()
        self.broker.process.wait()
        self._stack.close()
        self._start()

    def close(self) -> None:
        self._stack.close()

    def count(self, topic: str) -> int:
        """Return how many messages a topic has ever had."""
        try:
            bounds = json.loads(self.broker.http("GET", "/topic/bounds", topic=topic))
        except (OSError, RuntimeError):
            return 0
        return int(bounds["next_sequence"])

    def bodies(self, topic: str) -> list[bytes]:
        text = self.broker.http("GET", "/topic/read", topic=topic).decode()
        return [json.loads(line)["body"].encode() for line in text.splitlines()]


class Program:
    """`qcli to-nsq`, which can be killed and started again."""

    def __init__(self, *args: str) -> None:
        self._argv = [sys.executable, "-m", "qcli", "to-nsq", *args]
        self._child = Child(self._argv, {"XDG_CONFIG_HOME": "/nowhere"})

    def kill_and_start(self) -> None:
        assert self._child.process.poll() is None, self._child.stderr.seen
        self._child.close()
        self._child = Child(self._argv, {"XDG_CONFIG_HOME": "/nowhere"})

    def close(self) -> None:
        self._child.close()

    @property
    def said(self) -> list[str]:
        return self._child.stderr.seen

    def peak_bytes(self) -> int:
        """Return the most memory that the process has had."""
        status = Path(f"/proc/{self._child.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024


class Publisher:
    """Publishes numbered batches to the source in a thread, each once, also over its restarts."""

    def __init__(self, address: str) -> None:
        self.published = 0
        self._producer = IdempotentProducer(address, TOPIC, "load", patience_s=DEADLINE_S)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for number in range(sys.maxsize):
            if self._stopping.is_set():
                return
            bodies = [self.body(number * _AT_ONCE + each) for each in range(_AT_ONCE)]
            self._producer.publish(bodies, number)
            self.published += _AT_ONCE

    @staticmethod
    def body(number: int) -> bytes:
        return b'{"number":%d,"kind":"%s"}' % (number, b"odd" if number % 2 else b"even")

    def stop(self) -> int:
        """Return how many messages were published."""
        self._stopping.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._producer.close()
        return self.published


@contextmanager
def servers(tmp_path: Path, *names: str) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        found = [Server(tmp_path / name) for name in names]
        for server in found:
            stack.callback(server.close)
        yield found


def destinations(*targets: Server) -> list[str]:
    return [
        flag
        for target in targets
        for flag in (
            f"--destination-nsqd-tcp-address={target.broker.tcp_address}",
            f"--destination-nsqd-http-address={target.broker.http_address}",
        )
    ]


def wait_for(what: str, done: Iterator[bool], program: Program) -> None:
    deadline = time.monotonic() + DEADLINE_S
    for is_done in done:
        if is_done:
            return
        assert time.monotonic() < deadline, (what, program.said)
        time.sleep(0.02)  # another process, which sends no event


def counts(targets: list[Server], topics: list[str], wanted: int) -> Iterator[bool]:
    while True:
        yield sum(target.count(topic) for target in targets for topic in topics) >= wanted


@pytest.mark.slow
@pytest.mark.parametrize("targets", [*in_soak(1), 2])
def test_each_message_once_over_kills(tmp_path: Path, targets: int) -> None:
    chance = random.Random(SEED + targets)
    with servers(tmp_path, "source", *(f"target{number}" for number in range(targets))) as (source, *found):
        flags = [TOPIC, f"--nsqd-tcp-address={source.broker.tcp_address}"]
        flags += [f"--nsqd-http-address={source.broker.http_address}", *destinations(*found)]
        program = Program(*flags, "--mode=round-robin")
        publisher = Publisher(source.broker.http_address)
        try:
            for kill in range(KILLS):
                before = sum(target.count(TOPIC) for target in found)
                wait_for("copies go on", counts(found, [TOPIC], before + _AT_ONCE), program)
                # Between a part of a batch and many batches later.
                time.sleep(chance.random() * 0.3)
                victims: list[Server | Program] = [source, *found, program]
                (chance.choice(victims) if kill else program).kill_and_start()
            count = publisher.stop()
            wait_for("all are copied", counts(found, [TOPIC], count), program)
        finally:
            publisher.stop()
            program.close()
        copies = [target.bodies(TOPIC) for target in found]
        numbers = [[json.loads(body)["number"] for body in each] for each in copies]
        assert sorted(number for each in numbers for number in each) == list(range(count))
        assert all(each == sorted(each) for each in numbers)


@pytest.mark.slow
def test_filtered_messages_once_over_kills(tmp_path: Path) -> None:
    """Filters drop most messages, so that most positions are in the channel only."""
    chance = random.Random(SEED)
    with servers(tmp_path, "source", "target") as (source, target):
        source.broker.post("/pub", b"not JSON", topic=TOPIC)
        program = Program(
            *(
                TOPIC,
                f"--nsqd-tcp-address={source.broker.tcp_address}",
                "--where=kind=odd",
                "--fields=number",
            ),
            *(f"--nsqd-http-address={source.broker.http_address}", *destinations(target)),
        )
        publisher = Publisher(source.broker.http_address)
        try:
            for _ in range(KILLS):
                before = target.count(TOPIC)
                wait_for("copies go on", counts([target], [TOPIC], before + _AT_ONCE), program)
                time.sleep(chance.random() * 0.3)
                victims: list[Server | Program] = [source, target, program]
                chance.choice(victims).kill_and_start()
            count = publisher.stop()
            wait_for("all are copied", counts([target], [TOPIC], count // 2), program)
        finally:
            publisher.stop()
            program.close()
        assert target.bodies(TOPIC) == [b'{"number":%d}' % number for number in range(1, count, 2)]
        assert target.bodies(f"{TOPIC}.not-json") == [b"not JSON"]


def source_flags(source: Broker) -> list[str]:
    return [f"--nsqd-tcp-address={source.tcp_address}", f"--nsqd-http-address={source.http_address}"]


@pytest.mark.slow
def test_two_programs_at_the_same_time(tmp_path: Path) -> None:
    """Each cuts the messages into other batches, and one is often behind the other."""
    with servers(tmp_path, "source", "target") as (source, target), ExitStack() as stack:
        programs = [
            Program(TOPIC, *source_flags(source.broker), *destinations(target), *more)
            for more in ([], ["--match=odd|even"])
        ]
        for program in programs:
            stack.callback(program.close)
        publisher = Publisher(source.broker.http_address)
        try:
            for _ in range(3):
                before = target.count(TOPIC)
                wait_for("copies go on", counts([target], [TOPIC], before + 5 * _AT_ONCE), programs[0])
                programs[1].kill_and_start()
        finally:
            count = publisher.stop()
        wait_for("all are copied", counts([target], [TOPIC], count), programs[0])
        assert target.bodies(TOPIC) == [Publisher.body(number) for number in range(count)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_while_the_destination_does_not_answer(tmp_path: Path) -> None:
    with servers(tmp_path, "source", "target") as (source, target), ExitStack() as stack:
        program = Program(TOPIC, *source_flags(source.broker), *destinations(target))
        stack.callback(program.close)
        source.broker.post("/pub", b"first", topic=TOPIC)
        wait_for("copies begin", counts([target], [TOPIC], 1), program)
        before = program.peak_bytes()
        target.broker.process.send_signal(signal.SIGSTOP)
        try:
            bodies = [b"%06d" % number + bytes(100_000) for number in range(500)]
            for body in bodies:
                source.broker.post("/pub", body, topic=TOPIC)
            # Until it has received what it can; then its memory does not grow any more.
            peak = 0
            while peak < (peak := program.peak_bytes()):
                time.sleep(1)
        finally:
            target.broker.process.send_signal(signal.SIGCONT)
        wait_for("all are copied", counts([target], [TOPIC], len(bodies) + 1), program)
        assert peak - before < 30 * 1024 * 1024
        assert program.peak_bytes() - before < 30 * 1024 * 1024


@pytest.mark.slow
def test_full_destination_is_waited_for(tmp_path: Path) -> None:
    with servers(tmp_path, "source", "target") as (source, target), ExitStack() as stack:
        target.broker.create(TOPIC, "slow")
        target.broker.put("/topic/settings", b'{"max_messages": 100, "when_full": "reject"}', topic=TOPIC)
        for number in range(500):
            source.broker.post("/pub", b"%d" % number, topic=TOPIC)
        program = Program(TOPIC, *source_flags(source.broker), *destinations(target))
        stack.callback(program.close)
        wait_for(
            "the refusal is reported",
            (any("it refused: topic" in line for line in program.said) for _ in loop()),
            program,
        )
        target.broker.put("/topic/settings", b'{"max_messages": 0}', topic=TOPIC)
        wait_for("all are copied", counts([target], [TOPIC], 500), program)
        wait_for(
            "the end of it is reported",
            (any("again" in line for line in program.said) for _ in loop()),
            program,
        )
        assert target.bodies(TOPIC) == [b"%d" % number for number in range(500)]
        assert len([line for line in program.said if "Warning" in line]) == 1


@pytest.mark.slow
def test_at_least_once_another_destination_takes_over(tmp_path: Path) -> None:
    with servers(tmp_path, "source", "one", "two") as (source, *found), ExitStack() as stack:
        program = Program(
            *(
                TOPIC,
                *source_flags(source.broker),
                *destinations(*found),
                "--at-least-once",
                "--mode=round-robin",
            ),
        )
        stack.callback(program.close)
        publisher = Publisher(source.broker.http_address)
        try:
            for target in found:
                wait_for("both get messages", counts([target], [TOPIC], _AT_ONCE), program)
            found[0].broker.process.kill()
            found[0].broker.process.wait()
            before = found[1].count(TOPIC)
            wait_for("the other one takes over", counts([found[1]], [TOPIC], before + 10 * _AT_ONCE), program)
            found[0].kill_and_start()
        finally:
            count = publisher.stop()
        wanted = set(range(count))

        def copied() -> Iterator[bool]:
            while True:
                bodies = [body for target in found for body in target.bodies(TOPIC)]
                yield {json.loads(body)["number"] for body in bodies} == wanted

        wait_for("all are copied", copied(), program)


@pytest.mark.slow
@pytest.mark.interop
@pytest.mark.parametrize("side", ["source", "target"])
def test_nsqd_is_restarted(tmp_path: Path, side: str) -> None:
    """An nsqd that ends in good order keeps its messages; each message is copied at least once."""
    with servers(tmp_path, "ours") as (ours,), ExitStack() as stack:
        theirs = Server(tmp_path / "theirs", nsqd)
        stack.callback(theirs.close)
        source, target = (theirs, ours) if side == "source" else (ours, theirs)
        source.broker.create(TOPIC, "nsq_to_nsq")
        target.broker.create(TOPIC, "check")
        program = Program(TOPIC, *source_flags(source.broker), *destinations(target))
        stack.callback(program.close)
        for start in range(0, 3000, 1000):
            bodies = [b"%d" % number for number in range(start, start + 1000)]
            source.broker.post("/mpub", b"\n".join(bodies), topic=TOPIC)
            if start == 1000:
                # A program that has just started ends if no broker answers.
                wait_for("copies begin", depth_of(target, 1000), program)
                theirs.stop_and_start()
        # From a restarted nsqd, some are copied more than once.
        copied = has_numbers(target, 3000) if side == "source" else depth_of(target, 3000)
        wait_for("all are copied", copied, program)


def has_numbers(target: Server, end: int) -> Iterator[bool]:
    while True:
        yield {int(body) for body in target.bodies(TOPIC)} == set(range(end))


def depth_of(target: Server, wanted: int) -> Iterator[bool]:
    while True:
        yield target.broker.channel_stats(TOPIC, "check")["depth"] >= wanted


def loop() -> Iterator[None]:
    while True:
        yield
