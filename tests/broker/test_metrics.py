"""Tests for `/metrics`, with Prometheus' own parsers."""

import errno
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from broker.api import Api, running_api
from broker.metrics import OPENMETRICS, Scrape, described, documented
from broker.support import PATIENCE_S, FailingFiles, dpub, identify, settle
from trio_nsq import __version__
from trio_nsq.broker.monitoring.histogram import Histogram
from trio_nsq.log import Files

E2E = {"e2e_processing_latency_percentiles": (0.99, 0.5)}


async def scrape(api: Api) -> Scrape:
    response = await api.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Scrape(text_string_to_metric_families(response.text))


@asynccontextmanager
async def subscribed(data_path: Path, ready_count: int = 0, **options: Any) -> AsyncIterator[Api]:
    """Run a broker, with a consumer of channel `c` of topic `t`."""
    async with running_api(data_path, **options) as api:
        await api.tcp.subscribe("t", "c", ready_count)
        yield api


# ---------------------------------------------------------------------- formats


async def test_documented_metrics_equal_the_real_ones(tmp_path: Path) -> None:
    async with subscribed(tmp_path / "d", ready_count=1, **E2E) as api:
        await api.tcp.publish("t", b"x")
        await api.tcp.send(b"FIN %s\n" % (await api.tcp.message()).id)
        await settle()
        response = await api.send("GET", "/metrics", OPENMETRICS)
    assert described(response.text) == documented()


async def test_openmetrics_on_request(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        response = await api.send("GET", "/metrics", OPENMETRICS)
        assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert response.text.endswith("# EOF\n")
        assert response.text.count("# EOF") == 1
        plain = await api.send("GET", "/metrics", {"Accept": "*/*"})
        assert "# EOF" not in plain.text


@pytest.mark.parametrize("headers", [{}, OPENMETRICS])
async def test_many_channels_are_sent_in_pieces_under_one_heading(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    async with running_api(tmp_path / "d") as api:
        names = {(f"t{t}#ephemeral", f"c{c}") for t in range(10) for c in range(50)}
        for topic, channel in sorted(names):
            if channel == "c0":
                await api.post("/topic/create", topic=topic)
            await api.post("/channel/create", topic=topic, channel=channel)
        response = await api.send("GET", "/metrics", headers)
    parse = openmetrics.text_string_to_metric_families if headers else text_string_to_metric_families
    families = list(parse(response.text))
    assert len(families) == len({family.name for family in families})
    (depth,) = [family for family in families if family.name == "nsq_channel_depth"]
    assert [(s.labels["topic"], s.labels["channel"]) for s in depth.samples] == sorted(names)
    assert len(re.findall("^# HELP nsq_channel_depth ", response.text, re.M)) == 1


async def test_without_topics_there_are_only_headings(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        found = await scrape(api)
    assert found.families["nsq_channel_depth"].samples == []
    assert "nsq_channel_e2e_processing_latency_seconds" not in found.families


# ---------------------------------------------------------------------- values


async def test_metrics_of_the_broker(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        found = await scrape(api)
        assert (found("healthy"), found("connections"), found("producers")) == (1, 1, 0)
        assert 0 < found("disk_free_bytes") < found("disk_size_bytes")
        assert [s.labels["version"] for s in found.families["nsq_build_info"].samples] == [__version__]
        await api.tcp.publish("t", b"x")
        found = await scrape(api)
        assert (found("connections"), found("producers")) == (1, 1)
        assert 0 < found.samples["process_cpu_seconds_total", ()] < 1e4
        assert 1e6 < found.samples["process_resident_memory_bytes", ()] < 1e11


async def test_health(tmp_path: Path) -> None:
    files = FailingFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        files.full_after = 0
        assert (await api.post("/pub", b"x", topic="t"))[0] == 503
        assert (await scrape(api))("healthy") == 0
        files.full_after = None
        await api.post("/pub", b"x", topic="t")
        assert (await scrape(api))("healthy") == 1


async def test_metrics_of_topics_and_channels(tmp_path: Path) -> None:
    async with subscribed(tmp_path / "d", ready_count=3) as api:
        await api.tcp.publish("t", *[b"%d" % n for n in range(10)])
        await api.tcp.send(dpub("t", 3_600_000, b"later"))
        await api.tcp.ok()
        first, second, _ = [await api.tcp.message() for _ in range(3)]
        await api.tcp.send(b"FIN %s\nREQ %s 3600000\n" % (first.id, second.id))
        await api.tcp.message()
        await api.tcp.message()
        await api.post("/channel/pause", topic="t", channel="c")
        await api.tcp.publish("u", b"12345")
        found = await scrape(api)
        expected = {
            "depth": 5, "backend_depth": 0, "in_flight": 3, "deferred": 2, "messages_total": 11, "finished_total": 1,
            "requeues_total": 1, "timeouts_total": 0, "clients": 1, "paused": 1,
        }  # fmt: skip
        assert {name: found.channel(name) for name in expected} == expected
        expected = {"depth": 1, "messages_total": 1, "message_bytes_total": 5, "channels": 0, "paused": 0}
        assert {name: found(f"topic_{name}", topic="u") for name in expected} == expected
        assert (found("topic_depth", topic="t"), found("topic_channels", topic="t")) == (0, 1)
        log = next((tmp_path / "d").glob("topics/u*/*.log"))
        assert found("topic_log_bytes", topic="u") == log.stat().st_size
        await api.post("/topic/pause", topic="u")
        assert (await scrape(api))("topic_paused", topic="u") == 1


async def test_timeouts(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.send(identify(msg_timeout=1000))
        await api.tcp.ok()
        await api.tcp.subscribe("t#ephemeral", "c", ready_count=1)
        await api.tcp.publish("t#ephemeral", b"x")
        messages = [await api.tcp.message() for _ in range(2)]
        assert [each.attempts for each in messages] == [1, 2]
        # It would time out again: a scrape waits for a thread.
        await api.tcp.send(b"FIN %s\n" % messages[1].id)
        await api.tcp.nothing_more()
        found = await scrape(api)
        assert found("channel_timeouts_total", topic="t#ephemeral", channel="c") == 1


async def test_appends_and_syncs(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        for _ in range(3):
            await api.tcp.publish("t", b"x")
        await api.tcp.publish("t#ephemeral", b"x")
        found = await scrape(api)
        assert found("syncs_total") == found("append_duration_seconds_count") == 3
        assert found("append_duration_seconds_bucket", le="+Inf") == 3
        assert 0 < found("append_duration_seconds_sum") < 30
        assert found("sync_duration_seconds_count") == 0


async def test_scheduled_syncs(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", sync="interval", sync_every=3, sync_timeout_ms=3_600_000) as api:
        for _ in range(2):
            await api.tcp.publish("t", b"x")
        assert (await scrape(api))("syncs_total") == 0
        await api.tcp.publish("t", b"x")
        with trio.fail_after(PATIENCE_S):
            while not (found := await scrape(api))("syncs_total"):
                pass
        assert found("syncs_total") == found("sync_duration_seconds_count") == 1
        assert found("append_duration_seconds_count") == 3


async def test_latency(tmp_path: Path) -> None:
    async with subscribed(tmp_path / "d", ready_count=1, **E2E) as api:
        name = "nsq_channel_e2e_processing_latency_seconds"
        assert (await scrape(api)).families[name].samples == []
        await api.tcp.publish("t", b"x")
        await api.tcp.send(b"FIN %s\n" % (await api.tcp.message()).id)
        await api.tcp.nothing_more()
        samples = (await scrape(api)).families[name].samples
        assert [sample.labels["quantile"] for sample in samples] == ["0.99", "0.5"]
        assert all(0 < sample.value < 60 for sample in samples)


def test_bounds_of_a_histogram_are_inclusive() -> None:
    histogram = Histogram((0.1, 0.5))
    for duration_s in (0.05, 0.1, 0.3, 0.5, 2.0):
        histogram.observe(duration_s)
    assert histogram.cumulative() == [(0.1, 2), (0.5, 4), (float("inf"), 5)]
    assert histogram.count == 5
    assert histogram.sum_s == pytest.approx(2.95)


# ---------------------------------------------------------------------- the age of the oldest message


AGE = "oldest_message_age_seconds"


class UnreadableFiles(Files):
    """A real file system whose reads can be made to fail."""

    unreadable = False

    def read(self, fd: int, size: int, offset: int) -> bytes:
        if self.unreadable:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(fd, size, offset)


async def test_age_of_a_message_that_waits_then_is_in_flight_then_is_finished(tmp_path: Path) -> None:
    async with subscribed(tmp_path / "d") as api:
        assert (await scrape(api)).channel(AGE) == 0
        before_s = time.time()
        await api.tcp.publish("t", b"x")
        stored_s = time.time()
        for _ in range(2):  # ready, then in flight
            asked_s = time.time()
            age_s = (await scrape(api)).channel(AGE)
            assert asked_s - stored_s <= age_s <= time.time() - before_s
            await api.tcp.send(b"RDY 1\n")
            await settle()
        await api.tcp.send(b"FIN %s\n" % (await api.tcp.message()).id)
        await api.tcp.nothing_more()
        assert (await scrape(api)).channel(AGE) == 0


async def test_age_after_a_restart_is_read_from_disk(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        for channel in "a", "b":
            await api.post("/topic/create", topic="t")
            await api.post("/channel/create", topic="t", channel=channel)
        for number in range(3):
            await api.tcp.publish("t", b"%d" % number)
        published_s = time.time()
    async with running_api(tmp_path / "d", mem_queue_size=0, cache_bytes=0) as api:
        for _ in range(2):
            asked_s = time.time()
            found = await scrape(api)
            for channel in "a", "b":
                age_s = found("channel_" + AGE, topic="t", channel=channel)
                assert asked_s - published_s <= age_s <= asked_s - published_s + 20


async def test_age_decreases_when_the_oldest_is_finished(tmp_path: Path) -> None:
    async with subscribed(tmp_path / "d", ready_count=2) as api:
        await api.tcp.publish("t", b"old")
        oldest = await api.tcp.message()
        between_s = time.time()
        await api.tcp.publish("t", b"new")
        asked_s = time.time()
        assert (await scrape(api)).channel(AGE) >= asked_s - between_s
        await api.tcp.message()
        await api.tcp.send(b"FIN %s\n" % oldest.id)
        await api.tcp.nothing_more()
        assert (await scrape(api)).channel(AGE) <= time.time() - between_s


async def test_age_in_memory_only(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", cache_bytes=0, mem_queue_size=1000) as api:
        for number in range(3):
            await api.tcp.publish("t#ephemeral", b"%d" % number)
        await api.post("/channel/create", topic="t#ephemeral", channel="c")
        assert 0 < (await scrape(api))("channel_" + AGE, topic="t#ephemeral", channel="c") < 20


async def test_unreadable_message_has_no_age(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.publish("t", b"x")
        await api.post("/channel/create", topic="t", channel="c")
    files = UnreadableFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        files.unreadable = True
        found = await scrape(api)
        assert found.channel("depth") == 1
        assert found.families["nsq_channel_" + AGE].samples == []
        assert "t/c: cannot read" in caplog.text
        files.unreadable = False
        assert (await scrape(api)).channel(AGE) > 0


async def test_unreadable_message_does_not_get_the_age_of_the_previous_one(tmp_path: Path) -> None:
    files = UnreadableFiles()
    async with subscribed(tmp_path / "d", files=files, mem_queue_size=0, cache_bytes=0) as api:
        assert (await scrape(api)).channel(AGE) == 0
        files.unreadable = True
        for _ in range(2):  # the newest is always in memory
            await api.tcp.publish("t", b"x")
        assert (await scrape(api)).families["nsq_channel_" + AGE].samples == []
