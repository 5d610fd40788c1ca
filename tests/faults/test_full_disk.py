"""Tests for full disks with publishers that keep retrying: finished messages make room, whatever is killed.

On mounted file systems where mounting is permitted, and on a simulated disk everywhere. A few fills by
default; `FAULT_COMPLETE=1` for fifty of each kind, on larger disks.
"""

import json
import os
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from faults.small_disk import (
    FullDiskLedger,
    consume_for_ever,
    meanwhile,
    on_small_disk,
    publish_for_ever,
    small_disk,
)
from interop.peers import Broker, qcli_serve
from soak import in_soak

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
FILLS = 50 if COMPLETE else 2
SEED = int(os.environ.get("FAULT_SEED", "7"))
DISK_BYTES = (48 if COMPLETE else 8) * 1024 * 1024
CHECKPOINT_INTERVAL_MS = 50
PATIENCE_S = 60
FULL_S = 0.4
"""A disk is full if nothing was accepted for this time."""
AGAIN = 100
"""This many accepted messages show that there is room again."""
TOPICS = {"a": ("c", "d"), "b": ("c",)}
ONE_FILE = 100 * 1024 * 1024
"""With files of this size, all messages are in files that still grow."""


class Life:
    """A broker that is killed and restarted on one data folder."""

    def __init__(self, start: Callable[[], AbstractContextManager[Broker]]) -> None:
        self._start = start
        self._stack = ExitStack()
        self.kills = 0
        self.broker = self._stack.enter_context(start())

    def kill(self) -> None:
        """Send SIGKILL, and start the next broker."""
        self.kills += 1
        self.broker.process.kill()
        self.broker.process.wait()
        self._stack.close()
        self.broker = self._stack.enter_context(self._start())

    def close(self) -> None:
        """Stop it cleanly if possible."""
        self._stack.close()

    def address(self) -> str:
        """The address of the running broker."""
        return self.broker.tcp_address

    async def is_drained(self) -> bool:
        """Whether all channels are empty."""
        ask = partial(self.broker.http, "GET", "/stats", format="json")
        stats: dict[str, Any] = json.loads(await trio.to_thread.run_sync(ask))
        channels = [channel for topic in stats["topics"] for channel in topic["channels"]]
        return not any(channel["depth"] or channel["in_flight_count"] for channel in channels)

    async def ping(self) -> str:
        """Return `OK`, or the error."""
        try:
            return (await trio.to_thread.run_sync(self.broker.http, "GET", "/ping")).decode()
        except RuntimeError as exc:
            return str(exc)

    async def until(self, what: str, condition: Callable[[], Any]) -> None:
        """Poll until a condition in another process holds, which does not notify."""
        with trio.move_on_after(PATIENCE_S):
            while not await condition():
                await trio.sleep(0.02)
            return
        said = [line for line in self.broker.log() if " INFO: 200" not in line and " INFO: 500" not in line]
        raise AssertionError(f"{what}; ping: {await self.ping()}; the broker said:\n" + "\n".join(said[-20:]))


async def fill(life: Life, ledger: FullDiskLedger) -> None:
    """Return when nothing more is accepted, although publishers try."""
    accepted, refused, since_s = len(ledger.acknowledged), len(ledger.refused), time.monotonic()

    async def is_full() -> bool:
        nonlocal accepted, since_s
        if len(ledger.acknowledged) != accepted:
            accepted, since_s = len(ledger.acknowledged), time.monotonic()
        return len(ledger.refused) > refused and time.monotonic() > since_s + FULL_S

    await life.until("the disk does not become full", is_full)


async def recover(life: Life, ledger: FullDiskLedger, chance: random.Random, *, kills: bool) -> None:
    """Let consumers work until publishers are accepted again, possibly with a kill in between."""
    accepted = len(ledger.acknowledged)
    kill_at_s = time.monotonic() + chance.uniform(0, 1) if kills else float("inf")

    async def has_room() -> bool:
        nonlocal kill_at_s
        if time.monotonic() > kill_at_s:
            kill_at_s = float("inf")
            life.kill()
        return len(ledger.acknowledged) >= accepted + AGAIN

    await life.until("nothing is accepted again, although consumers work", has_room)


async def fill_and_recover(start: Callable[[], AbstractContextManager[Broker]]) -> None:
    """Fill a disk and let it become empty, repeatedly. No message may be lost or invented."""
    ledger, chance = FullDiskLedger(), random.Random(SEED)
    life = Life(start)
    try:
        for topic, channels in TOPICS.items():
            life.broker.create(topic, *channels)
        publishers = [
            partial(publish_for_ever, life.address, ledger, *what)
            for what in (("a", 20_000, 5), ("a", 300, 1), ("b", 3000, 7))
        ]
        consumers = [
            partial(consume_for_ever, life.address, ledger, topic, channel)
            for topic, channels in TOPICS.items()
            for channel in channels
        ]
        async with meanwhile(*publishers):
            for number in range(FILLS):
                await fill(life, ledger)
                if number % 3 == 1:
                    life.kill()
                async with meanwhile(*consumers):
                    await recover(life, ledger, chance, kills=number % 2 == 1)
            await fill(life, ledger)
        async with meanwhile(*consumers):
            await life.until("stored messages are not delivered", life.is_drained)

        async def is_well() -> bool:
            return await life.ping() == "OK"

        await life.until("the broker does not become healthy without publishes", is_well)
        life.kill()
        async with meanwhile(*consumers):
            await life.until("stored messages are not delivered", life.is_drained)
    finally:
        life.close()
    wrong = ledger.judge()
    print(
        f"{FILLS} fills, {life.kills} kills: {len(ledger.acknowledged)} accepted, {len(ledger.refused)} refused,"
        f" {len(wrong)} wrong"
    )
    assert not wrong, "\n".join(wrong)
    assert all(text.endswith(b"No space left on device") for text in ledger.refusals), ledger.refusals


@pytest.mark.slow
@pytest.mark.timeout(3600 if COMPLETE else 300)
@pytest.mark.parametrize("file_bytes", [DISK_BYTES // 30, *in_soak(ONE_FILE)])
async def test_simulated_disk_becomes_empty_in_spite_of_publishers(tmp_path: Path, file_bytes: int) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    await fill_and_recover(
        partial(
            on_small_disk,
            folder,
            DISK_BYTES,
            max_bytes_per_file=file_bytes,
            checkpoint_interval_ms=CHECKPOINT_INTERVAL_MS,
        )
    )


@pytest.mark.slow
@pytest.mark.timeout(3600 if COMPLETE else 300)
@pytest.mark.parametrize(
    ("kind", "sync", "file_bytes"),
    [
        (kind, sync, file_bytes)
        for kind in ("tmpfs", "ext4")
        for sync, file_bytes in (("interval", ONE_FILE), ("always", DISK_BYTES // 30))
        if COMPLETE or (kind == "tmpfs" and sync == "interval")
    ],
)
async def test_file_system_becomes_empty_in_spite_of_publishers(
    tmp_path: Path, kind: str, sync: str, file_bytes: int
) -> None:
    folder = tmp_path / "d"
    flags = (
        f"--sync={sync}",
        f"--max-bytes-per-file={file_bytes}",
        f"--checkpoint-interval={CHECKPOINT_INTERVAL_MS}ms",
    )
    with small_disk(folder, str(DISK_BYTES), kind):
        await fill_and_recover(partial(qcli_serve, folder, *flags))
