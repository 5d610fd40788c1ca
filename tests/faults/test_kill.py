"""Tests for SIGKILL at random moments, with a ledger outside the broker: no acknowledged message is lost,
none is invented.

A few kills by default; `FAULT_KILLS=50` for the long form. `FAULT_SEED` determines the operations, but not
their exact timing.
"""

import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from faults.ledger import MS, Ledger
from faults.load import MSG_TIMEOUT_MS, run_and_kill
from interop.peers import Child, qcli_serve

KILLS = int(os.environ.get("FAULT_KILLS", "2"))
SEED = int(os.environ.get("FAULT_SEED", "7"))
CHECKPOINT_INTERVAL_MS = 200


def start_and_kill(data_path: Path, flags: tuple[str, ...], chance: random.Random) -> None:
    """Kill a broker at a random moment of its start, before it serves clients."""
    addresses = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0")
    child = Child([sys.executable, "-m", "qcli", "serve", f"--data-path={data_path}", *addresses, *flags])
    try:
        child.process.wait(chance.uniform(0, 0.8))
    except subprocess.TimeoutExpired:
        pass
    finally:
        child.close()


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_no_acknowledged_message_is_lost(tmp_path: Path, sync: str) -> None:
    flags = (
        f"--sync={sync}",
        f"--checkpoint-interval={CHECKPOINT_INTERVAL_MS}ms",
        "--max-bytes-per-file=50000",
    )
    ledger = Ledger(CHECKPOINT_INTERVAL_MS * MS, MSG_TIMEOUT_MS * MS)
    start = partial(qcli_serve, tmp_path / "d", *flags)

    await run_and_kill(
        start,
        ledger,
        KILLS,
        random.Random(SEED),
        operators=True,
        killed_while_starting=partial(start_and_kill, tmp_path / "d", flags),
    )
    verdict = ledger.judge()
    print(verdict)
    assert not verdict.wrong, f"{len(verdict.wrong)} wrong:\n" + "\n".join(verdict.wrong[:20])
    assert verdict.copies > 100 * KILLS
