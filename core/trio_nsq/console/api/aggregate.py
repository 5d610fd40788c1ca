"""Sums of topics and channels over brokers, in the shape of nsqadmin's API. Pure.

The parts come from `/stats` of brokers and are untrusted: a number or text of the wrong type counts as zero or empty.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...fleet.stats import number, objects, text

Object = dict[str, Any]

_TOPIC_SUMS = ("depth", "memory_depth", "backend_depth", "message_count")
_CHANNEL_SUMS = (
    *("depth", "memory_depth", "backend_depth", "in_flight_count", "deferred_count", "requeue_count"),
    *("timeout_count", "message_count", "client_count"),
)
_TEXTS = ("remote_address", "version", "client_id", "hostname", "user_agent")
_COUNTS = ("in_flight_count", "ready_count", "finish_count", "requeue_count", "message_count", "sample_rate")
_TLS_TEXTS = ("tls_cipher_suite", "tls_version", "tls_negotiated_protocol")
_NS_PER_S = 1_000_000_000


def topic_part(raw: Mapping[str, Any], node: str, hostname: str, now_s: int) -> Object:
    """Return a topic of one broker.

    Args:
        raw: Its object in `/stats`.
        node: The broker's HTTP address.
        hostname: The name of the broker's machine.
        now_s: Unix seconds.
    """
    name = text(raw, "topic_name")
    channels = [channel_part(each, name, node, hostname, now_s) for each in objects(raw.get("channels"))]
    return {
        "node": node,
        "hostname": hostname,
        "topic_name": name,
        **_depths(raw),
        "message_count": number(raw, "message_count"),
        "nodes": None,
        "channels": channels if isinstance(raw.get("channels"), list) else None,
        "paused": raw.get("paused") is True,
        "e2e_processing_latency": _latency(raw.get("e2e_processing_latency")),
    }


def channel_part(raw: Mapping[str, Any], topic: str, node: str, hostname: str, now_s: int) -> Object:
    """Return a channel of one broker; the arguments are those of `topic_part`."""
    clients = raw.get("clients")
    return {
        "node": node,
        "hostname": hostname,
        "topic_name": topic,
        "channel_name": text(raw, "channel_name"),
        **_depths(raw),
        **{key: number(raw, key) for key in _CHANNEL_SUMS[3:]},
        "nodes": None,
        "clients": [_client(each, node, now_s) for each in objects(clients)]
        if isinstance(clients, list)
        else None,
        "paused": raw.get("paused") is True,
        "e2e_processing_latency": _latency(raw.get("e2e_processing_latency")),
    }


def sum_topics(name: str, parts: Iterable[Object]) -> Object:
    """Return the sum of a topic's parts, with the sums of its channels."""
    ordered = _by_host(parts)
    by_channel: dict[str, list[Object]] = {}
    for part in ordered:
        for channel in part["channels"] or ():
            by_channel.setdefault(channel["channel_name"], []).append(channel)
    channels = [sum_channels(name, channel, found) for channel, found in by_channel.items()]
    return {
        "node": "*" if ordered else "",
        "hostname": "",
        "topic_name": name,
        **_sums(ordered, _TOPIC_SUMS),
        "nodes": ordered or None,
        "channels": channels or None,
        "paused": any(part["paused"] for part in ordered),
        "e2e_processing_latency": _mean_latency(ordered, name, "") if ordered else None,
    }


def sum_channels(topic: str, name: str, parts: Iterable[Object]) -> Object:
    """Return the sum of a channel's parts; there is at least one."""
    ordered = _by_host(parts)
    clients = [client for part in ordered for client in part["clients"] or ()]
    return {
        "node": "*",
        "hostname": "",
        "topic_name": topic,
        "channel_name": name,
        **_sums(ordered, _CHANNEL_SUMS),
        "nodes": ordered,
        "clients": sorted(clients, key=lambda each: (each["hostname"], each["remote_address"])) or None,
        "paused": any(part["paused"] for part in ordered),
        "e2e_processing_latency": _mean_latency(ordered, topic, name),
    }


def _depths(raw: Mapping[str, Any]) -> Object:
    depth, backend_depth = number(raw, "depth"), number(raw, "backend_depth")
    return {"depth": depth, "memory_depth": depth - backend_depth, "backend_depth": backend_depth}


def _client(raw: Mapping[str, Any], node: str, now_s: int) -> Object:
    connected_s = number(raw, "connect_ts")
    return {
        "node": node,
        **{key: text(raw, key) for key in _TEXTS},
        "connect_ts": connected_s,
        "connected": (now_s - connected_s) * _NS_PER_S,
        **{key: number(raw, key) for key in _COUNTS},
        **{key: raw.get(key) is True for key in ("deflate", "snappy", "authed")},
        **{key: text(raw, key) for key in ("auth_identity", "auth_identity_url")},
        "tls": raw.get("tls") is True,
        **{key: text(raw, key) for key in _TLS_TEXTS},
        "tls_negotiated_protocol_is_mutual": raw.get("tls_negotiated_protocol_is_mutual") is True,
    }


def _latency(raw: Any) -> Object:
    """Return the percentiles of one broker."""
    found = raw if isinstance(raw, dict) else {}
    count = number(found, "count")
    percentiles = []
    for each in objects(found.get("percentiles")):
        value = _float(each.get("value"))
        same = dict.fromkeys(("average", "max", "min", "value"), value)
        percentiles.append({**same, "count": count, "quantile": _float(each.get("quantile"))})
    has_some = isinstance(found.get("percentiles"), list)
    return {
        "count": count,
        "percentiles": percentiles if has_some else None,
        **dict.fromkeys(("topic", "channel", "host"), ""),
    }


def _mean_latency(parts: Sequence[Object], topic: str, channel: str) -> Object:
    """Return the percentiles of all brokers: for each quantile the extremes, and the mean weighted by count."""
    by_quantile: dict[float, list[Object]] = {}
    for part in parts:
        for each in part["e2e_processing_latency"]["percentiles"] or ():
            by_quantile.setdefault(each["quantile"], []).append(each)
    percentiles = []
    for quantile, found in by_quantile.items():
        count = sum(each["count"] for each in found)
        weighted = sum(each["average"] * each["count"] for each in found)
        percentiles.append(
            {
                "average": weighted / count if count else 0,
                "count": count,
                "max": max(each["max"] for each in found),
                "min": min(each["min"] for each in found),
                "quantile": quantile,
            }
        )
    return {
        "count": sum(part["e2e_processing_latency"]["count"] for part in parts),
        "percentiles": percentiles or None,
        "topic": topic,
        "channel": channel,
        "host": "*",
    }


def _sums(parts: Sequence[Object], keys: Iterable[str]) -> Object:
    return {key: sum(part[key] for part in parts) for key in keys}


def _by_host(parts: Iterable[Object]) -> list[Object]:
    return sorted(parts, key=lambda part: (part["hostname"], part["node"]))


def _float(value: Any) -> float:
    return value if isinstance(value, int | float) and abs(value) < float("inf") else 0
