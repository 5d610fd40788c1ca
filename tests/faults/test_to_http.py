"""`qcli to-http` with kills: each message was accepted by a receiver at least once, or is a dead letter.

The ledger is the receiver's: what it has accepted, and what it has refused for good. The command is killed at random
times, and so is the broker. `FAULT_KILLS` is the number of kills.
"""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from cli.support import Cli
from connectors.http_receiver import Answer, Received, receiver
from fleet.support import wait_until
from interop.peers import Broker, nsqd, qcli_serve
from soak import in_soak

KILLS = int(os.environ.get("FAULT_KILLS", "2"))
BATCHES = ("--batch-size", "7", "--batch-format", "ndjson", "--batch-wait", "5ms")
MESSAGES = 150
"""Messages for each life of the command."""
OPTIONS = ("--retry-delay", "20ms", "--max-retry-delay", "200ms", "--max-attempts", "0", "-n", "10", "-q")


class Ledger:
    """Answers at random: accepts, fails, is busy, refuses, or accepts without the sender learning of it."""

    def __init__(self, seed: int) -> None:
        self.accepted: Counter[bytes] = Counter()
        self.refused: set[bytes] = set()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.is_calm = False

    def answer(self, request: Received) -> Answer | int:
        with self._lock:
            bodies = [line.strip(b'"') for line in request.body.splitlines()]  # in a batch, JSON strings
            if any(body.startswith(b"bad") for body in bodies):
                if len(bodies) == 1:
                    self.refused.add(bodies[0])
                return 422
            chance = 1.0 if self.is_calm else self._random.random()
            if chance < 0.1:
                return 500
            if chance < 0.13:
                return Answer(503, {"Retry-After": "0"})
            self.accepted.update(bodies)
            return Answer(raw=b"") if chance < 0.2 else 200


def _bodies(life: int) -> list[bytes]:
    return [
        b"%s %d %d" % (b"bad" if number % 10 == 3 else b"good", life, number) for number in range(MESSAGES)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "batch"), [(qcli_serve, BATCHES), (nsqd, ()), *in_soak((qcli_serve, ()), (nsqd, BATCHES))]
)
def test_killed_commands_lose_nothing(
    tmp_path: Path, run: Callable[..., AbstractContextManager[Broker]], batch: tuple[str, ...]
) -> None:
    ledger, times = Ledger(1), random.Random(2)
    with run(tmp_path / "data", "--msg-timeout=2s") as broker, receiver(ledger.answer) as server:
        cli = Cli(broker.tcp_address, broker.http_address)
        broker.create("clicks", "nsq_to_http")
        expected: set[bytes] = set()
        for life in range(KILLS + 1):
            bodies = _bodies(life)
            expected.update(bodies)
            before = len(server.requests)
            with cli.running("to-http", "clicks", "--post", server.url, *OPTIONS, *batch) as running:
                cli.publish("clicks", bodies)
                ledger.is_calm = life == KILLS
                if life < KILLS:
                    server.wait_for(before + 1)
                    time.sleep(times.uniform(0, 0.3))  # the moment of the kill is at random
                    running.process.kill()
                else:
                    wait_until(
                        lambda: broker.is_drained("clicks", "nsq_to_http"), "all messages are finished"
                    )
        _check(broker, ledger, expected)


@pytest.mark.slow
def test_a_killed_broker_loses_nothing(tmp_path: Path) -> None:
    """The command reconnects, and stores the dead letters that it could not."""
    ledger = Ledger(3)
    data, expected = tmp_path / "data", set[bytes]()
    with receiver(ledger.answer) as server:
        with qcli_serve(data) as broker:
            ports = ("--tcp-address", broker.tcp_address, "--http-address", broker.http_address)
            broker.create("clicks", "nsq_to_http")
            cli = Cli(broker.tcp_address, broker.http_address)
            running = cli.running("to-http", "clicks", "--post", server.url, *OPTIONS)
            command = running.__enter__()
            cli.publish("clicks", _bodies(0))
            expected.update(_bodies(0))
            server.wait_for(MESSAGES // 3)
            broker.process.kill()
            broker.process.wait()
        try:
            with qcli_serve(data, *ports) as broker:
                cli.publish("clicks", _bodies(1))
                expected.update(_bodies(1))
                ledger.is_calm = True
                wait_until(lambda: broker.is_drained("clicks", "nsq_to_http"), "all messages are finished")
                assert command.process.poll() is None
                _check(broker, ledger, expected)
        finally:
            running.__exit__(None, None, None)


def _check(broker: Broker, ledger: Ledger, expected: set[bytes]) -> None:
    letters = broker.channel_stats("clicks.dead", "dead-letters")["depth"]
    bad = {body for body in expected if body.startswith(b"bad")}
    assert ledger.accepted.keys() == expected - bad
    assert ledger.refused <= bad
    cli = Cli(broker.tcp_address, broker.http_address)
    done = cli("tail", "clicks.dead/dead-letters", "-n", str(letters))
    assert done.code == 0, done.err
    assert set(done.out.splitlines()) == bad
