"""Tests for the client without async code, with real brokers."""

import copy
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from client.support.blocking import PATIENCE_S, consumer_of, interrupting, until
from interop.peers import Broker, qcli_serve
from trio_nsq import sync
from trio_nsq.client import AlreadyAnswered, ConnectionFailed, ProducerClosed, PublishFailed
from trio_nsq.protocol import pack_messages

pytestmark = pytest.mark.slow  # to start a broker

TCP_ESTABLISHED = "01"
"""In /proc/net/tcp."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("sync") / "d", "--sync=interval") as running:
        yield running


@pytest.fixture
def topic(request: pytest.FixtureRequest, broker: Broker) -> str:
    name: str = request.node.name[:60].replace("[", "_").replace("]", "_")
    broker.create(name, "c")
    return name


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """Fail a test that takes too long, and again every five seconds during its cleanup."""

    def hung(*_: object) -> None:
        raise AssertionError("the test hung")

    before = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S, 5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    # Idle threads of trio do not count, nor those of what other tests have left, such as a lease.
    others = ("Trio", "trio-nsq-fan-out")
    left = [t for t in threading.enumerate() if t not in before and not t.name.startswith(others)]
    assert left == []


# ------------------------------------------------------------------------------------------------ normal operation


def test_messages_are_published_received_and_finished(broker: Broker, topic: str) -> None:
    with sync.Producer(broker.tcp_address) as producer:
        producer.publish(topic, b"1")
        producer.publish_many(topic, [b"2", b"3"])
        producer.publish_set(topic, pack_messages([b"4"]))
        producer.publish(topic, b"5", defer_s=0.001)
    with consumer_of(broker, topic) as consumer:
        bodies = []
        for message in consumer:
            assert (message.attempts, message.answered) == (1, False)
            assert message.nsqd_address == broker.tcp_address
            message.touch()
            message.finish()
            assert message.answered
            with pytest.raises(AlreadyAnswered):
                message.requeue()
            bodies.append(message.body)
            if len(bodies) == 5:
                break
        assert sorted(bodies) == [b"1", b"2", b"3", b"4", b"5"]
        assert consumer.stats().finished == 5
    stats = broker.channel_stats(topic, "c")
    assert (stats["depth"], stats["in_flight_count"], stats["deferred_count"]) == (0, 0, 0)


def test_receipts(broker: Broker, topic: str) -> None:
    with sync.Producer(broker.tcp_address) as producer:
        receipts = [producer.submit(topic, b"%d" % number) for number in range(100)]
        for receipt in receipts:
            receipt.wait()
            assert receipt.state == "stored"
            assert not receipt.withdraw()
        last = producer.submit(topic, b"last")
    last.wait()  # leaving the block has waited for it
    assert last.state == "stored"


def test_batches_can_be_combined_over_time(broker: Broker, topic: str) -> None:
    with (
        sync.Producer(broker.tcp_address) as producer,
        consumer_of(broker, topic) as consumer,
        ThreadPoolExecutor(1) as executor,
    ):
        gathering = executor.submit(next, consumer.batches(2, max_wait_s=PATIENCE_S))
        producer.publish(topic, b"1")
        until(lambda: consumer.stats().received == 1)
        producer.publish(topic, b"2")
        batch = gathering.result(PATIENCE_S)
        assert (batch.bodies, batch.unanswered_count) == ([b"1", b"2"], 2)
        next(iter(batch)).finish()
        assert batch.unanswered_count == len(batch.unanswered_ids()) == 1
        batch.finish()
        assert batch.unanswered_count == 0


def test_failed_messages_are_redelivered_and_unanswered_ones_requeued(broker: Broker, topic: str) -> None:
    with sync.Producer(broker.tcp_address) as producer:
        producer.publish_many(topic, [b"1", b"2", b"3"])
    with consumer_of(broker, topic, max_in_flight=3) as consumer:
        batch = next(consumer.batches(1))
        batch.requeue(0, backoff=False)
        message = next(consumer)
        message.requeue(0, backoff=False)
        held = [next(consumer) for _ in range(3)]
        assert sorted(message.attempts for message in held) in ([1, 1, 2], [1, 2, 2], [1, 1, 3])
    held[0].finish()  # without effect now
    assert broker.channel_stats(topic, "c")["depth"] == 3
    with pytest.raises(StopIteration):
        next(consumer)


def test_loop_ends_after_the_idle_timeout_or_the_close(broker: Broker, topic: str) -> None:
    with consumer_of(broker, topic, idle_timeout_s=0.01) as consumer:
        assert list(consumer) == []
        assert list(consumer.batches()) == []
    with consumer_of(broker, topic) as consumer, ThreadPoolExecutor(3) as executor:
        messages = executor.submit(lambda: list(consumer))
        batches = executor.submit(lambda: list(consumer.batches()))
        running = executor.submit(consumer.run, print)
        consumer.close()
        assert messages.result(PATIENCE_S) == []
        assert batches.result(PATIENCE_S) == []
        running.result(PATIENCE_S)
        consumer.close()


def test_longer_combining_than_the_idle_timeout_does_not_end_the_loop(broker: Broker, topic: str) -> None:
    with sync.Producer(broker.tcp_address) as producer:
        producer.publish_many(topic, [b"1", b"2"])
    with consumer_of(broker, topic, idle_timeout_s=0.2) as consumer:
        bodies = []
        for batch in consumer.batches(max_wait_s=0.3):
            bodies += batch.bodies
            batch.finish()
        assert bodies == [b"1", b"2"]


def test_pause_and_max_in_flight(broker: Broker, topic: str) -> None:
    with sync.Producer(broker.tcp_address) as producer, consumer_of(broker, topic) as consumer:
        consumer.pause()
        assert consumer.paused
        producer.publish(topic, b"1")
        assert not consumer.is_starved
        consumer.unpause()
        consumer.max_in_flight = 1
        assert consumer.max_in_flight == 1
        message = next(consumer)
        assert consumer.is_starved
        message.finish()
        with pytest.raises(ValueError, match="at least 0"):
            consumer.max_in_flight = -1


def test_threads_share_a_producer_and_a_consumer(broker: Broker, topic: str) -> None:
    seen: list[bytes] = []

    def publish(worker: int) -> None:
        for number in range(50):
            producer.publish(topic, b"%d %d" % (worker, number))

    def consume() -> None:
        for message in consumer:
            message.finish()
            seen.append(message.body)

    with sync.Producer(broker.tcp_address) as producer, consumer_of(broker, topic) as consumer:
        with ThreadPoolExecutor(12) as executor:
            work = [executor.submit(publish, worker) for worker in range(8)]
            work += [executor.submit(consume) for _ in range(4)]
            until(lambda: len(seen) == 400)
            consumer.close()
            for each in work:
                each.result(PATIENCE_S)
    assert sorted(seen) == sorted(b"%d %d" % (worker, n) for worker in range(8) for n in range(50))


# ------------------------------------------------------------------------------------------------ handlers


async def _async(*_: object) -> None:
    raise AssertionError("it ran")


def _generator(*_: object) -> Iterator[None]:
    yield


async def _async_generator(*_: object) -> Any:
    yield


@pytest.mark.parametrize("wrong", [_async, _generator, _async_generator], ids=lambda each: each.__name__)
def test_handler_that_would_not_run_finishes_no_message(broker: Broker, topic: str, wrong: Any) -> None:
    """Whether it shows before the call, or only in what a call returns."""

    def fail(message: sync.Message) -> None:
        raise ValueError

    with sync.Producer(broker.tcp_address) as producer:
        producer.publish(topic, b"1")
    with consumer_of(broker, topic, default_requeue_delay_s=0) as consumer:
        with pytest.raises(TypeError, match="handler must be a plain function"):
            consumer.run(wrong)
        with pytest.raises(TypeError, match="given_up must be a plain function"):
            consumer.run(fail, max_attempts=1, given_up=wrong)
        with pytest.raises(TypeError, match=r"handler .* of which nothing has run"):
            consumer.run(lambda message: wrong(message), concurrency=2)
        with pytest.raises(TypeError, match=r"given_up .* of which nothing has run"):
            consumer.run(fail, max_attempts=1, given_up=lambda *args: wrong(*args))
    assert broker.channel_stats(topic, "c")["depth"] == 1


def test_handlers_run_in_parallel_and_failed_messages_are_retried(broker: Broker, topic: str) -> None:
    at_work = threading.Barrier(4)  # passes only if all threads run
    tries: list[int] = []

    def handle(message: sync.Message) -> None:
        if message.body == b"fails once" and message.attempts == 1:
            raise RuntimeError("for a test")
        if message.body == b"fails once":
            tries.append(message.attempts)
            consumer.close()
        else:
            at_work.wait(PATIENCE_S)

    with sync.Producer(broker.tcp_address) as producer:
        producer.publish_many(topic, [b"1", b"2", b"3", b"4", b"fails once"])
    options = {"default_requeue_delay_s": 0, "backoff_multiplier_s": 0.01}
    with consumer_of(broker, topic, **options) as consumer:
        with pytest.raises(ValueError, match="concurrency is 0"):
            consumer.run(handle, concurrency=0)
        consumer.run(handle, concurrency=4)
    assert tries == [2]
    until(lambda: broker.channel_stats(topic, "c")["depth"] == 0)  # FIN has no answer


def test_message_is_given_up_at_its_last_failure(broker: Broker, topic: str) -> None:
    given_up: list[tuple[bytes, int, str]] = []

    def fail(message: sync.Message) -> None:
        raise RuntimeError(f"failure {message.attempts}")

    def give_up(message: sync.Message, error: Exception) -> None:
        given_up.append((message.body, message.attempts, str(error)))
        consumer.close()

    with sync.Producer(broker.tcp_address) as producer:
        producer.publish(topic, b"bad")
    with consumer_of(broker, topic, default_requeue_delay_s=0) as consumer:
        consumer.run(fail, max_attempts=2, given_up=give_up)
    assert given_up == [(b"bad", 2, "failure 2")]
    until(lambda: broker.channel_stats(topic, "c")["depth"] == 0)  # FIN has no answer


def test_message_that_fails_too_often_goes_to_the_dead_letter_topic(broker: Broker, topic: str) -> None:
    dead = f"{topic[:50]}.dead"
    broker.create(dead, "c")

    def fail(message: sync.Message) -> None:
        raise RuntimeError("for a test")

    with sync.Producer(broker.tcp_address) as producer, ThreadPoolExecutor(1) as executor:
        producer.publish(topic, b"bad")
        with consumer_of(broker, topic) as consumer, consumer_of(broker, dead) as dead_letters:
            running = executor.submit(consumer.run, fail, max_attempts=1, dead_letter_topic=dead)
            message = next(dead_letters)
            assert message.body == b"bad"
            message.finish()
            until(lambda: consumer.stats().finished == 1)
        running.result(PATIENCE_S)


# ------------------------------------------------------------------------------------------------ failures


def test_close_in_a_thread_that_the_handler_waits_for_returns(broker: Broker, topic: str) -> None:
    closed: list[float] = []

    def handle(_: sync.Message) -> None:
        begun_s = time.monotonic()
        with ThreadPoolExecutor(1) as executor:
            executor.submit(consumer.close).result()
        closed.append(time.monotonic() - begun_s)

    with sync.Producer(broker.tcp_address) as producer:
        producer.publish(topic, b"m")
    with consumer_of(broker, topic, close_timeout_s=0.1) as consumer:
        consumer.run(handle)
    assert len(closed) == 1


def test_close_in_a_child_that_a_handler_forks_does_nothing(broker: Broker) -> None:
    script = """
import os, sys, trio_nsq.sync
def handle(message):
    child = os.fork()
    if not child:
        try:
            consumer.close()
            os._exit(0)
        finally:
            os._exit(1)
    print(os.waitpid(child, 0)[1])
    message.finish()
    consumer.close()
with trio_nsq.sync.Producer(sys.argv[1]) as producer:
    producer.publish("forking", b"m")
with trio_nsq.sync.Consumer("forking", "c", nsqd_tcp_addresses=sys.argv[1]) as consumer:
    consumer.run(handle)
"""
    command = [sys.executable, "-W", "ignore", "-c", script, broker.tcp_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == "0\n"


def test_messages_cannot_be_copied_or_pickled(broker: Broker, topic: str) -> None:
    with sync.Producer(broker.tcp_address) as producer:
        producer.publish_many(topic, [b"a", b"b"])
    with consumer_of(broker, topic, max_in_flight=2) as consumer:
        batch = next(consumer.batches(2, 5.0))
        for each, what in ((batch, "bodies"), (next(iter(batch)), "body")):
            for way in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=f"cannot be copied or pickled: pass its {what}"):
                    way(each)
        batch.finish()


def test_errors_are_unchanged(broker: Broker) -> None:
    with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:1: Connection refused"):
        sync.Producer("127.0.0.1:1").__enter__()
    with pytest.raises(ConnectionFailed, match="Connection refused"):
        sync.Consumer("t", "c", nsqd_tcp_addresses=["127.0.0.1:1"]).__enter__()
    with pytest.raises(ValueError, match="sample_rate"):
        sync.Producer(sample_rate=100)
    with pytest.raises(ValueError, match="idle_timeout_s is 0"):
        sync.Consumer("t", "c", idle_timeout_s=0)
    with sync.Producer(broker.tcp_address) as producer:
        with pytest.raises(ValueError, match="not a valid topic name"):
            producer.publish("a b", b"x")
        with pytest.raises(PublishFailed, match="DPUB timeout") as caught:
            producer.publish("t", b"x", defer_s=2.0**40)
        assert not caught.value.maybe_stored
        with pytest.raises(RuntimeError, match="once"):
            producer.__enter__()
    with pytest.raises(ZeroDivisionError), sync.Producer(broker.tcp_address):
        1 / 0


def test_use_outside_the_block_is_an_error(broker: Broker) -> None:
    producer = sync.Producer(broker.tcp_address)
    with pytest.raises(ProducerClosed, match="not open yet"):
        producer.publish("t", b"x")
    producer.close()
    with producer:
        pass
    with pytest.raises(ProducerClosed, match="is closed"):
        producer.publish("t", b"x")
    consumer = sync.Consumer("t", "c")
    for use in (lambda: next(consumer), lambda: next(consumer.batches()), consumer.pause):
        with pytest.raises(RuntimeError, match="inside its `with` block"):
            use()


def test_interrupt_ends_a_loop_without_losing_messages(broker: Broker, topic: str) -> None:
    with sync.Producer(broker.tcp_address) as producer:
        producer.publish_many(topic, [b"1", b"2", b"3"])

    def loop() -> None:
        with consumer_of(broker, topic) as consumer:
            for count, message in enumerate(consumer):
                if not count:
                    message.finish()

    with interrupting(lambda: broker.channel_stats(topic, "c")["in_flight_count"] == 2):
        with pytest.raises(KeyboardInterrupt):
            loop()
    stats = broker.channel_stats(topic, "c")
    assert (stats["depth"], stats["in_flight_count"]) == (2, 0)


def has_unread_bytes(broker: Broker) -> bool:
    """Return whether the kernel has bytes that a frozen broker has not read, such as a publish."""
    port = int(broker.tcp_address.rpartition(":")[2])
    connections = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any(
        fields[1].endswith(f":{port:04X}")
        and fields[3] == TCP_ESTABLISHED
        and not fields[4].endswith(":00000000")
        for fields in connections
    )


def is_closing(producer: sync.Producer) -> bool:
    """Return whether the producer is closing; an empty message is refused in any case."""
    try:
        producer.publish("t", b"")
    except (ProducerClosed, ValueError) as error:
        return isinstance(error, ProducerClosed)
    raise AssertionError("an empty message was published")


@contextmanager
def frozen(broker: Broker) -> Iterator[None]:
    """Stop the broker with SIGSTOP during the block."""
    broker.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        broker.process.send_signal(signal.SIGCONT)


def test_interrupt_ends_an_unacknowledged_publish(broker: Broker, topic: str) -> None:
    with sync.Producer(broker.tcp_address) as producer:
        with frozen(broker), interrupting(lambda: has_unread_bytes(broker)), pytest.raises(KeyboardInterrupt):
            producer.publish(topic, b"1")
        producer.publish(topic, b"2")
    assert broker.channel_stats(topic, "c")["depth"] == 2


def test_interrupt_shortens_the_close(broker: Broker, topic: str) -> None:
    with (
        ThreadPoolExecutor(1) as executor,
        sync.Producer(broker.tcp_address, close_timeout_s=1000) as producer,
    ):
        with frozen(broker):
            publishing = executor.submit(producer.publish, topic, b"x")
            until(lambda: has_unread_bytes(broker))
            with interrupting(lambda: is_closing(producer)), pytest.raises(KeyboardInterrupt):
                producer.close()
            with pytest.raises(PublishFailed) as caught:
                publishing.result(PATIENCE_S)
            assert caught.value.maybe_stored


def test_interrupt_before_the_thread_starts_leaves_nothing_to_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    producer = sync.Producer()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.__enter__()
    producer.close()


MOMENTS = 60


def interrupted_at(moment: int, work: Callable[[], None]) -> int:
    """Run work with an interrupt before or after a call with this number; return the number of calls.

    Calls inside trio do not count: some of them are not safe there, for example those of its locks. Nor do those
    that the garbage collector makes, of sets of weak references and of a hook of Hypothesis, which stays after the
    first test that uses it: Python reports what is raised there, and drops it.
    """
    calls = 0

    def profile(frame: FrameType, _event: str, _arg: object) -> None:
        nonlocal calls
        if not any(part in frame.f_code.co_filename for part in ("/trio/", "/hypothesis/", "_weakrefset")):
            calls += 1
            if calls == moment:
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("kind", ["producer", "consumer"])
def test_interrupt_at_any_moment_of_a_call(broker: Broker, topic: str, kind: str) -> None:
    """It raises KeyboardInterrupt, and leaves an object that can be closed."""
    if kind == "consumer":
        with sync.Producer(broker.tcp_address) as producer:
            producer.publish(topic, b"x")

    def work(client: sync.Producer | sync.Consumer) -> None:
        with client:
            if isinstance(client, sync.Producer):
                client.publish(topic, b"x")
            else:
                next(client).requeue(0, backoff=False)

    def new() -> sync.Producer | sync.Consumer:
        return sync.Producer(broker.tcp_address) if kind == "producer" else consumer_of(broker, topic)

    client = new()
    total = interrupted_at(-1, lambda: work(client))
    interrupts = 0
    for moment in range(1, total, max(1, total // MOMENTS)):
        client = new()
        try:
            interrupted_at(moment, partial(work, client))
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            client.close()
    assert interrupts > min(total, MOMENTS) / 2


def test_use_after_a_fork_is_an_error(broker: Broker) -> None:
    script = """
import os, sys, trio_nsq.sync
with trio_nsq.sync.Producer(sys.argv[1]) as producer:
    producer.publish("forked", b"parent")
    child = os.fork()
    if not child:
        try:
            producer.publish("forked", b"child")
        except RuntimeError as error:
            print(error)
        producer.close()  # does nothing
        with trio_nsq.sync.Producer(sys.argv[1]) as own:
            own.publish("forked", b"own")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    producer.publish("forked", b"parent again")
"""
    command = [sys.executable, "-W", "ignore", "-c", script, broker.tcp_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == "it was opened before the process forked: open another one in each process\n"
