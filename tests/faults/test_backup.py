"""Backups of a broker under load, made as the how-to page describes, with a ledger outside the broker.

The broker is paused while hard links to its files are made. For the backup, this is like SIGKILL at that moment.
`FAULT_KILLS=20` for more backups.
"""

import copy
import dataclasses
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from shutil import rmtree
from signal import SIGCONT, SIGSTOP

import pytest
import trio

from faults.ledger import MS, ChannelName, Ledger
from faults.load import CHANNELS, MSG_TIMEOUT_MS, TOPICS, Load, complaints, mostly_short
from interop.peers import Broker, qcli_serve
from soak import in_soak

BACKUPS = int(os.environ.get("FAULT_KILLS", "2"))
SEED = int(os.environ.get("FAULT_SEED", "7"))
CHECKPOINT_INTERVAL_MS = 200
FORGOTTEN_MS = 30_000
"""What was finished so long before may come again: a busy machine delays checkpoints, and this test is about loss."""


def take_snapshot(broker: Broker, data_path: Path, snapshot: Path, ledger: Ledger) -> Ledger:
    """Link all files while the broker is paused. Returns the ledger of this moment; no client acts during this call."""
    paused_ns = time.time_ns()
    broker.process.send_signal(SIGSTOP)
    try:
        subprocess.run(["cp", "-al", data_path, snapshot], check=True)
        known = copy.deepcopy(ledger)
        known.kills.append(paused_ns)
        for name in known.channels:
            known.depart(name, (), paused_ns)  # the broker may have sent messages that no client has read
        return known
    finally:
        broker.process.send_signal(SIGCONT)


def add_later_messages(known: Ledger, ledger: Ledger) -> None:
    """Messages published after the snapshot may be in the backup: the broker continues to write to linked files."""
    for number, message in ledger.published.items():
        known.published.setdefault(number, dataclasses.replace(message, acknowledged_ns=None))


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["always", *in_soak("interval")])
async def test_a_backup_has_every_acknowledged_message(tmp_path: Path, sync: str) -> None:
    flags = (
        f"--sync={sync}",
        f"--checkpoint-interval={CHECKPOINT_INTERVAL_MS}ms",
        "--max-bytes-per-file=50000",
    )
    chance = random.Random(SEED)
    ledger = Ledger(FORGOTTEN_MS * MS, MSG_TIMEOUT_MS * MS)
    data_path, snapshot = tmp_path / "data", tmp_path / "snapshot"
    backups: dict[Path, Ledger] = {}
    with qcli_serve(data_path, *flags) as broker:
        load = Load(broker, ledger, chance, operators=True)
        for topic in TOPICS:
            for channel in CHANNELS:
                await load.make(ChannelName(topic, channel))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            for number in range(BACKUPS):
                await trio.sleep(
                    mostly_short(chance)
                )  # the moment is random: there is no condition to wait for
                known = take_snapshot(broker, data_path, snapshot, ledger)
                await trio.sleep(
                    chance.uniform(0, 1)
                )  # the broker continues to write to files of the snapshot
                backup = tmp_path / f"backup{number}"
                await trio.run_process(["cp", "-a", str(snapshot), str(backup)])
                rmtree(snapshot)
                add_later_messages(known, ledger)
                backups[backup] = known
            load.ending = True
            broker.process.kill()
            await trio.to_thread.run_sync(broker.process.wait)

    copies = 0
    for backup, known in backups.items():
        verified = [sys.executable, "-m", "qcli", "log", "verify", str(backup)]
        done = await trio.run_process(verified, capture_stdout=True, check=False)
        assert done.returncode == 0, done.stdout.decode()
        with qcli_serve(backup, *flags) as broker:
            load = Load(broker, known, chance, operators=True)
            await load.check_settings()
            await load.drain()
            complaints(broker, known)
        verdict = known.judge()
        assert not verdict.wrong, f"{len(verdict.wrong)} wrong:\n" + "\n".join(verdict.wrong[:20])
        copies += verdict.copies
    assert copies > 100
