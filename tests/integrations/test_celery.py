"""Celery's workers as processes: what they do, and that kills of workers and of the broker lose no task."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest
from celery import Celery

from integrations.support import PATIENCE_S, Ledger, Worker, running, until
from interop.peers import Broker, free_address, qcli_serve

pytestmark = pytest.mark.slow


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def env(ledger: Ledger) -> dict[str, str]:
    """The environment of workers; the broker's addresses are free."""
    return {"LEDGER": str(ledger.path), "NSQ_URL": f"nsq://{free_address()}", "NSQD_HTTP": free_address()}


@contextmanager
def serving(path: Path, env: dict[str, str]) -> Iterator[Broker]:
    addresses = (
        f"--tcp-address={env['NSQ_URL'].removeprefix('nsq://')}",
        f"--http-address={env['NSQD_HTTP']}",
    )
    with qcli_serve(path, "--sync=interval", *addresses) as broker:
        yield broker


@contextmanager
def worker(pool: str, name: str, env: dict[str, str], path: Path) -> Iterator[Worker]:
    words = (
        "-A",
        "integrations.celery_tasks",
        "worker",
        "-P",
        pool,
        "-c",
        "2",
        "-n",
        f"{name}@host",
        "-l",
        "INFO",
    )
    with running("celery", *words, env=env, output=path / f"{name}.log") as process:
        yield process


@pytest.fixture
def app(env: dict[str, str]) -> Iterator[Celery]:
    """An application that sends tasks by name, as other programs do."""
    import trio_nsq.integrations.kombu  # noqa: F401  # adds the scheme `nsq`

    with Celery(broker=env["NSQ_URL"]) as app:
        app.conf.broker_transport_options = {"nsqd_http_address": env["NSQD_HTTP"]}
        app.conf.broker_connection_timeout = PATIENCE_S
        yield app


def counts(broker: Broker) -> tuple[int, int, int]:
    """Return how many tasks wait, are in flight, and are deferred."""
    stats = broker.channel_stats("celery", "celery")
    return stats["depth"], stats["in_flight_count"], stats["deferred_count"]


def test_workers_and_kills(app: Celery, ledger: Ledger, env: dict[str, str], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with ExitStack() as stack:
        broker = stack.enter_context(serving(tmp_path / "data", env))
        app.send_task("record", ["before the worker"])
        with worker("gevent", "first", env, tmp_path) as first:
            ledger.wait_for("done before the worker")
            app.send_task("fan", ["by a task"])
            app.send_task("again", ["r"])
            app.send_task("rejected", ["x"])
            app.send_task("record", ["soon"], countdown=1.1)
            app.send_task("record", ["in ten hours"], countdown=36_000)
            ledger.wait_for("done by a task", "rejected True x", "done soon", "try 2 r")
            assert app.control.ping(destination=["first@host"], limit=1, timeout=PATIENCE_S) == [
                {"first@host": {"ok": "pong"}}
            ]
            events: list[str] = []
            with app.connection() as connection:
                receiver = app.events.Receiver(
                    connection, {"worker-heartbeat": lambda event: events.append(event["hostname"])}
                )
                receiver.capture(limit=1, timeout=PATIENCE_S)
            assert events == ["first@host"]
            assert ledger.lines().count("done soon") == 1
            for word in ("l1", "l2"):
                app.send_task("late", [word, str(gate)])
            ledger.wait_for("begin l1", "begin l2")
            first.kill()
        with worker("prefork", "second", env, tmp_path) as second:
            until(lambda: ledger.lines().count("begin l1") > 1 and ledger.lines().count("begin l2") > 1)
            broker.process.kill()
            broker.process.wait()
            broker = stack.enter_context(serving(tmp_path / "data", env))
            gate.touch()
            app.send_task("fan", ["by a child"])
            ledger.wait_for("done by a child", "end l1", "end l2")
            until(lambda: counts(broker) == (0, 0, 1))  # the last one is due in ten hours
            assert second.stop() == 0
        assert counts(broker) == (0, 0, 1)
    assert "done in ten hours" not in ledger.lines()


KILLS = int(os.environ.get("FAULT_KILLS", "0"))
"""Of workers, at random times; the broker is killed half as often."""


@pytest.mark.skipif(not KILLS, reason="minutes; make soak runs it")
@pytest.mark.timeout(0)
def test_many_kills(app: Celery, ledger: Ledger, env: dict[str, str], tmp_path: Path) -> None:
    seed = int(os.environ.get("FAULT_SEED", "7"))
    print(f"seed {seed}")
    random = Random(seed)
    sent: list[str] = []
    stopping = threading.Event()

    def send() -> None:
        while not stopping.wait(0.005):
            word = str(len(sent))
            app.send_task(
                "late", [word], countdown=random.choice([None, None, 0.5]), retry=True, retry_policy=forever
            )
            sent.append(word)

    forever = {"max_retries": None, "interval_start": 0.05, "interval_max": 0.2}
    with ExitStack() as stack:
        broker = stack.enter_context(serving(tmp_path / "data", env))
        broker.create("celery", "celery")
        sender = threading.Thread(target=send)
        sender.start()
        stack.callback(sender.join)
        stack.callback(stopping.set)
        for number in range(KILLS):
            pool = random.choice(["prefork", "gevent", "threads"])
            begun = len(ledger.lines())
            with worker(pool, f"worker{number}", env, tmp_path) as process:
                until(lambda: len(ledger.lines()) > begun + random.randrange(200))  # noqa: B023  # called at once
                if random.random() < 0.5:
                    broker.process.kill()
                    broker.process.wait()
                    broker = stack.enter_context(serving(tmp_path / "data", env))
                    until(lambda: broker.channel_stats("celery", "celery")["client_count"] > 0)  # noqa: B023
                process.kill()
        stopping.set()
        sender.join()
        with worker("prefork", "last", env, tmp_path) as process:
            ledger.wait_for(*(f"end {word}" for word in sent))
            until(lambda: counts(broker) == (0, 0, 0))
            assert process.stop() == 0
    ends = [line for line in ledger.lines() if line.startswith("end ")]
    print(
        f"{len(sent)} tasks, {KILLS} kills: {len(set(ends))} done, {len(ends) - len(set(ends))} of them again"
    )
    assert set(ends) == {f"end {word}" for word in sent}
