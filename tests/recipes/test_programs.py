"""The programs of examples/ that handle messages, while their brokers are killed: nothing is lost.

`make soak` kills more often, and runs them under trio, too: FAULT_KILLS.
"""

import json
import os
import re
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from interop.peers import free_ports
from recipes.support import EXAMPLES, Program, wait_until
from trio_nsq.sync import Producer
from trio_nsq.testing import NSQ, NSQServer

pytestmark = pytest.mark.slow

SOAK = "FAULT_KILLS" in os.environ
KILLS = int(os.environ.get("FAULT_KILLS", "1"))
LOOPS = {"asyncio": (), "trio": ("--trio",)} if SOAK else {"asyncio": ()}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Publishing:
    """Publishes numbered messages all the time, in a thread, each once.

    Attributes:
        stored: The numbers that the broker has acknowledged.
    """

    def __init__(self, address: str, topic: str, body_of: Callable[[int], bytes]) -> None:
        self.stored: list[int] = []
        self._address = address
        self._topic = topic
        self._body_of = body_of
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with Producer(self._address, name="publishing", patience_s=600) as producer:
            number = 0
            while not self._ends.wait(0.002):
                producer.publish(self._topic, self._body_of(number))
                self.stored.append(number)
                number += 1

    @contextmanager
    def open(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._ends.set()
            self._thread.join()

    def wait_for_more(self) -> None:
        """Wait until a few more messages are stored."""
        before = len(self.stored)
        wait_until(lambda: len(self.stored) > before + 5)


def server(stack: ExitStack, folder: Path) -> NSQ:
    folder.mkdir()
    return stack.enter_context(NSQ(stack.enter_context(NSQServer(folder))))


def program(stack: ExitStack, *arguments: str, output: Path | None = None, **env: str) -> Program:
    found = Program(*arguments, output=output, env=env)
    stack.callback(found.kill)
    return found


def body_of(which: int, number: int) -> bytes:
    return b"%d %d" % (which, number)


def kill_and_restart(broker: NSQ) -> None:
    broker.kill()
    broker.restart()


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def numbers_in(path: Path, pattern: str) -> set[int]:
    """Return the numbers in the lines that a program has printed. A line may begin with one that a kill has cut."""
    return {
        int(found[1])
        for line in lines_of(path)
        if (found := re.search(pattern.replace(".*", r"\d+") + "$", line))
    }


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_worker(loop: tuple[str, ...], stack: ExitStack, tmp_path: Path) -> None:
    broker = server(stack, tmp_path / "broker")
    output = tmp_path / "output"
    worker = program(stack, "worker.py", "orders/work", broker.tcp_address, *loop, output=output)
    publishing = Publishing(
        broker.tcp_address,
        "orders",
        lambda number: b"not JSON" if number % 10 == 9 else b'{"id":%d}' % number,
    )
    with publishing.open():
        for _ in range(KILLS):
            publishing.wait_for_more()
            kill_and_restart(broker)
            handled = len(lines_of(output))
            wait_until(lambda: len(lines_of(output)) > handled)  # noqa: B023  # called in this round
            worker.restart()
        publishing.wait_for_more()
    broker.wait_empty("orders", "work", timeout_s=60)
    assert worker.stop() == 0
    wanted = {number for number in publishing.stored if number % 10 != 9}
    assert numbers_in(output, "handled (.*)") == wanted
    assert set(broker.published("orders-failed")) == {b"not JSON"}
    assert len(broker.published("orders-failed")) >= sum(number % 10 == 9 for number in publishing.stored)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_fan_in(loop: tuple[str, ...], stack: ExitStack, tmp_path: Path) -> None:
    sources = [server(stack, tmp_path / f"source{number}") for number in range(2)]
    target = server(stack, tmp_path / "target")
    addresses = [broker.tcp_address for broker in sources]
    copying = program(stack, "fan_in.py", "lines/copy", target.tcp_address, *addresses, *loop)
    publishings = [
        Publishing(broker.tcp_address, "lines", partial(body_of, which))
        for which, broker in enumerate(sources)
    ]
    with publishings[0].open(), publishings[1].open():
        for kill in range(KILLS):
            for publishing in publishings:
                publishing.wait_for_more()
            kill_and_restart([target, *sources][kill % 3])
            copied = len(target.published("lines"))
            wait_until(lambda: len(target.published("lines")) > copied)  # noqa: B023  # called in this round
    for broker in sources:
        broker.wait_empty("lines", "copy", timeout_s=60)
    assert copying.stop() == 0
    wanted = {
        b"%d %d" % (which, number)
        for which, publishing in enumerate(publishings)
        for number in publishing.stored
    }
    assert set(target.published("lines")) == wanted


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_stream_into_a_database(loop: tuple[str, ...], stack: ExitStack, tmp_path: Path) -> None:
    broker = server(stack, tmp_path / "broker")
    path = str(tmp_path / "counts.db")
    broker.publish("words", b"0")
    counting = program(stack, "stream.py", path, "words", broker.http_address, *loop)
    publishing = Publishing(broker.tcp_address, "words", lambda number: b"%d" % (number % 3))
    with publishing.open():
        for _ in range(KILLS):
            publishing.wait_for_more()
            kill_and_restart(broker)
            before = counted(path).total()
            wait_until(lambda: counted(path).total() > before)  # noqa: B023  # called in this round
            counting.restart()
    wanted = Counter(str(number % 3) for number in publishing.stored) + Counter({"0": 1})
    wait_until(lambda: counted(path).total() >= wanted.total())
    assert counted(path) == wanted


def counted(path: str) -> Counter[str]:
    """Return how often each word is counted in the database of stream.py."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as database:
            return Counter(dict(database.execute("SELECT word, count FROM counts")))
    except sqlite3.OperationalError:  # it is not there yet
        return Counter()


def test_scheduler(stack: ExitStack, tmp_path: Path) -> None:
    broker = server(stack, tmp_path / "broker")
    arguments = ("scheduler.py", "jobs", broker.http_address, "0.05")
    schedulers = [program(stack, *arguments)]
    broker.wait_published("jobs", timeout_s=60)
    schedulers.append(program(stack, *arguments))
    for kill in range(KILLS + 1):
        count = len(broker.published("jobs"))
        wait_until(lambda: len(broker.published("jobs")) > count + 3)  # noqa: B023  # called in this round
        if kill == 0:
            kill_and_restart(broker)
        else:
            schedulers[kill % 2].restart()
    count = len(broker.published("jobs"))
    wait_until(lambda: len(broker.published("jobs")) > count)
    assert not any(scheduler.has_ended for scheduler in schedulers)
    numbers = [json.loads(body)["number"] for body in broker.published("jobs")]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_web_service(stack: ExitStack, tmp_path: Path) -> None:
    broker = server(stack, tmp_path / "broker")
    (port,) = free_ports(1)
    output = tmp_path / "output"
    words = ("-m", "uvicorn", "web_service:app", "--port", str(port), "--log-level", "warning")
    service = program(stack, *words, output=output, NSQD=broker.tcp_address)
    http = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60))
    accepted: list[int] = []
    number = 0

    def place() -> int:
        nonlocal number
        number += 1
        status = http.post("/orders", json={"id": number, "item": "tea"}).status_code
        if status == 202:
            accepted.append(number)
        return status

    def is_up() -> bool:
        try:
            return http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(is_up)
    for _ in range(KILLS):
        for _ in range(10):
            wait_until(lambda: place() == 202)
        broker.kill()
        assert place() == 503
        broker.restart()
        wait_until(lambda: place() == 202)
        service.restart()
        wait_until(is_up)
    assert http.post("/orders", json={"id": "x"}).status_code == 422
    broker.publish("orders", b"not an order")
    broker.wait_published("orders-failed", timeout_s=60)
    broker.wait_empty("orders", "mail", timeout_s=60)
    assert service.stop() in (0, -signal.SIGTERM)
    assert set(accepted) <= numbers_in(output, "order (.*): tea") <= set(range(1, number + 1))


def test_page_shows_the_web_service() -> None:
    page = (EXAMPLES.parent / "docs/how-to/web-services.md").read_text()
    _, _, program = (EXAMPLES / "web_service.py").read_text().partition('"""\n\n')
    assert f"<<'END'\n{program}END\n" in page


def test_readme_and_page_have_the_same_first_program() -> None:
    first = (EXAMPLES.parent / "docs/how-to/asyncio.md").read_text().partition("```python\n")[2]
    assert f"```python\n{first.partition('```')[0]}```" in (EXAMPLES.parent / "README.md").read_text()
