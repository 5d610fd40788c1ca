"""Dead letters: messages that came back after their last attempt, on their way to another topic.

A message is a dead letter first and finished afterwards: it is stored in the dead-letter topic, as durably as can be,
before its channel lets go of it. A crash in between leaves it in both. So its record in the dead-letter topic tells
where it comes from, and a restart has those channels forget what has arrived there (`confirm_moved_letters`). It looks
at all dead letters since the last that are known to be out of their channels' saved states: see `DeadLetterLedger`.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from ..log import LogError, LogReadError
from ..protocol import pack_messages
from .delivery import Delivery
from .errors import PublishRefused, SaveError
from .ingest.publication import Publication
from .readers import Readers
from .state.batch import Batch
from .state.broker import Broker
from .state.channel import Channel
from .state.message_store import MessageStore, Wanted
from .state.record_metadata import Origin, Reason, metadata_for_dead_letters
from .state.settings import SettingsError
from .state.withdrawn import Withdrawn
from .topics import Topics

logger = logging.getLogger("trio_nsq.broker")

DEAD_LETTERS = "dead-letters"
"""The channel that every dead-letter topic has from the beginning: it has what nobody has dealt with yet."""
EXITING = "exiting"
"""Why a broker that stops, or a topic that is being deleted, takes no more; nsqd's word."""
_AT_ONCE = 256
_AT_ONCE_BYTES = 1024 * 1024
_AGAIN_S = 1.0
"""What could not be moved is tried again after this long."""


@dataclass(eq=False, slots=True)
class DeadLetterMover:
    """Moves what channels have given up. One for a broker."""

    broker: Broker
    topics: Topics
    delivery: Delivery
    readers: Readers
    _moving: set[Channel] = field(default_factory=set, init=False)
    _complaints: set[Channel] = field(default_factory=set, init=False)  # what is wrong has been logged

    async def run(self) -> None:
        """Move what channels give up, with a task for each of them that has something to move; until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self.delivery.given_up_grew.wait()
                self.delivery.given_up_grew = trio.Event()
                channels, self.delivery.given_up = self.delivery.given_up, {}
                for channel in channels:
                    if channel not in self._moving:
                        self._moving.add(channel)
                        nursery.start_soon(self._move_all, channel)

    async def _move_all(self, channel: Channel) -> None:
        try:
            while channel.messages.withdrawn.waiting and self.broker.serves_channel(channel):
                if not await self._try_to_move(channel):
                    await trio.sleep(_AGAIN_S)
        finally:
            self._moving.discard(channel)
            self._complaints.discard(channel)

    async def _try_to_move(self, channel: Channel) -> bool:
        """Move some messages; False, and it is reported, if that failed."""
        try:
            error = await self._move_some(channel)
        except Exception:
            # A mistake of ours: what was taken stays with the channel, and in its saved state.
            logger.exception("%s/%s: dead letters could not be moved", channel.topic.name, channel.name)
            return False
        if error:
            self._complain(channel, error)
        else:
            self._complaints.discard(channel)
        return not error

    def _complain(self, channel: Channel, error: str) -> None:
        """Say once what is wrong, not each time that it is tried again; nothing is if the broker stops."""
        if error != EXITING and channel not in self._complaints:
            self._complaints.add(channel)
            name, topic = f"{channel.topic.name}/{channel.name}", channel.settings.dead_letter_topic
            logger.error("%s: dead letters cannot go to topic %s, tried again: %s", name, topic, error)

    async def _move_some(self, channel: Channel) -> str:
        """Move some messages. Returns why not, or nothing."""
        topic_name = channel.settings.dead_letter_topic
        taken = channel.messages.withdrawn.take(_AT_ONCE)
        try:
            batches, error = await self._batches(channel.store, taken)
            if not self.broker.serves_channel(channel):
                raise PublishRefused(EXITING)
            letters, gone = _read(channel, taken, batches)
            if error is not None and not letters and not gone:
                raise error
            if letters:
                metadata = metadata_for_dead_letters([origin for _, origin, _ in letters])
                bodies = pack_messages([body for _, _, body in letters])
                await self.topics.create(topic_name, DEAD_LETTERS)
                await self.topics.publish_durably(topic_name, Publication([bodies], metadata=metadata))
        except (PublishRefused, LogError, SaveError) as exc:
            self.delivery.put_back(channel, taken)
            return str(exc)
        except BaseException:
            self.delivery.put_back(channel, taken)
            raise
        moved = [message for message, _, _ in letters]
        channel.dispose(gone)
        channel.dispose_dead_letters(moved)
        self.delivery.put_back(channel, taken)  # those that were too many
        if letters:
            self._record_moved(channel, topic_name, metadata)
        return ""

    async def _batches(
        self, store: MessageStore, messages: Sequence[Withdrawn]
    ) -> tuple[dict[int, Batch | None], LogReadError | None]:
        """The batches that hold these messages; without those that are to be read another time, or cannot be."""
        batches = {each.sequence: each.held or store.in_memory(each.sequence) for each in messages}
        missing = tuple([sequence for sequence, batch in batches.items() if batch is None])
        if not missing:
            return batches, None
        found = await self.readers.call_for_channels(lambda: store.read(Wanted(None, missing)))
        known = {sequence: batch for sequence, batch in batches.items() if batch is not None}
        return known | found.again, found.error

    def _record_moved(self, channel: Channel, topic_name: str, metadata: bytes) -> None:
        """Let the next checkpoint of a topic tell the dead-letter topic that it does not have these any more."""
        topic = self.broker.topics.get(topic_name)
        if topic is None:
            return
        origin = self.broker.topic_of(channel)
        if origin is None or origin.ephemeral or not self.broker.serves(origin):
            topic.dead_letters.confirm(metadata)
        else:
            origin.dead_letters.record_moved(topic.dead_letters, metadata)


def _read(
    channel: Channel, messages: Iterable[Withdrawn], batches: Mapping[int, Batch | None]
) -> tuple[list[tuple[Withdrawn, Origin, bytes]], list[Withdrawn]]:
    """The first of these messages with all that is known of them, not too many bytes, and those that are damaged.

    Those without a batch, which could not be read now, do not keep others from being moved.
    """
    topic = channel.topic
    letters: list[tuple[Withdrawn, Origin, bytes]] = []
    gone: list[Withdrawn] = []
    size = 0
    for message in messages:
        if message.sequence not in batches:
            continue
        batch = batches[message.sequence]
        if batch is None:
            gone.append(message)  # and reported by the log
            continue
        index = message.sequence - batch.base_sequence
        body = batch.body(index)
        size += len(body)
        if letters and size > _AT_ONCE_BYTES:
            break
        origin = Origin(
            topic.name,
            channel.name,
            batch.id(index).decode(),
            message.sequence,
            message.attempts,
            batch.timestamp_ns(index),
            message.reason or Reason.REQUEUED,
        )
        letters.append((message, origin, body))
    return letters, gone


def refuse_loop(broker: Broker, channel: Channel, changes: Mapping[str, Any]) -> None:
    """Raise SettingsError if these changes would let dead letters of a channel come back to its topic by a detour."""
    first, name = changes.get("dead_letter_topic"), channel.topic.name
    way, seen = [first], {name}
    while way:
        at = way.pop()
        topic = broker.topics.get(at) if isinstance(at, str) and at not in seen else None
        if topic is None:
            continue
        seen.add(topic.name)
        further = [each.settings.dead_letter_topic for each in topic.channels.values()]
        if name in further:
            raise SettingsError(
                f"dead_letter_topic is {first}, whose own dead letters end up in {name} again"
            )
        way += further
