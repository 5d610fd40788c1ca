"""Support for tests of power cuts and kills: a broker with small files, and checks of its files."""

import math
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from broker.support import running_broker
from faults.ledger import body_of
from trio_nsq.broker import BoundAddresses
from trio_nsq.broker.state.settings import TopicSettings
from trio_nsq.broker.storage import retention
from trio_nsq.event_loop.pacing import Pacing
from trio_nsq.log import Files

AHEAD = "always, write-ahead"
"""The mode `always`, where the write-ahead log serves each sync, even of a single topic, in small files."""
IN_LOOP = "always, in the event loop"
"""The mode `always`, where the event loop syncs whenever it may."""
EVERY_OK_SYNCED = ("always", AHEAD, IN_LOOP)
_AHEAD_PACING = Pacing(wal_topics=1, wal_file_bytes=1500, wal_file_s=4.0, wal_retry_s=0.0)
_IN_LOOP_PACING = Pacing(turn_s=10, wal_topics=1000, fast_sync_s=math.inf)


def sync_options(sync: str) -> dict[str, Any]:
    """Return the options of a broker for a mode: `always` is without the write-ahead log, and syncs in threads."""
    if sync == AHEAD:
        return {"sync": "always", "pacing": _AHEAD_PACING}
    if sync == IN_LOOP:
        return {"sync": "always", "pacing": _IN_LOOP_PACING}
    return {"sync": sync, "pacing": Pacing(wal_topics=1000, small_sync_bytes=-1)}


def carry_forward_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Carry unfinished messages forward early, regardless of their number."""
    monkeypatch.setattr(retention, "PINNED_BYTES", 2000)
    monkeypatch.setattr(retention, "CARRIED_MESSAGES_SHARE", 1.0)
    monkeypatch.setattr(retention, "CARRIED_BYTES_SHARE", 1.0)


def broker(
    data_path: Path,
    files: Files,
    sync: str,
    checkpoint_interval_ms: int = 1000,
    keep: TopicSettings = TopicSettings(),  # noqa: B008 - it cannot be changed
) -> AbstractAsyncContextManager[BoundAddresses]:
    """Run a broker with small files, which it begins and deletes often."""
    return running_broker(
        data_path,
        files=files,
        **sync_options(sync),
        node_id=1,
        max_bytes_per_file=3000,
        checkpoint_interval_ms=checkpoint_interval_ms,
        sync_timeout_ms=1500,
        topic_defaults=keep,
    )


def numbers_in(data: bytes) -> list[int]:
    """Return the numbers of the messages in these records."""
    candidates = [
        int(data[at + 4 : at + 13])
        for at in range(len(data) - 13)
        if data[at + 4 : at + 13].isdigit() and data[at + 13 : at + 14] == b" "
    ]
    return [
        number for number in candidates if len(body_of(number)).to_bytes(4, "big") + body_of(number) in data
    ]
