"""Sums the answers of the processes of a node. Pure.

Answers may be large. `Steps` yield after each small part of the work, so that the caller can let other tasks run.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from ...http.messages import compact_json

_Result = TypeVar("_Result")
Steps: TypeAlias = Generator[None, None, _Result]
"""Returns the result at the end."""

_SUMMED: Final = frozenset(
    (
        *("depth", "backend_depth", "message_count", "message_bytes", "in_flight_count", "deferred_count"),
        *("requeue_count", "timeout_count", "client_count", "expired_count", "dropped_count"),
        *("dead_letter_count", "given_up_count", "log_bytes", "log_files", "archived_bytes"),
        *("zone_local_msg_count", "region_local_msg_count", "global_msg_count", "rate_limit_per_s"),
        "blocked_count",
    )
)
_OF_ONE_LOG: Final = frozenset(("first_sequence", "disk_first_sequence"))
"""Left out: each process has a log of its own."""
_EOF: Final = "# EOF"
_MANY: Final = 200
"""Objects, or lines, of a step."""


def sum_stats(parts: Sequence[Mapping[str, Any]]) -> Steps[dict[str, Any]]:
    """Return the document of `/stats` of a node, from those of its processes, in their order.

    Counts are added, of ages and of latencies the highest is taken, clients are listed together. What is the same on
    all, such as settings, is that of the first.
    """
    sums = dict(parts[0])
    unhealthy = [
        f"{part['health']} (process {number})" for number, part in enumerate(parts) if part["health"] != "OK"
    ]
    sums["health"] = unhealthy[0] if unhealthy else "OK"
    sums["start_time"] = min(part["start_time"] for part in parts)
    lists = [part["topics"] for part in parts if part["topics"] is not None]
    sums["topics"] = (yield from _merged(lists, "topic_name", _sum_topics)) if lists else None
    sums.pop("draining", None)
    if all(part.get("draining") for part in parts):
        sums["draining"] = True
    if any("memory" in part for part in parts):
        sums["memory"] = _memory([part["memory"] for part in parts if "memory" in part])
    sums["producers"] = _listed(part.get("producers") for part in parts)
    if disks := [part["disk"] for part in parts if part.get("disk")]:
        sums["disk"] = disks[0] | {"used_bytes": sum(each["used_bytes"] for each in disks)}
    if archives := [part["archive"] for part in parts if part.get("archive")]:
        sums["archive"] = max(archives, key=lambda each: each.get("lag_s") or 0)
    return sums


def _sum_topics(parts: Sequence[Mapping[str, Any]]) -> Steps[dict[str, Any]]:
    sums = _sum_counts(parts)
    lists = [part["channels"] for part in parts]
    sums["channels"] = yield from _merged(lists, "channel_name", _sum_channels)
    reasons = [part["unavailable"] for part in parts if part.get("unavailable")]
    if reasons:
        sums["unavailable"] = "; ".join(dict.fromkeys(reasons))
    return sums


def _sum_channels(parts: Sequence[Mapping[str, Any]]) -> Steps[dict[str, Any]]:
    yield
    sums = _sum_counts(parts)
    sums["clients"] = _listed(part.get("clients") for part in parts)
    if "oldest_message_age_ms" in sums:
        ages = [part["oldest_message_age_ms"] for part in parts if part["oldest_message_age_ms"] is not None]
        sums["oldest_message_age_ms"] = max(ages, default=None)
    return sums


def _sum_counts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name in _OF_ONE_LOG:
                continue
            if name in _SUMMED:
                sums[name] = sums.get(name, 0) + value
            elif name in ("paused", "rate_limited"):
                sums[name] = sums.get(name, False) or value
            else:
                sums.setdefault(name, value)
    sums["e2e_processing_latency"] = _highest([part["e2e_processing_latency"] for part in parts])
    return sums


def _highest(latencies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the highest of each percentile: that of all messages is not higher."""
    percentiles: dict[float, dict[str, Any]] = {}
    for latency in latencies:
        for each in latency["percentiles"] or ():
            known = percentiles.setdefault(each["quantile"], each)
            if each["value"] > known["value"]:
                percentiles[each["quantile"]] = each
    return {
        "count": sum(latency["count"] for latency in latencies),
        "percentiles": list(percentiles.values()) or None,
    }


def merge_definitions(parts: Sequence[Mapping[str, Any]]) -> Steps[dict[str, Any]]:
    """Return the document of `/definitions` of a node. Its processes have the same settings."""
    return {"topics": (yield from _merged([part["topics"] for part in parts], "topic_name", _merge_topics))}


def _merge_topics(parts: Sequence[Mapping[str, Any]]) -> Steps[dict[str, Any]]:
    merged = _merge_defined(parts)
    lists = [part["channels"] for part in parts]
    merged["channels"] = yield from _merged(lists, "channel_name", _merge_channels)
    if reasons := [part["unavailable"] for part in parts if part.get("unavailable")]:
        merged["unavailable"] = "; ".join(dict.fromkeys(reasons))
    return merged


def _merge_channels(parts: Sequence[Mapping[str, Any]]) -> Steps[dict[str, Any]]:
    yield
    return _merge_defined(parts)


def _merge_defined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    usable = next((part for part in parts if not part.get("unavailable")), parts[0])
    return dict(usable) | {"paused": any(part["paused"] for part in parts)}


def merge_disconnected(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the answer of `/channel/disconnect` of a node, with each client once."""
    clients = [client for part in parts for client in part["disconnected"]]
    return {"disconnected": list({tuple(client.items()): client for client in clients}.values())}


def _merged(
    lists: Iterable[Iterable[Mapping[str, Any]]],
    key: str,
    merge: Callable[[Sequence[Mapping[str, Any]]], Steps[dict[str, Any]]],
) -> Steps[list[dict[str, Any]]]:
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for items in lists:
        for item in items:
            by_name.setdefault(item[key], []).append(item)
        yield
    merged = []
    for name in sorted(by_name):
        merged.append((yield from merge(by_name[name])))
    return merged


def _listed(lists: Iterable[Sequence[Any] | None]) -> list[Any] | None:
    found = [item for items in lists if items is not None for item in items]
    return found or None


def _memory(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the memory of all processes; of pauses the longest."""
    return {
        name: (max if name.startswith("gc_pause") else sum)(part.get(name, 0) for part in parts)
        for name in parts[0]
    }


def encode_json(value: Any) -> Steps[bytes]:
    """Encode JSON without blanks."""
    pieces = []
    for piece in _json_pieces(value):
        pieces.append(piece.encode())
        yield
    return b"".join(pieces)


def _json_pieces(value: Any) -> Iterator[str]:
    """Yield the pieces of a document of topics, their channels and clients."""
    if isinstance(value, dict):
        before = "{"
        for name, member in value.items():
            yield f"{before}{compact_json(name)}:"
            yield from _json_pieces(member)
            before = ","
        yield "}" if value else "{}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        before = "["
        for some in _groups(value):
            yield before
            if len(some) == 1:
                yield from _json_pieces(some[0])
            else:
                yield compact_json(some)[1:-1]
            before = ","
        yield "]"
    else:
        yield compact_json(value)


def _groups(items: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield topics, channels or clients in groups of at most `_MANY` objects; one that has more is alone."""
    some: list[Mapping[str, Any]] = []
    size = 0
    for each in items:
        own = _objects(each) + sum(map(_objects, each.get("channels") or ()))
        if some and size + own > _MANY:
            yield some
            some, size = [], 0
        some.append(each)
        size += own
    yield some


def _objects(item: Mapping[str, Any]) -> int:
    return 1 + len(item.get("clients") or ())


def label_metrics(parts: Mapping[int, str]) -> Steps[bytes]:
    """Return the metrics of all processes in one exposition, each sample with the label `process`.

    Args:
        parts: By process, in Prometheus' text format or in OpenMetrics.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    has_end = False
    for process, text in parts.items():
        family = ""
        for number, line in enumerate(text.splitlines()):
            if number % _MANY == 0:
                yield
            if line == _EOF:
                has_end = True
            elif line.startswith("#"):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, process))
    pieces = []
    for family, lines in heads.items():
        lines = [*lines, *samples.get(family, ())]
        for start in range(0, len(lines), _MANY):
            pieces.append("".join(f"{line}\n" for line in lines[start : start + _MANY]).encode())
            yield
    return b"".join([*pieces, *([f"{_EOF}\n".encode()] if has_end else [])])


def _labelled(sample: str, process: int) -> str:
    name, space, rest = sample.partition(" ")
    before, brace, labels = name.partition("{")
    label = f'process="{process}"'
    if not brace:
        return f"{name}{{{label}}}{space}{rest}"
    labels += space + rest
    return f"{before}{{{label}{'' if labels.startswith('}') else ','}{labels}"
