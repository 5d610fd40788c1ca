"""Changes of keys (`c`, `u`, `d`), published to several brokers that are killed, and their ledger.

Each producer has keys of its own, publishes one batch after the other, and repeats a batch until it is acknowledged. So
the change of a key that was acknowledged last is the newest one, also by the clocks of brokers on one machine.
"""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trio_nsq.api import broker as api
from trio_nsq.client.http.broker_http import BrokerHTTP
from trio_nsq.protocol.errors import NSQError
from trio_nsq.protocol.messages import pack_messages

Change = dict[str, Any]
COLUMNS = "user_id:long,n:long,op:string,text:string"
"""The fields of a change."""
PATIENCE_S = 120.0


class Addresses(NamedTuple):
    """Those of a broker, which it keeps when it is started again."""

    http: str
    tcp: str


class Ledger:
    """The last acknowledged change of each key of a topic. Producers have keys of their own.

    Attributes:
        newest: The number of the last change by key; a key whose last change deletes it is not here.
        changes, deletes: How many were acknowledged.
    """

    def __init__(self) -> None:
        self.newest: dict[int, int] = {}
        self.changes = self.deletes = 0
        self._lock = threading.Lock()

    def add(self, changes: Sequence[Change]) -> None:
        """Add acknowledged changes, in their order."""
        with self._lock:
            for each in changes:
                self.changes += 1
                if each["op"] == "d":
                    self.deletes += 1
                    self.newest.pop(each["user_id"], None)
                else:
                    self.newest[each["user_id"]] = each["n"]


class Changes:
    """Makes changes of the keys [first, first + keys)."""

    def __init__(self, first: int, keys: int, chance: random.Random) -> None:
        self._first, self._keys, self._chance = first, keys, chance
        self._number = first * 1_000_000
        self._there: set[int] = set()

    def some(self, count: int) -> list[Change]:
        found = []
        for _ in range(count):
            self._number += 1
            user_id = self._first + self._chance.randrange(self._keys)
            op = "c" if user_id not in self._there else self._chance.choice("uuud")
            self._there.symmetric_difference_update({user_id} if op in "cd" else ())
            found.append({"user_id": user_id, "n": self._number, "op": op, "text": "x" * 50})
        return found


class Producer(threading.Thread):
    """Publishes to random brokers until it is stopped. It ends with an acknowledged batch.

    Attributes:
        retries: Requests without an OK.
        failed: Why it ended early; None: it did not.
    """

    def __init__(
        self, brokers: Sequence[Addresses], topic: str, ledger: Ledger, chance: random.Random
    ) -> None:
        super().__init__(daemon=True)
        self.retries = 0
        self.failed: BaseException | None = None
        self._brokers, self._topic, self._ledger, self._chance = brokers, topic, ledger, chance
        self._stopped = threading.Event()

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                self.publish_some()
        except BaseException as error:
            self.failed = error

    def publish_some(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        if self.failed is not None:
            raise self.failed


class Batches(Producer):
    """Publishes numbered batches over HTTP."""

    def __init__(
        self,
        brokers: Sequence[Addresses],
        topic: str,
        ledger: Ledger,
        chance: random.Random,
        changes: Changes,
        rate: float,
    ) -> None:
        super().__init__(brokers, topic, ledger, chance)
        self._changes, self._rate = changes, rate
        self._name, self._number = f"p{chance.getrandbits(64):016x}", 0
        self._clients = [BrokerHTTP(each.http, keep_alive_s=4.0) for each in brokers]

    def publish_some(self) -> None:
        changes = self._changes.some(self._chance.randrange(1, 100))
        self._number += 1
        packed = pack_messages([json.dumps(each).encode() for each in changes])
        body = len(changes).to_bytes(4, "big") + packed.data
        client = self._chance.choice(self._clients)
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            with suppress(NSQError):
                client.ask(api.publish_batch(self._topic, self._name, True, self._number, body=body))
                break
            self.retries += 1
            time.sleep(0.05)
        else:
            raise RuntimeError(f"{client.address} has not acknowledged a batch for {PATIENCE_S:g} s")
        self._ledger.add(changes)
        self._stopped.wait(len(changes) / self._rate)


class Repeater(Producer):
    """Publishes earlier changes again, as people do it: with `qcli pub`, and with `qcli replay` of Parquet files."""

    def __init__(
        self,
        brokers: Sequence[Addresses],
        topic: str,
        ledger: Ledger,
        chance: random.Random,
        changes: Changes,
        replayed: tuple[Path, Sequence[Change]],
        log: Path,
    ) -> None:
        super().__init__(brokers, topic, ledger, chance)
        self._earlier = [changes.some(200)]
        self._changes, self._log = changes, log
        self._folder, self._replayed = replayed

    def publish_some(self) -> None:
        if self._chance.random() < 0.3:
            words = ["replay", str(self._folder), self._topic, "--ordered", "--engine", "inline"]
            self._run([*words, "--jobs-folder", str(self._log.with_name("jobs"))], b"")
            self._ledger.add(self._replayed)
        else:
            changes = self._chance.choice(self._earlier)
            text = b"".join(json.dumps(each).encode() + b"\n" for each in changes)
            self._run(["pub", self._topic], text)
            self._ledger.add(changes)
            self._earlier = [*self._earlier[-20:], self._changes.some(200)]
        self._stopped.wait(self._chance.uniform(0, 2))

    def _run(self, words: list[str], text: bytes) -> None:
        """Run a command until it succeeds: then all changes are there in order, after those of earlier attempts."""
        broker = self._chance.choice(self._brokers)
        words += ["-q", "--nsqd-http-address", broker.http, "--nsqd-tcp-address", broker.tcp]
        while True:
            done = subprocess.run(
                [sys.executable, "-m", "qcli", *words], input=text, capture_output=True, check=False
            )
            if done.returncode == 0:
                return
            self.retries += 1
            with self._log.open("ab") as log:
                log.write(b"%s: %s\n" % (words[0].encode(), done.stderr))
