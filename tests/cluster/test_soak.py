"""The long form of the faults of a cluster: each alone, then random pairs and storms, until the time is over.

`FAULT_COMPLETE=1` runs it, for `CLUSTER_MINUTES` in all, then until `CLUSTER_MESSAGES` are acknowledged, and then
`CLUSTER_TIMES` failovers of a kind for their figures.
`FAULT_SEED` determines the faults, but not their exact timing.
"""

import os
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from cluster.disks import disks
from cluster.drill import drilling
from cluster.engines import Engine, bucket_engine, etcd_engine
from cluster.faults import FAULTS, Fault, kill_leader, pause_leader, switch
from cluster.network import network
from cluster.stock import stock_clients

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("FAULT_COMPLETE") != "1", reason="takes many minutes: make soak"),
]

SEED = int(os.environ.get("FAULT_SEED", "7"))
MINUTES = float(os.environ.get("CLUSTER_MINUTES", "20"))
ONLY = os.environ.get("CLUSTER_FAULTS", "")
"""Words in the names of the faults to choose from, separated by commas; empty: all. One fault alone is repeated."""
PAIRS = os.environ.get("CLUSTER_PAIRS") == "1"
"""Random pairs only; otherwise each fault happens alone before."""
MESSAGES = int(os.environ.get("CLUSTER_MESSAGES", "1000000"))
MANY_PUBLISHERS = 24
LEAST_MESSAGES = 150_000
"""So many messages are acknowledged from one of the faults to the next one."""
TIMES = int(os.environ.get("CLUSTER_TIMES", "5"))
# The lease of a bucket is also over when its holder's process is gone from the same machine: it must be stopped.
TIMED = {"etcd": [kill_leader, switch], "bucket": [pause_leader]}
DISK_BYTES = 1 << 30
ENGINES: dict[str, Callable[[Path], AbstractContextManager[Engine]]] = {
    "etcd": etcd_engine,
    "bucket": bucket_engine,
}


class Shape(NamedTuple):
    """A kind of cluster; see `drilling`."""

    kind: str
    members: int
    min_in_sync: int = 1
    has_disks: bool = False
    keeps_log: bool = True
    has_network: bool = False
    etcds: int = 1
    has_clocks: bool = False

    def __str__(self) -> str:
        disks = " on small disks" if self.has_disks else ""
        disks += " in a network" if self.has_network else ""
        disks += " and clocks" if self.has_clocks else ""
        log = "" if self.keeps_log else " without retention"
        engine = self.kind if self.etcds == 1 else f"{self.etcds} {self.kind}s"
        return f"{self.members} members with {engine}{disks}{log}, {self.min_in_sync} in sync"


SHAPES = [
    Shape("etcd", 3, has_disks=True),
    Shape("bucket", 2, has_disks=True),
    Shape("etcd", 2, keeps_log=False),
    Shape("bucket", 3, min_in_sync=2, keeps_log=False),
    Shape("etcd", 3, min_in_sync=2, etcds=3, has_clocks=True),
    Shape("bucket", 3, has_clocks=True),
    Shape("etcd", 3, has_network=True),
]


def chosen(shape: Shape) -> list[Fault]:
    words = ONLY.split(",")
    return [
        fault
        for fault in FAULTS
        if fault.kind in ("", shape.kind)
        and (shape.has_disks or not fault.needs_disks)
        and (shape.has_clocks or not fault.needs_clocks)
        and (shape.etcds > 1 or not fault.needs_etcds)
        and any(word in fault.name for word in words)
    ]


def engine_of(shape: Shape, folder: Path) -> AbstractContextManager[Engine]:
    if shape.etcds > 1:
        return etcd_engine(folder / "etcd", shape.etcds)
    return ENGINES[shape.kind](folder / shape.kind)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_faults(tmp_path: Path, shape: Shape) -> None:
    until_s = time.monotonic() + 60 * MINUTES / len(SHAPES)
    chance = random.Random(f"{SEED} {shape}")
    faults = chosen(shape)
    with ExitStack() as stack:
        engine = stack.enter_context(engine_of(shape, tmp_path))
        mounted = stack.enter_context(disks(tmp_path, shape.members if shape.has_disks else 0, DISK_BYTES))
        # The clients of others ask a discovery service, which members in namespaces do not reach.
        net = stack.enter_context(network()) if shape.has_network else None
        stock = stack.enter_context(stock_clients()) if net is None else None
        async with drilling(
            tmp_path,
            engine,
            shape.members,
            chance.randrange(2**32),
            f"--min-in-sync={shape.min_in_sync}",
            mounted=mounted,
            stock=stock,
            pause_s=0.002,
            largest=100,
            longest_s=15,
            keeps_log=shape.keeps_log,
            network=net,
            has_clocks=shape.has_clocks,
        ) as drill:
            alone = [] if PAIRS else chance.sample(faults, len(faults))
            together = [fault for fault in faults if fault.in_pairs]
            while time.monotonic() < until_s:
                if alone:
                    await drill.endure(alone.pop())
                elif len(together) == 1 or chance.random() < 0.7:
                    first = chance.choice(together)
                    others = [fault for fault in together if fault.fits(first)]
                    await drill.endure(first, *chance.sample(others, min(1, len(others))))
                else:
                    await drill.storm(together, 60)
                await drill.settle()
            verdict = await drill.finish()
    assert not verdict.wrong, verdict.described()


async def test_many_messages(tmp_path: Path) -> None:
    """Random faults, one after the other, until so many messages are acknowledged, most of them in large batches."""
    chance = random.Random(SEED)
    faults = chosen(Shape("etcd", 3))
    with etcd_engine(tmp_path / "etcd") as engine:
        async with drilling(
            *(tmp_path, engine, 3, SEED, "--max-bytes-per-file=20000000"), much=MANY_PUBLISHERS
        ) as drill:
            ledger = drill.ledger
            while (begun := ledger.acknowledged) < MESSAGES:
                await drill.endure(chance.choice(faults))
                await ledger.until(lambda: ledger.acknowledged >= begun + LEAST_MESSAGES)
                await drill.settle()
            verdict = await drill.finish()
    assert not verdict.wrong, verdict.described()


@pytest.mark.parametrize("kind", TIMED)
async def test_times(tmp_path: Path, kind: str) -> None:
    """The same faults again and again: how long clients wait for another member."""
    with ENGINES[kind](tmp_path / kind) as engine:
        # A member that begins to lead opens all topics: their number must not grow.
        async with drilling(tmp_path, engine, 3, SEED, operates=False) as drill:
            for _ in range(TIMES):
                for fault in TIMED[kind]:
                    await drill.endure(fault)
            verdict = await drill.finish()
    assert not verdict.wrong, verdict.described()
