"""Tests for datagrams to statsd servers, and their schedule."""

import logging
import re
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from broker.api import running_api
from broker.support import connected, running_broker, settle
from trio_nsq.broker.errors import StartupError
from trio_nsq.broker.monitoring.statsd import figures, lines, packets, percent

# ---------------------------------------------------------------------- names and values


def latency(*percentiles: tuple[float, int]) -> dict[str, Any]:
    return {
        "count": len(percentiles),
        "percentiles": [{"quantile": q, "value": v} for q, v in percentiles] or None,
    }


def channel(name: str, **fields: Any) -> dict[str, Any]:
    keys = ("depth", "backend_depth", "in_flight_count", "deferred_count", "message_count", "requeue_count")
    counts = dict.fromkeys((*keys, "timeout_count", "client_count"), 0)
    return {"channel_name": name, "e2e_processing_latency": latency()} | counts | fields


def topic(name: str, *channels: dict[str, Any], **fields: Any) -> dict[str, Any]:
    counts = dict.fromkeys(("depth", "backend_depth", "message_count", "message_bytes"), 0)
    return {"topic_name": name, "channels": channels, "e2e_processing_latency": latency()} | counts | fields


def text(
    stats: dict[str, Any], before: dict[str, Any] | None = None, prefix: str = "", **options: Any
) -> str:
    last = figures(before, **options) if before else {}
    return b"".join(lines(prefix, figures(stats, **options), last)).decode()


def test_lines_have_the_order_of_nsqd() -> None:
    described = topic(
        "t",
        channel(
            "c",
            depth=1,
            backend_depth=2,
            in_flight_count=3,
            deferred_count=4,
            message_count=5,
            requeue_count=6,
            timeout_count=7,
            client_count=8,
            e2e_processing_latency=latency((0.5, 9)),
        ),
        depth=10,
        backend_depth=11,
        message_count=12,
        message_bytes=13,
        e2e_processing_latency=latency((1, 14), (0.995, 15)),
    )
    memory = {"heap_objects": 16, "next_gc_bytes": 17, "gc_total_runs": 18}
    assert text({"topics": [described], "memory": memory}, prefix="p.") == (
        "p.topic.t.message_count:12|c\n"
        "p.topic.t.message_bytes:13|c\n"
        "p.topic.t.depth:10|g\n"
        "p.topic.t.backend_depth:11|g\n"
        "p.topic.t.e2e_processing_latency_100:14|g\n"
        "p.topic.t.e2e_processing_latency_99_5:15|g\n"
        "p.topic.t.channel.c.message_count:5|c\n"
        "p.topic.t.channel.c.depth:1|g\n"
        "p.topic.t.channel.c.backend_depth:2|g\n"
        "p.topic.t.channel.c.in_flight_count:3|g\n"
        "p.topic.t.channel.c.deferred_count:4|g\n"
        "p.topic.t.channel.c.requeue_count:6|c\n"
        "p.topic.t.channel.c.timeout_count:7|c\n"
        "p.topic.t.channel.c.clients:8|g\n"
        "p.topic.t.channel.c.e2e_processing_latency_50:9|g\n"
        "p.mem.heap_objects:16|g\n"
        "p.mem.next_gc_bytes:17|g\n"
        "p.mem.gc_runs:18|c\n"
    )


@pytest.mark.parametrize(
    ("quantile", "name"),
    [
        (1, "100"),
        (1.0, "100"),
        (0.99, "99"),
        (0.995, "99_5"),
        (0.5, "50"),
        (0.07, "7"),
        (0.9999, "99_99"),
        (0.29, "29"),
    ],
)
def test_each_percentile_has_a_separate_name(quantile: float, name: str) -> None:
    assert percent(quantile) == name


def test_counters_are_increments_and_gauges_are_not() -> None:
    before = {"topics": [topic("t", channel("c", message_count=4, depth=4), message_count=5, depth=5)]}
    now = {
        "topics": [
            topic("t", channel("c", message_count=7, depth=4), message_count=5, depth=1),
            topic("new", message_count=3),
        ]
    }
    sent = text(now, before)
    assert "topic.t.message_count:0|c\n" in sent
    assert "topic.t.depth:1|g\n" in sent
    assert "topic.t.channel.c.message_count:3|c\n" in sent
    assert "topic.t.channel.c.depth:4|g\n" in sent
    assert "topic.new.message_count:3|c\n" in sent


def test_recreated_topic_counts_from_zero() -> None:
    before = {"topics": [topic("t", message_count=100)], "memory": {"gc_total_runs": 7}}
    now = {"topics": [topic("t", message_count=3)], "memory": {"gc_total_runs": 9}}
    sent = text(now, before)
    assert "topic.t.message_count:3|c\n" in sent
    assert sent.endswith("mem.gc_runs:2|c\n")


def test_ephemeral_names_can_be_excluded() -> None:
    stats = {"topics": [topic("t", channel("c"), channel("c#ephemeral")), topic("e#ephemeral", channel("c"))]}
    assert text(stats).count("#ephemeral.message_count") == 2
    left = text(stats, exclude_ephemeral=True)
    assert "ephemeral" not in left
    assert "topic.t.channel.c.depth:0|g\n" in left


def test_no_memory_and_no_topics() -> None:
    assert text({"topics": []}) == text({"topics": None}) == ""


# ---------------------------------------------------------------------- packets


@given(st.lists(st.integers(1, 60), max_size=50), st.integers(1, 120))
def test_packets_are_complete_lines_in_order_and_as_full_as_possible(
    sizes: list[int], max_bytes: int
) -> None:
    given_lines = [b"x" * (size - 1) + b"\n" for size in sizes]
    made = list(packets(given_lines, max_bytes))
    assert b"".join(made) == b"".join(given_lines)
    for packet in made:
        assert packet.endswith(b"\n")
        assert len(packet) <= max_bytes or packet.count(b"\n") == 1
    for packet, following in pairwise(made):
        assert len(packet) + following.index(b"\n") + 1 > max_bytes


# ---------------------------------------------------------------------- over UDP


T = "t#ephemeral"
"""Publishing to it needs no thread, during which the autojump clock would move."""


class Sink:
    """A statsd server that stores its datagrams."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def take(self) -> list[str]:
        """Return the datagrams since the last call."""
        found: list[str] = []
        while True:
            try:
                found.append(self._socket.recv(65536).decode())
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def sink() -> Iterator[Sink]:
    opened = Sink()
    yield opened
    opened.close()


def values(datagrams: list[str]) -> dict[str, str]:
    """Return `value
    type` by name.
    """
    each = [line.rpartition(":") for line in "".join(datagrams).splitlines()]
    assert len(each) == len({name for name, _, _ in each})
    return {name: value for name, _, value in each}


async def test_metrics_are_sent_at_the_end_of_every_interval(
    tmp_path: Path, sink: Sink, autojump_clock: trio.testing.MockClock
) -> None:
    options: dict[str, Any] = {
        "statsd_address": sink.address,
        "statsd_interval_ms": 10_000,
        "statsd_prefix": "p",
    }
    async with running_broker(tmp_path / "d", **options) as bound:
        start = trio.current_time()
        async with connected(bound.tcp_address) as client:
            await client.publish(T, b"12", b"345")
            await trio.sleep_until(start + 9.9)
            assert sink.take() == []
            await trio.sleep_until(start + 19.5)
            first = values(sink.take())
            assert first[f"p.topic.{T}.message_count"] == "2|c"
            assert first[f"p.topic.{T}.message_bytes"] == "5|c"
            assert first[f"p.topic.{T}.depth"] == "2|g"
            assert re.fullmatch(r"[1-9]\d*\|g", first["p.mem.heap_in_use_bytes"])
            await client.publish(T, b"6")
            await trio.sleep_until(start + 29.5)
            second = values(sink.take())
            assert second[f"p.topic.{T}.message_count"] == "1|c"
            assert second[f"p.topic.{T}.message_bytes"] == "1|c"
            assert second[f"p.topic.{T}.depth"] == "3|g"
            assert second.keys() == first.keys()
            await trio.sleep_until(start + 39.5)
            assert values(sink.take())[f"p.topic.{T}.message_count"] == "0|c"


async def test_datagrams_are_small_and_spread_over_the_interval_except_its_last_second(
    tmp_path: Path, sink: Sink, autojump_clock: trio.testing.MockClock
) -> None:
    options: dict[str, Any] = {
        "statsd_address": sink.address,
        "statsd_interval_ms": 10_000,
        "statsd_udp_packet_size": 200,
    }
    async with running_broker(tmp_path / "d", broadcast_address="a.b", **options) as bound:
        start = trio.current_time()
        async with connected(bound.tcp_address) as client:
            await client.publish("t" * 54 + "#ephemeral", b"x")
            came: list[tuple[float, str]] = []
            while trio.current_time() < start + 19.9:
                await trio.sleep(0.05)
                came += [(trio.current_time() - start, packet) for packet in sink.take()]
        assert bound.http_address is not None
        name = f"nsq.a_b_{bound.http_address.rpartition(':')[2]}."
    assert all(line.startswith(name) for _, packet in came for line in packet.splitlines())
    assert all(len(packet) <= 200 for _, packet in came)
    times = [time for time, _ in came]
    assert times[0] == pytest.approx(10, abs=0.06)
    assert times[-1] < 19
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps) > 0
    assert max(gaps) - min(gaps) <= 0.11  # with the frequency of the checks
    assert max(gaps) == pytest.approx(9 / len(came), abs=0.06)


async def test_interval_of_a_second_sends_everything_at_once(
    tmp_path: Path, sink: Sink, autojump_clock: trio.testing.MockClock
) -> None:
    options: dict[str, Any] = {
        "statsd_address": sink.address,
        "statsd_interval_ms": 1000,
        "statsd_udp_packet_size": 100,
    }
    async with running_broker(tmp_path / "d", **options):
        start = trio.current_time()
        await trio.sleep_until(start + 0.99)
        assert sink.take() == []
        await trio.sleep_until(start + 1.01)
        assert len(sink.take()) > 1  # nsqd panics
        await trio.sleep_until(start + 2.01)
        assert len(sink.take()) > 1


async def test_options_exclude_memory_and_ephemeral_names(
    tmp_path: Path, sink: Sink, mock_clock: trio.testing.MockClock
) -> None:
    options: dict[str, Any] = {"statsd_address": sink.address, "statsd_mem_stats": False, "statsd_prefix": ""}
    async with running_broker(tmp_path / "d", statsd_exclude_ephemeral=True, **options) as bound:
        async with connected(bound.tcp_address) as client:
            await client.publish("t", b"x")
            await client.publish(T, b"x")
            mock_clock.jump(60)
            await settle()
            sent = values(sink.take())
    assert sorted(sent) == [
        "topic.t.backend_depth",
        "topic.t.depth",
        "topic.t.message_bytes",
        "topic.t.message_count",
    ]


async def test_name_that_cannot_be_resolved_is_logged_once_and_retried(
    tmp_path: Path,
    sink: Sink,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Resolver(trio.abc.HostnameResolver):
        """Resolves nothing for half a minute."""

        async def getaddrinfo(self, host: Any, port: Any, *args: Any, **options: Any) -> Any:
            if trio.current_time() < start + 35:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [
                (socket.AF_INET, socket.SOCK_DGRAM, 0, "", (host.decode().removesuffix(".invalid"), port))
            ]

        async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
            raise NotImplementedError

    trio.socket.set_custom_hostname_resolver(Resolver())
    host, _, port = sink.address.partition(":")
    options: dict[str, Any] = {
        "statsd_address": f"{host}.invalid:{port}",
        "statsd_interval_ms": 10_000,
        "statsd_prefix": "",
    }
    start = trio.current_time()
    with caplog.at_level(logging.ERROR, "trio_nsq.broker"):
        async with running_broker(tmp_path / "d", **options) as bound:
            async with connected(bound.tcp_address) as client:
                await client.publish(T, b"x")
                await trio.sleep_until(start + 49.5)
                sent = values(sink.take())
    assert caplog.messages == [
        f"statsd: cannot send to {host}.invalid:{port}: Name or service not known",
    ]
    assert sent[f"topic.{T}.message_count"] == "1|c"  # what was not sent before


async def test_address_without_a_server_is_ignored(
    tmp_path: Path, sink: Sink, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    sink.close()
    with caplog.at_level(logging.WARNING, "trio_nsq.broker"):
        async with running_api(tmp_path / "d", statsd_address=sink.address, statsd_interval_ms=10_000) as api:
            await trio.sleep(100)
            assert (await api.get("/ping")).text == "OK"
    assert caplog.messages == []


@pytest.mark.parametrize("address", ["8125", "host", "host:", ":8125", "host:70000", "a:b:1"])
async def test_invalid_address_is_refused_at_the_start(tmp_path: Path, address: str) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(StartupError, match="--statsd-address: "), flatten_subgroups=True
    ):
        async with running_broker(tmp_path / "d", statsd_address=address):
            pass
