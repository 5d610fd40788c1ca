"""Dead letters: messages that failed their last attempt are moved to the channel's dead-letter topic.

A message is stored durably in the dead-letter topic before its channel finishes it. A crash in between leaves it in
both. So its record in the dead-letter topic names its origin, and a restart finishes it in the channel of origin: see
`state/moved_letters.py`.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import trio

from ..api.answers import Origin
from ..log import LogError, LogReadError
from ..log.record_metadata import Reason, metadata_for_dead_letters
from ..protocol import pack_messages
from .delivery import Deliverer
from .errors import PublishRefused, SaveError
from .ingest.publication import Publication
from .reader_pool import ReaderPool
from .state.batch import Batch
from .state.broker import Broker
from .state.channel import Channel
from .state.message_store import MessageStore, Wanted
from .state.moved_letters import MovedLetters
from .state.settings import SettingsError
from .state.withdrawn import WithdrawnMessage
from .topic_registry import TopicRegistry

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

DEAD_LETTERS = "dead-letters"
"""The channel that each dead-letter topic is created with. It holds the dead letters that no operator has handled."""
EXITING = "exiting"
"""The reason for refusing a publish if the broker stops or the topic is being deleted; nsqd's word."""
_MOVE_MESSAGES = 256
_MOVE_BYTES = 1024 * 1024
_RETRY_S = 1.0
"""Delay before the next attempt after a failed move."""


@dataclass(eq=False, slots=True)
class DeadLetterMover:
    """Moves dead letters from channels to dead-letter topics. One for a broker."""

    broker: Broker
    topics: TopicRegistry
    delivery: Deliverer
    readers: ReaderPool
    moved_letters: MovedLetters
    _moving: set[Channel] = field(default_factory=set, init=False)
    _failure_logged: set[Channel] = field(default_factory=set, init=False)

    async def run(self) -> None:
        """Move dead letters until cancelled, with one task for each channel that has some."""
        async with trio.open_nursery() as nursery:
            while True:
                await self.delivery.dead_letters_added.wait()
                self.delivery.dead_letters_added = trio.Event()
                channels, self.delivery.with_dead_letters = self.delivery.with_dead_letters, {}
                for channel in channels:
                    if channel not in self._moving:
                        self._moving.add(channel)
                        nursery.start_soon(self._move_all, channel)

    async def _move_all(self, channel: Channel) -> None:
        try:
            while channel.messages.withdrawn.waiting and self.broker.serves_channel(channel):
                if not await self._try_to_move(channel):
                    await trio.sleep(_RETRY_S)
        finally:
            self._moving.discard(channel)
            self._failure_logged.discard(channel)

    async def _try_to_move(self, channel: Channel) -> bool:
        """Move some messages. On an error, log it and return False."""
        try:
            error = await self._move_some(channel)
        except Exception:
            # A bug in the broker. The channel and its saved state keep the messages.
            logger.exception("%s/%s: dead letters could not be moved", channel.topic.name, channel.name)
            return False
        if error:
            self._log_failure(channel, error)
        else:
            self._failure_logged.discard(channel)
        return not error

    def _log_failure(self, channel: Channel, error: str) -> None:
        """Log the first of several failures in a row; a stopping broker is no failure."""
        if error != EXITING and channel not in self._failure_logged:
            self._failure_logged.add(channel)
            name, topic = f"{channel.topic.name}/{channel.name}", channel.settings.dead_letter_topic
            logger.error("%s: dead letters cannot go to topic %s, tried again: %s", name, topic, error)

    async def _move_some(self, channel: Channel) -> str:
        """Move some messages. Returns the reason of a failure, or an empty string."""
        topic_name = channel.settings.dead_letter_topic
        taken = channel.messages.withdrawn.take(_MOVE_MESSAGES)
        try:
            batches, error = await self._batches(channel.store, taken)
            if not self.broker.serves_channel(channel):
                raise PublishRefused(EXITING)
            letters, gone = _read(channel, taken, batches)
            if error is not None and not letters and not gone:
                raise error
            if letters:
                publication = _publication(letters)
                await self.topics.create(topic_name, DEAD_LETTERS)
                await self.topics.publish_durably(topic_name, publication, internal=True)
        except (PublishRefused, LogError, SaveError) as exc:
            self.delivery.put_back(channel, taken)
            return str(exc)
        except BaseException:
            self.delivery.put_back(channel, taken)
            raise
        channel.dispose(gone)
        if letters:
            finished = [letter.message for letter in letters]
            self.moved_letters.finish(channel, finished, topic_name, publication.metadata)
        self.delivery.put_back(channel, taken)  # the messages beyond _MOVE_BYTES
        return ""

    async def _batches(
        self, store: MessageStore, messages: Sequence[WithdrawnMessage]
    ) -> tuple[dict[int, Batch | None], LogReadError | None]:
        """Return the batches that hold these messages, without messages that need another read or cannot be read."""
        batches = {each.sequence: each.held or store.in_memory(each.sequence) for each in messages}
        missing = tuple([sequence for sequence, batch in batches.items() if batch is None])
        if not missing:
            return batches, None
        found = await self.readers.read_wanted(store, Wanted(None, missing))
        known = {sequence: batch for sequence, batch in batches.items() if batch is not None}
        return known | found.again, found.error


class _Letter(NamedTuple):
    """A message on its way to the dead-letter topic; `headers` as `protocol/headers.py` has them."""

    message: WithdrawnMessage
    origin: Origin
    body: bytes
    headers: str


def _publication(letters: Sequence[_Letter]) -> Publication:
    metadata = metadata_for_dead_letters([letter.origin for letter in letters])
    bodies = pack_messages([letter.body for letter in letters])
    return Publication([bodies], metadata=metadata, headers=[[letter.headers for letter in letters]])


def _read(
    channel: Channel, messages: Iterable[WithdrawnMessage], batches: Mapping[int, Batch | None]
) -> tuple[list[_Letter], list[WithdrawnMessage]]:
    """Return the first `_MOVE_BYTES` of these messages as letters, and the damaged messages.

    Messages without a batch could not be read now; they are skipped, so that they do not block the others.
    """
    topic = channel.topic
    letters: list[_Letter] = []
    gone: list[WithdrawnMessage] = []
    size = 0
    for message in messages:
        if message.sequence not in batches:
            continue
        batch = batches[message.sequence]
        if batch is None:
            gone.append(message)  # the log has reported the damage
            continue
        index = message.sequence - batch.base_sequence
        body, headers = batch.body(index), batch.headers(index)
        size += len(body) + len(headers)
        if letters and size > _MOVE_BYTES:
            break
        origin = Origin(
            topic=topic.name,
            channel=channel.name,
            id=batch.id(index).decode(),
            sequence=message.sequence,
            attempts=message.attempts,
            timestamp_ns=batch.timestamp_ns(index),
            reason=(message.reason or Reason.REQUEUED).value,
        )
        letters.append(_Letter(message, origin, body, headers))
    return letters, gone


def refuse_loop(broker: Broker, channel: Channel, changes: Mapping[str, Any]) -> None:
    """Raise SettingsError if these changes would create a cycle of dead-letter topics through the channel's topic."""
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
                f"dead_letter_topic {first} makes a cycle: its own dead letters end up in {name} again"
            )
        way += further
