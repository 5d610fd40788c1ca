"""After a restart: which dead letters that channels still have are in a dead-letter topic already."""

import logging
from collections.abc import Iterable

from ..log import LogReadError
from .state.broker import Broker
from .state.channel import Channel
from .state.record_metadata import Origin, origins
from .state.topic import Topic
from .state.withdrawn import Withdrawn

logger = logging.getLogger("trio_nsq.broker")


def confirm_moved_letters(broker: Broker, only: str | None = None) -> None:
    """After a restart: have channels forget what has arrived in a dead-letter topic, though their states have it.

    If only one topic was opened just now, no letters are looked at but those in it and those from it.

    What cannot be looked at now is left for the next start: it may come to the dead-letter topic a second time.
    """
    for topic in broker.topics.values():
        for metadata in list(topic.dead_letters.unconfirmed):
            try:
                _confirm_moved(broker, topic, metadata, only)
            except Exception:
                # A defect of ours: it keeps neither the broker nor other topics from starting.
                logger.exception("topic %s: dead letters may come to it a second time", topic.name)


def _confirm_moved(broker: Broker, topic: Topic, metadata: bytes, only: str | None) -> None:
    found = origins(metadata)
    if only is not None and topic.name != only and not (found and found[0].topic == only):
        return
    if found and found[0].topic in broker.unavailable and found[0].topic != only:
        return
    origin = broker.topics.get(found[0].topic) if found else None
    channel = origin.channels.get(found[0].channel) if origin is not None else None
    if origin is None or channel is None:
        topic.dead_letters.confirm(metadata)
    elif _forget(channel, found):
        origin.dead_letters.record_moved(topic.dead_letters, metadata)


def forget_origin(broker: Broker, name: str) -> None:
    """Let dead-letter topics know that a topic is gone which was unavailable, and with it its saved state."""
    for topic in broker.topics.values():
        for metadata in list(topic.dead_letters.unconfirmed):
            found = origins(metadata)
            if found and found[0].topic == name:
                topic.dead_letters.confirm(metadata)


def _forget(channel: Channel, found: Iterable[Origin]) -> bool:
    """Returns whether each of them could be looked at; the others stay."""
    ids = {origin.sequence: origin.id for origin in found}
    taken = channel.withdraw(ids)
    same: list[Withdrawn] = []
    error: LogReadError | None = None
    try:
        for each in taken:
            try:
                # A topic that was deleted and made again has other messages in the same places.
                if channel.store.id_at(each.sequence) == ids[each.sequence]:
                    same.append(each)
            except LogReadError as exc:
                error = exc
    finally:
        channel.dispose(same)
        channel.put_back(taken)
    if error is not None:
        what = "%s/%s: dead letters that have been moved may be moved again: %s"
        logger.error(what, channel.topic.name, channel.name, error)
    return error is None
