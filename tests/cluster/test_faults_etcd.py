"""Members that etcd coordinates, under load, and what can happen to them. `test_soak.py` has the long form."""

import os
from pathlib import Path

import pytest

from cluster import faults
from cluster.drill import drilling
from cluster.engines import etcd_engine
from cluster.stock import stock_clients
from soak import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEED = int(os.environ.get("FAULT_SEED", "7"))


async def test_members_coordinated_by_etcd(tmp_path: Path) -> None:
    with etcd_engine(tmp_path / "etcd") as engine, stock_clients() as stock:
        async with drilling(tmp_path, engine, 3, SEED, stock=stock) as drill:
            more = (faults.switch,) if SOAK else ()
            verdict = await drill.endure_all(*more, faults.kill_leader, faults.pause_leader)
    assert not verdict.wrong, verdict.described()
    assert verdict.acknowledged > 100
