"""The long form of the faults of a cluster: each alone, then random pairs and storms, until the time is over.

`FAULT_COMPLETE=1` runs it, for `CLUSTER_MINUTES` in all, and then until `CLUSTER_MESSAGES` are acknowledged.
`FAULT_SEED` determines the faults, but not their exact timing.
"""

import os
import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from cluster.disks import disks
from cluster.drill import drilling
from cluster.engines import bucket_engine, etcd_engine
from cluster.faults import FAULTS, Fault
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
MANY_PUBLISHERS = 16
DISK_BYTES = 1 << 30
ENGINES = {"etcd": etcd_engine, "bucket": bucket_engine}


class Shape(NamedTuple):
    """A kind of cluster; see `drilling`."""

    kind: str
    members: int
    min_in_sync: int = 1
    has_disks: bool = False
    keeps_log: bool = True
    has_network: bool = False

    def __str__(self) -> str:
        disks = " on small disks" if self.has_disks else ""
        disks += " in a network" if self.has_network else ""
        log = "" if self.keeps_log else " without retention"
        return f"{self.members} members with {self.kind}{disks}{log}, {self.min_in_sync} in sync"


SHAPES = [
    Shape("etcd", 3, has_disks=True),
    Shape("bucket", 2, has_disks=True),
    Shape("etcd", 2, keeps_log=False),
    Shape("bucket", 3, min_in_sync=2, keeps_log=False),
    Shape("etcd", 3, min_in_sync=2),
    Shape("bucket", 3),
    Shape("etcd", 3, has_network=True),
]


def chosen(shape: Shape) -> list[Fault]:
    words = ONLY.split(",")
    return [
        fault
        for fault in FAULTS
        if fault.kind in ("", shape.kind)
        and (shape.has_disks or not fault.needs_disks)
        and any(word in fault.name for word in words)
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_faults(tmp_path: Path, shape: Shape) -> None:
    until_s = time.monotonic() + 60 * MINUTES / len(SHAPES)
    chance = random.Random(f"{SEED} {shape}")
    faults = chosen(shape)
    with ExitStack() as stack:
        engine = stack.enter_context(ENGINES[shape.kind](tmp_path / shape.kind))
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
            while drill.ledger.acknowledged < MESSAGES:
                await drill.endure(chance.choice(faults))
                await drill.settle()
            verdict = await drill.finish()
    assert not verdict.wrong, verdict.described()
