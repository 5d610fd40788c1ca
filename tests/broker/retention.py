"""Helpers for retention: a topic with many small files, and the remaining ones."""

from pathlib import Path
from typing import Any

from broker.api import Api

FAST: dict[str, Any] = {"max_bytes_per_file": 2000, "checkpoint_interval_ms": 10}


def segments(data_path: Path) -> list[int]:
    """Return the first sequences of the topic's files."""
    return sorted(int(path.stem) for path in (data_path / "topics" / "t.topic").glob("*.log"))


async def fill(api: Api, count: int = 30) -> None:
    """Publish pairs of messages, one file per pair, to a channel that finishes all of them."""
    for n in range(count):
        await api.tcp.publish("t", b"%03d" % n * 300)
