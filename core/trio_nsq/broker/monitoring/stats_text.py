"""The text format of `/stats`, in nsqd's layout, which scripts parse."""

import platform
from collections.abc import Iterator
from datetime import datetime
from itertools import chain
from typing import Any

from .lines import ClientLines, channel_line, go_duration, latency_text, topic_line, unavailable_line

_NS_PER_S = 1_000_000_000


def render_text(stats: dict[str, Any], now_ns: int, uptime_ns: int) -> str:
    """Format the document of dicts that `broker_stats` built at `now_ns` (Unix nanoseconds by the wall clock)."""
    clients = ClientLines(now_ns // _NS_PER_S)
    topics = [list(_topic(topic, clients)) for topic in stats["topics"] or ()]
    producers = [f"   {_client(client, clients)}" for client in stats["producers"] or ()]
    return join_text(stats | {"topics": topics, "producers": producers}, uptime_ns)


def join_text(stats: dict[str, Any], uptime_ns: int) -> str:
    """Format the document that `broker_stats` built with `QueueLines` and `ClientLines`."""
    started = datetime.fromtimestamp(stats["start_time"]).astimezone().isoformat().replace("+00:00", "Z")
    lines = [
        f"nsqd v{stats['version']} (built w/python{platform.python_version()})",
        f"start_time {started}",
        f"uptime {go_duration(uptime_ns)}",
        "",
        f"Health: {stats['health']}",
    ]
    if "draining" in stats:
        lines.append("Draining: the broker refuses publishes")
    if "cluster" in stats:
        about = stats["cluster"]
        lines.append(
            f"Cluster: {about['name']}, {about['role']} of epoch {about['epoch']}, "
            f"{about['in_sync']} of {about['members']} members in sync"
        )
    if "memory" in stats:
        lines += ["", "Memory:"]
        lines += [f"   {name:<25}\t{value}" for name, value in stats["memory"].items()]
    lines += ["", "Topics:" if stats["topics"] else "Topics: None"]
    parts = [f"{line}\n" for line in lines]
    for number, topic in enumerate(stats["topics"] or ()):
        parts += chain(["\n"], topic) if number else topic
    parts.append("\nProducers:\n" if stats["producers"] else "\nProducers: None\n")
    parts += stats["producers"] or ()
    return "".join(parts)


def _topic(topic: dict[str, Any], clients: ClientLines) -> Iterator[str]:
    yield topic_line(
        topic["topic_name"], topic["depth"], topic["backend_depth"], topic["message_count"], _latency(topic),
        paused=topic["paused"],
    )  # fmt: skip
    if "unavailable" in topic:
        yield unavailable_line(topic["unavailable"])
    for channel in topic["channels"]:
        yield channel_line(
            channel["channel_name"], channel["depth"], channel["backend_depth"], channel["in_flight_count"],
            channel["deferred_count"], channel["requeue_count"], channel["timeout_count"],
            channel["message_count"], _latency(channel), paused=channel["paused"],
        )  # fmt: skip
        for client in channel["clients"] or ():
            yield f"        {_client(client, clients)}"


def _client(client: dict[str, Any], clients: ClientLines) -> str:
    return clients.line(
        client["hostname"], client["remote_address"], client["user_agent"], client["connect_ts"],
        [(each["topic"], each["count"]) for each in client.get("pub_counts", ())],
        client["state"], client["ready_count"], client["in_flight_count"], client["message_count"],
        client["finish_count"], client["requeue_count"],
    )  # fmt: skip


def _latency(measured: dict[str, Any]) -> str:
    percentiles = measured["e2e_processing_latency"]["percentiles"] or ()
    return latency_text(each["value"] for each in percentiles)
