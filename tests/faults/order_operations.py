"""A channel with an order by key, while operators, brokers and consumers disturb it; and a check of what happened.

A producer publishes messages with a key and their number within the key, each exactly once, to one of two brokers.
Consumer processes finish them, requeue some, with and without a delay, and requeue others always, so that they become
dead letters. Meanwhile the channel is paused, emptied and limited in its rate, its order is ended and set again, the
topic is moved to the other broker, brokers are killed and stopped, and consumers are killed and suspended.
"""

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGTERM

from faults.order_check import KEYS, Check, Event
from faults.order_consumer import MSG_TIMEOUT_S
from interop.peers import Broker, free_address, qcli_serve
from trio_nsq.api import broker as api
from trio_nsq.client.http.broker_http import BrokerHTTP
from trio_nsq.protocol.errors import NSQError
from trio_nsq.protocol.messages import pack_messages

TOPIC, CHANNEL, DEAD = "orders", "ledger", "orders.dead"
ORDER_BY = "json:k"
CONSUMERS = 3
PATIENCE_S = 120.0
_TESTS = Path(__file__).parents[1]


class Producer(threading.Thread):
    """Publishes batches to the current broker, while it holds the lock.

    Attributes:
        published: The number of messages of each key that were acknowledged.
        lock: Without it, nothing is published.
        address: The HTTP address of that broker.
    """

    def __init__(self, address: str, rate: float, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self.published = [0] * KEYS
        self.lock = threading.Lock()
        self.address = address
        self.over = False
        self._rate, self._chance = rate, chance

    def run(self) -> None:
        number = 0
        while not self.over:
            number += 1
            size = self._chance.randrange(1, 100)
            with self.lock:
                self._publish(number, size)
            time.sleep(size / self._rate)

    def _publish(self, number: int, size: int) -> None:
        numbers = self.published.copy()
        bodies = []
        for _ in range(size):
            key = self._chance.randrange(KEYS)
            bodies.append(b'{"k":%d,"n":%d}' % (key, numbers[key]))
            numbers[key] += 1
        packed = pack_messages(bodies)
        body = size.to_bytes(4, "big") + packed.data
        while True:
            with suppress(NSQError):  # it restarts
                BrokerHTTP(self.address).ask(api.publish_batch(TOPIC, "p", True, number, body=body))
                break
            time.sleep(0.02)
        self.published = numbers


class Consumers:
    """The processes of consumers, and what they tell.

    Attributes:
        events: What they told until now.
    """

    def __init__(self, addresses: Sequence[str], chance: random.Random) -> None:
        self.events: list[Event] = []
        self._addresses, self._chance = addresses, chance
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: dict[int, threading.Thread] = {}

    def start(self) -> None:
        command = [sys.executable, "-m", "faults.order_consumer", TOPIC, CHANNEL, str(self._chance.random())]
        process = subprocess.Popen([*command, *self._addresses], stdout=subprocess.PIPE, cwd=_TESTS)
        self._processes[process.pid] = process
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._readers[process.pid] = reader
        reader.start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            kind, *numbers = line.split()
            at_ns, connection, key, number = map(int, numbers)
            self.events.append(Event(at_ns, kind.decode(), (process.pid, connection), key, number))
        process.stdout.close()

    @property
    def some(self) -> int:
        """The process id of one of them."""
        return self._chance.choice(sorted(self._processes))

    def signal(self, pid: int, number: int) -> None:
        self._processes[pid].send_signal(number)

    def kill(self, pid: int) -> None:
        process = self._processes.pop(pid)
        process.kill()
        process.wait()
        self._readers.pop(pid).join()
        # Others get its messages before this process knows of its end.
        last_ns = max((each.at_ns for each in self.events if each.connection[0] == pid), default=0)
        self.events.append(Event(last_ns + 1, "dead", (pid, 0)))

    def close(self) -> None:
        """Kill all."""
        for pid in list(self._processes):
            self.kill(pid)


@dataclass
class Report:
    """What happened, and what was wrong."""

    published: int
    dead_letters: int
    done: Counter[str]
    counts: Counter[str]
    wrong: list[str]
    lost: list[tuple[int, int]]


class Operators:
    """Two brokers, one of which has the topic, and all that disturbs it."""

    def __init__(self, folder: Path, flags: Sequence[str], rate: float, chance: random.Random) -> None:
        self.events: list[Event] = []
        self.done: Counter[str] = Counter()
        self._folder, self._flags, self._chance = folder, flags, chance
        self._addresses = [(free_address(), free_address()) for _ in range(2)]
        self._brokers: list[tuple[Broker, ExitStack]] = [self._started(number) for number in range(2)]
        self._current = 0
        for number in range(2):
            self._broker(number).create(DEAD, "dead-letters")
            self._broker(number).create(TOPIC, CHANNEL)
            self._set(number, order_by=ORDER_BY, max_attempts=3, dead_letter_topic=DEAD)
        self.producer = Producer(self._addresses[0][1], rate, chance)
        self.consumers = Consumers([tcp for tcp, _ in self._addresses], chance)
        self._suspended: int | None = None
        self._later: list[tuple[float, Callable[[], None]]] = []

    # ------------------------------------------------------------------ brokers

    def _started(self, number: int) -> tuple[Broker, ExitStack]:
        stack = ExitStack()
        tcp, http = self._addresses[number]
        flags = (f"--tcp-address={tcp}", f"--http-address={http}", *self._flags)
        return stack.enter_context(qcli_serve(self._folder / str(number), *flags)), stack

    def _broker(self, number: int) -> Broker:
        return self._brokers[number][0]

    @property
    def _here(self) -> Broker:
        return self._broker(self._current)

    def _set(self, number: int, **settings: object) -> None:
        body = json.dumps(settings).encode()
        self._broker(number).put("/channel/settings", body, topic=TOPIC, channel=CHANNEL)

    def _tell(self, kind: str, numbers: Sequence[int] = ()) -> None:
        self.events.append(Event(time.monotonic_ns(), kind, numbers=tuple(numbers)))

    # ------------------------------------------------------------------ operations

    def disturb(self, seconds: float) -> None:
        """Disturb for some time; afterwards, everything is as it should be."""
        operations = (self.pause, self.empty, self.limit, self.change, self.kill, self.move)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._end_some()
            operation = self._chance.choice(
                (*operations, self.kill_consumer, self.suspend, self.pause, self.limit)
            )
            operation()
            self.done[operation.__name__] += 1
            time.sleep(self._chance.uniform(0.1, 1.0))
        self._end_some(all_of_them=True)

    def _end_some(self, *, all_of_them: bool = False) -> None:
        for at in list(self._later):
            if all_of_them or at[0] <= time.monotonic():
                self._later.remove(at)
                at[1]()

    def _soon(self, after_s: float, end: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + after_s, end))

    def pause(self) -> None:
        """Pause the channel or the topic for a moment."""
        params: dict[str, str | int] = {"topic": TOPIC}
        if self._chance.random() < 0.7:
            params["channel"] = CHANNEL
        kind = "channel" if "channel" in params else "topic"
        self._here.http("POST", f"/{kind}/pause", **params)

        def end() -> None:
            self._here.http("POST", f"/{kind}/unpause", **params)

        self._soon(self._chance.uniform(0, 0.5), end)

    def empty(self) -> None:
        """Empty the channel. Nothing is published meanwhile, so that it is known what is dropped."""
        with self.producer.lock:
            self._tell("empty", self.producer.published)
            self._here.http("POST", "/channel/empty", topic=TOPIC, channel=CHANNEL)

    def limit(self) -> None:
        """Change the rate limit."""
        rate = self._chance.choice((0, 0, 200, 1000))
        for number in range(2):
            self._set(number, rate_limit_per_s=rate)

    def change(self) -> None:
        """End the order, and set it again."""
        self._end_some(all_of_them=True)  # what a suspended consumer has, and has not told, is in flight
        self._tell("off")
        for number in range(2):
            self._set(number, order_by="")
        time.sleep(self._chance.uniform(0, 0.3))
        for number in range(2):
            self._set(number, order_by=ORDER_BY)
        self._tell("on")

    def kill(self) -> None:
        """Kill or stop the broker that has the topic, and start it again."""
        broker, stack = self._brokers[self._current]
        self._tell("kill")
        if self._chance.random() < 0.3:
            broker.process.send_signal(SIGTERM)
        else:
            broker.process.kill()
        broker.process.wait()
        stack.close()
        self._brokers[self._current] = self._started(self._current)
        self._tell("kill")

    def move(self) -> None:
        """Move the topic to the other broker. Nothing is published meanwhile: it would come before what is moved."""
        self._end_some(all_of_them=True)  # a suspended consumer has messages
        other = 1 - self._current
        with self.producer.lock:
            source, target = self._here.http_address, self._broker(other).http_address
            for words in (("drain", "--move-to", target), ("undrain",)):
                command = [sys.executable, "-m", "qcli", *words, "--nsqd-http-address", source]
                subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
            self._tell("move")
            self._current, self.producer.address = other, self._broker(other).http_address

    def kill_consumer(self) -> None:
        """Kill a consumer, and start another one."""
        pid = self.consumers.some
        if pid == self._suspended:
            return
        self.consumers.kill(pid)
        self.consumers.start()

    def suspend(self) -> None:
        """Suspend a consumer until its messages have timed out, or for a moment."""
        if self._suspended is not None:
            return
        pid = self._suspended = self.consumers.some
        self.consumers.signal(pid, SIGSTOP)

        def go_on() -> None:
            self._suspended = None
            self.consumers.signal(pid, SIGCONT)

        self._soon(self._chance.choice((0.3, MSG_TIMEOUT_S + 1.5)), go_on)

    # ------------------------------------------------------------------ the end

    def finish(self) -> set[tuple[int, int]]:
        """Wait until all is finished; return the dead letters. Raises RuntimeError: it never is."""
        for number in range(2):
            self._set(number, rate_limit_per_s=0)
        until_s = time.monotonic() + PATIENCE_S
        while not all(broker.is_drained(TOPIC, CHANNEL) for broker, _ in self._brokers):
            if time.monotonic() > until_s:
                raise RuntimeError(str([each.channel_stats(TOPIC, CHANNEL) for each, _ in self._brokers]))
            time.sleep(0.2)
        found = set()
        for broker, _ in self._brokers:
            found_here = broker.http(
                "GET", "/channel/peek", topic=DEAD, channel="dead-letters", max_messages=10_000
            )
            for line in found_here.splitlines():
                body = json.loads(json.loads(line)["body"])
                found.add((body["k"], body["n"]))
        return found

    def close(self) -> None:
        """End everything."""
        self.producer.over = True
        self.consumers.close()
        for _, stack in self._brokers:
            stack.close()


@contextmanager
def _running(operators: Operators) -> Iterator[None]:
    try:
        operators.producer.start()
        for _ in range(CONSUMERS):
            operators.consumers.start()
        yield
    finally:
        operators.close()


def under_operations(folder: Path, flags: Sequence[str], *, seconds: float, rate: float, seed: int) -> Report:
    """Publish, consume and disturb for some time; consume the rest, and check what happened."""
    operators = Operators(folder, flags, rate, random.Random(seed))
    with _running(operators):
        operators.disturb(seconds)
        operators.producer.over = True
        operators.producer.join()
        dead = operators.finish()
    published, events = operators.producer.published, operators.events + operators.consumers.events
    check = Check(dead)
    check.run(events)
    emptied = [0] * KEYS
    for event in events:
        if event.kind == "empty":
            emptied = [max(each) for each in zip(emptied, event.numbers, strict=True)]
    lost = [
        (key, number)
        for key in range(KEYS)
        for number in range(emptied[key], published[key])
        if (key, number) not in check.finished and (key, number) not in dead
    ]
    return Report(sum(published), len(dead), operators.done, check.counts, check.wrong, lost)
