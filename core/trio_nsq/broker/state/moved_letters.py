"""Dead letters on their way from their channel to its dead-letter topic: stored there before they are finished here.

A group of letters passes through these states. A crash in any of them leaves each letter in one place:

| state | in memory | what a restart finds |
|---|---|---|
| failed | withdrawn from its channel | the message in its channel: it fails again |
| stored | also *unconfirmed* in the ledger of the dead-letter topic | both: it is finished in its channel |
| finished | also *moved* in the ledger of its own topic, whose next checkpoint lacks it | both, as before |
| confirmed | in no ledger | the letter: after the next checkpoint of its topic, it is not checked again |

`DeadLetterMover` stores letters, and `Topic.accept` notes that they are stored. The steps after that are here.
"""

import logging
from collections.abc import Iterable, Sequence

from ...api.answers import Origin
from ...log import LogReadError
from ...log.record_metadata import origins
from .broker import Broker
from .channel import Channel
from .topic import Topic
from .withdrawn import WithdrawnMessage

logger: logging.Logger = logging.getLogger("trio_nsq.broker")


class MovedLetters:
    """Finishes letters that are stored in a dead-letter topic, and has them confirmed. One for a broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def finish(self, channel: Channel, letters: Sequence[WithdrawnMessage], to: str, metadata: bytes) -> None:
        """Finish letters in their channel, after they are stored with this metadata in topic `to`, durably."""
        channel.dispose_dead_letters(letters)
        stored_in = self._broker.topics.get(to)
        if stored_in is None:
            return
        topic = self._broker.topic_of(channel)
        if topic is None or topic.ephemeral or not self._broker.serves(topic):
            stored_in.dead_letters.confirm(metadata)  # no checkpoint of the channel follows
        else:
            topic.dead_letters.record_moved(stored_in.dead_letters, metadata)

    # ------------------------------------------------------------------ after a restart

    def finish_after_restart(self, only: str | None = None) -> None:
        """Finish the messages that a channel's saved state has although a dead-letter topic has them too.

        Letters that cannot be checked now are left for the next start; they may be moved a second time.

        Args:
            only: The one topic that was just opened: check only letters in it, and letters from it.
        """
        for topic in self._broker.topics.values():
            for metadata in list(topic.dead_letters.unconfirmed):
                try:
                    self._finish_stored(topic, metadata, only)
                except Exception:
                    # A bug in the broker: it must not keep the broker or other topics from starting.
                    logger.exception(
                        "topic %s: some dead letters may be moved to it a second time", topic.name
                    )

    def _finish_stored(self, topic: Topic, metadata: bytes, only: str | None) -> None:
        broker, found = self._broker, origins(metadata)
        name = found[0]["topic"] if found else ""
        if only not in (None, topic.name, name) or (name in broker.unavailable and name != only):
            return
        origin = broker.topics.get(name)
        channel = origin.channels.get(found[0]["channel"]) if origin is not None else None
        if origin is None or channel is None:
            topic.dead_letters.confirm(metadata)
        elif _finish_in(channel, found):
            origin.dead_letters.record_moved(topic.dead_letters, metadata)

    def confirm_from(self, name: str) -> None:
        """Confirm all letters from an unavailable topic that was deleted: its saved state no longer has them."""
        for topic in self._broker.topics.values():
            for metadata in list(topic.dead_letters.unconfirmed):
                found = origins(metadata)
                if found and found[0]["topic"] == name:
                    topic.dead_letters.confirm(metadata)


def _finish_in(channel: Channel, found: Iterable[Origin]) -> bool:
    """Finish stored letters in their channel. Returns False if some could not be read; these stay."""
    ids = {origin["sequence"]: origin["id"] for origin in found}
    taken = channel.withdraw(ids)
    same: list[WithdrawnMessage] = []
    error: LogReadError | None = None
    try:
        for each in taken:
            try:
                # A topic that was deleted and created again has other messages at the same sequences.
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
