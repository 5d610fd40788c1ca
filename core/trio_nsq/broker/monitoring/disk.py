"""The space on the disk of the data folder, for `/stats` and `/metrics`."""

from pathlib import Path

import trio

from ...log import Files
from ..state.broker import Broker

_TIMEOUT_S = 1.0


async def file_system_space(folder: Path) -> tuple[int, int] | None:
    """Return the free and the total bytes of a folder's file system, for a user without root's reserve.

    None: the system does not tell them within a second.
    """
    try:
        with trio.move_on_after(_TIMEOUT_S):
            # A thread, because a network file system may not answer.
            return await trio.to_thread.run_sync(Files().space, folder, abandon_on_cancel=True)
    except OSError:
        pass
    return None


async def disk_space(broker: Broker, folder: Path) -> dict[str, int | None]:
    """Return `disk` of `/stats`: sizes of the logs, of the file system, and of its free space.

    The latter two are None if the system does not tell them.
    """
    used = sum(topic.log.size_bytes for topic in broker.topics.values() if not topic.ephemeral)
    free, total = await file_system_space(folder) or (None, None)
    return {"used_bytes": used, "free_bytes": free, "total_bytes": total}
