"""Tests that kill `qcli to-file` at random moments, with the published messages in a ledger outside.

`FAULT_KILLS` is the number of kills, `FAULT_SEED` chooses other moments.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.support import Cli
from cli.to_file import Writing, depth_of, to_file
from connectors.to_file.outputs import content, files_in
from interop.peers import Broker, nsqd, qcli_serve
from soak import in_soak

KILLS = int(os.environ.get("FAULT_KILLS", "3"))
SEED = int(os.environ.get("FAULT_SEED", str(random.randrange(10**6))))
TOPIC = "clicks"
AT_ONCE = 50
CHECK_S = 0.01

pytestmark = pytest.mark.slow


class Ledger:
    """Publishes numbered messages to brokers in turn, and knows the acknowledged ones."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self.published: list[bytes] = []
        self._brokers = brokers
        self._done = threading.Event()

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Publish until the block ends."""
        thread = threading.Thread(target=self._publish)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()

    def _publish(self) -> None:
        while not self._done.wait(CHECK_S):
            for broker in self._brokers:
                first = len(self.published)
                bodies = [b"%09d" % number for number in range(first, first + AT_ONCE)]
                Cli(broker.tcp_address, broker.http_address).publish(TOPIC, bodies)
                self.published += bodies


def kill_often(
    writing_of: Sequence[str], brokers: Sequence[Broker], folder: Path, chance: random.Random
) -> Ledger:
    """Kill the command at random moments while messages are published; at the end let it write the rest."""
    addresses = ",".join(broker.tcp_address for broker in brokers)
    qcli = Cli(addresses, ",".join(broker.http_address for broker in brokers))
    ledger = Ledger(brokers)
    args = ("--sync-interval", "50ms", "--skip-empty-files", *writing_of)
    with ledger.publishing():
        for _ in range(KILLS):
            with to_file(qcli, TOPIC, folder, *args) as writing:
                _until_it_writes(writing)
                time.sleep(chance.random() * 0.3)
                writing.send(signal.SIGKILL)
                writing.running.process.wait()
            _check_finished(folder)
    with to_file(qcli, TOPIC, folder, *args) as writing:
        _until_read(writing, brokers)
        code, text = writing.end()
    assert code == 143, text
    return ledger


def _until_it_writes(writing: Writing) -> None:
    before = _sizes(writing.folder)
    writing.until(lambda: _sizes(writing.folder) != before)


def _sizes(folder: Path) -> dict[str, int]:
    found = {}
    for path in folder.rglob(f"{TOPIC}*"):
        try:
            found[path.name] = path.stat().st_size
        except FileNotFoundError:
            pass  # it was renamed meanwhile
    return found


def _check_finished(folder: Path) -> None:
    """Raises: a finished file is not complete."""
    for path in folder.glob(f"{TOPIC}*.gz"):
        content(path)


def _until_read(writing: Writing, brokers: Sequence[Broker]) -> None:
    writing.until(lambda: all(depth_of(broker, TOPIC) == (0, 0) for broker in brokers))


@pytest.mark.parametrize("form", ["gzip", "lines in a work folder", *in_soak("lines")])
def test_kills_lose_and_repeat_no_message_of_logs(tmp_path: Path, form: str) -> None:
    print(f"FAULT_SEED={SEED}")
    chance = random.Random(SEED)
    folder = tmp_path / "out"
    args = {
        "gzip": ["--compression", "gzip", "--rotate-size", "20kB"],
        "lines": [],
        "lines in a work folder": ["--work-dir", str(folder / "work"), "--rotate-size", "20kB"],
    }[form]
    with qcli_serve(tmp_path / "one") as one, qcli_serve(tmp_path / "two") as two:
        ledger = kill_often(args, [one, two], folder, chance)
    found = Counter(line for data in files_in(folder).values() for line in data.splitlines())
    repeated = sum(found.values()) - len(found)
    assert (len(set(ledger.published) - set(found)), repeated) == (0, 0)
    assert set(found) == set(ledger.published)
    assert [path for path in folder.rglob("*.part") if path.stat().st_size] == []


@pytest.mark.interop
def test_kills_lose_no_message_of_an_nsqd(tmp_path: Path) -> None:
    print(f"FAULT_SEED={SEED}")
    chance = random.Random(SEED)
    folder = tmp_path / "out"
    args = ("--compression", "gzip", "--rotate-size", "20kB", "--max-in-flight", "500")
    with nsqd(tmp_path / "data", "--msg-timeout=1s") as broker:
        ledger = kill_often(args, [broker], folder, chance)
    found = {line for data in files_in(folder).values() for line in data.splitlines()}
    assert found == set(ledger.published)
