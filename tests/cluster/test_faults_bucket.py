"""Members that a bucket coordinates, under load, and what can happen to them. `test_soak.py` has the long form."""

import os
from pathlib import Path

import pytest

from cluster import faults
from cluster.drill import drilling
from cluster.engines import bucket_engine
from soak import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEED = int(os.environ.get("FAULT_SEED", "7"))


async def test_members_coordinated_by_a_bucket(tmp_path: Path) -> None:
    with bucket_engine(tmp_path / "store") as engine:
        async with drilling(tmp_path, engine, 2, SEED) as drill:
            verdict = await drill.endure_all(
                faults.isolate_leader,
                faults.divergent_tail,
                *((faults.no_acknowledgements, faults.kill_all) if SOAK else ()),
            )
    assert not verdict.wrong, verdict.described()
    assert verdict.acknowledged > 100
