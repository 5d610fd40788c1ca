"""Two members without an engine, under load: an administrator decides who leads."""

import os
from pathlib import Path

import pytest

from cluster import faults
from cluster.drill import drilling
from cluster.engines import Static

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEED = int(os.environ.get("FAULT_SEED", "7"))


async def test_members_that_people_coordinate(tmp_path: Path) -> None:
    async with drilling(tmp_path, Static(tmp_path), 2, SEED) as drill:
        verdict = await drill.endure_all(
            faults.promote_another, faults.switch, faults.kill_all, faults.part_by_reset
        )
    assert not verdict.wrong, verdict.described()
    assert verdict.acknowledged > 100
