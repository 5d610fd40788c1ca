"""Tests for `qcli pub --strategy`: brokers get messages in turn, or by key, and stand in for each other."""

import json
import random
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.support import Cli, Running, lines
from interop.peers import Broker, nsqd, nsqlookupd, qcli_lookupd, qcli_serve
from qcli.commands.pub.batches import Batch, Lines
from qcli.commands.pub.input import Splitter
from qcli.commands.pub.keys import in_field, key_of, matching, whole_bodies
from qcli.commands.pub.pipeline import PublishPipeline
from qcli.commands.pub.publisher import Publisher
from qcli.commands.pub.strategy import KeyHash, RoundRobin, Strategy
from qcli.framework.errors import ExitCode
from soak import examples, in_soak
from trio_nsq.client import BrokerError, ConnectionLost, PublishFailed

# ---------------------------------------------------------------------- without brokers

BY_BODY = partial(KeyHash, keys=whole_bodies)


class FakeBroker:
    """A sender to a broker that a test takes down.

    Attributes:
        stored: All messages, as often as they were stored.
        failure: What every send fails with; None: sends succeed.
        keeps: Whether a failing broker stores the messages, and only the answer is lost.
        hangs: Sends never return.
    """

    batch_size = 1000

    def __init__(self, *, numbered: bool = False) -> None:
        self.stored: list[bytes] = []
        self.failure: Exception | None = None
        self.keeps = self.hangs = False
        self.at_once = 1 if numbered else 4
        self.may_repeat = not numbered
        self.numbered: list[list[bytes]] = []
        self.sends = 0

    async def send(self, batch: Batch) -> None:
        await trio.lowlevel.checkpoint()
        self.sends += 1
        if self.hangs:
            await trio.sleep_forever()
        if self.failure is None or self.keeps:
            repeated = not self.may_repeat and batch.bodies in self.numbered
            self.numbered.append(batch.bodies)
            self.stored += [] if repeated else batch.bodies
        if self.failure is not None:
            lost = isinstance(self.failure, ConnectionLost)
            raise PublishFailed("reason", maybe_stored=lost) from self.failure

    async def end(self) -> None:
        """Nothing to send."""


LOST = ConnectionLost("broker", "gone")
DRAINING = BrokerError("broker", "E_MPUB_FAILED", "MPUB failed DRAINING: publish to another broker")


def publish(
    bodies: Sequence[bytes],
    brokers: Sequence[FakeBroker],
    strategy: Callable[[Sequence[Publisher]], Strategy],
    *,
    during: Callable[[PublishPipeline], object] = lambda pipeline: None,
    batch_size: int = 10,
    path: Path,
) -> PublishPipeline:
    """Publish lines to brokers `0`, `1` and so on. `during` runs ten virtual seconds after the first read."""
    path.write_bytes(lines(bodies))

    async def main() -> PublishPipeline:
        pipeline = PublishPipeline(
            {f"{place}": broker for place, broker in enumerate(brokers)},
            Lines(Splitter(b"\n", 1000), batch_size, "t"),
            strategy=strategy,
        )

        async def act() -> None:
            while not pipeline.result.read_bytes:  # a thread opens the file, in real time
                await trio.lowlevel.checkpoint()
            await trio.sleep(10)
            during(pipeline)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(act)
            await pipeline.run([str(path)], 4096)
            nursery.cancel_scope.cancel()
        return pipeline

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


@settings(max_examples=examples(30), deadline=None)
@given(count=st.integers(0, 60), batch_size=st.integers(1, 20), brokers=st.integers(1, 4))
def test_round_robin_is_even(
    tmp_path_factory: pytest.TempPathFactory, count: int, batch_size: int, brokers: int
) -> None:
    senders = [FakeBroker() for _ in range(brokers)]
    path = tmp_path_factory.getbasetemp() / "round-robin"
    pipeline = publish(numbers(count), senders, RoundRobin, batch_size=batch_size, path=path)
    assert pipeline.result.acknowledged == count
    for place, sender in enumerate(senders):
        assert sender.stored == numbers(count)[place::brokers]


@settings(max_examples=examples(30), deadline=None)
@given(bodies=st.lists(st.sampled_from(numbers(30)), max_size=60), brokers=st.integers(1, 4))
def test_hash_keeps_keys_together_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, bodies: list[bytes], brokers: int
) -> None:
    senders = [FakeBroker() for _ in range(brokers)]
    publish(bodies, senders, BY_BODY, path=tmp_path_factory.getbasetemp() / "hash")
    for place, sender in enumerate(senders):
        assert sender.stored == [body for body in bodies if crc32(body) % brokers == place]


@pytest.mark.parametrize("strategy", [RoundRobin, BY_BODY])
@pytest.mark.parametrize("failure", [LOST, DRAINING], ids=["down", "draining"])
def test_messages_of_an_unavailable_broker_go_to_the_next(
    strategy: Callable[[Sequence[Publisher]], Strategy],
    failure: Exception,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    senders = [FakeBroker(), FakeBroker(), FakeBroker()]
    senders[1].failure = failure
    result = publish(numbers(500), senders, strategy, path=tmp_path / "lines").result
    assert sorted(senders[0].stored + senders[2].stored, key=int) == numbers(500)
    assert senders[1].stored == []
    assert (result.acknowledged, [each.failure for each in result.brokers]) == (500, [None] * 3)
    assert [each.acknowledged for each in result.brokers] == [len(each.stored) for each in senders]
    (warning,) = capfd.readouterr().err.splitlines()
    what = "is unreachable (reason)" if failure is LOST else "refused: DRAINING: publish to another broker"
    where = (
        "Meanwhile its messages go to the other brokers."
        if strategy is RoundRobin
        else "Meanwhile messages with its keys go to the next broker, 2."
    )
    assert warning == f"Warning: the broker at 1 {what}. Retrying until it accepts messages. {where}"
    if strategy is BY_BODY:
        assert senders[0].stored == [body for body in numbers(500) if crc32(body) % 3 == 0]
    # What was sent before the connection was lost may be stored twice, and is reported.
    assert (result.brokers[1].moved_in_doubt > 0) == (failure is LOST)


@pytest.mark.parametrize("kept", [True, False])
def test_numbered_batch_in_doubt_stays_at_its_broker(tmp_path: Path, kept: bool) -> None:
    """Its broker would detect the repetition, another one would store it again."""
    senders = [FakeBroker(numbered=True), FakeBroker(numbered=True)]
    senders[0].failure, senders[0].keeps = LOST, kept

    def repair(_: PublishPipeline) -> None:
        assert sorted(senders[1].stored, key=int) == [body for body in numbers(200) if body not in doubtful]
        senders[0].failure = None

    doubtful = numbers(10)[::2]
    result = publish(numbers(200), senders, RoundRobin, during=repair, path=tmp_path / "lines").result
    assert senders[0].stored == doubtful
    assert Counter(senders[0].stored + senders[1].stored) == Counter(numbers(200))
    assert (result.acknowledged, result.brokers[0].maybe_stored) == (200, 0)
    assert result.brokers[0].moved_in_doubt == 0


def test_signal_reports_what_is_in_doubt(tmp_path: Path) -> None:
    senders = [FakeBroker(numbered=True), FakeBroker(numbered=True)]
    senders[0].failure = LOST

    def stop(pipeline: PublishPipeline) -> None:
        pipeline.stop(ExitCode.INTERRUPTED)

    result = publish(numbers(200), senders, RoundRobin, during=stop, path=tmp_path / "lines").result
    assert len(senders[1].stored) == 195
    first, second = result.brokers
    assert (first.acknowledged, first.maybe_stored, first.not_stored) == (0, 5, 0)
    assert (second.acknowledged, second.maybe_stored, second.failure) == (195, 0, None)
    assert first.failure is not None


def test_broker_that_comes_back_gets_messages_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    senders = [FakeBroker(), FakeBroker()]
    senders[0].failure = DRAINING

    class Slow(FakeBroker):
        async def send(self, batch: Batch) -> None:
            await trio.sleep(0.5)
            await super().send(batch)

    senders[1] = Slow()

    def repair(_: PublishPipeline) -> None:
        assert senders[0].stored == []
        senders[0].failure = None

    result = publish(numbers(3000), senders, RoundRobin, during=repair, path=tmp_path / "lines").result
    assert len(senders[0].stored) > 100
    assert Counter(senders[0].stored + senders[1].stored) == Counter(numbers(3000))
    assert result.acknowledged == 3000
    assert capfd.readouterr().err.endswith("Note: the broker at 0 accepts messages again.\n")
    assert senders[0].sends < len(senders[0].stored)  # it was not tried with every batch


def test_all_are_down_then_one_comes_back(tmp_path: Path) -> None:
    senders = [FakeBroker(), FakeBroker()]
    for sender in senders:
        sender.failure = LOST

    def repair(_: PublishPipeline) -> None:
        senders[1].failure = None

    result = publish(numbers(100), senders, RoundRobin, during=repair, path=tmp_path / "lines").result
    assert Counter(senders[1].stored) == Counter(numbers(100))
    assert result.acknowledged == 100


def test_hung_broker_delays_only_what_it_has_taken(tmp_path: Path) -> None:
    senders = [FakeBroker(numbered=True), FakeBroker(numbered=True)]
    senders[0].hangs = True

    def check(pipeline: PublishPipeline) -> None:
        assert len(senders[1].stored) == 195
        pipeline.stop(ExitCode.INTERRUPTED)
        senders[0].hangs = False

    class Hung(FakeBroker):
        """Answers ten seconds later."""

        async def send(self, batch: Batch) -> None:
            if not self.stored:
                await trio.sleep(15)
            await super().send(batch)

    senders[0] = Hung(numbered=True)
    result = publish(numbers(200), senders, RoundRobin, during=check, path=tmp_path / "lines").result
    assert Counter(senders[0].stored + senders[1].stored) == Counter(numbers(200))
    assert len(senders[0].stored) == 5
    assert result.acknowledged == 200


class Flaky(FakeBroker):
    """Often refuses batches, or loses the connection before or after it has stored them; not the first batch."""

    def __init__(self, seed: object, *, numbered: bool) -> None:
        super().__init__(numbered=numbered)
        self._random = random.Random(str(seed))

    async def send(self, batch: Batch) -> None:
        await trio.sleep(self._random.random() / 100)
        self.keeps = self._random.random() < 0.5
        # The first batch is accepted: a refusal before that may be an error of the command line.
        self.failure = self._random.choice([None, None, LOST, DRAINING]) if self.stored else None
        if self.failure is DRAINING:
            self.keeps = False
        await super().send(batch)


@pytest.mark.parametrize("seed", [0, 1, *in_soak(*range(2, 8))])
@pytest.mark.parametrize("strategy", [RoundRobin, BY_BODY])
@pytest.mark.parametrize("numbered", [True, False])
def test_flaky_brokers_store_every_message(
    tmp_path: Path, seed: int, strategy: Callable[[Sequence[Publisher]], Strategy], numbered: bool
) -> None:
    """Exactly once if batches are numbered, else at least once."""
    brokers = [Flaky((seed, place), numbered=numbered) for place in range(3)]
    result = publish(numbers(400), brokers, strategy, path=tmp_path / "lines").result
    counts = Counter(body for each in brokers for body in each.stored)
    assert set(counts) == set(numbers(400))
    assert result.acknowledged == 400
    assert [(each.maybe_stored, each.not_stored) for each in result.brokers] == [(0, 0)] * 3
    if numbered:
        assert set(counts.values()) == {1}


def test_refusal_of_all_ends_the_command(tmp_path: Path) -> None:
    senders = [FakeBroker(), FakeBroker()]
    for sender in senders:
        sender.failure = DRAINING
    result = publish(numbers(10), senders, RoundRobin, path=tmp_path / "lines").result
    assert result.acknowledged == 0
    assert any(each.failure for each in result.brokers)
    assert sum(each.not_stored for each in result.brokers) == 10


# ---------------------------------------------------------------------- keys


def test_keys() -> None:
    batch = Batch("t", [b"a=1;b=2", b"b=3", b"\xff"])
    assert matching(re.compile(rb"a=(\d)"))(batch) == [b"1", None, None]
    assert matching(re.compile(rb"b=\d"))(batch) == [b"b=2", b"b=3", None]
    assert matching(re.compile(rb"[\xff]"))(batch) == [None, None, b"\xff"]
    found = Batch(
        "t", [b'{"user": {"id": 7}}', b'{"user": null}', b"x", b"[" * 9000, '{"user": {"id": "ä"}}'.encode()]
    )
    assert in_field(["user", "id"])(found) == [b"7", None, None, None, "ä".encode()]
    assert key_of({"a": [1, {"b": True}]}, ["a"]) == b'[1, {"b": true}]'


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--key", "x"], "--key is for --strategy hash."),
        (["--strategy", "round-robin", "--key-field", "x"], "--key-field is for --strategy hash."),
        (
            ["--strategy", "hash", "--key", "x", "--key-field", "x"],
            "--key and --key-field exclude each other.",
        ),
        (
            ["--strategy", "hash", "--key", "("],
            "'(' is not a regular expression: missing ), unterminated subpattern",
        ),
        (["--strategy", "hash", "--key-field", "a..b"], "'a..b' is not a field such as user or user.id."),
    ],
)
def test_usage_errors(nowhere: Cli, args: list[str], reason: str) -> None:
    result = nowhere("pub", "t", *args)
    assert result.code == 2
    assert reason in result.err


# ---------------------------------------------------------------------- with brokers


@contextmanager
def three_brokers(tmp_path: Path) -> Iterator[tuple[list[Broker], Cli]]:
    """Run three brokers with the topic `t`, and a `Cli` for all of them."""
    with ExitStack() as stack:
        brokers = [stack.enter_context(qcli_serve(tmp_path / name)) for name in ("a", "b", "c")]
        for each in brokers:
            each.create("t", "c")
        yield (
            brokers,
            Cli(
                ",".join(each.tcp_address for each in brokers),
                ",".join(each.http_address for each in brokers),
            ),
        )


def kept(broker: Broker) -> list[bytes]:
    return Cli(broker.tcp_address, broker.http_address).retained("t")


class Steady:
    """Publishes numbered lines with a running command, one batch after the other."""

    def __init__(self, pub: Running) -> None:
        self.count = 0
        self._pub = pub

    def write(self, count: int) -> None:
        self._pub.write(lines([b"%d" % number for number in range(self.count, self.count + count)]))
        self.count += count

    def write_until(self, text: str) -> str:
        """Write until the command prints a line with this text; return the line."""
        heard: list[str] = []
        listener = threading.Thread(target=lambda: heard.append(self._pub.hear_line()))
        listener.start()
        while listener.is_alive():
            self.write(30)
            listener.join(0.02)
        assert text in heard[0], heard
        return heard[0]


def test_each_broker_gets_a_part(tmp_path: Path) -> None:
    with three_brokers(tmp_path) as (brokers, all_three):
        bodies = numbers(3000)
        result = all_three("pub", "t", "--strategy", "round-robin", stdin=lines(bodies))
        assert result.code == 0
        counts = ", ".join(f"{each.tcp_address}: 1,000" for each in brokers)
        assert result.err.startswith(f"3,000 messages (10.6 KiB) published to t on 3 brokers ({counts}) in ")
        assert [kept(each) for each in brokers] == [bodies[place::3] for place in range(3)]


@pytest.mark.parametrize("as_json", [True, False])
def test_keys_of_messages_choose_the_broker(tmp_path: Path, as_json: bool) -> None:
    users = [f"u{number % 17}" for number in range(500)]
    bodies = [json.dumps({"user": {"id": user}, "n": place}).encode() for place, user in enumerate(users)]
    given_lines = bodies
    args = ["--key-field", "user.id"]
    if as_json:
        args = ["--format", "json", "--key", '"id": "([^"]*)']
        given_lines = [json.dumps({"body": body.decode()}).encode() for body in bodies]
    with three_brokers(tmp_path) as (brokers, all_three):
        result = all_three("pub", "t", "--strategy", "hash", *args, stdin=lines(given_lines))
        assert result.code == 0
        for place, broker in enumerate(brokers):
            assert kept(broker) == [
                body for body, user in zip(bodies, users, strict=True) if crc32(user.encode()) % 3 == place
            ]


@pytest.mark.parametrize("strategy", ["round-robin", "hash"])
def test_nothing_is_lost_or_doubled_over_a_kill(tmp_path: Path, strategy: str) -> None:
    """Numbered batches: what was in doubt waits for the killed broker, the rest goes to the others."""
    with three_brokers(tmp_path) as (brokers, all_three):
        with all_three.running("pub", "t", "--strategy", strategy) as pub:
            writer = Steady(pub)
            writer.write(300)
            killed = brokers[1]
            killed.process.send_signal(signal.SIGKILL)
            killed.process.wait()
            warning = writer.write_until(f"the broker at {killed.tcp_address} is unreachable (")
            assert " Meanwhile " in warning
            again = (f"--tcp-address={killed.tcp_address}", f"--http-address={killed.http_address}")
            writer.write(3000)
            with qcli_serve(tmp_path / "b", *again) as anew:
                writer.write_until(f"Note: the broker at {killed.tcp_address} accepts messages again.")
                result = pub.end()
                assert result.code == 0
                found = [kept(each) for each in (brokers[0], anew, brokers[2])]
        assert Counter(body for part in found for body in part) == Counter(numbers(writer.count))
        assert len(found[0]) + len(found[2]) >= 3000 * 2 / 3
        assert f"{writer.count:,} messages" in result.err


def test_draining_broker_gets_nothing(tmp_path: Path) -> None:
    with three_brokers(tmp_path) as (brokers, all_three):
        brokers[0].put("/config/draining", b"true")
        result = all_three("pub", "t", "--strategy", "round-robin", stdin=lines(numbers(1000)))
        assert result.code == 0
        warning, report = result.err.splitlines()
        assert warning.startswith(f"Warning: the broker at {brokers[0].tcp_address} refused: DRAINING: ")
        assert f" ({brokers[0].tcp_address}: 0, {brokers[1].tcp_address}: " in report
        assert kept(brokers[0]) == []
        assert Counter(kept(brokers[1]) + kept(brokers[2])) == Counter(numbers(1000))


def test_stopped_broker_does_not_stop_the_others(tmp_path: Path) -> None:
    """A broker that hangs from the start on: the command does not wait for it."""
    with three_brokers(tmp_path) as (brokers, all_three):
        brokers[2].process.send_signal(signal.SIGSTOP)
        try:
            result = all_three("pub", "t", "--strategy", "round-robin", stdin=lines(numbers(1000)))
        finally:
            brokers[2].process.send_signal(signal.SIGCONT)
        assert result.code == 0
        warning, report = result.err.splitlines()
        assert warning.startswith(
            f"Warning: the broker at {brokers[2].tcp_address} is unreachable (no answer within "
        )
        assert report.startswith("1,000 messages ")
        assert Counter(kept(brokers[0]) + kept(brokers[1])) == Counter(numbers(1000))
        assert kept(brokers[2]) == []


def test_broker_that_is_down_from_the_start(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        down = Cli(f"127.0.0.1:1,{broker.tcp_address}", f"127.0.0.1:1,{broker.http_address}")
        result = down("pub", "t", "--strategy", "round-robin", stdin=b"1\n2\n3\n")
        assert result.code == 0
        assert result.err.startswith(
            "Warning: the broker at 127.0.0.1:1 is unreachable (Connection refused). Retrying until it accepts "
            "messages. Meanwhile its messages go to the other brokers.\n3 messages (3 B) published to t on 2 brokers "
            f"(127.0.0.1:1: 0, {broker.tcp_address}: 3) in "
        )
        assert sorted(kept(broker)) == [b"1", b"2", b"3"]
        failed = down("pub", "t", "--strategy", "round-robin", "--no-retry", stdin=b"1\n")
        assert failed.code == 3
        assert "Nothing was published to any broker." in failed.err


def test_all_are_down(nowhere: Cli) -> None:
    result = nowhere(
        "pub", "t", "--strategy", "hash", "--nsqd-tcp-address", "127.0.0.1:1,127.0.0.1:2", stdin=b"1\n"
    )
    assert result.code == 3
    assert "127.0.0.1:1" in result.err
    assert "127.0.0.1:2" in result.err


def test_brokers_that_take_no_messages_are_left_out(tmp_path: Path) -> None:
    """A draining broker, and one with a tombstone for the topic; our discovery service knows both."""
    with qcli_lookupd() as lookupd, ExitStack() as stack:
        flag = f"--lookupd-tcp-address={lookupd.tcp_address}"
        draining, deleted, left = (stack.enter_context(qcli_serve(tmp_path / name, flag)) for name in "abc")
        for each in (draining, deleted, left):
            each.create("t", "c")
            while f":{port(each)}/t" not in registered(lookupd):
                pass
        draining.put("/config/draining", b"true")
        while f":{port(draining)}/draining" not in registered(lookupd):
            pass
        (node,) = (each for each in nodes(lookupd) if each["tcp_port"] == port(deleted))
        lookupd.post(
            "/topic/tombstone", b"", topic="t", node=f"{node['broadcast_address']}:{node['http_port']}"
        )
        args = ["--lookupd-http-address", lookupd.http_address]
        result = Cli("127.0.0.1:1", "127.0.0.1:1")("pub", "t", *args, stdin=lines(numbers(10)))
        assert result.code == 0
        assert re.search(rf"Note: the broker at \S+:{port(draining)} drains; left out\.\n", result.err)
        assert re.search(
            rf"Note: t has a tombstone for the broker at \S+:{port(deleted)}; left out\.\n", result.err
        )
        assert kept(left) == numbers(10)
        assert kept(draining) == kept(deleted) == []


def test_draining_broker_is_named_once_although_nsqlookupd_does_not_know(tmp_path: Path) -> None:
    with together_registered(tmp_path) as (lookupds, draining, left):
        draining.put("/config/draining", b"true")
        for lookupd in lookupds[:2]:
            while f":{port(draining)}/draining" not in registered(lookupd):
                pass
        while {port(draining), port(left)} != {each["tcp_port"] for each in nodes(lookupds[2])}:
            pass  # it registers again
        args = ["--lookupd-http-address", ",".join(each.http_address for each in lookupds)]
        result = Cli("127.0.0.1:1", "127.0.0.1:1")("pub", "t", *args, stdin=lines(numbers(10)))
        assert (result.code, result.err.count("drains; left out.")) == (0, 1)
        assert kept(left) == numbers(10)


@contextmanager
def together_registered(folder: Path) -> Iterator[tuple[list[Broker], Broker, Broker]]:
    """Run two discovery services of ours, an nsqlookupd, and two brokers with a topic `t` that register there."""
    with qcli_lookupd() as one, qcli_lookupd() as two, nsqlookupd() as theirs:
        flags = [f"--lookupd-tcp-address={each.tcp_address}" for each in (one, two, theirs)]
        with qcli_serve(folder / "a", *flags) as first, qcli_serve(folder / "b", *flags) as second:
            for broker in (first, second):
                broker.create("t", "c")
                for lookupd in (one, two, theirs):
                    while f":{port(broker)}/t" not in registered(lookupd):
                        pass
            yield [one, two, theirs], first, second


def nodes(lookupd: Broker) -> list[dict[str, Any]]:
    """Return the registered brokers."""
    found: list[dict[str, Any]] = json.loads(lookupd.http("GET", "/nodes"))["producers"]
    return found


def registered(lookupd: Broker) -> set[str]:
    """Return `:PORT/TOPIC` for the topics of all brokers, and `:PORT/draining` for those that drain."""
    return {
        f":{each['tcp_port']}/{name}"
        for each in nodes(lookupd)
        for name in [*each["topics"], *(["draining"] if each.get("draining") else [])]
    }


def port(broker: Broker) -> int:
    return int(broker.tcp_address.rpartition(":")[2])


def test_brokers_of_a_discovery_service(tmp_path: Path) -> None:
    """A real nsqd and a broker of ours, registered at nsqlookupd: each message goes to one of them."""
    with nsqlookupd() as lookupd:
        flag = f"--lookupd-tcp-address={lookupd.tcp_address}"
        with qcli_serve(tmp_path / "ours", flag) as ours, nsqd(tmp_path / "nsqd", flag) as theirs:
            for each in (ours, theirs):
                each.create("t", "c")
                while each.tcp_address.rpartition(":")[2].encode() not in lookupd.http("GET", "/nodes"):
                    pass
            qcli = Cli("127.0.0.1:1", "127.0.0.1:1")
            args = ["--lookupd-http-address", lookupd.http_address]
            result = qcli("pub", "t", *args, stdin=lines(numbers(100)))
            assert result.code == 0
            assert " published to t on 2 brokers (" in result.err
            for each in (ours, theirs):
                assert each.channel_stats("t", "c")["depth"] == 50
            everywhere = qcli("pub", "t", *args, "--strategy", "all", stdin=lines(numbers(10)))
            assert everywhere.code == 0
            assert [each.channel_stats("t", "c")["depth"] for each in (ours, theirs)] == [60, 60]
