"""Tests for `/stats` as text, in nsqd's layout."""

# ruff: noqa: E501 - nsqd's lines are long

import platform
import re
from pathlib import Path
from typing import Any

import pytest

from broker.api import running_api
from broker.support import connected, dpub, identify, settle
from trio_nsq import __version__
from trio_nsq.broker.monitoring.lines import go_duration, short_duration
from trio_nsq.broker.monitoring.stats_text import render_text

SECOND = 1_000_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0s"),
        (1, "1ns"),
        (999, "999ns"),
        (1000, "1µs"),
        (1100, "1.1µs"),
        (4_155_519, "4.155519ms"),
        (792_440_763, "792.440763ms"),
        (999_999_999, "999.999999ms"),
        (SECOND, "1s"),
        (1_289_594_905, "1.289594905s"),
        (1_000_000_001, "1.000000001s"),
        (1_500_000_000, "1.5s"),
        (MINUTE, "1m0s"),
        (HOUR, "1h0m0s"),
        (HOUR + 2 * SECOND + SECOND // 2, "1h0m2.5s"),
        (100 * HOUR + 59 * MINUTE + 59 * SECOND, "100h59m59s"),
        (-MINUTE, "-1m0s"),
    ],
)
def test_durations_are_formatted_as_in_go(nanoseconds: int, text: str) -> None:
    assert go_duration(nanoseconds) == text


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0.0ns"),
        (1000, "1000.0ns"),
        (12_000, "12.0us"),
        (1_000_000, "1000.0us"),
        (450_449_999, "450.4ms"),
        (1_041_498_431, "1.0s"),
        (2 * HOUR, "7200.0s"),
    ],
)
def test_latencies_have_one_decimal(nanoseconds: int, text: str) -> None:
    assert short_duration(nanoseconds) == text


NO_LATENCY = {"count": 0, "percentiles": None}


def topic(name: str, *channels: dict[str, Any], paused: bool = False, **fields: Any) -> dict[str, Any]:
    counts = {"depth": 0, "backend_depth": 0, "message_count": 0, "message_bytes": 0}
    described = {"topic_name": name, "channels": list(channels), "paused": paused}
    return counts | described | {"e2e_processing_latency": NO_LATENCY} | fields


CLIENT = {
    "hostname": "here",
    "remote_address": "127.0.0.1:48622",
    "state": 3,
    "ready_count": 5,
    "in_flight_count": 1,
    "message_count": 10,
    "finish_count": 8,
    "requeue_count": 1,
    "connect_ts": 900,
    "user_agent": "",
}


def test_every_kind_of_line() -> None:
    latency = {
        "count": 1,
        "percentiles": [{"quantile": 1, "value": 450_400_000}, {"quantile": 0.5, "value": 12_000}],
    }
    channel = {
        "channel_name": "ch",
        "paused": True,
        "depth": 1,
        "backend_depth": 123456,
        "in_flight_count": 3,
        "deferred_count": 4,
        "requeue_count": 5,
        "timeout_count": 6,
        "message_count": 7,
        "clients": [CLIENT, CLIENT | {"user_agent": "a/1", "connect_ts": 1000 - 3661}],
        "e2e_processing_latency": NO_LATENCY,
    }
    published = [{"topic": "b", "count": 2}, {"topic": "c", "count": 40}]
    stats = {
        "version": "9.9",
        "health": "NOK - no",
        "start_time": 0,
        "topics": [topic("a", channel, depth=2, e2e_processing_latency=latency), topic("p", paused=True)],
        "memory": {"heap_objects": 4958, "heap_in_use_bytes": 1},
        "producers": [CLIENT | {"pub_counts": published, "remote_address": "@", "hostname": "h1"}],
    }
    lines = render_text(stats, 1000 * SECOND, 1_289_594_905).split("\n")
    assert lines[0] == f"nsqd v9.9 (built w/python{platform.python_version()})"
    assert re.fullmatch(r"start_time (1969-12-31|1970-01-01)T\d\d:\d\d:00(Z|[+-]\d\d:\d\d)", lines[1])
    assert lines[2:] == [
        "uptime 1.289594905s",
        "",
        "Health: NOK - no",
        "",
        "Memory:",
        "   heap_objects             \t4958",
        "   heap_in_use_bytes        \t1",
        "",
        "Topics:",
        "   [a              ] depth: 2     be-depth: 0     msgs: 0        e2e%: 450.4ms, 12.0us",
        "   *P [ch                       ] depth: 1     be-depth: 123456 inflt: 3    def: 4    re-q: 5     timeout: 6     msgs: 7        e2e%: ",
        "        [V2 here:48622           ] state: 3 inflt: 1    rdy: 5    fin: 8        re-q: 1        msgs: 10       connected: 1m40s",
        "        [V2 here:48622 a/1       ] state: 3 inflt: 1    rdy: 5    fin: 8        re-q: 1        msgs: 10       connected: 1h1m1s",
        "",
        "*P [p              ] depth: 0     be-depth: 0     msgs: 0        e2e%: ",
        "",
        "Producers:",
        "   [V2 h1:                  ] msgs: 42       topics: b=2,c=40 connected: 1m40s",
        "",
    ]  # fmt: skip


def test_empty_stats() -> None:
    stats = {"version": "9.9", "health": "OK", "start_time": 0, "topics": None, "producers": None}
    text = render_text(stats, 0, 0)
    assert text.endswith("\n\nHealth: OK\n\nTopics: None\n\nProducers: None\n")
    assert render_text(stats | {"topics": []}, 0, 0) == text


@pytest.mark.parametrize("query", [{}, {"format": ""}, {"format": "text"}, {"format": "JSON"}])
async def test_text_unless_json_is_requested(tmp_path: Path, query: dict[str, str]) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.send(identify(hostname="here", user_agent="a/1"))
        await api.tcp.ok()
        await api.tcp.subscribe("t", "c", ready_count=2)
        response = await api.get("/stats", topic="t", **query)
        assert response.headers["content-type"] == "text/plain; charset=utf-8"
        lines = response.text.split("\n")
        assert lines[0].startswith(f"nsqd v{__version__} (")
        assert re.fullmatch(r"uptime [0-9.]+(µs|ms|s)", lines[2])
        assert "   gc_total_runs            \t" in response.text
        assert re.search(r"^        \[V2 here:\d+ a/1 *\] state: 3 inflt: 0    rdy: 2 ", response.text, re.M)
        bare = await api.get("/stats", include_mem="false", include_clients="0", **query)
        assert "Memory" not in bare.text
        assert "V2" not in bare.text


async def test_text_has_what_json_has(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", e2e_processing_latency_percentiles=(1.0, 0.99)) as api:
        channels = {"a": ["c", "p"], "b#ephemeral": ["c", "e#ephemeral"], "empty": []}
        for topic in channels:
            await api.post("/topic/create", topic=topic)
            for channel in channels[topic]:
                await api.post("/channel/create", topic=topic, channel=channel)
        await api.post("/topic/pause", topic="empty")
        await api.post("/channel/pause", topic="a", channel="p")
        await api.tcp.subscribe("a", "c", ready_count=4)
        async with connected(api.tcp_address) as producer:
            await producer.publish("a", *[b"x"] * 5)
            await producer.publish("b#ephemeral", b"x")
            await producer.send(dpub("a", 3_600_000, b"x"))
            await producer.ok()
            await api.tcp.send(b"FIN %s\n" % (await api.tcp.message()).id)
            await api.tcp.send(b"REQ %s 3600000\n" % (await api.tcp.message()).id)
            await settle()
            text = await api.check_text()
            for topic in "", "a", "b#ephemeral", "empty", "unknown":
                for channel in "", "c", "p", "unknown":
                    await api.check_text(topic=topic, channel=channel)
            await api.check_text(include_clients="false")
    wanted = [
        r"   \[a              \] depth: 0 .* msgs: 6        e2e%: [0-9.]+ms, [0-9.]+ms",
        r"      \[c                        \] depth: 0     be-depth: 0     inflt: 3    def: 2    re-q: 1 ",
        r"        \[V2 127.* state: 3 inflt: 3    rdy: 4    fin: 1        re-q: 1        msgs: 5   ",
        r"   \*P \[p                        \] depth: 5     be-depth: 0     inflt: 0    def: 1  ",
        r"      \[e#ephemeral              \] depth: 1 ",
        r"\*P \[empty          \] ",
        r"   \[V2 127.* msgs: 7        topics: a=6,b#ephemeral=1 connected: ",
    ]
    for line in wanted:
        assert re.search(f"(?m)^{line}", text), (line, text)
