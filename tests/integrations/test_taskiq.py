"""Tests for taskiq's broker: with taskiq's receiver in the test's process, and with real worker processes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import pytest
from taskiq import BrokerMessage, Context, SendTaskError, TaskiqDepends, TaskiqEvents, TaskiqMessage
from taskiq.receiver import Receiver

from client.support.loops import run
from integrations.support import Ledger, Worker, running, until
from interop.peers import Broker, free_address, qcli_serve
from trio_nsq.client import ConnectionFailed, Message
from trio_nsq.integrations.taskiq import NSQBroker

pytestmark = pytest.mark.slow  # starts a broker
_topics = map("jobs{}".format, count())


@pytest.fixture(scope="module")
def nsqd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data", "--sync=interval") as broker:
        yield broker


@pytest.fixture
def jobs(nsqd: Broker) -> NSQBroker:
    """A broker object for a topic of its own, which both sends and works."""
    nsqd.create(topic := next(_topics), "taskiq")
    broker = NSQBroker(nsqd.tcp_address, topic=topic)
    broker.is_worker_process = True
    return broker


@asynccontextmanager
async def working(broker: NSQBroker) -> AsyncIterator[None]:
    """Run a worker during the block, and let it end as `taskiq worker` does."""
    finish, started = asyncio.Event(), asyncio.Event()
    broker.add_event_handler(TaskiqEvents.WORKER_STARTUP, lambda _: started.set())
    receiver = Receiver(broker, max_async_tasks=10)
    task = asyncio.create_task(receiver.listen(finish))
    try:
        await started.wait()
        yield
    finally:
        finish.set()
        await task
        await broker.shutdown()


def counts(nsqd: Broker, broker: NSQBroker) -> tuple[int, int, int]:
    """Return what waits, is in flight, and was delivered again."""
    stats = nsqd.channel_stats(broker.topic, "taskiq")
    return stats["depth"], stats["in_flight_count"], stats["requeue_count"] + stats["timeout_count"]


async def eventually(holds: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, holds)


def test_tasks_run_and_are_acknowledged(nsqd: Broker, jobs: NSQBroker) -> None:
    seen: list[tuple[int, str]] = []

    @jobs.task("add")
    async def add(number: int, word: str) -> None:
        seen.append((number, word))

    async def main() -> None:
        async with working(jobs):
            for number in range(20):
                await add.kiq(number, word="x")
            await eventually(lambda: len(seen) == 20)
            await eventually(lambda: counts(nsqd, jobs) == (0, 0, 0))

    run("asyncio", main)
    assert sorted(seen) == [(number, "x") for number in range(20)]


def test_running_task_is_touched(nsqd: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    nsqd.create(topic := next(_topics), "taskiq")
    jobs = NSQBroker(nsqd.tcp_address, topic=topic, msg_timeout_s=1)
    jobs.is_worker_process = True
    touched: list[bytes] = []
    touch = Message.touch

    def touch_noted(message: Message) -> None:
        touched.append(message.body)
        touch(message)

    monkeypatch.setattr(Message, "touch", touch_noted)

    @jobs.task("long")
    async def long() -> None:
        await eventually(lambda: len(touched) >= 3)

    async def main() -> None:
        async with working(jobs):
            await long.kiq()
            await eventually(lambda: len(touched) >= 3 and counts(nsqd, jobs)[:2] == (0, 0))

    run("asyncio", main)
    assert b"long" in touched[0]


def test_unacknowledged_task_is_not_touched_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    touched: list[int] = []
    touch = Message.touch

    def touch_noted(message: Message) -> None:
        touched.append(message.attempts)
        touch(message)

    monkeypatch.setattr(Message, "touch", touch_noted)

    async def main(jobs: NSQBroker) -> None:
        await jobs.startup()
        await jobs.kick(BrokerMessage(task_id="1", task_name="never", message=b"{}", labels={}))
        tasks = jobs.listen()
        await anext(tasks)
        again = await anext(tasks)  # the broker has given up waiting
        await eventually(lambda: "is not acknowledged after 1s" in caplog.text)
        again.ack()
        await tasks.aclose()
        await jobs.shutdown()

    with qcli_serve(
        tmp_path / "data", "--sync=interval", "--msg-timeout=1s", "--max-msg-timeout=1s"
    ) as short:
        short.create("jobs", "taskiq")
        jobs = NSQBroker(short.tcp_address, topic="jobs")
        jobs.is_worker_process = True
        run("asyncio", partial(main, jobs))
    assert touched.count(1) <= 3


@pytest.mark.parametrize("ack_type", ["when_received", "when_executed", "when_saved"])
def test_when_a_task_is_acknowledged(nsqd: Broker, jobs: NSQBroker, ack_type: str) -> None:
    in_flight: list[int] = []

    @jobs.task("look")
    async def look() -> None:
        if ack_type == "when_received":
            await eventually(lambda: counts(nsqd, jobs)[1] == 0)
        in_flight.append(counts(nsqd, jobs)[1])

    async def main() -> None:
        async with working(jobs):
            await look.kicker().with_labels(ack_type=ack_type).kiq()
            await eventually(lambda: bool(in_flight) and counts(nsqd, jobs)[:2] == (0, 0))

    run("asyncio", main)
    assert in_flight[0] == (ack_type != "when_received")


def test_task_may_acknowledge_by_itself_and_be_sent_again(nsqd: Broker, jobs: NSQBroker) -> None:
    seen: list[int] = []

    @jobs.task("manual")
    async def manual(context: Annotated[Context, TaskiqDepends()]) -> None:
        seen.append(len(seen))
        await context.ack()
        if len(seen) == 1:
            await context.requeue()

    async def main() -> None:
        async with working(jobs):
            await jobs.find_task("manual").kicker().with_labels(ack_type="manual").kiq()  # type: ignore[union-attr]
            await eventually(lambda: len(seen) == 2 and counts(nsqd, jobs)[:2] == (0, 0))

    run("asyncio", main)
    assert counts(nsqd, jobs) == (0, 0, 0)


def test_stopped_worker_returns_what_it_has_not_begun(nsqd: Broker, jobs: NSQBroker) -> None:
    @jobs.task("add")
    async def add() -> None:
        raise AssertionError("no worker listens")

    async def main() -> None:
        await jobs.startup()
        tasks = jobs.listen()
        for _ in range(3):
            await add.kiq()
        await anext(tasks)
        await tasks.aclose()
        await jobs.shutdown()
        assert counts(nsqd, jobs)[:2] == (3, 0)

    run("asyncio", main)


def test_delayed_task(nsqd: Broker, jobs: NSQBroker) -> None:
    @jobs.task("late")
    async def late() -> None:
        pass

    async def main() -> None:
        await jobs.startup()
        await late.kicker().with_labels(delay=3000.5).kiq()
        await late.kicker().with_labels(delay="3000").kiq()
        assert nsqd.channel_stats(jobs.topic, "taskiq")["deferred_count"] == 2
        wrongs: list[Any] = ["soon", -1, [1]]
        for wrong in wrongs:
            with pytest.raises(SendTaskError) as failure:
                await late.kicker().with_labels(delay=wrong).kiq()
            assert isinstance(failure.value.__cause__, ValueError | TypeError)
        await jobs.shutdown()

    run("asyncio", main)


def test_without_a_broker(nsqd: Broker) -> None:
    jobs = NSQBroker(free_address(), topic="jobs")

    async def main() -> None:
        with pytest.raises(ConnectionFailed):
            await jobs.startup()
        await jobs.shutdown()
        with pytest.raises(RuntimeError, match=r"await broker\.startup\(\) first"):
            await jobs.kick(BrokerMessage(task_id="1", task_name="x", message=b"x", labels={}))
        with pytest.raises(RuntimeError, match="only a worker process"):
            await anext(jobs.listen())

    run("asyncio", main)


@pytest.mark.parametrize(
    "wrong", [{"topic": "a b"}, {"channel": ""}, {"max_in_flight": 0}, {"msg_timeout_s": 0.5}, {"oops": 1}]
)
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        NSQBroker("127.0.0.1:4150", **wrong)


@contextmanager
def worker(nsqd: Broker, ledger: Ledger) -> Iterator[Worker]:
    env = {"NSQD": nsqd.tcp_address, "LEDGER": str(ledger.path)}
    words = ("worker", "integrations.taskiq_worker:broker", "--workers=1", "--wait-tasks-timeout=0")
    with running("taskiq", *words, env=env, output=ledger.path.with_suffix(".log")) as process:
        yield process


def test_killed_and_restarted_workers_lose_no_task(nsqd: Broker, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    nsqd.create("jobs", "taskiq")
    sender = NSQBroker(nsqd.tcp_address, topic="jobs")

    async def send(*numbers: int, wait_s: float) -> None:
        await sender.startup()
        for number in numbers:
            await sender.kick(
                sender.formatter.dumps(
                    TaskiqMessage(
                        task_id=str(number),
                        task_name="record",
                        labels={},
                        args=[number, wait_s],
                        kwargs={},
                    )
                )
            )
        await sender.shutdown()

    asyncio.run(send(1, 2, wait_s=1000.0))
    with worker(nsqd, ledger):
        ledger.wait_for("begin 1", "begin 2")
    # Killed while it ran them. They are delivered again, to a worker that is stopped in order.
    asyncio.run(send(3, wait_s=0.0))
    with worker(nsqd, ledger) as second:
        ledger.wait_for("end 3")
        until(lambda: ledger.lines().count("begin 1") >= 2 and ledger.lines().count("begin 2") >= 2)
        second.stop()
    until(lambda: nsqd.channel_stats("jobs", "taskiq")["depth"] == 2)
