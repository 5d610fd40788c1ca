"""The document of `/stats`, with nsqd's names, order and units (NSQ's HTTP API: /stats)."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import trio

from ..._version import __version__
from ..server import Server
from .clients import ClientDescriber, Clients
from .forms import Dicts
from .queues import QueueDescriber, Queues

_T = TypeVar("_T")
_PER_STEP = 200
"""Describing these topics, channels and clients takes about two milliseconds."""
_DICTS = Dicts()


class _Step:
    """Counts what was described since other tasks ran."""

    def __init__(self) -> None:
        self._left = _PER_STEP

    def ends(self, described: int = 1) -> bool:
        """Count what was described. Returns whether other tasks have to run now."""
        self._left -= described
        if self._left > 0:
            return False
        self._left = _PER_STEP
        return True


async def broker_stats(
    server: Server,
    now_ns: int,
    *,
    topic: str = "",
    channel: str = "",
    include_clients: bool = True,
    include_mem: bool = True,
    sees: Callable[[str], bool] | None = None,
    reads: Callable[[str], bool] | None = None,
    figures_only: bool = False,
    queues: QueueDescriber | None = None,
    of_clients: ClientDescriber | None = None,
) -> dict[str, Any]:
    """Build the document of `/stats`, in steps. The broker serves clients in between.

    The topics, with what they contain, and the producers are as the describers return them; the rest is a dict.

    Fields that nsqd does not have are present only if they apply. An unavailable topic has the reason under
    `unavailable`, no channels, and 0 for all counts.

    Args:
        now_ns: Unix nanoseconds by the wall clock.
        topic: Only this topic; empty for all. If the topic does not exist, `topics` is None, as in nsqd.
        channel: Only this channel of each topic, and only topics that have it; empty for all.
        include_clients: List the clients of channels, and the producers.
        sees: Whether the reader may know a topic of this name; None: all.
        reads: Whether the reader may know the clients of a topic; None: all.
        figures_only: Leave out memory, and why topics are unavailable.
        queues, of_clients: Describe the topics and channels, and the clients, in the same form; None: as dicts.
    """
    queues = queues or Queues(_DICTS, server.options, now_ns, None, figures_only=figures_only)
    of_clients = of_clients or Clients(_DICTS)
    topics: dict[str, Any] | None = None  # by name
    step = _Step()

    async def in_steps(
        describe: Callable[[list[_T], str], list[Any]], items: list[_T], about: str
    ) -> list[Any]:
        described: list[Any] = []
        for start in range(0, len(items), _PER_STEP):
            some = items[start : start + _PER_STEP]
            described += describe(some, about)
            if step.ends(len(some)):
                await trio.lowlevel.checkpoint()
        return described

    for name, found in sorted(server.broker.topics.items()):
        if step.ends():
            await trio.lowlevel.checkpoint()
        if server.broker.topics.get(name) is not found:
            continue  # deleted meanwhile
        if (topic and found.name != topic) or (sees is not None and not sees(found.name)):
            continue
        topics = {} if topics is None else topics
        lists_clients = include_clients and (reads is None or reads(found.name))
        channels = [found.channels[channel]] if channel in found.channels else []
        if not channel:
            channels = [found.channels[each] for each in sorted(found.channels)]
        if channel and not channels:
            continue
        described = []
        for each in channels:
            if step.ends():
                await trio.lowlevel.checkpoint()
            if found.channels.get(each.name) is not each:
                continue
            clients = None
            if lists_clients:
                about = topic or (found.name if sees else "")
                clients = await in_steps(of_clients.of_consumers, list(each.consumers), about)
            described.append(queues.channel(found, each, clients))
        topics[name] = queues.topic(found, described)
    if not channel or topic:
        missing = {
            name: queues.unavailable(name, "unavailable" if figures_only else reason)
            for name, reason in server.broker.unavailable.items()
            if topic in ("", name) and (sees is None or sees(name))
        }
        if missing:
            topics = dict(sorted(((topics or {}) | missing).items()))
    unknown = topics is None and bool(topic)  # then nsqd lists nothing, not even producers
    connected = []
    if include_clients and not unknown and sees is None:  # producers publish to any topics
        connected = list(server.sessions.connected)
    stats: dict[str, Any] = {
        "version": __version__,
        "health": server.health,
        "start_time": server.start_time_s,
        "topics": list(topics.values()) if topics is not None else None if unknown else [],
    }
    if server.broker.draining:
        stats["draining"] = True
    if sees is None and (cluster := _cluster(server)) is not None:
        stats["cluster"] = cluster
    if sees is None and server.archiving is not None:
        stats["archive"] = asdict(server.archiving.status()) | {
            "retention_waits": len(server.checkpointer.retention.waits_since_ns)
        }
    if include_mem and not figures_only:
        stats["memory"] = server.process.memory()
    producers = await in_steps(of_clients.of_producers, connected, topic)
    stats["producers"] = producers or None
    return stats


def _cluster(server: Server) -> dict[str, Any] | None:
    """Describe the cluster that the broker leads, in short; None: it is no member of one."""
    if server.replication is None or server.replication.control is None:
        return None
    status = server.replication.control.status()
    members = status["members"]
    return {
        "name": status["cluster"],
        "epoch": status["epoch"],
        "role": "leader",
        "in_sync": sum(each["in_sync"] and each["state"] != "disconnected" for each in members),
        "members": len(members),
    }
