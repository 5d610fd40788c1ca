"""The text format of `/stats`, in nsqd's layout, which scripts parse."""

import platform
from collections.abc import Iterator
from datetime import datetime
from typing import Any

_NS_PER_S = 1_000_000_000


def render_text(stats: dict[str, Any], now_ns: int, uptime_ns: int) -> str:
    """Format the document that `broker_stats` built at `now_ns` (Unix nanoseconds by the wall clock)."""
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
    now_s = now_ns // _NS_PER_S
    lines += ["", "Topics:" if stats["topics"] else "Topics: None"]
    for number, topic in enumerate(stats["topics"] or ()):
        lines += ["", *_topic(topic, now_s)] if number else _topic(topic, now_s)
    lines += ["", "Producers:" if stats["producers"] else "Producers: None"]
    lines += [f"   {_client(client, now_s)}" for client in stats["producers"] or ()]
    return "".join(f"{line}\n" for line in lines)


def _topic(topic: dict[str, Any], now_s: int) -> Iterator[str]:
    yield (
        f"{'*P ' if topic['paused'] else '   '}[{topic['topic_name']:<15}]"
        f" depth: {topic['depth']:<5}"
        f" be-depth: {topic['backend_depth']:<5}"
        f" msgs: {topic['message_count']:<8}"
        f" e2e%: {_latency(topic)}"
    )
    if "unavailable" in topic:
        yield f"        unavailable: {topic['unavailable']}"
    for channel in topic["channels"]:
        yield (
            f"   {'*P ' if channel['paused'] else '   '}[{channel['channel_name']:<25}]"
            f" depth: {channel['depth']:<5}"
            f" be-depth: {channel['backend_depth']:<5}"
            f" inflt: {channel['in_flight_count']:<4}"
            f" def: {channel['deferred_count']:<4}"
            f" re-q: {channel['requeue_count']:<5}"
            f" timeout: {channel['timeout_count']:<5}"
            f" msgs: {channel['message_count']:<8}"
            f" e2e%: {_latency(channel)}"
        )
        for client in channel["clients"] or ():
            yield f"        {_client(client, now_s)}"


def _client(client: dict[str, Any], now_s: int) -> str:
    port = client["remote_address"].rpartition(":")[2] if ":" in client["remote_address"] else ""
    name = f"{client['hostname']}:{port} {client['user_agent']}"
    connected = go_duration((now_s - client["connect_ts"]) * _NS_PER_S)
    if counts := client.get("pub_counts"):
        topics = ",".join(f"{each['topic']}={each['count']}" for each in counts)
        published = sum(each["count"] for each in counts)
        return f"[V2 {name:<21}] msgs: {published:<8} topics: {topics} connected: {connected}"
    return (
        f"[V2 {name:<21}]"
        f" state: {client['state']}"
        f" inflt: {client['in_flight_count']:<4}"
        f" rdy: {client['ready_count']:<4}"
        f" fin: {client['finish_count']:<8}"
        f" re-q: {client['requeue_count']:<8}"
        f" msgs: {client['message_count']:<8}"
        f" connected: {connected}"
    )


def _latency(measured: dict[str, Any]) -> str:
    percentiles = measured["e2e_processing_latency"]["percentiles"] or ()
    return ", ".join(short_duration(each["value"]) for each in percentiles)


def short_duration(nanoseconds: int) -> str:
    """Format a duration with one decimal, in the largest unit that gives a value above 1: `450.4ms`, `0.0ns`."""
    for unit, size_ns in (("s", _NS_PER_S), ("ms", 1_000_000), ("us", 1000)):
        if nanoseconds > size_ns:
            return f"{nanoseconds / size_ns:.1f}{unit}"
    return f"{nanoseconds:.1f}ns"


def go_duration(nanoseconds: int) -> str:
    """Format a duration as Go does, with all digits: `1h0m2.5s`, `4.155519ms`, `0s`."""
    if nanoseconds < 0:
        return f"-{go_duration(-nanoseconds)}"
    if nanoseconds < _NS_PER_S:
        for unit, size_ns in (("ms", 1_000_000), ("µs", 1000), ("ns", 1)):
            if nanoseconds >= size_ns:
                return f"{_decimal(nanoseconds, size_ns)}{unit}"
        return "0s"
    minutes, rest_ns = divmod(nanoseconds, 60 * _NS_PER_S)
    text = f"{_decimal(rest_ns, _NS_PER_S)}s"
    if minutes:
        text = f"{minutes % 60}m{text}"
    if minutes >= 60:
        text = f"{minutes // 60}h{text}"
    return text


def _decimal(value: int, unit: int) -> str:
    """Format `value / unit` with all digits; `unit` is a power of ten."""
    whole, fraction = divmod(value, unit)
    digits = f"{fraction:0{len(str(unit)) - 1}}".rstrip("0") if fraction else ""
    return f"{whole}.{digits}" if digits else str(whole)
