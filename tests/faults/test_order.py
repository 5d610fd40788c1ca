"""Tests for the order by key under SIGKILL: the messages of each key come in order, and none is lost.

A few kills by default; `FAULT_KILLS=50` for the long form.
"""

import os
from pathlib import Path

import pytest

from faults.order_load import under_kills

KILLS = int(os.environ.get("FAULT_KILLS", "3"))
SEED = int(os.environ.get("FAULT_SEED", "7"))


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["always", "interval"])
def test_messages_of_a_key_come_in_order(tmp_path: Path, sync: str) -> None:
    flags = (f"--sync={sync}", "--checkpoint-interval=200ms", "--mem-queue-size=1000")
    messages = 10_000 * KILLS
    ledger = under_kills(
        tmp_path / "d", flags, messages=messages, keys=300, kills=KILLS, seed=SEED, life_s=(0.3, 1)
    )
    assert sum(ledger.published) == messages
    assert (ledger.wrong[:10], ledger.lost) == ([], 0)
