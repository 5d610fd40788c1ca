"""Tests for `oldest_message_age_ms` in `/stats`, and for its agreement with `/metrics`."""

import re
import time
from pathlib import Path

import pytest

from broker.api import Api, running_api
from broker.support import HeldFiles, settle


async def metric_ms(api: Api) -> float | None:
    """Return the age of channel t/c in `/metrics`; None if it has none."""
    text = (await api.get("/metrics")).text
    found = re.search(r'nsq_channel_oldest_message_age_seconds\{channel="c",topic="t"\} (\S+)', text)
    return None if found is None else float(found[1]) * 1000


async def age_ms(api: Api) -> int | None:
    age: int | None = (await api.channel("t", "c"))["oldest_message_age_ms"]
    return age


async def test_age_while_a_message_is_ready_in_flight_and_finished(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("t", "c")
        assert await age_ms(api) == 0
        before_s = time.time()
        await api.tcp.publish("t", b"x")
        stored_s = time.time()
        for _ in range(2):  # ready, then in flight
            asked_s = time.time()
            age = await age_ms(api)
            assert age is not None
            assert (asked_s - stored_s) * 1000 - 1 <= age <= (time.time() - before_s) * 1000
            later = await metric_ms(api)
            assert later is not None
            assert later >= age
            await api.tcp.send(b"RDY 1\n")
            await settle()
        await api.tcp.send(b"FIN %s\n" % (await api.tcp.message()).id)
        await api.tcp.nothing_more()
        assert (await age_ms(api), await metric_ms(api)) == (0, 0)


@pytest.mark.parametrize("filters", [{}, {"topic": "t"}, {"channel": "c"}, {"topic": "t", "channel": "c"}])
async def test_age_after_a_restart_is_read_from_disk(tmp_path: Path, filters: dict[str, str]) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.publish("t", b"x")
        await api.post("/channel/create", topic="t", channel="c")
        stored_s = time.time()
    async with running_api(tmp_path / "d", mem_queue_size=0, cache_bytes=0) as api:
        asked_s = time.time()
        (topic,) = (await api.stats(**filters))["topics"]
        (channel,) = topic["channels"]
        assert 0 <= (asked_s - stored_s) * 1000 - 1 <= channel["oldest_message_age_ms"] < 60_000


async def test_hung_disk_leaves_the_age_unknown(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.publish("t", b"x")
        await api.post("/channel/create", topic="t", channel="c")
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        files.hold("read")
        channel = await api.channel("t", "c")
        assert (channel["depth"], channel["oldest_message_age_ms"]) == (1, None)
        assert await metric_ms(api) is None
        files.release()
        assert await age_ms(api)
