"""A topic with many small files, and what is left of them."""

from pathlib import Path
from typing import Any

from broker.api import Api

FAST: dict[str, Any] = {"max_bytes_per_file": 2000, "checkpoint_interval_ms": 10}


def segments(data_path: Path) -> list[int]:
    """The sequences at which the topic's files begin."""
    return sorted(int(path.stem) for path in (data_path / "topics" / "t.topic").glob("*.log"))


async def fill(api: Api, count: int = 30) -> None:
    """Messages in as many files as there are pairs of them; there is a channel, and it has passed them all."""
    for n in range(count):
        await api.tcp.publish("t", b"%03d" % n * 300)
