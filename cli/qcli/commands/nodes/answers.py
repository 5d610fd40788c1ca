"""The fields of a broker's `/info` and `/stats` that `qcli nodes` uses; another program may have answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COUNTS = ("depth", "in_flight_count", "deferred_count", "client_count", "message_count")
_SPACES = ("used_bytes", "free_bytes", "total_bytes")


def checked_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `/info`; None for one that is missing. Raises TypeError, ValueError."""
    texts = {key: _text(info.get(key)) for key in ("version", "hostname", "broadcast_address")}
    numbers = {key: _number(info.get(key)) for key in ("tcp_port", "http_port", "start_time")}
    return texts | numbers | {"draining": bool(info.get("draining"))}


def checked_stats(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `/stats`. Raises KeyError, TypeError, ValueError, AttributeError."""
    topics = []
    for topic in stats["topics"]:
        channels = [
            {"channel_name": str(channel["channel_name"]), **_queue(channel)}
            | {key: channel[key] for key in ("oldest_message_age_ms",) if _is_given(channel, key)}
            for channel in topic["channels"] or ()
        ]
        topics.append({"topic_name": str(topic["topic_name"]), **_queue(topic), "channels": channels})
    disk = stats.get("disk")
    return {
        "health": str(stats.get("health", "OK")),
        "topics": topics,
        "disk": None if disk is None else {key: _number(disk.get(key)) for key in _SPACES},
    }


def _queue(stats: Mapping[str, Any]) -> dict[str, int]:
    return {key: _number(stats.get(key)) or 0 for key in _COUNTS}


def _is_given(stats: Mapping[str, Any], key: str) -> bool:
    _number(stats.get(key))
    return key in stats


def _number(value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise TypeError(f"{value!r} is not a number")


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{value!r} is not a text")
