"""The programs of examples/: what a transaction changes is published once, and has its effects once, under kills."""

import os
import random
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from interop.restarting import Restarting
from recipes.postgres import postgres
from recipes.support import EXAMPLES, PATIENCE_S, Program, wait_until

pytestmark = pytest.mark.slow

FAULTS = int(os.environ.get("FAULT_KILLS", "2"))
SEED = int(os.environ.get("FAULT_SEED", "7"))
ITEMS = ("pear", "apple", "plum")
TOPIC, CHANNEL = "orders", "shop"


class Shop:
    """Places orders all the time, in a thread; some transactions are rolled back.

    Attributes:
        placed: The orders whose transactions were committed.
    """

    def __init__(self, module: ModuleType, where: str) -> None:
        self.placed: list[tuple[int, str]] = []
        self._module = module
        self._where = where
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with closing(self._module.connect(self._where)) as database:
            number = 0
            while not self._ends.wait(0.005):
                item = ITEMS[number % len(ITEMS)]
                self._module.place_order(database, number, item)
                self.placed.append((number, item))
                if number % 10 == 0:
                    with pytest.raises(Exception, match=r"(?i)unique"):  # rolled back: the order exists
                        self._module.place_order(database, number, "twice")
                number += 1

    @contextmanager
    def open(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._ends.set()
            self._thread.join()


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return __import__(name)


@pytest.fixture(params=["sqlite", "postgres"])
def outbox(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The argument of the relay's program, its name, and the program as a module."""
    name = f"outbox_{request.param}"
    module = imported(name, monkeypatch)
    with ExitStack() as stack:
        where = str(tmp_path / "shop.db") if request.param == "sqlite" else stack.enter_context(postgres())
        yield where, f"{name}.py", module


def test_orders_are_published_once_and_counted_once(outbox: Any, tmp_path: Path) -> None:
    where, program, module = outbox
    sold = str(tmp_path / "sold.db")
    choose = random.Random(SEED).choice
    with ExitStack() as stack:
        broker = Restarting(tmp_path / "data", stack)
        broker.broker.create(TOPIC, CHANNEL)
        shop = Shop(module, where)
        with shop.open():
            wait_until(lambda: bool(shop.placed))
            relay = Program(program, where, TOPIC, broker.address)
            stack.callback(relay.kill)
            inbox = Program("inbox.py", sold, f"{TOPIC}/{CHANNEL}", broker.address)
            stack.callback(inbox.kill)

            def progress() -> None:
                count, before = counted(sold), len(broker.stored(TOPIC))
                wait_until(lambda: len(broker.stored(TOPIC)) > before + 20)
                wait_until(lambda: counted(sold) > count)

            for fault in range(FAULTS):
                progress()
                kind = (
                    ("relay", "broker", "inbox")[fault] if fault < 3 else choose(["relay", "broker", "inbox"])
                )
                if kind == "relay":
                    relay.restart()
                elif kind == "inbox":
                    inbox.restart()
                else:
                    broker.kill()
                    broker.start()
            progress()
        expected = [f"order {number}: {item}" for number, item in shop.placed]
        wait_until(lambda: len(broker.stored(TOPIC)) >= len(expected))
        wait_until(lambda: counted(sold) >= len(expected))
        relay.kill()
        wait_until(lambda: broker.broker.is_drained(TOPIC, CHANNEL))
        assert not inbox.has_ended
        found = broker.stored(TOPIC)
        assert found == expected  # one shop: the order of its transactions
        with closing(sqlite3.connect(sold)) as database:
            assert Counter(dict(database.execute("SELECT item, count FROM sold"))) == Counter(
                item for _, item in shop.placed
            )


def counted(path: str) -> int:
    """Return how many orders the inbox has counted."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=PATIENCE_S)) as database:
            (count,) = database.execute("SELECT coalesce(sum(count), 0) FROM sold").fetchone()
    except sqlite3.OperationalError:  # it is not there yet
        return 0
    return int(count)


def test_second_relay_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = imported("outbox_sqlite", monkeypatch)
    where = str(tmp_path / "shop.db")
    database = module.connect(where)
    with ExitStack() as stack:
        broker = Restarting(tmp_path / "data", stack)
        module.place_order(database, 0, "pear")
        first = Program("outbox_sqlite.py", where, TOPIC, broker.address)
        stack.callback(first.kill)
        wait_until(lambda: len(broker.stored(TOPIC)) == 1)
        second = Program("outbox_sqlite.py", where, TOPIC, broker.address)
        stack.callback(second.kill)
        number = 0

        def first_has_ended() -> bool:
            nonlocal number
            number += 1
            module.place_order(database, number, "apple")
            return first.has_ended

        wait_until(first_has_ended)
        wait_until(lambda: len(broker.stored(TOPIC)) == number + 1)
        assert not second.has_ended
        assert len(set(broker.stored(TOPIC))) == number + 1
        database.close()
