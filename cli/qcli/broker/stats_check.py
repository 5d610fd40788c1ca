"""Check what a broker tells, such as its statistics, so that commands can rely on the types of what they read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MAX = 1 << 63


@dataclass(frozen=True)
class _Objects:
    """A list of objects with these fields."""

    fields: "Fields"


Kind = type | _Objects | Mapping[str, "Kind"]
"""A type, a list of objects, or the fields of an object."""
Fields = Mapping[str, Kind]


def _all(kind: Kind, names: str) -> Fields:
    return dict.fromkeys(names.split(), kind)


_CLIENT: Fields = {
    **_all(str, "client_id hostname user_agent remote_address version tls_version auth_identity"),
    **_all(int, "state ready_count in_flight_count message_count finish_count requeue_count connect_ts"),
    **_all(bool, "tls snappy deflate authed"),
    "pub_counts": _Objects({"topic": str, "count": int}),
}
_QUEUE: Fields = {
    **_all(int, "depth backend_depth in_flight_count deferred_count message_count message_bytes"),
    **_all(int, "requeue_count timeout_count client_count oldest_message_age_ms"),
    **_all(bool, "paused"),
    **_all(str, "unavailable"),
}
_CHANNEL: Fields = {"channel_name": str, **_QUEUE, "clients": _Objects(_CLIENT)}
_TOPIC: Fields = {"topic_name": str, **_QUEUE, "channels": _Objects(_CHANNEL)}
_STATS: Fields = {
    **_all(str, "version health"),
    **_all(int, "start_time"),
    **_all(bool, "draining"),
    "topics": _Objects(_TOPIC),
    "producers": _Objects(_CLIENT),
    "disk": _all(int, "used_bytes free_bytes total_bytes"),
}
_INFO: Fields = {
    **_all(str, "version broadcast_address hostname"),
    **_all(int, "http_port tcp_port start_time"),
    **_all(bool, "draining"),
}
_NEEDED = {"topic_name", "channel_name", "topic", "count"}
_COUNTS = ("depth", "message_count")
"""What every topic and channel has; other fields depend on the broker and its version."""


def check_stats(stats: object) -> dict[str, Any]:
    """Return the answer of `/stats`, with a list where it has none, and with the fields that commands rely on.

    Raises ValueError: it is not a broker's, because a field is missing or has another type.
    """
    if not isinstance(stats, dict) or "topics" not in stats:
        raise ValueError("no topics")
    _check(stats, _STATS)
    for topic in stats["topics"]:
        for queue in (topic, *topic["channels"]):
            if any(queue.get(name) is None for name in _COUNTS):
                raise ValueError("a count is missing")
            queue["paused"] = bool(queue.get("paused"))
        for channel in topic["channels"]:
            for name in ("in_flight_count", "deferred_count"):
                channel[name] = channel.get(name) or 0
    return stats


def check_info(info: object) -> dict[str, Any]:
    """Return the answer of `/info`. Raises ValueError: it is not a broker's."""
    if not isinstance(info, dict) or info.get("version") is None:
        raise ValueError("no version")
    _check(info, _INFO)
    return info


def _check(value: object, fields: Fields) -> None:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    for name, kind in fields.items():
        found = value.get(name)
        if isinstance(kind, _Objects):
            if found is None:
                value[name] = []
            elif isinstance(found, list):
                for each in found:
                    _check(each, kind.fields)
            else:
                raise ValueError(f"{name} is not a list")
        elif found is None:
            if name in _NEEDED:
                raise ValueError(f"{name} is missing")
        elif isinstance(kind, Mapping):
            _check(found, kind)
        elif type(found) is not kind or (isinstance(found, int) and not -_MAX <= found < _MAX):
            raise ValueError(f"{name} is not {kind.__name__}")
