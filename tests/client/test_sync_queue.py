"""Tests of the queue that the threads of a synchronous client share with its event loop, with real brokers."""

import contextvars
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from client.support.blocking import PATIENCE_S, consumer_of, interrupting, until
from interop.peers import Broker, qcli_serve
from trio_nsq import sync
from trio_nsq.client import ConsumerClosed, PublishFailed
from trio_nsq.client.consuming.consumer import TIME_SLICE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]  # to start a broker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("sync") / "d", "--sync=interval") as running:
        yield running


@pytest.fixture
def topic(request: pytest.FixtureRequest, broker: Broker) -> str:
    name: str = request.node.name[:50].replace("[", "_").replace("]", "_")
    broker.create(name, "c")
    return name


@pytest.fixture
def held_wakes(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """While this list has something, the event loops hear nothing from threads: the list gets what they would call."""
    held: list[Callable[[], object]] = []
    hop = trio.lowlevel.TrioToken.run_sync_soon

    def hold(token: trio.lowlevel.TrioToken, work: Callable[[], object]) -> None:
        if held:
            held.append(lambda: hop(token, work))
        else:
            hop(token, work)

    monkeypatch.setattr(trio.lowlevel.TrioToken, "run_sync_soon", hold)
    return held


def fill(broker: Broker, topic: str, count: int) -> list[bytes]:
    bodies = [b"%d" % number for number in range(count)]
    with sync.Producer(broker.tcp_address) as producer:
        producer.publish_many(topic, bodies)
    return bodies


def release(held: list[Callable[[], object]]) -> int:
    """Let the event loops hear what was held back; return how often they are woken."""
    works = held[1:]
    held.clear()
    for work in works:
        work()
    return len(works)


def test_messages_are_taken_and_answered_with_one_wake(
    broker: Broker, topic: str, held_wakes: list[Callable[[], object]]
) -> None:
    bodies = fill(broker, topic, 1000)
    with consumer_of(broker, topic, max_in_flight=2500) as consumer:
        until(lambda: consumer.stats().received == 1000)
        first = next(consumer)  # from now on, threads take messages without the event loop
        held_wakes.append(print)
        rest = [next(consumer) for _ in range(999)]
        for message in (first, *rest):
            message.touch()
            message.finish()
        assert release(held_wakes) == 1
        assert [message.body for message in (first, *rest)] == bodies
        until(lambda: consumer.stats().finished == 1000)
    until(lambda: broker.channel_stats(topic, "c")["depth"] == 0)  # FIN has no answer


def test_batches_are_answered_with_one_wake(
    broker: Broker, topic: str, held_wakes: list[Callable[[], object]]
) -> None:
    fill(broker, topic, 100)
    with consumer_of(broker, topic) as consumer:
        until(lambda: consumer.stats().received == 100)
        batches = [next(consumer.batches(10, PATIENCE_S)) for _ in range(10)]  # 10 messages each
        held_wakes.append(print)
        for batch in batches:
            assert len(batch) == len(batch.bodies) == batch.unanswered_count == len(batch.unanswered_ids())
            batch.touch()
            next(iter(batch)).finish()
            batch.requeue(0, backoff=False)
            assert (batch.unanswered_count, batch.unanswered_ids()) == (0, [])
        assert release(held_wakes) == 1
        until(lambda: consumer.stats().requeued == 90)
        assert consumer.stats().finished == 10


def test_submitted_messages_are_handed_over_with_one_wake(
    broker: Broker, topic: str, held_wakes: list[Callable[[], object]]
) -> None:
    with sync.Producer(broker.tcp_address) as producer:
        producer.publish(topic, b"first")
        held_wakes.append(print)
        receipts = [producer.submit(topic, b"%d" % number) for number in range(1000)]
        assert {receipt.state for receipt in receipts} == {"waiting"}
        with pytest.raises(ValueError, match="topic name"):
            producer.submit("not a name", b"x")
        assert release(held_wakes) == 1
        for receipt in receipts:
            receipt.wait()
    assert broker.channel_stats(topic, "c")["depth"] == 1001


def test_messages_and_batches_of_one_consumer_keep_the_order(broker: Broker, topic: str) -> None:
    bodies = fill(broker, topic, 100)
    with consumer_of(broker, topic) as consumer:
        until(lambda: consumer.stats().received == 100)
        seen: list[bytes] = []
        finished = 0
        for size in (1, 7, 20, 1, 20):
            for _ in range(3):
                seen.append(next(consumer).body)
            batch = next(consumer.batches(size))
            seen += batch.bodies
            finished += len(batch)
            batch.finish()
        while len(seen) < 100:
            seen += next(consumer.batches()).bodies
        assert seen == bodies
        assert consumer.stats().finished == finished


def test_messages_that_arrive_together_wake_all_threads_that_wait(broker: Broker, topic: str) -> None:
    with consumer_of(broker, topic) as consumer, ThreadPoolExecutor(4) as executor:
        for _ in range(5):
            waiting = [executor.submit(next, consumer) for _ in range(4)]
            bodies = fill(broker, topic, 4)
            messages = [each.result(PATIENCE_S) for each in waiting]
            assert sorted(message.body for message in messages) == bodies
            for message in messages:
                message.finish()


def test_get_returns_what_has_arrived_without_waiting(broker: Broker, topic: str) -> None:
    with consumer_of(broker, topic) as consumer:
        assert consumer.get(0) is None
        fill(broker, topic, 2)
        until(lambda: consumer.stats().received == 2)
        for _ in range(2):
            message = consumer.get(0)
            assert message is not None
            message.finish()
        assert consumer.get(0.01) is None
    with pytest.raises(ConsumerClosed):
        consumer.get()


def test_threads_that_take_messages_and_batches_get_each_once(broker: Broker, topic: str) -> None:
    seen: Counter[bytes] = Counter()
    lock = threading.Lock()

    def count(bodies: list[bytes]) -> None:
        with lock:
            seen.update(bodies)

    def take_messages() -> None:
        for message in consumer:
            message.finish()
            count([message.body])

    def take_batches(max_wait_s: float) -> None:
        for batch in consumer.batches(5, max_wait_s):
            batch.finish()
            count(batch.bodies)

    with consumer_of(broker, topic) as consumer, ThreadPoolExecutor(5) as executor:
        work = [executor.submit(take_messages), executor.submit(take_messages)]
        work += [executor.submit(take_batches, 0), executor.submit(take_batches, 0.001)]
        work += [executor.submit(consumer.run, lambda message: count([message.body]))]
        bodies = fill(broker, topic, 2000)
        until(lambda: seen.total() >= 2000)
        consumer.close()
        for each in work:
            each.result(PATIENCE_S)
    assert seen == Counter(bodies)
    until(lambda: broker.channel_stats(topic, "c")["depth"] == 0)  # FIN has no answer


def test_handler_goes_on_in_its_thread_and_finishes_each_message_at_once(broker: Broker, topic: str) -> None:
    bodies = fill(broker, topic, 100)
    seen: list[bytes] = []
    variable = contextvars.ContextVar("variable", default="unset")
    changed: list[bytes] = []

    def handle(message: sync.Message) -> None:
        if variable.get() != "unset":
            changed.append(message.body)
        variable.set("set")
        seen.append(message.body)
        if len(seen) == 50:
            until(lambda: consumer.stats().finished == 49)
        if len(seen) == 100:
            consumer.close()

    with consumer_of(broker, topic) as consumer:
        until(lambda: consumer.stats().received == 100)
        consumer.run(handle)
    assert (seen, changed) == (bodies, [])
    until(lambda: broker.channel_stats(topic, "c")["depth"] == 0)  # FIN has no answer


@pytest.mark.parametrize("concurrency", [1, 4])
def test_failure_among_others_is_retried_and_given_up(
    broker: Broker, topic: str, concurrency: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the handler has answered the message that failed."""
    bodies = fill(broker, topic, 100)
    seen: Counter[bytes] = Counter()
    given_up: list[tuple[bytes, str]] = []

    def handle(message: sync.Message) -> None:
        seen[message.body] += 1
        if message.body in (b"30", b"31", b"70"):
            # With more threads, it may be handled again before this failure counts.
            if message.body == b"31" and concurrency == 1:
                message.requeue(0, backoff=False)
            raise RuntimeError(f"failure {seen[message.body]}")

    def give_up(message: sync.Message, error: Exception) -> None:
        given_up.append((message.body, str(error)))

    with consumer_of(broker, topic, default_requeue_delay_s=0, backoff_after=1000) as consumer:
        until(lambda: consumer.stats().received == 100)
        with ThreadPoolExecutor(1) as executor:
            running = executor.submit(
                consumer.run, handle, concurrency=concurrency, max_attempts=3, given_up=give_up
            )
            until(lambda: consumer.stats().finished == 100 or running.done())
            consumer.close()
            running.result(PATIENCE_S)
    assert seen == Counter(bodies) + Counter({b"30": 2, b"31": 2, b"70": 2})
    assert sorted(given_up) == [(b"30", "failure 3"), (b"31", "failure 3"), (b"70", "failure 3")]
    assert sum("failed, " in record.getMessage() for record in caplog.records) == 9


class Fatal(BaseException):
    """Ends a `run`."""


def test_error_that_ends_the_run_leaves_the_message_for_the_next_taker(broker: Broker, topic: str) -> None:
    bodies = fill(broker, topic, 20)
    seen: list[bytes] = []

    def handle(message: sync.Message) -> None:
        if len(seen) == 10:
            raise Fatal
        seen.append(message.body)

    with consumer_of(broker, topic) as consumer:
        until(lambda: consumer.stats().received == 20)
        with pytest.raises(Fatal):
            consumer.run(handle)
        assert seen == bodies[:10]
        assert [next(consumer).body for _ in range(10)] == bodies[10:]
        assert consumer.stats().finished == 10


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "returns"])
def test_interrupted_run_handles_no_further_message(broker: Broker, topic: str, fails: bool) -> None:
    """The message of a handler that raises then is left to the next taker, too."""
    bodies = fill(broker, topic, 4)
    seen: list[bytes] = []

    def is_cancelled() -> bool:
        try:
            trio.from_thread.check_cancelled()
        except trio.Cancelled:
            return True
        return False

    def handle(message: sync.Message) -> None:
        seen.append(message.body)
        if len(seen) == 2:
            until(is_cancelled)
            later = (
                time.monotonic() + 5 * TIME_SLICE_S
            )  # then the consumer's task notices that it is cancelled
            until(lambda: time.monotonic() > later)
            if fails:
                raise RuntimeError("for a test")

    with consumer_of(broker, topic) as consumer:
        until(lambda: consumer.stats().received == 4)
        with interrupting(lambda: len(seen) == 2), pytest.raises(KeyboardInterrupt):
            consumer.run(handle)
        assert seen == bodies[:2]
        rest = bodies[1:] if fails else bodies[2:]
        assert [next(consumer).body for _ in rest] == rest
        assert consumer.stats().finished == 4 - len(rest)


def run(program: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", program, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def test_program_may_end_without_closing(broker: Broker, topic: str) -> None:
    program = """
import sys, threading, trio_nsq.sync
producer = trio_nsq.sync.Producer(sys.argv[1]).__enter__()
consumer = trio_nsq.sync.Consumer(sys.argv[2], "c", nsqd_tcp_addresses=sys.argv[1], max_in_flight=10).__enter__()
producer.publish(sys.argv[2], b"m")
print(next(consumer).body)
threading.Thread(target=lambda: next(consumer), daemon=True).start()
producer.submit(sys.argv[2], b"n")
"""
    done = run(program, broker.tcp_address, topic)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'm'\n", "")


def test_messages_taken_before_a_fork_stay_with_the_parent(broker: Broker, topic: str) -> None:
    fill(broker, topic, 3)
    program = """
import os, sys, trio_nsq.sync
with trio_nsq.sync.Consumer(sys.argv[2], "c", nsqd_tcp_addresses=sys.argv[1], max_in_flight=10) as consumer:
    while consumer.stats().received < 3:
        pass
    message = next(consumer)
    child = os.fork()
    if not child:
        for use in (consumer.__next__, message.finish, message.touch, consumer.stats):
            try:
                use()
            except RuntimeError as error:
                print(error)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    message.finish()
    for _ in range(2):
        next(consumer).finish()
"""
    done = run(program, broker.tcp_address, topic)
    said = "it was opened before the process forked: open another one in each process\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, 4 * said, "")
    until(lambda: broker.channel_stats(topic, "c")["depth"] == 0)  # FIN has no answer


# ------------------------------------------------------------------------------------------------ kills

KILLS = int(os.environ.get("QCLI_SOAK_KILLS", "2"))


class Restartable:
    """A broker that keeps its address."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._stack = stack
        self.broker = stack.enter_context(qcli_serve(path))
        self.address = self.broker.tcp_address

    def restart(self) -> None:
        self.broker.process.kill()
        self.broker.process.wait()
        self.broker = self._stack.enter_context(qcli_serve(self._path, f"--tcp-address={self.address}"))


def test_acknowledged_messages_are_received_whatever_is_killed(tmp_path: Path) -> None:
    """A ledger: threads publish and consume while the broker is killed and restarted."""
    acknowledged: list[bytes] = []
    maybe_stored: list[bytes] = []
    seen: list[bytes] = []
    over = threading.Event()

    def publish(worker: int) -> None:
        number = 0
        while not over.is_set():
            bodies = [b"%d %d" % (worker, number + each) for each in range(20)]
            number += 20
            receipts = [(body, producer.submit("t", body)) for body in bodies]
            for body, receipt in receipts:
                try:
                    receipt.wait()
                    acknowledged.append(body)
                except PublishFailed as failure:
                    if failure.maybe_stored:
                        maybe_stored.append(body)

    def consume() -> None:
        for message in consumer:
            seen.append(message.body)
            message.finish()

    with ExitStack() as stack:
        broker = Restartable(tmp_path / "data", stack)
        broker.broker.create("t", "c")
        producer = stack.enter_context(sync.Producer(broker.address))
        consumer = stack.enter_context(
            sync.Consumer("t", "c", nsqd_tcp_addresses=broker.address, max_in_flight=100)
        )
        executor = stack.enter_context(ThreadPoolExecutor(6))
        publishing = [executor.submit(publish, worker) for worker in range(3)]
        consuming = [executor.submit(consume) for _ in range(2)]
        consuming += [executor.submit(consumer.run, lambda message: seen.append(message.body))]
        for _ in range(KILLS):
            count = len(acknowledged) + 200
            until(lambda count=count: len(acknowledged) > count)  # type: ignore[misc]  # binds the loop's variable
            until(lambda: set(seen) & set(acknowledged[-100:]) != set())
            broker.restart()
        over.set()
        for each in publishing:
            each.result(PATIENCE_S)
        until(lambda: set(seen) >= set(acknowledged))
        consumer.close()
        for each in consuming:
            each.result(PATIENCE_S)
    assert set(seen) <= set(acknowledged) | set(maybe_stored)
