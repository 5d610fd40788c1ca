"""The space on the disk of the data folder, for `/stats`."""

import os
from pathlib import Path

import trio

from ..state.broker import Broker

_TIMEOUT_S = 1.0


async def disk_space(broker: Broker, folder: Path) -> dict[str, int | None]:
    """Return `disk` of `/stats`: sizes of the logs, of the file system, and of its free space.

    The latter two are None if the system does not tell them within a second.
    """
    used = sum(topic.log.size_bytes for topic in broker.topics.values() if not topic.ephemeral)
    free = total = None
    try:
        with trio.move_on_after(_TIMEOUT_S):
            # A thread, because a network file system may not answer.
            status = await trio.to_thread.run_sync(os.statvfs, folder, abandon_on_cancel=True)
            free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    except OSError:
        pass
    return {"used_bytes": used, "free_bytes": free, "total_bytes": total}
