"""Tests for the order by key under SIGKILL and while operators disturb it: the messages of each key come in order, and
none is lost.

A few kills, and some seconds, by default; `FAULT_KILLS=50` for the long form, with five minutes.
"""

import os
import random
from pathlib import Path

import pytest

from faults.order_load import CHANNEL, TOPIC, Ledger, consumers, under_kills
from faults.order_operations import under_operations
from interop.peers import qcli_serve
from soak import in_soak

KILLS = int(os.environ.get("FAULT_KILLS", "3"))
SECONDS = 300 if KILLS > 10 else 5
SEED = int(os.environ.get("FAULT_SEED", "7"))


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["always", *in_soak("interval")])
def test_messages_of_a_key_come_in_order(tmp_path: Path, sync: str) -> None:
    flags = (f"--sync={sync}", "--checkpoint-interval=200ms", "--mem-queue-size=1000")
    messages = 10_000 * KILLS
    ledger = under_kills(
        tmp_path / "d", flags, messages=messages, keys=300, kills=KILLS, seed=SEED, life_s=(0.3, 1)
    )
    assert sum(ledger.published) == messages
    assert (ledger.wrong[:10], ledger.lost) == ([], 0)


@pytest.mark.slow
def test_refused_answers_are_counted(tmp_path: Path) -> None:
    """Otherwise, the ledger would take a message for finished that the broker delivers again."""
    ledger = Ledger.of(1)
    with qcli_serve(tmp_path / "d") as broker:
        broker.create(TOPIC, CHANNEL)
        with consumers(broker, ledger, random.Random(1)) as (one, _):
            one.receive()  # OK
            one.socket.sendall(b"FIN %s\nREQ %s 0\n" % (b"0" * 16, b"0" * 16))
            while one.refused < 2:
                one.receive()
    assert ledger.refused == 2


@pytest.mark.slow
def test_operators_brokers_and_consumers_disturb_the_order(tmp_path: Path) -> None:
    """Pauses, limits, changed settings, emptied channels, moves, dead letters, kills and suspended consumers."""
    flags = ("--sync=interval", "--checkpoint-interval=200ms", "--mem-queue-size=1000")
    report = under_operations(tmp_path, flags, seconds=SECONDS, rate=1500, seed=SEED)
    print(report.done, report.counts, report.published, report.dead_letters)
    assert (report.wrong[:10], report.lost[:10]) == ([], [])
    assert report.counts["D"] > 100 * SECONDS
