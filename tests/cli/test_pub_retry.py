"""Tests for `qcli pub` while its broker is down or refuses messages for a time."""

import random
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from cli.support import Cli, Running, lines
from interop.peers import Broker, nsqd, qcli_serve
from qcli.commands.pub import pipeline as publishing
from qcli.commands.pub.batches import Batch, Lines
from qcli.commands.pub.input import Splitter
from qcli.commands.pub.pipeline import PublishPipeline
from qcli.commands.pub.results import BrokerResult
from qcli.commands.pub.send import MAX_PRODUCERS, Sender
from qcli.framework.errors import ExitCode
from soak import in_soak
from trio_nsq.client import BrokerError, ConnectionLost, PublishFailed

# ---------------------------------------------------------------------- with brokers


def again(broker: Broker) -> tuple[str, str]:
    """Return the flags to restart a broker at the same addresses."""
    return f"--tcp-address={broker.tcp_address}", f"--http-address={broker.http_address}"


def publish_as_producers(broker: Broker, count: int) -> None:
    """Publish a message as each of this many producers. Many requests are sent at once, which costs less."""
    host, _, port = broker.http_address.rpartition(":")
    request = "POST /pub?topic=t&producer=p{}&number=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        for start in range(0, count, 100):
            numbers = range(start, min(start + 100, count))
            connection.sendall("".join(map(request.format, numbers)).encode())
            answers = b""
            while answers.count(b"\r\n\r\nOK") < len(numbers):
                answers += connection.recv(1 << 16)
            assert answers.count(b"HTTP/1.1 200 ") == len(numbers)


def end(broker: Broker, number: signal.Signals) -> None:
    broker.process.send_signal(number)
    broker.process.wait()


class Writer:
    """Writes numbered lines to a command until it is stopped."""

    def __init__(self, command: Running) -> None:
        self.count = 0
        self._command = command
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        while not self._stop.is_set():
            self._command.write(b"%d\n%d\n%d\n" % (self.count, self.count + 1, self.count + 2))
            self.count += 3

    def stop(self) -> list[bytes]:
        """Stop, and return all written lines."""
        self._stop.set()
        self._thread.join()
        return [b"%d" % number for number in range(self.count)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("restarts", [1, *in_soak(3)])
def test_each_line_is_stored_once_and_in_order_over_restarts(
    tmp_path: Path, number: signal.Signals, restarts: int
) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        broker.create("t")
        command = qcli.running("pub", "t")
        pub = command.__enter__()
        writer = Writer(pub)
        qcli.wait_until("t", lambda record: record["message_count"] >= 100)
        end(broker, number)
    try:
        for _ in range(restarts):
            assert pub.hear_line().startswith(f"Warning: the broker at {broker.tcp_address} ")
            with qcli_serve(tmp_path / "data", *again(broker)) as anew:
                assert (
                    pub.hear_line() == f"Note: the broker at {broker.tcp_address} accepts messages again.\n"
                )
                qcli.wait_until("t", lambda record: record["message_count"] >= 100)
                end(anew, number)
        with qcli_serve(tmp_path / "data", *again(broker)):
            written = writer.stop()
            result = pub.end()
            assert result.code == 0
            assert f"{len(written):,} messages" in result.err
            assert qcli.retained("t") == written
    finally:
        command.__exit__(None, None, None)


@pytest.mark.slow
def test_nsqd_gets_each_line_at_least_once(tmp_path: Path) -> None:
    with nsqd(tmp_path / "data", "--mem-queue-size=100") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        broker.create("t", "c")
        command = qcli.running("pub", "t")
        pub = command.__enter__()
        writer = Writer(pub)
        qcli.wait_until("t", lambda record: record["message_count"] >= 100)
        end(broker, signal.SIGTERM)  # a killed nsqd loses its messages in memory
    try:
        assert pub.hear_line().startswith(f"Warning: the broker at {broker.tcp_address} ")
        with nsqd(tmp_path / "data", *again(broker)):
            assert pub.hear_line().startswith(
                f"Note: the broker at {broker.tcp_address} accepts messages again."
            )
            written = writer.stop()
            assert pub.end().code == 0
            seen = set(qcli("tail", "t/c", "--idle-timeout", "1s").out.splitlines())
            assert seen == set(written)
    finally:
        command.__exit__(None, None, None)


@contextmanager
def pub_without_broker(tmp_path: Path, *args: str) -> Iterator[tuple[Running, Broker]]:
    """Run a command that has published `1`, and whose broker is stopped when it publishes `2`."""
    with qcli_serve(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        broker.create("t")
        with qcli.running("pub", "t", *args) as pub:
            pub.write(b"1\n")
            qcli.wait_until("t", lambda record: record["message_count"] == 1)
            end(broker, signal.SIGKILL)
            pub.write(b"2\n")
            assert pub.hear_line().startswith(f"Warning: the broker at {broker.tcp_address} is unreachable (")
            yield pub, broker


@pytest.mark.parametrize(
    ("number", "over_tcp"),
    [
        (signal.SIGINT, True),
        (signal.SIGTERM, False),
        *in_soak((signal.SIGINT, False), (signal.SIGTERM, True)),
    ],
)
def test_signal_in_an_outage_reports_unpublished_messages(
    tmp_path: Path, number: signal.Signals, over_tcp: bool
) -> None:
    args = ["--nsqd-http-address", "127.0.0.1:1"] if over_tcp else []
    with pub_without_broker(tmp_path, *args) as (pub, broker):
        pub.process.send_signal(number)
        result = pub.end()
    assert result.code == ExitCode.PARTIAL
    report, error = result.err.splitlines()
    assert report.startswith("1 message (1 B) published")
    assert error.startswith(f"Error: The connection to the broker at {broker.tcp_address} was lost (")
    assert "1 message acknowledged" in error
    assert error.endswith(("up to 1 more may have been stored.", "1 more had been read."))


def test_signal_during_a_request_reports_that_messages_may_be_stored(tmp_path: Path) -> None:
    """A listener at the broker's address accepts the request and does not answer before the command exits."""
    with pub_without_broker(tmp_path) as (pub, broker):
        host, _, port = broker.http_address.rpartition(":")
        with socket.create_server((host, int(port))) as silent:
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(1)
                pub.process.send_signal(signal.SIGINT)
                result = pub.end()
    assert result.code == ExitCode.PARTIAL
    report, error = result.err.splitlines()
    assert report.startswith("1 message (1 B) published")
    assert error.endswith("1 message acknowledged, up to 1 more may have been stored.")


def test_end_of_input_in_an_outage_keeps_waiting(tmp_path: Path) -> None:
    with pub_without_broker(tmp_path) as (pub, broker):
        assert pub.process.stdin is not None
        pub.process.stdin.close()
        pub.process.stdin = None
        with qcli_serve(tmp_path / "data", *again(broker)) as anew:
            assert pub.end().code == 0
            assert Cli(anew.tcp_address, anew.http_address).retained("t") == [b"1", b"2"]


class LostAnswers:
    """A TCP proxy that forwards requests, and drops the answers of some."""

    def __init__(self, target: str) -> None:
        self.to_lose = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "%s:%d" % self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self._target.rpartition(":")
            broker = socket.create_connection((host, int(port)))
            threading.Thread(target=self._pass, args=(client, broker, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(broker, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(65536):
                if answers and self.to_lose and b"NSQ-Batch" in data:
                    self.to_lose -= 1
                    break
                target.sendall(data)
        except OSError:
            pass
        for sock in (source, target):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        source.close()  # the other thread closes the other socket


def test_batch_with_a_lost_acknowledgement_is_stored_once(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        broker.create("t")
        proxy = LostAnswers(broker.http_address)
        try:
            with Cli(broker.tcp_address, proxy.address).running("pub", "t") as pub:
                qcli = Cli(broker.tcp_address, broker.http_address)
                pub.write(b"1\n")
                qcli.wait_until("t", lambda record: record["message_count"] == 1)
                proxy.to_lose = 2
                pub.write(b"2\n3\n")
                assert "is unreachable" in pub.hear_line()
                assert "accepts messages again.\n" in pub.hear_line()
                pub.write(b"4\n")
                assert pub.end().code == 0
            assert proxy.to_lose == 0
            assert qcli.retained("t") == [b"1", b"2", b"3", b"4"]
        finally:
            proxy.close()


def test_producer_is_deleted_at_the_end(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        broker.create("t")
        with qcli.running("pub", "t") as pub:
            pub.write(b"1\n")
            qcli.wait_until("t", lambda record: record["message_count"] == 1)
            (segment,) = (tmp_path / "data" / "topics" / "t.topic").glob("*.log")
            named = re.search(rb'"producer":"(qcli-pub:[0-9a-f]{32})"', segment.read_bytes())
            assert named is not None
            name = named[1].decode()
            assert b'"number":0' in broker.http("GET", "/topic/producer", topic="t", producer=name)
            assert pub.end().code == 0
        assert b'"number":null' in broker.http("GET", "/topic/producer", topic="t", producer=name)


def test_broker_with_the_maximum_of_producers_is_used_over_tcp(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data", "--sync=interval") as broker:
        publish_as_producers(broker, MAX_PRODUCERS)
        qcli = Cli(broker.tcp_address, broker.http_address)
        assert qcli("pub", "t", "-q", stdin=b"1\n2\n").err == ""
        assert qcli.retained("t")[-2:] == [b"1", b"2"]


def test_broker_with_a_small_body_limit(tmp_path: Path) -> None:
    bodies = [b"%0500d" % number for number in range(6000)]
    with qcli_serve(tmp_path / "data", "--max-body-size=700000") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        assert qcli("pub", "t", "-q", stdin=lines(bodies)).err == ""
        assert qcli.retained("t") == bodies


@pytest.mark.parametrize("over_tcp", [True, False])
def test_full_topic_is_retried_after_the_first_acknowledgement(tmp_path: Path, over_tcp: bool) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        broker.create("t", "c")
        qcli("topic", "set", "t", "max_messages=2")
        args = ["--nsqd-http-address", "127.0.0.1:1"] if over_tcp else []
        with qcli.running("pub", "t", *args) as pub:
            pub.write(b"1\n2\n")
            qcli.wait_until("t", lambda record: record["message_count"] == 2)
            pub.write(b"3\n")
            assert "refused: topic t is full" in pub.hear_line()
            assert qcli("tail", "t/c", "-n", "2").out == b"1\n2\n"
            assert "accepts messages again.\n" in pub.hear_line()
            assert pub.end().code == 0
        assert qcli("tail", "t/c", "-n", "1").out == b"3\n"


def test_partly_refused_batch_is_not_retried(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data", "--max-msg-size=10") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        result = qcli("pub", "t", stdin=lines([b"x" * 11]))
        assert result.code == 1
        assert f"The broker at {qcli.tcp_address} refused: " in result.err
        assert "too big" in result.err


# ---------------------------------------------------------------------- with several brokers


@contextmanager
def two_brokers(tmp_path: Path) -> Iterator[tuple[Broker, Broker, Cli]]:
    """Run two brokers with the topic `t`, and a `Cli` for both."""
    with qcli_serve(tmp_path / "first") as first, qcli_serve(tmp_path / "second") as second:
        for each in (first, second):
            each.create("t")
        yield (
            first,
            second,
            Cli(f"{first.tcp_address},{second.tcp_address}", f"{first.http_address},{second.http_address}"),
        )


def kept_by(broker: Broker) -> list[bytes]:
    return Cli(broker.tcp_address, broker.http_address).retained("t")


def test_both_brokers_store_each_line_once_over_a_kill(tmp_path: Path) -> None:
    with two_brokers(tmp_path) as (first, second, both), both.running("pub", "t") as pub:
        writer = Writer(pub)
        both.wait_until("t", lambda record: record["message_count"] >= 200)
        end(second, signal.SIGKILL)
        warning = pub.hear_line()
        assert warning.startswith(f"Warning: the broker at {second.tcp_address} is unreachable (")
        assert warning.endswith(" Until then, the other brokers get no new messages.\n")
        with qcli_serve(tmp_path / "second", *again(second)):
            assert pub.hear_line() == f"Note: the broker at {second.tcp_address} accepts messages again.\n"
            written = writer.stop()
            result = pub.end()
            assert result.code == 0
            assert f"{len(written):,} messages" in result.err
            assert kept_by(first) == written
            assert kept_by(second) == written


def test_brokers_have_separate_batch_numbers(tmp_path: Path) -> None:
    with two_brokers(tmp_path) as (first, second, both):
        proxy = LostAnswers(second.http_address)
        try:
            with Cli(both.tcp_address, f"{first.http_address},{proxy.address}").running("pub", "t") as pub:
                pub.write(b"1\n")
                both.wait_until("t", lambda record: record["message_count"] == 2)
                proxy.to_lose = 2
                pub.write(b"2\n3\n")
                assert f"{second.tcp_address} is unreachable" in pub.hear_line()
                assert "accepts messages again.\n" in pub.hear_line()
                pub.write(b"4\n")
                assert pub.end().code == 0
            assert proxy.to_lose == 0
            assert kept_by(first) == kept_by(second) == [b"1", b"2", b"3", b"4"]
        finally:
            proxy.close()


@pytest.mark.parametrize("args", [[], ["--no-retry"]])
def test_end_while_one_broker_is_down_reports_each_broker(tmp_path: Path, args: list[str]) -> None:
    with two_brokers(tmp_path) as (first, second, both), both.running("pub", "t", *args) as pub:
        pub.write(b"1\n")
        both.wait_until("t", lambda record: record["message_count"] == 2)
        end(second, signal.SIGKILL)
        pub.write(b"2\n")
        if not args:
            assert pub.hear_line().startswith(f"Warning: the broker at {second.tcp_address} is unreachable (")
            pub.process.send_signal(signal.SIGINT)
        result = pub.end()
        assert result.code == ExitCode.PARTIAL
        report, error = result.err.splitlines()
        assert report.startswith("1 message (1 B) published to t on 2 brokers in ")
        assert error.startswith(f"Error: The connection to the broker at {second.tcp_address} was lost (")
        assert f" {first.tcp_address}: 2 messages acknowledged; " in error
        assert f" {second.tcp_address}: 1 message acknowledged, " in error
        assert kept_by(first) == [b"1", b"2"]


# ---------------------------------------------------------------------- without brokers


def lines_of(topic: str, batch_size: int) -> Lines:
    """Make batches of short lines."""
    return Lines(Splitter(b"\n", 100), batch_size, topic)


class Unreliable:
    """A sender that often loses its connection and all unacknowledged batches."""

    may_repeat = True
    batch_size = 1

    def __init__(self, at_once: int, seed: int) -> None:
        self.at_once = at_once
        self.stored: list[bytes] = []
        self._random = random.Random(seed)
        self._under_way: list[tuple[trio.Event, list[bytes], list[bool]]] = []

    async def send(self, batch: Batch) -> None:
        """Publish, or fail."""
        done, lost = trio.Event(), [False]
        self._under_way.append((done, batch.bodies, lost))
        await done.wait()
        if lost[0]:
            error = ConnectionLost("broker", "cut")
            raise PublishFailed("cut", maybe_stored=True) from error

    async def end(self) -> None:
        """Nothing to send."""

    async def work(self) -> None:
        """Store batches in order."""
        while True:
            await trio.sleep(0.01)
            while self._under_way:
                cut = self._random.random() < 0.1
                stored = [] if cut and self._random.random() < 0.5 else [self._under_way[0]]
                self.stored += [body for _, batch, _ in stored for body in batch]
                ended = self._under_way if cut else stored
                for done, _, lost in ended:
                    lost[0] = cut
                    done.set()
                self._under_way = [] if cut else self._under_way[1:]
                if self._random.random() < 0.3:
                    break


@pytest.mark.parametrize("at_once", [1, 4, 16])
@pytest.mark.parametrize("seed", [0, *in_soak(*range(1, 5))])
def test_order_is_kept(
    at_once: int,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Retried batches come before later ones."""
    monkeypatch.setattr(publishing, "LINGER_S", 0.001)
    bodies = [b"%d" % number for number in range(300)]
    (tmp_path / "lines").write_bytes(lines(bodies))
    sender = Unreliable(at_once, seed)

    async def main() -> PublishPipeline:
        pipeline = PublishPipeline({"broker": sender}, lines_of("t", batch_size=3))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.work)
            await pipeline.run([str(tmp_path / "lines")], 4096)
            nursery.cancel_scope.cancel()
        return pipeline

    (result,) = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.001)).result.brokers
    assert result.failure is None
    assert result.acknowledged == len(bodies)
    assert list(dict.fromkeys(sender.stored)) == bodies  # the first copy of each
    said = capfd.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in said] == ["Warning", "Note"] * (len(said) // 2)


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (ConnectionLost("broker", "gone"), True),
        (BrokerError("broker", "E_MPUB_FAILED", "MPUB failed exiting"), True),
        (BrokerError("broker", "E_MPUB_FAILED", "MPUB failed no space left"), False),
        (BrokerError("broker", "E_TOPIC_FULL", "MPUB failed topic t is full"), False),
        (BrokerError("broker", "E_BAD_MESSAGE", "too big"), False),
    ],
)
def test_first_failures_that_are_retried(error: Exception, waits: bool, tmp_path: Path) -> None:
    class FailsOnce(Unreliable):
        failures = 1

        async def send(self, batch: Batch) -> None:
            await trio.lowlevel.checkpoint()
            if self.failures:
                self.failures -= 1
                raise PublishFailed("reason", maybe_stored=False) from error

    (tmp_path / "lines").write_bytes(b"one\n")

    async def main() -> PublishPipeline:
        pipeline = PublishPipeline({"b": FailsOnce(1, 0)}, lines_of("t", batch_size=3))
        await pipeline.run([str(tmp_path / "lines")], 4096)
        return pipeline

    (result,) = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0)).result.brokers
    assert (result.acknowledged, result.not_stored) == ((1, 0) if waits else (0, 1))


class PartlyThenSilent(Unreliable):
    """Acknowledges a part of the first batch and loses the connection; stores the next and never answers."""

    begun = False

    async def send(self, batch: Batch) -> None:
        if not self.begun:
            self.begun = True
            self.stored += batch.bodies[:3]
            error = ConnectionLost("broker", "gone")
            raise PublishFailed("gone", maybe_stored=False, acknowledged=3) from error
        self.stored += batch.bodies
        await trio.sleep_forever()


@pytest.mark.parametrize(
    ("at_s", "stored", "maybe_stored", "not_stored"),
    [(0.0001, 3, 0, 7), (60.0, 10, 7, 0)],
    ids=["in the pause", "while sending"],
)
def test_signal_in_an_outage_counts_each_attempt_once(
    at_s: float, stored: int, maybe_stored: int, not_stored: int, tmp_path: Path
) -> None:
    (tmp_path / "lines").write_bytes(lines([b"%d" % number for number in range(10)]))
    sender = PartlyThenSilent(1, 0)

    async def main() -> PublishPipeline:
        pipeline = PublishPipeline({"broker": sender}, lines_of("t", batch_size=10))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pipeline.run, [str(tmp_path / "lines")], 4096)
            while not sender.begun:
                await trio.lowlevel.checkpoint()
            await trio.sleep(at_s)
            pipeline.stop(ExitCode.INTERRUPTED)
        return pipeline

    (result,) = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.05)).result.brokers
    assert len(sender.stored) == stored
    counted = (result.acknowledged, result.maybe_stored, result.not_stored)
    assert counted == (3, maybe_stored, not_stored)
    assert result.acknowledged_bytes == 3


class Refuses(Unreliable):
    """Stores everything, but refuses the last batch permanently."""

    async def send(self, batch: Batch) -> None:
        await trio.lowlevel.checkpoint()
        if b"29" in batch.bodies:
            raise PublishFailed("no", maybe_stored=False) from BrokerError("broker", "E_BAD_MESSAGE", "no")
        self.stored += batch.bodies


class Away(Unreliable):
    """Never connects. Sets an event after some attempts."""

    def __init__(self, test: trio.CancelScope) -> None:
        super().__init__(1, 0)
        self._test = test
        self._attempts = 0

    async def send(self, batch: Batch) -> None:
        await trio.lowlevel.checkpoint()
        self._attempts += 1
        if self._attempts == 50:
            self._test.cancel()
        raise PublishFailed("gone", maybe_stored=False) from ConnectionLost("broker", "gone")


def publish_thirty(tmp_path: Path, other: Sender, batch_size: int) -> list[BrokerResult]:
    """Publish 0 to 29 to an unreachable broker and to another one."""
    (tmp_path / "lines").write_bytes(lines([b"%d" % number for number in range(30)]))

    async def main() -> PublishPipeline:
        with trio.CancelScope() as scope:
            pipeline = PublishPipeline({"away": Away(scope), "other": other}, lines_of("t", batch_size))
            await pipeline.run([str(tmp_path / "lines")], 4096)
        return pipeline

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0)).result.brokers


def test_unreachable_broker_delays_the_other(tmp_path: Path) -> None:
    """The other broker gets the messages that were read: one batch in flight to both, and one that waits for
    the first broker.
    """
    other = Refuses(1, 0)
    outcomes = publish_thirty(tmp_path, other, batch_size=3)
    assert [result.failure for result in outcomes] == [None, None]
    assert other.stored == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_refusal_of_one_broker_ends_the_wait_for_another(tmp_path: Path) -> None:
    outcomes = publish_thirty(tmp_path, Refuses(1, 0), batch_size=30)
    assert [type(result.failure) for result in outcomes] == [PublishFailed, PublishFailed]
    assert [result.not_stored for result in outcomes] == [30, 30]
